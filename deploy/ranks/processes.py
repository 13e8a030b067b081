"""Rank 0's side of a worker's other ranks. Rank 0 starts their processes, which end with rank 0.

If one rank dies, the whole worker dies. The answers of the worker's sequences continue on other
workers, as after any death of a worker.
"""

import logging
import os
import queue
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from deploy.base.reasons import explain_status
from deploy.base.spec import READY_TIMEOUT_S, WorkerSpec
from deploy.ranks.frames import (
    FrameSocket,
    FromRank,
    OpenTransfer,
    RankCounters,
    RankJoins,
    RankOpened,
    RankRefused,
    RankSpec,
    TransferOpened,
    TransferRefused,
)
from deploy.worker.opening import group_of
from engine.clock import MonotonicClock
from engine.errors import BatonError, ConfigError
from engine.layout import Shard
from engine.messages import TransferAddress
from engine.model.parallel.group import RankGroup
from engine.model.parallel.steps import StepFeed
from engine.net.silence import Silence
from engine.socket_child import start_with_socket
from engine.worker.events import TransferOrder, TransferReport
from engine.worker.ranks import RankPlace
from engine.worker.steps import FIRST_STEPS_FACTOR
from kvtransfer.endpoint import EndpointConfig
from kvtransfer.messages import Identity

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 30.0  # longest time in which a rank opens its transfer endpoint
SEND_TIMEOUT_S = 30.0  # a rank that reads no step or order for this time has failed
STOP_TIMEOUT_S = 5.0
STATUS_TIMEOUT_S = 0.5  # longest time from a socket's close to its process's end
REASON_TIMEOUT_S = 2.0  # time in which the rank that failed first reports its own failure

_decode = msgspec.msgpack.Decoder(FromRank).decode


class RankDied(BatonError):
    """A rank of this worker has died, or hangs."""


class RankEndpoint:
    """Rank 0's connection to another rank.

    Receives the answers to the rank's start; then serves as the rank's `RemoteEndpoint`.
    """

    def __init__(
        self,
        rank: int,
        process: "subprocess.Popen[bytes]",
        connection: socket.socket,
        *,
        silent_s: float | None,
        failures: "queue.SimpleQueue[BatonError]",
        on_death: Callable[[BaseException], None],
    ) -> None:
        """If the rank does not start, the reason is put into `failures`. A started rank counts as
        dead if it is silent for more than `silent_s` seconds. None: the rank may be silent.
        """
        self.rank = rank
        self._process = process
        self._frames = FrameSocket(connection, on_idle=self._check)
        self._silent_s = silent_s
        self._clock = MonotonicClock()
        self._silence = Silence(self._clock.now_s())
        self._failures = failures
        self._on_death = on_death
        self._answers: queue.SimpleQueue[FromRank | BatonError] = queue.SimpleQueue()
        self._counters: Mapping[str, float] = {}
        self._on_report: Callable[[TransferReport], None] | None = None
        self._on_lost: Callable[[], None] | None = None
        self._request: OpenTransfer | None = None
        self._is_closing = False
        self._has_started = False
        self._thread = threading.Thread(target=self._listen, name=f"rank-{rank}", daemon=True)

    def listen(self, spec: RankSpec) -> None:
        """Sends the spec to the rank, and starts to receive its messages. Raises OSError."""
        self._frames.send(spec)
        self._thread.start()

    def await_joining(self, timeout_s: float) -> None:
        """Waits until the rank joins the rendezvous. Raises ConfigError, RankDied."""
        assert isinstance(self._answer(timeout_s), RankJoins)

    def await_start(self, timeout_s: float) -> None:
        """Waits until the rank has loaded its part of the model. Raises ConfigError, RankDied."""
        assert isinstance(self._answer(timeout_s), RankOpened)
        self._has_started = True

    def serve_as(self, config: EndpointConfig, identity: Identity) -> None:
        """Sets the parameters that `open` will send to the rank."""
        self._request = OpenTransfer(config.incarnation, identity)

    def open(
        self, on_report: Callable[[TransferReport], None], on_lost: Callable[[], None]
    ) -> TransferAddress:
        """Opens the rank's transfer endpoint. Raises ConfigError."""
        self._on_report, self._on_lost = on_report, on_lost
        self._frames.send(self._request)
        answer = self._answer(ANSWER_TIMEOUT_S)
        if isinstance(answer, TransferRefused):
            raise ConfigError(f"rank {self.rank}: {answer.reason}")
        assert isinstance(answer, TransferOpened)
        return answer.address

    def perform(self, order: TransferOrder) -> None:
        """Sends an order to the rank.

        If the rank has ended, the receiving thread reports its death.
        """
        try:
            self._frames.send(order)
        except OSError as error:
            log.warning("rank %d takes no orders: %s", self.rank, error)
            self._frames.close()

    def counters(self) -> Mapping[str, float]:
        """Returns the rank's counters from its latest message."""
        return self._counters

    def close(self) -> None:
        """Closes the connection, so that the rank ends."""
        self._is_closing = True
        self._frames.close()

    def _answer(self, timeout_s: float) -> FromRank:
        try:
            answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise RankDied(f"rank {self.rank} gives no answer in {timeout_s:g} s") from None
        if isinstance(answer, BatonError):
            raise answer
        return answer

    def _fail(self, failure: BatonError) -> None:
        """Records the reason why the rank does not start."""
        self._answers.put(failure)
        self._failures.put(failure)

    def _listen(self) -> None:
        try:
            while (frame := self._frames.receive()) is not None:
                message = _decode(frame)
                self._silence.broken()
                if isinstance(message, RankCounters):
                    self._counters = message.counters
                elif isinstance(message, TransferReport):
                    assert self._on_report is not None
                    self._on_report(message)
                elif isinstance(message, RankRefused):
                    kind = ConfigError if message.is_config else BatonError
                    self._fail(kind(f"rank {self.rank}: {message.reason}"))
                else:
                    self._answers.put(message)
        except Exception as error:  # the rank hangs; ranks send no invalid messages
            self._on_death(error)
            raise
        died = RankDied(f"rank {self.rank} has ended{self._exit_status()}")
        self._fail(died)
        if self._is_closing:
            return
        if self._on_lost is not None:
            self._on_lost()
        if self._has_started:
            self._on_death(died)

    def _check(self) -> None:
        """Called after each second without a message.

        Raises RankDied if the rank has been silent for too long.
        """
        silent_s = self._silence.check(self._clock.now_s())
        if self._has_started and self._silent_s is not None and silent_s > self._silent_s:
            raise RankDied(f"rank {self.rank} hangs: it has been silent for {silent_s:.0f} s")

    def _exit_status(self) -> str:
        """Returns the exit status in brackets.

        Empty if the process has closed its socket but still runs.
        """
        try:
            return f" ({explain_status(self._process.wait(STATUS_TIMEOUT_S))})"
        except subprocess.TimeoutExpired:
            return ""


