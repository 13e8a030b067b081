"""Compiles each grammar in a separate process before a worker receives it.

`engine.grammar.child` compiles, and this module is its only client. The child starts with the first
grammar. The child compiles one grammar at a time, and tenants take turns. Verdicts are cached under
a digest of the grammar and of the tenant's salt. So a known grammar costs only a look-up, and
response times do not reveal the grammars of other tenants. A child that does not answer in time is
killed, and the next grammar starts a new child.
"""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple, Protocol

import msgspec

from engine.clock import Clock
from engine.errors import BatonError, GrammarError
from engine.grammar.child import (
    MAX_WALL_S,
    GrammarResult,
    GrammarToCompile,
    GrammarVerdict,
    Vocabulary,
    receive_frame,
    send_frame,
)
from engine.grammar.guides import MAX_SOURCE_LEN
from engine.messages import Grammar
from engine.net.seldom import Seldom
from engine.socket_child import start_with_socket
from router.inbox.api_errors import ApiError
from router.inbox.fair_queue import TenantQueue
from router.text.structured import Structure

log = logging.getLogger(__name__)

MAX_WAIT_S = 10.0  # maximum seconds that a request waits for the verdict on its grammar
MAX_WAITING = 256  # maximum waiting grammars of at most MAX_SOURCE_LEN characters
MAX_VERDICTS = 4096  # maximum cached verdicts, some 500 bytes each
ANSWER_TIMEOUT_S = 30.0  # seconds; the child needs MAX_WALL_S and may load a tokenizer
BLAME_TIMEOUT_S = 1.0  # maximum seconds to find the tools with wrong schemas
CLOSE_TIMEOUT_S = 2.0
LOG_EVERY_S = 10.0
# The child handles untrusted input, so the child gets only these environment variables.
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "LANG", "LC_ALL", "HOME")

assert MAX_WALL_S < ANSWER_TIMEOUT_S


class GrammarBusy(BatonError):
    """A grammar could not be checked in time."""


class Asker(NamedTuple):
    """The tenant charged for a compilation, and the salt under which the verdict is cached."""

    tenant: str
    salt: bytes


class GrammarCheck(Protocol):
    """Decides if workers can follow grammars. `counters` has the numbers of verdicts."""

    counters: Counter[str]

    async def check(self, vocabulary: Vocabulary | None, grammar: Grammar, asker: Asker) -> None:
        """Raises GrammarError if workers cannot follow the grammar.

        Raises GrammarBusy if there is no verdict in time.
        """
        ...


async def check_structure(
    checker: GrammarCheck, structure: Structure, vocabulary: Vocabulary | None, asker: Asker
) -> Structure:
    """Returns the structure, or a looser structure for tools without `strict`.

    Raises ApiError that names the field if workers cannot follow a field exactly as required.
    """
    while structure.grammar is not None:
        try:
            await checker.check(vocabulary, structure.grammar, asker)
        except GrammarError as error:
            structure = await _looser(checker, structure, vocabulary, asker, error)
        except GrammarBusy as error:
            raise ApiError(
                str(error), param=structure.param, code="grammar_busy", status=503
            ) from error
        else:
            break
    return structure


async def _looser(
    checker: GrammarCheck,
    structure: Structure,
    vocabulary: Vocabulary | None,
    asker: Asker,
    error: GrammarError,
) -> Structure:
    """Returns a structure in which the schemas that caused the error are loosened.

    Raises ApiError if all these schemas are strict.
    """
    parts, blamed = structure.all_parts(), list[str]()
    with contextlib.suppress(TimeoutError, GrammarBusy):
        async with asyncio.timeout(BLAME_TIMEOUT_S):
            for part in parts:
                try:
                    await checker.check(vocabulary, part.grammar, asker)
                except GrammarError as reason:
                    if part.function is None:
                        raise _refusal(part.param, reason) from reason
                    blamed.append(part.function)
    calling = structure.calling
    spare = [part.function for part in parts if part.function is not None]
    loose = [name for name in blamed or spare if calling and name not in calling.free]
    if not loose:
        raise _refusal(structure.param, error) from error
    return structure.loosened(loose)


def _refusal(param: str | None, error: GrammarError) -> ApiError:
    return ApiError(f"{param}: {error}", param=param, code="invalid_value")


@dataclass(slots=True)
class _Waiting:
    """A grammar without a verdict, and the number of requests that wait for the verdict."""

    asked: GrammarToCompile
    key: bytes
    done: "asyncio.Future[GrammarResult]"
    num_waiters: int = 0


