"""Threads for calls that may hang, each with a deadline.

A call that is not done by its deadline counts as failed, and its future gets the value `otherwise`.
A thread that is running this call counts as stuck, and another thread replaces it. The number of
stuck threads is bounded: at the bound, no more calls are made until a stuck thread returns. When a
stuck thread returns, it serves its lane again if the lane lacks a thread; otherwise the thread
ends.

Each lane has its own threads and its own queue, so slow writes do not delay reads.

`CallBreaker` stops calls to a failing object store, and allows them again later. The time is an
argument. After `MAX_FAILURES` failures in a row, calls stop for a second. After a pause, a single
failure stops the calls again. Each pause is twice as long as the last, up to five minutes. A
success resets the count and the pause.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeVar

from engine.clock import Clock
from kvtransfer.store.objects.files import ObjectStoreFailed

T = TypeVar("T")

CLOSE_WAIT_S = 1.0


class CallFault(StrEnum):
    """The reason why a call was not made or not completed."""

    BUSY = "busy"  # too many calls are waiting
    OFF = "off"  # after failures or hangs, no call is made for some time
    TIMEOUT = "timeout"
    STORE = "store"  # the object store or its library failed
    CLOSED = "closed"


@dataclass(eq=False, slots=True)
class TimedCall(Generic[T]):
    """A call with a future, whose value is `otherwise` on failure. `is_over`: the value is
    decided.
    """

    work: Callable[["TimedCall[T]"], T]
    otherwise: T
    deadline_s: float
    future: "Future[T]" = field(default_factory=Future)
    is_running: bool = False
    is_over: bool = False


@dataclass(eq=False, slots=True)
class _Lane:
    wanted_threads: int
    num_threads: int = 0
    waiting: deque[TimedCall[Any]] = field(default_factory=deque)


class CallThreads:
    """Makes calls on a few threads. `count` is called once for each fault, on any thread."""

    def __init__(
        self,
        lanes: Mapping[str, int],
        *,
        max_waiting: int,
        max_stuck: int,
        clock: Clock,
        count: Callable[[CallFault], None],
    ) -> None:
        self._lanes = {name: _Lane(num_threads) for name, num_threads in lanes.items()}
        self._max_waiting = max_waiting  # largest number of queued calls of each lane
        self._max_stuck = max_stuck
        self._clock = clock
        self._count = count
        self._breaker = CallBreaker()
        self._changed = threading.Condition()
        self._calls: dict[TimedCall[Any], _Lane] = {}  # the lane of each call that has not ended
        self._threads: set[threading.Thread] = set()
        self._num_stuck = 0
        self._is_open = False

    @property
    def num_threads(self) -> int:
        """The number of threads, stuck ones included."""
        return sum(thread.is_alive() for thread in tuple(self._threads))

    def why_off(self) -> str | None:
        """Returns the reason why no calls are made at present; None if calls are made."""
        with self._changed:
            return self._breaker.why_off(self._clock.now_s())

    def open(self) -> None:
        """Starts the threads, which do not delay the exit of the process."""
        with self._changed:
            self._is_open = True
            self._start(self._watch)
            for lane in self._lanes.values():
                self._fill(lane)

    def close(self) -> None:
        """Ends all calls, and all threads that are not stuck."""
        with self._changed:
            self._is_open = False
            over = [call for call in self._calls if not call.is_over]
            for call in over:
                call.is_over = True
            self._calls.clear()
            self._changed.notify_all()
            threads = tuple(self._threads)
        self._end(over, CallFault.CLOSED)
        until_s = self._clock.now_s() + CLOSE_WAIT_S
        for thread in threads:
            if thread is not threading.current_thread():  # `close` may run in a future's callback
                thread.join(max(0.0, until_s - self._clock.now_s()))

    def submit(
        self,
        lane_name: str,
        work: Callable[[TimedCall[T]], T],
        *,
        otherwise: T,
        timeout_s: float,
    ) -> "Future[T]":
        """Queues a call, unless too many calls are waiting or calls are off.

        The future gets the result within `timeout_s`, or else `otherwise`. The future cannot be
        cancelled, and raises only errors that are bugs.
        """
        with self._changed:
            now_s = self._clock.now_s()
            call = TimedCall(work, otherwise, now_s + timeout_s)
            call.future.set_running_or_notify_cancel()
            lane = self._lanes[lane_name]
            fault = self._refusal(lane, now_s)
            if fault is None:
                lane.waiting.append(call)
                self._calls[call] = lane
                self._changed.notify_all()
        if fault is not None:
            self._end([call], fault)
        return call.future

    def _refusal(self, lane: _Lane, now_s: float) -> CallFault | None:
        if not self._is_open:
            return CallFault.CLOSED
        if self._num_stuck >= self._max_stuck:
            self._breaker.trip(f"{self._num_stuck} calls hang", now_s)
        if self._breaker.why_off(now_s) is not None:
            return CallFault.OFF
        return CallFault.BUSY if len(lane.waiting) >= self._max_waiting else None

    def _end(self, calls: list[TimedCall[Any]], fault: CallFault) -> None:
        """Sets the futures of ended calls. Called without the lock, since futures run callbacks."""
        for call in calls:
            self._count(fault)
            call.future.set_result(call.otherwise)

    # ------------------------------------------------------------ threads

    def _fill(self, lane: _Lane) -> None:
        while lane.num_threads < lane.wanted_threads and self._num_stuck <= self._max_stuck:
            lane.num_threads += 1
            self._start(lambda: self._serve(lane))

    def _start(self, run: Callable[[], None]) -> None:
        self._threads = {thread for thread in self._threads if thread.is_alive()}
        thread = threading.Thread(target=run, name="baton-objects", daemon=True)
        thread.start()
        self._threads.add(thread)

    def _serve(self, lane: _Lane) -> None:
        """Runs the calls of a lane, one after another, until closed or replaced by another
        thread.
        """
        while (call := self._next(lane)) is not None:
            result: Any = None
            failure: ObjectStoreFailed | None = None
            bug: BaseException | None = None
            try:
                result = call.work(call)
            except ObjectStoreFailed as error:
                failure, result = error, call.otherwise
            except BaseException as error:  # a bug: the future raises it for the owner
                bug = error
            was_late, goes_on = self._finish(call, lane, failure)
            if not was_late:
                if failure is not None:
                    self._count(CallFault.STORE)
                if bug is not None:
                    call.future.set_exception(bug)
                else:
                    call.future.set_result(result)
            if not goes_on:
                return

    def _next(self, lane: _Lane) -> TimedCall[Any] | None:
        with self._changed:
            while self._is_open and not lane.waiting:
                self._changed.wait()
            if not self._is_open:
                return None
            call = lane.waiting.popleft()
            call.is_running = True
            return call

    def _finish(
        self, call: TimedCall[Any], lane: _Lane, failure: ObjectStoreFailed | None
    ) -> tuple[bool, bool]:
        """Records the end of a call. Returns (the call was late, its thread continues to serve)."""
        with self._changed:
            now_s = self._clock.now_s()
            if not call.is_over:
                call.is_over = True
                del self._calls[call]
                if failure is None:
                    self._breaker.succeeded(now_s)
                else:
                    self._breaker.failed(f"the store fails: {failure}", now_s)
                return False, True
            if not self._is_open:
                return True, False
            self._num_stuck -= 1
            goes_on = lane.num_threads < lane.wanted_threads
            lane.num_threads += goes_on
            for each in self._lanes.values():
                self._fill(each)
            return True, goes_on

    def _watch(self) -> None:
        """Fails calls that reach their deadlines, until closed."""
        while True:
            with self._changed:
                if not self._is_open:
                    return
                now_s = self._clock.now_s()
                late = [call for call in self._calls if call.deadline_s <= now_s]
                for call in late:
                    self._give_up(call, now_s)
                if not late:
                    next_s = min((call.deadline_s for call in self._calls), default=None)
                    self._changed.wait(None if next_s is None else next_s - now_s)
            self._end(late, CallFault.TIMEOUT)

    def _give_up(self, call: TimedCall[Any], now_s: float) -> None:
        lane = self._calls.pop(call)
        call.is_over = True
        if not call.is_running:
            lane.waiting.remove(call)
            return
        self._breaker.failed("calls take too long", now_s)
        self._num_stuck += 1
        lane.num_threads -= 1
        self._fill(lane)


MAX_FAILURES = 4
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 300.0


class CallBreaker:
    """Decides whether calls may be made at a time."""

    def __init__(self) -> None:
        self._num_failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._reason = ""
        self._off_until_s: float | None = None

    def why_off(self, now_s: float) -> str | None:
        """Returns the reason why no calls are made now, or None if calls are made."""
        is_off = self._off_until_s is not None and now_s < self._off_until_s
        return self._reason if is_off else None

    def succeeded(self, now_s: float) -> None:
        """Records a success. During a pause, the late success of an earlier call does not count."""
        if self.why_off(now_s) is None:
            self._num_failures = 0
            self._pause_s = FIRST_PAUSE_S

    def failed(self, reason: str, now_s: float) -> None:
        """Records a call that failed or timed out."""
        if self.why_off(now_s) is None:
            self._num_failures += 1
            if self._num_failures >= MAX_FAILURES:
                self.trip(reason, now_s)

    def trip(self, reason: str, now_s: float) -> None:
        """Stops calls for a pause, unless they are stopped already."""
        if self.why_off(now_s) is None:
            self._reason = reason
            self._off_until_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._num_failures = MAX_FAILURES - 1
