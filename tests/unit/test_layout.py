"""Where the bytes of a block lie: sizes, offsets, padding, and what two workers must share."""

from itertools import product

import msgspec
import pytest

from engine.layout import ALIGNMENT_BYTES, KVFormat, KVLayout, KVSection

TARGET = KVSection(num_layers=3, num_kv_heads=2, head_dim=8)
DRAFT = KVSection(num_layers=1, num_kv_heads=1, head_dim=5)
LAYOUT = KVLayout(16, KVFormat.FP32, (TARGET, DRAFT))

LAYOUTS = [
    KVLayout(block_size, kv_format, sections)
    for block_size, kv_format, sections in product(
        (1, 3, 16), KVFormat, ((TARGET,), (DRAFT,), (DRAFT, TARGET), (TARGET, DRAFT, DRAFT))
    )
]


def test_a_block_holds_k_and_v_of_all_layers_heads_and_tokens():
    assert TARGET.elements(block_size=16) == 2 * 3 * 2 * 8 * 16
    assert LAYOUT.data_bytes == 4 * (2 * 3 * 2 * 8 * 16 + 2 * 1 * 1 * 5 * 16)


@pytest.mark.parametrize(("kv_format", "element_bytes"), [("fp32", 4), ("bf16", 2)])
def test_the_format_says_how_large_an_element_is(kv_format, element_bytes):
    assert KVFormat(kv_format).element_bytes == element_bytes


def test_every_format_has_a_size():
    assert all(kv_format.element_bytes > 0 for kv_format in KVFormat)


def test_sections_follow_each_other_without_a_gap():
    assert LAYOUT.section_offset_bytes(0) == 0
    assert LAYOUT.section_offset_bytes(1) == 4 * TARGET.elements(16)


def test_a_block_that_fills_its_cache_lines_is_not_padded():
    layout = KVLayout(4, KVFormat.FP32, (KVSection(1, 1, 2),))
    assert layout.data_bytes == layout.block_bytes == 64


def test_a_block_is_padded_to_whole_cache_lines():
    layout = KVLayout(4, KVFormat.BF16, (KVSection(1, 1, 3),))
    assert (layout.data_bytes, layout.block_bytes) == (48, 64)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_blocks_are_aligned_and_waste_less_than_a_cache_line(layout):
    assert layout.block_bytes % ALIGNMENT_BYTES == 0
    assert 0 <= layout.block_bytes - layout.data_bytes < ALIGNMENT_BYTES


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_tokens_of_a_block_have_equal_shares_of_it(layout):
    assert layout.token_bytes * layout.block_size == layout.data_bytes


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_last_section_ends_where_the_data_ends(layout):
    last = len(layout.sections) - 1
    size = layout.sections[last].elements(layout.block_size) * layout.kv_format.element_bytes
    assert layout.section_offset_bytes(last) + size == layout.data_bytes


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2)])
def test_a_last_block_may_be_partial(num_tokens, num_blocks):
    assert LAYOUT.num_blocks_for(num_tokens) == num_blocks


@pytest.mark.parametrize(
    ("field", "value"),
    [("block_size", 32), ("kv_format", KVFormat.BF16), ("sections", (TARGET,))],
)
def test_a_difference_is_named(field, value):
    other = msgspec.structs.replace(LAYOUT, **{field: value})
    assert LAYOUT.difference(other) == other.difference(LAYOUT) == field


def test_the_order_of_sections_matters():
    other = msgspec.structs.replace(LAYOUT, sections=(DRAFT, TARGET))
    assert other.data_bytes == LAYOUT.data_bytes
    assert LAYOUT.difference(other) == "sections"


def test_equal_layouts_do_not_differ():
    assert LAYOUT.difference(KVLayout(16, KVFormat.FP32, (TARGET, DRAFT))) is None


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layout_survives_the_wire(layout):
    frame = msgspec.msgpack.encode(layout)
    assert msgspec.msgpack.decode(frame, type=KVLayout) == layout
