"""Measures this machine's limits for copying scattered blocks: memcpy and raw TCP.

    python -m bench.lab.kv.limits memcpy | tcp

`bench.lab.kv.contest` drives this process.

memcpy: one process and one thread, with one memcpy a block between two anonymous mappings. The
mappings use huge pages if the system allows. There are two ways: a loop in C, and one in Python
over ctypes.

tcp: two processes on loopback. The sink sends a request of eight bytes, and the source answers with
the blocks only. A way is a size of a system call. Both processes use as few calls with scattered
buffers (`sendmsg`, `recvmsg_into`) as this size allows. The time begins when the sink sends its
request.
"""

import ctypes
import queue
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.lab.kv.cases import KIB, MIB
from bench.peers.driver import drive, stdout_for_answers
from bench.peers.kv_memory import PoolMemory, TransferEnd, fill
from engine.clock import MonotonicClock

SOURCE_SEED = 2
COMPILERS = ("cc", "gcc", "clang")
COPY_LOOP = """
#include <stddef.h>
#include <string.h>
void copy_blocks(const size_t *sinks, const size_t *sources, size_t num_blocks, size_t num_bytes) {
  for (size_t i = 0; i < num_blocks; ++i)
    memcpy((void *)sinks[i], (const void *)sources[i], num_bytes);
}
"""
CALL_BYTES = {"256KiB": 256 * KIB, "1MiB": MIB, "4MiB": 4 * MIB}
MAX_BUFFERS = 512  # buffers in one call; Linux accepts 1,024

_clock = MonotonicClock()

Addresses = npt.NDArray[np.uint64]
Views = list[memoryview]
# arguments: destination, source, bytes of each block
Copy = Callable[[Addresses, Addresses, int], None]


