"""The form of blocks on the wire, which both ranks compute from their two identities.

    source's record ──packing──> shared heads ──convert──> wire
                                 wire ──convert──> shared heads ──unpacking──> sink's record

Formats are converted only if `kv_wire_dtype` is set or the conversion is exact:

    formats equal, no `kv_wire_dtype`           as stored
    bf16 at the source, fp32 at the sink        as stored on the wire, widened at the sink
    `kv_wire_dtype` of both                     to that format at the source, from it at the sink

Only fp32 and bf16 are converted to a narrower format: quantised KV is never quantised again.

Pure: integers only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import msgspec

from engine.errors import BatonError
from engine.layout import KVFormat, KVLayout, Shard
from kvtransfer.messages import Identity
from kvtransfer.records import (
    RecordPiece,
    holders,
    packing,
    plan_pieces,
    shared_layout,
    tiles,
    unpacking,
)

WIDE = (KVFormat.FP32, KVFormat.BF16)


class Disagreement(BatonError):
    """Two workers cannot exchange blocks, because their identities disagree in `field`."""

    def __init__(self, field: str) -> None:
        super().__init__(field)
        self.field = field


@dataclass(frozen=True, slots=True)
class Wire:
    """The form in which blocks of a source rank are sent to a sink rank."""

    stored: KVLayout  # the heads and layers on the wire, in the source's format
    travels_as: KVFormat
    wanted: KVLayout  # the same heads and layers, in the sink's format
    packing: tuple[RecordPiece, ...]  # from the source's record to the shared record
    unpacking: tuple[RecordPiece, ...]  # from the shared record to the sink's record
    # from the source's record directly to the sink's; None if the formats differ
    pieces: tuple[RecordPiece, ...] | None
    layout: KVLayout  # layout of the record on the wire
    # bytes of a block on the wire; zero if other ranks give the sink all its bytes
    record_bytes: int
    num_holders: int  # number of sink ranks that hold each lease of this source rank


def agree(source: Identity, sink: Identity) -> Wire:
    """Returns the form of blocks between a source rank and a sink rank. Raises Disagreement."""
    if source.fingerprint != sink.fingerprint:
        raise Disagreement("fingerprint")
    field = _plain(source.layout).difference(_plain(sink.layout))
    if field is not None:
        raise Disagreement(f"layout.{field}")
    for identity in (source, sink):
        check_ranks(identity.layout, identity.ranks)
        if identity.shard not in identity.ranks:
            raise Disagreement("shard")
    travels_as = _wire_format(source, sink)
    among = holders(source.layout, source.shard, sink.ranks)
    if sink.shard not in among:
        raise Disagreement("shard")
    pieces = plan_pieces(source.layout, source.shard, sink.shard)
    landing = plan_pieces(sink.layout, source.shard, sink.shard)
    is_plain = source.layout.kv_format == travels_as == sink.layout.kv_format
    stored = shared_layout(source.layout, source.shard, sink.shard)
    layout = msgspec.structs.replace(stored, kv_format=travels_as)
    return Wire(
        stored=stored,
        travels_as=travels_as,
        wanted=shared_layout(sink.layout, source.shard, sink.shard),
        packing=packing(pieces),
        unpacking=unpacking(landing),
        pieces=pieces if is_plain else None,
        layout=layout,
        record_bytes=layout.block_bytes,
        num_holders=len(among),
    )


class SourceRanks(NamedTuple):
    """The source ranks from which a sink rank pulls, given by their indices."""

    held: tuple[int, ...]  # source ranks whose leases the sink rank holds
    idle: tuple[int, ...]  # ranks of `held` that give the sink rank no bytes


@lru_cache(maxsize=256)  # cached by the shapes of both workers; few shapes occur
def ranks_to_hold(
    layout: KVLayout, sources: tuple[Shard, ...], sinks: tuple[Shard, ...], sink: Shard
) -> SourceRanks:
    """Returns the source ranks whose leases this sink rank holds.

    Raises Disagreement if the source's ranks together do not have the whole model.
    """
    check_ranks(layout, sources)
    if not tiles(layout, sources, sink):
        raise Disagreement("group")
    held = [i for i, source in enumerate(sources) if sink in holders(layout, source, sinks)]
    idle = [i for i in held if not shared_layout(layout, sources[i], sink).block_bytes]
    return SourceRanks(tuple(held), tuple(idle))


def check_ranks(layout: KVLayout, ranks: Sequence[Shard]) -> None:
    """Raises Disagreement if a rank does not fit the model, or occurs twice."""
    if len(set(ranks)) != len(ranks) or not all(rank.fits(layout) for rank in ranks):
        raise Disagreement("group")


def _plain(layout: KVLayout) -> KVLayout:
    """Returns the same layout in fp32, a format that every layout supports."""
    return msgspec.structs.replace(layout, kv_format=KVFormat.FP32)


def _wire_format(source: Identity, sink: Identity) -> KVFormat:
    """Returns the KV format on the wire. Raises Disagreement."""
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
