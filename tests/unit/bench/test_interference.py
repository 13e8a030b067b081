"""The results and warnings of `bench interference`, and the order of its requests."""

import asyncio
import json
from dataclasses import replace
from itertools import count, islice
from random import Random

import pytest

from bench.client.answers import Failure
from bench.client.load import RequestsFailed
from bench.interference.plan import (
    DEPLOYMENT,
    InterferencePlan,
    InterferenceRequests,
    PoolSetting,
    ascii_tokenizer,
    bodies,
    check,
    config_of,
    order_of,
    quick,
)
from bench.interference.results import InterferenceRun, promises, results, warnings
from bench.interference.run import run_beside
from engine.errors import ConfigError
from tests.kits.answers import answer_at

IDLE, APART, TOGETHER = PoolSetting.IDLE, PoolSetting.DISAGGREGATED, PoolSetting.COLOCATED
PLAN = InterferencePlan(
    "tiny", InterferenceRequests(2, 8, 300), InterferenceRequests(1, 1024, 1), num_repeats=3, seed=7
)


def stream(gap_s, *, begin_s=0.0, num=101, **rest):
    return answer_at([begin_s + i * gap_s for i in range(num)], **rest)


def prompt(sent_s, end_s, **rest):
    return answer_at([end_s], sent_s=sent_s, **rest)


def run(setting, gap_s, **rest):
    """Two streams of a hundred even gaps; where there is a load, one prompt after the other."""
    num_prompts = 0 if setting is IDLE else 4
    end_s = 100 * gap_s
    figures = {
        "streams": (stream(gap_s), stream(gap_s)),
        "prompts": tuple(prompt(i * end_s / 4, (i + 1) * end_s / 4) for i in range(num_prompts)),
        "wall_s": 2 * end_s,
        "gateway_cpu_s": 0.1 * end_s,
        "client_cpu_s": 0.2 * end_s,
        "others_share": 0.01,
    }
    return InterferenceRun(setting, **{**figures, **rest})


def runs():
    """Three repetitions; the middle one is the median."""
    gaps_s = {IDLE: 0.010, APART: 0.012, TOGETHER: 0.120}
    return [run(s, gap_s * (1 + i)) for i in range(3) for s, gap_s in gaps_s.items()]


def by_name(found):
    return {result.name: result for result in found}


def test_each_p99_stands_beside_the_one_it_is_held_against():
    found = by_name(results(runs()))
    assert found["itl_p99/idle"].value == pytest.approx(20)
    assert found["itl_p99/idle"].runs == pytest.approx((10, 20, 30))
    assert not found["itl_p99/idle"].peers
    assert found["itl_p99/disaggregated"].peers["idle"].ratio == pytest.approx(1.2)
    assert found["itl_p99/colocated"].peers["disaggregated"].ratio == pytest.approx(10)
    assert not found["itl_p50/colocated"].peers


def test_the_promises_are_told_with_what_was_reached():
    assert promises(results(runs())) == [
        "p99 of gaps, disaggregated: 1.20 × idle (promised: at most 1.3)",
        "p99 of gaps, colocated: 10.00 × disaggregated (promised: at least 2)",
    ]


def test_prompts_and_cpu_are_told_for_each_setting():
    found = by_name(results([run(IDLE, 0.01), run(APART, 0.01)]))
    assert found["prompts_per_s/idle"].value == 0
    assert "ttft/idle" not in found
    assert found["prompts_per_s/disaggregated"].value == pytest.approx(4, rel=0.02)
    assert found["ttft/disaggregated"].value == pytest.approx(250)
    assert found["cpu_gateway/idle"].value == pytest.approx(5)
    assert found["cpu_client/idle"].value == pytest.approx(10)
    assert found["cpu_others/idle"].value == pytest.approx(1)


def test_only_gaps_count_in_which_all_streams_decode():
    early = answer_at([0, 5, 6, 7, 8, 9])  # the first gap: alone; the last two: it is alone again
    late = answer_at([4, 5.5, 6.5, 7.5])  # the first gap: it is handed over
    alone = run(IDLE, 1, streams=(early, late))
    assert alone.window_s == (5.5, 7.5)
    assert alone.gaps_s == [1, 1, 1]


def test_a_percentile_is_of_the_gaps_of_all_streams():
    even = stream(0.010, num=100)
    [*times_s, last_s] = even.chunk_times_s
    held_up = answer_at([*times_s, last_s + 0.5])
    found = by_name(results([run(IDLE, 0.01, streams=(even, held_up))]))
    assert found["itl_max/idle"].value == pytest.approx(10)  # the long gap ends after the window
    times_s = [i * 0.01 + (0.5 if i >= 50 else 0) for i in range(100)]
    found = by_name(results([run(IDLE, 0.01, streams=(answer_at(times_s), answer_at(times_s)))]))
    assert found["itl_max/idle"].value == pytest.approx(510)
    assert found["itl_p50/idle"].value == pytest.approx(10)
    assert 10 < found["itl_p99/idle"].value < 510


def test_unmeasurable_gaps_are_no_reference():
    together = (answer_at([1] * 200 + [2]),) * 2
    found = by_name(results([run(IDLE, 0.01, streams=together), run(APART, 0.01)]))
    assert found["itl_p99/idle"].value == 0
    assert not found["itl_p99/disaggregated"].peers


def test_a_clean_measurement_warns_of_nothing():
    assert warnings(runs()) == []


