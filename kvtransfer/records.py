"""Plans the copies from a source's record to a sink's, where the two are shares of a model.

    record          one rank's share of a block: its own heads of its own layers, in the order of
                    `engine.layout`
    shared record   the heads and layers that one source rank gives to one sink rank, in the same
                    order; this record is sent on the wire

If both ranks have the same share, the record is one piece. Otherwise K and V of each layer are one
piece each: within a layer, the heads that two ranks share are contiguous.

If several source ranks have the same head, each sink rank gets the head from only one source rank.
The sink ranks that need the head are spread evenly over these source ranks. So the source ranks
together send each byte to each sink rank exactly once. Both ends compute the same plan without
messages.

Pure: integers only. `native` copies records, and `formats` converts them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec

from engine.layout import KVLayout, KVSection, Shard


@dataclass(frozen=True, slots=True)
class RecordPiece:
    """A contiguous range of bytes to copy. Offsets count from the start of each record."""

    source_offset: int
    sink_offset: int
    num_bytes: int


def plan_pieces(layout: KVLayout, source: Shard, sink: Shard) -> tuple[RecordPiece, ...]:
    """Returns the pieces to copy from a source rank's record to a sink rank's record.

    `layout` is the layout of the whole model, in the format of both records. The pieces are in
    order of their offsets, with adjacent pieces merged. The result is empty if the sink rank gets
    no bytes from the source rank.
    """
    return _merged(
        piece
        for index in range(len(layout.sections))
        for piece in _section_pieces(layout, source, sink, index)
    )


def shared_layout(layout: KVLayout, source: Shard, sink: Shard) -> KVLayout:
    """Returns the layout of the shared record that a source rank sends to a sink rank."""
    sections = tuple(
        KVSection(
            len(_shared_layers(layout, source, sink, index)),
            len(_shared_heads(section, source, sink)),
            section.head_dim,
        )
        for index, section in enumerate(layout.sections)
    )
    return msgspec.structs.replace(layout, sections=sections)


def holders(layout: KVLayout, source: Shard, sinks: Sequence[Shard]) -> tuple[Shard, ...]:
    """Returns the sink ranks that hold a lease of this source rank.

    These are the sink ranks that get bytes from the source rank. If no sink rank does, because
    other source ranks have the same heads, one sink rank holds the lease nevertheless. So every
    source rank is informed when the sink has received everything.
    """
    given = tuple(sink for sink in sinks if shared_layout(layout, source, sink).block_bytes)
    return given or (sinks[source.rank % len(sinks)],)


def tiles(layout: KVLayout, sources: Iterable[Shard], sink: Shard) -> bool:
    """True if these source ranks together give each byte of the sink's record exactly once."""
    pieces = (piece for source in sources for piece in plan_pieces(layout, source, sink))
    end = 0
    for piece in sorted(pieces, key=lambda piece: piece.sink_offset):
        if piece.sink_offset != end:
            return False
        end += piece.num_bytes
    return end == layout.of_rank(sink).block_bytes


def packing(pieces: Sequence[RecordPiece]) -> tuple[RecordPiece, ...]:
    """Returns the pieces from a source's record to the shared one, both in the source's format."""
    return _merged(
        RecordPiece(piece.source_offset, offset, piece.num_bytes)
        for piece, offset in zip(pieces, _shared_offsets(pieces), strict=True)
    )


def unpacking(pieces: Sequence[RecordPiece]) -> tuple[RecordPiece, ...]:
    """Returns the pieces from the shared record to a sink's record, both in the sink's format."""
    return _merged(
        RecordPiece(offset, piece.sink_offset, piece.num_bytes)
        for piece, offset in zip(pieces, _shared_offsets(pieces), strict=True)
    )


def _section_pieces(
    layout: KVLayout, source: Shard, sink: Shard, index: int
) -> Iterator[RecordPiece]:
    layers = _shared_layers(layout, source, sink, index)
    heads = _shared_heads(layout.sections[index], source, sink)
    source_offset, source_step = _place(layout, source, index, layers.start, heads.start)
    sink_offset, sink_step = _place(layout, sink, index, layers.start, heads.start)
    for plane in range(2 * len(layers) if heads else 0):
        yield RecordPiece(
            source_offset + plane * source_step,
            sink_offset + plane * sink_step,
            len(heads) * layout.head_bytes(index),
        )


def _place(layout: KVLayout, shard: Shard, index: int, layer: int, head: int) -> tuple[int, int]:
    """Returns the offset of a head's K in a rank's record, and the distance from the head's K to
    its V.
    """
    own = layout.of_rank(shard)
    own_layer = layer - shard.layers_of(layout, index).start
    own_head = head - shard.heads_of(layout.sections[index]).start
    begin = own.section_offset_bytes(index) + own_layer * own.layer_bytes(index)
    return begin + own_head * own.head_bytes(index), own.layer_bytes(index) // 2


def _shared_layers(layout: KVLayout, source: Shard, sink: Shard, index: int) -> range:
    return _overlap(source.layers_of(layout, index), sink.layers_of(layout, index))


def _shared_heads(section: KVSection, source: Shard, sink: Shard) -> range:
    """Returns the heads of a section that a source rank gives to a sink rank in each layer."""
    heads = _overlap(source.heads_of(section), sink.heads_of(section))
    if not heads or source.size <= section.num_kv_heads:
        return heads
    # the source ranks that have the same head
    replicas = _ranks_with(section, heads.start, source.size)
    takers = _ranks_with(section, heads.start, sink.size)
    giver = replicas[takers.index(sink.rank) % len(replicas)]
    return heads if giver == source.rank else range(0)


def _ranks_with(section: KVSection, head: int, size: int) -> list[int]:
    return [rank for rank in range(size) if head in Shard(rank, size).heads_of(section)]


def _overlap(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def _shared_offsets(pieces: Sequence[RecordPiece]) -> list[int]:
    """Returns the offset of each piece in the shared record, in which pieces have no gaps."""
    return list(accumulate((piece.num_bytes for piece in pieces), initial=0))[:-1]


def _merged(pieces: Iterable[RecordPiece]) -> tuple[RecordPiece, ...]:
    merged: list[RecordPiece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if last is not None and (
            (last.source_offset + last.num_bytes, last.sink_offset + last.num_bytes)
            == (piece.source_offset, piece.sink_offset)
        ):
            total = last.num_bytes + piece.num_bytes
            merged[-1] = RecordPiece(last.source_offset, last.sink_offset, total)
        else:
            merged.append(piece)
    return tuple(merged)
