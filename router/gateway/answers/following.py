"""Submits the choices of an answer to the router, and writes their pieces until all have ended.

Most tokens are written in the router's call that delivers them: through C++ (`TextBatch`), or as
pieces. If a client reads too slowly, updates are kept and merged, and the task of the answer writes
the merged updates.
"""

import asyncio
from collections.abc import Sequence
from functools import partial

from engine.clock import Clock
from router.gateway.answers.batching import FastPath, TextBatch
from router.gateway.answers.choice import AnswerChoice, AnswerPiece
from router.gateway.answers.stream import StreamedAnswer
from router.gateway.answers.writing import AnswerWriter, write_and_wait
from router.inbox.fair_queue import Turn
from router.machine.requests import Update, joined
from router.port import Handle, RequestPort
from router.text.native import NativeText

LONG_PROMPT_TOKENS = 2048  # tokens; hashing and encoding such a prompt takes some 0.3 ms
MAX_OPEN = 128  # maximum requests of one call at the router at the same time


class Following:
    """Carries one answer from a router to a writer, with a sink for each choice."""

    def __init__(self, port: RequestPort, clock: Clock, writer: AnswerWriter, turn: Turn) -> None:
        """`turn` is awaited before each part of long work, so that tenants take turns."""
        self.clock = clock
        self.writer = writer
        self.turn = turn
        self._port = port
        self._due: list[ChoiceSink] = []  # sinks that the task has to flush
        self._waiter: asyncio.Future[None] | None = None  # the future that the task awaits

    async def run(self, choices: Sequence[AnswerChoice], batch: TextBatch | None) -> AnswerPiece:
        """Submits the request of each choice, and writes all pieces of the answer except the last.

        Returns the last piece of the choice that ends last, or of the first choice that fails. No
        request is running when this returns: a request that ended at a stop string is cancelled
        before the end of the answer is sent. The first request of each prompt is submitted before
        the others.
        """
        unsubmitted, num_left = iter(choices), len(choices)
        sinks: set[ChoiceSink] = set()
        try:
            while True:
                if len(sinks) < MAX_OPEN and (choice := next(unsubmitted, None)) is not None:
                    if len(choice.request.token_ids) > LONG_PROMPT_TOKENS:
                        await self.turn()  # the router hashes and encodes this long prompt
                    sink = ChoiceSink(self, choice, batch, is_alone=len(choices) == 1)
                    sinks.add(sink)
                    sink.handle = self._port.submit(choice.request, sink)
                elif not self._due:
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
                due, self._due = self._due, []
                for sink in due:
                    last = await sink.flush()
                    if last is None:
                        continue
                    sink.close()
                    sinks.remove(sink)
                    num_left -= 1
                    if not num_left or last.finish is None:
                        return last
                    await write_and_wait(self.writer, last)
        finally:
            for sink in sinks:
                sink.close()

    def wake(self, sink: "ChoiceSink") -> None:
        """Wakes the task so that it flushes this sink."""
        self._due.append(sink)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class ChoiceSink:
    """The sink of one choice.

    Passes tokens to C++, writes updates as pieces, or keeps updates for the task.
    """

    def __init__(
        self,
        following: Following,
        choice: AnswerChoice,
        batch: TextBatch | None,
        *,
        is_alone: bool,
    ) -> None:
        """`is_alone` is True if no other choice writes to the client."""
        self.choice = choice
        self.handle: Handle | None = None
        self._following = following
        self._writer = writer = following.writer
        self._is_alone = is_alone
        self._path: FastPath | None = None  # path through C++; None: Python handles all tokens
        pipe = writer.pipe if isinstance(writer, StreamedAnswer) else None
        if batch is not None and pipe is not None and isinstance(choice.state, NativeText):
            self._path = FastPath(batch, choice.state, pipe)
        self._is_fast = False  # True once C++ has the constant parts of a chunk
        self._is_due = False  # the task will flush; until then updates must be kept, not written
        self._unread: list[Update] = []
        self._last: AnswerPiece | None = None
        self._error: Exception | None = None

    def tokens(self, token_ids: Sequence[int], now_s: float) -> None:
        """Writes tokens, mostly through C++, or keeps the tokens for the task."""
        choice, path, writer = self.choice, self._path, self._writer
        if self._is_due or writer.is_full or len(token_ids) > choice.num_at_once:
            self._keep(Update(tuple(token_ids)))
        elif path is not None and path.text.num_tokens:
            if not self._is_fast:
                assert isinstance(writer, StreamedAnswer)
                path.text.surround(*writer.frame_of(choice.index))
                self._is_fast = True
            path.batch.add(path, token_ids, now_s, self.handle if self._is_alone else None)
        else:
            self._write(Update(tuple(token_ids)), now_s)

    def update(self, update: Update) -> None:
        """Writes an update, or keeps the update for the task."""
        choice = self.choice
        if self._is_fast and self._path is not None:
            self._path.batch.release(self._path)
        is_long = len(update.token_ids) > choice.num_at_once or choice.begins_with_scores
        if is_long or self._is_due or self._writer.is_full:
            self._keep(update)
        else:
            self._write(update, self._following.clock.now_s())

    def fail(self, error: Exception) -> None:
        """Makes the task raise this error."""
        self._error = error
        self._wake()

    async def flush(self) -> AnswerPiece | None:
        """Writes the kept updates, except the choice's last piece.

        Returns the last piece; None if the choice has not ended.
        """
        choice, following = self.choice, self._following
        awaited = choice.awaited
        if awaited is not None and not awaited.are_known:
            awaited.waiting.append(partial(following.wake, self))
            return None
        updates, self._unread = self._unread[:1], self._unread[1:]  # the update that woke the task
        while updates and self._last is None:
            update = joined(updates)
            is_long = len(update.token_ids) > choice.num_at_once
            for part in update.parts(choice.num_at_once):
                if is_long:
                    await following.turn()
                self._write(part, following.clock.now_s())
                if self._last is not None:
                    break
                if self._writer.is_full:
                    await self._writer.flush()
            updates, self._unread = self._unread, []
        if self._error is not None:
            raise self._error
        self._is_due = False
        return self._last

    def close(self) -> None:
        """Cancels the request, and stops sending its tokens through C++."""
        if self.handle is not None:
            self.handle.cancel()
        if self._is_fast and self._path is not None:
            self._path.batch.release(self._path)

    def _write(self, update: Update, now_s: float) -> None:
        piece = self.choice.receive(update, now_s)
        if piece.outcome is not None:
            self._last = piece  # the task writes the last piece
            self._wake()
        elif update.token_ids:
            self._writer.write(piece)

    def _keep(self, update: Update) -> None:
        self._unread.append(update)
        self._wake()

    def _wake(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._following.wake(self)
