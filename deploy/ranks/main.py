"""The process of one rank of a worker: `python -m deploy.ranks.main DESCRIPTOR`.

A rank has its part of the model and of each block of KV. Rank 0 passes two sockets to it:

    steps    rank 0 sends packed steps, which the main thread computes
    frames   rank 0 sends the spec, then orders for the transfer endpoint. A thread receives them,
             and sends the endpoint's reports

When the frames socket is closed, rank 0 has ended. Then this process ends at once, even while it
loads its part or waits for another rank. If this process is paused at that time, the kernel kills
it. A rank ignores the signals that a terminal or a service manager sends to the whole process
group: only rank 0 handles them.
"""

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec

from deploy.base.run_dir import log_folder
from deploy.base.thread import die, freeze_heap
from deploy.logs.lines import LogSource, configure_logging
from deploy.ranks.frames import (
    IDLE_S,
    FrameSocket,
    OpenTransfer,
    RankCounters,
    RankJoins,
    RankOpened,
    RankRefused,
    RankSpec,
    ToRank,
    TransferOpened,
    TransferRefused,
)
from deploy.worker.opening import group_of, import_torch, open_runner, runner_of
from engine.clock import MonotonicClock
from engine.errors import BatonError, ConfigError
from engine.net.trust import Secret
from engine.worker.events import Event
from kvtransfer.endpoint import EndpointConfig, TransferEndpoint
from kvtransfer.memory import Pool

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LAST_WORDS_S = 2.0  # within this time a failing rank notices that rank 0 has ended

_decode = msgspec.msgpack.Decoder(ToRank).decode


class RankTransfers:
    """The transfer endpoint of this rank. Rank 0 sends its orders."""

    def __init__(self, spec: RankSpec, frames: FrameSocket) -> None:
        self._spec = spec
        self._frames = frames
        self._endpoint: TransferEndpoint | None = None
        self._has_ended = threading.Event()  # never set, because the process ends instead
        # Both are set before `RankOpened` is sent to rank 0.
        self.pool: Pool | None = None
        self.opening: Mapping[str, float] = {}  # counters of the runner's opening

    def serve(self) -> None:
        """Performs rank 0's orders until rank 0 ends. Then ends this process."""
        try:
            while (frame := self._frames.receive()) is not None:
                order = _decode(frame)
                if isinstance(order, OpenTransfer):
                    self._open(order)
                elif not isinstance(order, RankSpec) and self._endpoint is not None:
                    self._endpoint.perform(order)
        except BaseException as error:
            die(error)
        os._exit(0)

    def _open(self, order: OpenTransfer) -> None:
        worker = self._spec.worker
        assert self.pool is not None
        endpoint = TransferEndpoint(
            EndpointConfig(
                worker_id=worker.worker_id,
                incarnation=order.incarnation,
                identity=order.identity,
                secret=Secret(worker.token),
                transport=worker.config.kv_transport,
                host=worker.host,
            ),
            pool=self.pool,
            clock=MonotonicClock(),
            on_event=self._report,
            on_crash=die,
        )
        try:
            address = endpoint.open()
        except ConfigError as error:
            self._frames.send(TransferRefused(str(error)))
            return
        self._endpoint = endpoint
        self._frames.send(TransferOpened(address))

    def show_life(self) -> None:
        """Sends a sign of life to rank 0 each second, until rank 0 ends."""
        with contextlib.suppress(OSError):  # `serve` also notices that rank 0 has ended
            while not self._has_ended.wait(IDLE_S):
                self._send_counters()

    def _report(self, event: Event) -> None:
        self._send_counters()
        self._frames.send(event)

    def _send_counters(self) -> None:
        counters = Counter(self.opening)
        if self._endpoint is not None:
            counters.update(self._endpoint.counters())
        self._frames.send(RankCounters(dict(counters)))


def main(descriptor: int) -> int:
    """Runs until rank 0 ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = socket.socket(fileno=descriptor)
    _, descriptors, *_ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not descriptors:
        return 0  # rank 0 has ended already
    frames = FrameSocket(connection)
    frame = frames.receive()
    if frame is None:
        return 0
    spec = _decode(frame)
    assert isinstance(spec, RankSpec)
    worker = spec.worker
    name = f"{worker.worker_id}.{spec.place.rank}"
    configure_logging(
        LogSource(name, worker.logs, log_folder(worker.log_folder, "")), MonotonicClock()
    )
    transfers = RankTransfers(spec, frames)
    thread = threading.Thread(target=transfers.serve, name="frames", daemon=True)
    thread.start()
    try:
        _compute(spec, transfers, frames, socket.socket(fileno=descriptors[0]))
    except BatonError as error:
        with contextlib.suppress(OSError):  # rank 0 has failed too and has ended
            frames.send(RankRefused(str(error), isinstance(error, ConfigError)))
        return 1
    except BaseException as error:
        thread.join(LAST_WORDS_S)  # if rank 0 has ended, `serve` ends the process during this wait
        die(error)
    return 0


def _compute(
    spec: RankSpec, transfers: RankTransfers, frames: FrameSocket, steps: socket.socket
) -> None:
    """Opens this rank's part of the model, and computes steps until rank 0 ends."""
    worker = spec.worker
    import_torch(worker.threads)  # takes seconds, in which rank 0 may end
    from engine.model.parallel.steps import StepChannel

    group = group_of(worker, spec.place, spec.rendezvous)
    runner = runner_of(worker, Path(spec.directory), group=group)
    frames.send(RankJoins())
    transfers.pool = open_runner(runner, worker, group=group)
    transfers.opening = runner.counters
    freeze_heap()
    frames.send(RankOpened(os.getpid()))
    threading.Thread(target=transfers.show_life, name="life", daemon=True).start()
    runner.follow(StepChannel(steps))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
