"""Blocks of a pool to and from the records that travel: what `Wire` says, carried out on bytes."""

from collections.abc import Sequence

import numpy as np

from engine.worker.blocks import BlockId
from kvtransfer.formats import convert
from kvtransfer.memory import Blocks
from kvtransfer.native.copying import checksum, copy_records, gather_records, scatter_records
from kvtransfer.wire import Wire


def pack(wire: Wire, pool: Blocks, block_ids: Sequence[int], out: Blocks) -> int:
    """Blocks of the source's pool as records [num_blocks, wire.record_bytes] in `out`.

    Returns the checksum of all of `out`, whose records lie side by side.
    """
    if wire.stored.kv_format == wire.travels_as:
        return gather_records(out, pool, block_ids, wire.packing)
    stored = np.empty((len(block_ids), wire.stored.block_bytes), np.uint8)
    copy_records(stored, None, pool, block_ids, wire.packing)
    convert(stored, wire.stored, wire.travels_as, out=out)
    return checksum(out.data)


def convert_blocks(
    wire: Wire,
    source: Blocks,
    source_ids: Sequence[int],
    sink: Blocks,
    sink_ids: Sequence[BlockId],
) -> None:
    """Blocks of the source's pool to blocks of the sink's, by way of what would have travelled."""
    records = np.empty((len(source_ids), wire.stored.block_bytes), np.uint8)
    copy_records(records, None, source, source_ids, wire.packing)
    if wire.stored.kv_format != wire.travels_as:
        records = convert(records, wire.stored, wire.travels_as)
    if wire.travels_as != wire.wanted.kv_format:
        records = convert(records, wire.layout, wire.wanted.kv_format)
    copy_records(sink, sink_ids, records, None, wire.unpacking)


def unpack(
    wire: Wire, records: Blocks, rows: Sequence[int], pool: Blocks, block_ids: Sequence[BlockId]
) -> int:
    """These rows of `records` [num_records, wire.record_bytes] to blocks of the sink's pool.

    Returns the checksum of all of `records`, which lie side by side: it is known only when the
    blocks are written.
    """
    if wire.travels_as == wire.wanted.kv_format:
        return scatter_records(pool, block_ids, records, rows, wire.unpacking)
    converted = convert(records, wire.layout, wire.wanted.kv_format)
    copy_records(pool, block_ids, converted, rows, wire.unpacking)
    return checksum(records.data)
