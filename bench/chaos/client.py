"""A client that repeats a request if its connection breaks.

A gateway process that dies takes its connections with it. The client then connects again, which
leads to another process, and sends the same request with the same seed. The answer is the same, so
the part that was read before is skipped. Nothing else is repeated: a refusal, an error or a stream
that ends early is the server's answer.
"""

import aiohttp

from bench.chaos.asks import ChaosRequest
from bench.chaos.streams import ReceivedStream, StreamReader
from engine.clock import Clock

MAX_SENDS = 5
HEADERS = {"Content-Type": "application/json", "X-Baton-Timeline": "1"}


class ReconnectingClient:
    """One server, over connections that each carry one request."""

    def __init__(self, session: aiohttp.ClientSession, url: str, clock: Clock) -> None:
        self._session = session
        self._url = url
        self._clock = clock

    async def ask(self, ask: ChaosRequest) -> list[ReceivedStream]:
        """Returns all streams of a request; only the last can be complete."""
        streams = [await self._send(ask)]
        while streams[-1].is_broken and len(streams) < MAX_SENDS:
            streams.append(await self._send(ask))
        return streams

    async def _send(self, ask: ChaosRequest) -> ReceivedStream:
        clock = self._clock
        reader = StreamReader(clock.now_s())
        try:
            async with self._session.post(
                f"{self._url}{ask.path}", data=ask.body, headers=HEADERS
            ) as response:
                if response.status != 200:
                    said = " ".join((await response.text(errors="replace"))[:300].split())
                    return reader.refuse(f"status {response.status}: {said}", clock.now_s())
                async for piece in response.content.iter_any():
                    reader.feed(piece, clock.now_s())
        except TimeoutError:
            return reader.refuse("it did not end in time", clock.now_s())
        except aiohttp.ClientError as error:
            return reader.fail(str(error) or type(error).__name__, clock.now_s())
        return reader.finish(clock.now_s())
