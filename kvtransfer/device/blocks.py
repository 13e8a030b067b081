"""A pool of blocks in a device's memory, and the copies between its blocks and wire records.

`pack` and `unpack` do what `kvtransfer.packing` does for pools in host memory. Where formats
differ, the device converts between pool and record. The copy engines make one copy for each piece
of each block; adjacent pieces share one copy.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from engine.layout import KVFormat, KVLayout
from kvtransfer.device.cuda_driver import CudaDriver, DeviceCopy
from kvtransfer.memory import Blocks, Pool, Region, boot_id
from kvtransfer.messages import IpcOffer
from kvtransfer.native.copying import checksum
from kvtransfer.records import RecordPiece
from kvtransfer.wire import Wire


class RecordConverter(Protocol):
    """Converts records in a device's memory, as `kvtransfer.formats` does on the host."""

    def room(self, num_bytes: int, stream: int) -> int:
        """Returns the address of device memory for records to convert, valid until the next
        call.
        """
        ...

    def convert(
        self, address: int, num_records: int, layout: KVLayout, to: KVFormat, stream: int
    ) -> int:
        """Queues a conversion. Returns the result's address, which stays valid during the next
        call.
        """
        ...


class Rows(NamedTuple):
    """Consecutive records from an address on. `ids` selects some of the records; None: all, in
    order.
    """

    address: int
    record_bytes: int
    ids: Sequence[int] | None = None

    def row(self, i: int) -> int:
        """Returns the address of the selected record `i`."""
        return self.address + (i if self.ids is None else self.ids[i]) * self.record_bytes


class DeviceBlocks:
    """The pool of a worker whose KV is in a device's memory."""

    def __init__(
        self,
        address: int,
        num_blocks: int,
        block_bytes: int,
        *,
        driver: CudaDriver,
        converter: RecordConverter,
    ) -> None:
        self.address = address
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.driver = driver
        self._converter = converter

    def pack(self, wire: Wire, block_ids: Sequence[int], out: Blocks) -> int:
        """Packs blocks into `out` [num_blocks, wire.record_bytes] and waits. Returns the checksum
        of `out`.
        """
        records = Rows(out.ctypes.data, wire.record_bytes)
        own = self._rows(block_ids)
        num = len(block_ids)
        if wire.stored.kv_format == wire.travels_as:
            self._copy(wire.packing, own, records, num)
        else:
            stored_bytes = wire.stored.block_bytes
            room = self._converter.room(num * stored_bytes, self.driver.stream)
            self._copy(wire.packing, own, Rows(room, stored_bytes), num)
            made = self._converted(room, num, wire.stored, wire.travels_as)
            self.driver.copy([DeviceCopy(records.address, made, num * wire.record_bytes)])
        self.driver.wait(self.driver.mark())
        return checksum(out.data)

    def unpack(
        self, wire: Wire, records: Blocks, rows: Sequence[int], block_ids: Sequence[int]
    ) -> int:
        """Unpacks these rows of `records` to blocks, and waits. Returns the checksum of all
        records.
        """
        there = Rows(records.ctypes.data, wire.record_bytes, rows)
        if wire.travels_as == wire.wanted.kv_format:
            self._copy(wire.unpacking, there, self._rows(block_ids), len(rows))
        else:
            num_bytes = len(rows) * wire.record_bytes
            room = self._converter.room(num_bytes, self.driver.stream)
            whole = (RecordPiece(0, 0, wire.record_bytes),)
            self._copy(whole, there, Rows(room, wire.record_bytes), len(rows))
            self._place(wire, room, block_ids)
        self.driver.wait(self.driver.mark())
        return checksum(records.data)

    def fetch(self, wire: Wire, source: Rows, block_ids: Sequence[int]) -> int:
        """Queues copies from another pool's blocks to these blocks. Returns the mark of the last
        copy.
        """
        num = len(block_ids)
        if wire.pieces is not None:
            self._copy(wire.pieces, source, self._rows(block_ids), num)
            return self.driver.mark()
        stored_bytes = wire.stored.block_bytes
        room = self._converter.room(num * stored_bytes, self.driver.stream)
        self._copy(wire.packing, source, Rows(room, stored_bytes), num)
        if wire.stored.kv_format != wire.travels_as:
            room = self._converted(room, num, wire.stored, wire.travels_as)
        self._place(wire, room, block_ids)
        return self.driver.mark()

    def _place(self, wire: Wire, address: int, block_ids: Sequence[int]) -> None:
        """Queues the conversion of the received records at `address`, and their copies to
        blocks.
        """
        num = len(block_ids)
        if wire.travels_as != wire.wanted.kv_format:
            address = self._converted(address, num, wire.layout, wire.wanted.kv_format)
        records = Rows(address, wire.wanted.block_bytes)
        self._copy(wire.unpacking, records, self._rows(block_ids), num)

    def _converted(self, address: int, num: int, layout: KVLayout, to: KVFormat) -> int:
        return self._converter.convert(address, num, layout, to, self.driver.stream)

    def _copy(self, pieces: Sequence[RecordPiece], source: Rows, sink: Rows, num: int) -> None:
        self.driver.copy(list(merged(copies(pieces, source, sink, num))))

    def _rows(self, block_ids: Sequence[int]) -> Rows:
        """Returns these blocks of the pool as rows. Raises IndexError for an invalid block id."""
        if block_ids and not (min(block_ids) >= 0 and max(block_ids) < self.num_blocks):
            raise IndexError(f"a block is not among the {self.num_blocks} of its pool")
        return Rows(self.address, self.block_bytes, block_ids)


