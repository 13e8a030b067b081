"""Follows the choices of an answer to their ends and writes what is to be shown of them."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial

from engine.clock import Clock
from router.gateway.answers.choice import AnswerChoice, AnswerPiece
from router.gateway.answers.stream import StreamedAnswer
from router.gateway.answers.writing import AnswerWriter
from router.machine.requests import Update
from router.port import RequestPort

AddTokens = Callable[[Sequence[int], float], None]

MAX_OPEN = 128  # requests of one call that the router has at once


async def follow(
    port: RequestPort, clock: Clock, choices: Sequence[AnswerChoice], writer: AnswerWriter
) -> AnswerPiece:
    """Submits the request of each choice and writes its pieces, but not the last one.

    Returns the last piece of the answer, which has an outcome. So the iterator is closed, and a
    request that a stop string ended is cancelled, before anything waits for the client to take the
    end of the answer.
    """
    takers = [_UpdateTaker(choice, writer, clock) for choice in choices]
    if len(takers) == 1:
        return await takers[0].follow(port)
    return await _follow_all(port, takers, writer)


async def _follow_all(
    port: RequestPort, takers: Sequence["_UpdateTaker"], writer: AnswerWriter
) -> AnswerPiece:
    """Returns the last piece of the choice that ends last, or of the first one that fails.

    If a choice fails, the others are cancelled. A choice waits until its piece is taken, so a
    client that reads slowly gets larger pieces.
    """
    num_open = len(takers)
    room = asyncio.Semaphore(MAX_OPEN)  # first come, first served: leaders come before followers
    end: asyncio.Future[AnswerPiece] = asyncio.get_running_loop().create_future()

    async def follow_one(taker: _UpdateTaker) -> None:
        nonlocal num_open
        async with room:
            last = await taker.follow(port)
        num_open -= 1
        if num_open and last.finish is not None:
            await writer.write(last)
        elif not end.done():
            end.set_result(last)

    async with asyncio.TaskGroup() as group:
        # The leader's task comes first.
        tasks = [group.create_task(follow_one(taker)) for taker in takers]
        last = await end
        if last.finish is None:
            for task in tasks:
                task.cancel()
    return last


class _UpdateTaker:
    """Turns the updates of one choice into pieces and writes them."""

    def __init__(self, choice: AnswerChoice, writer: AnswerWriter, clock: Clock) -> None:
        self._choice = choice
        self._writer = writer
        self._clock = clock
        self._is_plain = choice.is_plain and writer.shows_text_alone
        self._batch = writer.batch if isinstance(writer, StreamedAnswer) else None
        self._add: AddTokens | None = None  # puts tokens into the batch
        self._last: AnswerPiece | None = None  # of an answer that a stop string ended

    async def follow(self, port: RequestPort) -> AnswerPiece:
        """Submits the request, writes its pieces and returns the last one."""
        updates = port.submit(self._choice.request, self._take_at_once, self._take_tokens)
        async with aclosing(updates):
            async for update in updates:
                if self._choice.waits_for_prompt:
                    await self._choice.prompt.wait()
                piece = self._last or self._choice.take(update, self._clock.now_s())
                if piece.outcome is not None:
                    return piece
                if update.token_ids:
                    await self._writer.write(piece)
        raise AssertionError("the router's iterator ended without an outcome")

    def _take_at_once(self, update: Update) -> bool:
        """Writes this update without waiting; returns False if that is not possible."""
        writer = self._writer
        if update.outcome is not None or not writer.is_ready or self._choice.waits_for_prompt:
            return False
        piece = self._choice.take(update, self._clock.now_s())
        if piece.outcome is not None:
            self._last = piece
            return False
        writer.write_at_once(piece)
        return True

    def _take_tokens(self, token_ids: Sequence[int], now_s: float) -> bool:
        """Writes tokens without waiting; returns False if that is not possible.

        Most tokens go this way.
        """
        choice, writer = self._choice, self._writer
        if not (self._is_plain and writer.is_ready):
            return False
        if (add := self._add or self._batched()) is not None:
            add(token_ids, now_s)
        elif text := choice.take_tokens(token_ids, now_s):
            writer.write_text(choice.index, text)
        return True

    def _batched(self) -> AddTokens | None:
        """Prepares the choice for `TextBatch`; returns None if it cannot be."""
        batch, writer, choice = self._batch, self._writer, self._choice
        if batch is None or not choice.num_tokens:
            return None
        assert isinstance(writer, StreamedAnswer)
        pipe, frame = writer.frame_of(choice.index)
        text = choice.batched(frame, batch.flush)
        if text is None:
            self._batch = None
            return None
        self._add = partial(batch.add, text, pipe)
        return self._add
