"""The common form of studies: options, alternating arms, and the report."""

import json
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

import pytest
import typer
from typer.testing import CliRunner

from bench.common.command import RepeatOption, Say, say_nothing
from bench.common.report import Figure, Goals, from_json, results_of
from bench.lab.experiment import (
    Experiment,
    Findings,
    check_lengths,
    command_of,
    held_against,
    results_by_arm,
    rounds,
)
from engine.errors import ConfigError

ARMS = ("quiet", "loud")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening(Experiment):
    """Measure how loud it is."""

    NAME: ClassVar = "listening"
    QUICK: ClassVar = "One run."
    GOALS: ClassVar = Goals({"level/loud": 10.0})

    volume: Annotated[int, typer.Option(min=1, help="Of the loud arm.")] = 11
    repeat: RepeatOption = 3
    peer: Annotated[list[str] | None, typer.Option()] = None

    def __post_init__(self) -> None:
        if self.volume > 100:
            raise ConfigError("--volume: too loud")

    def quick(self) -> Self:
        return replace(self, repeat=1)

    def measure(self, say: Say) -> Findings:
        levels = {"quiet": 1, "loud": self.volume}
        found = (
            (repeat, arm, {"level": Figure(levels[arm] + repeat, "dB")})
            for repeat, arm in rounds(ARMS, self.repeat, self.seed, say)
        )
        results = held_against(results_by_arm(found, ARMS), {"level/loud": "quiet"})
        return Findings(results, ["a warning"], ["a line"], {"measured": 1.5})


app = typer.Typer()
app.command()(command_of(Listening))


def listened(*options):
    return CliRunner().invoke(app, options)


def test_options_are_the_fields_of_the_study_and_go_into_its_report(tmp_path):
    path = tmp_path / "new" / "listening.json"
    done = listened("--volume", "20", "--seed", "7", "--peer", "x=/y", "--json", str(path))
    assert done.exit_code == 0
    report = from_json(path.read_bytes())
    assert (report.bench, report.seed) == ("listening", 7)
    assert report.config == {"is_quick": False, "volume": 20, "repeat": 3, "measured": 1.5}
    assert json.loads(path.read_text())["results"][1]["peers"]["quiet"]["ratio"] == 10.5
    for printed in ("level/loud", "note: a warning", "a line", "goal", "× quiet"):
        assert printed in done.output


def test_help_names_every_option():
    shown = listened("--help").output
    assert "Measure how loud it is." in shown
    for option in ("--volume", "--repeat", "--seed", "--quick", "--json", "--plot"):
        assert option in shown


def test_every_study_can_be_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    assert listened("--plot", str(tmp_path / "new.png")).exit_code == 0
    assert (tmp_path / "new.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_options_end_the_command_with_one_line():
    done = listened("--volume", "101")
    assert (done.exit_code, done.stderr) == (1, "error: --volume: too loud\n")


def test_arms_come_in_another_order_in_each_repetition_and_in_the_same_for_a_seed():
    orders = [[*rounds("abc", 10, seed, say_nothing)] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    by_repeat = [tuple(arm for n, arm in orders[0] if n == repeat) for repeat in range(10)]
    assert all(sorted(order) == ["a", "b", "c"] for order in by_repeat)
    assert len(set(by_repeat)) > 1


def test_results_are_sorted_by_thing_and_then_by_arm():
    both = {"level": Figure(1, "dB"), "pitch": Figure(2, "Hz")}
    found = results_by_arm([(0, "loud", both), (0, "quiet", {"level": Figure(3, "dB")})], ARMS)
    assert [result.name for result in found] == ["level/quiet", "level/loud", "pitch/loud"]


def test_a_peer_of_zero_or_without_a_result_is_no_reference():
    results = results_of([{"level/loud": Figure(1, ""), "level/quiet": Figure(0, "")}])
    assert not any(one.peers for one in held_against(results, {"level/loud": "quiet"}))
    assert not any(one.peers for one in held_against(results, {"level/loud": "silent"}))


@pytest.mark.parametrize("wrong", [("tiny", (4000, 100)), ("huge", (1, 1))])
def test_requests_must_fit_the_shape(wrong):
    with pytest.raises(ConfigError):
        check_lengths(wrong[0], (1, 1), wrong[1])
