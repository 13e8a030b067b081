"""The peer's side of the benchmark protocol."""

import io
import json
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from bench.peers import driver
from bench.processes.driven import Driven


class Counter:
    def __init__(self):
        self.facts = {"version": "7"}

    def generate(self, prompts, num_steps):
        watch = driver.Stopwatch()
        watch.stamp_first()
        return watch.answer([[len(prompt)] * (num_steps + 1) for prompt in prompts])

    def fail(self):
        raise RuntimeError("no\nway")


def answers_to(load, *commands):
    out = io.StringIO()
    driver.drive(load, [json.dumps(command) for command in commands], out)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_a_driver_answers_each_command_in_a_line():
    ready, answer = answers_to(
        Counter, {"do": "generate", "prompts": [[1], [1, 2]], "num_steps": 1}
    )
    assert ready == {"ready": {"version": "7"}}
    assert answer["answers"] == [[1, 1], [2, 2]]
    assert answer["decode_s"] == 0
    assert answer["prefill_s"] >= 0


def test_driver_that_cannot_load_reports_the_error_and_ends():
    def load():
        raise ValueError("no variant x")

    out = io.StringIO()
    with pytest.raises(ValueError, match="no variant x"):
        driver.drive(load, [], out)
    assert json.loads(out.getvalue()) == {"error": "ValueError: no variant x"}


def test_a_driver_runs_as_a_script_without_this_package_and_keeps_stdout_to_itself(tmp_path):
    script = Path(driver.__file__)
    (tmp_path / "driver.py").write_text(script.read_text())
    (tmp_path / "fake_peer.py").write_text(
        dedent("""
            import sys
            class Fake:
                def __init__(self, options):
                    print("a library's banner")
                    self.facts = {"version": options.variant, "baton": "bench" in sys.modules}
                def generate(self, prompts, num_steps):
                    print("progress")
                    return {"prefill_s": 1.0, "decode_s": 2.0, "answers": prompts}
            load = Fake
        """)
    )
    options = ["--checkpoint", "x", "--variant", "f32", "--threads", "1"]
    limits = ["--max-sequences", "1", "--max-len", "1", "--max-tokens", "1"]
    command = [sys.executable, str(tmp_path / "driver.py"), "fake", *options, *limits]
    with Driven("fake", command, {}) as engine:
        engine.start()
        assert engine.ready(10) == {"version": "f32", "baton": False}
        answer = engine.ask("generate", timeout_s=10, prompts=[[1]], num_steps=0)
        assert answer["answers"] == [[1]]
