"""Puts one worker's block events in order. No I/O.

    waiting ──snapshot──> following ──a number is missing──> asks again ──> following
       ^                      │                                  │
       └──────────────────────┴─────────── no answer in time ────┘

A worker numbers its batches of events, and they are applied in order. On a gap, later batches are
buffered and the missing one is requested. If the worker no longer has it, a snapshot is requested.
The worker's own count of published batches, which comes with its load reports, shows a loss at the
end.

Without an answer in time, events are *missed*. The worker's events are no longer believed, and the
gateway uses what it had the worker do. A snapshot is requested again after a pause that grows.

Repeated, late and disordered batches change nothing. A snapshot counts only if it is not older than
what was applied.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from engine.messages import WorkerId
from engine.worker.block_events import (
    AllBlocksCleared,
    BlockEvent,
    BlockRemoved,
    BlockStored,
)
from engine.worker.blocks import BlockHash
from router.native.index import PrefixIndex

ANSWER_TIMEOUT_S = 5.0  # from one piece of an answer to the next
OVERDUE_S = 0.5  # a published batch may take this long to arrive
FIRST_PAUSE_S = 1.0  # before the first repeated request
MAX_PAUSE_S = 30.0
MAX_EARLY_BATCHES = 1024  # kept while one before them is missing


def apply_events(
    index: PrefixIndex,
    worker_id: WorkerId,
    events: Sequence[BlockEvent],
    media: Mapping[str, WorkerId] | None = None,
) -> int:
    """Applies a worker's events to an index, in order.

    `media` has a store's names in the index, by medium. Without it, events must name no medium.
    Returns the number of ignored events: they name unknown media.
    """
    num_ignored = 0
    for event in events:
        if isinstance(event, AllBlocksCleared):
            for each in (worker_id,) if media is None else media.values():
                index.cleared(each)
            continue
        name = _name_of(worker_id, event.medium, media)
        if name is None:
            num_ignored += 1
            continue
        hashes = cast("list[BlockHash]", event.block_hashes)
        match event:
            case BlockStored():
                index.stored(name, hashes)
            case BlockRemoved():
                index.removed(name, hashes)
    return num_ignored


def _name_of(
    worker_id: WorkerId, medium: str | None, media: Mapping[str, WorkerId] | None
) -> WorkerId | None:
    if media is None:
        return worker_id if medium is None else None
    return None if medium is None else media.get(medium)


# ---------------------------------------------------------------- what goes in


@dataclass(frozen=True, slots=True)
class Published:
    """A published batch."""

    number: int
    events: Sequence[BlockEvent]


@dataclass(frozen=True, slots=True)
class NewsPiece:
    """A piece of the answer to the last request."""

    number: int
    events: Sequence[BlockEvent]


@dataclass(frozen=True, slots=True)
class NewsEnded:
    """The end of an answer."""


@dataclass(frozen=True, slots=True)
class Counted:
    """The worker's own count of the batches that it has published."""

    num_batches: int


@dataclass(frozen=True, slots=True)
class Garbled:
    """A message that cannot be read."""

    reason: str


@dataclass(frozen=True, slots=True)
class NewsTick:
    """Time has passed, and nothing else happened."""


NewsEvent = Published | NewsPiece | NewsEnded | Counted | Garbled | NewsTick

# ---------------------------------------------------------------- what comes out


@dataclass(frozen=True, slots=True)
class Apply:
    """Changes of the worker's blocks."""

    events: Sequence[BlockEvent]


@dataclass(frozen=True, slots=True)
class AskBatches:
    """Request the batches from this number on. Answers to earlier requests are dropped."""

    first: int


@dataclass(frozen=True, slots=True)
class AskSnapshot:
    """Request a snapshot of all that is cached. Answers to earlier requests are dropped."""


@dataclass(frozen=True, slots=True)
class EventsMissed:
    """The applied events are out of date, until the next `Apply`."""

    reason: str


NewsEffect = Apply | AskBatches | AskSnapshot | EventsMissed


@dataclass(slots=True)
class _Ask:
    """A request to the worker whose answer is not complete."""

    due_s: float
    wants_all: bool
    num_published: int  # when it was asked
    number: int | None = None  # the snapshot's
    pieces: list[BlockEvent] = field(default_factory=list)


