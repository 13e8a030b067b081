"""Answers are tables for people, with whole names in a pipe, or JSON for programs."""

import json

import pytest
import typer
from rich.console import Group

from deploy.admin.schema import Difference, StepInfo
from deploy.commands.views import DIFFERS, Output, table_of

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
