"""The movers of `bench kv`, as pairs of processes, and the blocks that they move.

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

All processes answer the same commands, the methods of `bench.lab.kv.worker.TransferWorker`:

    open_source(pool_bytes, block_sizes)        source     returns what its sink needs
    open_sink(pool_bytes, block_sizes, source)  sink
    offer(block_bytes, pulls, way)              source     before the clock starts
    pull(block_bytes, pulls, offers, way)       sink       seconds of each pull
    wipe(block_bytes, blocks)                   sink
    digest(end, block_bytes, blocks)            both       of these blocks' bytes, in this order
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from types import MappingProxyType

from bench.common.options import environment_of_peers
from bench.processes.driven import Answer, Driven, DrivenFailed
from engine.errors import BatonError
from engine.layout import KVFormat, KVLayout, KVSection, Shard

KIB = 2**10
MIB = 2**20
COUNTS = (1, 16, 256)
TOTAL_BYTES = 64 * MIB
NUM_PULLS = {1: 16, 16: 8}  # pulls of one case in one repetition: short pulls vary most
LIMIT_OF = {"shm": "memcpy", "zmq": "tcp", "nixl": "bare_nixl"}
LAYER_BYTES = 8 * KIB  # K and V of two heads of 64 elements in bf16, 16 tokens
HEAD_BYTES = 2 * KIB  # K or V of one head
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
    is_whole: bool  # True if the case moves the plan's total

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
class KvPulls:
    """The pulls of one benchmark: the same for every mover."""

    block_sizes: tuple[int, ...]
    num_repeats: int
    total_bytes: int = TOTAL_BYTES
    only_whole: bool = False  # True: no cases of fewer blocks
    times: int = 1  # number of times that each pull is repeated
    seed: int = 0

    @property
    def pool_bytes(self) -> int:
        """Bytes of each pool: 1.5 times one pull's, so that its blocks lie scattered."""
        return self.total_bytes * 3 // 2

    @property
    def cases(self) -> list[KvCase]:
        """All cases, grouped by block size, each with its largest number of blocks last."""
        cases = []
        for size in self.block_sizes:
            whole = self.total_bytes // size
            counts = () if self.only_whole else COUNTS
            cases += [KvCase(size, n, is_whole=False) for n in counts if n < whole]
            cases.append(KvCase(size, whole, is_whole=True))
        return cases

    def of(self, case: KvCase, repeat: int) -> list[KvPull]:
        """The pulls of one repetition, with new blocks in every pull."""
        rng = Random(f"{self.seed}/{case.name}/{repeat}")
        pool = range(self.pool_bytes // case.block_bytes)
        number = case.num_blocks
        return [
            KvPull(tuple(rng.sample(pool, number)), tuple(rng.sample(pool, number)))
            for _ in range(NUM_PULLS.get(number, 1))
        ] * self.times


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


START_TIMEOUT_S = 60.0
PULL_TIMEOUT_S = 120.0
NIXL_PACKAGES = ("nixl_cu12", "nixl_cu13")
PEERS = Path(__file__).parents[2] / "peers"


class NotMovable(BatonError):
    """This machine cannot run a mover; the message says why."""


class WrongBytes(BatonError):
    """A mover reported success, but the blocks differ."""

    def __init__(self, mover: str, way: str, case: KvCase) -> None:
        told = f" ({way})" if way else ""
        super().__init__(f"{mover}{told} moved wrong bytes at {case.name}")


@dataclass(frozen=True, slots=True)
class Mover:
    """A source and a sink. They may be one process."""

    name: str
    source: Driven
    sink: Driven

    @property
    def processes(self) -> tuple[Driven, ...]:
        """Each of its processes, once."""
        return (self.source,) if self.source is self.sink else (self.source, self.sink)

    def start(self) -> None:
        """Starts the processes, without waiting for them."""
        for process in self.processes:
            process.start()

    def open(self, pulls: KvPulls) -> Answer:
        """Waits for the processes, opens and connects their pools; returns what they report."""
        facts, *_ = [process.ready(START_TIMEOUT_S) for process in self.processes]
        pools = {"pool_bytes": pulls.pool_bytes, "block_sizes": pulls.block_sizes}
        source = self.source.ask("open_source", timeout_s=START_TIMEOUT_S, **pools)["source"]
        self.sink.ask("open_sink", timeout_s=START_TIMEOUT_S, source=source, **pools)
        return facts

    def move(self, way: str, case: KvCase, pulls: Sequence[KvPull]) -> list[float]:
        """Carries out the pulls one after the other; returns the seconds of each."""
        offered = self.source.ask(
            "offer",
            timeout_s=PULL_TIMEOUT_S,
            block_bytes=case.block_bytes,
            pulls=[pull.source_blocks for pull in pulls],
            way=way,
        )
        pulled = self.sink.ask(
            "pull",
            timeout_s=PULL_TIMEOUT_S,
            block_bytes=case.block_bytes,
            pulls=[(pull.source_blocks, pull.blocks) for pull in pulls],
            offers=offered["offers"],
            way=way,
        )
        return [float(seconds) for seconds in pulled["seconds"]]

    def verify(self, way: str, case: KvCase, pull: KvPull) -> None:
        """Moves once into wiped blocks, and compares the bytes. Raises WrongBytes."""
        size = case.block_bytes
        self.sink.ask("wipe", timeout_s=PULL_TIMEOUT_S, block_bytes=size, blocks=pull.blocks)
        self.move(way, case, [pull])
        ends = (self.source, "source", pull.source_blocks), (self.sink, "sink", pull.blocks)
        there, here = (
            process.ask(
                "digest", timeout_s=PULL_TIMEOUT_S, end=end, block_bytes=size, blocks=blocks
            )["digest"]
            for process, end, blocks in ends
        )
        if there != here:
            raise WrongBytes(self.name, way, case)

    def close(self) -> None:
        """Ends the processes."""
        for process in self.processes:
            process.close()


def mover_of(name: str, peers: Mapping[str, Path] = MappingProxyType({})) -> Mover:
    """The mover of that name, not started; `peers` are Pythons by name. Raises NotMovable."""
    command = _command(name, peers)
    if name == "memcpy":
        both = Driven(name, command)
        return Mover(name, both, both)
    environment = None if command[0] == sys.executable else environment_of_peers()
    return Mover(
        name,
        Driven(f"{name} source", command, environment),
        Driven(f"{name} sink", command, environment),
    )


def _command(name: str, peers: Mapping[str, Path]) -> list[str]:
    if name in ("memcpy", "tcp"):
        return [sys.executable, "-m", "bench.lab.kv.limits", name]
    if name == "mooncake":
        return [str(peers[name]), str(PEERS / "mooncake_peer.py")]
    if name == "bare_nixl":
        return [str(_nixl_python(peers)), str(PEERS / "nixl_peer.py")]
    return [sys.executable, "-m", "bench.lab.kv.worker", name]


def _nixl_python(peers: Mapping[str, Path]) -> Path:
    if "nixl" in peers:
        return peers["nixl"]
    if not any(find_spec(package) for package in NIXL_PACKAGES):
        raise NotMovable("NIXL is not installed (pip install 'baton-serve[nixl]')")
    return Path(sys.executable)


def ways_of(mover: Mover, facts: Answer) -> Iterator[tuple[str, str]]:
    """Pairs (mover, way) for each way that the mover knows."""
    if not facts.get("ways"):
        raise DrivenFailed(mover.name, "it knows no way to move blocks", ())
    for way in facts["ways"]:
        yield mover.name, way
