"""The bytes of a block: sizes, offsets, padding, and the fields that two workers must agree on."""

from itertools import product

import msgspec
import pytest

from engine.layout import (
    ALIGNMENT_BYTES,
    SCALE_BYTES,
    KVFormat,
    KVLayout,
    KVSection,
    LayerRange,
    Shard,
)

TARGET = KVSection(num_layers=3, num_kv_heads=2, head_dim=8)
DRAFT = KVSection(num_layers=1, num_kv_heads=1, head_dim=6)
LAYOUT = KVLayout(16, KVFormat.FP32, (TARGET, DRAFT))

LAYOUTS = [
    KVLayout(block_size, kv_format, sections)
    for block_size, kv_format, sections in product(
        (1, 3, 16), KVFormat, ((TARGET,), (DRAFT,), (DRAFT, TARGET), (TARGET, DRAFT, DRAFT))
    )
]


def section_bytes(layout, section):
    """Returns the bytes of a section in a block: K and V of all layers and heads."""
    shape = layout.sections[section]
    return 2 * shape.num_layers * shape.num_kv_heads * layout.head_bytes(section)


@pytest.mark.parametrize(
    ("kv_format", "bits", "has_scales"),
    [
        ("fp32", 32, False),
        ("bf16", 16, False),
        ("fp8_e4m3", 8, True),
        ("int8", 8, True),
        ("int4", 4, True),
    ],
)
def test_a_format_has_an_element_size_and_maybe_scales(kv_format, bits, has_scales):
    assert (KVFormat(kv_format).element_bits, KVFormat(kv_format).has_scales) == (bits, has_scales)


def test_every_format_has_a_size():
    assert all(kv_format.element_bits > 0 for kv_format in KVFormat)


@pytest.mark.parametrize(
    ("kv_format", "token_bytes", "scales_offset_bytes", "head_bytes"),
    [
        # 5 tokens of 24 elements take 480, 240, 120, 120 and 60 bytes; 5 scales take 20 bytes.
        (KVFormat.FP32, 96, 512, 512),
        (KVFormat.BF16, 48, 256, 256),
        (KVFormat.FP8_E4M3, 24, 128, 192),
        (KVFormat.INT8, 24, 128, 192),
        (KVFormat.INT4, 12, 64, 128),
    ],
)
def test_a_head_is_elements_then_scales_padded_to_cache_lines(
    kv_format, token_bytes, scales_offset_bytes, head_bytes
):
    layout = KVLayout(5, kv_format, (KVSection(num_layers=2, num_kv_heads=3, head_dim=24),))
    assert layout.token_bytes(0) == token_bytes
    assert layout.scales_offset_bytes(0) == scales_offset_bytes
    assert layout.head_bytes(0) == head_bytes
    assert layout.layer_bytes(0) == 2 * 3 * head_bytes
    assert layout.block_bytes == 2 * 2 * 3 * head_bytes


def test_a_head_that_fills_its_cache_lines_is_not_padded():
    layout = KVLayout(16, KVFormat.INT8, (KVSection(1, 1, 64),))
    assert layout.head_bytes(0) == 16 * 64 + 16 * SCALE_BYTES


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_sections_follow_each_other_without_a_gap(layout):
    assert layout.section_offset_bytes(0) == 0
    for section in range(len(layout.sections)):
        end = layout.section_offset_bytes(section) + section_bytes(layout, section)
        assert layout.section_offset_bytes(section + 1) == end
    assert layout.block_bytes == end


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_head_starts_on_a_cache_line_with_little_padding(layout):
    for section, shape in enumerate(layout.sections):
        elements = layout.block_size * shape.head_dim * layout.kv_format.element_bits // 8
        scales = layout.block_size * SCALE_BYTES if layout.kv_format.has_scales else 0
        starts = (layout.section_offset_bytes(section), layout.scales_offset_bytes(section))
        assert all(n % ALIGNMENT_BYTES == 0 for n in (*starts, layout.head_bytes(section)))
        assert 0 <= layout.scales_offset_bytes(section) - elements < ALIGNMENT_BYTES
        scales_room = layout.head_bytes(section) - layout.scales_offset_bytes(section)
        assert 0 <= scales_room - scales < ALIGNMENT_BYTES


def test_two_elements_of_int4_share_a_byte_so_heads_must_be_even():
    odd = (KVSection(num_layers=1, num_kv_heads=1, head_dim=5),)
    with pytest.raises(ValueError, match="int4 needs an even head_dim"):
        KVLayout(16, KVFormat.INT4, odd)
    assert KVLayout(16, KVFormat.INT8, odd).token_bytes(0) == 5


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2)])
def test_a_last_block_may_be_partial(num_tokens, num_blocks):
    assert LAYOUT.num_blocks_for(num_tokens) == num_blocks


@pytest.mark.parametrize(
    ("field", "value"), [("block_size", 32), ("kv_format", KVFormat.BF16), ("sections", (TARGET,))]
)
def test_a_difference_is_named(field, value):
    other = msgspec.structs.replace(LAYOUT, **{field: value})
    assert LAYOUT.difference(other) == other.difference(LAYOUT) == field


def test_the_order_of_sections_matters():
    other = msgspec.structs.replace(LAYOUT, sections=(DRAFT, TARGET))
    assert other.block_bytes == LAYOUT.block_bytes
    assert LAYOUT.difference(other) == "sections"


def test_equal_layouts_do_not_differ():
    assert LAYOUT.difference(KVLayout(16, KVFormat.FP32, (TARGET, DRAFT))) is None


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layout_survives_the_wire(layout):
    frame = msgspec.msgpack.encode(layout)
    assert msgspec.msgpack.decode(frame, type=KVLayout) == layout


@pytest.mark.parametrize(
    ("num_heads", "size", "heads"),
    [
        (8, 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (2, 4, [[0], [0], [1], [1]]),
        (2, 3, [[0], [0], [1]]),
        (3, 2, [[0], [1, 2]]),
    ],
)
def test_heads_are_split_by_rank_or_held_by_several(num_heads, size, heads):
    section = KVSection(num_layers=1, num_kv_heads=num_heads, head_dim=8)
    assert [list(Shard(rank, size).heads_of(section)) for rank in range(size)] == heads


def test_the_records_of_a_rank_hold_its_heads_of_its_layers():
    late = Shard(1, 2, (LayerRange(1, 2), LayerRange(0, 0)))
    assert LAYOUT.of_rank(late).sections == (KVSection(2, 1, 8), KVSection(0, 1, 6))
    assert LAYOUT.of_rank(Shard()) == LAYOUT
