"""Reads blocks from a source's registered memory with NIXL: READ over UCX.

An endpoint has a `NixlAgent`, and a `NixlReader` for each source that it reads from. A `NixlAgent`
consists of two NIXL agents:

    serving    other endpoints read from it. UCX works on its thread, which sleeps until needed
    pulling    reads for this endpoint. It has no thread, so UCX works, and over cma and tcp also
               writes, only inside `fetch` and `poll`

Findings with nixl 1.5.1 on a 2-core host, with its UCX backend and the UCX that it includes:

* A source whose agent makes no progress stalls its sinks, over cma too: connections and flushes
  need an answer. NIXL's progress thread takes a whole core, because its Python API lets it poll
  without delay. With a delay it sleeps on UCX's events: an idle agent takes under 1 % of a core,
  and a block comes in 14 to 40 us, as from a source that polls. Hence `serving`.
* READ of scattered blocks over cma, GiB/s in reads of 64 blocks: 2.4 (16 KiB), 3.1 (64 KiB), 3.8
  (1 MiB); with all 64 MiB in one read 2.7, 3.5, 3.8. Such a read is over when `fetch` returns.
  Over tcp 1.0 to 1.5, less than ZeroMQ. RNDV_THRESH has no part in it: NIXL sets it to inf.
* tcp is excluded. UCX emulates READ there with messages of the source. A sink that is killed in
  the middle aborts the SOURCE's process ("ucp_request.inl: unexpected error"), with any error
  handling. Over cma, and in shared memory without it, a source outlived every sink. So without
  RDMA a source on another host is unreachable, and `connect` says so. UCX_TLS in the environment
  overrides this.
* Error handling `peer` needs tcp or RDMA underneath. Without RDMA the mode is `none`. Then a
  connection costs less (14 us a block, not 35). A killed source is noticed at the next read, within
  milliseconds. A stopped source can still be read.
* Releasing a READ in flight cancels nothing: over tcp, 58 of 64 MiB were written after it was
  released and its source removed. Writing ends only when the read is DONE, or when the agent is
  destroyed with its sockets and queue pairs. So if a read fails, or is cancelled and does not end
  within `CANCEL_GRACE_S`, the pulling agent is made anew. That takes 20 ms and a new registration
  of the region, and all reads in flight fail, those from other sources too.
* Descriptors by stride are as fast as a list of all blocks, and have no size. A `NixlReader` moves
  0.96 to 0.99 of what bare NIXL does with the same descriptors.
* NIXL refuses damaged metadata with an error. Metadata are still taken only from authenticated
  sources.
* Closing frees threads, files and memory. A forked child must not use an agent (UCX); a spawned
  process may.

Not measured: RDMA and GPU memory. The region is registered once for each of the two agents; with
RDMA the pool should be in huge pages.

UCX is configured through the backend's parameters. Only its log level has none: UCX reads it from
the environment when the library is loaded, so UCX_LOG_LEVEL=error is set for that moment.

Sources: NIXL, src/plugins/ucx/ucx_backend.cpp (`release`, `nixlUcxSharedThread`) and ucx_utils.cpp.
"""

import ctypes
import importlib
import logging
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.clock import Clock, MonotonicClock
from engine.errors import BatonError
from kvtransfer.memory import Region
from kvtransfer.messages import NixlOffer
from kvtransfer.records import RecordPiece

log = logging.getLogger(__name__)

PACKAGES = ("nixl_cu13", "nixl_cu12")
KINDS = ("DRAM", "VRAM")
PROGRESS_DELAY_US = 10_000  # in case UCX forgets to wake the serving thread
CANCEL_GRACE_S = 0.5
MAX_NOTIFICATIONS = 256  # of one call to `progress`
READ_ID_BYTES = 8


class NixlUnavailable(BatonError):
    """NIXL cannot be used here, or not with that source; the message says why."""


def has_rdma() -> bool:
    """True if the host has an RDMA device."""
    devices = Path("/sys/class/infiniband")
    return devices.is_dir() and any(devices.iterdir())


