"""Profiles of simulated workers: prices of steps and pulls, and KV memory.

A profile is one of the named profiles of this module, or a JSON file in the format of `baton
simulate --write-hardware`. A file may be the result of a fit to measured steps. All figures are for
one worker, with all its GPUs.

The price of a step in seconds; a prompt's chunk has n - p new tokens after p cached or computed
ones:

    only prompts     A + B·Σ(n - p) + C·Σ(n² - p²)
    only decoding    D + E·b + F·kv
    both             max(A, D) + the other terms of both, because the weights are read once

A profile with a `chunk_table` prices prompts by the number of new tokens only, interpolated between
the table's points. Dynamo's mocker prices prompts in this way, so comparisons with it need such a
table. The sum over the chunks of a long prompt is then linear in the prompt's length, unlike the
true price.

Workers and gateway may share the cores of one small machine (see `crowd`).

Sources: NVIDIA AIConfigurator's tables for H200 SXM and vLLM in bf16 (fits within 5 %, decode of
the 0.6B model within 13 %). Pulls are not in these tables: 40 GB/s a GPU of a 400 Gb/s network
card, 5 µs a descriptor (NIXL, measured), 1 ms for the rest. `thread-88m-int8` is one thread of a
server processor with AVX-512: its prompts of 1,024 tokens and its steps of four sequences take what
`baton bench fluid` measured.
"""

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.demand import DecodeCost
from engine.errors import ConfigError
from engine.layout import KVFormat, KVLayout, KVSection
from engine.worker.costs import PrefillCost, PullCost

GPU_BYTES = 141e9  # bytes of memory of an H200
KV_SHARE = 0.9  # share of the memory left by the weights that is used for KV


class HardwareProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of worker. `chunk_table` has pairs (new tokens, seconds), shortest first."""

    name: str
    source: str
    layout: KVLayout
    num_blocks: int
    prefill: PrefillCost
    decode: DecodeCost
    pull: PullCost
    chunk_table: tuple[tuple[int, float], ...] = ()
    max_batch_tokens: int = 8192
    chunk_tokens: int = 8192
    max_running: int = 256
    gpus: int = 1
    usd_per_gpu_hour: float = 4.0  # price of an H200, from `bench.planner.pricing`
    cores: int | None = None  # cores that all workers share; None: each worker has its own core
    gateway_load: float = 0.0  # cores that the gateway uses for each decoding worker

    def __post_init__(self) -> None:
        for name in ("num_blocks", "max_batch_tokens", "chunk_tokens", "max_running", "gpus"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive")
        if len(self.chunk_table) == 1:
            raise ValueError("chunk_table needs two points")
        if self.cores is not None and self.cores < 1:
            raise ValueError("cores must be positive")

    @property
    def kv_token_bytes(self) -> int:
        """Returns the bytes of one token's KV."""
        return self.layout.block_bytes // self.layout.block_size


class StepPrice(msgspec.Struct, frozen=True):
    """The sums that determine the price of a step. `num_new` and `squares` are sums over prompts
    only.
    """

    num_new: int = 0
    squares: int = 0
    num_rows: int = 0
    num_context: int = 0


class Pricing:
    """Computes prices from a profile."""

    def __init__(self, hardware: HardwareProfile) -> None:
        self._hardware = hardware
        self._lengths = [length for length, _ in hardware.chunk_table]

    def decode_s(self, num_rows: int, num_context: int) -> float:
        """Returns the seconds of a step that only decodes."""
        return self._hardware.decode.seconds(num_rows, num_context)

    def step_s(self, step: StepPrice) -> float:
        """Returns the seconds of any step."""
        decode = self._hardware.decode
        if not step.num_new:
            return decode.seconds(step.num_rows, step.num_context)
        decode_s = decode.row_s * step.num_rows + decode.context_s * step.num_context
        if self._lengths:
            return self._of_chunk(step.num_new) + decode_s
        prefill = self._hardware.prefill
        prefill_s = prefill.token_s * step.num_new + prefill.square_s * step.squares
        fixed_s = max(prefill.fixed_s, decode.fixed_s) if step.num_rows else prefill.fixed_s
        return fixed_s + prefill_s + decode_s

    def _of_chunk(self, num_new: int) -> float:
        """Interpolates in the table. Beyond its ends, extrapolates from the nearest two points."""
        table = self._hardware.chunk_table
        right = min(max(bisect_left(self._lengths, num_new), 1), len(table) - 1)
        (low, low_s), (high, high_s) = table[right - 1], table[right]
        return low_s + (high_s - low_s) * (num_new - low) / (high - low)


# ---------------------------------------------------------------- profiles


