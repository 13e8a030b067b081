"""The protocol to an engine that runs in its own process."""

import os
import select

import pytest

from bench.processes.driven import DrivenFailed
from tests.kits.driven import started

ECHO = """
    say(ready={"version": "1.0"})
    for line in sys.stdin:
        say(heard=json.loads(line))
"""


def test_each_command_gets_its_answer():
    with started(ECHO) as engine:
        assert engine.ready(10) == {"version": "1.0"}
        for number in range(3):
            answer = engine.ask("count", timeout_s=10, number=number)
            assert answer == {"heard": {"do": "count", "number": number}}


def test_a_process_ends_when_it_is_closed():
    engine = started(ECHO)
    engine.ready(10)
    process = engine._child.process
    engine.close()
    assert process.returncode == 0
    engine.close()  # a second close does nothing
    with pytest.raises(DrivenFailed, match="not running"):
        engine.ask("count", timeout_s=10)


def test_process_survives_an_error_in_one_command():
    script = 'say(ready={}); hear(); say(error="ValueError: no"); hear(); say(fine=1)'
    with started(script) as engine:
        engine.ready(10)
        with pytest.raises(DrivenFailed, match="peer: ValueError: no"):
            engine.ask("a", timeout_s=10)
        assert engine.ask("b", timeout_s=10) == {"fine": 1}


def test_death_of_a_process_is_reported_with_status_and_last_lines():
    with started('sys.stderr.write("out of\\nmemory\\n"); sys.exit(3)') as engine:
        with pytest.raises(DrivenFailed, match="ended with status 3") as caught:
            engine.ready(10)
        assert caught.value.last_lines == ("out of", "memory")


def test_a_process_that_hangs_is_ended():
    with started('say(ready={}); sys.stderr.write("busy\\n"); time.sleep(60)') as engine:
        engine.ready(10)
        process = engine._child.process
        with pytest.raises(DrivenFailed, match=r"no answer in 0\.05 s"):
            engine.ask("a", timeout_s=0.05)
        assert process.returncode is not None


def test_process_that_does_not_read_is_ended():
    with started("say(ready={}); time.sleep(60)") as engine:
        engine.ready(10)
        with pytest.raises(DrivenFailed, match="no answer"):
            engine.ask("a", timeout_s=0.05, prompt="x" * 2**20)  # more bytes than a pipe buffers


def test_process_that_ignores_closing_is_killed_with_its_children():
    script = """
        import subprocess
        child = subprocess.Popen(["/bin/sleep", "60"])
        say(ready={"child": child.pid})
        while True:
            time.sleep(60)
    """
    with started(script, close_timeout_s=0.1) as engine:
        child = os.pidfd_open(engine.ready(10)["child"])
        process = engine._child.process
    assert process.returncode == -9
    ended, _, _ = select.select([child], [], [], 10)
    os.close(child)
    assert ended
