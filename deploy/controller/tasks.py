"""Runs the tasks and threads of the controller. A bug in one task does not end other tasks."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

log = logging.getLogger(__name__)

MAX_THREADS = 64  # concurrent calls of the launcher, which take minutes at most
MAX_STARTS = 256  # concurrent starts of workers; a start with a fetch may take hours

T = TypeVar("T")


class ControllerTasks:
    """Runs coroutines as tasks and blocking calls in threads. Reports and counts bugs."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self.num_bugs = 0
        self._report = report
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(MAX_THREADS, "launch")  # threads are started on demand
        self._start_threads = ThreadPoolExecutor(MAX_STARTS, "start")

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a coroutine as a task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_end)
        return task

    async def in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Runs a blocking call in a thread and returns its result.

        Starts of workers do not delay the call.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, _called, function, *arguments)

    async def in_start_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Runs a worker's start in one of the threads for starts, and returns its result."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._start_threads, _called, function, *arguments)

    def record_bug(self, error: BaseException) -> None:
        """Logs, reports and counts an unexpected error."""
        self.num_bugs += 1
        log.critical("a task of the controller failed: %r", error, exc_info=error)
        self._report(f"the controller has a bug: {error!r}")

    async def close(self, timeout_s: float) -> None:
        """Cancels all tasks and waits until they have ended. Threads end by themselves."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        for threads in (self._threads, self._start_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    def _on_end(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.record_bug(error)


def _called(function: Callable[..., T], *arguments: Any) -> T:
    """Calls a function. Turns SystemExit, which would end the event loop, into RuntimeError."""
    try:
        return function(*arguments)
    except SystemExit as error:
        raise RuntimeError(f"a library ended its thread: {error!r}") from error


async def pause(seconds: float) -> None:
    """Waits for `seconds`."""
    await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=seconds)
