"""The NIXL transport between two processes of this host."""

import importlib.util
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import pytest

from kvtransfer.memory import Region, SharedPool
from kvtransfer.messages import NixlOffer
from kvtransfer.nixl_backend import PACKAGES, NixlAgent, NixlReader, NixlUnavailable
from kvtransfer.records import RecordPiece

if not any(importlib.util.find_spec(package) for package in PACKAGES):
    pytest.skip(f"none of {', '.join(PACKAGES)} is installed", allow_module_level=True)

NUM_BLOCKS, BLOCK_BYTES = 64, 16384
DEADLINE_S = 30.0
SPAWN = multiprocessing.get_context("spawn")  # a fork must not use the agents of its parent


# ---------------------------------------------------------------- processes


def open_agent(name: str, num_blocks: int = NUM_BLOCKS) -> tuple[NixlAgent, SharedPool]:
    pool = SharedPool(num_blocks, BLOCK_BYTES)
    pool.open()
    agent = NixlAgent(name, pool.region(), record_bytes=BLOCK_BYTES)
    agent.open()
    return agent, pool


def contents(num_blocks: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (num_blocks, BLOCK_BYTES), dtype=np.uint8)


def run_source(orders: Connection, name: str, num_blocks: int, seed: int) -> None:
    """A source's process: sends its offer, then obeys commands."""
    agent, pool = open_agent(name, num_blocks)
    pool.blocks[:] = contents(num_blocks, seed)
    orders.send(agent.offer())
    while (order := orders.recv()) != "end":
        if order == "notifications":
            orders.send(agent.progress())
        elif order == "idle":
            started_s, started_cpu_s = time.perf_counter(), time.process_time()
            select.select([], [], [], 1.0)
            idle_s = time.perf_counter() - started_s
            orders.send((time.process_time() - started_cpu_s) / idle_s)
    agent.close()


def run_greedy_sink(orders: Connection, offer: NixlOffer) -> None:
    """A sink's process that reads again and again, until it is killed."""
    agent, _ = open_agent(f"sink-{os.getpid()}")
    reader = agent.connect(offer, NUM_BLOCKS, record_bytes=BLOCK_BYTES)
    everything = range(NUM_BLOCKS)
    for read_id in range(10**9):
        reader.fetch(read_id, everything, everything)
        while not reader.poll():
            pass
        if read_id == 0:
            orders.send("reading")


@dataclass
class Source:
    """Another process that offers its pool."""

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
    """A source of all tests that only read from it."""
    with source("lasting") as other:
        yield other


@dataclass
class Sink:
    agent: NixlAgent
    pool: SharedPool

    def connect(self, there: Source, **kwargs: Any) -> NixlReader:
        return self.agent.connect(there.offer, len(there.bytes), record_bytes=BLOCK_BYTES, **kwargs)


@pytest.fixture
def sink() -> Iterator[Sink]:
    agent, pool = open_agent("sink")
    yield Sink(agent, pool)
    agent.close()
    pool.close()


def ends(reader: NixlReader, num: int = 1) -> dict[int, str | None]:
    """Returns the next `num` reads that end."""
    ended: dict[int, str | None] = {}

    def have_ended() -> bool:
        ended.update(reader.poll())
        return len(ended) >= num

    until(have_ended, "a read did not end")
    return ended


