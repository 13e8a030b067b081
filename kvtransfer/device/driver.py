"""The operations of a device that transfers need.

Addresses are numbers in this process, of the device or of the host: a CUDA device tells them apart
by itself. Copies are queued on a stream of their own, beside what the device computes, and end in
their order. Nothing waits but `wait`.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from engine.errors import BatonError
from kvtransfer.memory import Blocks


class DriverError(BatonError):
    """A device refuses an operation; the message says which and why."""


class DeviceCopy(NamedTuple):
    """Bytes to copy."""

    to_address: int
    from_address: int
    num_bytes: int


class SharedAddress(NamedTuple):
    """Device memory for another process of this host: an allocation and a place in it."""

    handle: bytes
    offset: int


class CopyDriver(Protocol):
    """One device. Used by one thread at a time, which calls `enter` first."""

    stream: int  # on which copies are queued; others may queue work between them

    def enter(self) -> None:
        """Prepares the calling thread. Raises DriverError."""
        ...

    def copy(self, copies: Sequence[DeviceCopy]) -> None:
        """Queues copies. Host memory must stay as it is until they are done."""
        ...

    def mark(self) -> int:
        """Returns a mark behind everything that is queued. It is dropped once it is done."""
        ...

    def is_done(self, mark: int) -> bool:
        """True if everything before the mark has ended. Raises DriverError if it failed."""
        ...

    def wait(self, mark: int) -> None:
        """Returns when everything before the mark has ended. Raises DriverError if it failed."""
        ...

    def pinned(self, num_bytes: int) -> Blocks:
        """Returns host memory that copies reach directly. It lasts until `close`."""
        ...

    def share(self, address: int) -> SharedAddress:
        """Returns what another process needs to map this address. Raises DriverError."""
        ...

    def map(self, shared: SharedAddress, num_bytes: int) -> int:
        """Returns the address of another process's memory. Raises DriverError."""
        ...

    def unmap(self, address: int) -> None:
        """Lets go of mapped memory. No copy from it is under way."""
        ...

    def close(self) -> None:
        """Waits for all copies, and frees everything."""
        ...
