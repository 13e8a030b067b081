"""How a sink brings blocks of one source here: the seam between the protocol and its backends.

Two backends stand behind the contract test: `ShmReader` copies from the source's mapped memory, and
`ZmqReader` asks the source to send. NIXL is to be a third: it needs the same block ids.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

import xxhash

from engine.messages import LeaseId
from kvtransfer.memory import Blocks
from kvtransfer.messages import Read
from kvtransfer.protocol import Copy


class Transport(StrEnum):
    """Which backends a deployment allows; AUTO takes shared memory where it can be mapped."""

    AUTO = "auto"
    SHM = "shm"
    ZMQ = "zmq"


class Reader(Protocol):
    """Fetches blocks of one source into the local pool."""

    name: str

    def fetch(self, lease_id: LeaseId, copies: Sequence[Copy]) -> tuple[int, ...]:
        """Begins to fetch; returns the indices of the blocks that are in place already."""
        ...


class ShmReader:
    """Copies from the source's pool, one memcpy a block, before `fetch` returns."""

    name = "shm"

    def __init__(self, source: Blocks, local: Blocks) -> None:
        self._source = source
        self._local = local

    def fetch(self, lease_id: LeaseId, copies: Sequence[Copy]) -> tuple[int, ...]:
        """All blocks are in place afterwards."""
        for copy in copies:
            self._local[copy.block_id] = self._source[copy.source_block]
        return tuple(copy.index for copy in copies)


class ZmqReader:
    """Asks for the blocks; their Data arrives at the endpoint later."""

    name = "zmq"

    def __init__(self, send: Callable[[Read], None]) -> None:
        self._send = send

    def fetch(self, lease_id: LeaseId, copies: Sequence[Copy]) -> tuple[int, ...]:
        """No block is in place yet."""
        self._send(Read(lease_id, [copy.index for copy in copies]))
        return ()


def checksum(block: Blocks) -> int:
    """The xxh3-64 of a block's bytes."""
    return xxhash.xxh3_64_intdigest(block.data)