def copies(
    pieces: Sequence[RecordPiece], source: Rows, sink: Rows, num: int
) -> Iterator[DeviceCopy]:
    """Yields the copy of each piece of each record."""
    for i in range(num):
        here, there = sink.row(i), source.row(i)
        for piece in pieces:
            yield DeviceCopy(here + piece.sink_offset, there + piece.source_offset, piece.num_bytes)


def merged(each: Iterable[DeviceCopy]) -> Iterator[DeviceCopy]:
    """Merges consecutive copies that are adjacent both at the source and at the target."""
    last: DeviceCopy | None = None
    for copy in each:
        if last is not None and (
            (last.to_address + last.num_bytes, last.from_address + last.num_bytes)
            == (copy.to_address, copy.from_address)
        ):
            last = last._replace(num_bytes=last.num_bytes + copy.num_bytes)
            continue
        if last is not None:
            yield last
        last = copy
    if last is not None:
        yield last


def rows_of(records: Blocks) -> Rows:
    """Returns the records of a pool in host memory, as a source for `fetch`."""
    assert records.dtype == np.uint8
    assert records.flags.c_contiguous
    return Rows(records.ctypes.data, records.shape[1])


class DevicePool:
    """A pool in a GPU's memory, owned by the runner."""

    blocks = None

    def __init__(self, device: DeviceBlocks, device_id: int) -> None:
        self.device = device
        self.num_blocks = device.num_blocks
        self.block_bytes = device.block_bytes
        num_bytes = device.num_blocks * device.block_bytes
        self._region = Region(device.address, num_bytes, "VRAM", device_id)

    def region(self) -> Region:
        """The location of the pool on its device."""
        return self._region

    def offer(self) -> None:
        """Returns None, because no process can map the pool as host memory."""

    def ipc_offer(self) -> IpcOffer:
        """Returns the handle with which a worker of this host maps the pool. Raises DriverError."""
        shared = self.device.driver.share(self._region.address)
        return IpcOffer(boot_id(), shared.handle, shared.offset, self._region.num_bytes)


def reach(pool: Pool) -> Blocks | DeviceBlocks | None:
    """Returns the pool in a form that the endpoint can copy; None if there is no such form."""
    return pool.device if isinstance(pool, DevicePool) else pool.blocks
