"""Sends requests to a server and times their streams: `python -m bench.lab.gateway.client`.

The client runs in its own process. It parses as little of an answer as possible, because a client
that parsed everything would be the bottleneck. It expects HTTP/1.1 in chunks, in which all events
except `[DONE]` begin with `data: {`.

It uses the protocol of `bench.peers.driver`, with `stream` as the only command.
"""

import asyncio
import sys
from collections import deque
from dataclasses import asdict, dataclass, field
from time import perf_counter, process_time
from typing import Any, cast

import msgspec
import uvloop

from bench.peers.driver import drive, stdout_for_answers

EVENT = b"data: {"
LAST_CHUNK = b"0\r\n\r\n"
TIMEOUT_S = 120.0


@dataclass(slots=True)
class _Seen:
    """Times and failures of all requests of one command."""

    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)  # seconds between two pieces of an answer
    num_events: int = 0


class _Connection(asyncio.Protocol):
    """A connection that sends one request after the other, until no request is left."""

    def __init__(self, left: deque[bytes], seen: _Seen) -> None:
        self._left = left
        self._seen = seen
        self._rest = b""  # last bytes, which may be the begin of an event
        self._sent_s = 0.0
        # arrival time of the previous piece; None before the first piece
        self._last_s: float | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport does not inherit from asyncio's
        self._transport = cast("asyncio.Transport", transport)
        self._send()

    def data_received(self, data: bytes) -> None:
        now_s = perf_counter()
        if self._last_s is not None:
            self._seen.gaps_s.append(now_s - self._last_s)
            self._last_s = now_s
        elif EVENT in data:
            self._seen.ttft_s.append(now_s - self._sent_s)
            self._last_s = now_s
        text = self._rest + data
        num_events = text.count(EVENT)
        self._seen.num_events += num_events
        self._rest = text[-len(EVENT) + 1 :] if len(text) >= len(EVENT) else text
        if text.endswith(LAST_CHUNK):
            self._receive_end()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the server closed the connection"))

    def _send(self) -> None:
        if not self._left:
            self.done.set_result(None)
            self._transport.close()
            return
        request = self._left.popleft()
        self._rest, self._last_s = b"", None
        self._sent_s = perf_counter()
        self._transport.write(request)

    def _receive_end(self) -> None:
        if self._last_s is None:
            self.done.set_exception(ConnectionError("an answer without an event"))
            self._transport.close()
            return
        self._send()


class StreamClient:
    """The client process. `bench.lab.gateway.study` drives it."""

    def __init__(self) -> None:
        self.facts: dict[str, object] = {}

    def stream(
        self, port: int, body: dict[str, Any], num_connections: int, num_requests: int, seed: int
    ) -> dict[str, Any]:
        """Sends all requests; each connection sends one at a time.

        Every body has a different `seed`. The servers use it to give different answers.
        """
        left = deque(_request(body, seed + i) for i in range(num_requests))
        seen: dict[str, Any] = uvloop.run(_stream(port, left, num_connections))
        return seen


async def _stream(port: int, left: deque[bytes], num_connections: int) -> dict[str, Any]:
    seen = _Seen()
    loop = asyncio.get_running_loop()
    begin_s, begin_cpu_s = perf_counter(), process_time()
    async with asyncio.timeout(TIMEOUT_S):
        connections = await asyncio.gather(
            *(
                loop.create_connection(lambda: _Connection(left, seen), "127.0.0.1", port)
                for _ in range(num_connections)
            )
        )
        await asyncio.gather(*(connection.done for _, connection in connections))
    return {
        **asdict(seen),
        "wall_s": perf_counter() - begin_s,
        "cpu_s": process_time() - begin_cpu_s,
    }


def _request(body: dict[str, Any], seed: int) -> bytes:
    data = msgspec.json.encode(body | {"seed": seed})
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    return head % len(data) + data


if __name__ == "__main__":
    drive(StreamClient, sys.stdin, stdout_for_answers())
