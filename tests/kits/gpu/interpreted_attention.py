"""Runs the Triton kernels under triton's interpreter, on a CPU.

`test_cuda_attention.py` runs this file in its own process, because triton decides on import whether
it interprets kernels.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

from engine.layout import KVFormat
from engine.model.attention import cuda as triton_attention
from engine.model.attention import kernels
from engine.model.attention.base import AttentionBatch, Extent, Scoring, build_batch
from engine.model.attention.cuda import attend
from engine.model.attention.prefill import LONG_ROW
from engine.model.packing import PAD_SLOT
from tests.kits.models.attention_cases import (
    DECODE,
    LAYER,
    MIXED,
    PLAIN,
    RAGGED,
    check_attend,
    check_company,
    make_problem,
    run,
)

FP32, BF16, FP8, INT8, INT4 = KVFormat
LONG_DECODE, VERIFY, PREFILL = RAGGED[3], RAGGED[4], ((500, 70), (0, 30), (40, 1))
TOLERANCE = 1e-5  # output values reach 12
SMALL = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "block_size": 16}


def check(kv_format, lengths, *, heads=(2, 1), scoring=PLAIN, **changes):
    case = SMALL | {"num_heads": heads[0], "num_kv_heads": heads[1]} | changes
    tolerance = case.pop("tolerance", TOLERANCE)
    check_attend(
        attend, kv_format=kv_format, lengths=lengths, scoring=scoring, tolerance=tolerance, **case
    )


@pytest.mark.parametrize(
    ("kv_format", "heads"), [*((kv_format, (3, 1)) for kv_format in KVFormat), (INT8, (2, 2))]
)
def test_every_format_and_any_group_of_heads(kv_format, heads):
    check(kv_format, MIXED[1:4], heads=heads, head_dim=64)


@pytest.mark.parametrize(("kv_format", "head_dim"), [(BF16, 96), (INT4, 80), (INT8, 256)])
def test_head_sizes_that_need_padding_and_large_ones(kv_format, head_dim):
    check(kv_format, DECODE[3:5], head_dim=head_dim, scoring=Scoring(head_dim**-0.5))


@pytest.mark.parametrize("kv_format", [BF16, FP8, INT4])
def test_windows_and_softcaps(kv_format):
    check(kv_format, DECODE[2:4], scoring=Scoring(0.3, window=5))
    check(kv_format, MIXED[1:2], scoring=Scoring(0.3, softcap=0.7))
    check(kv_format, MIXED[2:3], scoring=Scoring(0.3, window=4, softcap=0.7))


@pytest.mark.parametrize("kv_format", [FP32, INT8])
def test_long_contexts_are_split_and_merged(kv_format):
    check(kv_format, LONG_DECODE)


@pytest.mark.parametrize("kv_format", [INT4])
def test_verification_of_drafts_over_long_contexts(kv_format):
    check(kv_format, VERIFY, heads=(4, 1))


@pytest.mark.parametrize(("kv_format", "window"), [(BF16, 100)])
def test_prefill_chunks_beside_a_decode_step(monkeypatch, kv_format, window):
    # a few units fill one SM, so nothing is split
    monkeypatch.setattr(triton_attention, "INTERPRETED_SMS", 1)
    triton_attention._num_sms.cache_clear()
    check(kv_format, PREFILL, heads=(8, 1), scoring=Scoring(0.3, window=window))
    triton_attention._num_sms.cache_clear()


@pytest.mark.parametrize(("kv_format", "block_size"), [(INT8, 1), (FP8, 3), (BF16, 32)])
def test_any_block_size(kv_format, block_size):
    check(kv_format, MIXED[1:3], block_size=block_size)


@pytest.mark.parametrize("kv_format", [BF16, FP8])
def test_a_bf16_model_on_any_format(kv_format):
    check(kv_format, MIXED[1:2], dtype=torch.bfloat16, tolerance=0.06)  # output values reach 12


def test_a_row_gets_the_same_alone_and_in_company_but_for_rounding():
    check_company(
        attend, **SMALL, kv_format=INT8, lengths=DECODE[1:4], scoring=Scoring(0.3), tolerance=1e-5
    )


def test_a_long_row_with_nothing_before_it_goes_to_torch_and_its_neighbours_do_not():
    lengths = ((20, 1), (0, LONG_ROW), (0, 3))
    check(BF16, lengths, dtype=torch.bfloat16, tolerance=0.06)


def padded(batch, num_rows, row_len, width):
    """Pads a batch like a captured step: extra rows and tokens, wider tables, lengths on the
    device.

    Returns the padded batch and the indices of the tokens that are not padding.
    """
    extra = num_rows - len(batch.extents)
    tables = torch.zeros(num_rows, width, dtype=torch.int32)
    tables[: len(batch.extents), : batch.block_tables.shape[1]] = batch.block_tables
    places = [
        (row + 1) * row_len - extent.query_len + i
        for row, extent in enumerate(batch.extents)
        for i in range(extent.query_len)
    ]
    slots = torch.full([num_rows * row_len], PAD_SLOT)
    slots[places] = batch.slot_mapping
    filled_up = AttentionBatch(
        extents=tuple(Extent(i * row_len, row_len, width) for i in range(num_rows)),
        cu_seqlens_q=torch.arange(num_rows + 1, dtype=torch.int32) * row_len,
        context_lens=torch.nn.functional.pad(batch.context_lens, (0, extra)),
        block_tables=tables,
        slot_mapping=slots,
    )
    return filled_up, places


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(
    ("lengths", "row_len"), [(DECODE[:3], 1), (((6, 3), (0, 2), (70, 4), (0, 1)), 4)]
)
def test_tokens_that_fill_a_batch_up_store_nothing_and_disturb_no_others(window, lengths, row_len):
    problem = make_problem(**SMALL, kv_format=INT8, lengths=lengths)
    scoring = Scoring(0.3, window=window)
    expected = run(attend, problem, scoring)
    left = problem.cache.buffer.clone()
    batch, places = padded(build_batch(problem.rows, problem.cache), len(lengths) + 2, row_len, 9)
    fill = []
    for x in (problem.query, problem.key, problem.value):
        fill.append(torch.full((len(batch.slot_mapping), *x.shape[1:]), 9.0))
        fill[-1][places] = x
    found = attend(*fill, problem.cache, LAYER, batch, scoring)
    assert torch.equal(problem.cache.buffer, left)
    assert found.isfinite().all()
    assert not found[len(lengths) * row_len :].any()
    torch.testing.assert_close(found[places], expected, rtol=0, atol=TOLERANCE)


def test_more_rows_than_are_looked_at_at_once(monkeypatch):
    monkeypatch.setattr(kernels, "ROWS_AT_ONCE", kernels.tl.constexpr(4))
    check(BF16, [(17 * i % 40, 1 if i % 4 else 2) for i in range(14)])
    check(INT8, VERIFY * 2)
