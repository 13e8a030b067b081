"""The plan of one `bench store`: its parts and their sizes. Pure.

    ttft      time to the first token of long prompts: computed, and pulled from the store's memory
              after all workers were killed, and from its disk after everything was stopped
    memory    pulls out of a store's slab beside pulls between workers, and beside memcpy
    disk      loads from disk beside `fio`, at the same size and depth, on the same directory
    itl       gaps of running streams while a store takes blocks and writes them down, beside the
              same without a store
    recovery  the start of a store with many blocks on disk
    turns     clients whose histories do not all fit the workers, with and without a store

Parts that need a deployment run a model of a named shape with random weights. Each has one prefill
worker and one decode worker of one thread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from random import Random

from bench.common.options import PeerProgram
from bench.common.report import Scalar
from bench.common.shapes import shape_named
from bench.kv.plan import KIB, MIB, KvPlan
from bench.lab.streams import StreamAsk
from engine.errors import ConfigError

BLOCK_TOKENS = 16
KV_BYTES = 4  # of one element, as workers on a CPU keep it
PULL_SIZES = (64 * KIB, 1 * MIB)  # beside the size of the shape's own blocks
PULL_TOTAL_BYTES = 48 * MIB
PULLS_IN_A_REPETITION = 5
DISK_TOTAL_BYTES = 512 * MIB
STREAMS = StreamAsk(at_once=4, input_len=64, output_len=480)
PROMPTS = StreamAsk(at_once=1, input_len=512, output_len=1)  # whose blocks the store takes
DISK_DEPTH = 32  # requests under way at once
PEERS = ("vllm",)
MIN_PROMPT_LEN = 2 * BLOCK_TOKENS
QUICK_PROMPT_LEN = 512
SERVED: Mapping[str, Scalar] = {"--prefill": 1, "--decode": 1, "--threads": 1, "--weights": "int8"}


class StorePart(StrEnum):
    """One measurement of `bench store`."""

    TTFT = "ttft"
    MEMORY = "memory"
    DISK = "disk"
    ITL = "itl"
    RECOVERY = "recovery"
    TURNS = "turns"


QUICK_PARTS = (StorePart.TTFT, StorePart.MEMORY, StorePart.DISK, StorePart.RECOVERY)


class StreamSetting(StrEnum):
    """The deployment behind the streams of `itl`. `AGAIN` repeats `OFF` and shows the noise."""

    OFF = "off"
    ON = "on"
    AGAIN = "again"


@dataclass(frozen=True, slots=True)
class TurnLoad:
    """Clients in a closed loop, whose prompts grow with each turn."""

    clients: int = 20
    turns: int = 10
    input_len: int = 64  # that a turn adds
    output_len: int = 16
    worker_mib: int = 64  # of KV: for some 2,700 of 25,600 tokens of the 88 M shape

    @property
    def num_requests(self) -> int:
        """Requests of all clients."""
        return self.clients * self.turns


@dataclass(frozen=True, slots=True)
class StorePlan:
    """One benchmark of the store. `disk` is a directory on the disk that is measured."""

    disk: Path
    parts: tuple[StorePart, ...] = tuple(StorePart)
    shape: str = "88m"
    prompt_len: int = 2048
    num_prompts: int = 5
    num_repeats: int = 5
    num_recovered: int = 1_000_000
    peers: tuple[PeerProgram, ...] = ()
    turns: TurnLoad = TurnLoad()
    store_mib: int = 1024
    seed: int = 0
    is_quick: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the shape."""
        shape = shape_named(self.shape)
        per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * KV_BYTES
        return BLOCK_TOKENS * per_token

    @property
    def cached_len(self) -> int:
        """Tokens of a prompt that can be pulled: at least one is left to compute."""
        return (self.prompt_len - 1) // BLOCK_TOKENS * BLOCK_TOKENS

    @property
    def pulls(self) -> KvPlan:
        """The pulls of `memory`: those of `bench kv`, over shared memory only."""
        sizes = dict.fromkeys((PULL_SIZES[0], self.block_bytes, PULL_SIZES[1]))
        return KvPlan(
            block_sizes=tuple(sizes),
            backends=("shm",),
            num_repeats=self.num_repeats,
            handoff=None,
            total_bytes=PULL_TOTAL_BYTES,
            seed=self.seed,
        )


def check(plan: StorePlan) -> StorePlan:
    """Returns the plan. Raises ConfigError, which names the option that is wrong."""
    if not plan.parts:
        raise ConfigError("--parts: none given")
    shape = shape_named(plan.shape)
    if not MIN_PROMPT_LEN <= plan.prompt_len < shape.max_positions:
        raise ConfigError(
            f"--prompt-len must be {MIN_PROMPT_LEN} to {shape.max_positions - 1},"
            f" not {plan.prompt_len}"
        )
    if not plan.disk.is_dir():
        raise ConfigError(f"--disk {plan.disk} is no directory")
    return plan


def quick(plan: StorePlan) -> StorePlan:
    """A smaller plan, which takes under 50 s: short prompts, and no comparisons under load."""
    return replace(
        plan,
        parts=tuple(part for part in plan.parts if part in QUICK_PARTS),
        prompt_len=min(plan.prompt_len, QUICK_PROMPT_LEN),
        num_prompts=min(plan.num_prompts, 3),
        num_repeats=min(plan.num_repeats, 2),
        num_recovered=min(plan.num_recovered, 100_000),
        peers=(),
        is_quick=True,
    )


def order_of_streams(plan: StorePlan, repeat: int) -> list[StreamSetting]:
    """All settings, in that repetition's own order."""
    order = list(StreamSetting)
    Random(f"{plan.seed}/streams/{repeat}").shuffle(order)
    return order


def store_prompts(plan: StorePlan, vocab: Sequence[int], num: int, *, name: str) -> list[list[int]]:
    """Prompts of token ids with different beginnings; `name` tells one set from another."""
    rng = Random(f"{plan.seed}/{name}")
    return [rng.choices(vocab, k=plan.prompt_len) for _ in range(num)]


def config_of(plan: StorePlan) -> dict[str, Scalar]:
    """The plan as a flat mapping for the report. The directory is not named: it is a machine's."""
    turns = plan.turns
    return {
        "parts": ",".join(plan.parts),
        "shape": plan.shape,
        "block_bytes": plan.block_bytes,
        "prompt_len": plan.prompt_len,
        "num_prompts": plan.num_prompts,
        "num_repeats": plan.num_repeats,
        "num_recovered": plan.num_recovered,
        "store_mib": plan.store_mib,
        "disk_depth": DISK_DEPTH,
        "turns": f"{turns.clients}x{turns.turns} of {turns.input_len}+{turns.output_len} tokens",
        "turns_worker_mib": turns.worker_mib,
        "quick": plan.is_quick,
    }
