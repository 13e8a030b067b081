"""Honest clients in a process of their own: `python -m bench.hostile.honest URL STREAMS`.

Each client streams one answer after the other. For each gap between two chunks of `TOLD_S` or
longer, standard output gets a line of JSON `[begin_s, end_s]`, in seconds of the machine's
monotonic clock. An answer that ends wrongly gives a line `"broken: …"`. The process runs until its
standard input ends. Hostile clients that are short of CPU cannot delay these measurements.
"""

import asyncio
import sys

import aiohttp
import uvloop

from bench.common.waiting import pause
from bench.processes.driven import tell_parent
from engine.clock import MonotonicClock

TOLD_S = 0.02
TIMEOUT_S = 120.0
RETRY_S = 1.0
BODY = {
    "prompt": "def f(x):",
    "max_tokens": 1500,
    "ignore_eos": True,
    "stream": True,
    "temperature": 0.7,
}


async def _stream(session: aiohttp.ClientSession, url: str) -> None:
    """Streams one answer and tells of its gaps. Raises ClientError."""
    clock = MonotonicClock()
    tail = b""
    async with session.post(f"{url}/v1/completions", json=BODY) as response:
        response.raise_for_status()
        last_s: float | None = None
        async for piece in response.content.iter_any():
            now_s = clock.now_s()
            if last_s is not None and now_s - last_s >= TOLD_S:
                tell_parent([last_s, now_s])
            last_s, tail = now_s, (tail + piece)[-64:]
    if not tail.rstrip().endswith(b"data: [DONE]"):
        tell_parent(f"broken: the stream ended with {tail!r}")


async def _streams(session: aiohttp.ClientSession, url: str) -> None:
    while True:
        try:
            await _stream(session, url)
        except (aiohttp.ClientError, TimeoutError) as error:
            tell_parent(f"broken: {error!r}")
            await pause(RETRY_S)


async def _run(url: str, num_streams: int) -> None:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        streams = [asyncio.create_task(_streams(session, url)) for _ in range(num_streams)]
        await asyncio.to_thread(sys.stdin.buffer.read)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


if __name__ == "__main__":
    uvloop.run(_run(sys.argv[1], int(sys.argv[2])))
