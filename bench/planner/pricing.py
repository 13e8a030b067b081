"""Computes the step prices and the KV memory of one worker, for a model, GPUs and options.

The base is a worker in bf16 without any option. Its prices are a measured profile
(`bench.simulator.hardware`), or the roofline at 70 % of a GPU's peaks. With the roofline, tensor
parallelism over t GPUs adds two all-reduces per layer. An all-reduce sends 2·(t - 1)/t · d bf16
elements per token over each GPU's link, and takes 10 µs in addition. An option multiplies the
coefficients by the change of the roofline, and has no other effect:

    weights in 8 bits   A, D by the bytes that a step reads; B, E by 1/2 where the GPU multiplies
                        8 bits twice as fast, else not at all
    KV format           F and pulls by the bytes of a token; memory holds more tokens
    speculation         D·(1 + k·c)/m, E·(k + 1)/m, F/m for k drafted tokens, of which a step's
                        verification keeps m - 1 on average; a draft token costs c of a step

So a simulated step gives one token to each sequence and takes 1/m of a real step. TPOT is correct,
but single gaps between tokens are not. Measured gains are often smaller. For fp8 KV the formula
gives 51 % of the slope in bf16, vLLM reports 54 %, and AIConfigurator's tables give 78 %.

Sources: data sheets of NVIDIA (dense peaks, without sparsity). Rents are the middle of specialised
providers' on-demand prices in May 2026, from mercatus-ai.com, "cloud GPU pricing": H100 2.5-3.5 USD
an hour, H200 3.5-4.5, A100 of 80 GB 1.1-1.5. Prices of B200 and L40S are round figures without a
source. Users should replace all prices by their own.
"""

from dataclasses import dataclass

import msgspec

from bench.planner.model import BF16_BYTES, DenseModel
from bench.simulator.hardware import KV_SHARE, HardwareProfile
from engine.config import WeightFormat
from engine.demand import DecodeCost
from engine.errors import ConfigError
from engine.layout import KVFormat, KVLayout
from engine.worker.costs import PrefillCost, PullCost

REACHED = 0.7  # share of the peaks that a worker reaches
MAX_RANKS = 8  # most GPUs of one worker, which are linked in one machine
ALL_REDUCE_S = 1e-5
_ALL_REDUCES = 2  # number of all-reduces in a layer
_MIN_BLOCK, _MAX_BLOCK = 16, 512


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU: its peaks, memory and links."""

    name: str
    bf16_flops_per_s: float
    read_bytes_per_s: float
    memory_bytes: float
    link_bytes_per_s: float  # bandwidth to the other GPUs of the machine, in one direction
    network_bytes_per_s: float
    usd_per_hour: float
    has_fp8: bool = True  # True: fp8 is twice as fast as bf16, and int8 too

    def gain(self, weights: WeightFormat) -> float:
        """Returns the speed of multiplication in this format, relative to bf16."""
        if weights is WeightFormat.INT8 or (weights is WeightFormat.FP8 and self.has_fp8):
            return 2.0
        return 1.0


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("b200", 2250e12, 8e12, 180e9, 900e9, 50e9, 5.0),
        Gpu("h200", 989e12, 4.8e12, 141e9, 450e9, 50e9, 4.0),
        Gpu("h100", 989e12, 3.35e12, 80e9, 450e9, 50e9, 3.0),
        Gpu("a100", 312e12, 2.04e12, 80e9, 300e9, 25e9, 1.3, has_fp8=False),
        Gpu("l40s", 362e12, 0.864e12, 48e9, 32e9, 25e9, 1.0),
    )
}


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculation with `drafted` tokens per step, of which `accepted` are kept on average."""

    accepted: float
    drafted: int
    draft_cost: float = 0.0  # time of one drafted token, as a share of a decode step

    def __post_init__(self) -> None:
        if not 0 < self.accepted <= self.drafted:
            raise ConfigError(
                f"--accepted {self.accepted:g} must be above 0 and at most --drafted {self.drafted}"
            )
        if self.draft_cost < 0:
            raise ConfigError("--draft-cost must not be negative")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The options of a worker: formats, block size, speculation."""

    weights: WeightFormat = WeightFormat.BF16
    kv_format: KVFormat = KVFormat.BF16
    speculation: Speculation | None = None


@dataclass(frozen=True, slots=True)
class Platform:
    """The hardware of workers: a profile, or a kind of GPU."""

    name: str
    gpu: Gpu | None
    profile: HardwareProfile | None
    usd_per_gpu_hour: float

    @property
    def source(self) -> str:
        """Returns a text that says where the prices come from."""
        if self.profile is not None:
            return self.profile.source
        return f"roofline at {REACHED:.0%} of {self.name}'s peaks"

    def gain(self, weights: WeightFormat) -> float:
        """Returns the speed of multiplication in this format, relative to bf16. A profile's GPUs
        are twice as fast in 8 bits.
        """
        if self.gpu is not None:
            return self.gpu.gain(weights)
        return 1.0 if weights is WeightFormat.BF16 else 2.0

    def ranks(self) -> tuple[int, ...]:
        """Returns the possible numbers of GPUs per worker."""
        if self.profile is not None:
            return (self.profile.gpus,)
        return tuple(2**i for i in range(MAX_RANKS.bit_length()))


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """A worker that has memory for the model, and the use of its memory."""

    hardware: HardwareProfile
    weights_bytes: float
    kv_bytes: float

    @property
    def kv_tokens(self) -> int:
        """Returns the tokens of KV for which there is memory beside the weights."""
        layout = self.hardware.layout
        return self.hardware.num_blocks * layout.block_size


def block_size_for(input_tokens: float) -> int:
    """Returns the block size: a power of two near a sixteenth of a prompt, so that shared prefixes
    are found.
    """
    size = _MIN_BLOCK
    while size < _MAX_BLOCK and size * 16 < input_tokens:
        size *= 2
    return size


def worker_of(
    model: DenseModel, platform: Platform, options: ModelOptions, *, ranks: int, block_size: int
) -> PlannedWorker | None:
    """Returns a worker with `ranks` GPUs, or None if the weights leave no memory for KV."""
    weights_bytes = model.held_bytes(options.weights)
    memory_bytes = _memory_bytes(model, platform, ranks)
    layout = model.kv_layout(options.kv_format, block_size=block_size, ranks=ranks)
    kv_bytes = KV_SHARE * (memory_bytes - weights_bytes)
    num_blocks = int(kv_bytes // layout.block_bytes)
    if num_blocks < 1:
        return None
    base = platform.profile or _by_roofline(model, platform, ranks)
    hardware = _with_options(base, model, platform, options, layout=layout)
    hardware = msgspec.structs.replace(
        hardware,
        name=f"{model.name} on {ranks} × {platform.name}",
        num_blocks=num_blocks,
        usd_per_gpu_hour=platform.usd_per_gpu_hour,
    )
    return PlannedWorker(hardware, weights_bytes, num_blocks * layout.block_bytes)


def check_profile(model: DenseModel, profile: HardwareProfile) -> None:
    """Raises ConfigError if the profile's model has another KV layout."""
    ours = model.kv_layout(KVFormat.BF16, block_size=1).sections
    if profile.layout.kv_format is not KVFormat.BF16 or profile.layout.sections != ours:
        raise ConfigError(
            f"profile {profile.name} has KV of {profile.layout.kv_format} "
            f"{profile.layout.sections[0]}, model {model.name} of bf16 {ours[0]}"
        )


