"""`bench kv` drives its movers: here fakes in this process, which move bytes in a dictionary."""

from dataclasses import dataclass, field
from functools import partial

import pytest

from bench.common.command import say_nothing
from bench.lab.kv import cases as kv_movers
from bench.lab.kv import contest as kv
from bench.lab.kv.cases import KIB, KvPulls, Mover, NotMovable, WrongBytes, mover_of
from bench.processes.driven import DrivenFailed

PULLS = KvPulls((16 * KIB,), 2, 64 * KIB)
MOVERS = ("shm", "zmq", "nixl", "memcpy", "tcp", "bare_nixl")


@dataclass
class FakeEnd:
    """Stands in for one process. Both ends of a mover share `moved`."""

    name: str
    fault: str = ""
    moved: dict = field(default_factory=dict)  # sink's block to source's block
    session = None
    is_open = False
    num_pulls = 0

    def start(self):
        self.is_open = True

    def close(self):
        self.is_open = False

    def ready(self, timeout_s):
        if self.fault == "no start":
            raise DrivenFailed(self.name, "it is ill", ())
        return {"version": "9", "ways": ["a", "b"]}

    def ask(self, do, *, timeout_s, **arguments):
        return getattr(self, do)(**arguments)

    def open_source(self, **pools):
        return {"source": 1}

    def open_sink(self, **pools):
        return {}

    def offer(self, block_bytes, pulls, way):
        return {"offers": [None] * len(pulls)}

    def pull(self, block_bytes, pulls, offers, way):
        self.num_pulls += 1
        if self.fault == "dies" and self.num_pulls > 10:
            raise DrivenFailed(self.name, "it died", ())
        for there, here in pulls:
            self.moved.update(
                zip(here, there[::-1] if self.fault == "lies" else there, strict=True)
            )
        return {"seconds": [float(len(there)) for there, _ in pulls]}

    def wipe(self, block_bytes, blocks):
        for block in blocks:
            self.moved.pop(block, None)
        return {}

    def digest(self, end, block_bytes, blocks):
        contents = [self.moved.get(block) for block in blocks] if end == "sink" else [*blocks]
        return {"digest": str(contents)}


def fakes(monkeypatch, **faults):
    """Returns fake movers, some with faults, and a list of the ends that they will create."""
    made = []

    def fake(name):
        if faults.get(name) == "absent":
            raise NotMovable("not here")
        moved = {}
        ends = [FakeEnd(f"{name} {i}", faults.get(name, ""), moved) for i in range(2)]
        made.extend(ends)
        return Mover(name, *ends)

    monkeypatch.setattr(kv, "IDLE_CHECK_S", 0.0)
    return {name: partial(fake, name) for name in MOVERS}, made


def measure(movers):
    return kv.contest(PULLS, movers, say_nothing)


def test_every_way_of_every_mover_moves_every_case_in_every_repetition(monkeypatch):
    movers, made = fakes(monkeypatch)
    measured = measure(movers)
    assert {(key.mover, key.way, key.case) for key in measured.seconds} == {
        (mover, way, case) for mover in MOVERS for way in "ab" for case in PULLS.cases
    }
    assert all(runs == (key.case.num_blocks,) * 2 for key, runs in measured.seconds.items())
    assert measured.missing == ()
    assert measured.versions["nixl"] == "9"
    assert not any(end.is_open for end in made)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("absent", "not here"),
        ("no start", "it is ill"),
        ("lies", "nixl (a) moved wrong bytes at 16KiB"),
        ("dies", "it died"),
    ],
)
def test_failed_mover_is_reported_and_the_others_continue(monkeypatch, fault, reason):
    movers, made = fakes(monkeypatch, nixl=fault)
    measured = measure(movers)
    assert [(missing.name, missing.reason) for missing in measured.missing] == [("nixl", reason)]
    assert set(measured.movers) == {"shm", "zmq", "memcpy", "tcp", "bare_nixl"}
    assert "nixl" not in measured.movers  # its results before the failure are dropped too
    assert not any(end.is_open for end in made)


@pytest.mark.parametrize("name", ["shm", "zmq", "memcpy", "tcp"])
def test_failure_of_a_required_mover_ends_the_benchmark(monkeypatch, name):
    movers, made = fakes(monkeypatch, **{name: "lies"})
    with pytest.raises(WrongBytes, match=f"{name}.*wrong bytes"):
        measure(movers)
    assert not any(end.is_open for end in made)


def test_only_peers_run_in_another_python(monkeypatch, tmp_path):
    peers = {"mooncake": tmp_path / "python"}
    monkeypatch.setenv("PYTHONPATH", "ours")
    ours, theirs = mover_of("zmq", peers), mover_of("mooncake", peers)
    assert ours.sink._environment is None  # inherits this process's environment
    assert "PYTHONPATH" not in theirs.sink._environment
    assert theirs.sink._command[0] == str(tmp_path / "python")
    assert len(ours.processes) == 2
    assert len(mover_of("memcpy").processes) == 1


def test_bare_nixl_runs_in_the_python_that_has_nixl(monkeypatch, tmp_path):
    monkeypatch.setattr(kv_movers, "find_spec", lambda name: None)
    with pytest.raises(NotMovable, match="not installed"):
        mover_of("bare_nixl")
    elsewhere = {"nixl": tmp_path / "python"}
    assert mover_of("bare_nixl", elsewhere).sink._command[0] == str(tmp_path / "python")


# Memory and buffers of the movers.