def until(holds: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline_s, what


def read_all(reader: NixlReader, read_id: int, num_blocks: int = NUM_BLOCKS) -> str | None:
    reader.fetch(read_id, range(num_blocks), range(num_blocks))
    return ends(reader)[read_id]


# ---------------------------------------------------------------- reads


def test_scattered_blocks_arrive_and_no_other_block_is_touched(sink, lasting):
    sink.pool.blocks[:] = contents(NUM_BLOCKS, seed=2)
    expected = sink.pool.blocks.copy()
    rng = np.random.default_rng(3)
    there, here = rng.permutation(NUM_BLOCKS)[:40], rng.permutation(NUM_BLOCKS)[:40]
    reader = sink.connect(lasting)
    for first in (0, 10, 20, 30):  # several in flight
        part = slice(first, first + 10)
        reader.fetch(first, there[part].tolist(), here[part].tolist())
    assert ends(reader, 4) == {0: None, 10: None, 20: None, 30: None}
    assert reader.num_outstanding == 0
    expected[here] = lasting.bytes[there]
    np.testing.assert_array_equal(sink.pool.blocks, expected)


def test_adjacent_blocks_arrive_where_they_belong(sink, lasting):
    reader = sink.connect(lasting)
    reader.fetch(1, [5, 6, 7, 8, 20], [30, 31, 32, 40, 41])
    assert ends(reader) == {1: None}
    np.testing.assert_array_equal(
        sink.pool.blocks[[30, 31, 32, 40, 41]], lasting.bytes[[5, 6, 7, 8, 20]]
    )
    assert not np.delete(sink.pool.blocks, [30, 31, 32, 40, 41], axis=0).any()


def test_only_the_pieces_of_each_record_are_read(sink, lasting):
    pieces = (RecordPiece(0, 64, 1000), RecordPiece(8192, 4096, 128))
    there, here = [63, 0, 31], [1, 62, 5]
    reader = sink.connect(lasting, pieces=pieces)
    reader.fetch(9, there, here)
    assert ends(reader) == {9: None}
    expected = np.zeros_like(lasting.bytes)
    expected[here, 64:1064] = lasting.bytes[there, :1000]
    expected[here, 4096:4224] = lasting.bytes[there, 8192:8320]
    np.testing.assert_array_equal(sink.pool.blocks, expected)


def test_a_source_may_have_more_blocks_than_the_sink(sink):
    with source(num_blocks=3 * NUM_BLOCKS) as other:
        reader = sink.connect(other)
        reader.fetch(1, [3 * NUM_BLOCKS - 1], [0])
        assert ends(reader) == {1: None}
        np.testing.assert_array_equal(sink.pool.blocks[0], other.bytes[-1])


@pytest.mark.parametrize(("there", "here"), [(NUM_BLOCKS, 0), (-1, 0), (0, NUM_BLOCKS), (0, -1)])
def test_a_block_outside_its_pool_is_refused_before_anything_is_read(sink, lasting, there, here):
    reader = sink.connect(lasting)
    with pytest.raises(IndexError):
        reader.fetch(1, [1, there], [1, here])
    assert reader.num_outstanding == 0
    assert read_all(reader, 2) is None
    assert sink.agent.num_restarts == 0


def test_the_source_is_notified_of_the_read_by_its_id(sink):
    with source() as other:
        reader = sink.connect(other)
        assert read_all(reader, 2**63 + 5) is None
        seen: list[bytes] = []

        def is_notified() -> bool:
            seen.extend(other.ask("notifications"))
            return bool(seen)

        until(is_notified, "no notification")
        assert seen == [(2**63 + 5).to_bytes(8, "little")]


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
    with pytest.raises(NixlUnavailable, match=reason):
        sink.agent.connect(offer, NUM_BLOCKS, record_bytes=BLOCK_BYTES)
    assert read_all(sink.connect(lasting), 1) is None


@pytest.mark.parametrize("piece", [RecordPiece(1, 0, BLOCK_BYTES), RecordPiece(0, 1, BLOCK_BYTES)])
def test_a_piece_that_exceeds_its_record_is_refused(sink, lasting, piece):
    with pytest.raises(NixlUnavailable, match="within"):
        sink.connect(lasting, pieces=[piece])


def test_a_host_without_nixl_gets_a_clear_error(monkeypatch):
    monkeypatch.setattr("kvtransfer.nixl_backend.PACKAGES", ("no_such_nixl",))
    agent = NixlAgent("agent", Region(4096, 4096), record_bytes=4096)
    with pytest.raises(NixlUnavailable, match="no_such_nixl"):
        agent.open()


# ---------------------------------------------------------------- ends, and accidents


def test_reading_from_a_killed_source_fails(sink):
    with source() as other:
        reader = sink.connect(other)
        assert read_all(reader, 1) is None
        other.kill()
        assert read_all(reader, 2) is not None
        reader.close()


def test_a_source_that_died_does_not_keep_others_from_being_read(sink):
    with source("first") as first, source("second", seed=5) as second:
        readers = [sink.connect(first), sink.connect(second)]
        assert [read_all(reader, 1) for reader in readers] == [None, None]
        first.kill()
        assert read_all(readers[0], 2) is not None
        assert read_all(readers[1], 2) is None
        np.testing.assert_array_equal(sink.pool.blocks, second.bytes)


def test_a_restarted_source_can_be_read_after_the_old_one_died(sink):
    with source("incarnation-1") as old:
        reader = sink.connect(old)
        assert read_all(reader, 1) is None
        old.kill()
        reader.close()
    with source("incarnation-2", seed=7) as new:
        assert read_all(sink.connect(new), 2) is None
        np.testing.assert_array_equal(sink.pool.blocks, new.bytes)


def test_a_cancelled_read_of_a_stopped_source_ends_and_writes_no_more(monkeypatch):
    """Uses tcp, where the source sends the bytes: they are in flight when the read is cancelled."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    num_blocks = 4096  # more than sockets buffer
    with source(num_blocks=num_blocks) as other:
        agent, pool = open_agent("sink", num_blocks)
        reader = agent.connect(other.offer, num_blocks, record_bytes=BLOCK_BYTES)
        assert read_all(reader, 1, num_blocks) is None
        other.signal(signal.SIGSTOP)
        reader.fetch(2, range(num_blocks), range(num_blocks))
        reader.poll()
        assert reader.num_outstanding == 1
        reader.cancel(2)
        assert ends(reader) == {2: "a cancelled read does not end"}
        assert agent.num_restarts == 1
        pool.blocks[:] = 0
        other.signal(signal.SIGCONT)
        deadline_s = time.monotonic() + 0.5
        while time.monotonic() < deadline_s:  # any late write would happen by then
            assert reader.poll() == []
            select.select([], [], [], 0.01)
        assert not pool.blocks.any()
        agent.close()


def test_closing_a_reader_ends_what_it_reads(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")
    with source() as other:
        agent, _ = open_agent("sink")
        reader = agent.connect(other.offer, NUM_BLOCKS, record_bytes=BLOCK_BYTES)
        assert read_all(reader, 1) is None
        other.signal(signal.SIGSTOP)
        reader.fetch(2, [0], [0])
        reader.close()
        assert [read_id for read_id, reason in reader.poll() if reason] == [2]
        agent.close()


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
        assert read_all(sink.connect(other), 1) is None
        np.testing.assert_array_equal(sink.pool.blocks, other.bytes)


# ---------------------------------------------------------------- costs


def test_an_idle_agent_leaves_the_processor_alone(sink):
    with source() as other:
        assert read_all(sink.connect(other), 1) is None
        assert other.ask("idle") < 0.05


def test_closing_frees_threads_and_files():
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    with source() as other:

        def read_once(name: str) -> None:
            agent, pool = open_agent(name)
            reader = agent.connect(other.offer, NUM_BLOCKS, record_bytes=BLOCK_BYTES)
            assert read_all(reader, 1) is None
            agent.close()
            pool.close()

        read_once("first")  # loads libraries, which stay
        before = held()
        for number in range(4):
            read_once(f"again-{number}")
        assert held() == before


USES_NIXL = """
import numpy as np
from kvtransfer.memory import Region
from kvtransfer.nixl_backend import NixlAgent
memory = np.zeros(2**20, np.uint8)
agent = NixlAgent("one", Region(memory.ctypes.data, memory.nbytes), record_bytes=4096)
agent.open()
agent.close()
print("closed", flush=True)
"""


def test_a_process_that_used_nixl_exits_cleanly():
    done = subprocess.run(
        [sys.executable, "-c", USES_NIXL], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr
