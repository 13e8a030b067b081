"""A device whose memory is host memory, and whose copies are late on purpose.

The device makes a copy when the caller waits for it, or polls it for the third time. So code that
continues too early reads or frees memory before the copy has written it.
"""

import ctypes
import secrets
from collections.abc import Sequence

import numpy as np

from engine.layout import KVFormat, KVLayout
from kvtransfer import formats
from kvtransfer.device.blocks import DeviceBlocks, DevicePool
from kvtransfer.device.cuda_driver import DeviceCopy, DriverError, SharedAddress
from kvtransfer.memory import Blocks, PrivatePool, SharedPool

LATE_BY = 3  # a copy is made at the third `is_done` call
_shared: dict[bytes, int] = {}  # shared device memory of this process: handle to address


class LateDriver:
    """A `CudaDriver` that copies on the host, in order, and late."""

    stream = 7

    def __init__(self, *, shares: bool = True, maps: bool = True) -> None:
        self.shares = shares
        self.maps = maps
        self.mapped: set[int] = set()
        self.is_stalled = False  # if true, only `wait` makes copies
        # queued copies, each with the number of the next mark
        self._queued: list[tuple[int, Sequence[DeviceCopy]]] = []
        self._next = 1
        self._asked: dict[int, int] = {}
        self._pinned: list[Blocks] = []

    def enter(self) -> None:
        pass

    def copy(self, copies: Sequence[DeviceCopy]) -> None:
        self._queued.append((self._next, list(copies)))

    def mark(self) -> int:
        self._next += 1
        return self._next - 1

    def is_done(self, mark: int) -> bool:
        self._asked[mark] = self._asked.get(mark, 0) + 1
        if self.is_stalled or self._asked[mark] < LATE_BY:
            return False
        self.wait(mark)
        return True

    def wait(self, mark: int) -> None:
        assert mark < self._next
        while self._queued and self._queued[0][0] <= mark:
            _, copies = self._queued.pop(0)
            for each in copies:
                ctypes.memmove(*each)
        self._asked.pop(mark, None)

    @property
    def num_queued(self) -> int:
        """Returns the number of `copy` calls whose copies are not made yet."""
        return len(self._queued)

    def catch_up(self) -> None:
        """Makes all queued copies, so that host code sees them."""
        self.wait(self.mark())

    def pinned(self, num_bytes: int) -> Blocks:
        self._pinned.append(np.empty(num_bytes, np.uint8))
        return self._pinned[-1]

    def share(self, address: int) -> SharedAddress:
        if not self.shares:
            raise DriverError("share: operation not supported (801)")
        handle = secrets.token_bytes(64)
        _shared[handle] = address - 128
        return SharedAddress(handle, 128)

    def map(self, shared: SharedAddress, num_bytes: int) -> int:
        if not self.maps or shared.handle not in _shared:
            raise DriverError("map: invalid resource handle (400)")
        address = _shared[shared.handle] + shared.offset
        self.mapped.add(address)
        return address

    def unmap(self, address: int) -> None:
        assert not self._queued, "copies from mapped memory are under way"
        self.mapped.remove(address)

    def close(self) -> None:
        self.catch_up()
        self.mapped.clear()


class HostConverter:
    """A `RecordConverter` that converts on the host, after it has made the queued copies."""

    def __init__(self, driver: LateDriver) -> None:
        self._driver = driver
        self._room = np.empty(0, np.uint8)
        self._results: list[Blocks] = []

    def room(self, num_bytes: int, stream: int) -> int:
        assert stream == self._driver.stream
        if self._room.nbytes < num_bytes:
            self._driver.catch_up()
            self._room = np.empty(num_bytes, np.uint8)
        return self._room.ctypes.data

    def convert(
        self, address: int, num_records: int, layout: KVLayout, to: KVFormat, stream: int
    ) -> int:
        assert stream == self._driver.stream
        self._driver.catch_up()
        memory = (ctypes.c_ubyte * (num_records * layout.block_bytes)).from_address(address)
        records = np.frombuffer(memory, np.uint8).reshape(num_records, layout.block_bytes)
        made = formats.convert(records, layout, to)
        self._results = [*self._results[-1:], made]
        return made.ctypes.data


def on_device(pool: PrivatePool | SharedPool, driver: LateDriver | None = None) -> DevicePool:
    """Returns a pool in device memory that shares the memory of this host pool."""
    driver = driver or LateDriver()
    blocks = DeviceBlocks(
        *(pool.region().address, pool.num_blocks, pool.block_bytes),
        driver=driver,
        converter=HostConverter(driver),
    )
    return DevicePool(blocks, device_id=0)
