"""The keeper of a store: owns the store's memory, and starts and restarts the store's process.

The launcher watches the keeper like any service. The memory consists of two memfds, whose
descriptors the store's process gets. If that process dies, the next process recovers the blocks
from the memfds, and listens on the same ports. If the keeper dies, the store's process ends and the
memory is freed.
"""

import asyncio
import logging
import os
import socket
import subprocess

import msgspec

from deploy.base.slab import table_bytes
from deploy.base.spec import READY_TIMEOUT_S, StoreReady, StoreSpec
from deploy.base.thread import LoopService
from engine.clock import MonotonicClock
from engine.errors import ConfigError
from engine.socket_child import start_with_socket
from kvtransfer.memory import SharedMemory

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1  # pause before the first restart of the process
MAX_PAUSE_S = 5.0
STEADY_S = 60.0  # after a run of this length, the pause is FIRST_PAUSE_S again
MAX_FAILED_STARTS = 20  # failures in a row; then the keeper ends, and its launcher restarts it
STOP_TIMEOUT_S = 10.0
MAX_MESSAGE_BYTES = 2**20
STOP_WORD = b"stop"


class StoreOrder(msgspec.Struct, frozen=True):
    """The parameters of the store process's start.

    The message carries the descriptors of slab and table.
    """

    spec: StoreSpec
    log_node: str
    port: int
    control_port: int
    num_starts: int


class StoreAnswer(msgspec.Struct, frozen=True):
    """The store process's answer to `StoreOrder`, sent once the process listens."""

    address: str = ""
    control: str = ""
    pid: int = 0
    error: str = ""


class StoreService(LoopService[StoreReady]):
    """Runs a store from `open` to `close`, over any number of restarts of the store's process."""

    def __init__(self, spec: StoreSpec, log_node: str = "") -> None:
        """`log_node` is the node's name in the path of the log folder."""
        self._spec = spec
        self._log_node = log_node
        self._clock = MonotonicClock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._ports = (0, 0)
        self._num_starts = 0
        self._watching: asyncio.Task[None] | None = None

    async def open(self) -> StoreReady:
        """Allocates the memory, then starts the process. Raises ConfigError, OSError."""
        num_bytes = self._spec.config.memory_mib * 2**20
        self._slab = SharedMemory.make(num_bytes)
        self._table = SharedMemory.make(table_bytes(num_bytes))
        started = await self._start()
        self._ports = _port_of(started.address), _port_of(started.control)
        self._watching = asyncio.create_task(self._watch())
        return StoreReady(
            address=started.address,
            control=started.control,
            pid=os.getpid(),
            version=self._spec.version,
            node=self._spec.node,
        )

    async def close(self) -> None:
        """Ends the process and frees the memory."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await asyncio.to_thread(self._end)
        self._slab.close()
        self._table.close()

    async def _start(self) -> StoreAnswer:
        """Starts the process and waits until the process listens. Raises ConfigError."""
        self._num_starts += 1
        port, control_port = self._ports
        start = StoreOrder(self._spec, self._log_node, port, control_port, self._num_starts)
        started = await asyncio.to_thread(self._spawn, msgspec.json.encode(start))
        if started.error:
            raise ConfigError(f"{self._spec.name}: {started.error}")
        return started

    def _spawn(self, message: bytes) -> StoreAnswer:
        process, ours = start_with_socket(
            ["-m", "deploy.store.main"], socket_type=socket.SOCK_SEQPACKET, new_session=True
        )
        self._process, self._socket = process, ours
        ours.settimeout(READY_TIMEOUT_S)
        try:
            socket.send_fds(ours, [message], [self._slab.fd, self._table.fd])
            answer = ours.recv(MAX_MESSAGE_BYTES)
        except OSError as error:
            answer = b""
            log.warning("the store's process does not answer: %s", error)
        if not answer:
            process.kill()
            status = process.wait(STOP_TIMEOUT_S)
            return StoreAnswer(error=f"its process ended with status {status}")
        return msgspec.json.decode(answer, type=StoreAnswer)

    async def _watch(self) -> None:
        """Restarts the store's process whenever it ends."""
        pause_s, num_failed = FIRST_PAUSE_S, 0
        never = asyncio.get_running_loop().create_future()
        while True:
            begun_s = self._clock.now_s()
            process = self._process
            assert process is not None
            status = await asyncio.to_thread(process.wait)
            if self._clock.now_s() - begun_s >= STEADY_S:
                pause_s, num_failed = FIRST_PAUSE_S, 0
            log.error("the store's process ended with status %s; another one starts", status)
            while True:
                await asyncio.wait([never], timeout=pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
                try:
                    await self._start()
                    break
                except (ConfigError, OSError) as error:
                    num_failed += 1
                    log.error("the store's process did not start: %s", error)
                    if num_failed >= MAX_FAILED_STARTS:
                        os._exit(70)

    def _end(self) -> None:
        process, ours = self._process, self._socket
        if process is None or ours is None:
            return
        try:
            ours.send(STOP_WORD)
        except OSError as error:
            log.info("the store's process has ended already: %s", error)
        ours.close()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            log.warning("the store's process did not stop in %g s and is killed", STOP_TIMEOUT_S)
            process.kill()
            process.wait()


def _port_of(address: str) -> int:
    return int(address.rsplit(":", 1)[1])
