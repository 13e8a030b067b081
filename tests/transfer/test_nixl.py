"""The NIXL transport between two processes of this host."""

import importlib.util
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import Incarnation, LeaseId, SeqId
from engine.worker.blocks import BlockId
from kvtransfer.lease.effects import Fetch, UseSource
from kvtransfer.memory import Region, SharedPool
from kvtransfer.messages import Attached, Identity, NixlOffer, Offers
from kvtransfer.records import RecordPiece
from kvtransfer.transports.nixl import NixlTransport
from kvtransfer.transports.nixl_agent import PACKAGES
from kvtransfer.transports.seam import BlocksArrived, BlocksFailed, TransportUnavailable
from kvtransfer.wire import agree

if not any(importlib.util.find_spec(package) for package in PACKAGES):
    pytest.skip(f"none of {', '.join(PACKAGES)} is installed", allow_module_level=True)

LAYOUT = KVLayout(16, KVFormat.FP32, (KVSection(4, 2, 16),))
NUM_BLOCKS, BLOCK_BYTES = 64, LAYOUT.block_bytes
IDENTITY = Identity("model", LAYOUT)
SEQ = SeqId("s")
DEADLINE_S = 30.0
# a forked process must not use the agents of its parent
SPAWN = multiprocessing.get_context("spawn")


# ---------------------------------------------------------------- processes


def ignore(*_: object) -> None:
    """Ignores the counted event."""


def opened(name: str, num_blocks: int = NUM_BLOCKS) -> tuple[NixlTransport, NixlOffer, SharedPool]:
    pool = SharedPool(num_blocks, BLOCK_BYTES)
    pool.open()
    transport = NixlTransport(name, pool.region(), record_bytes=BLOCK_BYTES, count=ignore)
    offer = transport.offer(Offers()).nixl
    assert offer is not None
    return transport, offer, pool


def use_of(offer: NixlOffer, num_blocks: int, pieces: Sequence[RecordPiece] | None) -> UseSource:
    wire = agree(IDENTITY, IDENTITY)
    if pieces is not None:
        wire = replace(wire, pieces=tuple(pieces))
    attached = Attached(Incarnation("life"), IDENTITY, num_blocks, Offers(nixl=offer))
    return UseSource(offer.agent, wire, attached)


def fetch_of(address: str, there: Sequence[int], here: Sequence[int]) -> Fetch:
    blocks = tuple(map(BlockId, here))
    return Fetch(SEQ, address, LeaseId("l"), tuple(range(len(here))), tuple(there), blocks)


def contents(num_blocks: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (num_blocks, BLOCK_BYTES), dtype=np.uint8)


def run_source(orders: Connection, name: str, num_blocks: int, seed: int) -> None:
    """Runs in the source's process: sends its offer, then carries out commands."""
    transport, offer, pool = opened(name, num_blocks)
    pool.blocks[:] = contents(num_blocks, seed)
    orders.send(offer)
    while (order := orders.recv()) != "end":
        if order == "idle":
            started_s, started_cpu_s = time.perf_counter(), time.process_time()
            select.select([], [], [], 1.0)
            idle_s = time.perf_counter() - started_s
            orders.send((time.process_time() - started_cpu_s) / idle_s)
    transport.stop()


def run_greedy_sink(orders: Connection, offer: NixlOffer) -> None:
    """Runs in a sink's process: reads again and again until it is killed."""
    transport, _, _ = opened(f"sink-{os.getpid()}")
    transport.open(use_of(offer, NUM_BLOCKS, None))
    everything = fetch_of(offer.agent, range(NUM_BLOCKS), range(NUM_BLOCKS))
    for number in range(10**9):
        ended = transport.fetch(everything)
        while not ended:
            ended = transport.poll((), may_wait=False)
        if number == 0:
            orders.send("reading")


@dataclass
class Source:
    """A process that offers its pool."""

    offer: NixlOffer
    orders: Connection
    process: Any
    bytes: np.ndarray

    def ask(self, order: str) -> Any:
        self.orders.send(order)
        assert self.orders.poll(DEADLINE_S), f"no answer to {order}"
        return self.orders.recv()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(DEADLINE_S)


@contextmanager
def source(
    name: str = "source", *, num_blocks: int = NUM_BLOCKS, seed: int = 1
) -> Iterator[Source]:
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=run_source, args=(theirs, name, num_blocks, seed))
    process.start()
    theirs.close()
    try:
        assert ours.poll(60), "the source did not start"
        yield Source(ours.recv(), ours, process, contents(num_blocks, seed))
    finally:
        process.kill()
        process.join(DEADLINE_S)
        process.close()
        ours.close()


