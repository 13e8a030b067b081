"""The tensors lie where the text of `engine.layout` defines, and contain what the formats
define.
"""

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.layout import ALIGNMENT_BYTES, KVFormat, KVLayout, KVSection
from engine.model.attention.kvcache import (
    ELEMENT_DTYPES,
    KVCache,
    allocate_buffer,
    dequantise,
    quantise,
    wrap_buffer,
)

pytestmark = pytest.mark.torch

NUM_BLOCKS = 5
SCALED = [kv_format for kv_format in KVFormat if kv_format.has_scales]

sections = st.builds(
    KVSection,
    num_layers=st.integers(1, 3),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([2, 6, 8, 80]),
)
layouts = st.builds(
    KVLayout,
    block_size=st.sampled_from([1, 3, 16]),
    kv_format=st.sampled_from(KVFormat),
    sections=st.lists(sections, min_size=1, max_size=2).map(tuple),
)

BITS = {"fp32": 32, "bf16": 16, "fp8_e4m3": 8, "int8": 8, "int4": 4}


def lines(num_bytes):
    """Returns `num_bytes`, rounded up to whole cache lines."""
    return math.ceil(num_bytes / 64) * 64


class Text:
    """Computes offsets in a record, by the text of `engine.layout` alone."""

    def __init__(self, layout):
        self.layout = layout
        self.bits = BITS[layout.kv_format]

    def elements(self, shape):
        return lines(self.layout.block_size * shape.head_dim * self.bits // 8)

    def head(self, shape):
        scales = lines(self.layout.block_size * 4) if self.bits <= 8 else 0
        return self.elements(shape) + scales

    def record(self, sections):
        return sum(2 * s.num_layers * s.num_kv_heads * self.head(s) for s in sections)

    def token(self, section, layer, is_value, head, slot):
        """Returns the offsets of the first byte of a token's elements, and of the token's scale."""
        shape = self.layout.sections[section]
        block, token = divmod(slot, self.layout.block_size)
        start = block * self.record(self.layout.sections)
        start += self.record(self.layout.sections[:section])
        start += ((2 * layer + is_value) * shape.num_kv_heads + head) * self.head(shape)
        scale = start + self.elements(shape) + 4 * token
        return start + token * shape.head_dim * self.bits // 8, scale


def random_kv(cache, num_tokens):
    return torch.randn(2, num_tokens, cache.section.num_kv_heads, cache.section.head_dim)


def distinct_slots(layout, count):
    return torch.randperm(NUM_BLOCKS * layout.block_size)[:count]


def raw(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@given(layouts, st.data())
@settings(max_examples=80)
def test_a_written_token_lies_where_the_layout_defines(layout, data):
    section = data.draw(st.integers(0, len(layout.sections) - 1))
    buffer = allocate_buffer(layout, NUM_BLOCKS)
    cache = KVCache(layout, buffer, section)
    layer = data.draw(st.integers(0, cache.section.num_layers - 1))
    slots = distinct_slots(layout, 4)
    key, value = random_kv(cache, len(slots))
    cache.write(layer, slots, key, value)
    text, memory = Text(layout), raw(buffer)
    assert text.record(layout.sections) == layout.block_bytes
    for i, slot in enumerate(slots.tolist()):
        for head in range(cache.section.num_kv_heads):
            for is_value, written in enumerate((key, value)):
                elements, scale = quantise(written[i, head], layout.kv_format)
                start, scale_start = text.token(section, layer, is_value, head, slot)
                expected = raw(elements)
                assert memory[start : start + len(expected)] == expected
                if scale is not None:
                    assert memory[scale_start : scale_start + 4] == raw(scale)


@given(layouts, st.data())
@settings(max_examples=60)
def test_views_show_written_values(layout, data):
    section = data.draw(st.integers(0, len(layout.sections) - 1))
    cache = KVCache(layout, allocate_buffer(layout, NUM_BLOCKS), section)
    layer = cache.section.num_layers - 1
    slots = distinct_slots(layout, 4)
    key, value = random_kv(cache, len(slots))
    cache.write(layer, slots, key, value)
    where = (slots // layout.block_size, slice(None), slots % layout.block_size)
    scale_views = (cache.key_scales, cache.value_scales)
    for x, views, scales in zip((key, value), (cache.keys, cache.values), scale_views, strict=True):
        elements, expected_scales = quantise(x, layout.kv_format)
        assert torch.equal(as_bytes(views[layer][where]), as_bytes(elements))
        if expected_scales is None:
            assert scales is None
        else:
            assert torch.equal(scales[layer][where], expected_scales)


def as_bytes(tensor):
    """Returns the elements in a type that can be compared, also for float8."""
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("kv_format", KVFormat)
def test_views_have_the_shapes_that_kernels_expect(kv_format):
    layout = KVLayout(3, kv_format, (KVSection(2, 2, 6),))
    cache = KVCache(layout, allocate_buffer(layout, NUM_BLOCKS))
    per_token = 3 if kv_format is KVFormat.INT4 else 6
    for view in (*cache.keys, *cache.values):
        assert view.shape == (NUM_BLOCKS, 2, 3, per_token)
        assert view.dtype == ELEMENT_DTYPES[kv_format]
        assert view.stride(3) == 1
        assert view.stride(0) * view.element_size() == layout.block_bytes
    if kv_format.has_scales:
        for view in (*cache.key_scales, *cache.value_scales):
            assert view.shape == (NUM_BLOCKS, 2, 3)
            assert view.dtype == (torch.int32 if kv_format is KVFormat.INT4 else torch.float32)
            assert view.stride(2) == 1


@pytest.mark.parametrize("kv_format", KVFormat)
def test_layers_sections_heads_and_blocks_do_not_overlap(kv_format):
    layout = KVLayout(
        block_size=3, kv_format=kv_format, sections=(KVSection(2, 2, 6), KVSection(3, 1, 10))
    )
    buffer = allocate_buffer(layout, NUM_BLOCKS)
    caches = [KVCache(layout, buffer, section) for section in (0, 1)]
    views = [view for cache in caches for view in (*cache.keys, *cache.values)]
    if kv_format.has_scales:
        views += [v for cache in caches for v in (*cache.key_scales, *cache.value_scales)]
    elements = [view.view(torch.uint8) for view in views]
    for number, view in enumerate(elements):
        view.fill_(number)
    for number, view in enumerate(elements):
        assert view.unique().tolist() == [number]


def of_magnitude(rng, shape, exponent):
    return torch.randn(shape, generator=rng) * 10.0**exponent


def error_bound(x, scales, kv_format):
    """Returns the largest possible error of a stored `x` [..., head_dim], by the format's
    arithmetic.
    """
    tiniest = 2.0**-126  # smaller floats have fewer bits
    if kv_format is KVFormat.FP32:
        return torch.zeros_like(x)
    if kv_format is KVFormat.BF16:
        return x.abs() * 2**-8 + tiniest
    if kv_format is KVFormat.FP8_E4M3:  # 3 fraction bits; subnormal below scale * 2**-6
        return torch.maximum(x.abs() * 2**-4, scales[..., None] * 2**-10) * (1 + 1e-5) + tiniest
    if kv_format is KVFormat.INT8:
        return scales[..., None] / 2 * (1 + 1e-5) + tiniest
    step = (x.amax(-1) - x.amin(-1)) / 15  # int4; step and low have 8 bits
    largest = x.abs().amax(-1)
    return ((step / 2) * 1.01 + largest * 2**-8 * 1.5)[..., None] + tiniest * 15


@pytest.mark.parametrize("kv_format", KVFormat)
@pytest.mark.parametrize("exponent", [-44, -38, -30, -3, 0, 3, 30, 37])
def test_stored_values_are_close_at_any_magnitude(kv_format, exponent):
    rng = torch.Generator().manual_seed(0)
    for offset in (0, 0.1, 1, 100):  # K often has channels with large means
        x = of_magnitude(rng, (40, 80), exponent) + offset * 10.0**exponent
        x[3] = x[3].abs()
        x[4, :40] = 0
        x = x.clamp(-1e38, 1e38)
        elements, scales = quantise(x, kv_format)
        found = dequantise(elements, scales, kv_format)
        assert found.dtype == torch.float32
        assert ((found - x).abs() <= error_bound(x, scales, kv_format)).all()


@given(
    st.sampled_from(KVFormat),
    st.lists(st.floats(-(2.0**120), 2.0**120, width=32), min_size=4, max_size=4),
)
@settings(max_examples=300)
def test_any_row_is_stored_within_its_error_bound(kv_format, row):
    x = torch.tensor([row])
    elements, scales = quantise(x, kv_format)
    error = (dequantise(elements, scales, kv_format) - x).abs()
    assert (error <= error_bound(x, scales, kv_format)).all()


@pytest.mark.parametrize("kv_format", KVFormat)
def test_zeros_stay_zeros_and_need_no_scale(kv_format):
    elements, scales = quantise(torch.zeros(3, 2, 8), kv_format)
    assert not as_bytes(elements).any()
    assert not dequantise(elements, scales, kv_format).any()
    assert scales is None or not scales.any()


@pytest.mark.parametrize("kv_format", KVFormat)
@pytest.mark.parametrize("constant", [1.0, -1.0, 0.3, -1234.5, 1.00389, 1e-45, -3e-43, 2e37])
def test_a_row_of_equal_numbers_is_exact(kv_format, constant):
    x = torch.full((2, 8), constant)
    found = dequantise(*quantise(x, kv_format), kv_format)
    precise = kv_format in (KVFormat.FP32, KVFormat.INT8, KVFormat.FP8_E4M3)
    tolerance = 2**-22 if precise else 2**-8
    assert (found - x).abs().max() <= abs(constant) * tolerance + 2.0**-126
    assert (found == found[0, 0]).all()


@pytest.mark.parametrize("kv_format", SCALED)
def test_the_extremes_of_a_row_get_the_extreme_codes(kv_format):
    x = torch.linspace(-2, 2, 16)[None]
    stored = quantise(x, kv_format)[0][0]
    if kv_format is KVFormat.INT4:
        assert stored.tolist()[0] & 15 == 0
        assert stored.tolist()[-1] >> 4 == 15
    else:
        largest = 127.0 if kv_format is KVFormat.INT8 else 448.0
        assert (stored[0].item(), stored[-1].item()) == (-largest, largest)


@pytest.mark.parametrize("kv_format", [KVFormat.FP8_E4M3, KVFormat.INT8])
def test_a_scale_too_small_to_be_exact_does_not_change_a_sign(kv_format):
    """No scale is exact for 448 or 127 times the smallest float, and a half more."""
    largest = 448 if kv_format is KVFormat.FP8_E4M3 else 127
    x = torch.tensor([1.0, -1.0, 0.0, 1.0]) * (1.4 * largest * 2.0**-149)
    elements, scales = quantise(x, kv_format)
    assert elements.float().tolist() == [largest, -largest, 0, largest]
    assert dequantise(elements, scales, kv_format).isfinite().all()


def bf16_bits(number):
    """Returns the bits of a number that bf16 represents exactly."""
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    assert bits % 2**16 == 0
    return bits >> 16


def test_int4_is_packed_as_the_layout_defines():
    """With low -2 and step 0.5, q = 2 * (x + 2). Element i is in lower halves, i + head_dim / 2
    above.
    """
    x = torch.tensor([-2.0, 5.5, 0.0, 0.6, 1.25, 1.75, -1.9, 2.0])
    q = [0, 15, 4, 5, 6, 8, 0, 8]  # 1.25 and 1.75 are ties, which round to even
    elements, scales = quantise(x, KVFormat.INT4)
    assert elements.tolist() == [q[i] | q[i + 4] << 4 for i in range(4)]
    assert scales.item() % 2**32 == bf16_bits(0.5) | bf16_bits(-2.0) << 16
    assert dequantise(elements, scales, KVFormat.INT4).tolist() == [-2 + 0.5 * n for n in q]


def test_int8_is_stored_as_the_layout_defines():
    """With scale 0.5, q = 2 * x; ties round to even."""
    x = torch.tensor([63.5, -63.5, 0.25, 0.75, 1.25, -0.25, -0.75, 10.1])
    elements, scales = quantise(x, KVFormat.INT8)
    assert scales.item() == 0.5
    assert elements.tolist() == [127, -127, 0, 2, 2, 0, -2, 20]


def test_fp8_is_stored_as_the_layout_defines():
    """With scale 2, x / 2 is stored: exponents from -6 on, and 3 fraction bits."""
    x = torch.tensor([896.0, -896.0, 2.0, 2.25, 2.125, 2.375, 2 * 2.0**-9, 2 * 2.0**-11])
    elements, scales = quantise(x, KVFormat.FP8_E4M3)
    assert scales.item() == 2.0
    assert as_bytes(elements).tolist() == [0x7E, 0xFE, 0x38, 0x39, 0x38, 0x3A, 0x01, 0x00]
    assert elements.float().tolist() == [448, -448, 1, 1.125, 1, 1.25, 2**-9, 0]


def test_a_row_is_stored_the_same_alone_and_in_a_batch():
    x = torch.randn(7, 3, 16)
    for kv_format in SCALED:
        elements, scales = quantise(x, kv_format)
        alone, scale = quantise(x[4, 1], kv_format)
        assert torch.equal(as_bytes(elements[4, 1]), as_bytes(alone))
        assert torch.equal(scales[4, 1], scale)


LAYOUT = KVLayout(block_size=4, kv_format=KVFormat.FP32, sections=(KVSection(1, 1, 8),))


def aligned_memory(num_bytes):
    return memoryview(allocate_buffer(LAYOUT, -(-num_bytes // LAYOUT.block_bytes)).numpy()).cast(
        "B"
    )


def test_allocated_memory_is_aligned_and_zero():
    buffer = allocate_buffer(LAYOUT, 3)
    assert buffer.data_ptr() % ALIGNMENT_BYTES == 0
    assert buffer.shape == (3, LAYOUT.block_bytes)
    assert not buffer.any()


def test_given_memory_is_used_in_place():
    memory = aligned_memory(2 * LAYOUT.block_bytes + 100)
    cache = KVCache(LAYOUT, wrap_buffer(memory, LAYOUT, 2))
    cache.values[0][1].fill_(1.0)
    start, _ = Text(LAYOUT).token(0, 0, 1, 0, LAYOUT.block_size)
    assert memory[start : start + 8].cast("f").tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (lambda: aligned_memory(LAYOUT.block_bytes), "bytes, 512 are needed"),
        (lambda: memoryview(bytes(4096)), "read-only"),
        (lambda: aligned_memory(4096)[8:], "multiple of 64 bytes"),
    ],
)
def test_memory_that_cannot_hold_the_blocks_is_refused(memory, message):
    with pytest.raises(ConfigError, match=message):
        wrap_buffer(memory(), LAYOUT, 2)
