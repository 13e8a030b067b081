"""Waiting, for those for whom time itself is the event: a fault has its time, a poll its pace."""

import asyncio
from collections.abc import Awaitable, Callable

from engine.clock import Clock

POLL_EVERY_S = 0.25


async def pause(seconds: float) -> None:
    """Lets so much time pass, if it is any."""
    await asyncio.sleep(max(0.0, seconds))  # noqa: TID251 (see above)


async def holds_within(
    holds: Callable[[], Awaitable[bool]], deadline_s: float, clock: Clock
) -> bool:
    """Whether it came to hold before so many seconds were over."""
    end_s = clock.now_s() + deadline_s
    while not await holds():
        if clock.now_s() >= end_s:
            return False
        await pause(POLL_EVERY_S)
    return True
