"""Planned pools under an alternating load, in the simulator."""

import pytest
from typer.testing import CliRunner

from bench.cli import app
from bench.common.report import from_json
from bench.lab.elastic import (
    ElasticRun,
    ElasticStudy,
    RequestMix,
    TurningLoad,
    figures_of,
    reactions,
)
from bench.simulator.pools import SimulatedDecision
from router.planning.planner import PoolPlan, PoolSizes


class FewRequests(ElasticStudy):
    """A load of few requests that are long enough to keep four workers busy."""

    __slots__ = ()
    MIXES = (RequestMix(0.5, 0, 20000, 30), RequestMix(0.5, 16384, 512, 600))


STUDY = FewRequests(workers=4, phases=2, phase_s=40.0, step=1)
TURNS = STUDY.turns


def decision(at_s, prefill, wanted):
    return SimulatedDecision(
        at_s, PoolSizes(prefill, 8 - prefill), PoolPlan(wanted, 8 - wanted, 8, ())
    )


def test_planned_pools_beat_every_fixed_split_without_losses():
    trace = TURNS.trace(4, 0)
    fixed = {f"fixed_{number}": STUDY.play(trace, number, None) for number in STUDY.splits}
    planned = STUDY.play(trace, 2, STUDY.rules)
    found = figures_of(STUDY, fixed, planned)
    assert found["ratio"].value > 1.0
    assert found["lost"].value == 0
    assert found["flips"].value > 0
    assert planned.num_requests == len(trace.requests)


def test_reactions_are_measured_at_the_slowest_change():
    turns = TurningLoad(3, 10.0)
    decisions = [
        decision(0.0, 4, 7),  # before the first change of the load
        *(decision(10.0 + second, 7, 7) for second in range(2)),
        decision(12.0, 7, 4),
        decision(15.0, 4, 2),
        decision(19.0, 2, 2),
        decision(21.0, 2, 6),
        decision(29.0, 6, 6),
    ]
    assert reactions(decisions, turns, 8) == (2.0, 2.0)


def test_best_split_has_most_good_requests_and_all_losses_count():
    fixed = {"fixed_1+3": ElasticRun(10, 20, 0), "fixed_2+2": ElasticRun(12, 20, 1)}
    found = figures_of(STUDY, fixed, ElasticRun(18, 20, 0))
    assert found["ratio"].value == pytest.approx(1.5)
    assert found["goodput/best_fixed"].value == pytest.approx(12 / 80)
    assert found["lost"].value == 1


def test_command_writes_its_figures(tmp_path):
    path = tmp_path / "elastic.json"
    options = ["--workers", "2", "--phases", "2", "--phase-s", "4", "--repeat", "1"]
    result = CliRunner().invoke(app, ["elastic", *options, "--json", str(path)])
    assert result.exit_code == 0, result.output
    report = from_json(path.read_bytes())
    names = {one.name for one in report.results}
    assert {"ratio", "goodput/best_fixed", "goodput/planner", "lost", "flips"} <= names
    assert report.value("lost") == 0
