"""The hostile clients of `bench hostile`, and the outcomes of their requests."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp

from bench.common.waiting import pause
from bench.hostile.corpus import ATTACKER_KEY, COMPLETIONS, HONEST_KEY, Shot, bearer
from engine.clock import Clock

# A hostile client disconnects after this many seconds: a changed request may ask for a long answer.
ANSWER_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 5.0
DRIP_EVERY_S = 0.5  # interval between two bytes on a slow connection
PROBE_EVERY_S = 1.0
PROBE_TIMEOUT_S = 30.0
MAX_EXAMPLES = 5
REFUSED_CONNECTION = "no connection"
HEAD = (
    f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {ATTACKER_KEY}\r\n"
    "Content-Type: application/json\r\n"
).encode()  # start of the head of a request

Status = int | str  # HTTP status, or the reason why there is none
T = TypeVar("T")


@dataclass(slots=True)
class Outcomes:
    """Counts of requests by outcome, and the first few outcomes that are not allowed."""

    statuses: Counter[Status] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def note(self, status: Status, shot: Shot, said: str = "") -> None:
        """Counts one outcome. Also records it if it is a server error other than 503, or a broken
        connection.
        """
        self.statuses[status] += 1
        if is_wrong(status) and len(self.examples) < MAX_EXAMPLES:
            self.examples.append(f"{status} {said[:200]!r} for {shot.path} {shot.body[:200]!r}")

    @property
    def num_wrong(self) -> int:
        """Returns the number of server errors other than 503, and of answers that broke off."""
        return sum(count for status, count in self.statuses.items() if is_wrong(status))


def is_wrong(status: Status) -> bool:
    """Returns True if a status is a server error other than 503, or a broken connection."""
    if isinstance(status, str):
        return status == "broken"
    return status >= 500 and status != 503


async def send_bodies(
    session: aiohttp.ClientSession, url: str, shots: Iterator[Shot], at_once: int
) -> Outcomes:
    """Sends requests over reused connections, `at_once` at a time."""
    outcomes = Outcomes()

    async def one(shot: Shot) -> None:
        headers = {"Content-Type": shot.content_type, **bearer(ATTACKER_KEY)}
        try:
            async with (
                asyncio.timeout(ANSWER_TIMEOUT_S),
                session.post(f"{url}{shot.path}", data=shot.body, headers=headers) as response,
            ):
                said = await response.text(errors="replace")
                outcomes.note(response.status, shot, said)
        except TimeoutError:
            outcomes.note("left", shot)
        except aiohttp.ClientError as error:
            outcomes.note("broken", shot, repr(error))

    await _all(shots, one, at_once)
    return outcomes


async def disconnect(url: str, num: int, *, at_once: int, seed: int) -> Counter[str]:
    """Connects, sends a part of a request or all of it, and disconnects. Counts by the part that
    was sent.
    """
    rng = random.Random(seed)
    ends: Counter[str] = Counter()

    async def one(stage: str) -> None:
        connection = await _connected(url)
        if connection is None:
            ends[REFUSED_CONNECTION] += 1
            return
        reader, writer = connection
        ends[stage] += 1
        request = _request(rng)
        sent = {"nothing": 0, "head": 60, "body": len(request) - 5}.get(stage, len(request))
        try:
            writer.write(request[:sent])
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                if stage == "after a part":
                    await reader.read(600)
                elif stage == "at once":
                    await writer.drain()
        except (OSError, TimeoutError):
            ends["cut off"] += 1
        finally:
            writer.transport.abort()

    stages = ("nothing", "head", "body", "at once", "after a part", "after a part")
    await _all((rng.choice(stages) for _ in range(num)), one, at_once)
    return ends


@dataclass(slots=True)
class Slow:
    """Outcomes of slow connections, and times of honest requests sent meanwhile."""

    num_opened: int = 0
    num_refused: int = 0
    num_closed: int = 0  # connections that the server closed early
    probes_s: list[float] = field(default_factory=list)  # seconds of each honest request
    num_probes_failed: int = 0


async def drip(
    session: aiohttp.ClientSession, url: str, num: int, *, lasting_s: float, clock: Clock
) -> Slow:
    """Keeps slow connections open. Meanwhile sends honest requests."""
    slow = Slow()
    end_s = clock.now_s() + lasting_s

    async def one(mode: int) -> None:
        connection = await _connected(url)
        if connection is None:
            slow.num_refused += 1
            return
        slow.num_opened += 1
        try:
            if await _drip_until(end_s, *connection, mode, clock):
                slow.num_closed += 1
        finally:
            connection[1].transport.abort()

    async def probe() -> None:
        body, headers = (
            {"prompt": "def f(", "max_tokens": 4},
            {"Authorization": f"Bearer {HONEST_KEY}"},
        )
        while clock.now_s() < end_s:
            begin_s = clock.now_s()
            try:
                async with (
                    asyncio.timeout(PROBE_TIMEOUT_S),
                    session.post(f"{url}{COMPLETIONS}", json=body, headers=headers) as response,
                ):
                    await response.read()
                    response.raise_for_status()
                slow.probes_s.append(clock.now_s() - begin_s)
            except (aiohttp.ClientError, TimeoutError):
                slow.num_probes_failed += 1
            await pause(PROBE_EVERY_S)

    async with asyncio.TaskGroup() as group:
        group.create_task(probe())
        for index in range(num):
            group.create_task(one(index % 3))
    return slow


async def _drip_until(
    end_s: float,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    mode: int,
    clock: Clock,
) -> bool:
    """Sends nothing, a head or a body, one byte at a time. Returns True if the server closed the
    connection.
    """
    drips = [b"", b"x", b" "][mode]
    if mode:
        writer.write(HEAD)
    if mode == 2:
        writer.write(b"Content-Length: 100000\r\n\r\n{")
    elif mode == 1:
        writer.write(b"X-Slow: ")
    while clock.now_s() < end_s:
        try:
            async with asyncio.timeout(DRIP_EVERY_S):
                if not await reader.read(4096):
                    return True
        except TimeoutError:
            writer.write(drips)
        except OSError:
            return True
    return False


def _request(rng: random.Random) -> bytes:
    length = rng.choice((4, 200))
    body = b'{"prompt":"def f(","stream":true,"ignore_eos":true,"max_tokens":%d}' % length
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def _connected(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
    """Opens a new connection to the server. Returns None if the server accepts none in time."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            return await asyncio.open_connection(parts.hostname, parts.port)
    except (OSError, TimeoutError):
        return None


async def _all(
    items: Iterator[T], one: Callable[[T], Coroutine[Any, Any, None]], at_once: int
) -> None:
    async def send_some() -> None:
        for item in items:
            await one(item)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(send_some())
