"""Copies in a GPU's memory with CUDA's driver library, which every machine with an NVIDIA GPU has.

Addresses are integers that are valid in this process, on the device or on the host: CUDA itself
distinguishes the two. Copies are queued on a separate stream, run in parallel to the device's
computation, and finish in order. Only `wait` blocks.

The driver shares the device's primary context with torch, so addresses are the same. The driver's
stream does not wait for torch's stream, and has the highest priority. Copies use the copy engines,
not the multiprocessors. Another process's memory is mapped by CUDA IPC, even on GPUs that
CUDA_VISIBLE_DEVICES hides here. Memory of torch's expandable segments cannot be shared this way.

Source: NVIDIA, CUDA Driver API: streams, events, memory, interprocess communication.
"""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import NamedTuple

import numpy as np

from engine.errors import BatonError
from kvtransfer.memory import Blocks

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
NOT_READY = 600  # CUDA's CUDA_ERROR_NOT_READY
NON_BLOCKING = 1  # CUDA's CU_STREAM_NON_BLOCKING
NO_TIMING = 2  # CUDA's CU_EVENT_DISABLE_TIMING
PORTABLE = 1  # CUDA's CU_MEMHOSTALLOC_PORTABLE
LAZY_PEER_ACCESS = 1  # CUDA's CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class DriverError(BatonError):
    """A device refuses an operation; the message names the operation and the reason."""


class DeviceCopy(NamedTuple):
    """A copy of contiguous bytes from one address to another."""

    to_address: int
    from_address: int
    num_bytes: int


class SharedAddress(NamedTuple):
    """Device memory that another process of this host can map: an offset in an allocation."""

    handle: bytes
    offset: int


