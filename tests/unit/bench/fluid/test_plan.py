"""The mixes, orders and limits of `bench fluid`."""

from dataclasses import replace

import pytest

from bench.fluid.plan import (
    COMPARED,
    LIVE_PARTS,
    BoundSetting,
    FluidDeployment,
    FluidPart,
    FluidPlan,
    bound_s,
    check,
    config_of,
    mixes_of,
    order_of,
    parts_of,
    quick,
    starts_s,
    stream_order_of,
)
from bench.lab.streams import StreamAsk
from engine.errors import ConfigError

PLAN = FluidPlan(
    "tiny",
    mixes_of("1024/16,64/256,turning"),
    streams=StreamAsk(2, 8, 300),
    prompts=StreamAsk(1, 512, 1),
    num_repeats=3,
    seed=7,
)


def test_mixes_are_named_after_their_tokens():
    steady, _, turning = PLAN.mixes
    assert (steady.name, steady.phases) == ("1024+16", ((1024, 16),))
    assert steady.lengths_at(1e3, 2.0) == (1024, 16)
    assert turning.phases == ((1024, 16), (64, 256))


def test_turning_mix_alternates_in_the_ramp_too():
    turning = PLAN.mixes[-1]
    times_s = (-2.1, -1, 0, 1.9, 2, 3.9, 4)
    reads = [turning.lengths_at(elapsed_s, 2.0)[0] == 1024 for elapsed_s in times_s]
    assert reads == [True, False, True, True, False, False, True]


def test_clients_begin_one_after_the_other():
    assert starts_s(4, 2.0) == [0.0, 0.5, 1.0, 1.5]
    assert starts_s(4, 0.0) == [0.0] * 4


def test_each_phase_of_a_mix_has_a_whole_window():
    assert [mix.window_s(10.0) for mix in PLAN.mixes] == [10.0, 10.0, 20.0]


def test_turning_mix_is_that_of_the_two_extremes():
    [*_, turning] = mixes_of("256/64,64/256,1024/16,turning")
    assert turning.phases == ((1024, 16), (64, 256))


@pytest.mark.parametrize("text", ["", "turning", "1024/16,turning", "1024", "0/16", "a/b"])
def test_impossible_mixes_are_refused(text):
    with pytest.raises(ConfigError, match="--mixes"):
        mixes_of(text)


def test_parts_are_read_from_a_list():
    assert parts_of("bound", LIVE_PARTS) == {FluidPart.BOUND}
    assert parts_of("mixes,bound", LIVE_PARTS) == parts_of(None, LIVE_PARTS) == LIVE_PARTS
    for text in ("", "all", "goodput"):
        with pytest.raises(ConfigError, match="--parts"):
            parts_of(text, LIVE_PARTS)


def test_each_repetition_plays_each_mix_on_all_deployments_in_a_row():
    orders = [order_of(PLAN, repeat) for repeat in range(8)]
    assert len({tuple(map(str, order)) for order in orders}) > 1
    for order in orders:
        for start in range(0, len(order), len(COMPARED)):
            near = order[start : start + len(COMPARED)]
            assert len({mix for mix, _ in near}) == 1
            assert {deployment for _, deployment in near} == set(COMPARED)
        assert {mix for mix, _ in order} == set(PLAN.mixes)
    assert orders == [order_of(replace(PLAN), repeat) for repeat in range(8)]


def test_streams_run_with_and_without_prompts_on_the_same_deployment():
    assert sorted(stream_order_of(PLAN, 0)) == sorted(BoundSetting)
    assert BoundSetting.BOUND.deployment is FluidDeployment.BOUND
    assert BoundSetting.BOUND_IDLE.deployment is FluidDeployment.BOUND
    assert BoundSetting.WALLED_IDLE.deployment is FluidDeployment.WALLED
    assert [setting for setting in BoundSetting if setting.has_prompts] == ["bound", "walled"]


def test_bound_leaves_a_quarter_over_the_pace_of_streams_alone():
    assert bound_s(0.010) == pytest.approx(0.0125)


def test_quick_plan_plays_two_steady_mixes_once():
    brief = quick(PLAN)
    assert [mix.name for mix in brief.mixes] == ["1024+16", "64+256"]
    assert (brief.num_repeats, brief.parts) == (1, {FluidPart.MIXES})
    assert brief.window_s < PLAN.window_s


def test_plan_that_fits_is_kept_and_told_in_the_report():
    assert check(PLAN) is PLAN
    told = config_of(PLAN, {"tpot_bound_s": 0.0125})
    assert told["mixes"] == "1024+16,64+256,turning"
    assert (told["tpot_bound_s"], told["streams_output_len"], told["clients"]) == (0.0125, 300, 8)


@pytest.mark.parametrize(
    "rest",
    [
        {"mixes": mixes_of("4000/100")},
        {"streams": StreamAsk(1, 4000, 100)},
        {"prompts": StreamAsk(1, 4096, 1)},
        {"shape": "huge"},
    ],
)
def test_requests_that_do_not_fit_the_model_are_refused(rest):
    with pytest.raises(ConfigError):
        check(replace(PLAN, **rest))
