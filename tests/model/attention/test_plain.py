"""The plain torch fallback equals the reference for every format, and rows do not affect each
other.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.layout import KVFormat
from engine.model.attention.base import Scoring
from engine.model.attention.plain import attend
from tests.kits.models.attention_cases import (
    CASES,
    DECODE,
    MIXED,
    case_id,
    check_attend,
    check_company,
)

pytestmark = pytest.mark.torch

TOLERANCE = 1e-5  # absolute error; values reach 12
SHAPE = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
SCORINGS = (Scoring(0.3), Scoring(0.3, window=5), Scoring(0.3, softcap=1.0))


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_the_fallback_equals_the_reference(case):
    check_attend(attend, tolerance=TOLERANCE, **case)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), min_size=1, max_size=8),
    window=st.none() | st.integers(1, 12),
    softcap=st.none() | st.just(2.0),
    kv_format=st.sampled_from(KVFormat),
    block_size=st.sampled_from([1, 3, 4, 16]),
)
@settings(max_examples=40, deadline=None)
def test_the_fallback_equals_the_reference_for_any_ragged_batch(
    lengths, window, softcap, kv_format, block_size
):
    check_attend(
        attend,
        **SHAPE,
        kv_format=kv_format,
        lengths=lengths,
        scoring=Scoring(0.3, window=window, softcap=softcap),
        block_size=block_size,
        tolerance=TOLERANCE,
    )


@pytest.mark.parametrize("kv_format", KVFormat)
@pytest.mark.parametrize("scoring", SCORINGS, ids=str)
def test_a_bf16_model_reads_any_format(kv_format, scoring):
    check_attend(
        attend,
        **SHAPE,
        kv_format=kv_format,
        lengths=MIXED,
        scoring=scoring,
        dtype=torch.bfloat16,
        tolerance=0.1,  # scores up to 10 and values up to 12, in eight bits
    )


@pytest.mark.parametrize("lengths", [MIXED, DECODE], ids=["mixed", "decode"])
@pytest.mark.parametrize("kv_format", KVFormat)
@pytest.mark.parametrize("scoring", SCORINGS, ids=str)
def test_a_row_has_the_same_result_alone_and_in_a_batch(lengths, kv_format, scoring):
    check_company(
        attend,
        **SHAPE,
        kv_format=kv_format,
        lengths=lengths,
        scoring=scoring,
        block_size=4,
        tolerance=TOLERANCE,
    )