class Memcpy(TransferEnd):
    """Source and sink in one process, copied by memcpy."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[str, Copy] = {"ctypes": _copy_by_ctypes}
        in_c = compiled_copy()
        if in_c is not None:
            self._copies = {"c": in_c, **self._copies}
        self._memory: dict[str, PoolMemory] = {}
        self.facts: dict[str, object] = {"version": "", "ways": list(self._copies)}

    def open_source(self, pool_bytes: int, block_sizes: list[int]) -> dict[str, object]:
        """Makes a mapping and fills it with random bytes."""
        self._memory["source"] = PoolMemory(pool_bytes)
        fill(self._memory["source"].array, SOURCE_SEED)
        return {"source": None}

    def open_sink(self, pool_bytes: int, block_sizes: list[int], source: None) -> dict[str, object]:
        """Makes a mapping and writes to all its pages."""
        self._memory["sink"] = PoolMemory(pool_bytes)
        return {}

    def pull(
        self, block_bytes: int, pulls: list[list[list[int]]], offers: list[None], way: str
    ) -> dict[str, object]:
        """Copies the blocks of each pull. Addresses are computed before the clock starts."""
        copy = self._copies[way]
        seconds = []
        for source_blocks, blocks in pulls:
            sources = self._addresses("source", block_bytes, source_blocks)
            sinks = self._addresses("sink", block_bytes, blocks)
            begin_s = _clock.now_s()
            copy(sinks, sources, block_bytes)
            seconds.append(_clock.now_s() - begin_s)
        return {"seconds": seconds}

    def rows(self, end: str, block_bytes: int) -> Any:
        """Returns the blocks of the source or of the sink."""
        return self._memory[end].blocks(block_bytes)

    def _addresses(self, end: str, block_bytes: int, blocks: Sequence[int]) -> Addresses:
        offsets = np.array(blocks, np.uint64) * np.uint64(block_bytes)
        addresses: Addresses = offsets + np.uint64(self._memory[end].address)
        return addresses


def compiled_copy() -> Copy | None:
    """Returns the copy loop in C; None if no compiler works."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        path = Path(folder) / "copy.so"
        command = [compiler, "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
        if subprocess.run(command, input=COPY_LOOP, text=True, check=False).returncode:
            return None
        # The library stays mapped after its file is deleted.
        function = ctypes.CDLL(str(path)).copy_blocks
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    function.restype = None

    def copy(sinks: Addresses, sources: Addresses, num_bytes: int) -> None:
        function(sinks.ctypes.data, sources.ctypes.data, len(sinks), num_bytes)

    return copy


def _copy_by_ctypes(sinks: Addresses, sources: Addresses, num_bytes: int) -> None:
    memmove = ctypes.memmove
    for sink, source in zip(sinks.tolist(), sources.tolist(), strict=True):
        memmove(sink, source, num_bytes)


class RawTcp(TransferEnd):
    """One end of raw TCP. A source sends the blocks of the last offer; a sink requests them."""

    def __init__(self) -> None:
        super().__init__()
        self._offered: queue.SimpleQueue[list[Views]] = queue.SimpleQueue()
        self._connection: socket.socket | None = None
        self.facts: dict[str, object] = {"version": "", "ways": list(CALL_BYTES)}

    def open_source(self, pool_bytes: int, block_sizes: list[int]) -> dict[str, object]:
        """Listens, and starts a thread that serves connections."""
        self.memory = PoolMemory(pool_bytes)
        fill(self.memory.array, SOURCE_SEED)
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, args=(listener,), daemon=True).start()
        return {"source": listener.getsockname()[1]}

    def open_sink(self, pool_bytes: int, block_sizes: list[int], source: int) -> dict[str, object]:
        """Connects to the source."""
        self.memory = PoolMemory(pool_bytes)
        self._connection = socket.create_connection(("127.0.0.1", source))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return {}

    def offer(self, block_bytes: int, pulls: list[list[int]], way: str) -> dict[str, object]:
        """Prepares the answers to the sink's next requests."""
        for blocks in pulls:
            self._offered.put(self._calls(block_bytes, blocks, way))
        return {"offers": [None] * len(pulls)}

    def pull(
        self, block_bytes: int, pulls: list[list[list[int]]], offers: list[None], way: str
    ) -> dict[str, object]:
        """Carries out the pulls one after the other: sends a request and receives the blocks."""
        connection = self._connection
        assert connection is not None
        seconds = []
        for _, blocks in pulls:
            calls = self._calls(block_bytes, blocks, way)
            begin_s = _clock.now_s()
            connection.sendall(struct.pack("<Q", len(blocks)))
            for views in calls:
                _receive(connection, views)
            seconds.append(_clock.now_s() - begin_s)
        return {"seconds": seconds}

    def _calls(self, block_bytes: int, blocks: Sequence[int], way: str) -> list[Views]:
        rows = self.memory.blocks(block_bytes)
        return [*calls_of([memoryview(rows[block]) for block in blocks], CALL_BYTES[way])]

    def _serve(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(ConnectionError), connection:
            while connection.recv(8, socket.MSG_WAITALL):
                for views in self._offered.get():
                    _send(connection, views)


def calls_of(views: Views, num_bytes: int) -> Iterator[Views]:
    """Groups buffers into system calls of at most `num_bytes` each. Larger buffers are cut."""
    size = min(num_bytes, len(views[0]))
    pieces = [view[i : i + size] for view in views for i in range(0, len(view), size)]
    per_call = min(MAX_BUFFERS, num_bytes // size)
    for first in range(0, len(pieces), per_call):
        yield pieces[first : first + per_call]


def _send(connection: socket.socket, views: Views) -> None:
    while views:
        views = unfinished(views, connection.sendmsg(views))


def _receive(connection: socket.socket, views: Views) -> None:
    while views:
        num_bytes = connection.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
        if not num_bytes:
            raise ConnectionError("the source closed the connection")
        views = unfinished(views, num_bytes)


def unfinished(views: Views, num_bytes: int) -> Views:
    """Returns what remains of these buffers after their first `num_bytes`."""
    for i, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[i + 1 :]]
        num_bytes -= len(view)
    return []


MOVERS: dict[str, Callable[[], Any]] = {"memcpy": Memcpy, "tcp": RawTcp}


def main() -> None:
    """Answers commands until standard input is closed."""
    out = stdout_for_answers()
    drive(MOVERS[sys.argv[1]], sys.stdin, out)


if __name__ == "__main__":
    main()
