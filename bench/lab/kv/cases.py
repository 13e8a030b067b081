"""The movers of `bench kv`, as pairs of processes, and the blocks that they move.

All movers copy the same scattered blocks from a source to a sink:

    shm, zmq, nixl     Baton's backends: two processes, each with a TransferEndpoint         ours
    memcpy             one memcpy per block between two mappings of a process      limit of shm
    tcp                two processes, scattered sendmsg and recvmsg_into           limit of zmq
    bare_nixl          two processes, prepared descriptors, READ, no Baton         limit of nixl
    shm-1to2-4KiB, …   one of two ranks of a sink pulls half of the heads, so a block has many
                       pieces: 4 KiB are pulled, the next 4 KiB are skipped. Limit: shm
    shm-2to1-4KiB, …   each of two ranks of a source gives half of the heads
    mooncake           two processes, Mooncake's transfer engine over tcp          peer of ours

A mover may have several *ways* (memcpy in C or over ctypes; tcp with calls of several sizes). A
limit is the speed of its mover's fastest way.

A case is a block size and a number of blocks: 1, 16, 256, and the number that makes 64 MiB. Larger
numbers are left out. Every pull uses new random blocks of both ends' pools of 96 MiB. All movers
get the same blocks.

All processes answer the same commands, the methods of `bench.lab.kv.worker.TransferWorker`:

    open_source(pool_bytes, block_sizes)        source     returns what its sink needs
    open_sink(pool_bytes, block_sizes, source)  sink
    offer(block_bytes, pulls, way)              source     called before the clock starts
    pull(block_bytes, pulls, offers, way)       sink       returns the seconds of each pull
    wipe(block_bytes, blocks)                   sink
    digest(end, block_bytes, blocks)            both       returns a hash of the blocks' bytes
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
# number of pulls of a case in one repetition, by number of blocks: short pulls vary most
NUM_PULLS = {1: 16, 16: 8}
LIMIT_OF = {"shm": "memcpy", "zmq": "tcp", "nixl": "bare_nixl"}
LAYER_BYTES = 8 * KIB  # K and V of two heads of 64 elements in bf16, 16 tokens
HEAD_BYTES = 2 * KIB  # K or V of one head in a layer
SPLITS = {"1to2": (1, 2), "2to1": (2, 1)}  # number of ranks of the source and of the sink

Blocks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KvPull:
    """One pull. Block i of `source_blocks` is copied to block i of `blocks` at the sink."""

    source_blocks: Blocks
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class KvCase:
    """A number of blocks of one size, which are pulled together."""

    block_bytes: int
    num_blocks: int
    is_whole: bool  # True if the case pulls the plan's total number of bytes

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of one pull."""
        return self.block_bytes * self.num_blocks

    @property
    def name(self) -> str:
        """Returns the name of the case in results: 64KiB, 64KiB/256, or 64KiB/latency for one
        block.
        """
        size = size_name(self.block_bytes)
        if self.is_whole:
            return size
        return f"{size}/latency" if self.num_blocks == 1 else f"{size}/{self.num_blocks}"

    @property
    def is_latency(self) -> bool:
        """Returns True if the result is the time of one block. Otherwise the result is bytes per
        second.
        """
        return self.num_blocks == 1 and not self.is_whole


@dataclass(frozen=True, slots=True)
class KvPulls:
    """All pulls of one benchmark. They are the same for every mover."""

    block_sizes: tuple[int, ...]
    num_repeats: int
    total_bytes: int = TOTAL_BYTES
    only_whole: bool = False  # True: cases with fewer blocks are left out
    times: int = 1  # number of times that each pull is repeated
    seed: int = 0

    @property
    def pool_bytes(self) -> int:
        """Returns the bytes of each pool: 1.5 times one pull, so that the blocks of a pull lie
        scattered.
        """
        return self.total_bytes * 3 // 2

    @property
    def cases(self) -> list[KvCase]:
        """Returns all cases by block size. For each size, the case with the most blocks is last."""
        cases = []
        for size in self.block_sizes:
            whole = self.total_bytes // size
            counts = () if self.only_whole else COUNTS
            cases += [KvCase(size, n, is_whole=False) for n in counts if n < whole]
            cases.append(KvCase(size, whole, is_whole=True))
        return cases

    def of(self, case: KvCase, repeat: int) -> list[KvPull]:
        """Returns the pulls of one repetition. Each pull has new blocks."""
        rng = Random(f"{self.seed}/{case.name}/{repeat}")
        pool = range(self.pool_bytes // case.block_bytes)
        number = case.num_blocks
        return [
            KvPull(tuple(rng.sample(pool, number)), tuple(rng.sample(pool, number)))
            for _ in range(NUM_PULLS.get(number, 1))
        ] * self.times


def layout_of(block_bytes: int) -> KVLayout:
    """Returns a KV layout whose blocks have this many bytes."""
    section = KVSection(num_layers=block_bytes // LAYER_BYTES, num_kv_heads=2, head_dim=64)
    layout = KVLayout(block_size=16, kv_format=KVFormat.BF16, sections=(section,))
    assert layout.block_bytes == block_bytes
    return layout


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """The heads that each rank of a source holds, and the heads that one rank of a sink holds."""

    sources: tuple[Shard, ...]
    sink: Shard
    piece_bytes: int

    def layout(self, block_bytes: int) -> KVLayout:
        """Returns the layout of whole blocks from which the sink pulls this many bytes per
        block.
        """
        num_heads = 2 * self.piece_bytes // HEAD_BYTES
        layer_bytes = 4 * self.piece_bytes // self.sink.size  # bytes of a layer at the sink
        section = KVSection(block_bytes // layer_bytes, num_heads, head_dim=64)
        return KVLayout(block_size=16, kv_format=KVFormat.BF16, sections=(section,))


def split_of(mover: str) -> tuple[str, HeadSplit | None]:
    """Returns the backend of a mover and, if the mover splits heads, its split."""
    backend, *rest = mover.split("-")
    if not rest:
        return backend, None
    split, piece = rest
    of_source, of_sink = SPLITS[split]
    sources = tuple(Shard(rank, of_source) for rank in range(of_source))
    return backend, HeadSplit(sources, Shard(0, of_sink), bytes_of(piece))


def limit_of(mover: str) -> str | None:
    """Returns the name of the mover that is this mover's limit; None if there is none."""
    backend, split = split_of(mover)
    return LIMIT_OF.get(backend) if split is None else backend


def bytes_of(size: str) -> int:
    """Returns the bytes of a size such as 64KiB. Inverse of `size_name`."""
    return int(size[:-3]) * (MIB if size.endswith("MiB") else KIB)


def size_name(num_bytes: int) -> str:
    """Returns a size as text, such as 64KiB or 1MiB."""
    return f"{num_bytes // MIB}MiB" if num_bytes % MIB == 0 else f"{num_bytes // KIB}KiB"


START_TIMEOUT_S = 60.0
PULL_TIMEOUT_S = 120.0
NIXL_PACKAGES = ("nixl_cu12", "nixl_cu13")
PEERS = Path(__file__).parents[2] / "peers"


class NotMovable(BatonError):
    """A mover cannot run on this machine. The message says why."""


class WrongBytes(BatonError):
    """A mover reported success, but the sink's blocks differ from the source's."""

    def __init__(self, mover: str, way: str, case: KvCase) -> None:
        told = f" ({way})" if way else ""
        super().__init__(f"{mover}{told} moved wrong bytes at {case.name}")


@dataclass(frozen=True, slots=True)
class Mover:
    """A source and a sink process. Both may be the same process."""

    name: str
    source: Driven
    sink: Driven

    @property
    def processes(self) -> tuple[Driven, ...]:
        """Returns the processes of the mover, without duplicates."""
        return (self.source,) if self.source is self.sink else (self.source, self.sink)

    def start(self) -> None:
        """Starts the processes without waiting for them."""
        for process in self.processes:
            process.start()

    def open(self, pulls: KvPulls) -> Answer:
        """Waits for the processes, opens their pools and connects them. Returns the facts that they
        report.
        """
        facts, *_ = [process.ready(START_TIMEOUT_S) for process in self.processes]
        pools = {"pool_bytes": pulls.pool_bytes, "block_sizes": pulls.block_sizes}
        source = self.source.ask("open_source", timeout_s=START_TIMEOUT_S, **pools)["source"]
        self.sink.ask("open_sink", timeout_s=START_TIMEOUT_S, source=source, **pools)
        return facts

    def move(self, way: str, case: KvCase, pulls: Sequence[KvPull]) -> list[float]:
        """Carries out the pulls one after the other. Returns the seconds of each pull."""
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
        """Pulls once into zeroed blocks and compares the bytes. Raises WrongBytes."""
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
    """Returns the mover of this name, which is not started yet. `peers` has the peers' Pythons by
    name. Raises NotMovable.
    """
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
    """Returns a pair (mover, way) for each way of the mover."""
    if not facts.get("ways"):
        raise DrivenFailed(mover.name, "it knows no way to move blocks", ())
    for way in facts["ways"]:
        yield mover.name, way
