"""Plans which bytes of a source's record to copy where, if both ends hold shares of the heads.

    shard (rank r of n)   holds heads r * h … (r + 1) * h - 1 of the n * h that a section has; h is
                          `num_kv_heads` in that rank's own KVLayout
    shared record         only the heads that both hold, in the usual order; it is sent on the wire

If source and sink have the same shard, the record is one piece. Otherwise K and V of each layer are
one piece each: within a layer the heads that two ranks share are contiguous (`engine.layout`).

Pure: integers only. `native` copies records, and `formats` converts them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec

from engine.layout import KVLayout, KVSection


class Shard(msgspec.Struct, frozen=True):
    """One of the equal shares into which the heads are split, by rank."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} of {self.size}")


@dataclass(frozen=True, slots=True)
class RecordPiece:
    """A contiguous range of bytes to copy; offsets are from the start of each record."""

    source_offset: int
    sink_offset: int
    num_bytes: int


def difference(
    source: KVLayout, source_shard: Shard, sink: KVLayout, sink_shard: Shard
) -> str | None:
    """Returns the first field that forbids copying records piece by piece, or None."""
    return _unsharded(source, source_shard).difference(_unsharded(sink, sink_shard))


def plan_pieces(
    source: KVLayout, source_shard: Shard, sink: KVLayout, sink_shard: Shard
) -> tuple[RecordPiece, ...]:
    """Returns the pieces to copy from a source's record to a sink's: the heads that both hold.

    They are in order of their offsets, with neighbours merged. There is none if the ranks share no
    head. The layouts may differ only in `num_kv_heads`.
    """
    field = difference(source, source_shard, sink, sink_shard)
    assert field is None, f"records differ in {field}"
    return _merged(
        piece
        for index in range(len(source.sections))
        for piece in _section_pieces(source, source_shard, sink, sink_shard, index)
    )


def shared_layout(layout: KVLayout, shard: Shard, other: Shard) -> KVLayout:
    """Returns the layout of the record that this rank (with this layout) and the other share."""
    sections = tuple(
        msgspec.structs.replace(section, num_kv_heads=len(_shared_heads(section, shard, other)))
        for section in layout.sections
    )
    return msgspec.structs.replace(layout, sections=sections)


def packing(pieces: Sequence[RecordPiece]) -> tuple[RecordPiece, ...]:
    """Returns the pieces from a source's record to the shared one, both in the source's format."""
    return _merged(
        RecordPiece(piece.source_offset, offset, piece.num_bytes)
        for piece, offset in zip(pieces, _shared_offsets(pieces), strict=True)
    )


def unpacking(pieces: Sequence[RecordPiece]) -> tuple[RecordPiece, ...]:
    """Returns the pieces from the shared record to a sink's, both in the sink's format."""
    return _merged(
        RecordPiece(offset, piece.sink_offset, piece.num_bytes)
        for piece, offset in zip(pieces, _shared_offsets(pieces), strict=True)
    )


def _unsharded(layout: KVLayout, shard: Shard) -> KVLayout:
    """Returns the layout of a rank that holds all heads."""
    sections = tuple(
        msgspec.structs.replace(section, num_kv_heads=section.num_kv_heads * shard.size)
        for section in layout.sections
    )
    return msgspec.structs.replace(layout, sections=sections)


def _section_pieces(
    source: KVLayout, source_shard: Shard, sink: KVLayout, sink_shard: Shard, index: int
) -> Iterator[RecordPiece]:
    section = source.sections[index]
    heads = _shared_heads(section, source_shard, sink_shard)
    head_bytes = source.head_bytes(index)
    source_offset, source_step = _first_head(source, source_shard, index, heads.start)
    sink_offset, sink_step = _first_head(sink, sink_shard, index, heads.start)
    for plane in range(2 * section.num_layers if heads else 0):
        yield RecordPiece(
            source_offset + plane * source_step,
            sink_offset + plane * sink_step,
            len(heads) * head_bytes,
        )


def _first_head(layout: KVLayout, shard: Shard, index: int, head: int) -> tuple[int, int]:
    """Returns the offset in K of a head (counted over all ranks) in layer 0, and the step to V."""
    own_head = head - shard.rank * layout.sections[index].num_kv_heads
    offset = layout.section_offset_bytes(index) + own_head * layout.head_bytes(index)
    return offset, layout.layer_bytes(index) // 2


def _shared_heads(section: KVSection, shard: Shard, other: Shard) -> range:
    """Returns the heads that both this rank, with this section, and the other hold."""
    own, total = section.num_kv_heads, section.num_kv_heads * shard.size
    assert total % other.size == 0, f"{total} heads are not split evenly by {other.size}"
    others = total // other.size
    start = max(shard.rank * own, other.rank * others)
    return range(start, max(start, min((shard.rank + 1) * own, (other.rank + 1) * others)))


def _shared_offsets(pieces: Sequence[RecordPiece]) -> list[int]:
    """Returns where each piece begins in the shared record, which holds them without gaps."""
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