class NixlAgent:
    """An endpoint's memory as NIXL knows it; all but the constructor on one thread at a time."""

    def __init__(
        self,
        name: str,
        region: Region,
        *,
        record_bytes: int,
        clock: Clock | None = None,
    ) -> None:
        """`name` must be unique, also among earlier agents: include the process in it."""
        assert region.num_bytes % record_bytes == 0
        self.record_bytes = record_bytes
        self.num_blocks = region.num_bytes // record_bytes
        self.clock = clock or MonotonicClock()
        self.num_restarts = 0
        self._name = name
        self._region = region
        self._serving: _Engine | None = None
        self._pulling: _Engine | None = None
        self._readers: list[NixlReader] = []
        self._notifications: deque[bytes] = deque()

    def open(self) -> None:
        """Creates both agents and registers the region. Raises NixlUnavailable."""
        try:
            self._serving = _Engine(self._name, self._region, delay_us=PROGRESS_DELAY_US)
            self._open_pulling()
        except NixlUnavailable:
            self.close()
            raise

    def offer(self) -> NixlOffer:
        """Returns what a sink needs to read the region."""
        assert self._serving is not None, "open() first"
        metadata = bytes(self._serving.nixl.get_agent_metadata())
        region = self._region
        return NixlOffer(
            self._name, metadata, region.address, region.num_bytes, region.kind, region.device_id
        )

    def connect(
        self,
        offer: NixlOffer,
        num_blocks: int,
        *,
        record_bytes: int,
        pieces: Sequence[RecordPiece] | None = None,
    ) -> "NixlReader":
        """Prepares to read a source with `num_blocks` records of `record_bytes` each.

        Reads `pieces` of each record, or all of it without them. Raises NixlUnavailable if the
        offer is too small or the source cannot be reached.
        """
        whole = (RecordPiece(0, 0, record_bytes),)
        records = _Records(num_blocks, record_bytes, whole if pieces is None else tuple(pieces))
        _check(offer, records, self.record_bytes)
        if any(reader.agent == offer.agent for reader in self._readers):
            raise NixlUnavailable(f"agent {offer.agent} is connected already")
        reader = NixlReader(self, offer, records)
        reader.connect()
        self._readers.append(reader)
        return reader

    def progress(self) -> list[bytes]:
        """Returns notifications of finished reads, at most `MAX_NOTIFICATIONS` at a time."""
        assert self._serving is not None, "open() first"
        for notifications in self._serving.nixl.get_new_notifs().values():
            self._notifications.extend(notifications)
        num = min(len(self._notifications), MAX_NOTIFICATIONS)
        return [self._notifications.popleft() for _ in range(num)]

    def close(self) -> None:
        """Ends all reads and lets go of the region. Nothing writes to it any more."""
        self._close_pulling("endpoint closed")
        self._readers.clear()
        if self._serving is not None:
            self._serving.close()
            self._serving = None

    # ------------------------------------------------------------ for its readers

    @property
    def pulling(self) -> "_Engine":
        """The agent that reads. Raises NixlUnavailable if it cannot be made anew."""
        if self._pulling is None:
            self._open_pulling()
        assert self._pulling is not None
        return self._pulling

    def restart(self, reason: str) -> None:
        """Fails all reads in flight, and ensures that none of them writes any more."""
        log.warning("restarting reads over NIXL: %s", reason)
        self.num_restarts += 1
        self._close_pulling(reason)

    def remove(self, reader: "NixlReader") -> None:
        """Drops a closed reader."""
        if reader in self._readers:
            self._readers.remove(reader)

    def _open_pulling(self) -> None:
        # Another name each time: a source must not take the new agent for the old one.
        name = f"{self._name}.pull{self.num_restarts}"
        self._pulling = _Engine(name, self._region, delay_us=None)

    def _close_pulling(self, reason: str) -> None:
        for reader in self._readers:
            reader.disconnect()
        if self._pulling is not None:
            self._pulling.close()
            self._pulling = None
        for reader in self._readers:
            reader.fail_all(reason)


