"""Sessions of tests: a server that echoes frames, and tests whose loop gRPC leaves tasks in."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from engine.net.rpc import Send, SessionClient
from engine.net.trust import Secret

SECRET = Secret("token")
DEADLINE_S = 20.0


def with_grpc(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a coroutine test in a loop of its own. Does not check for tasks left behind: those of
    gRPC end a moment after the call or server that they belong to.
    """

    @functools.wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        asyncio.run(test(*arguments, **fixtures))

    return run


async def echo(frames: AsyncIterator[bytes], send: Send) -> None:
    async for frame in frames:
        await send(frame)


async def check_echo(client: SessionClient) -> None:
    await client.send(b"a")
    assert await client.receive() == b"a"
