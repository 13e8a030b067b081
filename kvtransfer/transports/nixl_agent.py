"""NIXL agents with UCX: the library, the descriptors of records, and connections to sources.

UCX is configured through the backend's parameters. Only the log level has no parameter: UCX reads
it from the environment when the library is loaded. So UCX_LOG_LEVEL=error is set during the load.
"""

import ctypes
import importlib
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtransfer.memory import Region
from kvtransfer.messages import NixlOffer
from kvtransfer.records import RecordPiece
from kvtransfer.transports.seam import TransportUnavailable

PACKAGES = ("nixl_cu13", "nixl_cu12")
KINDS = ("DRAM", "VRAM")


def has_rdma() -> bool:
    """True if the host has an RDMA device."""
    devices = Path("/sys/class/infiniband")
    return devices.is_dir() and any(devices.iterdir())


@dataclass(frozen=True, slots=True)
class NixlRecords:
    """Records of equal size without gaps, and the pieces of each record to read.

    The descriptor of a piece of a block has the number piece * num_blocks + block.
    """

    num_blocks: int
    record_bytes: int
    pieces: tuple[RecordPiece, ...]

    def indices(self, blocks: Sequence[int]) -> Sequence[int]:
        """Returns the descriptors of these blocks, block by block. Raises IndexError.

        This code avoids numpy: a dozen numpy calls, with cold caches after each read, took 90 us of
        a read of 1 MiB.
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


def check_offer(offer: NixlOffer, records: NixlRecords, sink_record_bytes: int) -> None:
    """Raises TransportUnavailable if the offered memory is too small for the records."""
    if offer.kind not in KINDS:
        raise TransportUnavailable(f"offered memory is of kind {offer.kind!r}")
    if offer.address < 0 or offer.device_id < 0 or offer.address + offer.num_bytes > 2**64:
        raise TransportUnavailable("offered region has no address")
    if records.num_blocks < 1 or records.num_blocks * records.record_bytes > offer.num_bytes:
        raise TransportUnavailable("offered region is smaller than the source's blocks")
    for piece in records.pieces:
        inside = piece.num_bytes > 0 and piece.source_offset >= 0 and piece.sink_offset >= 0
        fits = piece.source_offset + piece.num_bytes <= records.record_bytes
        if not (inside and fits and piece.sink_offset + piece.num_bytes <= sink_record_bytes):
            raise TransportUnavailable("a piece is not within its record")
    if not records.pieces or records.num_blocks * len(records.pieces) >= 2**31:
        raise TransportUnavailable("NIXL cannot number this many descriptors")


class NixlLink:
    """The pulling agent's connection to a source, with the descriptors of both sides."""

    def __init__(
        self, engine: "NixlAgent", offer: NixlOffer, *, here: NixlRecords, there: NixlRecords
    ) -> None:
        self.nixl = engine.nixl
        self.errors = engine.errors
        self._name: str | None = None
        self._sides: list[Any] = []
        try:
            self._name = self.nixl.add_remote_agent(offer.metadata).decode()
            if self._name != offer.agent:
                raise TransportUnavailable("the offer's metadata are of another agent")
            region = engine.region
            local = here.descriptors(
                region.address, region.device_id, [piece.sink_offset for piece in here.pieces]
            )
            remote = there.descriptors(
                offer.address, offer.device_id, [piece.source_offset for piece in there.pieces]
            )
            self._sides.append(self.nixl.prep_xfer_dlist("NIXL_INIT_AGENT", local, region.kind))
            self._sides.append(self.nixl.prep_xfer_dlist(self._name, remote, offer.kind))
        except TransportUnavailable:
            self.close()
            raise
        except self.errors as error:
            self.close()
            raise TransportUnavailable(f"source cannot be reached: {error}") from error

    def prepare(self, here: Sequence[int], there: Sequence[int]) -> Any:
        """Returns a prepared READ of these descriptors. Posting the READ starts it."""
        local, remote = self._sides
        return self.nixl.make_prepped_xfer("READ", local, here, remote, there)

    def close(self) -> None:
        """Removes the source from the agent."""
        for side in self._sides:
            side.release()
        self._sides.clear()
        if self._name is not None and self.nixl.check_remote_metadata(self._name):
            self.nixl.remove_remote_agent(self._name)
        self._name = None


class NixlAgent:
    """A NIXL agent with UCX, and the region registered with it."""

    def __init__(self, name: str, region: Region, *, delay_us: int | None) -> None:
        """With `delay_us`, the agent has a thread that sleeps for at most this time.

        Raises TransportUnavailable.
        """
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
            raise TransportUnavailable(f"NIXL: {error}") from error

    def close(self) -> None:
        """Destroys the agent and its connections. The handles of its reads must be released
        before.
        """
        self.nixl.deregister_memory(self._registered)
        self.nixl.agent = None  # dropping the last reference closes sockets and queue pairs


def _load() -> Any:
    """Imports the installed NIXL package. Raises TransportUnavailable."""
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
        logging.raiseExceptions = raises  # NIXL's import disables this for the whole process
        # without this level, the logger would write to standard output
        logger = logging.getLogger("nixl")
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.WARNING)
        return module
    raise TransportUnavailable("; ".join(reasons))


def _bind_system_libnl() -> None:
    """Loads the host's own libnl-route, if it has one, before NIXL loads its copy.

    UCX loads the host's libibverbs, which loads the host's libnl-route. If the host's libnl-route
    were loaded after NIXL's copy, it would use the copy's functions. At the end of the process, it
    would then unregister from lists in which it never was. That causes a segmentation fault on
    hosts with RDMA.
    """
    with suppress(OSError):
        ctypes.CDLL("libnl-route-3.so.200", mode=os.RTLD_NOW)


def _errors(api: Any) -> tuple[type[Exception], ...]:
    """Returns the types of exceptions that NIXL raises.

    These are NIXL's own types, which have no common base, and standard types of C++.
    """
    members = vars(api.nixlBind).values()
    own = [m for m in members if isinstance(m, type) and issubclass(m, Exception)]
    return (RuntimeError, ValueError, OverflowError, *own)


def _new_agent(api: Any, name: str, delay_us: int | None) -> Any:
    agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    if delay_us is not None:
        bindings = api.nixlBind
        config = bindings.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = delay_us  # set here, because `nixl_agent_config` always sets 0
        config.useListenThread = False
        config.captureTelemetry = False
        config.syncMode = bindings.NIXL_THREAD_SYNC_NONE  # the locks of UCX suffice
        agent.agent = bindings.nixlAgent(name, config)
    return agent


def _ucx_parameters() -> dict[str, str]:
    """Returns the backend's parameters. UCX's environment variables override `engine_config`."""
    mode = "peer" if has_rdma() else "none"
    return {"ucx_error_handling_mode": mode, "engine_config": "TLS=^tcp"}


_environment = threading.Lock()


@contextmanager
def _quiet_ucx() -> Iterator[None]:
    """Silences UCX, which logs thousands of warnings about abandoned requests."""
    with _environment:
        if "UCX_LOG_LEVEL" in os.environ:
            yield
            return
        os.environ["UCX_LOG_LEVEL"] = "error"
        try:
            yield
        finally:
            del os.environ["UCX_LOG_LEVEL"]
