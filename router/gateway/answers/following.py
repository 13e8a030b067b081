"""Follows the choices of an answer to their ends and writes what is to be shown of them."""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

from engine.clock import Clock
from engine.messages import SeqId
from router.edge.exchange import BodyPipe
from router.gateway.answers.choice import AnswerChoice, AnswerPiece
from router.gateway.answers.stream import StreamedAnswer
from router.gateway.answers.writing import AnswerWriter
from router.inbox.loop_turns import Turn
from router.inbox.task_groups import LightTaskGroup
from router.machine.requests import Update
from router.port import OpenLane, RequestPort, StepTaker, open_no_lane
from router.text.native.step import BatchedText

LONG_PROMPT_TOKENS = 2048  # hashing and encoding them takes some 0.3 ms
MAX_OPEN = 128  # requests of one call that the router has at once


def follow(
    port: RequestPort,
    clock: Clock,
    choices: Sequence[AnswerChoice],
    writer: AnswerWriter,
    turn: Turn,
) -> Coroutine[Any, Any, AnswerPiece]:
    """Submits the request of each choice and writes its pieces, but not the last one.

    Updates that a slow client has not taken are joined. They are then written in parts, each in a
    `turn` of its own.

    Returns the last piece of the answer, which has an outcome. So the iterator is closed, and a
    request that a stop string ended is cancelled, before anything waits for the client to take the
    end of the answer.
    """
    takers = (_UpdateTaker(choice, writer, clock, turn) for choice in choices)
    if len(choices) == 1:
        taker = next(takers)
        return taker.follow(port, taker.open_lane)
    return _follow_all(port, takers, len(choices), writer)


async def _follow_all(
    port: RequestPort, takers: Iterator["_UpdateTaker"], num_open: int, writer: AnswerWriter
) -> AnswerPiece:
    """Returns the last piece of the choice that ends last, or of the first one that fails.

    Leaders come before followers, and `num_open` are followed in all. If a choice fails, the
    others are cancelled. A choice waits until its piece is taken, so a client that reads slowly
    gets larger pieces.
    """
    end: asyncio.Future[AnswerPiece] = asyncio.get_running_loop().create_future()

    async def follow_some() -> None:
        nonlocal num_open
        for taker in takers:
            if len(taker.choice.request.token_ids) > LONG_PROMPT_TOKENS:
                await taker.turn()  # the router hashes its blocks and encodes it
            last = await taker.follow(port)
            num_open -= 1
            if num_open and last.finish is not None:
                await writer.write(last)
            elif not end.done():
                end.set_result(last)
            if end.done():
                return

    async with LightTaskGroup() as group:
        num_tasks = min(MAX_OPEN, num_open)
        tasks = [group.create_task(follow_some()) for _ in range(num_tasks)]
        last = await end
        if last.finish is None:
            for task in tasks:
                task.cancel()
    return last


class _UpdateTaker:
    """Turns the updates of one choice into pieces and writes them."""

    def __init__(
        self, choice: AnswerChoice, writer: AnswerWriter, clock: Clock, turn: Turn
    ) -> None:
        self.choice = choice
        self.turn = turn
        self._writer = writer
        self._clock = clock
        self._is_plain = choice.is_plain and writer.shows_text_alone
        self._stream = writer if isinstance(writer, StreamedAnswer) else None
        self._batch = None if self._stream is None else self._stream.batch
        self._batched: tuple[BatchedText, BodyPipe] | None = None  # what the batch takes tokens for
        self._last: AnswerPiece | None = None  # of an answer that a stop string ended

    async def follow(self, port: RequestPort, open_lane: OpenLane = open_no_lane) -> AnswerPiece:
        """Submits the request, writes its pieces and returns the last one."""
        request = self.choice.request
        updates = port.submit(request, self._take_at_once, self._take_tokens, open_lane)
        try:
            async for update in updates:
                if self.choice.waits_for_prompt:
                    await self.choice.prompt.wait()
                last = await self._take(update)
                if last is not None:
                    return last
        finally:
            await updates.aclose()
        raise AssertionError("the router's iterator ended without an outcome")

    async def _take(self, update: Update) -> AnswerPiece | None:
        """Writes an update. Returns the last piece of the choice instead of writing it."""
        if self._last is not None:
            return self._last
        num_at_once = self.choice.num_at_once
        is_long = len(update.token_ids) > num_at_once
        for part in update.parts(num_at_once):
            if is_long:
                await self.turn()
            piece = self.choice.take(part, self._clock.now_s())
            if piece.outcome is not None:
                return piece
            if part.token_ids:
                await self._writer.write(piece)
        return None

    def open_lane(self, seq_id: SeqId) -> StepTaker | None:
        """Opens a lane if the last tokens went to the batch and nothing waits to be sent."""
        batched, batch = self._batched, self._batch
        if batched is None or batch is None or not batch.open_lane(seq_id, batched):
            return None
        return batch

    def _take_at_once(self, update: Update) -> bool:
        """Writes this update without waiting; returns False if that is not possible."""
        writer = self._writer
        choice = self.choice
        if update.outcome is not None or not writer.is_ready or choice.begins_with_scores:
            return False
        if len(update.token_ids) > choice.num_at_once:
            return False
        piece = choice.take(update, self._clock.now_s())
        if piece.outcome is not None:
            self._last = piece
            return False
        writer.write_at_once(piece)
        return True

    def _take_tokens(self, token_ids: Sequence[int], now_s: float) -> bool:
        """Writes tokens without waiting; returns False if that is not possible.

        Most tokens go this way.
        """
        if (batched := self._batched) is not None:
            batch, stream = self._batch, self._stream
            assert batch is not None
            assert stream is not None
            if not (stream.is_open and batched[1].is_ready):  # `is_ready`, without a call
                return False
            batch.add(batched, token_ids, now_s)
            return True
        choice, writer = self.choice, self._writer
        if not (self._is_plain and writer.is_ready):
            return False
        if self._join_batch():
            return self._take_tokens(token_ids, now_s)
        if text := choice.take_tokens(token_ids, now_s):
            writer.write_text(choice.index, text)
        return True

    def _join_batch(self) -> bool:
        """Prepares the choice for `TextBatch`; returns False if it cannot be."""
        batch, stream, choice = self._batch, self._stream, self.choice
        if batch is None or not choice.num_tokens:
            return False
        assert stream is not None
        pipe, frame = stream.frame_of(choice.index)
        text = choice.batched(frame, batch.flush)
        if text is None:
            self._batch = None
            return False
        self._batched = text, pipe
        return True