class RankProcesses:
    """Starts and ends the processes of all ranks but rank 0."""

    def __init__(
        self,
        spec: WorkerSpec,
        directory: Path,
        place: RankPlace,
        *,
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._spec = spec
        self._directory = directory
        self._place = place
        self._on_death = on_death
        self._processes: list[subprocess.Popen[bytes]] = []
        self._rendezvous: int | None = None
        self._failures: queue.SimpleQueue[BatonError] = queue.SimpleQueue()
        self.endpoints: list[RankEndpoint] = []
        self.group: RankGroup
        self.feed: StepFeed

    def start(self) -> None:
        """Starts the processes. Each process loads its part of the model. Raises OSError."""
        # A memfd has no name, so no file is left if the processes are killed.
        self._rendezvous = os.memfd_create("baton-ranks")
        rendezvous = f"/proc/{os.getpid()}/fd/{self._rendezvous}"
        steps: list[socket.socket] = []
        self.feed = StepFeed(steps)
        self.group = group_of(self._spec, self._place, rendezvous)
        step_s = self._spec.config.step_timeout_s
        silent_s = None if step_s is None else FIRST_STEPS_FACTOR * step_s
        for rank in range(1, self._place.size):
            process, connection = start_with_socket(["-m", "deploy.ranks.main"])
            self._processes.append(process)
            ours, theirs = socket.socketpair()
            for each in (ours, connection):
                _bound_sends(each)
            steps.append(ours)
            place = msgspec.structs.replace(self._place, rank=rank)
            with theirs:
                socket.send_fds(connection, [b"s"], [theirs.fileno()])
            endpoint = RankEndpoint(
                *(rank, process, connection),
                silent_s=silent_s,
                failures=self._failures,
                on_death=self._on_death,
            )
            endpoint.listen(RankSpec(place, self._spec, str(self._directory), rendezvous))
            self.endpoints.append(endpoint)

    def await_joining(self) -> None:
        """Waits until all ranks join the rendezvous. Otherwise rank 0 could wait there for a dead
        rank.

        Raises ConfigError, RankDied.
        """
        for endpoint in self.endpoints:
            endpoint.await_joining(READY_TIMEOUT_S)

    def await_start(self) -> None:
        """Waits until all ranks have loaded their parts. Raises ConfigError, RankDied."""
        for endpoint in self.endpoints:
            endpoint.await_start(READY_TIMEOUT_S)

    def reason_of(self, error: Exception) -> Exception:
        """Returns the cause of rank 0's failure: `error`, or the error of the rank that failed
        first.

        When a rank ends, operations of all other ranks fail too. Those later errors do not help an
        operator.
        """
        try:
            failure = self._failures.get(timeout=REASON_TIMEOUT_S)
        except queue.Empty:
            return error
        is_common = isinstance(error, ConfigError) and str(error) in str(failure)
        return error if is_common else failure

    def endpoints_of(
        self, config: EndpointConfig, shards: Sequence[Shard]
    ) -> Sequence[RankEndpoint]:
        """Returns the transfer endpoints of the other ranks of `config`'s worker.

        They are not open yet.
        """
        for endpoint, shard in zip(self.endpoints, shards[1:], strict=True):
            identity = msgspec.structs.replace(config.identity, shard=shard)
            endpoint.serve_as(config, identity)
        return self.endpoints

    def close(self) -> None:
        """Asks the processes to end. Kills those that do not end in time."""
        self.feed.close()
        for endpoint in self.endpoints:
            endpoint.close()
        for process in self._processes:
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                log.warning("a rank did not stop in %g s and is killed", STOP_TIMEOUT_S)
                process.kill()
                process.wait()
        if self._rendezvous is not None:
            os.close(self._rendezvous)
            self._rendezvous = None


def _bound_sends(connection: socket.socket) -> None:
    """Sets a time limit for sends. A receive may wait without limit."""
    timeval = struct.pack("ll", int(SEND_TIMEOUT_S), 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
