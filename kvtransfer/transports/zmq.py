"""Sends blocks in messages: over the sink's sealed stream if it has one, else over CURVE.

Over CURVE, blocks are gathered into staging buffers, from which ZeroMQ sends without another copy.
The buffers bound the memory that a source needs for its sinks. Reads wait in one queue per sink
until a buffer is free, or until the stream accepts more data. If a read's lease ends before it is
answered, the read is dropped: the sink has received Ended.
"""

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence

import msgspec
import numpy as np
import zmq

from engine.config import Transport
from engine.errors import ProtocolError
from engine.messages import SeqId
from engine.worker.blocks import BlockId
from kvtransfer.device.blocks import DeviceBlocks
from kvtransfer.lease.effects import Fetch, Peer, SendBlocks, UseSource
from kvtransfer.lease.pull import Means
from kvtransfer.memory import Blocks
from kvtransfer.messages import Data, Offers, Read, ToSource, encode
from kvtransfer.packing import pack, unpack
from kvtransfer.transports.sealed import Places, SealedSink
from kvtransfer.transports.sealed_source import SealedSource
from kvtransfer.transports.seam import (
    BATCH_BYTES,
    FRAME_BYTES,
    WINDOW_BYTES,
    BlocksArrived,
    BlocksFailed,
    FetchEnd,
    TransferContext,
    TransportUnavailable,
    num_records,
)
from kvtransfer.wire import Wire

log = logging.getLogger(__name__)

MAX_FRAMES_PER_TURN = 16  # most frames that are sent to a sink before the next sink's turn
# one is filled while ZeroMQ sends the others; this number fits the processor's caches
MAX_BUFFERS_PER_SINK = 3
MAX_BUFFERS = 64
MAX_QUEUED_READS = 256  # most reads queued for one sink, which asks again for dropped reads

# Sends a header and a payload to a sink. Returns the tracker of ZeroMQ's use of the payload.
SendFrame = Callable[[Peer, bytes, memoryview], zmq.MessageTracker | None]


class Staging:
    """Buffers of one frame each, reused once ZeroMQ has sent their contents."""

    def __init__(self, allocate: Callable[[int], Blocks]) -> None:
        self._allocate = allocate
        self._free: list[Blocks] = []
        # the buffers that ZeroMQ is sending, oldest first
        self._sending: list[tuple[zmq.MessageTracker, Peer, Blocks]] = []

    def take(self, peer: Peer, num_bytes: int) -> Blocks | None:
        """Returns a buffer of at least `num_bytes` for that sink; None if the sink must wait."""
        still = []
        # each tracker is asked once, since its state may change
        for tracker, holder, buffer in self._sending:
            if tracker.done:
                self._free.append(buffer)
            else:
                still.append((tracker, holder, buffer))
        self._sending = still
        if sum(holder == peer for _, holder, _ in self._sending) >= MAX_BUFFERS_PER_SINK:
            return None
        while self._free:
            buffer = self._free.pop()
            if buffer.nbytes >= num_bytes:
                return buffer
        if len(self._sending) >= MAX_BUFFERS:
            return None
        # at least FRAME_BYTES, so that any frame of small blocks fits
        return self._allocate(max(num_bytes, FRAME_BYTES))

    def lend(self, buffer: Blocks, peer: Peer, tracker: zmq.MessageTracker) -> None:
        """Records that ZeroMQ is sending a buffer to a peer."""
        self._sending.append((tracker, peer, buffer))

    def wait(self, timeout_s: float) -> None:
        """Waits until the oldest buffer has been sent, for at most `timeout_s`."""
        if self._sending:
            with contextlib.suppress(zmq.NotDone):
                self._sending[0][0].wait(timeout_s)


