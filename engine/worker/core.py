"""The core of a worker: its schedulers around one block pool, without I/O.

Every worker has all schedulers; its role only says what work it accepts. So a change of role builds
nothing, and weights, KV, cached blocks and leases stay. New work that the role does not accept is
given back, and so is work that waits. Running sequences go on until they end or are handed over.
For a while a worker may therefore do more than its role says.

In each step the core asks the schedulers in order for rows under one token budget, and hands the
results back. Decode comes first: its rows are short, and a client waits for each token. Everything
else that happens is an event. A scheduler may hold the step for a moment if an event is about to
come.

The host around the core owns the threads: it feeds events, runs the plans, and performs the
effects.

**Overlap.** With a runner that overlaps, the next step is planned while one is in flight. The plan
is made as if the step had ended: its rows count as computed, and the tokens that it chooses are
pending. Where the plan depends on the outcome (drafts, lack of memory), a scheduler waits for the
outcome. A sequence may end while it has a row in the next step. The result of that row is ignored,
and blocks that it may write to are freed with that step (`engine.worker.blocks`).

Gateways learn costs from reports of steps: plain decode steps and prompt chunks, timed by the
runner. Steps with drafts, and prompts whose log-probabilities are requested, are not reported,
since their number of tokens does not determine their cost.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from engine.messages import (
    FLUID_ROLES,
    ROLES_OF_WORKERS,
    WRONG_ROLE,
    Decode,
    Generate,
    GivenBack,
    HandedOver,
    HandOver,
    LoadReport,
    Prefill,
    Role,
    RoleChanged,
    SetRole,
    StepReport,
)
from engine.worker.batch import BatchPlan, BatchResult, Row, RowResult
from engine.worker.blocks import BlockPool
from engine.worker.events import (
    Adopted,
    Effect,
    Emit,
    EmitToAll,
    Event,
    FromGateway,
    Leaving,
    PassedOn,
)
from engine.worker.pace import StepPace

# Samples in one report, for each of two kinds: steps that only decode, and other steps.
MAX_STEPS_OF_A_KIND = 8


class Scheduled(msgspec.Struct):  # a struct, since one is created in each step
    """The rows and effects that a scheduler wants in this step."""

    rows: list[Row] = []
    num_tokens: int = 0  # tokens of these rows, drafted ones included
    effects: list[Effect] = []
    held_until_s: float | None = None  # hold the step until this time or the next event
    waits: bool = False  # plan nothing until the step in flight has ended


NOTHING = Scheduled()  # what a scheduler without work returns; its lists stay empty


class Workload(msgspec.Struct, frozen=True):
    """The accepted but unfinished work of a scheduler: see `LoadReport`."""

    prompt_tokens: int = 0
    decode_seqs: int = 0
    decode_blocks: int = 0
    context_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Duties:
    """The role of a worker, and the roles that it may take."""

    role: Role = Role.MIXED
    possible: Collection[Role] = ROLES_OF_WORKERS
    is_fluid: bool = False  # see `Welcome.is_fluid`; only for prefill and decode roles

    def accepts(self, kind: type) -> bool:
        """True if the worker accepts new work of this kind."""
        lends = self.is_fluid and self.role in FLUID_ROLES
        if kind is Prefill:
            return self.role.prefills
        if kind is Decode:
            return self.role.decodes or lends
        return kind is Generate and (self.role is Role.MIXED or lends)


class Scheduler(Protocol):
    """One part of a worker's work: prefill, decode, or offering prefixes."""

    def accepts(self, kind: type) -> bool:
        """True if messages of this kind open sequences here, or passed-on sequences of this kind
        come here.

        All other events go to every scheduler.
        """
        ...

    def handle(self, event: Event, now_s: float) -> Sequence[Effect | PassedOn]:
        """Handles an event."""
        ...

    def give_back(self, accepts: Callable[[type], bool]) -> list[Effect]:
        """Gives back waiting work of kinds that are no longer accepted."""
        ...

    def schedule(self, budget_tokens: int, now_s: float, *, ahead: bool = False) -> Scheduled:
        """Chooses rows of at most `budget_tokens` tokens in all.

        With `ahead`, a step is in flight; its sequences have their rows in `in_flight`.
        """
        ...

    def advance(
        self, rows: Sequence[Row], results: Sequence[RowResult], now_s: float
    ) -> Sequence[Effect | PassedOn]:
        """Handles the results of this scheduler's rows in a step. Some of their sequences may
        have ended.
        """
        ...

    @property
    def num_waiting(self) -> int:
        """Returns the number of sequences that have not run yet."""
        ...

    @property
    def num_running(self) -> int:
        """Returns the number of sequences that are being computed."""
        ...

    @property
    def workload(self) -> Workload:
        """Returns the remaining work of this scheduler's sequences."""
        ...

    @property
    def counters(self) -> Mapping[str, int]:
        """Returns counts of events since the start, by "name" or "name:reason"."""
        ...

    def validate(self) -> None:
        """Asserts the scheduler's invariants."""
        ...


