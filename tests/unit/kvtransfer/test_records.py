"""Pieces between the records of two ranks copy all bytes that one rank gives the other, and no
more."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.layout import ALIGNMENT_BYTES, KVFormat, KVLayout, KVSection, LayerRange, Shard
from kvtransfer.records import (
    RecordPiece,
    holders,
    packing,
    plan_pieces,
    shared_layout,
    tiles,
    unpacking,
)

WHOLE = Shard()
SECTION = KVSection(num_layers=2, num_kv_heads=4, head_dim=8)
LAYOUT = KVLayout(3, KVFormat.INT8, (SECTION, KVSection(num_layers=1, num_kv_heads=8, head_dim=6)))

sections = st.builds(
    KVSection,
    num_layers=st.integers(1, 3),
    num_kv_heads=st.sampled_from([1, 2, 3, 4, 6]),  # KV heads of all ranks together
    head_dim=st.sampled_from([2, 6, 20]),
)
layouts = st.builds(
    KVLayout,
    block_size=st.sampled_from([1, 3]),
    kv_format=st.sampled_from(KVFormat),
    sections=st.lists(sections, min_size=1, max_size=2).map(tuple),
)


def stages(draw, layout, num_stages):
    """Draws the layer ranges of each section for each stage; sizes differ, and ranges may be
    empty."""
    if num_stages == 1:
        return [()]
    cuts = []
    for section in layout.sections:
        inner = st.lists(
            st.integers(0, section.num_layers), min_size=num_stages - 1, max_size=num_stages - 1
        )
        cuts.append([0, *sorted(draw(inner)), section.num_layers])
    ranges = [[LayerRange(a, b - a) for a, b in pairwise(cut)] for cut in cuts]
    return [tuple(stage) for stage in zip(*ranges, strict=True) if any(r.num_layers for r in stage)]


@st.composite
def splits(draw, layout):
    """Draws the ranks of a worker: tensor parallel within each pipeline stage."""
    found = stages(draw, layout, draw(st.integers(1, 3)))
    size = draw(st.integers(1, 6))
    return tuple(Shard(rank, size, layers) for layers in found for rank in range(size))


@st.composite
def pairs_of_workers(draw):
    layout = draw(layouts)
    return layout, draw(splits(layout)), draw(splits(layout))


def lines(num_bytes):
    assert num_bytes % ALIGNMENT_BYTES == 0
    return num_bytes // ALIGNMENT_BYTES


def whole_record(layout):
    """Slow twin: returns the meaning of every line of a whole record: (head, line of the head).

    Heads begin at cache lines, so a line stands for its bytes.
    """
    return [
        ((index, layer, plane, head), i)
        for index, section in enumerate(layout.sections)
        for layer in range(section.num_layers)
        for plane in "KV"
        for head in range(section.num_kv_heads)
        for i in range(lines(layout.head_bytes(index)))
    ]


def is_held(layout, shard, name):
    """Slow twin: returns True if the rank holds this head of this layer."""
    index, layer, _, head = name
    section = layout.sections[index]
    if shard.layers:
        first, num = shard.layers[index].first, shard.layers[index].num_layers
        if not first <= layer < first + num:
            return False
    if section.num_kv_heads < shard.size:
        return head == shard.rank * section.num_kv_heads // shard.size
    owner = next(
        rank
        for rank in reversed(range(shard.size))
        if rank * section.num_kv_heads // shard.size <= head
    )
    return owner == shard.rank


def record_of(layout, shard):
    """Slow twin: a rank's record is the whole record without the heads that the rank lacks."""
    return [line for line in whole_record(layout) if is_held(layout, shard, line[0])]


def move(pieces, source, sink):
    """Copies the pieces of one record between lists of any elements."""
    sink = list(sink)
    for piece in pieces:
        first, place = lines(piece.source_offset), lines(piece.sink_offset)
        part = source[first : first + lines(piece.num_bytes)]
        assert len(part) == lines(piece.num_bytes)
        assert sink[place : place + len(part)] == [None] * len(part), "a byte is copied twice"
        sink[place : place + len(part)] = part
    return sink


@given(pairs_of_workers())
def test_records_of_any_split_are_assembled_from_those_of_any_other(workers):
    layout, sources, sinks = workers
    records = {source: record_of(layout, source) for source in sources}
    for sink in sinks:
        expected = record_of(layout, sink)
        assert lines(layout.of_rank(sink).block_bytes) == len(expected)
        found = [None] * len(expected)
        for source in sources:
            if sink in holders(layout, source, sinks):
                found = move(plan_pieces(layout, source, sink), records[source], found)
            else:
                assert plan_pieces(layout, source, sink) == ()
        assert found == expected
        assert tiles(layout, sources, sink)


@given(pairs_of_workers())
def test_every_rank_of_a_source_has_a_holder(workers):
    layout, sources, sinks = workers
    for source in sources:
        held_by = holders(layout, source, sinks)
        assert held_by
        assert set(held_by) <= set(sinks)


@given(pairs_of_workers())
def test_a_shared_record_follows_its_layout_and_holds_all_that_is_given(workers):
    layout, sources, sinks = workers
    source, sink = sources[-1], sinks[0]
    pieces = plan_pieces(layout, source, sink)
    shared = shared_layout(layout, source, sink)
    assert shared.block_bytes == sum(piece.num_bytes for piece in pieces)
    record = record_of(layout, source)
    packed = move(packing(pieces), record, [None] * lines(shared.block_bytes))
    assert packed == sorted(packed)
    blank = [None] * lines(layout.of_rank(sink).block_bytes)
    assert move(unpacking(pieces), packed, blank) == move(pieces, record, blank)


