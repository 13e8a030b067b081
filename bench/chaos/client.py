"""A client that sends a request again if its connection breaks, and the loads of `bench chaos`.

When a gateway process dies, its connections break. The client then connects again, to another
gateway process, and sends the same request with the same seed. The answer must be the same, so the
client skips the part that it has already read. No other failure makes the client repeat a request:
a refusal, an error or a stream that ends early counts as the server's answer. During restarts of
all gateways, refused connections are retried.
"""

import asyncio
from collections import deque
from collections.abc import Sequence

import aiohttp

from bench.chaos.checker import disorder
from bench.chaos.streams import ChaosRequest, ReceivedStream, StreamReader
from bench.common.waiting import pause
from engine.clock import Clock
from engine.errors import BatonError

MAX_SENDS = 5
KNOCK_EVERY_S = 0.25
HEADERS = {"Content-Type": "application/json", "X-Baton-Timeline": "1"}


class _NotReady(Exception):
    """The gateway accepts connections, but it does not know any worker yet."""


class ReconnectingClient:
    """A client of one server. Each connection carries one request."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        clock: Clock,
        *,
        refused_for_s: float = 0.0,
    ) -> None:
        """Sets up the client. `refused_for_s` is the longest time in which connections may be
        refused.
        """
        self._refused_for_s = refused_for_s
        self._session = session
        self._url = url
        self._clock = clock

    async def ask(self, ask: ChaosRequest) -> list[ReceivedStream]:
        """Sends a request, again if its connection breaks. Returns all its streams; only the last
        can be complete.
        """
        streams = [await self._send(ask)]
        while streams[-1].is_broken and len(streams) < MAX_SENDS:
            streams.append(await self._send(ask))
        return streams

    async def _send(self, ask: ChaosRequest) -> ReceivedStream:
        begun_s = self._clock.now_s()
        while True:
            stream, was_refused = await self._send_once(ask, begun_s)
            if not was_refused or self._clock.now_s() - begun_s >= self._refused_for_s:
                return stream
            await pause(KNOCK_EVERY_S)

    async def _send_once(self, ask: ChaosRequest, begun_s: float) -> tuple[ReceivedStream, bool]:
        """Sends a request once. Returns the stream, and True if no gateway was ready to serve
        it.
        """
        reader = StreamReader(begun_s)
        try:
            return await self._read(ask, reader), False
        except (aiohttp.ClientConnectorError, _NotReady) as error:
            return reader.fail(str(error), self._clock.now_s()), True

    async def _read(self, ask: ChaosRequest, reader: StreamReader) -> ReceivedStream:
        clock = self._clock
        try:
            async with self._session.post(
                f"{self._url}{ask.path}", data=ask.body, headers=HEADERS
            ) as response:
                if response.status == 503 and self._refused_for_s:
                    raise _NotReady(f"status 503: {await response.text()}")
                if response.status != 200:
                    said = " ".join((await response.text(errors="replace"))[:300].split())
                    return reader.refuse(f"status {response.status}: {said}", clock.now_s())
                async for piece in response.content.iter_any():
                    reader.feed(piece, clock.now_s())
        except TimeoutError:
            return reader.refuse("it did not end in time", clock.now_s())
        except aiohttp.ClientConnectorError:
            raise
        except aiohttp.ClientError as error:
            return reader.fail(str(error) or type(error).__name__, clock.now_s())
        return reader.finish(clock.now_s())


# ---------------------------------------------------------------- loads

AT_ONCE = 8  # concurrent requests of the undisturbed run, whose times are not compared


class NotUndisturbed(BatonError):
    """The undisturbed run has incomplete answers, so its answers cannot serve as a reference."""


async def undisturbed(
    client: ReconnectingClient, asked: Sequence[ChaosRequest]
) -> list[ReceivedStream]:
    """Plays all requests without faults and returns every answer. Raises NotUndisturbed if an
    answer is not complete.
    """
    waiting = deque(enumerate(asked))
    found: dict[int, ReceivedStream] = {}

    async def worker() -> None:
        while waiting:
            number, ask = waiting.popleft()
            found[number] = (await client.ask(ask))[0]

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(worker())
    for number, ask in enumerate(asked):
        if (what := disorder(found[number], ask.num_choices)) is not None:
            raise NotUndisturbed(f"request {number}, {ask.kind}, undisturbed: {what}")
    return [found[number] for number in range(len(asked))]


async def open_loop(
    client: ReconnectingClient, asked: Sequence[ChaosRequest], due_s: Sequence[float], clock: Clock
) -> list[list[ReceivedStream]]:
    """Sends each request at its due time, without waiting for earlier requests. Returns all
    streams.
    """
    start_s = clock.now_s()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for ask, after_s in zip(asked, due_s, strict=True):
            await pause(start_s + after_s - clock.now_s())
            tasks.append(group.create_task(client.ask(ask)))
    return [task.result() for task in tasks]
