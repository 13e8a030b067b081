"""The tensors agree with the layout's arithmetic, and what is written can be read."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.layout import ALIGNMENT_BYTES, KVFormat, KVLayout, KVSection
from engine.model.kvcache import TORCH_DTYPES, KVCache, allocate_buffer, wrap_buffer

pytestmark = pytest.mark.torch

NUM_BLOCKS = 5

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


def offset_bytes(layout, section, layer, is_value, head, slot):
    """Where the first byte of a token's K or V lies, from the text of `engine.layout` alone."""
    shape = layout.sections[section]
    block, token = divmod(slot, layout.block_size)
    plane = 2 * layer + is_value
    row = (plane * shape.num_kv_heads + head) * layout.block_size + token
    within = row * shape.head_dim * layout.kv_format.element_bytes
    return block * layout.block_bytes + layout.section_offset_bytes(section) + within


def random_kv(cache, num_tokens):
    shape = (num_tokens, cache.section.num_kv_heads, cache.section.head_dim)
    return torch.randn(shape).to(cache.dtype), torch.randn(shape).to(cache.dtype)


def distinct_slots(layout, count):
    return torch.randperm(NUM_BLOCKS * layout.block_size)[:count]


@given(layouts, st.data())
@settings(max_examples=60, deadline=None)
def test_a_written_token_lies_where_the_layout_says(layout, data):
    section = data.draw(st.integers(0, len(layout.sections) - 1))
    buffer = allocate_buffer(layout, NUM_BLOCKS)
    cache = KVCache(layout, buffer, section)
    layer = data.draw(st.integers(0, cache.section.num_layers - 1))
    slots = distinct_slots(layout, 4)
    key, value = random_kv(cache, len(slots))
    cache.write(layer, cache.row_ids(slots[:, None]), key, value)
    raw = buffer.flatten().numpy().tobytes()
    for i, slot in enumerate(slots.tolist()):
        for head in range(cache.section.num_kv_heads):
            for is_value, written in enumerate((key, value)):
                expected = written[i, head].view(torch.uint8).numpy().tobytes()
                start = offset_bytes(layout, section, layer, is_value, head, slot)
                assert raw[start : start + len(expected)] == expected


@given(layouts, st.data())
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_gathered_in_any_order_and_seen_by_the_views(layout, data):
    section = data.draw(st.integers(0, len(layout.sections) - 1))
    cache = KVCache(layout, allocate_buffer(layout, NUM_BLOCKS), section)
    layer = cache.section.num_layers - 1
    slots = distinct_slots(layout, 4)
    key, value = random_kv(cache, len(slots))
    cache.write(layer, cache.row_ids(slots[:, None]), key, value)
    order = torch.tensor([[2, 0], [3, 3]])
    found = cache.gather(layer, cache.row_ids(slots[order]), 2)  # [2, 2 * heads, 2, head_dim]
    assert torch.equal(found, torch.cat((key, value), dim=1)[order].transpose(1, 2))
    blocks, offsets = slots // layout.block_size, slots % layout.block_size
    assert torch.equal(cache.keys[layer][blocks, :, offsets], key)
    assert torch.equal(cache.values[layer][blocks, :, offsets], value)


def test_layers_sections_and_blocks_do_not_overlap():
    layout = KVLayout(
        block_size=3, kv_format=KVFormat.BF16, sections=(KVSection(2, 2, 6), KVSection(3, 1, 10))
    )
    buffer = allocate_buffer(layout, NUM_BLOCKS)
    caches = [KVCache(layout, buffer, section) for section in (0, 1)]
    views = [view for cache in caches for view in (*cache.keys, *cache.values)]
    for number, view in enumerate(views):
        view.fill_(number)
    assert [view.unique().tolist() for view in views] == [[number] for number in range(len(views))]
    written = sum(view.numel() for view in views) * TORCH_DTYPES[layout.kv_format].itemsize
    assert written == NUM_BLOCKS * layout.data_bytes


LAYOUT = KVLayout(block_size=4, kv_format=KVFormat.FP32, sections=(KVSection(1, 1, 8),))


def aligned_memory(num_bytes):
    return memoryview(allocate_buffer(LAYOUT, -(-num_bytes // LAYOUT.block_bytes)).numpy()).cast(
        "B"
    )


def test_own_memory_starts_on_a_cache_line_and_is_zero():
    buffer = allocate_buffer(LAYOUT, 3)
    assert buffer.data_ptr() % ALIGNMENT_BYTES == 0
    assert buffer.shape == (3, LAYOUT.block_bytes)
    assert not buffer.any()


def test_memory_from_outside_is_used_in_place():
    memory = aligned_memory(2 * LAYOUT.block_bytes + 100)
    cache = KVCache(LAYOUT, wrap_buffer(memory, LAYOUT, 2))
    cache.values[0][1].fill_(1.0)
    start = offset_bytes(LAYOUT, 0, 0, 1, 0, LAYOUT.block_size)
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
