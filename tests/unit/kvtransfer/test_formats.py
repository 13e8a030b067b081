"""Converted records match the definition in `engine.layout`, token by token."""

import math
import struct

import numpy as np
import pytest

from engine.layout import KVFormat, KVLayout, KVSection
from kvtransfer.formats import convert, is_defined, is_exact

SECTIONS = (
    KVSection(num_layers=2, num_kv_heads=2, head_dim=6),
    KVSection(num_layers=1, num_kv_heads=1, head_dim=10),
)
PAIRS = [(source, to) for source in KVFormat for to in KVFormat if is_defined(source, to)]
FLOATS = (KVFormat.FP32, KVFormat.BF16)


def layout_of(kv_format, block_size=3, sections=SECTIONS):
    return KVLayout(block_size, kv_format, sections)


def token_places(layout):
    """Yields (elements, scale, head_dim) of each token and head of a record; the first two are
    slices."""
    for index, section in enumerate(layout.sections):
        first = layout.section_offset_bytes(index)
        for head in range(2 * section.num_layers * section.num_kv_heads):
            start = first + head * layout.head_bytes(index)
            for token in range(layout.block_size):
                element = start + token * layout.token_bytes(index)
                scale = start + layout.scales_offset_bytes(index) + 4 * token
                yield (
                    slice(element, element + layout.token_bytes(index)),
                    slice(scale, scale + 4),
                    section.head_dim,
                )


# ------------------------------------------------------------ slow twin in plain Python


def nearest_fp32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def bf16_bits(x):
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    lower, odd = bits & 0xFFFF, bits >> 16 & 1
    return (bits >> 16) + (lower > 0x8000 or (lower == 0x8000 and odd))


def bf16_value(bits):
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def fp8_value(code):
    exponent, mantissa = code >> 3 & 15, code & 7
    value = math.ldexp(8 + mantissa, exponent - 10) if exponent else math.ldexp(mantissa, -9)
    return -value if code >> 7 else value


def fp8_code(x):
    """Returns the nearest code; of two equally near codes, the even one."""
    codes = range(0x7F)
    nearest = min(codes, key=lambda code: (abs(fp8_value(code) - abs(x)), code & 1))
    return nearest | (0x80 if math.copysign(1, x) < 0 else 0)


def encoded(numbers, kv_format):
    """Returns (elements, scale) of one token of one head."""
    if kv_format is KVFormat.FP32:
        return struct.pack(f"<{len(numbers)}f", *numbers), b""
    if kv_format is KVFormat.BF16:
        return struct.pack(f"<{len(numbers)}H", *map(bf16_bits, numbers)), b""
    if kv_format is KVFormat.INT4:
        return encoded_int4(numbers)
    largest = {KVFormat.FP8_E4M3: 448, KVFormat.INT8: 127}[kv_format]
    scale = nearest_fp32(max(map(abs, numbers)) / largest)
    scaled = [nearest_fp32(x / (scale or 1)) for x in numbers]
    scaled = [min(max(x, -largest), largest) for x in scaled]
    if kv_format is KVFormat.INT8:
        return struct.pack(f"<{len(numbers)}b", *map(round, scaled)), struct.pack("<f", scale)
    return bytes(map(fp8_code, scaled)), struct.pack("<f", scale)


def encoded_int4(numbers):
    numbers_and_signs = [(x, math.copysign(1, x)) for x in numbers]
    # -0 counts as below 0
    (lowest, _), (highest, _) = min(numbers_and_signs), max(numbers_and_signs)
    low_bits = bf16_bits(lowest)
    low = bf16_value(low_bits)
    step_bits = bf16_bits(nearest_fp32(nearest_fp32(highest - low) / 15))
    step = bf16_value(step_bits) or 1
    q = [round(nearest_fp32(nearest_fp32(x - low) / step)) for x in numbers]
    q = [min(max(level, 0), 15) for level in q]
    half = len(q) // 2
    elements = bytes(first | second << 4 for first, second in zip(q[:half], q[half:], strict=True))
    return elements, struct.pack("<HH", step_bits, low_bits)


def decoded(elements, scale, kv_format):
    if kv_format is KVFormat.FP32:
        return list(struct.unpack(f"<{len(elements) // 4}f", elements))
    if kv_format is KVFormat.BF16:
        return list(map(bf16_value, struct.unpack(f"<{len(elements) // 2}H", elements)))
    if kv_format is KVFormat.INT4:
        step, low = map(bf16_value, struct.unpack("<HH", scale))
        q = [byte & 15 for byte in elements] + [byte >> 4 for byte in elements]
        return [nearest_fp32(low + level * step) for level in q]
    values = (
        struct.unpack(f"<{len(elements)}b", elements)
        if kv_format is KVFormat.INT8
        else map(fp8_value, elements)
    )
    return [nearest_fp32(value * struct.unpack("<f", scale)[0]) for value in values]


# ------------------------------------------------------------ tests


def random_records(layout, num_records=2, exponent=0):
    rng = np.random.default_rng(0)
    records = np.zeros((num_records, layout.block_bytes), np.uint8)
    for record in records:
        for elements, scale, head_dim in token_places(layout):
            numbers = (rng.standard_normal(head_dim) * 10.0**exponent).astype(np.float32)
            element_bytes, scale_bytes = encoded(numbers.tolist(), layout.kv_format)
            record[elements] = list(element_bytes)
            if scale_bytes:
                record[scale] = list(scale_bytes)
    return records


