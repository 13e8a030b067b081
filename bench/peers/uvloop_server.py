"""A minimal server of streams in Python: `python bench/peers/uvloop_server.py WAY`.

It writes the same frames as a gateway, with one write per token. It parses only the HTTP that its
one client sends. With WAY `tasks`, each stream has a coroutine that sleeps between tokens, as in
most such servers. With WAY `ticks`, one timer writes to all streams. Then only the writes cost
time, which no server can avoid.

The body of a request has `max_tokens`, and in `user` the seconds between tokens. The server runs
without Baton. It announces its address in the protocol of `driver.py`, and ends when its standard
input is closed.
"""

import asyncio
import json
import os
import sys
import time
from typing import Any

import uvloop

TICK_S = 0.01
TEXT = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk",'
    b'"created":1700000000,"model":"m","system_fingerprint":"null-fp32","choices":[{"index":0,'
    b'"delta":{"content":" token"},"logprobs":null,"finish_reason":null}]}\n\n'
)
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)


def chunk(data: bytes) -> bytes:
    """Returns the data as a chunk in HTTP/1.1's chunked coding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


TOKEN = chunk(TEXT)
DONE = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Ticker:
    """The streams by the time of their next token. A stream is [transport, tokens left, steps, due
    step].
    """

    def __init__(self) -> None:
        self.streams: list[list[Any]] = []
        self._num_steps = 0

    def add(self, transport: Any, num_left: int, pace_s: float) -> None:
        """Adds a stream."""
        steps = max(1, round(pace_s / TICK_S))
        self.streams.append([transport, num_left, steps, self._num_steps + steps])

    async def run(self) -> None:
        """Writes a token to each stream that is due, for ever."""
        due_s = time.perf_counter()
        while True:
            due_s = max(due_s + TICK_S, time.perf_counter())
            await asyncio.sleep(due_s - time.perf_counter())  # noqa: TID251
            self._num_steps += 1
            for stream in self.streams:
                if stream[3] > self._num_steps:
                    continue
                stream[1] -= 1
                stream[3] += stream[2]
                stream[0].write(TOKEN if stream[1] else TOKEN + DONE)
            self.streams = [stream for stream in self.streams if stream[1] > 0]


class BareConnection(asyncio.Protocol):
    """The connection of one client."""

    def __init__(self, ticker: "Ticker | None") -> None:
        self._ticker = ticker
        self._received = b""

    def connection_made(self, transport: Any) -> None:
        """Stores the transport of a new client."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Handles a request, or waits for the rest of it."""
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        if not found or len(body) < int(length or 0):
            return
        self._received = b""
        if not length:  # a request without a body tests whether the server is ready
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            return
        self._begin(json.loads(body))

    def _begin(self, body: dict[str, Any]) -> None:
        num_tokens, pace_s = body["max_tokens"], float(body["user"])
        first = HEAD + TOKEN
        if num_tokens == 1:
            self._transport.write(first + DONE)
        elif self._ticker is not None:
            self._transport.write(first)
            self._ticker.add(self._transport, num_tokens - 1, pace_s)
        else:
            self._transport.write(first)
            self._task = asyncio.ensure_future(self._stream(num_tokens - 1, pace_s))

    async def _stream(self, num_tokens: int, pace_s: float) -> None:
        for _ in range(num_tokens):
            await asyncio.sleep(pace_s)  # noqa: TID251
            self._transport.write(TOKEN)
        self._transport.write(DONE)


async def main() -> None:
    """Serves requests until standard input is closed."""
    loop = asyncio.get_running_loop()
    ticker = Ticker() if sys.argv[1] == "ticks" else None
    server = await loop.create_server(lambda: BareConnection(ticker), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    print(json.dumps({"ready": {"port": port}}), flush=True)  # noqa: T201
    ticking = asyncio.ensure_future(ticker.run()) if ticker else None
    await asyncio.to_thread(sys.stdin.read)
    if ticking:
        ticking.cancel()
    os._exit(0)


if __name__ == "__main__":
    uvloop.run(main())
