from datetime import datetime, timedelta

import pytest

from bench.common import report as machine


@pytest.fixture
def outputs(monkeypatch):
    """Fakes commands: maps their first two words to their output; other commands fail."""
    table = {}
    monkeypatch.setattr(machine, "_output", lambda *command: table.get(command[:2]))
    return table


def test_a_clean_checkout_is_named_by_its_commit(outputs):
    outputs.update({("git", "ls-files"): "f", ("git", "rev-parse"): "abc", ("git", "status"): ""})
    assert machine.commit_here() == "abc"


def test_a_changed_checkout_is_dirty(outputs):
    outputs.update({("git", "ls-files"): "f", ("git", "rev-parse"): "abc", ("git", "status"): " M"})
    assert machine.commit_here() == "abc-dirty"


def test_a_copy_that_its_repository_does_not_track_has_no_commit(outputs):
    outputs.update({("git", "rev-parse"): "abc", ("git", "status"): ""})
    assert machine.commit_here() is None


def test_hardware_lists_the_gpus_of_the_machine(outputs):
    assert machine.hardware().gpus == ()
    outputs["nvidia-smi", "--query-gpu=name"] = "one\ntwo"
    assert machine.hardware().gpus == ("one", "two")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["/venv/bin/baton", "bench", "kv", "--quick"], "baton bench kv --quick"),
        (["baton", "bench", "kv", "--json", "kv.json", "--seed", "1"], "baton bench kv --seed 1"),
        (["baton", "bench", "kv", "--json=kv.json", "--plot", "kv.png"], "baton bench kv"),
        (["baton", "bench", "kv", "--peer", "nixl=/x/python"], "baton bench kv --peer nixl=PYTHON"),
        (["baton", "simulate", "--trace", "/data/a.jsonl"], "baton simulate --trace a.jsonl"),
        (["/src/bench/gpu/__main__.py", "--json", "gpu.json"], "python -m bench.gpu"),
    ],
)
def test_command_line_is_as_typed_without_outputs_and_local_paths(arguments, expected):
    assert machine.command_line(arguments) == expected


def test_report_of_this_process_says_where_when_and_how_it_was_made(outputs, monkeypatch):
    monkeypatch.setattr(machine.sys, "argv", ["baton", "bench", "router", "--quick"])
    report = machine.report_here("router", seed=3, config={"a": 1}, results=[])
    assert (report.bench, report.seed, report.config, report.results) == ("router", 3, {"a": 1}, ())
    assert report.command == "baton bench router --quick"
    assert datetime.fromisoformat(report.date).utcoffset() == timedelta(0)
