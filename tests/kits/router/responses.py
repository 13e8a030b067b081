"""Shared by the tests of responses: OpenAI's client in front of an app in this process."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx
from openai import AsyncOpenAI

T = TypeVar("T")
CONTEXT_LEN = 4096


def client_of(app: Any, key: str = "unused") -> AsyncOpenAI:
    transport = httpx.ASGITransport(app=app)
    return AsyncOpenAI(
        base_url="http://test/v1",
        api_key=key,
        max_retries=0,
        http_client=httpx.AsyncClient(transport=transport),
    )


def with_client(app: Any, use: Callable[[AsyncOpenAI], Awaitable[T]]) -> T:
    """Runs `use` with a client of the app, on an event loop of its own."""

    async def run() -> T:
        async with client_of(app) as client:
            return await use(client)

    return asyncio.run(run())


async def until(holds: Callable[[], Awaitable[bool]], turns: int = 2000) -> None:
    """Lets other tasks run until this holds."""
    for _ in range(turns):
        if await holds():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never held")