@pytest.fixture(scope="module")
def lasting() -> Iterator[Source]:
    """Returns one source for all tests that only read from it."""
    with source("lasting") as other:
        yield other


@dataclass
class Sink:
    transport: NixlTransport
    pool: SharedPool

    def connect(
        self, there: Source, offer: NixlOffer | None = None, pieces: Any = None
    ) -> Callable[..., str | None]:
        """Returns a function that reads from the source. The function returns the reason of a
        failure, or None.
        """
        offer = offer or there.offer
        self.transport.open(use_of(offer, len(there.bytes), pieces))

        def read(there: Sequence[int], here: Sequence[int]) -> str | None:
            ended = list(self.transport.fetch(fetch_of(offer.agent, there, here)))
            return self.end(ended)

        return read

    def end(self, ended: list[Any]) -> str | None:
        """Waits until the read ends. Returns the reason of its failure, or None."""

        def has_ended() -> bool:
            ended.extend(self.transport.poll((), may_wait=False))
            return bool(ended)

        until(has_ended, "a read did not end")
        (news,) = ended
        assert isinstance(news, BlocksArrived | BlocksFailed)
        return news.reason if isinstance(news, BlocksFailed) else None


@contextmanager
def sink_of(num_blocks: int = NUM_BLOCKS) -> Iterator[Sink]:
    transport, _, pool = opened("sink", num_blocks)
    yield Sink(transport, pool)
    transport.stop()
    pool.close()


@pytest.fixture
def sink() -> Iterator[Sink]:
    with sink_of() as one:
        yield one


ALL = range(NUM_BLOCKS)


def until(holds: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline_s, what


# ---------------------------------------------------------------- reads


def test_only_the_pieces_of_each_record_are_read(sink, lasting):
    pieces = (RecordPiece(0, 64, 1000), RecordPiece(8192, 4096, 128))
    there, here = [63, 0, 31], [1, 62, 5]
    read = sink.connect(lasting, pieces=pieces)
    assert read(there, here) is None
    expected = np.zeros_like(lasting.bytes)
    expected[here, 64:1064] = lasting.bytes[there, :1000]
    expected[here, 4096:4224] = lasting.bytes[there, 8192:8320]
    np.testing.assert_array_equal(sink.pool.blocks, expected)


def test_a_source_may_have_more_blocks_than_the_sink(sink):
    with source(num_blocks=3 * NUM_BLOCKS) as other:
        read = sink.connect(other)
        assert read([3 * NUM_BLOCKS - 1], [0]) is None
        np.testing.assert_array_equal(sink.pool.blocks[0], other.bytes[-1])


@pytest.mark.parametrize(("there", "here"), [(NUM_BLOCKS, 0), (-1, 0), (0, NUM_BLOCKS), (0, -1)])
def test_a_block_outside_its_pool_is_refused_before_anything_is_read(sink, lasting, there, here):
    read = sink.connect(lasting)
    with pytest.raises(IndexError):
        read([1, there], [1, here])
    assert sink.transport.num_reads == 0
    assert read(ALL, ALL) is None
    assert sink.transport.num_restarts == 0


# ---------------------------------------------------------------- false offers


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"num_bytes": NUM_BLOCKS * BLOCK_BYTES - 1}, "smaller"),
        ({"kind": "FILE"}, "kind"),
        ({"address": -1}, "address"),
        ({"address": 2**64 - 1}, "address"),
        ({"agent": "another"}, "another agent"),
        ({"address": 4096}, "cannot be reached"),
        ({"metadata": b"nonsense"}, "cannot be reached"),
        ({"metadata": b""}, "cannot be reached"),
    ],
)
def test_a_false_offer_is_refused(sink, lasting, changed, reason):
    offer = msgspec.structs.replace(lasting.offer, **changed)
    with pytest.raises(TransportUnavailable, match=reason):
        sink.connect(lasting, offer)
    assert sink.connect(lasting)(ALL, ALL) is None


@pytest.mark.parametrize("piece", [RecordPiece(1, 0, BLOCK_BYTES), RecordPiece(0, 1, BLOCK_BYTES)])
def test_a_piece_that_exceeds_its_record_is_refused(sink, lasting, piece):
    with pytest.raises(TransportUnavailable, match="within"):
        sink.connect(lasting, pieces=[piece])


