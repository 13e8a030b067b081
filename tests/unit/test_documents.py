"""Documents name only files, links, commands and options that exist."""

import importlib.util
import re
from functools import cache

import pytest
import typer
from typer.core import TyperGroup

from deploy.commands.main import app
from tests.kits.tree import documents
from tests.kits.tree.documents import ROOT, Command

OURS = ("router", "prefill", "decode", "kvtransfer", "deploy", "bench", "engine", "tests")
COMMANDS = [one for page in documents.documents() for one in documents.commands(page)]


def ours(*programs: str) -> list[Command]:
    return [one for one in COMMANDS if one.words[0].rpartition("/")[2] in programs]


@pytest.mark.parametrize("page", documents.documents())
def test_linked_files_exist(page):
    absent = [str(path) for path in documents.links(page) if not path.exists()]
    assert not absent
    assert not documents.absent_anchors(page)


@cache
def baton() -> TyperGroup:
    return typer.main.get_command(app)


@pytest.mark.parametrize("command", ours("baton"), ids=str)
def test_baton_commands_parse(command):
    """Checks that the subcommand exists and has these options; values are not checked."""
    found = baton()
    words = list(command.words[1:])
    context = found.context_class(found)
    while isinstance(found, TyperGroup):
        left = found.make_parser(context).parse_args(words)[1]
        if not left:
            return
        subcommand = found.get_command(context, left[0])
        assert subcommand is not None, f"no command {left[0]}"
        context = found.context_class(subcommand, parent=context)
        found, words = subcommand, left[1:]
    found.make_parser(context).parse_args([word for word in words if word not in "|&>"])


def test_unknown_options_are_found():
    with pytest.raises(Exception, match="no-such-option"):
        test_baton_commands_parse(Command("", ("baton", "pools", "set", "--no-such-option")))


def test_make_targets_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert [one for one in ours("make") if not targets.issuperset(one.words[1:])] == []


def test_modules_and_tests_exist():
    for command in ours("python", "python3", "pytest"):
        words = command.words
        module = words[words.index("-m") + 1] if "-m" in words else ""
        if module.partition(".")[0] in OURS:
            assert importlib.util.find_spec(module) is not None, str(command)
        for path in (word.partition("::")[0] for word in words if word.startswith("tests/")):
            assert (ROOT / path).exists(), str(command)


def test_documents_have_commands():
    assert len(ours("baton")) > 20
