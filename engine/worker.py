"""The core of a worker: its schedulers around one block pool, without I/O.

A role is nothing but which schedulers are there. Per step the core asks them in order for rows
under one token budget (decode first: its rows are short and somebody is waiting for each token),
and hands the results back. Everything else that happens is an event.

The host around it owns the threads: it feeds events, runs the plans, and performs the effects.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.batch import BatchPlan, BatchResult, Row, RowResult
from engine.blocks import BlockPool
from engine.events import Adopted, Effect, Emit, Event, FromGateway
from engine.messages import Decode, Generate, GivenBack, LoadReport, Prefill


@dataclass(slots=True)
class Scheduled:
    """What a scheduler wants of this step."""

    rows: list[Row] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)


class Scheduler(Protocol):
    """One part of a worker's work: prefill, decode, or offering prefixes."""

    def accepts(self, kind: type) -> bool:
        """Whether a message of this kind, or `Adopted`, opens a sequence here.

        Other events concern every scheduler.
        """
        ...

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Takes note of an event."""
        ...

    def schedule(self, budget_tokens: int, now_s: float) -> Scheduled:
        """Chooses rows of at most `budget_tokens` tokens in all."""
        ...

    def advance(self, row: Row, result: RowResult, now_s: float) -> list[Effect | Adopted]:
        """A row of this scheduler ran; this is what it came to."""
        ...

    @property
    def num_waiting(self) -> int:
        """Sequences that have not run yet."""
        ...

    @property
    def num_running(self) -> int:
        """Sequences that are being computed."""
        ...

    @property
    def counters(self) -> Mapping[str, int]:
        """What has happened here since the start, by "name" or "name:reason"."""
        ...

    def validate(self) -> None:
        """Asserts the scheduler's invariants."""
        ...


Observe = Callable[[BatchPlan, BatchResult, float], None]


class WorkerCore:
    """Schedulers, pool and the plan that is running. Owned by one thread."""

    def __init__(
        self,
        schedulers: Sequence[Scheduler],
        pool: BlockPool,
        max_batch_tokens: int,
        *,
        observe: Observe | None = None,
    ) -> None:
        """`observe` is told what each step was, how long it took, and when it ended."""
        self._schedulers = schedulers
        self._pool = pool
        self._max_batch_tokens = max_batch_tokens
        self._observe = observe
        self._running: list[tuple[Scheduler, Row]] = []

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Feeds an event to whom it concerns. A sequence that nobody accepts is given back.

        Not while a step runs: an event may free blocks that the step is writing to.
        """
        assert not self._running, "a step is running"
        return self._dispatch(event, now_s)

    def _dispatch(self, event: Event, now_s: float) -> list[Effect]:
        match event:
            case Adopted():
                adopter = self._taker(Adopted)
                assert adopter is not None, "a sequence was adopted where nobody decodes"
                return adopter.handle(event, now_s)
            case FromGateway(gateway_id, Prefill() | Generate() | Decode() as message):
                taker = self._taker(type(message))
                stays = isinstance(message, Generate)
                if taker is None or (stays and self._taker(Adopted) is None):
                    return [Emit(gateway_id, GivenBack(message.seq_id, "wrong role"))]
                return taker.handle(event, now_s)
            case _:
                return [e for scheduler in self._schedulers for e in scheduler.handle(event, now_s)]

    def _taker(self, kind: type) -> Scheduler | None:
        return next((s for s in self._schedulers if s.accepts(kind)), None)

    def plan(self, now_s: float) -> tuple[BatchPlan | None, list[Effect]]:
        """The next forward pass, or None if there is nothing to compute; `finish` ends it."""
        assert not self._running, "the last plan has not been finished"
        budget = self._max_batch_tokens
        effects: list[Effect] = []
        for scheduler in self._schedulers:
            scheduled = scheduler.schedule(budget, now_s)
            budget -= sum(len(row.token_ids) + row.max_drafted for row in scheduled.rows)
            effects += scheduled.effects
            self._running += [(scheduler, row) for row in scheduled.rows]
        assert budget >= 0
        rows = [row for _, row in self._running]
        return (BatchPlan(rows) if rows else None), effects

    def finish(self, result: BatchResult, now_s: float) -> list[Effect]:
        """Takes the results of the plan in."""
        effects: list[Effect] = []
        if self._observe is not None:
            self._observe(BatchPlan([row for _, row in self._running]), result, now_s)
        for (scheduler, row), row_result in zip(self._running, result.rows, strict=True):
            for effect in scheduler.advance(row, row_result, now_s):
                if isinstance(effect, Adopted):
                    effects += self._dispatch(effect, now_s)
                else:
                    effects.append(effect)
        self._running = []
        return effects

    def load(self, open_leases: int, counters: Mapping[str, float]) -> LoadReport:
        """What this worker holds now, and what was counted: the transfers' and the schedulers'."""
        counts = self._pool.counts()
        counted: Counter[str] = Counter()
        for scheduler in self._schedulers:
            counted.update(scheduler.counters)
        return LoadReport(
            free_blocks=counts.free,
            cached_blocks=counts.cached,
            owned_blocks=counts.owned,
            leased_blocks=counts.leased,
            in_flight_blocks=counts.in_flight,
            waiting_seqs=sum(s.num_waiting for s in self._schedulers),
            running_seqs=sum(s.num_running for s in self._schedulers),
            open_leases=open_leases,
            counters={**counters, **counted},
        )

    def validate(self) -> None:
        """Asserts the invariants of pool and schedulers."""
        self._pool.validate()
        for scheduler in self._schedulers:
            scheduler.validate()