@pytest.mark.parametrize(
    ("rest", "told"),
    [
        ({"others_share": 0.2}, "other processes used up to 20% of the CPU"),
        ({"streams": (stream(0.01, num_tokens=110),) * 2}, "1.09 tokens came in a chunk"),
        ({"prompts": (prompt(0, 0.5),)}, "prompts were under way for only 49% of a run"),
        ({"prompts": (prompt(0, 1, num_cached=64),)}, "64 tokens of prompts were cached"),
    ],
)
def test_disturbed_measurement_warns(rest, told):
    [line] = warnings([run(APART, 0.01, **rest)])
    assert line.startswith(told)


def test_overlapping_prompts_count_once():
    overlapping = (prompt(0.0, 0.6), prompt(0.2, 0.4), prompt(0.5, 0.8))
    loaded = run(APART, 0.01, prompts=overlapping)
    begin_s, end_s = loaded.window_s
    assert loaded.loaded_share == pytest.approx((0.8 - begin_s) / (end_s - begin_s))


def test_settings_come_in_another_order_in_each_repetition_and_in_the_same_for_a_seed():
    orders = [order_of(PLAN, repeat) for repeat in range(10)]
    assert all(sorted(order) == sorted(PoolSetting) for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert orders == [order_of(replace(PLAN), repeat) for repeat in range(10)]


def test_streams_alone_run_where_they_do_with_prompts_elsewhere():
    assert DEPLOYMENT == {IDLE: APART, APART: APART, TOGETHER: TOGETHER}


def test_no_two_prompts_are_alike():
    asked = [json.loads(body) for body in islice(_bodies(InterferenceRequests(1, 16, 4)), 50)]
    assert len({tuple(body["prompt"]) for body in asked}) == 50
    assert {len(body["prompt"]) for body in asked} == {16}
    assert {(body["max_tokens"], body["ignore_eos"], body["stream"]) for body in asked} == {
        (4, True, True)
    }


def _bodies(ask):
    return bodies(ask, range(3, 512), model="m", rng=Random(1))


def test_every_token_has_a_text_of_its_own():
    tokenizer = ascii_tokenizer(512)
    texts = [tokenizer.decode([i]) for i in range(512)]
    assert texts[:3] == ["", "", ""]  # special
    assert all(1 <= len(text) <= 2 and text.isascii() for text in texts[3:])
    assert len(set(texts[3:])) == 509


def test_a_plan_that_fits_is_kept_and_a_report_says_what_it_was():
    assert check(PLAN) is PLAN
    assert config_of(PLAN) == {
        "shape": "tiny",
        "streams_at_once": 2,
        "streams_input_len": 8,
        "streams_output_len": 300,
        "load_at_once": 1,
        "load_input_len": 1024,
        "load_output_len": 1,
        "num_repeats": 3,
    }


@pytest.mark.parametrize(
    "rest",
    [
        {"streams": InterferenceRequests(1, 4000, 100)},
        {"load": InterferenceRequests(1, 4097, 1)},
        {"shape": "huge"},
    ],
)
def test_what_does_not_fit_the_model_is_refused(rest):
    with pytest.raises(ConfigError):
        check(replace(PLAN, **rest))


def test_a_quick_plan_runs_once_and_briefly():
    plan = quick(PLAN)
    assert (plan.num_repeats, plan.streams.output_len) == (1, 128)
    assert plan.load == PLAN.load


# ---------------------------------------------------------------- order of requests


class FakeServer:
    """Ends streams once `num_prompts` prompts were answered; answers prompts at once, or fails."""

    def __init__(self, num_prompts=0, fails=()):
        self.num_prompts = num_prompts
        self.fails = fails
        self.prompts = []
        self.under_way = self.most_under_way = 0
        self.enough = asyncio.Event()
        if not num_prompts:
            self.enough.set()

    async def send(self, body):
        if body in self.fails:
            return Failure("http_500", body.decode())
        if body.startswith(b"stream"):
            await self.enough.wait()
            return answer_at([1, 2, 3])
        self.prompts.append(body)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        for _ in range(3):  # turns of the loop: time enough for others to be sent
            await asyncio.get_running_loop().run_in_executor(None, int)
        self.under_way -= 1
        if len(self.prompts) >= self.num_prompts:
            self.enough.set()
        return answer_at([1])


def beside(server, *, num_loaders, streams=(b"stream 1", b"stream 2")):
    load = (b"prompt %d" % i for i in count())
    return asyncio.run(run_beside(server.send, streams, load, num_loaders=num_loaders))


def test_a_loader_sends_each_prompt_when_the_one_before_is_answered_until_all_streams_end():
    server = FakeServer(num_prompts=5)
    answers, others = beside(server, num_loaders=1)
    assert len(answers) == 2
    assert server.most_under_way == 1
    assert server.prompts[:5] == [b"prompt %d" % i for i in range(5)]
    assert len(others) == len(server.prompts) <= 6


def test_several_loaders_keep_as_many_prompts_under_way():
    server = FakeServer(num_prompts=9)
    beside(server, num_loaders=3)
    assert server.most_under_way == 3
    assert len(set(server.prompts)) == len(server.prompts)


def test_without_loaders_there_is_no_prompt():
    server = FakeServer()
    assert beside(server, num_loaders=0) == ((answer_at([1, 2, 3]),) * 2, [])
    assert server.prompts == []


def test_a_prompt_that_fails_is_told_and_the_load_goes_on():
    _, others = beside(FakeServer(num_prompts=3, fails=(b"prompt 1",)), num_loaders=1)
    assert Failure("http_500", "prompt 1") in others
    assert len(others) >= 4


def test_run_with_a_failed_stream_has_no_figures():
    server = FakeServer(num_prompts=3, fails=(b"stream 2",))
    with pytest.raises(RequestsFailed, match="1 of 2 streams failed: 1 http_500"):
        beside(server, num_loaders=1)