@given(pairs_of_workers())
def test_workers_of_one_shape_copy_whole_records_from_rank_to_rank(workers):
    layout, sources, _ = workers
    for source in sources:
        num_bytes = layout.of_rank(source).block_bytes
        assert plan_pieces(layout, source, source) == (RecordPiece(0, 0, num_bytes),)
        assert holders(layout, source, sources) == (source,)


@pytest.mark.parametrize(
    ("size", "of_sink", "takers"),
    [
        (4, 1, {0: [0], 1: [0], 2: [0], 3: [0]}),
        (4, 2, {0: [0], 1: [1], 2: [1], 3: [1]}),
        (4, 8, {0: [0, 2], 1: [1, 3], 2: [4, 6], 3: [5, 7]}),
        (2, 4, {0: [0, 1], 1: [2, 3]}),
    ],
)
def test_ranks_of_the_sink_take_a_head_from_its_replicas_in_turn(size, of_sink, takers):
    two_heads = KVLayout(1, KVFormat.FP32, (KVSection(1, 2, 16),))
    sinks = [Shard(rank, of_sink) for rank in range(of_sink)]
    for rank, expected in takers.items():
        found = holders(two_heads, Shard(rank, size), sinks)
        assert [sink.rank for sink in found] == expected


@pytest.mark.parametrize("size", [2, 4])
def test_a_shared_record_that_is_all_of_one_side_is_one_piece_there(size):
    for shard in (Shard(rank, size) for rank in range(size)):
        whole = (RecordPiece(0, 0, LAYOUT.of_rank(shard).block_bytes),)
        assert unpacking(plan_pieces(LAYOUT, WHOLE, shard)) == whole
        assert packing(plan_pieces(LAYOUT, shard, WHOLE)) == whole


def test_ranks_that_share_no_head_have_nothing_to_move():
    assert plan_pieces(LAYOUT, Shard(0, 2), Shard(1, 2)) == ()
    assert plan_pieces(LAYOUT, Shard(3, 4), Shard(0, 2)) == ()
    assert shared_layout(LAYOUT, Shard(0, 2), Shard(1, 2)).block_bytes == 0
    assert packing(()) == unpacking(()) == ()


def test_k_and_v_of_each_layer_are_a_piece_each():
    head = LAYOUT.head_bytes(0)
    pieces = plan_pieces(LAYOUT, WHOLE, Shard(1, 2))
    assert pieces[:3] == (
        RecordPiece(2 * head, 0, 2 * head),
        RecordPiece(6 * head, 2 * head, 2 * head),
        RecordPiece(10 * head, 4 * head, 2 * head),
    )
    assert len(pieces) == 2 * (2 + 1)


def test_consecutive_layers_with_all_heads_are_one_piece():
    late = Shard(layers=(LayerRange(1, 1), LayerRange(0, 1)))
    first = LAYOUT.layer_bytes(0)
    assert plan_pieces(LAYOUT, WHOLE, late) == (RecordPiece(first, 0, LAYOUT.block_bytes - first),)


def test_sizes_that_do_not_divide_each_other_share_parts():
    layout = KVLayout(1, KVFormat.FP32, (KVSection(num_layers=1, num_kv_heads=6, head_dim=16),))
    assert shared_layout(layout, Shard(1, 3), Shard(0, 2)).sections[0].num_kv_heads == 1
    assert plan_pieces(layout, Shard(1, 3), Shard(0, 2)) == (
        RecordPiece(0, 128, 64),
        RecordPiece(128, 320, 64),
    )


@pytest.mark.parametrize(
    "sources",
    [
        [Shard(0, 2)],
        [Shard(0, 2), Shard(1, 4), Shard(3, 4)],
        [Shard(0, 2), Shard(0, 1)],
        [Shard(layers=(LayerRange(0, 2), LayerRange(0, 0)))],
    ],
)
def test_ranks_that_do_not_hold_the_model_together_do_not_tile_a_record(sources):
    assert not tiles(LAYOUT, sources, WHOLE)


@pytest.mark.parametrize(("rank", "size"), [(1, 1), (-1, 2), (0, 0), (5, 4), (0, 65)])
def test_a_rank_is_one_of_its_group(rank, size):
    with pytest.raises(ValueError, match="rank"):
        Shard(rank, size)
    frame = msgspec.msgpack.encode({"rank": rank, "size": size})
    with pytest.raises(msgspec.ValidationError, match="rank"):
        msgspec.msgpack.decode(frame, type=Shard)


@pytest.mark.parametrize(
    ("layers", "fits"),
    [
        ((), True),
        ((LayerRange(0, 2), LayerRange(0, 1)), True),
        ((LayerRange(2, 0), LayerRange(0, 1)), True),
        ((LayerRange(2, 0), LayerRange(1, 0)), False),
        ((LayerRange(0, 2),), False),
        ((LayerRange(0, 2), LayerRange(0, 2)), False),
        ((LayerRange(0, 2**63), LayerRange(0, 1)), False),
    ],
)
def test_a_share_fits_a_model_if_it_has_these_layers(layers, fits):
    assert Shard(layers=layers).fits(LAYOUT) is fits


def test_a_range_of_layers_is_not_negative():
    with pytest.raises(ValueError, match="negative"):
        Shard(layers=(LayerRange(-1, 2),))
