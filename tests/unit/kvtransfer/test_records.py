"""Pieces between the records of two ranks move every head that both hold, and nothing else."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.layout import KVFormat, KVLayout, KVSection
from kvtransfer.records import (
    RecordPiece,
    Shard,
    difference,
    packing,
    plan_pieces,
    shared_layout,
    unpacking,
)

WHOLE = Shard()
SIZES = (1, 2, 4)
SECTION = KVSection(num_layers=2, num_kv_heads=4, head_dim=8)
LAYOUT = KVLayout(3, KVFormat.INT8, (SECTION, KVSection(num_layers=1, num_kv_heads=8, head_dim=6)))

sections = st.builds(
    KVSection,
    num_layers=st.integers(1, 2),
    num_kv_heads=st.sampled_from([4, 8]),  # of all ranks together
    head_dim=st.sampled_from([2, 6, 20]),
)
layouts = st.builds(
    KVLayout,
    block_size=st.sampled_from([1, 3]),
    kv_format=st.sampled_from(KVFormat),
    sections=st.lists(sections, min_size=1, max_size=2).map(tuple),
)


def rank_layout(layout, shard):
    """The layout of one rank's records, from that of records with all heads."""
    parts = tuple(
        msgspec.structs.replace(section, num_kv_heads=section.num_kv_heads // shard.size)
        for section in layout.sections
    )
    return msgspec.structs.replace(layout, sections=parts)


def shards(size):
    return [Shard(rank, size) for rank in range(size)]


def head_places(layout, shard):
    """Slow twin: the offset of every head in a rank's record, by layer, kind and number."""
    own = rank_layout(layout, shard)
    places = {}
    for index, section in enumerate(own.sections):
        offset = own.section_offset_bytes(index)
        for layer in range(section.num_layers):
            for part in "KV":
                for head in range(section.num_kv_heads):
                    name = (index, layer, part, shard.rank * section.num_kv_heads + head)
                    places[name] = offset
                    offset += own.head_bytes(index)
    return places


def bytes_of_heads(layout, shard):
    """Slow twin: the meaning of every byte of a rank's record, as (head, byte of the head)."""
    names = {}
    for name, offset in head_places(layout, shard).items():
        for i in range(layout.head_bytes(name[0])):
            names[offset + i] = (name, i)
    return [names[i] for i in range(rank_layout(layout, shard).block_bytes)]


def move(pieces, source, sink):
    """Copies the pieces of one record, given and returned as lists of anything."""
    sink = list(sink)
    for piece in pieces:
        end = piece.source_offset + piece.num_bytes
        part = source[piece.source_offset : end]
        assert len(part) == piece.num_bytes
        assert piece.sink_offset + piece.num_bytes <= len(sink)
        sink[piece.sink_offset : piece.sink_offset + piece.num_bytes] = part
    return sink


def plan(layout, source, sink):
    return plan_pieces(rank_layout(layout, source), source, rank_layout(layout, sink), sink)


@given(layouts, st.sampled_from(SIZES), st.sampled_from(SIZES))
def test_records_of_any_split_are_assembled_from_those_of_any_other(layout, from_size, to_size):
    for sink in shards(to_size):
        expected = bytes_of_heads(layout, sink)
        found = [None] * len(expected)
        for source in shards(from_size):
            found = move(plan(layout, source, sink), bytes_of_heads(layout, source), found)
        assert found == expected


@given(layouts, st.sampled_from(SIZES), st.sampled_from(SIZES))
def test_only_the_shared_heads_are_touched(layout, from_size, to_size):
    for source in shards(from_size):
        for sink in shards(to_size):
            held = {name for name, _ in bytes_of_heads(layout, source)}
            expected = [byte if byte[0] in held else None for byte in bytes_of_heads(layout, sink)]
            blank = [None] * len(expected)
            moved = move(plan(layout, source, sink), bytes_of_heads(layout, source), blank)
            assert moved == expected


@given(layouts, st.sampled_from(SIZES), st.sampled_from(SIZES))
def test_a_shared_record_follows_its_layout_and_holds_all_shared_heads(layout, from_size, to_size):
    for source in shards(from_size):
        for sink in shards(to_size):
            pieces = plan(layout, source, sink)
            shared = shared_layout(rank_layout(layout, source), source, sink)
            assert shared == shared_layout(rank_layout(layout, sink), sink, source)
            assert shared.block_bytes == sum(piece.num_bytes for piece in pieces)
            record = bytes_of_heads(layout, source)
            packed = move(packing(pieces), record, [None] * shared.block_bytes)
            assert [name for name, i in packed if i == 0] == sorted({name for name, _ in packed})
            blank = [None] * rank_layout(layout, sink).block_bytes
            assert move(unpacking(pieces), packed, blank) == move(pieces, record, blank)


@given(layouts, st.sampled_from(SIZES))
def test_equal_shards_have_one_piece_that_is_the_whole_record(layout, size):
    for shard in shards(size):
        num_bytes = rank_layout(layout, shard).block_bytes
        assert plan(layout, shard, shard) == (RecordPiece(0, 0, num_bytes),)


@pytest.mark.parametrize("size", [2, 4])
def test_a_shared_record_that_is_all_of_one_side_is_one_piece_there(size):
    for shard in shards(size):
        whole = (RecordPiece(0, 0, rank_layout(LAYOUT, shard).block_bytes),)
        assert unpacking(plan(LAYOUT, WHOLE, shard)) == whole
        assert packing(plan(LAYOUT, shard, WHOLE)) == whole


def test_ranks_that_share_no_head_have_nothing_to_move():
    assert plan(LAYOUT, Shard(0, 2), Shard(1, 2)) == ()
    assert plan(LAYOUT, Shard(3, 4), Shard(0, 2)) == ()
    assert (
        shared_layout(rank_layout(LAYOUT, Shard(0, 2)), Shard(0, 2), Shard(1, 2)).block_bytes == 0
    )
    assert packing(()) == unpacking(()) == ()


def test_k_and_v_of_each_layer_are_a_piece_each():
    head = LAYOUT.head_bytes(0)
    pieces = plan(LAYOUT, WHOLE, Shard(1, 2))
    assert pieces[:3] == (
        RecordPiece(2 * head, 0, 2 * head),
        RecordPiece(6 * head, 2 * head, 2 * head),
        RecordPiece(10 * head, 4 * head, 2 * head),
    )
    assert len(pieces) == 2 * (2 + 1)


def test_sizes_that_do_not_divide_each_other_share_parts():
    layout = KVLayout(1, KVFormat.FP32, (KVSection(num_layers=1, num_kv_heads=6, head_dim=16),))
    shared = shared_layout(rank_layout(layout, Shard(1, 3)), Shard(1, 3), Shard(0, 2))
    assert shared.sections[0].num_kv_heads == 1
    assert plan(layout, Shard(1, 3), Shard(0, 2)) == (
        RecordPiece(0, 128, 64),
        RecordPiece(128, 320, 64),
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [("block_size", 5), ("kv_format", KVFormat.FP32), ("sections", (SECTION,))],
)
def test_layouts_may_differ_in_nothing_but_their_heads(field, value):
    source, sink = rank_layout(LAYOUT, Shard(0, 2)), LAYOUT
    assert difference(source, Shard(0, 2), sink, WHOLE) is None
    assert difference(source, WHOLE, sink, WHOLE) == "sections"
    other = msgspec.structs.replace(sink, **{field: value})
    assert difference(source, Shard(0, 2), other, WHOLE) == field
    with pytest.raises(AssertionError, match=field):
        plan_pieces(source, Shard(0, 2), other, WHOLE)


@pytest.mark.parametrize(("rank", "size"), [(1, 1), (-1, 2), (0, 0), (5, 4)])
def test_a_rank_is_one_of_its_group(rank, size):
    with pytest.raises(ValueError, match="rank"):
        Shard(rank, size)
    frame = msgspec.msgpack.encode({"rank": rank, "size": size})
    with pytest.raises(msgspec.ValidationError, match="rank"):
        msgspec.msgpack.decode(frame, type=Shard)
