"""The core of a worker: its schedulers around one block pool, without I/O.

Every worker has all schedulers; its role is nothing but what it accepts. So a change of role builds
nothing, and weights, KV, what is cached and what is leased stay. New work that the role is not for
is given back, and so is what waits; what runs goes on until it ends or is handed over, so that for
a while a worker may do more than its role says.

Per step the core asks the schedulers in order for rows under one token budget (decode first: its
rows are short and somebody is waiting for each token), and hands the results back. Everything else
that happens is an event. A scheduler may ask for a step to be held for a moment, for something that
is about to come.

The host around it owns the threads: it feeds events, runs the plans, and performs the effects.

What a step cost is reported for those from which a gateway can learn: plain decode steps and chunks
of prompts, timed by the runner. Left out are steps with drafts, of the draft model's or verified,
and prompts whose log-probabilities are asked for: tokens alone do not say what these cost.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from engine.messages import (
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

MAX_STEPS_OF_A_KIND = 8  # in one report: of those that only decode, and of others


@dataclass(slots=True)
class Scheduled:
    """What a scheduler wants of this step."""

    rows: list[Row] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    held_until_s: float | None = None  # by then, or after the next event, a step may begin; not now


@dataclass(frozen=True, slots=True)
class Workload:
    """What a scheduler has accepted and not finished: see `LoadReport`."""

    prompt_tokens: int = 0
    decode_seqs: int = 0
    decode_blocks: int = 0
    context_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Duties:
    """What a worker is there for, and what else it may become."""

    role: Role = Role.MIXED
    possible: Collection[Role] = tuple(Role)
    prefills_locally: bool = False  # as `Welcome` has it, while the role is to decode

    @property
    def is_local(self) -> bool:
        """Whether it decodes for others and yet takes prompts to go on with."""
        return self.role is Role.DECODE and self.prefills_locally

    def accepts(self, kind: type) -> bool:
        """Whether new work of a kind is taken."""
        if kind is Prefill:
            return self.role.prefills
        if kind is Decode:
            return self.role.decodes
        return kind is Generate and (self.role is Role.MIXED or self.is_local)


class Scheduler(Protocol):
    """One part of a worker's work: prefill, decode, or offering prefixes."""

    def accepts(self, kind: type) -> bool:
        """Whether a message of this kind opens a sequence here, or one passed on comes here.

        Other events concern every scheduler.
        """
        ...

    def handle(self, event: Event, now_s: float) -> Sequence[Effect | PassedOn]:
        """Takes note of an event."""
        ...

    def give_back(self, accepts: Callable[[type], bool]) -> list[Effect]:
        """Gives back what has not begun, of kinds that are accepted no more."""
        ...

    def schedule(self, budget_tokens: int, now_s: float) -> Scheduled:
        """Chooses rows of at most `budget_tokens` tokens in all."""
        ...

    def advance(self, row: Row, result: RowResult, now_s: float) -> Sequence[Effect | PassedOn]:
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
    def workload(self) -> Workload:
        """What is still to be done for the sequences here."""
        ...

    @property
    def counters(self) -> Mapping[str, int]:
        """What has happened here since the start, by "name" or "name:reason"."""
        ...

    def validate(self) -> None:
        """Asserts the scheduler's invariants."""
        ...


Observe = Callable[[BatchPlan, BatchResult, float], None]


class StepSamples:
    """Steps of one kind since the last report: all, or as many as fit, spread evenly over them."""

    def __init__(self, max_kept: int = MAX_STEPS_OF_A_KIND) -> None:
        self._max_kept = max_kept
        self._kept: list[StepReport] = []
        self._stride = 1
        self._num_passed = 0

    def wants_next(self) -> bool:
        """Whether the step that has just ended is one to keep."""
        self._num_passed += 1
        return self._num_passed >= self._stride

    def keep(self, step: StepReport) -> None:
        """Keeps a step; of those that there is no room for, every other one goes."""
        self._num_passed = 0
        self._kept.append(step)
        if len(self._kept) > self._max_kept:
            self._kept = self._kept[::2]
            self._stride *= 2

    def take(self) -> list[StepReport]:
        """What was kept; begins anew."""
        kept, self._kept = self._kept, []
        self._stride, self._num_passed = 1, 0
        return kept


