"""The process of a store: `python -m deploy.store.main FD`. FD is this end of the keeper's socket
pair.

The keeper sends one message with the parameters of the start and the descriptors of slab and table.
The process runs until the keeper closes the socket or sends the word to stop.
"""

import os
import socket
import sys

import msgspec

from deploy.base.reasons import explain
from deploy.base.run_dir import log_folder
from deploy.base.spec import StoreSpec
from deploy.base.thread import LoopService, ServiceThread, die, freeze_heap
from deploy.logs.lines import LogSource, configure_logging
from deploy.services.store import MAX_MESSAGE_BYTES, StoreAnswer, StoreOrder
from deploy.store.host import StoreHost, StoreIdentity, StoreResources
from engine.clock import MonotonicClock
from engine.errors import BatonError
from engine.messages import WorkerId
from engine.native.library import library
from engine.net.trust import Secret
from kvtransfer.memory import SharedMemory

NICENESS = 5  # if cores are scarce, workers come before the pulls of a store


class _StoreProcess(LoopService[StoreAnswer]):
    """Runs the host of a store on an event loop."""

    def __init__(self, start: StoreOrder, place: StoreResources) -> None:
        spec = start.spec
        self._spec = spec
        self._host = StoreHost(
            StoreIdentity(
                WorkerId(spec.name), spec.version, Secret(spec.token), spec.host, spec.transport
            ),
            spec.config,
            place,
            clock=MonotonicClock(),
            on_crash=die,
        )

    async def open(self) -> StoreAnswer:
        """Starts to listen."""
        address, control = await self._host.open()
        self._host.control.follow(self._spec.members)
        return StoreAnswer(address, control, os.getpid())

    async def close(self) -> None:
        """Ends sessions and threads."""
        await self._host.close()


def main() -> int:
    """Runs until the keeper closes its socket or asks this process to stop."""
    keeper = socket.socket(fileno=int(sys.argv[1]))
    message, descriptors, _, _ = socket.recv_fds(keeper, MAX_MESSAGE_BYTES, 2)
    if not message:
        return 0
    os.nice(NICENESS)
    start = msgspec.json.decode(message, type=StoreOrder)
    spec: StoreSpec = start.spec
    source = LogSource(spec.name, spec.logs, log_folder(spec.log_folder, start.log_node))
    configure_logging(source, MonotonicClock())
    slab, table = (SharedMemory.of(fd) for fd in descriptors)
    place = StoreResources(slab, table, start.port, start.control_port, start.num_starts)
    thread = ServiceThread(_StoreProcess(start, place), "store")
    try:
        library()  # compiles the library now, so that no pull waits for it
        started = thread.open()
    except (BatonError, OSError) as error:
        text = str(error) if isinstance(error, BatonError) else explain(error)
        keeper.send(msgspec.json.encode(StoreAnswer(error=text)))
        return 1
    freeze_heap()
    keeper.send(msgspec.json.encode(started))
    keeper.recv(MAX_MESSAGE_BYTES)  # returns at the word to stop, or at the keeper's end
    thread.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
