"""A server whose latencies are known: `python -m bench.clients.server TTFT_MS ITL_MS`.

It answers both OpenAI endpoints with `max_tokens` chunks. The first is due TTFT_MS after the
request, and each other one ITL_MS after the one before. Due times of a stream are fixed as it
begins, so lateness does not add up. It prints its port, and ends with its standard input.
`/window` tells the times of the first request and of the last answer's end since it was last asked.
"""

import asyncio
import json
import sys
import threading

import uvloop
from aiohttp import web

from engine.clock import MonotonicClock

CLOCK = MonotonicClock()
MODEL = "known"


def chunk_of(path: str, finish: str | None) -> bytes:
    """One event with one word."""
    text = None if finish else " word"
    choice = {"index": 0, "text": text or "", "delta": {"content": text}, "finish_reason": finish}
    kind = "chat.completion.chunk" if path.endswith("chat/completions") else "text_completion"
    event = {"id": "known", "object": kind, "created": 0, "model": MODEL, "choices": [choice]}
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def usage_of(path: str, num_prompt: int, num_tokens: int) -> bytes:
    """The event with the counts, and the end of the stream."""
    usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt + num_tokens,
    }
    event = {"id": "known", "object": path, "created": 0, "model": MODEL, "choices": []}
    return b"data: " + json.dumps(event | {"usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"


class KnownServer:
    """Answers with these latencies, in seconds."""

    def __init__(self, ttft_s: float, itl_s: float) -> None:
        self._ttft_s = ttft_s
        self._itl_s = itl_s
        self._window: list[float] = []  # its two ends; empty before the first request
        self.app = web.Application(client_max_size=2**26)
        self.app.router.add_get("/health", self._healthy)
        self.app.router.add_get("/window", self._tell_window)
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_post("/v1/completions", self._answer)
        self.app.router.add_post("/v1/chat/completions", self._answer)

    async def _healthy(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _tell_window(self, request: web.Request) -> web.Response:
        window, self._window = self._window, []
        return web.json_response(window)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        began_s = CLOCK.now_s()
        self._window = self._window or [began_s, began_s]
        body = await request.json()
        num_tokens = int(body.get("max_completion_tokens") or body.get("max_tokens") or 16)
        prompt = body.get("prompt") or json.dumps(body.get("messages"))
        num_prompt = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await self._stream(response, request.path, num_tokens, began_s)
            await response.write(usage_of(request.path, num_prompt, num_tokens))
        except ConnectionError:  # the client has left: nothing is owed to it
            pass
        self._window = [*self._window[:1], CLOCK.now_s()]
        return response

    async def _stream(
        self, response: web.StreamResponse, path: str, num_tokens: int, began_s: float
    ) -> None:
        event = chunk_of(path, None)
        for number in range(num_tokens):
            due_s = began_s + self._ttft_s + number * self._itl_s
            await asyncio.sleep(max(due_s - CLOCK.now_s(), 0.0))  # noqa: TID251 (what it is for)
            await response.write(event)
        await response.write(chunk_of(path, "length"))


async def _serve(ttft_s: float, itl_s: float) -> None:
    runner = web.AppRunner(KnownServer(ttft_s, itl_s).app, shutdown_timeout=1, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(json.dumps({"port": runner.addresses[0][1]}), flush=True)  # noqa: T201 (for its parent)
    ended, loop = asyncio.Event(), asyncio.get_running_loop()

    def wait_for_the_end() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    await ended.wait()
    await runner.cleanup()


if __name__ == "__main__":
    uvloop.run(_serve(float(sys.argv[1]) / 1e3, float(sys.argv[2]) / 1e3))
