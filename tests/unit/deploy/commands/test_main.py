"""The `baton` command imports some subcommands only when they are asked for."""

import subprocess
import sys

import pytest
import typer

from deploy.commands import main
from deploy.commands.main import app
from engine.errors import ConfigError

COMMANDS = typer.main.get_command(app)
LATE = ("serve", "bench", "simulate", "plan")
IMPORTED = (
    "import sys, deploy.commands.main; print({name.partition('.')[0] for name in sys.modules})"
)


def test_late_commands_are_listed_with_all_others():
    names = COMMANDS.list_commands(None)
    assert {*LATE, "chat", "pools", "version", "up"} < set(names)
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", LATE)
def test_a_late_command_has_the_name_it_is_listed_by(name):
    assert COMMANDS.get_command(None, name).name == name


def test_other_commands_import_no_benchmark_torch_or_ray():
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True, timeout=60
    )
    assert "'deploy'" in done.stdout
    assert not {"'bench'", "'torch'", "'ray'"} & set(done.stdout.strip("{}\n").split(", "))


def test_without_the_bench_package_its_commands_are_hidden_and_explain_why(monkeypatch):
    absent = main.importlib.util.find_spec

    def find(name):
        return None if name == "bench" else absent(name)

    monkeypatch.setattr(main.importlib.util, "find_spec", find)
    names = COMMANDS.list_commands(None)
    assert "serve" in names
    assert not {"bench", "simulate", "plan"} & set(names)
    with pytest.raises(ConfigError, match=r"`baton plan` needs the package `bench`"):
        COMMANDS.get_command(None, "plan")
