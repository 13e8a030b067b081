from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from bench.common.prompts import (
    PromptShape,
    plain_token_ids,
    token_prompts,
)

FEW = settings(max_examples=20)  # a unit test may take 50 ms

VOCAB = range(100, 600)


@FEW
@given(st.integers(1, 50), st.integers(1, 40), st.integers())
def test_token_prompts_have_the_exact_length_and_no_common_prefix(count, input_len, seed):
    prompts = token_prompts(VOCAB, PromptShape(count, input_len), Random(seed))
    assert [len(prompt) for prompt in prompts] == [input_len] * count
    assert len({prompt[0] for prompt in prompts}) == count
    assert all(token in VOCAB for prompt in prompts for token in prompt)


@FEW
@given(st.integers(2, 20), st.integers(1, 30), st.integers())
def test_prompts_share_exactly_the_prefix_that_was_asked_for(count, prefix_len, seed):
    shape = PromptShape(count, prefix_len + 5, shared_prefix_len=prefix_len)
    prompts = token_prompts(VOCAB, shape, Random(seed))
    assert len({tuple(prompt[:prefix_len]) for prompt in prompts}) == 1
    assert len({prompt[prefix_len] for prompt in prompts}) == count


def test_a_shared_prefix_must_leave_room_for_a_token_of_its_own():
    with pytest.raises(ValueError, match="no room"):
        PromptShape(1, 8, shared_prefix_len=8)


def test_special_tokens_are_not_drawn(tmp_path):
    model = WordLevel({"<s>": 0, "a": 1, "b": 2}, unk_token="<s>")
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert plain_token_ids(tmp_path) == [1, 2]
