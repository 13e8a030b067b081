"""The plan of `bench store` is a function of its options."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.kv.plan import KIB, MIB, cases_of
from bench.kv.plan import check as check_pulls
from bench.store.plan import (
    QUICK_PARTS,
    StorePart,
    StorePlan,
    StreamSetting,
    check,
    config_of,
    order_of_streams,
    quick,
    store_prompts,
)
from engine.errors import ConfigError

PLAN = StorePlan(Path("/"))


def test_blocks_of_the_shape_are_pulled_beside_small_and_large_ones():
    assert PLAN.block_bytes == 384 * KIB
    assert PLAN.pulls.block_sizes == (64 * KIB, 384 * KIB, 1 * MIB)
    assert check_pulls(PLAN.pulls) is not None
    assert {case.num_bytes for case in cases_of(PLAN.pulls) if case.is_whole} == {48 * MIB}


@pytest.mark.parametrize(("prompt_len", "cached_len"), [(2048, 2032), (2049, 2048), (512, 496)])
def test_one_token_of_a_prompt_is_left_to_compute(prompt_len, cached_len):
    assert replace(PLAN, prompt_len=prompt_len).cached_len == cached_len


def test_prompts_of_a_name_are_the_same_again_and_those_of_others_differ():
    plan = replace(PLAN, prompt_len=64)
    some = store_prompts(plan, range(100), 3, name="some")
    assert some == store_prompts(plan, range(100), 3, name="some")
    assert {len(prompt) for prompt in some} == {64}
    others = store_prompts(plan, range(100), 3, name="others")
    assert len({tuple(prompt) for prompt in some + others}) == 6


def test_each_repetition_has_all_settings_and_not_always_the_same_order():
    orders = [order_of_streams(PLAN, repeat) for repeat in range(8)]
    assert all(sorted(order) == sorted(StreamSetting) for order in orders)
    assert len({tuple(order) for order in orders}) > 1


def test_quick_plan_has_no_part_that_needs_load():
    plan = quick(PLAN)
    assert plan.parts == QUICK_PARTS
    assert plan.prompt_len < PLAN.prompt_len
    assert quick(replace(PLAN, parts=(StorePart.DISK,))).parts == (StorePart.DISK,)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (replace(PLAN, parts=()), "--parts"),
        (replace(PLAN, prompt_len=16), "--prompt-len"),
        (replace(PLAN, prompt_len=4096), "--prompt-len"),
        (replace(PLAN, disk=Path("/nowhere")), "--disk"),
        (replace(PLAN, shape="9b"), "9b"),
    ],
)
def test_wrong_option_is_named(wrong, said):
    with pytest.raises(ConfigError, match=said):
        check(wrong)


def test_config_names_no_directory_of_the_machine():
    assert str(Path("/nowhere")) not in map(str, config_of(replace(PLAN, disk=Path("/nowhere"))))
    assert "/nowhere" not in map(str, config_of(replace(PLAN, disk=Path("/nowhere"))).values())