class WorkerCore:
    """Schedulers, pool and the plan that is running. Owned by one thread."""

    def __init__(
        self,
        schedulers: Sequence[Scheduler],
        pool: BlockPool,
        max_batch_tokens: int,
        *,
        duties: Duties | None = None,
        observe: Observe | None = None,
    ) -> None:
        """Without `duties` it takes whatever its schedulers do.

        `observe` is told what each step was, how long it took, and when it ended.
        """
        self._duties = duties or Duties()
        self._schedulers = schedulers
        self._pool = pool
        self._max_batch_tokens = max_batch_tokens
        self._observe = observe
        self._running: list[tuple[Scheduler, Row]] = []
        self._decoder = self._taker(Adopted)
        self._decode_steps, self._other_steps = StepSamples(), StepSamples()
        self._held_until_s: float | None = None

    @property
    def held_until_s(self) -> float | None:
        """The last plan was none since a step is being held: until then, or for an event."""
        return self._held_until_s

    @property
    def role(self) -> Role:
        """What it is there for."""
        return self._duties.role

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Feeds an event to whom it concerns. A sequence that nobody accepts is given back.

        Not while a step runs: an event may free blocks that the step is writing to.
        """
        assert not self._running, "a step is running"
        return self._dispatch(event, now_s)

    def _dispatch(self, event: Event, now_s: float) -> list[Effect]:
        match event:
            case Adopted() | Leaving():
                taker = self._taker(type(event))
                assert taker is not None, f"nobody takes what is passed on: {event}"
                return self._settled(taker.handle(event, now_s), now_s)
            case FromGateway(gateway_id, Prefill() | Generate() | Decode() as message):
                taker = self._taker(type(message)) if self._accepts(type(message)) else None
                if taker is None:
                    return [Emit(gateway_id, GivenBack(message.seq_id, WRONG_ROLE))]
                return self._settled(taker.handle(event, now_s), now_s)
            case FromGateway(gateway_id, HandOver(seq_id)) if self._decoder is None:
                return [Emit(gateway_id, HandedOver(seq_id, None))]
            case FromGateway(_, SetRole(role)):
                return self._set_role(role)
            case _:
                effects = [e for s in self._schedulers for e in s.handle(event, now_s)]
                return self._settled(effects, now_s)

    def _settled(self, effects: Iterable[Effect | PassedOn], now_s: float) -> list[Effect]:
        """Effects, with what follows from those that concern another scheduler here."""
        settled: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Adopted | Leaving):
                settled += self._dispatch(effect, now_s)
            else:
                settled.append(effect)
        return settled

    # ------------------------------------------------------------ roles

    def _accepts(self, kind: type) -> bool:
        """Whether it takes new work of a kind."""
        if kind is Generate and self._decoder is None:
            return False
        return self._duties.accepts(kind)

    def _set_role(self, role: Role) -> list[Effect]:
        """All gateways are told, also where it stays what it was: whoever asked waits for that."""
        if role in self._duties.possible:
            self._duties = replace(self._duties, role=role)
        duties = self._duties
        effects: list[Effect] = [EmitToAll(RoleChanged(duties.role, duties.is_local))]
        for scheduler in self._schedulers:
            effects += scheduler.give_back(self._accepts)
        return effects

    def _taker(self, kind: type) -> Scheduler | None:
        return next((s for s in self._schedulers if s.accepts(kind)), None)

    def plan(self, now_s: float) -> tuple[BatchPlan | None, list[Effect]]:
        """The next forward pass; `finish` ends it. None if there is nothing to compute, or if it is
        held (`held_until_s`).
        """
        assert not self._running, "the last plan has not been finished"
        budget = self._max_batch_tokens
        effects: list[Effect] = []
        for scheduler in self._schedulers:
            scheduled = scheduler.schedule(budget, now_s)
            self._held_until_s = scheduled.held_until_s
            if scheduled.held_until_s is not None:
                assert not self._running
                return None, effects + scheduled.effects
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
        if result.times is not None:
            self._sample_step(result.times.total_s)
        for (scheduler, row), row_result in zip(self._running, result.rows, strict=True):
            for effect in scheduler.advance(row, row_result, now_s):
                if isinstance(effect, Adopted | Leaving):
                    effects += self._dispatch(effect, now_s)
                else:
                    effects.append(effect)
        self._running = []
        return effects

    def _sample_step(self, seconds: float) -> None:
        """Takes note of what a step was, if it is one of those that will be reported.

        Most are not, and cost nothing but this look: rows that decode come first.
        """
        decodes_only = bool(self._running) and self._running[-1][0] is self._decoder
        samples = self._decode_steps if decodes_only else self._other_steps
        if samples.wants_next():
            step = self._step_report(seconds)
            if step is not None:
                samples.keep(step)

    def note_decoding(self, seconds: float, *, num_rows: int, num_context_tokens: int) -> None:
        """Takes note of a step that only decoded and was not run as a plan of this core."""
        if self._decode_steps.wants_next():
            step = StepReport(seconds, num_rows=num_rows, num_context_tokens=num_context_tokens)
            self._decode_steps.keep(step)

    def _step_report(self, seconds: float) -> StepReport | None:
        """A step in numbers; None where they would not say why it took so long."""
        rows = [row for scheduler, row in self._running if scheduler is self._decoder]
        chunks = [row for scheduler, row in self._running if scheduler is not self._decoder]
        if any(row.max_drafted or row.draft_token_ids for row in rows):
            return None
        if any(row.scored for row in chunks):
            return None
        return StepReport(
            seconds=seconds,
            num_prefill_tokens=sum(len(row.token_ids) for row in chunks),
            prefill_squares=sum(row.end * row.end - row.start * row.start for row in chunks),
            num_rows=len(rows),
            num_context_tokens=sum(row.end for row in rows),
        )

    def load(self, open_leases: int, counters: Mapping[str, float]) -> LoadReport:
        """What this worker holds now, and what was counted: the transfers' and the schedulers'.

        `steps` are some of those since the last call.
        """
        counts = self._pool.counts()
        counted: dict[str, float] = {}
        for scheduler in self._schedulers:
            for name, count in scheduler.counters.items():
                counted[name] = counted.get(name, 0) + count
        workloads = [scheduler.workload for scheduler in self._schedulers]
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
            prompt_tokens=sum(w.prompt_tokens for w in workloads),
            decode_seqs=sum(w.decode_seqs for w in workloads),
            decode_blocks=sum(w.decode_blocks for w in workloads),
            context_tokens=sum(w.context_tokens for w in workloads),
            steps=self._decode_steps.take() + self._other_steps.take(),
        )

    def validate(self) -> None:
        """Asserts the invariants of pool and schedulers."""
        self._pool.validate()
        for scheduler in self._schedulers:
            scheduler.validate()
