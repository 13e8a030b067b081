"""Writers of a response to the client that waits for it: whole, or as a stream of events.

A response is kept before the client learns that it is complete, so that it can be named at once. If
it cannot be kept, the client gets the answer all the same, with `store: false`.
"""

import asyncio
import logging
from collections.abc import Sequence
from itertools import chain

from starlette.types import Send

from engine.clock import unix_time_s
from router.edge.exchange import BodyPipe
from router.edge.responses import EVENT_STREAM, send_head, send_parts
from router.gateway.answers.choice import AnswerPiece
from router.gateway.answers.writing import Ending, Heading, send_failure
from router.gateway.responses.draft import (
    ResponseDraft,
    encode_events,
    event_parts,
)
from router.gateway.responses.items import Item
from router.gateway.responses.output import Event
from router.gateway.responses.store import ResponseStore
from router.gateway.responses.table import NewResponse
from router.inbox.api_errors import ApiError
from router.inbox.json_parts import PART_BYTES, json_parts
from router.machine.requests import Finished

log = logging.getLogger(__name__)

STREAM_HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would collect events
}


class ResponseKeeper:
    """Keeps one response when it has ended, if its client wants that."""

    def __init__(self, store: ResponseStore, owner: str, input: Sequence[Item]) -> None:
        self._store = store
        self._owner = owner
        self._input = input

    async def keep(self, draft: ResponseDraft) -> None:
        """Keeps the response. If that fails, the response says so."""
        fields = draft.fields()
        if not fields["store"]:
            return
        try:
            await self._store.add(self.record(draft))
        except ApiError as error:
            self._store.counters["not_kept"] += 1
            log.warning("the response %s is not kept: %s", draft.id, error.message)
            draft.remove()

    def record(self, draft: ResponseDraft) -> NewResponse:
        """What is kept of the response as it is now."""
        fields = draft.fields()
        previous = fields["previous_response_id"]
        return NewResponse(draft.id, self._owner, previous, fields, self._input, [*draft.items])


class WholeResponse:
    """Sends a response when it is complete."""

    def __init__(
        self, heading: Heading, draft: ResponseDraft, keeper: ResponseKeeper, send: Send
    ) -> None:
        self._heading = heading
        self._draft = draft
        self._keeper = keeper
        self._send = send

    @property
    def is_ready(self) -> bool:
        """Always true: pieces are only kept."""
        return True

    @property
    def shows_text_alone(self) -> bool:
        """Always true."""
        return True

    def write_at_once(self, piece: AnswerPiece) -> None:
        """Keeps the piece."""
        self._draft.take(piece)

    def write_text(self, choice: int, text: str) -> None:
        """Keeps the text."""
        self._draft.take_text(text)

    async def write(self, piece: AnswerPiece) -> None:
        """Keeps the piece."""
        self._draft.take(piece)

    async def end(self, ending: Ending) -> None:
        """Sends the response, or the error."""
        if not isinstance(ending.outcome, Finished):
            await send_failure(self._send, ending.outcome)
            return
        self._draft.end(ending, unix_time_s())
        await self._keeper.keep(self._draft)
        parts = json_parts(self._draft.body())
        await send_parts(self._send, parts, self._heading.headers, self._heading.turn)


class StreamedResponse:
    """Sends a response as events, through `pipe` when there is one and it is ready."""

    def __init__(
        self,
        heading: Heading,
        draft: ResponseDraft,
        keeper: ResponseKeeper,
        send: Send,
        pipe: BodyPipe | None,
    ) -> None:
        self._heading = heading
        self._draft = draft
        self._keeper = keeper
        self._send = send
        self._pipe = pipe
        self._turn = asyncio.Lock()
        self._is_open = False  # the head is sent, and nothing waits to be
        self._has_head = False

    @property
    def is_ready(self) -> bool:
        """True if the head is sent and nothing waits to be sent."""
        return self._is_open and self._pipe is not None and self._pipe.is_ready

    @property
    def shows_text_alone(self) -> bool:
        """Always true."""
        return True

    def write_at_once(self, piece: AnswerPiece) -> None:
        """Sends the events of a piece."""
        self._pipe_events(self._draft.take(piece))

    def write_text(self, choice: int, text: str) -> None:
        """Sends the event of a text."""
        self._pipe_events(self._draft.take_text(text))

    async def write(self, piece: AnswerPiece) -> None:
        """Sends the events of a piece; before the first one, the head."""
        async with self._turn:
            self._is_open = False
            events = await self._open()
            events = [*events, *self._draft.take(piece)]
            await self._send_body(encode_events(events), more_body=True)
            self._is_open = True

    async def end(self, ending: Ending) -> None:
        """Sends the last events."""
        if not self._has_head and not isinstance(ending.outcome, Finished):
            await send_failure(self._send, ending.outcome)
            return
        self._is_open = False
        events = [*await self._open(), *self._draft.end(ending, unix_time_s())]
        await self._keeper.keep(self._draft)
        events += self._draft.last()
        for part in chain.from_iterable(map(event_parts, events)):
            await self._send_body(part, more_body=True)
            if len(part) >= PART_BYTES:
                await self._heading.turn()
        await self._send_body(b"", more_body=False)

    async def _open(self) -> list[Event]:
        """Sends the head unless it is sent; returns the first events."""
        if self._has_head:
            return []
        self._has_head = True
        await send_head(self._send, 200, EVENT_STREAM, {**STREAM_HEADERS, **self._heading.headers})
        return self._draft.begin()

    def _pipe_events(self, events: Sequence[Event]) -> None:
        assert self._pipe is not None
        if events:
            self._pipe.write(encode_events(events))

    async def _send_body(self, data: bytes, *, more_body: bool) -> None:
        if self._pipe is not None:
            self._pipe.flush()
        if data or not more_body:
            body = {"type": "http.response.body", "body": data, "more_body": more_body}
            await self._send(body)
