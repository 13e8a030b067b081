"""The plan of one `bench kv`: cases, orders and block lists, from its options. Pure.

All movers move the same scattered blocks from one place to another:

    shm, zmq, nixl     Baton's backends: two processes, each with a TransferEndpoint         ours
    memcpy             one memcpy a block between two mappings of one process      limit of shm
    tcp                two processes, scattered sendmsg and recvmsg_into           limit of zmq
    bare_nixl          two processes, prepared descriptors, READ, no Baton         limit of nixl
    shm-1to2-4KiB, …   a rank of a sink of two pulls half of the heads: 4 KiB, then as many to skip.
                       So a block has many pieces. With one piece it is shm, its limit
    shm-2to1-4KiB, …   two ranks of a source give half of the heads each
    mooncake           two processes, Mooncake's transfer engine over tcp          peer of ours

A mover may have several *ways* (memcpy in C or over ctypes; tcp with calls of several sizes). The
fastest way of a limit counts.

A case is a block size and a number of blocks: 1, 16, 256, and the number that makes 64 MiB. Larger
numbers are left out. Every pull draws new blocks, on both sides, from pools of 96 MiB. All movers
get the same blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from bench.common.options import PeerProgram, check_choices
from bench.common.report import Scalar
from bench.common.shapes import shape_named
from engine.errors import ConfigError
from engine.layout import KVFormat, KVLayout, KVSection, Shard

KIB = 2**10
MIB = 2**20
BLOCK_SIZES = (16 * KIB, 64 * KIB, 256 * KIB, 1 * MIB)
QUICK_BLOCK_SIZES = (64 * KIB, 1 * MIB)
COUNTS = (1, 16, 256)
TOTAL_BYTES = 64 * MIB
NUM_PULLS = {1: 16, 16: 8}  # of one case in one repetition: short ones vary most
BACKENDS = ("shm", "zmq", "nixl")
HANDOFF_TRANSPORTS = ("zmq", "shm")
LIMIT_OF = {"shm": "memcpy", "zmq": "tcp", "nixl": "bare_nixl"}
PEERS = ("mooncake", "nixl")
PROMPT_LEN = 2048
LAYER_BYTES = 8 * KIB  # K and V of two heads of 64 elements in bf16, 16 tokens
HEAD_BYTES = 2 * KIB  # K or V of one of them
SPLITS = {"1to2": (1, 2), "2to1": (2, 1)}  # ranks of the source and of the sink

Blocks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KvPull:
    """One pull: block i of `source_blocks` goes to block i of `blocks` at the sink."""

    source_blocks: Blocks
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class KvCase:
    """A number of blocks of one size, moved together."""

    block_bytes: int
    num_blocks: int
    is_whole: bool  # as many blocks as make the plan's total

    @property
    def num_bytes(self) -> int:
        """Bytes of one pull."""
        return self.block_bytes * self.num_blocks

    @property
    def name(self) -> str:
        """Its name in results, behind the mover's: 64KiB, 64KiB/256, or 64KiB/latency for one."""
        size = size_name(self.block_bytes)
        if self.is_whole:
            return size
        return f"{size}/latency" if self.num_blocks == 1 else f"{size}/{self.num_blocks}"

    @property
    def is_latency(self) -> bool:
        """True if the result is the time of one block and not bytes per second."""
        return self.num_blocks == 1 and not self.is_whole


@dataclass(frozen=True, slots=True)
class HandoffPlan:
    """Requests to `baton serve`, one at a time, whose prompts begin differently."""

    shape: str
    transports: tuple[str, ...]
    num_requests: int  # in one repetition
    num_repeats: int
    prompt_len: int = PROMPT_LEN


@dataclass(frozen=True, slots=True)
class KvPlan:
    """One benchmark of KV transfer."""

    block_sizes: tuple[int, ...]
    backends: tuple[str, ...]
    num_repeats: int
    handoff: HandoffPlan | None
    peers: tuple[PeerProgram, ...] = ()
    piece_sizes: tuple[int, ...] = ()  # of a record, where ranks hold half of the heads
    total_bytes: int = TOTAL_BYTES
    seed: int = 0
    is_quick: bool = False

    @property
    def pool_bytes(self) -> int:
        """Bytes of each pool: 1.5 times those of one pull, so that its blocks lie scattered."""
        return self.total_bytes * 3 // 2

    @property
    def ours(self) -> tuple[str, ...]:
        """The movers that are Baton's: each backend, and with each split of the heads."""
        splits = [(name, piece) for name in SPLITS for piece in self.piece_sizes]
        return self.backends + tuple(
            f"{backend}-{name}-{size_name(piece)}"
            for backend in self.backends
            for name, piece in splits
        )

    @property
    def limits(self) -> tuple[str, ...]:
        """The movers that are limits of the backends."""
        return tuple(LIMIT_OF[backend] for backend in self.backends)


