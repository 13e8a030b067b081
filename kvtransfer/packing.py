"""Copies blocks of a pool into wire records, and back, in the form that `Wire` describes.

If the pool is in a device's memory, the device makes the copies.
"""

from collections.abc import Sequence

import numpy as np

from engine.worker.blocks import BlockId
from kvtransfer.device.blocks import DeviceBlocks
from kvtransfer.formats import convert
from kvtransfer.memory import Blocks
from kvtransfer.native.copying import checksum, copy_records, gather_records, scatter_records
from kvtransfer.wire import Wire


def rows_to_send(wire: Wire, pool: Blocks | DeviceBlocks) -> Blocks | None:
    """Returns the blocks' bytes as rows to send directly; None if blocks must be packed first."""
    if isinstance(pool, DeviceBlocks) or wire.stored.kv_format != wire.travels_as:
        return None
    if len(wire.packing) != 1:
        return None
    (piece,) = wire.packing
    return pool[:, piece.source_offset : piece.source_offset + piece.num_bytes]


def rows_to_receive(wire: Wire, pool: Blocks | DeviceBlocks) -> Blocks | None:
    """Returns the blocks' bytes as rows to receive into directly; None if records must be
    unpacked.
    """
    if isinstance(pool, DeviceBlocks) or wire.wanted.kv_format != wire.travels_as:
        return None
    if len(wire.unpacking) != 1:
        return None
    (piece,) = wire.unpacking
    return pool[:, piece.sink_offset : piece.sink_offset + piece.num_bytes]


def pack(wire: Wire, pool: Blocks | DeviceBlocks, block_ids: Sequence[int], out: Blocks) -> int:
    """Writes blocks of the source's pool to `out` [num_blocks, wire.record_bytes].

    The records in `out` are contiguous. Returns the checksum of all of `out`.
    """
    if isinstance(pool, DeviceBlocks):
        return pool.pack(wire, block_ids, out)
    if wire.stored.kv_format == wire.travels_as:
        return gather_records(out, pool, block_ids, wire.packing)
    stored = np.empty((len(block_ids), wire.stored.block_bytes), np.uint8)
    copy_records(stored, None, pool, block_ids, wire.packing)
    convert(stored, wire.stored, wire.travels_as, out=out)
    return checksum(out.data)


def convert_blocks(
    wire: Wire,
    sink: Blocks,
    source: Blocks,
    sink_ids: Sequence[int],
    source_ids: Sequence[int],
) -> None:
    """Copies blocks from one pool to another, with the conversions that the wire would need."""
    records = np.empty((len(source_ids), wire.stored.block_bytes), np.uint8)
    copy_records(records, None, source, source_ids, wire.packing)
    if wire.stored.kv_format != wire.travels_as:
        records = convert(records, wire.stored, wire.travels_as)
    if wire.travels_as != wire.wanted.kv_format:
        records = convert(records, wire.layout, wire.wanted.kv_format)
    copy_records(sink, sink_ids, records, None, wire.unpacking)


def unpack(
    wire: Wire,
    records: Blocks,
    rows: Sequence[int],
    pool: Blocks | DeviceBlocks,
    block_ids: Sequence[BlockId],
) -> int:
    """Writes these rows of `records` [num_records, wire.record_bytes] to blocks of the sink's pool.

    The records are contiguous. Returns the checksum of all records, which is known only after the
    blocks have been written.
    """
    if isinstance(pool, DeviceBlocks):
        return pool.unpack(wire, records, rows, block_ids)
    if wire.travels_as == wire.wanted.kv_format:
        return scatter_records(pool, block_ids, records, rows, wire.unpacking)
    converted = convert(records, wire.layout, wire.wanted.kv_format)
    copy_records(pool, block_ids, converted, rows, wire.unpacking)
    return checksum(records.data)
