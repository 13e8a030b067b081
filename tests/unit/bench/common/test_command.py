"""Options, value lists and errors that all benchmark commands share."""

import enum

import pytest
import typer

from bench.common.command import numbers_of, printed_errors, publish, values_of
from bench.common.report import Result, from_json, report_here
from bench.processes.driven import DrivenFailed
from engine.errors import ConfigError


class Colour(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


def test_values_between_commas_are_parsed_once_each():
    assert values_of("--colours", "red, blue,red", Colour, "colours") == (Colour.RED, Colour.BLUE)
    assert numbers_of("--sizes", "3,1") == (3, 1)


def test_value_that_cannot_be_parsed_names_its_option():
    with pytest.raises(ConfigError, match="--colours: 'red,green' is not a list of red, blue"):
        values_of("--colours", "red,green", Colour, "a list of red, blue")


@pytest.mark.parametrize("error", [ConfigError("bad plan"), OSError("disk full")])
def test_error_of_the_user_ends_the_command_with_one_line(error, capsys):
    with pytest.raises(typer.Exit) as caught, printed_errors():
        raise error
    assert caught.value.exit_code == 1
    assert capsys.readouterr().err == f"error: {error}\n"


def test_error_of_a_peer_shows_its_last_lines(capsys):
    with pytest.raises(typer.Exit), printed_errors():
        raise DrivenFailed("vllm", "it ended with status 1", ["out of", "memory"])
    assert capsys.readouterr().err == "error: vllm: it ended with status 1\nout of\nmemory\n"


def test_report_is_published_as_json_and_as_text(tmp_path, capsys):
    report = report_here("kv", seed=0, config={}, results=[Result("shm", 2.0, "s", (2.0,))])
    publish(report, None, title="a title")
    publish(report, tmp_path / "new" / "kv.json", title="a title", warnings=["a warning"])
    assert from_json((tmp_path / "new" / "kv.json").read_bytes()) == report
    printed = capsys.readouterr().out
    assert printed.count("a title") == 2
    assert "note: a warning" in printed