class IpcHandle(ctypes.Structure):
    """CUDA's struct CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", c_ubyte * HANDLE_BYTES),)


_SIGNATURES: dict[str, tuple[object, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxGetStreamPriorityRange": (POINTER(c_int), POINTER(c_int)),
    "cuStreamCreateWithPriority": (POINTER(c_void_p), c_uint, c_int),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventSynchronize": (c_void_p,),
    "cuEventDestroy_v2": (c_void_p,),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemGetAddressRange_v2": (POINTER(c_uint64), POINTER(c_size_t), c_uint64),
    "cuIpcGetMemHandle": (POINTER(IpcHandle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
}


class CudaDriver:
    """One GPU of this process, by its number among the visible GPUs."""

    stream: int = 0  # the stream of all copies; set by the first `enter`

    def __init__(self, device_id: int) -> None:
        self._device_id = device_id
        self._library: ctypes.CDLL | None = None
        self._device = c_int()
        self._context = c_void_p()
        self._pinned: list[int] = []
        # from the address that was mapped to the address of its whole allocation
        self._mapped: dict[int, int] = {}
        self._idle_events: list[int] = []

    def enter(self) -> None:
        """Makes the device's context current in this thread. The first call opens the device."""
        if self._library is None:
            self._library = _loaded()
            self._call("cuInit", 0)
            self._call("cuDeviceGet", byref(self._device), self._device_id)
            self._call("cuDevicePrimaryCtxRetain", byref(self._context), self._device)
        self._call("cuCtxSetCurrent", self._context)
        if not self.stream:
            least, greatest, stream = c_int(), c_int(), c_void_p()
            self._call("cuCtxGetStreamPriorityRange", byref(least), byref(greatest))
            self._call("cuStreamCreateWithPriority", byref(stream), NON_BLOCKING, greatest)
            assert stream.value is not None
            self.stream = stream.value

    def copy(self, copies: Sequence[DeviceCopy]) -> None:
        """Queues copies. Their host memory must not change until the copies are done."""
        for each in copies:
            self._call("cuMemcpyAsync", *each, self.stream)

    def mark(self) -> int:
        """Marks the end of all queued copies by an event. Returns the mark for `is_done` and
        `wait`.

        The event is reused after `is_done` has returned True or `wait` has returned.
        """
        event = c_void_p(self._idle_events.pop()) if self._idle_events else c_void_p()
        if event.value is None:
            self._call("cuEventCreate", byref(event), NO_TIMING)
        self._call("cuEventRecord", event, self.stream)
        assert event.value is not None
        return event.value

    def is_done(self, mark: int) -> bool:
        """Returns True if all copies that were queued before the mark have ended."""
        if self._call("cuEventQuery", mark, but=NOT_READY) == NOT_READY:
            return False
        self._idle_events.append(mark)
        return True

    def wait(self, mark: int) -> None:
        """Waits until the copies before the mark are done. Other threads run meanwhile."""
        self._call("cuEventSynchronize", mark)
        self._idle_events.append(mark)

    def pinned(self, num_bytes: int) -> Blocks:
        """Returns page-locked host memory, which lasts until `close`."""
        address = c_void_p()
        self._call("cuMemHostAlloc", byref(address), num_bytes, PORTABLE)
        assert address.value is not None
        self._pinned.append(address.value)
        memory = (c_ubyte * num_bytes).from_address(address.value)
        return np.frombuffer(memoryview(memory), np.uint8)

    def share(self, address: int) -> SharedAddress:
        """Returns a handle of the allocation that contains the address."""
        base, size, handle = c_uint64(), c_size_t(), IpcHandle()
        self._call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
        self._call("cuIpcGetMemHandle", byref(handle), address)
        return SharedAddress(bytes(handle.reserved), address - base.value)

    def map(self, shared: SharedAddress, num_bytes: int) -> int:
        """Maps another process's allocation, which must have `num_bytes` bytes after the offset."""
        if len(shared.handle) != HANDLE_BYTES or shared.offset < 0:
            raise DriverError("the handle of the source's memory is none of CUDA")
        base, size = c_uint64(), c_size_t()
        handle = IpcHandle.from_buffer_copy(shared.handle)
        self._call("cuIpcOpenMemHandle_v2", byref(base), handle, LAZY_PEER_ACCESS)
        try:
            self._call("cuMemGetAddressRange_v2", None, byref(size), base)
            if shared.offset + num_bytes > size.value:
                raise DriverError("the source's memory is smaller than its layout says")
        except DriverError:
            self._call("cuIpcCloseMemHandle", base)
            raise
        address = base.value + shared.offset
        self._mapped[address] = base.value
        return address

    def unmap(self, address: int) -> None:
        """Unmaps the memory. No copy from it may be in flight."""
        self._call("cuIpcCloseMemHandle", self._mapped.pop(address))

    def close(self) -> None:
        """Waits for all copies, and frees all memory except torch's."""
        if self._library is None:
            return
        self._call("cuStreamSynchronize", self.stream)
        for address in list(self._mapped):
            self.unmap(address)
        for event in self._idle_events:
            self._call("cuEventDestroy_v2", event)
        for pinned in self._pinned:
            self._call("cuMemFreeHost", pinned)
        self._call("cuStreamDestroy_v2", self.stream)
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)
        self._idle_events, self._pinned, self._library = [], [], None

    def _call(self, name: str, *arguments: object, but: int = 0) -> int:
        """Calls a driver function. Raises DriverError unless it returns success or the code
        `but`.
        """
        assert self._library is not None, "enter() first"
        status = int(getattr(self._library, name)(*arguments))
        if status not in (0, but):
            text = c_char_p()
            self._library.cuGetErrorString(status, byref(text))
            said = (text.value or b"unknown error").decode()
            raise DriverError(f"{name}: {said} ({status})")
        return status


def _loaded() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(LIBRARY)
        for name, types in _SIGNATURES.items():
            getattr(library, name).argtypes = types
    except (OSError, AttributeError) as error:
        raise DriverError(f"{LIBRARY} cannot be used: {error}") from error
    return library