Observe = Callable[[BatchPlan, BatchResult, float], None]


class StepSamples:
    """A sample of the steps of one kind since the last report, spread evenly over them."""

    def __init__(self, max_kept: int = MAX_STEPS_OF_A_KIND) -> None:
        self._max_kept = max_kept
        self._kept: list[StepReport] = []
        self._stride = 1
        self._num_passed = 0

    def wants_next(self) -> bool:
        """True if the step that has just ended belongs to the sample."""
        self._num_passed += 1
        return self._num_passed >= self._stride

    def keep(self, step: StepReport) -> None:
        """Adds a step to the sample. If the sample gets too large, every other step is dropped."""
        self._num_passed = 0
        self._kept.append(step)
        if len(self._kept) > self._max_kept:
            self._kept = self._kept[::2]
            self._stride *= 2

    def take(self) -> list[StepReport]:
        """Returns the sampled steps and clears the sample."""
        kept, self._kept = self._kept, []
        self._stride, self._num_passed = 1, 0
        return kept


# Built once: otherwise the union would be rebuilt for each event and effect.
_PASSED_ON = (Adopted, Leaving)
_OPENERS = (Prefill, Generate, Decode)
Planned = list[tuple[Scheduler, list[Row]]]  # each scheduler, and the rows that it chose for a step
MAX_STEPS_IN_FLIGHT = 2


