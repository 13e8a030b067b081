"""One response that runs in the background: the writer of its answer."""

import asyncio
from collections.abc import Callable

from engine.clock import unix_time_s
from engine.errors import InvalidRequest
from router.gateway.answers.choice import AnswerPiece
from router.gateway.answers.writing import AnswerWriter, Ending, Heading
from router.gateway.responses.draft import (
    ResponseDraft,
    encode_events,
    event_parts,
)
from router.gateway.responses.output import Event
from router.gateway.responses.table import KeptEvent, NewResponse
from router.gateway.responses.writers import ResponseKeeper
from router.inbox.json_parts import joined_in_turns
from router.inbox.loop_turns import Turn, no_turn


class BackgroundRun(AnswerWriter):
    """Takes the answer of one call.

    `checked` is done when the call is: it has what is kept at first, or the error. No client waits
    for pieces, so they are taken at once. Events of a response that can be streamed are encoded.
    """

    def __init__(
        self,
        id: str,
        keeper: ResponseKeeper,
        new_draft: Callable[[Heading], ResponseDraft],
        *,
        has_events: bool,
    ) -> None:
        self.id = id
        self._keeper = keeper
        self.has_events = has_events
        self.checked: asyncio.Future[NewResponse] = asyncio.get_running_loop().create_future()
        self.is_kept = asyncio.Event()  # in the table
        self.bell = asyncio.Event()  # rings for new events in the table
        self.events: list[KeptEvent] = []  # that are not in the table yet
        self.task: asyncio.Task[None] | None = None
        self.draft: ResponseDraft | None = None
        self.headers: dict[str, str] = {}
        self._new_draft = new_draft
        self._turn: Turn = no_turn  # the turn of the call, once the call is open
        self._has_begun = False

    @property
    def status(self) -> str:
        """Queued or in progress."""
        return "in_progress" if self._has_begun else "queued"

    def ring(self) -> None:
        """Wakes who waits for events."""
        self.bell.set()
        self.bell = asyncio.Event()

    def leave(self) -> None:
        """Notes that nothing more comes."""
        self.bell.set()
        if not self.checked.done():
            self.checked.cancel()
        elif not self.checked.cancelled():
            self.checked.exception()  # its caller may have left

    def record(self, events: list[Event]) -> None:
        """Keeps events for the table."""
        if self.has_events:
            self.events += [
                KeptEvent(event["sequence_number"], encode_events([event])) for event in events
            ]

    async def record_long(self, events: list[Event]) -> None:
        """Keeps events that may be long, in turns."""
        for event in events if self.has_events else ():
            data = await joined_in_turns(event_parts(event), self._turn)
            self.events.append(KeptEvent(event["sequence_number"], data))

    def refuse(self, error: InvalidRequest) -> None:
        """Tells the caller."""
        if not self.checked.done():
            self.checked.set_exception(error)

    def open(self, heading: Heading) -> "BackgroundRun":
        """Tells the caller that the call runs."""
        self.draft = self._new_draft(heading)
        self.headers = heading.headers
        self._turn = heading.turn
        self.record(self.draft.queue())
        if not self.checked.done():
            self.checked.set_result(self._keeper.record(self.draft))
        return self

    def write(self, piece: AnswerPiece) -> None:
        """Keeps the piece."""
        self.record(self._begun().take(piece))

    async def end(self, ending: Ending) -> None:
        """Keeps the end."""
        assert self.draft is not None
        await self.record_long(self.draft.end(ending, unix_time_s()))

    def _begun(self) -> ResponseDraft:
        assert self.draft is not None
        if not self._has_begun:
            self._has_begun = True
            self.record(self.draft.begin())
        return self.draft
