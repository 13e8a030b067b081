"""Writers of a response to its waiting client: as a whole, or as a stream of events.

A response is stored before its client learns that it is complete, so that the client can refer to
it at once. If it cannot be stored, the client still gets the answer, with `store: false`.
"""

import logging
from collections.abc import Sequence
from itertools import chain

from starlette.types import Send

from engine.clock import unix_time_s
from router.edge.exchange import BodyPipe
from router.edge.responses import send_parts
from router.gateway.answers.choice import AnswerPiece
from router.gateway.answers.stream import EventWriter
from router.gateway.answers.writing import AnswerWriter, Ending, Heading, send_failure
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


class ResponseKeeper:
    """Stores one response when it has ended, if its client wants that."""

    def __init__(self, store: ResponseStore, owner: str, input: Sequence[Item]) -> None:
        self._store = store
        self._owner = owner
        self._input = input

    async def keep(self, draft: ResponseDraft) -> None:
        """Stores the response. If that fails, the response has `store: false`."""
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
        """Returns the data to be stored for the present response."""
        fields = draft.fields()
        previous = fields["previous_response_id"]
        return NewResponse(draft.id, self._owner, previous, fields, self._input, [*draft.items])


class WholeResponse(AnswerWriter):
    """Sends a response when it is complete."""

    def __init__(
        self, heading: Heading, draft: ResponseDraft, keeper: ResponseKeeper, send: Send
    ) -> None:
        self._heading = heading
        self._draft = draft
        self._keeper = keeper
        self._send = send

    def write(self, piece: AnswerPiece) -> None:
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


class StreamedResponse(EventWriter):
    """Sends a response as events."""

    def __init__(
        self,
        heading: Heading,
        draft: ResponseDraft,
        keeper: ResponseKeeper,
        send: Send,
        pipe: BodyPipe | None,
    ) -> None:
        super().__init__(heading, send, pipe)
        self._draft = draft
        self._keeper = keeper
        self._has_begun = False

    def write(self, piece: AnswerPiece) -> None:
        """Sends the events of a piece."""
        events = [*self._begun(), *self._draft.take(piece)]
        if self.is_full:
            self.unsent += events
        elif events:
            assert self.pipe is not None
            self.pipe.write(encode_events(events))

    async def flush(self) -> None:
        """Sends all pending events."""
        events, self.unsent = self.unsent, []
        await self.send(encode_events(events))

    async def end(self, ending: Ending) -> None:
        """Sends the last events."""
        if self.unsent:
            await self.flush()
        if not self._has_begun and not isinstance(ending.outcome, Finished):
            await send_failure(self._send, ending.outcome)
            return
        events = [*self._begun(), *self._draft.end(ending, unix_time_s())]
        await self._keeper.keep(self._draft)
        events += self._draft.last()
        for part in chain.from_iterable(map(event_parts, events)):
            await self.send(part)
            if len(part) >= PART_BYTES:
                await self.heading.turn()
        await self.send(b"", is_last=True)

    def _begun(self) -> list[Event]:
        """Returns the first events, unless the response has begun."""
        if self._has_begun:
            return []
        self._has_begun = True
        return self._draft.begin()
