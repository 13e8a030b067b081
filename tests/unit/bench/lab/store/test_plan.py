"""The plan of `bench store` is determined by its options."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.lab.store.plan import store_prompts
from bench.lab.store.study import StoreStudy
from engine.errors import ConfigError

PLAN = StoreStudy()


def test_prompts_of_a_name_are_the_same_again_and_those_of_others_differ():
    plan = replace(PLAN, prompt_len=64)
    some = store_prompts(plan, range(100), 3, name="some")
    assert some == store_prompts(plan, range(100), 3, name="some")
    assert {len(prompt) for prompt in some} == {64}
    others = store_prompts(plan, range(100), 3, name="others")
    assert len({tuple(prompt) for prompt in some + others}) == 6


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
