"""The `baton` command imports some subcommands only when they are called."""

import os
import shutil
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from deploy.commands import main
from deploy.commands.main import app, check_texts
from engine.errors import ConfigError

COMMANDS = typer.main.get_command(app)
LATE = ("serve", "bench", "simulate", "plan")


def test_late_commands_are_listed_with_all_others():
    names = COMMANDS.list_commands(None)
    assert {*LATE, "chat", "pools", "version", "up"} < set(names)
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", LATE)
def test_a_late_command_has_the_name_it_is_listed_by(name):
    assert COMMANDS.get_command(None, name).name == name


def test_lists_show_late_commands_with_their_own_help():
    for name, late in main.LATE_COMMANDS.items():
        assert COMMANDS.get_command(None, name).help == late.help


@pytest.mark.parametrize("words", ["--help", "--version"])
def test_lists_import_no_late_command_torch_or_ray(words):
    program = f"import sys; sys.argv = ['baton', '{words}']\n"
    program += "from deploy.commands.main import main\n"
    program += "try: main()\nexcept SystemExit: print(*sys.modules, sep='\\n', file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    modules = set(done.stderr.split("\n"))
    assert "deploy.commands.main" in modules
    assert not {"deploy.commands.serve", "bench", "torch", "ray"} & modules


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["serv"], "Did you mean 'serve'?"),
        (["keys", "ad"], "Did you mean 'add'?"),
        (["--versoin"], "--version"),
        (["serve", "--prot", "1"], "--port"),
        (["serve", "--log-level", "inf"], "'info'"),
    ],
)
def test_mistyped_words_get_a_suggestion(words, hint):
    done = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert hint in done.output


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_version_is_an_option_too(option):
    done = CliRunner().invoke(app, [option])
    assert done.exit_code == 0
    assert done.output == CliRunner().invoke(app, ["version"]).output


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("baton s", {"serve", "simulate", "status", "stop-worker", "store"}),
        ("baton store ", {"drop", "warm"}),
        ("baton keys ", {"add", "list", "revoke"}),
        ("baton config ", {"check", "reference", "show"}),
        ("baton logs --fo", {"--follow"}),
    ],
)
def test_shells_complete_words(line, words):
    assert completed(line) == words


def test_shells_complete_every_command_of_every_group():
    root = typer.main.get_command(app)
    known = completed("baton ")
    assert {"logs", "top", "events", "serve", "bench"} <= known
    assert known == set(root.list_commands(None))
    groups = {name: each for name, each in root.commands.items() if hasattr(each, "commands")}
    for name, group in groups.items():
        assert completed(f"baton {name} ") == set(group.commands)
    assert {"rollback"} <= set(groups["versions"].commands)


def completed(line: str) -> set[str]:
    """Returns the words that a shell would offer for the last word of a line."""
    environment = {
        "_BATON_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
    }
    done = CliRunner().invoke(app, [], prog_name="baton", env=environment)
    return set(done.output.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_accepts_the_completion_script():
    program = "import sys; sys.argv = ['baton', '--show-completion', 'bash']\n"
    program += "from deploy.commands.main import main; main()"
    # Otherwise typer looks for a shell among the parent processes; a test runner may have none.
    named = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    shown = [sys.executable, "-c", program]
    script = subprocess.run(
        shown, capture_output=True, text=True, check=True, timeout=60, env=named
    ).stdout
    asked = f"{script}\ncomplete -p baton"
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, timeout=10)
    assert done.returncode == 0
    assert "_baton_completion" in done.stdout


def test_without_the_bench_package_its_commands_are_hidden_and_explain_why(monkeypatch):
    absent = main.importlib.util.find_spec

    def find(name):
        return None if name == "bench" else absent(name)

    monkeypatch.setattr(main.importlib.util, "find_spec", find)
    commands = typer.main.get_command(app)
    names = commands.list_commands(None)
    assert "serve" in names
    assert not {"bench", "simulate", "plan"} & set(names)
    with pytest.raises(ConfigError, match=r"`baton plan` needs the package `bench`"):
        commands.get_command(None, "plan")


@pytest.mark.parametrize("text", ["\udcff", "--api-key=\udcff", "gr\udcf6\udcdfe"])
def test_arguments_and_settings_that_are_no_utf_8_are_named(text):
    with pytest.raises(ConfigError, match="argument 2 is not valid UTF-8") as raised:
        check_texts(["serve", text], {})
    assert str(raised.value).isascii()
    with pytest.raises(ConfigError, match="'BATON_X' in the environment is not valid UTF-8"):
        check_texts([], {"BATON_X": text})
    check_texts(["serve", "größe", "日本", "\U0001f600"], {"OTHER": text, "BATON_X": "größe"})