def test_a_host_without_nixl_gets_a_clear_error(monkeypatch):
    monkeypatch.setattr("kvtransfer.transports.nixl_agent.PACKAGES", ("no_such_nixl",))
    transport = NixlTransport("agent", Region(4096, 4096), record_bytes=4096, count=ignore)
    with pytest.raises(TransportUnavailable, match="no_such_nixl"):
        transport.offer(Offers())


# ---------------------------------------------------------------- ends and failures


def test_a_source_that_died_does_not_keep_others_from_being_read(sink):
    with source("first") as first, source("second", seed=5) as second:
        reads = [sink.connect(first), sink.connect(second)]
        assert [read(ALL, ALL) for read in reads] == [None, None]
        first.kill()
        assert reads[0](ALL, ALL) is not None
        assert reads[1](ALL, ALL) is None
        np.testing.assert_array_equal(sink.pool.blocks, second.bytes)


def test_a_restarted_source_can_be_read_after_the_old_one_died(sink):
    with source("incarnation-1") as old:
        assert sink.connect(old)(ALL, ALL) is None
        old.kill()
        sink.transport.close(old.offer.agent)
    with source("incarnation-2", seed=7) as new:
        assert sink.connect(new)(ALL, ALL) is None
        np.testing.assert_array_equal(sink.pool.blocks, new.bytes)


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_cancelled_read_of_a_stopped_source_ends_and_writes_no_more(monkeypatch, is_closed):
    """Uses tcp, where the source sends the bytes: they are in flight when the read is cancelled."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    num_blocks = 4096  # more bytes than the sockets buffer
    with source(num_blocks=num_blocks) as other, sink_of(num_blocks) as sink:
        everything = range(num_blocks)
        transport = sink.transport
        assert sink.connect(other)(everything, everything) is None
        other.signal(signal.SIGSTOP)
        assert not transport.fetch(fetch_of(other.offer.agent, everything, everything))
        transport.poll((), may_wait=False)
        assert transport.cancel(SEQ)
        if is_closed:  # after `close`, the transport reports nothing about the source
            transport.close(other.offer.agent)
            until(lambda: not transport.poll((), may_wait=False) and not transport.cancel(SEQ), "")
        else:
            assert sink.end([]) == "a cancelled read does not end"
        assert not transport.cancel(SEQ)
        assert transport.num_restarts == 1
        sink.pool.blocks[:] = 0
        other.signal(signal.SIGCONT)
        deadline_s = time.monotonic() + 0.5
        while time.monotonic() < deadline_s:  # a late write would happen within this time
            assert transport.poll((), may_wait=False) == []
            select.select([], [], [], 0.01)
        assert not sink.pool.blocks.any()


def test_a_source_outlives_sinks_that_are_killed_while_they_read(sink):
    with source() as other, ExitStack() as killed:
        for _ in range(3):
            ours, theirs = SPAWN.Pipe()
            killed.callback(ours.close)
            process = SPAWN.Process(target=run_greedy_sink, args=(theirs, other.offer))
            process.start()
            theirs.close()
            killed.callback(process.close)
            assert ours.poll(60), "the sink did not start"
            assert ours.recv() == "reading"
            process.kill()
            process.join(DEADLINE_S)
        assert sink.connect(other)(ALL, ALL) is None
        np.testing.assert_array_equal(sink.pool.blocks, other.bytes)


# ---------------------------------------------------------------- costs


def test_an_idle_agent_leaves_the_processor_alone(sink):
    with source() as other:
        assert sink.connect(other)(ALL, ALL) is None
        assert other.ask("idle") < 0.05


def test_closing_frees_threads_and_files():
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    with source() as other:

        def read_once() -> None:
            with sink_of() as sink:
                assert sink.connect(other)(ALL, ALL) is None

        read_once()  # the first read loads libraries, which remain loaded
        before = held()
        for _ in range(4):
            read_once()
        assert held() == before


USES_NIXL = """
import numpy as np
from kvtransfer.memory import Region
from kvtransfer.messages import Offers
from kvtransfer.transports.nixl import NixlTransport
memory = np.zeros(2**20, np.uint8)
region = Region(memory.ctypes.data, memory.nbytes)
transport = NixlTransport("one", region, record_bytes=4096, count=print)
transport.offer(Offers())
transport.stop()
print("closed", flush=True)
"""


def test_a_process_that_used_nixl_exits_cleanly():
    done = subprocess.run(
        [sys.executable, "-c", USES_NIXL], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr
