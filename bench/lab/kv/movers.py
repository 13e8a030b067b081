"""Runs the movers of `bench kv` as pairs of processes: starts them and sends them commands.

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
from types import MappingProxyType

from bench.common.options import environment_of_peers
from bench.lab.kv.cases import KvCase, KvPull, KvPulls
from bench.processes.driven import Answer, Driven, DrivenFailed
from engine.errors import BatonError

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
