"""A decode worker that joins a simulated cluster under load gets its share of the sequences."""

import random

from bench.client.load import SloBounds
from bench.simulator.cluster import SimulatedPools, SimulationSetup, simulate
from bench.simulator.hardware import PROFILES
from bench.simulator.pools import Evenness, join_figures
from bench.simulator.results import figures_of
from bench.simulator.traces import Chat, synthetic
from engine.config import RouterConfig
from router.machine.machine import RouterMachine
from tests.kits.bench.explained import unexplained

TRACE = synthetic(Chat(rate_per_s=40.0, families=1), 100, random.Random(3))
SETUP = SimulationSetup(
    PROFILES["h200-qwen3-32b-tp2"], SimulatedPools(4, 2), max_answer_tokens=2048, joins_s=5.0
)


def run(**config):
    return simulate(TRACE, SETUP, RouterMachine(RouterConfig(seed=1, **config)))


def test_sequences_move_to_the_worker_that_joined_and_every_answer_is_whole():
    balanced, still = run(), run(balance=False)
    for each in (balanced, still):
        assert [len(r.times_s) for r in each.records] == [r.output_len for r in TRACE.requests]
    assert still.num_moved == 0
    assert balanced.num_moved > 5
    still_figures = join_figures(still.evenness, still.num_moved)
    after = join_figures(balanced.evenness, balanced.num_moved)
    assert after["join/ratio_before"].value > 5
    assert after["join/ratio_after"].value < still_figures["join/ratio_after"].value
    assert after["join/balance"].value < 2.0


def test_figures_of_samples():
    evenness = Evenness(10.0, [(10.0, (57, 0)), (11.0, (30, 12)), (12.0, (24, 18)), (20.0, (9, 9))])
    figures = join_figures(evenness, 20)
    assert {name: figure.value for name, figure in figures.items()} == {
        "join/ratio_before": 57,
        "join/ratio_after": 1.0,
        "join/moved": 20,
        "join/balance": 2.0,
    }
    never = join_figures(Evenness(10.0, [(10.0, (57, 0))]), 0)
    assert "join/balance" not in never


def test_every_figure_is_explained():
    names = figures_of(run(), SloBounds(1.0, 0.1), usd_per_gpu_hour=4.0)
    assert "join/moved" in names
    assert unexplained([*names, "goodput/distserve"], "simulator.md") == []
