"""Kit of the response tests: OpenAI's client in front of an app in this process."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx
from openai import AsyncOpenAI

from router.access.file import KeyFile
from router.gateway.background import BackgroundWork
from router.gateway.storage import Storage
from tests.kits.router.gateway import FakeRouter, create_app, settings_of, versions_of

T = TypeVar("T")
CONTEXT_LEN = 4096


def client_of(app: Any, key: str = "unused") -> AsyncOpenAI:
    transport = httpx.ASGITransport(app=app)
    return AsyncOpenAI(
        base_url="http://localhost/v1",
        api_key=key,
        max_retries=0,
        http_client=httpx.AsyncClient(transport=transport),
    )


def with_client(app: Any, use: Callable[[AsyncOpenAI], Awaitable[T]]) -> T:
    """Calls `use` with a client of the app, on a new event loop."""

    async def run() -> T:
        async with client_of(app) as client:
            return await use(client)

    return asyncio.run(run())


async def until(holds: Callable[[], Awaitable[bool]], num_turns: int = 2000) -> None:
    """Waits until the condition holds, at most some seconds: the store answers from a thread."""
    for _ in range(num_turns):
        if await holds():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it never held")


def app_on(
    router: FakeRouter,
    storage: Storage,
    seed: int = 1,
    *,
    background: BackgroundWork | None = None,
    keys: KeyFile | None = None,
    **settings: Any,
) -> Any:
    """Returns an application that stores responses in `storage`; `seed` determines the ids."""
    return create_app(
        versions_of(router, context_len=CONTEXT_LEN),
        settings=settings_of(**settings),
        clock=router.clock,
        rng=random.Random(seed),
        storage=storage,
        background=background,
        keys=keys,
    )
