"""The plan of `bench store` is a function of its options."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.lab.kv.cases import KIB, MIB
from bench.lab.store.plan import QUICK_PARTS, store_prompts
from bench.lab.store.study import StoreStudy
from engine.errors import ConfigError

PLAN = StoreStudy()


def test_blocks_of_the_shape_are_pulled_beside_small_and_large_ones():
    assert PLAN.block_bytes == 384 * KIB
    assert PLAN.pulls.block_sizes == (64 * KIB, 384 * KIB, 1 * MIB)
    assert {case.num_bytes for case in PLAN.pulls.cases} == {48 * MIB}


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


def test_a_quick_study_has_no_part_that_needs_load():
    study = PLAN.quick()
    assert study.chosen == QUICK_PARTS
    assert study.prompt_len < PLAN.prompt_len
    assert StoreStudy(parts="disk").quick().parts == "disk"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"parts": ""}, "--parts"),
        ({"prompt_len": 16}, "--prompt-len"),
        ({"prompt_len": 4096}, "--prompt-len"),
        ({"disk": Path("/nowhere")}, "--disk"),
        ({"shape": "9b"}, "9b"),
    ],
)
def test_wrong_option_is_named(wrong, said):
    with pytest.raises(ConfigError, match=said):
        StoreStudy(**wrong)


def test_config_names_no_directory_of_the_machine():
    assert "disk" not in StoreStudy(disk=Path("/")).config()