def _h200(  # noqa: PLR0913 - the columns of a table
    name: str,
    *,
    model: tuple[int, int, int],
    weights_bytes: float,
    gpus: int,
    prefill_ms: tuple[float, float, float],
    decode_ms: tuple[float, float, float],
    num_blocks: int | None = None,
    chunk_table: Sequence[tuple[int, float]] = (),
) -> HardwareProfile:
    """Makes a profile of H200s. `model` is layers, KV heads and head size; A, B, C and D, E, F are
    in ms.
    """
    layout = KVLayout(512, KVFormat.BF16, (KVSection(*model),))
    memory = KV_SHARE * (gpus * GPU_BYTES - weights_bytes)
    return HardwareProfile(
        name=name,
        source="AIConfigurator, H200 SXM, vLLM, bf16",
        layout=layout,
        num_blocks=num_blocks or int(memory // layout.block_bytes),
        prefill=PrefillCost(*(ms / 1000 for ms in prefill_ms)),
        decode=DecodeCost(*(ms / 1000 for ms in decode_ms)),
        pull=PullCost(fixed_s=1e-3, block_s=5e-6, bytes_per_s=40e9 * gpus),
        chunk_table=tuple((length, ms / 1000) for length, ms in chunk_table),
        gpus=gpus,
    )


# AIConfigurator's times to first token of a prompt without cached prefix, in milliseconds. Dynamo's
# mocker looks up a step's new tokens, of which there are 8,192 at most, in this table.
_QWEN3_32B_CHUNKS_MS = (
    (1, 17.6316),
    (512, 29.386),
    (1024, 53.678),
    (2048, 103.045),
    (4096, 222.433),
    (8192, 473.798),
)
_QWEN3_32B = (64, 8, 128)
_QWEN3_32B_PREFILL = (3.405, 4.921e-2, 8.41e-7)
_QWEN3_32B_DECODE = (10.71, 2.053e-2, 3.006e-5)
_QWEN3_32B_BYTES = 65.5e9
_QWEN3_32B_BLOCKS = 1400  # number of KV blocks of a worker in Dynamo's published replays

_PROFILES = (
    _h200(
        "h200-qwen3-0.6b",
        model=(28, 8, 128),
        weights_bytes=1.5e9,
        gpus=1,
        prefill_ms=(2.28, 1.593e-3, 1.779e-7),
        decode_ms=(1.464, 1.32e-3, 2.617e-5),
    ),
    _h200(
        "h200-qwen3-8b",
        model=(36, 8, 128),
        weights_bytes=16.4e9,
        gpus=1,
        prefill_ms=(2.117, 1.960e-2, 4.752e-7),
        decode_ms=(5.091, 8.63e-3, 3.39e-5),
    ),
    _h200(
        "h200-qwen3-32b-tp2",
        model=_QWEN3_32B,
        weights_bytes=_QWEN3_32B_BYTES,
        gpus=2,
        prefill_ms=_QWEN3_32B_PREFILL,
        decode_ms=_QWEN3_32B_DECODE,
        num_blocks=_QWEN3_32B_BLOCKS,
    ),
    _h200(
        "h200-qwen3-32b-tp2-linear",
        model=_QWEN3_32B,
        weights_bytes=_QWEN3_32B_BYTES,
        gpus=2,
        prefill_ms=(0.0, 5.784e-2, 0.0),
        decode_ms=_QWEN3_32B_DECODE,
        num_blocks=_QWEN3_32B_BLOCKS,
        chunk_table=_QWEN3_32B_CHUNKS_MS,
    ),
    _h200(
        "h200-llama-3.1-70b-tp8",
        model=(80, 8, 128),
        weights_bytes=141e9,
        gpus=8,
        prefill_ms=(5.523, 3.745e-2, 2.574e-7),
        decode_ms=(8.192, 2.26e-2, 9.729e-6),
    ),
)
_THREAD = HardwareProfile(
    name="thread-88m-int8",
    source="baton bench fluid, one thread, 88M in int8",
    layout=KVLayout(16, KVFormat.INT8, (KVSection(12, 4, 64),)),
    num_blocks=2048,
    prefill=PrefillCost(3e-3, 5.5e-4, 1.2e-7),
    decode=DecodeCost(4e-3, 1.2e-3, 2e-7),
    pull=PullCost(fixed_s=1e-3, block_s=3e-5, bytes_per_s=4e9),
    max_batch_tokens=512,
    chunk_tokens=512,
    gpus=1,
    usd_per_gpu_hour=0.05,
)
PROFILES = {profile.name: profile for profile in (*_PROFILES, _THREAD)}


def hardware_named(name: str) -> HardwareProfile:
    """Returns the named profile, or the profile in the file of this name. Raises ConfigError."""
    if name in PROFILES:
        return PROFILES[name]
    path = Path(name)
    if path.suffix != ".json" and not path.exists():
        raise ConfigError(f"hardware {name!r} is neither a file nor one of {', '.join(PROFILES)}")
    try:
        return msgspec.json.decode(path.read_bytes(), type=HardwareProfile)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from error


def write_hardware(hardware: HardwareProfile, path: Path) -> None:
    """Writes a profile in the format that `hardware_named` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(hardware), indent=2) + b"\n")
