"""The form in which blocks travel between two workers. Both ends compute it from both identities.

    source's record ──packing──> shared heads ──convert──> wire
                                 wire ──convert──> shared heads ──unpacking──> sink's record

Nothing is converted unless the configuration asks for it or no bit can change:

    formats equal, no `kv_wire_dtype`           as stored
    bf16 at the source, fp32 at the sink        as stored on the wire, widened at the sink
    `kv_wire_dtype` of both                     to that format at the source, from it at the sink

Only fp32 and bf16 are converted to a narrower format: quantised KV is never quantised again.

Pure: integers only.
"""

from dataclasses import dataclass

import msgspec

from engine.errors import BatonError
from engine.layout import KVFormat, KVLayout
from kvtransfer.messages import Identity
from kvtransfer.records import (
    RecordPiece,
    difference,
    packing,
    plan_pieces,
    shared_layout,
    unpacking,
)

WIDE = (KVFormat.FP32, KVFormat.BF16)


class Disagreement(BatonError):
    """Two workers cannot exchange blocks. `field` names the first reason."""

    def __init__(self, field: str) -> None:
        super().__init__(field)
        self.field = field


@dataclass(frozen=True, slots=True)
class Wire:
    """The form in which one source's blocks reach one sink."""

    stored: KVLayout  # the heads that both hold, as the source stores them
    travels_as: KVFormat
    wanted: KVLayout  # the same heads as the sink stores them
    packing: tuple[RecordPiece, ...]  # from the source's record to a record of these heads only
    unpacking: tuple[RecordPiece, ...]  # from such a record to the sink's
    pieces: tuple[RecordPiece, ...] | None  # from record to record; None where formats differ
    layout: KVLayout  # the record that travels
    record_bytes: int  # of a block on the wire


def agree(source: Identity, sink: Identity) -> Wire:
    """Returns the form for this source and this sink. Raises Disagreement."""
    if source.fingerprint != sink.fingerprint:
        raise Disagreement("fingerprint")
    _check_shards(source, sink)
    field = difference(_plain(source.layout), source.shard, _plain(sink.layout), sink.shard)
    if field is not None:
        raise Disagreement(f"layout.{field}")
    travels_as = _wire_format(source, sink)
    alike = msgspec.structs.replace(sink.layout, kv_format=source.layout.kv_format)
    pieces = plan_pieces(source.layout, source.shard, alike, sink.shard)
    if not pieces:
        raise Disagreement("shard")
    narrow = msgspec.structs.replace(source.layout, kv_format=sink.layout.kv_format)
    landing = plan_pieces(narrow, source.shard, sink.layout, sink.shard)
    is_plain = source.layout.kv_format == travels_as == sink.layout.kv_format
    stored = shared_layout(source.layout, source.shard, sink.shard)
    layout = msgspec.structs.replace(stored, kv_format=travels_as)
    return Wire(
        stored=stored,
        travels_as=travels_as,
        wanted=shared_layout(sink.layout, sink.shard, source.shard),
        packing=packing(pieces),
        unpacking=unpacking(landing),
        pieces=pieces if is_plain else None,
        layout=layout,
        record_bytes=layout.block_bytes,
    )


def _check_shards(source: Identity, sink: Identity) -> None:
    for one, other in ((source, sink), (sink, source)):
        for section in one.layout.sections:
            if section.num_kv_heads * one.shard.size % other.shard.size:
                raise Disagreement("shard")


def _plain(layout: KVLayout) -> KVLayout:
    """Returns the layout in a format that every layout can have."""
    return msgspec.structs.replace(layout, kv_format=KVFormat.FP32)


def _wire_format(source: Identity, sink: Identity) -> KVFormat:
    """Returns the format on the wire. Raises Disagreement."""
    if source.kv_wire_dtype != sink.kv_wire_dtype:
        raise Disagreement("kv_wire_dtype")
    stored, wanted = source.layout.kv_format, sink.layout.kv_format
    wire = source.kv_wire_dtype
    if wire is None:
        if stored != wanted and (stored, wanted) != (KVFormat.BF16, KVFormat.FP32):
            raise Disagreement("layout.kv_format")
        return stored
    if stored != wire and stored not in WIDE:
        raise Disagreement("kv_wire_dtype")
    if wanted != wire and wanted not in WIDE:
        raise Disagreement("layout.kv_format")
    return wire
