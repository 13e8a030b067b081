"""Orders one worker's block events. No I/O.

    waiting ──snapshot──> following ──a number is missing──> requests it ──> following
       ^                      │                                  │
       └──────────────────────┴─────────── no answer in time ────┘

A worker numbers its batches of events, and they are applied in order. On a gap, later batches are
buffered and the missing batch is requested. If the worker no longer has it, a snapshot is
requested. The worker's own count of published batches, which comes with its load reports, reveals a
loss of the latest batches.

Without an answer in time, events are *missed*. Then the worker's events are ignored, and the
gateway assumes that the worker has cached the blocks of its requests. A snapshot is requested again
after a pause that grows.

Repeated, late and out-of-order batches change nothing. A snapshot is ignored if it is older than
the applied events.
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

ANSWER_TIMEOUT_S = 5.0  # maximum seconds from one piece of an answer to the next
OVERDUE_S = 0.5  # maximum seconds until a published batch arrives
FIRST_PAUSE_S = 1.0  # seconds before the first repeated request
MAX_PAUSE_S = 30.0
MAX_EARLY_BATCHES = 1024  # maximum number of batches buffered while an earlier one is missing


def apply_events(
    index: PrefixIndex,
    worker_id: WorkerId,
    events: Sequence[BlockEvent],
    media: Mapping[str, WorkerId] | None = None,
) -> int:
    """Applies a worker's events to an index, in order.

    `media` has a store's names in the index, by medium. Without `media`, events must name no
    medium. Returns the number of events with an unknown medium, which are ignored.
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
    """A batch that the worker has published."""

    number: int
    events: Sequence[BlockEvent]


@dataclass(frozen=True, slots=True)
class NewsPiece:
    """A piece of the answer to the last request: one batch, or a part of a snapshot."""

    number: int
    events: Sequence[BlockEvent]


@dataclass(frozen=True, slots=True)
class NewsEnded:
    """The answer to the last request is complete."""


@dataclass(frozen=True, slots=True)
class Counted:
    """The worker's own count of the batches that it has published."""

    num_batches: int


@dataclass(frozen=True, slots=True)
class Garbled:
    """A message that cannot be decoded."""

    reason: str


@dataclass(frozen=True, slots=True)
class NewsTick:
    """Time has passed; deadlines may be due."""


NewsEvent = Published | NewsPiece | NewsEnded | Counted | Garbled | NewsTick

# ---------------------------------------------------------------- what comes out


@dataclass(frozen=True, slots=True)
class Apply:
    """Effect: change the known blocks of the worker."""

    events: Sequence[BlockEvent]


@dataclass(frozen=True, slots=True)
class AskBatches:
    """Effect: request batches from number `first` on. Answers to earlier requests are dropped."""

    first: int


@dataclass(frozen=True, slots=True)
class AskSnapshot:
    """Effect: request a snapshot of all cached blocks. Answers to earlier requests are dropped."""


@dataclass(frozen=True, slots=True)
class EventsMissed:
    """Effect: ignore the applied events, which are out of date, until the next `Apply`."""

    reason: str


NewsEffect = Apply | AskBatches | AskSnapshot | EventsMissed


@dataclass(slots=True)
class _Ask:
    """A request to the worker whose answer is incomplete."""

    due_s: float
    wants_all: bool
    num_published: int  # number of published batches at the time of the request
    number: int | None = None  # number of the snapshot; None: no piece has arrived
    pieces: list[BlockEvent] = field(default_factory=list)


class BlockNews:
    """Orders the batches of one session with a worker. Only `open` and `handle` change it."""

    def __init__(self) -> None:
        self._next: int | None = None  # number of the next batch; None: a snapshot is needed
        self._early: dict[int, Sequence[BlockEvent]] = {}
        self._num_published = 0  # number of published batches that this gateway knows of
        self._ask: _Ask | None = None
        self._overdue_s: float | None = None
        self._ask_again_s: float | None = None
        self._num_failures = 0
        self._is_heard = True  # False from an `EventsMissed` until the next `Apply`

    @property
    def is_following(self) -> bool:
        """True if all batches known to be published were applied."""
        return self._next is not None and self._next >= self._num_published

    def open(self, now_s: float) -> list[NewsEffect]:
        """Requests a snapshot."""
        return self._chase(now_s)

    def handle(self, event: NewsEvent, now_s: float) -> list[NewsEffect]:
        """Handles an event and returns its effects."""
        match event:
            case Published(number, events):
                self._num_published = max(self._num_published, number + 1)
                effects = self._apply(number, events)
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
        """Returns the time of the next deadline."""
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

    def _apply(self, number: int, events: Sequence[BlockEvent]) -> list[NewsEffect]:
        """Applies a batch if it is the next one, and then the buffered batches that follow it."""
        if self._next is None or number > self._next:
            if len(self._early) < MAX_EARLY_BATCHES:
                self._early[number] = events
            return []
        if number < self._next:
            return []
        self._next += 1
        return [Apply(events), *self._apply_early()]

    def _apply_early(self) -> list[NewsEffect]:
        assert self._next is not None
        effects: list[NewsEffect] = []
        while (events := self._early.pop(self._next, None)) is not None:
            effects.append(Apply(events))
            self._next += 1
        return effects

    # ------------------------------------------------------------ asks and answers

    def _chase(self, now_s: float) -> list[NewsEffect]:
        """Requests missing batches, unless a request is in progress."""
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
        """True if a published batch has not arrived for `OVERDUE_S`."""
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
            return self._apply(number, events)
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
        if self._next < ask.num_published:  # the worker no longer has these batches
            return self._ask_for(now_s, wants_all=True)
        self._num_failures = 0
        return []

    def _on_snapshot(self, ask: _Ask, now_s: float) -> list[NewsEffect]:
        number = ask.number
        if number is None or not ask.pieces or not isinstance(ask.pieces[0], AllBlocksCleared):
            return self._fail("no whole snapshot", now_s)
        self._num_failures = 0
        if self._next is not None and number < self._next:
            return []  # the missing batch has arrived before the snapshot
        self._is_heard = True
        self._next = number
        self._early = {n: events for n, events in self._early.items() if n >= number}
        # If the worker has published more batches, its next count reveals that.
        self._num_published = max(self._early, default=number - 1) + 1
        return [Apply(ask.pieces), *self._apply_early()]

    def _fail(self, reason: str, now_s: float) -> list[NewsEffect]:
        """Ignores the applied events, and requests a snapshot again after a pause."""
        pause_s = min(FIRST_PAUSE_S * 2**self._num_failures, MAX_PAUSE_S)
        self._num_failures = min(self._num_failures + 1, 16)
        self._ask, self._ask_again_s = None, now_s + pause_s
        self._next, self._overdue_s = None, None
        was_heard, self._is_heard = self._is_heard, False
        return [EventsMissed(reason)] if was_heard else []
