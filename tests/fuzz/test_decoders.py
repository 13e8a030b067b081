"""The fuzzers run without a finding, and they do find planted mistakes."""

import importlib.util
import logging
import random
import re
import subprocess
import sys

import pytest

from kvtransfer.lease.sink import SinkMachine
from kvtransfer.transports.zmq import ZmqTransport
from tests.fuzz import targets

NUM_RUNS = 1500
NUM_INPUTS = 600


@pytest.fixture(autouse=True)
def _few_words(caplog):
    caplog.set_level(logging.ERROR)  # every invalid message would log a warning


@pytest.fixture(scope="module")
def world():
    return targets.World()


def inputs(world, seed):
    """Yields the inputs of valid scripts first, then mutations of mutated inputs."""
    rng = random.Random(seed)
    starts = targets.seeds(world)
    yield from starts
    data = b""
    for _ in range(NUM_INPUTS):
        data = targets.another(data, rng, starts=starts)
        yield data


def run_all(world, seed):
    for data in inputs(world, seed):
        targets.run(world, data)


def test_the_example_scripts_find_nothing(world):
    run_all(world, seed=1)


def test_an_input_is_its_target_and_script():
    script = [(b"a", b""), (b"\xff",)]
    assert targets.unpacked(targets.packed("sink", script)) == ("sink", script)
    assert targets.unpacked(b"\x02no script") == ("worker", [(b"no script",)])
    assert targets.unpacked(b"") == ("source", [(b"",)])


@pytest.mark.parametrize(
    ("place", "name", "planted"),
    [
        (SinkMachine, "places", lambda _, __, data: [targets.BlockId(1)] * len(data.indices)),
        (ZmqTransport, "place", lambda *_: 1 // 0),
        (targets, "decode_to_source", lambda frame: {b"\xff": 0}[frame[:1]]),
    ],
    ids=["a write elsewhere", "an exception in an end", "an exception in a decoder"],
)
def test_a_planted_bug_is_found(monkeypatch, place, name, planted):
    world = targets.World()
    monkeypatch.setattr(place, name, planted)
    with pytest.raises((AssertionError, ArithmeticError, LookupError)):
        run_all(world, seed=2)


def test_atheris_finds_nothing_in_a_short_run(tmp_path):
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("atheris is not installed")
    command = [sys.executable, "-m", "tests.fuzz.decoders", f"-runs={NUM_RUNS}", "-seed=1"]
    done = subprocess.run(
        [*command, f"-artifact_prefix={tmp_path}/"], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ran = re.search(r"^Done (\d+) runs", done.stderr, re.MULTILINE)
    assert ran is not None
    assert int(ran[1]) >= NUM_RUNS
    (covered,) = re.findall(r"DONE +cov: (\d+)", done.stderr)
    assert int(covered) > 300, "it saw little of the code: is it instrumented?"
