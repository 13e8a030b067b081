"""Runs a service on an event loop in a thread, both used by this service only.

The same code therefore runs in a plain process, in a Ray actor and in a test.
"""

import asyncio
import gc
import logging
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

import uvloop

from deploy.base.spec import READY_TIMEOUT_S
from engine.errors import ConfigError

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0
NEW_OBJECTS = 20_000  # allocations minus deallocations that trigger a garbage collection

T = TypeVar("T", covariant=True)
U = TypeVar("U")


class LateStart(ConfigError):
    """A service did not open in time. The service may only be slow."""


class LoopService(Protocol[T]):
    """A service that runs on an event loop from `open` to `close`."""

    drain_timeout_s: float = 0.0  # longest time that `close` waits for running work

    async def open(self) -> T:
        """Starts the service. Returns the data that clients of the service need."""
        ...

    def stop_draining(self) -> None:
        """Makes a running `close` return without waiting for work.

        Does nothing if `close` never waits.
        """
        return

    async def close(self) -> None:
        """Stops the service."""
        ...


class ServiceThread(Generic[T]):
    """Runs a service in a thread with an event loop, both used by this service only."""

    def __init__(
        self, service: LoopService[T], name: str, *, open_timeout_s: float = READY_TIMEOUT_S
    ) -> None:
        self._service = service
        self._open_timeout_s = open_timeout_s
        self._opening: Future[T] | None = None
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def open(self, limit_s: float | None = None) -> T:
        """Opens the service, within `limit_s` seconds if given.

        Raises the service's errors, and LateStart.
        """
        limit_s = self._open_timeout_s if limit_s is None else limit_s
        self._thread.start()
        self._opening = opening = asyncio.run_coroutine_threadsafe(self._service.open(), self._loop)
        try:
            return opening.result(limit_s)
        except TimeoutError as error:
            if not opening.cancel():  # the service itself raised TimeoutError
                raise
            raise LateStart(f"it did not start in {limit_s:g} s") from error

    def ask(self, work: Coroutine[Any, Any, U], timeout_s: float) -> U:
        """Runs a coroutine on the service's loop.

        Raises the coroutine's errors, and TimeoutError.
        """
        asked = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return asked.result(timeout_s)
        except TimeoutError:
            asked.cancel()
            raise

    def stop_draining(self) -> None:
        """Makes a running `close` return without waiting for work.

        Signal handlers may call this method.
        """
        self._loop.call_soon_threadsafe(self._service.stop_draining)

    def close(self) -> None:
        """Closes the service, even during its `open`, and ends the thread."""
        if self._opening is not None:
            self._opening.cancel()
        closing = asyncio.run_coroutine_threadsafe(self._service.close(), self._loop)
        closing.result(CLOSE_TIMEOUT_S + self._service.drain_timeout_s)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        """Runs the loop. Ends the process if the loop fails, since the service would be dead."""
        try:
            self._loop.run_forever()
        except BaseException as error:
            die(error)


def freeze_heap() -> None:
    """Exempts all present objects from garbage collection, and makes collections less frequent.

    A process calls this once its service has started. A full collection visits every object, which
    takes tens of milliseconds. Modules, tokenizer and model are never garbage. vLLM and SGLang do
    the same after their warm-up. By default a collection runs after every 700 new objects. A
    request makes about 700 objects, and hardly any of them is garbage in a cycle.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])


def die(error: BaseException) -> None:
    """Ends the process at once. A service that lost a thread must not look alive to its peers."""
    log.critical("a thread died: %r", error, exc_info=error)
    os._exit(70)