@pytest.mark.parametrize("exponent", [-44, -40, -3, 0, 30])
@pytest.mark.parametrize(("source", "to"), PAIRS)
def test_tokens_are_stored_as_the_layout_document_says(source, to, exponent):
    layout, sink_layout = layout_of(source), layout_of(to)
    records = random_records(layout, exponent=exponent)
    found = convert(records, layout, to)
    expected = np.zeros((len(records), sink_layout.block_bytes), np.uint8)
    places = list(zip(token_places(layout), token_places(sink_layout), strict=True))
    for record, sink in zip(records, expected, strict=True):
        for (elements, scale, _), (sink_elements, sink_scale, _) in places:
            numbers = decoded(record[elements].tobytes(), record[scale].tobytes(), source)
            element_bytes, scale_bytes = encoded(numbers, to)
            sink[sink_elements] = list(element_bytes)
            if scale_bytes:
                sink[sink_scale] = list(scale_bytes)
    assert np.array_equal(found, expected)


def test_numbers_are_not_rounded_twice_to_formats_with_scales():
    undefined = {(source, to) for source in KVFormat for to in KVFormat} - set(PAIRS)
    scaled = {kv_format for kv_format in KVFormat if kv_format.has_scales}
    assert undefined == {(source, to) for source in scaled for to in scaled}
    for source, to in undefined:
        layout = layout_of(source)
        with pytest.raises(ValueError, match=f"no conversion from {source} to {to}"):
            convert(np.zeros((1, layout.block_bytes), np.uint8), layout, to)


@pytest.mark.parametrize(("source", "to"), PAIRS)
def test_exact_conversions_return_the_same_numbers(source, to):
    layout = layout_of(source)
    records = random_records(layout)
    if (to, source) in PAIRS:
        back = convert(convert(records, layout, to), layout_of(to), source)
        if is_exact(source, to):
            assert np.array_equal(back, records)
        elif source is KVFormat.FP32:
            assert not np.array_equal(back, records)


def test_only_lossless_conversions_are_exact():
    exact = {(source, to) for source in KVFormat for to in KVFormat if is_exact(source, to)}
    equal = {(kv_format, kv_format) for kv_format in KVFormat}
    assert exact == equal | {(KVFormat.BF16, KVFormat.FP32)}


def test_fp8_numbers_survive_and_halves_round_to_even():
    codes = [*range(0x7F), *range(0x80, 0xFF)]
    numbers = [fp8_value(code) for code in codes]
    halves = [(fp8_value(code) + fp8_value(code + 1)) / 2 for code in range(0x7E)]
    numbers += halves + [math.nextafter(x, 0) for x in halves]
    layout = layout_of(
        KVFormat.FP32, 1, (KVSection(num_layers=1, num_kv_heads=1, head_dim=len(numbers)),)
    )
    records = np.zeros((1, layout.block_bytes), np.uint8)
    for elements, _, _ in token_places(layout):
        records[0, elements] = np.array(numbers, np.float32).view(np.uint8)
    sink_layout = layout_of(KVFormat.FP8_E4M3, 1, layout.sections)
    found = convert(records, layout, KVFormat.FP8_E4M3)[0]
    for elements, scale, _ in token_places(sink_layout):
        assert found[scale].view(np.float32) == 1
        assert found[elements][: len(codes)].tolist() == codes
        even = [code + (code & 1) for code in range(0x7E)]
        assert found[elements][len(codes) : len(codes) + len(halves)].tolist() == even


@pytest.mark.parametrize(("source", "to"), PAIRS)
def test_a_given_output_is_filled_and_returned_and_its_padding_cleared(source, to):
    layout, sink_layout = layout_of(source), layout_of(to)
    records = random_records(layout)
    out = np.full((len(records), 2 * sink_layout.block_bytes), 0xFF, np.uint8)
    part = out[:, : sink_layout.block_bytes]
    assert convert(records, layout, to, out=part) is part
    assert np.array_equal(part, convert(records, layout, to))
    assert (out[:, sink_layout.block_bytes :] == 0xFF).all()


@pytest.mark.parametrize(("source", "to"), PAIRS)
def test_there_may_be_no_records_no_sections_and_no_heads(source, to):
    none = np.zeros((0, layout_of(source).block_bytes), np.uint8)
    assert convert(none, layout_of(source), to).shape == (0, layout_of(to).block_bytes)
    empty = KVSection(num_layers=3, num_kv_heads=0, head_dim=8)
    for sections in ((), (empty,)):
        layout = layout_of(source, 3, sections)
        assert convert(np.zeros((2, 0), np.uint8), layout, to).shape == (2, 0)


def test_arrays_that_are_not_records_are_refused():
    layout = layout_of(KVFormat.FP32)
    records = random_records(layout)
    bf16_bytes = layout_of(KVFormat.BF16).block_bytes
    frozen = np.zeros((2, bf16_bytes), np.uint8)
    frozen.flags.writeable = False
    for bad in (records[:, :-1], records[0], records.view(np.int16), records.view(np.int8)):
        with pytest.raises(ValueError, match="records of"):
            convert(bad, layout, KVFormat.BF16)
    for bad in (
        np.zeros((2, bf16_bytes + 1), np.uint8),
        np.zeros((1, bf16_bytes), np.uint8),
        np.zeros((2, 2 * bf16_bytes), np.uint8)[:, ::2],
        frozen,
    ):
        with pytest.raises(ValueError, match=r"records of|read-only"):
            convert(records, layout, KVFormat.BF16, out=bad)
    odd = layout_of(KVFormat.FP32, 3, (KVSection(num_layers=1, num_kv_heads=1, head_dim=5),))
    with pytest.raises(ValueError, match="even head_dim"):
        convert(np.zeros((1, odd.block_bytes), np.uint8), odd, KVFormat.INT4)