class WorkerCore:
    """Schedulers, pool and the steps in flight. Owned by one thread."""

    def __init__(
        self,
        schedulers: Sequence[Scheduler],
        pool: BlockPool,
        max_batch_tokens: int,
        *,
        duties: Duties | None = None,
        pace: StepPace | None = None,
        observe: Observe | None = None,
    ) -> None:
        """Without `duties` the core accepts everything that its schedulers accept.

        A fluid worker has a `pace`. Its prefill scheduler asks `pace` how much of a prompt fits
        into a step. `observe` is called with each step's plan, its result and the time when it
        ended.
        """
        self._duties = duties or Duties()
        self._schedulers = schedulers
        self._pool = pool
        self._max_batch_tokens = max_batch_tokens
        self._pace = pace
        self._observe = observe
        self._in_flight: deque[tuple[Planned, BatchPlan]] = deque()
        self._takers = {kind: self._taker(kind) for kind in (*_PASSED_ON, *_OPENERS)}
        self._decoder = self._takers[Adopted]
        if self._decoder is None:
            self._takers[Generate] = None  # no scheduler here could continue its sequences
        self._decode_steps, self._other_steps = StepSamples(), StepSamples()
        self._held_until_s: float | None = None

    @property
    def held_until_s(self) -> float | None:
        """Returns the time until which the next step is held, unless an event comes first; None
        if it is not held.
        """
        return self._held_until_s

    @property
    def role(self) -> Role:
        """Returns the worker's role."""
        return self._duties.role

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Feeds an event to its scheduler. Gives back a sequence that no scheduler accepts."""
        if isinstance(event, _PASSED_ON):
            taker = self._takers[type(event)]
            assert taker is not None, f"no scheduler takes what is passed on: {event}"
            return self._settled(taker.handle(event, now_s), now_s)
        if isinstance(event, FromGateway):
            gateway_id, message = event.gateway_id, event.message
            if isinstance(message, _OPENERS):
                taker = self._takers[type(message)]
                if taker is None or not self._duties.accepts(type(message)):
                    return [Emit(gateway_id, GivenBack(message.seq_id, WRONG_ROLE))]
                return self._settled(taker.handle(event, now_s), now_s)
            if isinstance(message, HandOver) and self._decoder is None:
                return [Emit(gateway_id, HandedOver(message.seq_id, None))]
            if isinstance(message, SetRole):
                return self._set_role(message.role)
        effects: list[Effect | PassedOn] = []
        for scheduler in self._schedulers:
            effects += scheduler.handle(event, now_s)
        return self._settled(effects, now_s)

    def _settled(self, effects: Iterable[Effect | PassedOn], now_s: float) -> list[Effect]:
        """Passes sequences on between schedulers; returns all effects, those of passing on
        included.
        """
        settled: list[Effect] = []
        for effect in effects:
            if isinstance(effect, _PASSED_ON):
                settled += self.handle(effect, now_s)
            else:
                settled.append(effect)
        return settled

    # ------------------------------------------------------------ roles

    def _set_role(self, role: Role) -> list[Effect]:
        """Sets the role and informs all gateways, even if nothing changed: the sender waits for the
        answer.
        """
        if role in self._duties.possible:
            self._duties = replace(self._duties, role=role)
        duties = self._duties
        effects: list[Effect] = [EmitToAll(RoleChanged(duties.role))]
        for scheduler in self._schedulers:
            effects += scheduler.give_back(duties.accepts)
        return effects

    def _taker(self, kind: type) -> Scheduler | None:
        return next((s for s in self._schedulers if s.accepts(kind)), None)

    def plan(self, now_s: float) -> tuple[BatchPlan | None, list[Effect]]:
        """Plans the next forward pass, which `finish` completes. None if there is no work, if the
        step is held (`held_until_s`), or if the step in flight must end first.
        """
        assert len(self._in_flight) < MAX_STEPS_IN_FLIGHT, "the first step must be finished"
        budget = self._max_batch_tokens
        effects: list[Effect] = []
        planned: Planned = []
        ahead = bool(self._in_flight)
        for scheduler in self._schedulers:
            scheduled = scheduler.schedule(budget, now_s, ahead=ahead)
            self._held_until_s = scheduled.held_until_s
            if scheduled.waits or scheduled.held_until_s is not None:
                assert not planned
                return None, effects + scheduled.effects
            if self._pace is not None and scheduler is self._decoder:
                self._pace.begin(() if self.role is Role.MIXED else scheduled.rows)
            effects += scheduled.effects
            if rows := scheduled.rows:
                budget -= scheduled.num_tokens
                planned.append((scheduler, rows))
        assert budget >= 0
        if not planned:
            return None, effects
        rows = planned[0][1] if len(planned) == 1 else [r for _, own in planned for r in own]
        plan = BatchPlan(rows)
        self._in_flight.append((planned, plan))
        self._pool.begin_step()
        return plan, effects

    def finish(self, result: BatchResult, now_s: float) -> list[Effect]:
        """Handles the results of the oldest plan in flight, which the runner has completed."""
        effects: list[Effect] = []
        planned, plan = self._in_flight.popleft()
        self._pool.end_step()
        if self._observe is not None:
            self._observe(plan, result, now_s)
        if result.times is not None:
            self._sample_step(planned, result.times.total_s)
        num_rows = len(plan.rows)
        assert len(result.rows) == num_rows, f"{len(result.rows)} results of {num_rows} rows"
        begin = 0
        for scheduler, rows in planned:
            end = begin + len(rows)
            effects += self._settled(scheduler.advance(rows, result.rows[begin:end], now_s), now_s)
            begin = end
        return effects

    def _sample_step(self, planned: Planned, seconds: float) -> None:
        """If the step belongs to the sample, keeps it for the report and learns its cost.

        Most steps do not, and cost only this check. Decode rows come first, so the last row shows
        if all rows decode.
        """
        decodes_only = planned[-1][0] is self._decoder
        samples = self._decode_steps if decodes_only else self._other_steps
        is_told = samples.wants_next()
        is_learned = self._pace is not None and self._pace.wants(decodes_only=decodes_only)
        if not (is_told or is_learned):
            return
        step = self._step_report(planned, seconds)
        if step is not None and is_told:
            samples.keep(step)
        if step is not None and is_learned and self._pace is not None:
            self._pace.learn(step)

    def _step_report(self, planned: Planned, seconds: float) -> StepReport | None:
        """Returns a step's report; None if the report's numbers do not determine the step's
        time.
        """
        num_rows = num_context = num_new = squares = 0
        for scheduler, rows in planned:
            for row in rows:
                num_tokens, start = len(row.token_ids), row.start
                if scheduler is self._decoder:
                    if row.draft or row.num_to_draft or row.draft_token_ids:
                        return None
                    num_rows += 1
                    num_context += start + num_tokens
                elif row.scored:
                    return None
                else:
                    num_new += num_tokens
                    squares += (2 * start + num_tokens) * num_tokens  # end² - start²
        return StepReport(seconds, num_new, squares, num_rows, num_context)

    def load(self, open_leases: int, counters: Mapping[str, float]) -> LoadReport:
        """Returns the worker's present load, with the counters of transfers and schedulers.

        `steps` is a sample of the steps since the last call.
        """
        counts = self._pool.counts()
        counted: dict[str, float] = {}
        waiting = running = prompt_tokens = decode_seqs = decode_blocks = context_tokens = 0
        for scheduler in self._schedulers:
            for name, count in scheduler.counters.items():
                counted[name] = counted.get(name, 0) + count
            waiting += scheduler.num_waiting
            running += scheduler.num_running
            work = scheduler.workload
            prompt_tokens += work.prompt_tokens
            decode_seqs += work.decode_seqs
            decode_blocks += work.decode_blocks
            context_tokens += work.context_tokens
        return LoadReport(
            free_blocks=counts.free,
            cached_blocks=counts.cached,
            owned_blocks=counts.owned,
            leased_blocks=counts.leased,
            in_flight_blocks=counts.in_flight,
            waiting_seqs=waiting,
            running_seqs=running,
            open_leases=open_leases,
            counters={**counters, **counted},
            prompt_tokens=prompt_tokens,
            decode_seqs=decode_seqs,
            decode_blocks=decode_blocks,
            context_tokens=context_tokens,
            steps=self._decode_steps.take() + self._other_steps.take(),
        )

    def validate(self) -> None:
        """Asserts the invariants of pool and schedulers."""
        self._pool.validate()
        assert self._pool.num_steps == len(self._in_flight)
        for scheduler in self._schedulers:
            scheduler.validate()
