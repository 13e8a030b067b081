"""The `baton` command: some of its commands are imported only when they are asked for."""

import subprocess
import sys

import pytest
import typer

from deploy.commands.main import app

COMMANDS = typer.main.get_command(app)
LATE = ("serve", "bench", "simulate", "plan")
IMPORTED = (
    "import sys, deploy.commands.main; print({name.partition('.')[0] for name in sys.modules})"
)


def test_commands_that_are_imported_late_are_listed_with_all_others():
    names = COMMANDS.list_commands(None)
    assert {*LATE, "chat", "pools", "version", "up"} < set(names)
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", LATE)
def test_a_command_that_is_imported_late_is_called_as_it_is_listed(name):
    assert COMMANDS.get_command(None, name).name == name


def test_no_benchmark_is_imported_for_another_command():
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True, timeout=60
    )
    assert "'deploy'" in done.stdout
    assert not {"'bench'", "'torch'", "'ray'"} & set(done.stdout.strip("{}\n").split(", "))