class GrammarChecker:
    """Checks grammars in a child process. Belongs to one event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._child = GrammarChild()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._verdicts: OrderedDict[bytes, GrammarResult] = OrderedDict()
        self._waiting: dict[bytes, _Waiting] = {}
        self._queue: TenantQueue[str, _Waiting] = TenantQueue()
        self._pump: asyncio.Task[None] | None = None
        self._unaccepted = Seldom(LOG_EVERY_S)
        self.counters: Counter[str] = Counter(dict.fromkeys(GrammarVerdict, 0))

    async def check(self, vocabulary: Vocabulary | None, grammar: Grammar, asker: Asker) -> None:
        """Raises GrammarError if workers cannot follow the grammar.

        Raises GrammarBusy if there is no verdict in time.
        """
        if vocabulary is None:
            raise GrammarError("this model's tokenizer cannot guide answers")
        if len(grammar.source) > MAX_SOURCE_LEN:
            raise GrammarError(f"the grammar has more than {MAX_SOURCE_LEN} characters")
        key = _digest(GrammarToCompile(vocabulary, grammar), asker.salt)
        answered = self._verdicts.get(key)
        if answered is None:
            answered = await self._asked(key, GrammarToCompile(vocabulary, grammar), asker.tenant)
        else:
            self._verdicts.move_to_end(key)
        if answered.verdict is GrammarVerdict.BUSY:
            raise GrammarBusy(answered.message)
        if answered.verdict is not GrammarVerdict.FOLLOWED:
            raise GrammarError(answered.message)

    async def close(self) -> None:
        """Stops the child process. Requests that still wait are refused."""
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
        self._child.kill()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._child.close)
        self._thread.shutdown(wait=False)

    async def _asked(self, key: bytes, asked: GrammarToCompile, tenant: str) -> GrammarResult:
        waiting = self._waiting.get(key)
        if waiting is None:
            if len(self._waiting) >= MAX_WAITING:
                return self._busy("too many grammars wait to be compiled")
            waiting = _Waiting(asked, key, asyncio.get_running_loop().create_future())
            self._waiting[key] = waiting
            self._queue.put(tenant, waiting)
            if self._pump is None or self._pump.done():
                self._pump = asyncio.create_task(self._run(), context=Context())
        waiting.num_waiters += 1
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                return await asyncio.shield(waiting.done)
        except TimeoutError:
            return self._busy(f"the grammar was not compiled in {MAX_WAIT_S:g} s")
        finally:
            waiting.num_waiters -= 1
            if not waiting.num_waiters:
                self._waiting.pop(key, None)

    async def _run(self) -> None:
        """Sends waiting grammars to the child, one at a time."""
        loop = asyncio.get_running_loop()
        while (waiting := self._next()) is not None:
            answered = await loop.run_in_executor(self._thread, self._child.ask, waiting.asked)
            self._record(waiting.key, answered)
            if not waiting.done.done():
                waiting.done.set_result(answered)

    def _next(self) -> _Waiting | None:
        """Removes and returns the next grammar for which a request still waits."""
        while (waiting := self._queue.pop()) is not None:
            if waiting.num_waiters:
                return waiting
            waiting.done.cancel()
        return None

    def _record(self, key: bytes, answered: GrammarResult) -> None:
        self.counters[answered.verdict] += 1
        if answered.verdict not in (GrammarVerdict.FOLLOWED, GrammarVerdict.REFUSED):
            self._log(f"{answered.verdict}: {answered.message}")
        if answered.verdict is GrammarVerdict.BUSY:
            return
        self._verdicts[key] = answered
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)

    def _busy(self, message: str) -> GrammarResult:
        self.counters[GrammarVerdict.BUSY] += 1
        self._log(message)
        return GrammarResult(GrammarVerdict.BUSY, message)

    def _log(self, message: str) -> None:
        if self._unaccepted.due(self._clock.now_s()) is not None:
            log.warning("a grammar was not accepted: %s", message)


def _digest(asked: GrammarToCompile, salt: bytes) -> bytes:
    """Returns the cache key of a verdict. Raises GrammarError if the text is not valid Unicode."""
    try:
        return blake2b(msgspec.msgpack.encode((asked, salt)), digest_size=16).digest()
    except UnicodeEncodeError as error:
        raise GrammarError("the grammar is not valid Unicode") from error


class GrammarChild:
    """The child process, which is started at the first use.

    Only one thread may use this object at a time. A fault of the child is never raised as an
    exception.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    @property
    def pid(self) -> int:
        """The process id of the running child."""
        assert self._process is not None
        return self._process.pid

    def ask(self, asked: GrammarToCompile) -> GrammarResult:
        """Sends a grammar to the child.

        Returns the verdict; BUSY if the child ended or did not answer.
        """
        try:
            sock = self._opened()
            send_frame(sock, asked)
            data = receive_frame(sock)
        except OSError as error:  # also for timeouts
            log.warning("the process that compiles grammars is replaced: %r", error)
            data = b""
        if data:
            with contextlib.suppress(msgspec.DecodeError):
                return msgspec.msgpack.decode(data, type=GrammarResult)
        self.close()
        return GrammarResult(
            GrammarVerdict.BUSY, "the process that compiles grammars did not answer"
        )

    def kill(self) -> None:
        """Kills the process. Thread-safe. A waiting `ask` returns, because the socket ends."""
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """Kills the process and waits until it has ended."""
        self.kill()
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel may be slow
                self._process.wait(CLOSE_TIMEOUT_S)
        self._process = self._socket = None

    def _opened(self) -> socket.socket:
        if self._socket is None:
            self._process, self._socket = start_with_socket(
                ["-m", "engine.grammar.child"],
                environment={n: os.environ[n] for n in _ENVIRONMENT if n in os.environ},
            )
            self._socket.settimeout(ANSWER_TIMEOUT_S)
        return self._socket