def check(plan: KvPlan) -> KvPlan:
    """Returns the plan. Raises ConfigError, which names the option that is wrong."""
    check_choices("--backends", plan.backends, BACKENDS)
    if not plan.block_sizes:
        raise ConfigError("--block-sizes: none given")
    for size in plan.block_sizes:
        if size < 1 or size % LAYER_BYTES or plan.total_bytes % size:
            raise ConfigError(
                f"--block-sizes must be multiples of {LAYER_BYTES // KIB} KiB that divide"
                f" {plan.total_bytes // MIB} MiB: {size / KIB:g} KiB is none"
            )
    for size in plan.piece_sizes:
        if size < 1 or size % HEAD_BYTES or any(block % (4 * size) for block in plan.block_sizes):
            raise ConfigError(
                f"--shards must be multiples of {HEAD_BYTES // KIB} KiB of which each block has"
                f" four, or a multiple: {size / KIB:g} KiB is none"
            )
    if plan.handoff is not None:
        shape_named(plan.handoff.shape)
        if plan.handoff.prompt_len < 1:
            raise ConfigError(f"--prompt-len must be positive: {plan.handoff.prompt_len}")
    return plan


def quick(plan: KvPlan) -> KvPlan:
    """A smaller plan, which takes under 50 s on two cores."""
    handoff = plan.handoff
    return replace(
        plan,
        block_sizes=QUICK_BLOCK_SIZES,
        num_repeats=min(plan.num_repeats, 3),
        handoff=handoff
        and replace(handoff, transports=handoff.transports[:1], num_requests=2, num_repeats=1),
        is_quick=True,
    )


def cases_of(plan: KvPlan) -> list[KvCase]:
    """All cases, grouped by block size, each with its largest number of blocks last."""
    cases = []
    for size in plan.block_sizes:
        whole = plan.total_bytes // size
        cases += [KvCase(size, n, is_whole=False) for n in COUNTS if n < whole]
        cases.append(KvCase(size, whole, is_whole=True))
    return cases


def pulls_of(plan: KvPlan, case: KvCase, repeat: int) -> list[KvPull]:
    """The pulls of one repetition: the same for every mover, with new blocks in every pull."""
    rng = Random(f"{plan.seed}/{case.name}/{repeat}")
    pool = range(plan.pool_bytes // case.block_bytes)
    return [
        KvPull(tuple(rng.sample(pool, case.num_blocks)), tuple(rng.sample(pool, case.num_blocks)))
        for _ in range(NUM_PULLS.get(case.num_blocks, 1))
    ]


def order_of(
    plan: KvPlan, ways: Sequence[tuple[str, str]], repeat: int
) -> list[tuple[str, str, KvCase]]:
    """Every way of every mover with every case, once, in the order of that repetition."""
    order = [(mover, way, case) for mover, way in ways for case in cases_of(plan)]
    Random(f"{plan.seed}/order/{repeat}").shuffle(order)
    return order


def layout_of(block_bytes: int) -> KVLayout:
    """A layout with blocks of that many bytes."""
    section = KVSection(num_layers=block_bytes // LAYER_BYTES, num_kv_heads=2, head_dim=64)
    layout = KVLayout(block_size=16, kv_format=KVFormat.BF16, sections=(section,))
    assert layout.block_bytes == block_bytes
    return layout


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """The shares of the heads that the ranks of a source and one rank of a sink hold."""

    sources: tuple[Shard, ...]
    sink: Shard
    piece_bytes: int

    def layout(self, block_bytes: int) -> KVLayout:
        """Returns the layout of whole blocks, of which the sink pulls that many bytes."""
        num_heads = 2 * self.piece_bytes // HEAD_BYTES
        layer_bytes = 4 * self.piece_bytes // self.sink.size  # at the sink
        section = KVSection(block_bytes // layer_bytes, num_heads, head_dim=64)
        return KVLayout(block_size=16, kv_format=KVFormat.BF16, sections=(section,))


def split_of(mover: str) -> tuple[str, HeadSplit | None]:
    """Returns the backend of a mover, and its split of the heads if it has one."""
    backend, *rest = mover.split("-")
    if not rest:
        return backend, None
    split, piece = rest
    of_source, of_sink = SPLITS[split]
    sources = tuple(Shard(rank, of_source) for rank in range(of_source))
    return backend, HeadSplit(sources, Shard(0, of_sink), bytes_of(piece))


def limit_of(mover: str) -> str | None:
    """Returns the mover that is the limit of this one."""
    backend, split = split_of(mover)
    return LIMIT_OF.get(backend) if split is None else backend


def bytes_of(size: str) -> int:
    """The inverse of `size_name`."""
    return int(size[:-3]) * (MIB if size.endswith("MiB") else KIB)


def size_name(num_bytes: int) -> str:
    """A size as text: 64KiB, 1MiB."""
    return f"{num_bytes // MIB}MiB" if num_bytes % MIB == 0 else f"{num_bytes // KIB}KiB"


def config_of(plan: KvPlan) -> dict[str, Scalar]:
    """The plan as a flat mapping for the report."""
    return {
        "backends": ",".join(plan.backends),
        "block_sizes": ",".join(map(size_name, plan.block_sizes)),
        "total_bytes": plan.total_bytes,
        "pool_bytes": plan.pool_bytes,
        "piece_sizes": ",".join(map(size_name, plan.piece_sizes)),
        "num_repeats": plan.num_repeats,
        "quick": plan.is_quick,
        **(_config_of_handoff(plan.handoff) if plan.handoff else {}),
    }


def _config_of_handoff(plan: HandoffPlan) -> dict[str, Scalar]:
    return {
        "handoff_shape": plan.shape,
        "handoff_prompt_len": plan.prompt_len,
        "handoff_requests": plan.num_requests,
        "handoff_repeats": plan.num_repeats,
    }