def _memory_bytes(model: DenseModel, platform: Platform, ranks: int) -> float:
    if platform.profile is not None:
        held = platform.profile.num_blocks * platform.profile.layout.block_bytes
        return held / KV_SHARE + model.held_bytes(WeightFormat.BF16)
    assert platform.gpu is not None
    return platform.gpu.memory_bytes * ranks


def _by_roofline(model: DenseModel, platform: Platform, ranks: int) -> HardwareProfile:
    """Returns a bf16 profile computed from peaks. It has memory for one block: the caller sets the
    memory.

    Arithmetic limits prompts, and memory bandwidth limits decoding. The formulas are those of
    `bench.common.roofline`. Every step reads all weights, so A and D are equal. A decoding row adds
    the time of its arithmetic.
    """
    gpu = platform.gpu
    assert gpu is not None
    layout = model.kv_layout(KVFormat.BF16, block_size=_MAX_BLOCK, ranks=ranks)
    flops_per_s = gpu.bf16_flops_per_s * ranks * REACHED
    bytes_per_s = gpu.read_bytes_per_s * ranks * REACHED
    reduces = _ALL_REDUCES * model.layers if ranks > 1 else 0
    sent_bytes = reduces * 2 * (ranks - 1) / ranks * model.hidden * BF16_BYTES
    sent_s = sent_bytes / gpu.link_bytes_per_s  # seconds per token
    fixed_s = model.read_bytes(WeightFormat.BF16) / bytes_per_s + reduces * ALL_REDUCE_S
    weights = model.layer_weights + model.head_weights
    attention = 2 * model.layers * model.heads * model.head_dim  # flops per squared token
    return HardwareProfile(
        name=model.name,
        source=platform.source,
        layout=layout,
        num_blocks=1,
        prefill=PrefillCost(
            fixed_s, 2 * model.layer_weights / flops_per_s + sent_s, attention / flops_per_s
        ),
        decode=DecodeCost(
            fixed_s,
            2 * weights / flops_per_s + sent_s,
            layout.block_bytes / layout.block_size / bytes_per_s,
        ),
        pull=PullCost(1e-3, 5e-6, gpu.network_bytes_per_s * ranks * REACHED),
        gpus=ranks,
    )


def _with_options(
    base: HardwareProfile,
    model: DenseModel,
    platform: Platform,
    options: ModelOptions,
    *,
    layout: KVLayout,
) -> HardwareProfile:
    reading = model.read_bytes(options.weights) / model.read_bytes(WeightFormat.BF16)
    computing = 1 / platform.gain(options.weights)
    context = (layout.block_bytes / layout.block_size) / base.kv_token_bytes
    prefill, decode = base.prefill, base.decode
    changed = DecodeCost(
        decode.fixed_s * reading, decode.row_s * computing, decode.context_s * context
    )
    return msgspec.structs.replace(
        base,
        layout=layout,
        prefill=PrefillCost(
            prefill.fixed_s * reading, prefill.token_s * computing, prefill.square_s
        ),
        decode=_speculating(changed, options.speculation),
        chunk_table=tuple((length, s * computing) for length, s in base.chunk_table),
    )


def _speculating(cost: DecodeCost, speculation: Speculation | None) -> DecodeCost:
    """Returns the profile's prices with speculation, per token of each sequence."""
    if speculation is None:
        return cost
    a_step, k = 1 + speculation.accepted, speculation.drafted
    return DecodeCost(
        cost.fixed_s * (1 + k * speculation.draft_cost) / a_step,
        cost.row_s * (k + 1) / a_step,
        cost.context_s / a_step,
    )
