"""Waits for a duration, or until a condition is true."""

import asyncio
from collections.abc import Awaitable, Callable

from engine.clock import Clock

POLL_EVERY_S = 0.25


async def pause(seconds: float) -> None:
    """Sleeps for `seconds`. Returns at once if `seconds` is not above 0."""
    await asyncio.sleep(max(0.0, seconds))  # noqa: TID251 (see above)


async def holds_within(
    holds: Callable[[], Awaitable[bool]], deadline_s: float, clock: Clock
) -> bool:
    """Polls `holds` until it returns True, and returns True. Returns False after `deadline_s`
    seconds.
    """
    end_s = clock.now_s() + deadline_s
    while not await holds():
        if clock.now_s() >= end_s:
            return False
        await pause(POLL_EVERY_S)
    return True
