"""Honest clients in a process of their own: `python -m bench.hostile.honest URL STREAMS`.

Each client streams one long answer after the other; one additional client streams short answers. If
a gap between two chunks is `TOLD_S` or longer, the process prints a line of JSON `[begin_s, end_s,
is_first]`, in seconds of the machine's monotonic clock. `is_first` is true if the gap was the wait
for the first chunk of a short answer, whose body the server parses in a thread. For an answer that
ends incorrectly, the process prints a line `"broken: …"`. The process runs until its standard input
is closed. Because it is a separate process, busy hostile clients cannot delay these measurements.
"""

import asyncio
import sys

import aiohttp
import uvloop

from bench.common.waiting import pause
from bench.hostile.corpus import HONEST_KEY, bearer
from bench.processes.driven import answer_parent
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
SHORT = {"prompt": "def f(x): # fox\n" * 320, "max_tokens": 8}  # a body of 5 kB


async def _stream(session: aiohttp.ClientSession, url: str, *, is_short: bool) -> None:
    """Streams one answer and prints its long gaps. Raises ClientError."""
    clock = MonotonicClock()
    tail = b""
    body = BODY | SHORT if is_short else BODY
    last_s = clock.now_s() if is_short else None
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for piece in response.content.iter_any():
            now_s = clock.now_s()
            if last_s is not None and now_s - last_s >= TOLD_S:
                answer_parent([last_s, now_s, is_short and not tail])
            last_s, tail = now_s, (tail + piece)[-64:]
    if not tail.rstrip().endswith(b"data: [DONE]"):
        answer_parent(f"broken: the stream ended with {tail!r}")


async def _streams(session: aiohttp.ClientSession, url: str, *, is_short: bool) -> None:
    while True:
        try:
            await _stream(session, url, is_short=is_short)
        except (aiohttp.ClientError, TimeoutError) as error:
            answer_parent(f"broken: {error!r}")
            await pause(RETRY_S)


async def _run(url: str, num_streams: int) -> None:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, headers=bearer(HONEST_KEY)) as session:
        streams = [
            asyncio.create_task(_streams(session, url, is_short=not number))
            for number in range(num_streams + 1)
        ]
        await asyncio.to_thread(sys.stdin.buffer.read)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


if __name__ == "__main__":
    uvloop.run(_run(sys.argv[1], int(sys.argv[2])))
