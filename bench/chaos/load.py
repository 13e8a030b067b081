"""Sends requests: undisturbed, to learn the answers, and at a fixed rate."""

import asyncio
from collections import deque
from collections.abc import Sequence

from bench.chaos.asks import ChaosRequest
from bench.chaos.checker import disorder
from bench.chaos.client import ReconnectingClient
from bench.chaos.streams import ReceivedStream
from bench.common.waiting import pause
from engine.clock import Clock
from engine.errors import BatonError

AT_ONCE = 8  # requests of the undisturbed run, where their times do not matter


class NotUndisturbed(BatonError):
    """The undisturbed run is not clean, so there is nothing to compare with."""


async def undisturbed(
    client: ReconnectingClient, asked: Sequence[ChaosRequest]
) -> list[ReceivedStream]:
    """Returns every answer. Raises NotUndisturbed if an answer is not complete."""
    waiting = deque(enumerate(asked))
    found: dict[int, ReceivedStream] = {}

    async def worker() -> None:
        while waiting:
            number, ask = waiting.popleft()
            found[number] = (await client.ask(ask))[0]

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(worker())
    for number, ask in enumerate(asked):
        if (what := disorder(found[number], ask.num_choices)) is not None:
            raise NotUndisturbed(f"request {number}, {ask.kind}, undisturbed: {what}")
    return [found[number] for number in range(len(asked))]


async def open_loop(
    client: ReconnectingClient, asked: Sequence[ChaosRequest], due_s: Sequence[float], clock: Clock
) -> list[list[ReceivedStream]]:
    """Sends each request when it is due and waits for no earlier one; returns all streams."""
    start_s = clock.now_s()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for ask, after_s in zip(asked, due_s, strict=True):
            await pause(start_s + after_s - clock.now_s())
            tasks.append(group.create_task(client.ask(ask)))
    return [task.result() for task in tasks]