class BlockNews:
    """Orders the batches of one session with a worker. Only `open` and `handle` change it."""

    def __init__(self) -> None:
        self._next: int | None = None  # the number of the next batch to apply; None: all is wanted
        self._early: dict[int, Sequence[BlockEvent]] = {}
        self._num_published = 0  # as far as this gateway knows
        self._ask: _Ask | None = None
        self._overdue_s: float | None = None
        self._ask_again_s: float | None = None
        self._num_failures = 0
        self._is_heard = True  # until an `EventsMissed` is returned

    @property
    def is_following(self) -> bool:
        """True if everything known to be published has been applied."""
        return self._next is not None and self._next >= self._num_published

    def open(self, now_s: float) -> list[NewsEffect]:
        """Requests a snapshot."""
        return self._chase(now_s)

    def handle(self, event: NewsEvent, now_s: float) -> list[NewsEffect]:
        """Takes an event and returns its effects."""
        match event:
            case Published(number, events):
                self._num_published = max(self._num_published, number + 1)
                effects = self._take(number, events)
            case NewsPiece(number, events):
                effects = self._on_answered(number, events, now_s)
            case NewsEnded():
                effects = self._on_answer_ended(now_s)
            case Counted(num_batches):
                self._num_published = max(self._num_published, num_batches)
                effects = []
            case Garbled(reason):
                effects = self._fail(reason, now_s)
            case NewsTick():
                effects = []
        if self._ask is not None and now_s >= self._ask.due_s:
            effects += self._fail("no answer in time", now_s)
        return effects + self._chase(now_s)

    def next_wake_s(self) -> float | None:
        """When the next deadline falls due."""
        if self._ask is not None:
            return self._ask.due_s
        if self._ask_again_s is not None:
            return self._ask_again_s
        return self._overdue_s

    def validate(self) -> None:
        """Asserts the invariants."""
        assert len(self._early) <= MAX_EARLY_BATCHES
        if self._next is not None:
            assert all(number > self._next for number in self._early)
        if self._next is None or self._early:
            assert self._ask is not None or self._ask_again_s is not None, "no worker is asked"

    # ------------------------------------------------------------ batches

    def _take(self, number: int, events: Sequence[BlockEvent]) -> list[NewsEffect]:
        """Applies a batch if it is the next one, and the batches that waited for it."""
        if self._next is None or number > self._next:
            if len(self._early) < MAX_EARLY_BATCHES:
                self._early[number] = events
            return []
        if number < self._next:
            return []
        self._next += 1
        return [Apply(events), *self._take_early()]

    def _take_early(self) -> list[NewsEffect]:
        assert self._next is not None
        effects: list[NewsEffect] = []
        while (events := self._early.pop(self._next, None)) is not None:
            effects.append(Apply(events))
            self._next += 1
        return effects

    # ------------------------------------------------------------ asks and answers

    def _chase(self, now_s: float) -> list[NewsEffect]:
        """Requests what is missing, unless a request is under way."""
        if self._ask is not None:
            return []
        if self._ask_again_s is not None:
            if now_s < self._ask_again_s:
                return []
            self._ask_again_s = None
        if self._next is None:
            return self._ask_for(now_s, wants_all=True)
        if self._early or self._is_overdue(now_s):
            return self._ask_for(now_s, wants_all=False)
        return []

    def _is_overdue(self, now_s: float) -> bool:
        """True if a published batch is missing for too long."""
        if self.is_following:
            self._overdue_s = None
            return False
        if self._overdue_s is None:
            self._overdue_s = now_s + OVERDUE_S
        return now_s >= self._overdue_s

    def _ask_for(self, now_s: float, *, wants_all: bool) -> list[NewsEffect]:
        self._overdue_s = None
        self._ask = _Ask(now_s + ANSWER_TIMEOUT_S, wants_all, self._num_published)
        if wants_all:
            return [AskSnapshot()]
        assert self._next is not None
        return [AskBatches(self._next)]

    def _on_answered(
        self, number: int, events: Sequence[BlockEvent], now_s: float
    ) -> list[NewsEffect]:
        ask = self._ask
        if ask is None:
            return []
        ask.due_s = now_s + ANSWER_TIMEOUT_S
        if not ask.wants_all:
            self._num_published = max(self._num_published, number + 1)
            return self._take(number, events)
        if ask.number not in (None, number):
            return self._fail("pieces of two snapshots", now_s)
        ask.number = number
        ask.pieces += events
        return []

    def _on_answer_ended(self, now_s: float) -> list[NewsEffect]:
        ask, self._ask = self._ask, None
        if ask is None:
            return []
        if ask.wants_all:
            return self._on_snapshot(ask, now_s)
        assert self._next is not None
        if self._next < ask.num_published:  # the worker no longer has them
            return self._ask_for(now_s, wants_all=True)
        self._num_failures = 0
        return []

    def _on_snapshot(self, ask: _Ask, now_s: float) -> list[NewsEffect]:
        number = ask.number
        if number is None or not ask.pieces or not isinstance(ask.pieces[0], AllBlocksCleared):
            return self._fail("no whole snapshot", now_s)
        self._num_failures = 0
        if self._next is not None and number < self._next:
            return []  # the missing batch has come meanwhile
        self._is_heard = True
        self._next = number
        self._early = {n: events for n, events in self._early.items() if n >= number}
        # If the worker has published more, its next count says so.
        self._num_published = max(self._early, default=number - 1) + 1
        return [Apply(ask.pieces), *self._take_early()]

    def _fail(self, reason: str, now_s: float) -> list[NewsEffect]:
        """Stops believing what was applied. After a pause everything is requested again."""
        pause_s = min(FIRST_PAUSE_S * 2**self._num_failures, MAX_PAUSE_S)
        self._num_failures = min(self._num_failures + 1, 16)
        self._ask, self._ask_again_s = None, now_s + pause_s
        self._next, self._overdue_s = None, None
        was_heard, self._is_heard = self._is_heard, False
        return [EventsMissed(reason)] if was_heard else []