class ZmqTransport:
    """Asks sources for blocks and places the received blocks; sends blocks to sinks."""

    name = Transport.ZMQ
    num_reads = 0

    def __init__(
        self,
        context: TransferContext,
        pool: Blocks | DeviceBlocks | None,
        *,
        places: Callable[[str, Data], Places],
        post: Callable[[str, ToSource], None],
    ) -> None:
        """`pool` is None if the host cannot reach its memory. `post` sends a message to a source.

        `places` returns the local places of a Data that came from an address.
        """
        self._pool = pool
        self._post = post
        self._count = context.count
        self.sealed_sink = SealedSink(context, places=places, post=post)
        self.sealed_source = SealedSource(context)
        self._wires: dict[str, Wire] = {}  # the form of the blocks, by the source's address
        self._staging = Staging(
            pool.driver.pinned if isinstance(pool, DeviceBlocks) else _host_bytes
        )
        self._queued: dict[Peer, deque[SendBlocks]] = {}
        self._lacks_buffer = False

    # ------------------------------------------------------------ as a sink

    def offer(self, offers: Offers) -> Offers:
        """Offers to send blocks, if the host can reach the pool."""
        port = self.sealed_source.port
        return msgspec.structs.replace(offers, sends=self._pool is not None, sealed_port=port)

    def open(self, use: UseSource) -> Means:
        """Asks the source for a sealed stream. Until that exists, blocks arrive over CURVE."""
        if not use.source.offers.sends:
            raise TransportUnavailable("source cannot send what is in a GPU's memory", None)
        if self._pool is None:
            raise TransportUnavailable("KV here is in a GPU's memory", None)
        self._wires[use.address] = use.wire
        means = Means(
            self.name,
            batch_blocks=num_records(BATCH_BYTES, use.wire),
            window_blocks=num_records(WINDOW_BYTES, use.wire),
            resends=True,
        )
        self.sealed_sink.open(use, self._pool, max_blocks=means.batch_blocks)
        return means

    def fetch(self, fetch: Fetch) -> Sequence[FetchEnd]:
        """Asks the source for blocks. Returns nothing, since no block has arrived yet."""
        read = Read(fetch.lease_id, list(fetch.indices))
        if not self.sealed_sink.read(fetch.address, read):
            self._post(fetch.address, read)
        return ()

    def place(
        self, address: str, data: Data, payload: memoryview, places: Sequence[BlockId | None]
    ) -> FetchEnd:
        """Writes records that arrived over CURVE to local places. None: no pull waits for the
        block.

        The checksum is known only after the records are written. The places belong to this pull
        alone, so no other data is overwritten. Damaged blocks are asked for again, or the pull
        fails. Raises ProtocolError.
        """
        wire = self._wires.get(address)
        if wire is None or self._pool is None:
            raise ProtocolError("unrequested Data")
        indices = tuple(data.indices)
        rows = [row for row, place in enumerate(places) if place is not None]
        here = BlocksArrived(address, data.lease_id, tuple(indices[r] for r in rows), data=data)
        if not rows:
            return here
        damaged = BlocksFailed(
            address, data.lease_id, indices, "blocks arrive damaged", damaged=True
        )
        if payload.nbytes != len(indices) * wire.record_bytes:
            return damaged
        blocks = [place for place in places if place is not None]
        records = np.frombuffer(payload, np.uint8).reshape(len(indices), wire.record_bytes)
        checksum = unpack(wire, records, rows, self._pool, blocks)
        return here if checksum == data.checksum else damaged

    def poll(self, ready: Collection[int], *, may_wait: bool) -> Sequence[FetchEnd]:
        """Returns the blocks that arrived over sealed streams. `place` reports the blocks from
        CURVE.
        """
        return self.sealed_sink.poll(ready, may_wait=may_wait)

    def cancel(self, seq_id: SeqId) -> bool:
        """Returns False: blocks that arrive later have no place, and are dropped."""
        return False

    def close(self, address: str) -> None:
        """Closes the stream of a source."""
        self._wires.pop(address, None)
        self.sealed_sink.close(address)

    # ------------------------------------------------------------ as a source

    @property
    def has_work(self) -> bool:
        """True if blocks wait to be sent, and no descriptor will report when sending is
        possible.
        """
        sealed = self.sealed_source
        return sealed.has_more or any(sealed.can_send(peer) for peer in self._queued)

    def queue(self, read: SendBlocks) -> None:
        """Queues a sink's read until `flush` sends its blocks."""
        queue = self._queued.setdefault(read.peer, deque())
        if len(queue) >= MAX_QUEUED_READS:
            self._count("dropped_reads", 1)
            log.warning("dropped a read: the sink asks faster than it receives")
            return
        queue.append(read)

    def flush(
        self, may_send: Callable[[SendBlocks], bool], send: SendFrame, *, may_wait: bool
    ) -> None:
        """Sends frames to the waiting sinks in turn, as long as buffers are free.

        `may_send` returns True if the read's lease is open. With `may_wait`, this may wait briefly
        if only one sink is waiting.
        """
        self._lacks_buffer = False
        may_wait = may_wait and len(self._queued) == 1
        for _ in range(MAX_FRAMES_PER_TURN):
            have_sent = False
            for peer, queue in list(self._queued.items()):
                read = queue[0]
                num = len(read.indices)
                if may_send(read):
                    num = self._send(read, send, may_wait=may_wait)
                if num:
                    have_sent = True
                    self._drop_first(peer, num)
            if not have_sent:
                return

    def wait_for_buffer(self, timeout_s: float) -> None:
        """Waits for a free buffer if the last `flush` lacked one."""
        if self._lacks_buffer:
            self._staging.wait(timeout_s)

    def stop(self) -> None:
        """Closes all sealed streams to sinks, and drops the reference to the pool."""
        self.sealed_source.stop()
        self._pool = None

    def _send(self, read: SendBlocks, send: SendFrame, *, may_wait: bool) -> int:
        """Sends the first blocks of a read. Returns the number of sent blocks; 0 if the read must
        wait.
        """
        pool, sealed = self._pool, self.sealed_source
        assert pool is not None, "a source that cannot reach its pool offers no sending"
        if sealed.is_connected(read.peer):
            is_sent = sealed.can_send(read.peer) and sealed.send(read, pool, may_wait=may_wait)
            return len(read.indices) if is_sent else 0
        num = min(num_records(FRAME_BYTES, read.wire), len(read.indices))
        num_bytes = num * read.wire.record_bytes
        buffer = self._staging.take(read.peer, num_bytes)
        if buffer is None:
            self._lacks_buffer = True
            return 0
        payload = buffer[:num_bytes]
        checksum = pack(read.wire, pool, read.block_ids[:num], payload.reshape(num, -1))
        data = Data(read.lease_id, list(read.indices[:num]), checksum)
        tracker = send(read.peer, encode(data), payload.data)
        if tracker is not None:
            self._staging.lend(buffer, read.peer, tracker)
        return num

    def _drop_first(self, peer: Peer, num: int) -> None:
        """Removes the first `num` blocks from a sink's oldest read."""
        queue = self._queued[peer]
        read = queue.popleft()
        if len(read.indices) > num:
            rest = read.indices[num:], read.block_ids[num:]
            queue.appendleft(msgspec.structs.replace(read, indices=rest[0], block_ids=rest[1]))
        if not queue:
            del self._queued[peer]


def _host_bytes(num_bytes: int) -> Blocks:
    return np.empty(num_bytes, np.uint8)
