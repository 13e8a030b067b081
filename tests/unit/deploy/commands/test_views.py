"""Answers are printed as tables, with whole names in a pipe, or as JSON for programs."""

import json

import pytest
import typer
from rich.console import Group

from deploy.admin.schema import Difference, StepInfo, WorkerInfo
from deploy.base.spec import WorkerFacts
from deploy.commands.views import DIFFERS, FIRST_SESSION_S, Output, table_of, workers_view
from deploy.pools.workers.record import WorkerState
from engine.messages import Role, WorkerId

STEP = StepInfo(number=3, age_s=1.0, subject="worker-1", what="starts", why="a worker is missing")
NAME = "resp_" + "0123456789abcdef" * 8


def table(names):
    found = table_of("things", ("name",), (), wraps=("name",))
    for name in names:
        found.add_row(name)
    return Group(found)


def test_names_are_whole_in_a_pipe(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    Output(as_json=False).show(lambda: [NAME], table, watch=False)
    assert NAME in capsys.readouterr().out.split()


def test_json_is_one_line_for_each_answer_and_step(capsys):
    output = Output(as_json=True)
    output.show(lambda: [NAME], table, watch=False)
    output.step(STEP)
    output.done()
    answer, step = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert answer == [NAME]
    assert step["subject"] == "worker-1"


def test_people_read_steps_and_the_end(capsys):
    output = Output(as_json=False)
    output.step(STEP)
    output.done()
    said = capsys.readouterr().out
    assert "worker-1 starts: a worker is missing" in said
    assert "done" in said


def test_differences_are_a_table_and_an_exit_status(capsys):
    output = Output(as_json=False)
    output.differences([])
    assert "runs as declared" in capsys.readouterr().out
    with pytest.raises(typer.Exit) as ended:
        output.differences([Difference("pools.decode", 1, 3, "baton pools set")])
    assert ended.value.exit_code == DIFFERS
    row = capsys.readouterr().out.splitlines()[-1].split()
    assert row == ["pools.decode", "1", "3", "baton", "pools", "set"]


def worker_of(facts: WorkerFacts | None = None, **fields) -> WorkerInfo:
    plain = {
        "worker_id": WorkerId("w"),
        "version": "v1",
        "role": Role.DECODE,
        "target": Role.DECODE,
        "state": WorkerState.SERVING,
        "state_s": 1.0,
        "is_connected": True,
        "is_leaving": False,
        "failures": 0,
        "is_crash_looping": False,
        "pid": 1,
        "address": "a:1",
        "waiting_seqs": 0,
        "running_seqs": 0,
        "leaving_seqs": 0,
        "open_leases": 0,
        "num_blocks": 9,
        "free_blocks": 9,
    }
    return WorkerInfo(**plain | fields, facts=facts, kernels="" if facts is None else facts.kernels)


def shown(facts: WorkerFacts, capsys) -> str:
    worker = worker_of(facts)
    Output(as_json=False).show(lambda: [worker], workers_view, watch=False)
    return capsys.readouterr().out


def test_workers_on_gpus_say_what_they_compute_with(capsys):
    facts = WorkerFacts(
        *("cuda", "nvidia-h200 captured", "bf16", "bf16", 90 * 2**30, "triton", 13),
        transports=("ipc", "zmq"),
        fallbacks={"torch_compile": 1},
    )
    assert (
        "w computes on cuda (nvidia-h200 captured): weights bf16, KV bf16 of 90.0 GiB, attention"
        " triton, 13 captured steps, KV by ipc, zmq; without torch_compile"
    ) in shown(facts, capsys)


def test_workers_on_cpus_say_less(capsys):
    facts = WorkerFacts("cpu", "cpu avx512 fused", "int8", "fp32", 2**20, "c++", 0, ("shm", "zmq"))
    assert "computes on" not in shown(facts, capsys)


@pytest.mark.parametrize(("state_s", "is_told"), [(0.5, False), (FIRST_SESSION_S, True)])
def test_worker_that_has_just_started_is_not_said_to_be_out_of_reach(capsys, state_s, is_told):
    worker = worker_of(state_s=state_s, is_connected=False)
    Output(as_json=False).show(lambda: [worker], workers_view, watch=False)
    assert ("cannot be reached" in capsys.readouterr().out) is is_told