@dataclass(slots=True)
class _Read:
    handle: Any  # None once it is released; then the engine is destroyed too
    cancelled_s: float | None = None


class NixlReader:
    """Reads blocks of one source; made by `NixlAgent.connect`."""

    name = "nixl"

    def __init__(self, owner: NixlAgent, offer: NixlOffer, records: "_Records") -> None:
        self.agent = offer.agent
        self._owner = owner
        self._offer = offer
        self._there = records
        self._here = _Records(owner.num_blocks, owner.record_bytes, records.pieces)
        self._link: _Link | None = None
        self._reads: dict[int, _Read] = {}
        self._ended: list[tuple[int, str | None]] = []

    @property
    def num_outstanding(self) -> int:
        """The number of reads whose end `poll` has not reported."""
        return len(self._reads) + len(self._ended)

    def fetch(self, read_id: int, source_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """Begins to read each of `source_blocks` into the same place of `blocks`.

        At the end the source is notified of `read_id` (8 bytes, little endian). Raises IndexError,
        before anything is read, for a block that is not in its pool. `poll` reports a read that
        could not begin as failed.
        """
        assert len(source_blocks) == len(blocks) > 0
        assert read_id not in self._reads
        there = self._there.indices(source_blocks)
        here = self._here.indices(blocks)
        try:
            link = self._link or self.connect()
        except NixlUnavailable as error:
            self._ended.append((read_id, str(error)))
            return
        read = self._reads[read_id] = _Read(None)
        message = read_id.to_bytes(READ_ID_BYTES, "little")
        try:
            read.handle = link.prepare(here, there)
            state = link.nixl.transfer(read.handle, message)
            if state == "ERR":
                self._owner.restart("a read failed")
            elif state == "DONE":
                self._end(read_id, read)
        except link.errors as error:
            self._owner.restart(f"a read failed: {error}")  # part of it may be on its way

    def poll(self) -> list[tuple[int, str | None]]:
        """Returns ended reads, each with the reason if it failed. They write no more."""
        failure = None
        for read_id, read in list(self._reads.items()):
            failure = self._advance(read_id, read) or failure
        if failure is not None:
            self._owner.restart(failure)
        ended, self._ended = self._ended, []
        return ended

    def cancel(self, read_id: int) -> None:
        """Asks a read to stop. `poll` reports it once it can write no more."""
        read = self._reads.get(read_id)
        if read is not None and read.cancelled_s is None:
            read.cancelled_s = self._owner.clock.now_s()

    def close(self) -> None:
        """Lets go of the source. Reads under way fail."""
        if self._reads:
            self._owner.restart("a reader was closed while it read")
        self.disconnect()
        self._owner.remove(self)

    def _advance(self, read_id: int, read: _Read) -> str | None:
        """Checks one read. Returns why the pulling agent must be made anew, or None."""
        assert self._link is not None
        try:
            state = self._link.nixl.check_xfer_state(read.handle)
        except self._link.errors as error:
            return f"a read failed: {error}"
        if state == "ERR":
            return "a read failed"
        if state == "DONE":
            self._end(read_id, read)
        elif read.cancelled_s is not None and self._is_overdue(read.cancelled_s):
            return "a cancelled read does not end"
        return None

    def _end(self, read_id: int, read: _Read) -> None:
        read.handle.release()
        del self._reads[read_id]
        self._ended.append((read_id, None if read.cancelled_s is None else "cancelled"))

    def _is_overdue(self, cancelled_s: float) -> bool:
        return self._owner.clock.now_s() - cancelled_s >= CANCEL_GRACE_S

    # ------------------------------------------------------------ for its agent

    def connect(self) -> "_Link":
        """Makes the source known to the pulling agent. Raises NixlUnavailable."""
        self._link = _Link(self._owner.pulling, self._offer, here=self._here, there=self._there)
        return self._link

    def disconnect(self) -> None:
        """Releases all handles of the pulling agent. Reads in flight end with that agent."""
        for read in self._reads.values():
            if read.handle is not None:
                read.handle.release()
                read.handle = None
        if self._link is not None:
            self._link.close()
            self._link = None

    def fail_all(self, reason: str) -> None:
        """Reports all reads as failed, after the pulling agent was destroyed."""
        self._ended += [(read_id, reason) for read_id in self._reads]
        self._reads.clear()


# ---------------------------------------------------------------- descriptors


@dataclass(frozen=True, slots=True)
class _Records:
    """Equal records without gaps, and the pieces of each that are read.

    Descriptors are numbered by piece, then by block: piece * num_blocks + block.
    """

    num_blocks: int
    record_bytes: int
    pieces: tuple[RecordPiece, ...]

    def indices(self, blocks: Sequence[int]) -> Sequence[int]:
        """Descriptors of these blocks, block by block. Raises IndexError.

        It avoids numpy: its dozen calls, cold after each read, took 90 us of a read of 1 MiB.
        """
        if min(blocks) < 0 or max(blocks) >= self.num_blocks:
            raise IndexError(f"a block is not among the {self.num_blocks} of its pool")
        if len(self.pieces) == 1:
            return blocks
        firsts = range(0, len(self.pieces) * self.num_blocks, self.num_blocks)
        return [first + block for block in blocks for first in firsts]

    def descriptors(
        self, address: int, device_id: int, offsets: Sequence[int]
    ) -> npt.NDArray[np.uint64]:
        """Returns [pieces, 5]: address, bytes, device, stride, count, as NIXL's strided lists.

        NIXL merges whole records that are adjacent on both sides.
        """
        rows = [
            (address + offset, piece.num_bytes, device_id, self.record_bytes, self.num_blocks)
            for piece, offset in zip(self.pieces, offsets, strict=True)
        ]
        return np.array(rows, dtype=np.uint64)


def _check(offer: NixlOffer, records: _Records, sink_record_bytes: int) -> None:
    """Raises NixlUnavailable if the records do not fit into the offer."""
    if offer.kind not in KINDS:
        raise NixlUnavailable(f"offered memory is of kind {offer.kind!r}")
    if offer.address < 0 or offer.device_id < 0 or offer.address + offer.num_bytes > 2**64:
        raise NixlUnavailable("offered region has no address")
    if records.num_blocks < 1 or records.num_blocks * records.record_bytes > offer.num_bytes:
        raise NixlUnavailable("offered region is smaller than the source's blocks")
    for piece in records.pieces:
        inside = piece.num_bytes > 0 and piece.source_offset >= 0 and piece.sink_offset >= 0
        fits = piece.source_offset + piece.num_bytes <= records.record_bytes
        if not (inside and fits and piece.sink_offset + piece.num_bytes <= sink_record_bytes):
            raise NixlUnavailable("a piece is not within its record")
    if not records.pieces or records.num_blocks * len(records.pieces) >= 2**31:
        raise NixlUnavailable("NIXL cannot number so many descriptors")


class _Link:
    """A source as the pulling agent knows it: its connection and both sides' descriptors."""

    def __init__(
        self, engine: "_Engine", offer: NixlOffer, *, here: _Records, there: _Records
    ) -> None:
        self.nixl = engine.nixl
        self.errors = engine.errors
        self._name: str | None = None
        self._sides: list[Any] = []
        try:
            self._name = self.nixl.add_remote_agent(offer.metadata).decode()
            if self._name != offer.agent:
                raise NixlUnavailable("the offer's metadata are of another agent")
            region = engine.region
            local = here.descriptors(
                region.address, region.device_id, [piece.sink_offset for piece in here.pieces]
            )
            remote = there.descriptors(
                offer.address, offer.device_id, [piece.source_offset for piece in there.pieces]
            )
            self._sides.append(self.nixl.prep_xfer_dlist("NIXL_INIT_AGENT", local, region.kind))
            self._sides.append(self.nixl.prep_xfer_dlist(self._name, remote, offer.kind))
        except NixlUnavailable:
            self.close()
            raise
        except self.errors as error:
            self.close()
            raise NixlUnavailable(f"source cannot be reached: {error}") from error

    def prepare(self, here: Sequence[int], there: Sequence[int]) -> Any:
        """Returns a READ of these descriptors, ready to be posted."""
        local, remote = self._sides
        return self.nixl.make_prepped_xfer("READ", local, here, remote, there)

    def close(self) -> None:
        """Forgets the source."""
        for side in self._sides:
            side.release()
        self._sides.clear()
        if self._name is not None and self.nixl.check_remote_metadata(self._name):
            self.nixl.remove_remote_agent(self._name)
        self._name = None


# ---------------------------------------------------------------- NIXL


class _Engine:
    """A NIXL agent with UCX, and the region registered with it."""

    def __init__(self, name: str, region: Region, *, delay_us: int | None) -> None:
        """With `delay_us`, its longest sleep, it has a thread. Raises NixlUnavailable."""
        self.region = region
        api = _load()
        self.errors = _errors(api)
        try:
            with _quiet_ucx():
                self.nixl = _new_agent(api, name, delay_us)
                self.nixl.create_backend("UCX", _ucx_parameters())
            rows = [(region.address, region.num_bytes, region.device_id, "")]
            self._registered = self.nixl.register_memory(rows, region.kind)
        except self.errors as error:
            raise NixlUnavailable(f"NIXL: {error}") from error

    def close(self) -> None:
        """Destroys the agent and its connections. Its handles must be released before."""
        self.nixl.deregister_memory(self._registered)
        self.nixl.agent = None  # the last reference: the destructor closes sockets and queue pairs


def _load() -> Any:
    """Imports the installed NIXL package. Raises NixlUnavailable."""
    _bind_system_libnl()
    reasons = []
    raises = logging.raiseExceptions
    for package in PACKAGES:
        try:
            with _quiet_ucx():
                module = importlib.import_module(f"{package}._api")
        except ImportError as error:
            reasons.append(f"{package}: {error}")
            continue
        logging.raiseExceptions = raises  # the import switches it off for the whole process
        logger = logging.getLogger("nixl")  # it writes to standard output
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.WARNING)
        return module
    raise NixlUnavailable("; ".join(reasons))


