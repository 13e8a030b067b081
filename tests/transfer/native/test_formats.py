"""C++ converts records to the same bytes as numpy."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.layout import KVFormat, KVLayout, KVSection, Shard
from kvtransfer.formats import convert, is_defined
from kvtransfer.native.copying import copy_records
from kvtransfer.records import packing, plan_pieces, shared_layout, unpacking
from tests.kits.twins.formats import convert as in_numpy

PAIRS = [(source, to) for source in KVFormat for to in KVFormat if is_defined(source, to)]

sections = st.builds(
    KVSection,
    num_layers=st.integers(1, 2),
    num_kv_heads=st.integers(0, 2),
    head_dim=st.sampled_from([2, 6, 16, 34, 128]),
)


def numbers(rng, shape):
    """Returns finite numbers of all magnitudes, one magnitude per row, with zeros of both signs."""
    exponents = rng.choice([-45.0, -40, -38, -20, -1, 0, 3, 25, 38], (*shape[:-1], 1))
    x = rng.uniform(-3.3, 3.3, shape) * 10.0**exponents  # all numbers are finite in bf16 too
    x[rng.random(shape) < 0.1] = 0
    x[rng.random(shape) < 0.05] *= -0.0
    x[rng.random(shape[:-1]) < 0.1] = 0
    x[rng.random(shape[:-1]) < 0.1] = 1.7
    return x.astype(np.float32)


def records_of(rng, num_records, layout):
    """Returns random records in the layout's format, with nonzero padding."""
    plain = KVLayout(layout.block_size, KVFormat.FP32, layout.sections)
    shape = (num_records, plain.block_bytes // 64, 16)
    records = numbers(rng, shape).view(np.uint8).reshape(num_records, plain.block_bytes)
    return records if layout == plain else in_numpy(records, plain, layout.kv_format)


@pytest.mark.parametrize(("source", "to"), PAIRS)
@given(
    block_size=st.sampled_from([1, 3, 16]),
    sections=st.lists(sections, max_size=2).map(tuple),
    num_records=st.integers(0, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_both_implementations_give_the_same_bytes(
    source, to, block_size, sections, num_records, seed
):
    layout = KVLayout(block_size, source, sections)
    records = records_of(np.random.default_rng(seed), num_records, layout)
    before = records.copy()
    assert np.array_equal(convert(records, layout, to), in_numpy(records, layout, to))
    assert np.array_equal(records, before)


@pytest.mark.parametrize("source", [KVFormat.FP32, KVFormat.BF16])
@pytest.mark.parametrize("to", KVFormat)
def test_all_bit_patterns_of_bf16_are_converted_alike(source, to):
    """Pairs each bf16 number with itself and with others: every exponent, sign and last bit."""
    bits = np.arange(2**16, dtype=np.uint16)
    finite = bits[bits & 0x7F80 != 0x7F80]
    layout = KVLayout(len(finite), source, (KVSection(1, 1, 2),))
    pairs = np.stack((np.stack((finite, finite[::-1])), np.stack((finite, finite ^ 1))))
    x = (pairs.transpose(0, 2, 1).astype(np.uint32) << 16).view(np.float32)  # [token, K and V, 2]
    if source is KVFormat.BF16:
        elements = pairs.transpose(0, 2, 1).copy().view(np.uint8)
    else:
        elements = np.ascontiguousarray(x).view(np.uint8)
    heads = np.zeros((2, layout.head_bytes(0)), np.uint8)
    heads[:, : elements[0].size] = elements.reshape(2, -1)
    records = heads.reshape(1, -1)
    assert np.array_equal(convert(records, layout, to), in_numpy(records, layout, to))


@pytest.mark.parametrize("to", KVFormat)
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_a_token_that_is_not_finite_spoils_no_other(to, odd):
    layout = KVLayout(4, KVFormat.FP32, (KVSection(1, 1, 16),))
    x = np.random.default_rng(0).standard_normal((1, 2, 4, 16)).astype(np.float32)
    spoilt = x.copy()
    spoilt[0, 0, 1, 3] = odd
    found, clean = (
        convert(
            convert(values.view(np.uint8).reshape(1, -1), layout, to),
            KVLayout(4, to, layout.sections),
            KVFormat.FP32,
        )
        .view(np.float32)
        .reshape(x.shape)
        for values in (spoilt, x)
    )
    found[0, 0, 1] = clean[0, 0, 1] = 0
    assert np.array_equal(found, clean)


@pytest.mark.parametrize("size", [2, 4])
def test_a_share_of_the_heads_is_converted_on_its_way(size):
    """The source has whole records in fp32, and each rank of the sink has int8 records of its own
    heads.

    The test also converts in the opposite direction.
    """
    shapes = (KVSection(2, 4, 16), KVSection(1, 8, 6))
    whole = KVLayout(3, KVFormat.FP32, shapes)
    records = records_of(np.random.default_rng(2), 5, whole)
    expected = convert(records, whole, KVFormat.INT8)
    found = np.zeros_like(expected)
    for rank in range(size):
        shard, all_heads = Shard(rank, size), Shard()
        shared = shared_layout(whole, all_heads, shard)
        wide = msgspec.structs.replace(whole, kv_format=KVFormat.INT8)
        sending = packing(plan_pieces(whole, all_heads, shard))
        arriving = unpacking(plan_pieces(wide, shard, all_heads))
        packed = np.empty((5, shared.block_bytes), np.uint8)
        copy_records(packed, None, records, None, sending)
        copy_records(found, None, convert(packed, shared, KVFormat.INT8), None, arriving)
    assert np.array_equal(found, expected)


def test_a_structure_holds_all_that_c_reads():
    """Only the last of many sections is converted, so sizes and order of the fields must agree with
    C++.
    """
    shapes = tuple(KVSection(1, 1 + i % 2, 2 + 2 * i) for i in range(9))
    layout = KVLayout(3, KVFormat.FP32, shapes)
    records = records_of(np.random.default_rng(1), 2, layout)
    assert np.array_equal(
        convert(records, layout, KVFormat.INT8), in_numpy(records, layout, KVFormat.INT8)
    )
