import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.client.answers import Endpoint
from bench.client.load import SloBounds
from bench.serve.lengths import TalkShape, fixed, lengths_of
from bench.serve.plan import (
    ServeAsk,
    ServeLoad,
    ServePlan,
    ServeReplay,
    ServeTarget,
    check,
    config_of,
    quick,
    sessions,
)
from engine.errors import ConfigError

FEW = settings(max_examples=20)  # a unit test may take 50 ms

PLAN = ServePlan(
    target=ServeTarget("http://user:secret@host:8000", api_key="hidden"),
    load=ServeLoad(rate_per_s=5.0, num_requests=6, num_warmup=2, num_repeats=3),
    ask=ServeAsk(input_len=fixed(20), output_len=fixed(8)),
    seed=1,
)


def test_warm_up_and_repetitions_have_different_prompts():
    warmup, repeats = sessions(PLAN, None)
    assert (len(warmup), [len(own) for own in repeats]) == (2, [6, 6, 6])
    everything = [*warmup, *(session for own in repeats for session in own)]
    assert len({session.turns[0].added for session in everything}) == len(everything)


def test_repetitions_have_the_same_times_and_lengths():
    lengths = ServeAsk(lengths_of("--input-len", "uniform:1-90"), fixed(3))
    _, repeats = sessions(replace(PLAN, ask=lengths), None)
    shapes = [[(s.due_s, len(s.turns[0].added)) for s in own] for own in repeats]
    assert shapes[0] == shapes[1] == shapes[2]
    assert len({length for _, length in shapes[0]}) > 1


def test_arrivals_and_prompts_follow_the_seed_alone():
    other = replace(PLAN, seed=2)
    assert sessions(PLAN, range(99)) == sessions(PLAN, range(99))
    assert due_times_s(PLAN) == due_times_s(replace(PLAN, ask=ServeAsk(fixed(9), fixed(9))))
    assert due_times_s(PLAN) != due_times_s(other)


def due_times_s(plan):
    _, [own, *_] = sessions(plan, range(99))
    return [session.due_s for session in own]


def test_a_recorded_config_is_json_and_holds_no_secret():
    plan = replace(PLAN, load=replace(PLAN.load, rate_per_s=math.inf), slo=SloBounds(ttft_s=0.5))
    config = config_of(plan, "m")
    text = json.dumps(config, allow_nan=False)
    assert "secret" not in text
    assert "hidden" not in text
    assert "hidden" not in repr(plan)
    assert (config["url"], config["rate_per_s"]) == ("http://host:8000", "inf")
    assert (config["slo_ttft_ms"], config["slo_tpot_ms"]) == (500.0, None)


@FEW
@given(st.floats(0.01, 100), st.integers(1, 500), st.integers(1, 9), st.integers(1, 4000))
def test_a_quick_plan_is_short_and_can_be_carried_out(rate, num_requests, num_repeats, length):
    load = ServeLoad(rate, num_requests, num_repeats=num_repeats)
    plan = quick(
        replace(
            PLAN,
            load=load,
            ask=ServeAsk(fixed(length), fixed(length), shared_prefix_len=length - 1),
        )
    )
    assert check(plan) == plan
    assert plan.load.num_requests / plan.load.rate_per_s + 2 * plan.target.timeout_s < 48
    assert plan.load.num_repeats == 1
    assert plan.ask.output_len.most <= 32


@pytest.mark.parametrize(
    ("plan", "option"),
    [
        (replace(PLAN, load=ServeLoad(0.0, 1)), "--rate"),
        (replace(PLAN, load=ServeLoad(math.nan, 1)), "--rate"),
        (replace(PLAN, load=ServeLoad(1.0, 1, burstiness=0.0)), "--burstiness"),
        (
            replace(PLAN, ask=ServeAsk(fixed(8), fixed(8), shared_prefix_len=8)),
            "--shared-prefix-len",
        ),
        (replace(PLAN, target=ServeTarget("host:8000")), "--url"),
        (replace(PLAN, load=ServeLoad(1.0, 1, ramp_to_per_s=0.0)), "--ramp-to"),
        (replace(PLAN, load=ServeLoad(1.0, 1, ramp_to_per_s=2.0, clients=1)), "--ramp-to"),
        (replace(PLAN, load=ServeLoad(1.0, 1, clients=2, concurrency_limit=2)), "--clients"),
        (replace(PLAN, load=ServeLoad(1.0, 1, clients=2, num_processes=3)), "--clients"),
        (replace(PLAN, load=ServeLoad(1.0, 1, num_processes=65)), "--processes"),
        (replace(PLAN, replay=ServeReplay(Path("t")), talk=TalkShape(turns=fixed(2))), "--trace"),
        (
            replace(
                PLAN,
                target=ServeTarget("http://host", Endpoint.CHAT),
                ask=ServeAsk(fixed(8), fixed(8), tokenizer_dir=Path("here")),
            ),
            "--tokenizer",
        ),
    ],
)
def test_a_plan_that_cannot_be_carried_out_names_the_option(plan, option):
    with pytest.raises(ConfigError, match=option):
        check(plan)