def _bind_system_libnl() -> None:
    """Loads the host's own libnl-route, if it has one, before NIXL loads its copy.

    UCX loads the host's libibverbs, and with it this library. If it came after the copy, it would
    use the copy's functions. At the end of the process it would then unregister from lists that it
    was never in: a segmentation fault on hosts with RDMA.
    """
    with suppress(OSError):
        ctypes.CDLL("libnl-route-3.so.200", mode=os.RTLD_NOW)


def _errors(api: Any) -> tuple[type[Exception], ...]:
    """Returns the types that NIXL raises: its own (they share no base) and C++'s standard ones."""
    members = vars(api.nixlBind).values()
    own = [m for m in members if isinstance(m, type) and issubclass(m, Exception)]
    return (RuntimeError, ValueError, OverflowError, *own)


def _new_agent(api: Any, name: str, delay_us: int | None) -> Any:
    agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    if delay_us is not None:
        bindings = api.nixlBind
        config = bindings.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = delay_us  # `nixl_agent_config` always sets 0
        config.useListenThread = False
        config.captureTelemetry = False
        config.syncMode = bindings.NIXL_THREAD_SYNC_NONE  # UCX's own locks suffice
        agent.agent = bindings.nixlAgent(name, config)
    return agent


def _ucx_parameters() -> dict[str, str]:
    """Returns the backend's parameters. UCX's environment variables override `engine_config`."""
    mode = "peer" if has_rdma() else "none"
    return {"ucx_error_handling_mode": mode, "engine_config": "TLS=^tcp"}


_environment = threading.Lock()


@contextmanager
def _quiet_ucx() -> Iterator[None]:
    """Silences UCX, which warns of each abandoned request, thousands at a time."""
    with _environment:
        if "UCX_LOG_LEVEL" in os.environ:
            yield
            return
        os.environ["UCX_LOG_LEVEL"] = "error"
        try:
            yield
        finally:
            del os.environ["UCX_LOG_LEVEL"]
