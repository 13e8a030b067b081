"""Continuous batching of sequences whose prompts were computed, elsewhere or in this worker.

The life of a sequence, and the part that owns it:

    queued    holds its lease at the source, but has no memory       `decode.arrivals`
    pulling   owns blocks for its prompt; the missing ones are       `decode.arrivals`
              being pulled
    ready     all KV is here; waits for its first token, which the   `decode.arrivals`
              gateway forwards
    running   has a row in every step                                `decode.running`

A sequence that was prefilled in this worker (`Adopted`) is running from the start. The router may
move a running sequence to another worker (`HandOver`). Then the sequence leaves between two steps
with its blocks (`Leaving`), and arrives at the other worker like any sequence. The draft model
there may lack the KV of its last tokens.

A row has one token, or more where drafts are verified (`decode.drafts`). Room for admission
includes the growth of the sequences admitted before (`DecodeMemory`). A step may be held for
sequences that have just moved here (`StepHold`).

The scheduler knows no clock, tensor or socket.

Source: continuous batching, Yu et al., Orca, OSDI 2022.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items

from decode.arrivals import Arrivals, DecodeMemory, StepHold
from decode.drafts import DraftPlanner
from decode.running import RunningBatch
from decode.speculation import Speculator
from engine.grammar.guide import OpenedGuide
from engine.messages import (
    ROLE_CHANGED,
    Cancel,
    Decode,
    FirstToken,
    GatewayId,
    GivenBack,
    HandedOver,
    HandOver,
    SeqId,
    Tokens,
)
from engine.worker.batch import Row, RowResult
from engine.worker.blocks import BlockPool
from engine.worker.core import NOTHING, Scheduled, Workload
from engine.worker.events import (
    Adopted,
    Effect,
    Emit,
    Event,
    FromGateway,
    GatewayLost,
    Leaving,
    PassedOn,
    PullDone,
    PullFailed,
)
from engine.worker.intake import Intake
from engine.worker.sequence import Sequence


class DecodeScheduler:
    """Arriving and running sequences; `max_running` bounds their total number."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        intake: Intake,
        max_running: int,
        growth_tokens: int = 128,
        speculator: Speculator | None = None,
    ) -> None:
        """A runner with a draft model needs a speculator, even one that drafts nothing: only a
        speculator makes blocks complete. Sequences that `intake` refuses are given back.
        """
        self._intake = intake
        self._max_running = max_running
        self._pool = pool
        self._counters: Counter[str] = Counter()
        self.memory = DecodeMemory(pool, block_size=intake.block_size, growth_tokens=growth_tokens)
        self._hold = StepHold(self._counters)
        self.drafts = DraftPlanner(speculator, self.memory, self._counters)
        self.arrivals = Arrivals(
            pool, block_size=intake.block_size, hold=self._hold, counters=self._counters
        )
        self.running = RunningBatch(pool, self.drafts, self._counters)

    @property
    def num_waiting(self) -> int:
        """The number of sequences that lack KV or their first token, copies included."""
        return self.arrivals.num_waiting

    @property
    def num_running(self) -> int:
        """The number of sequences that generate."""
        return len(self.running)

    @property
    def held_until_s(self) -> float | None:
        """When the hold of the next step ends, unless an event ends it before; None: no hold."""
        return self._hold.until_s

    @property
    def workload(self) -> Workload:
        """The work of all sequences here at their present lengths, without cancelled sequences."""
        waiting = self.arrivals.seqs()
        return Workload(
            decode_seqs=len(waiting) + len(self.running),
            decode_blocks=self.running.num_blocks + sum(seq.num_blocks for seq in waiting),
            context_tokens=self.running.num_context_tokens
            + sum(len(seq.token_ids) for seq in waiting),
        )

    @property
    def counters(self) -> Mapping[str, int]:
        """Counters since the start.

        preempted              sequences given back for want of memory
        stuck                  sequences given back because no memory was freed in time
        copies_dropped         copies of sequences that run elsewhere, given back for want of memory
        kept_blocks            blocks that failed or cancelled pulls left cached here
        held_steps             steps that delayed running sequences for moved ones
        held_steps:late        held steps that began before all awaited blocks were here
        steps, step_tokens     steps that decoded, and the tokens that they yielded
        pending_rows           rows planned before their token was known
        void_rows              rows of sequences that ended before their step did
        spec_steps             decode steps with at least one drafted token
        drafted:<proposer>     tokens verified; accepted:<proposer>: drafted tokens that were kept
        accepted_len:<tokens>  drafts of which <tokens> tokens were kept
        """
        return self._counters

    def accepts(self, kind: type) -> bool:
        """True for sequences that were handed over, or prefilled in this worker."""
        return kind in (Decode, Adopted)

    # ------------------------------------------------------------ events

    def handle(self, event: Event, now_s: float) -> Items[Effect | PassedOn]:
        """Handles an event."""
        match event:
            case FromGateway(gateway_id, Decode() as message, guide):
                return self._enqueue(gateway_id, message, guide)
            case FromGateway(gateway_id, HandOver() as message):
                return self._hand_over(gateway_id, message)
            case FromGateway(_, FirstToken(seq_id, token)):
                return self._on_first_token(seq_id, token)
            case FromGateway(_, Cancel(seq_id)):
                return self._cancel(seq_id)
            case GatewayLost(gateway_id):
                return self._remove_gateway(gateway_id)
            case PullDone():
                effects = self.arrivals.on_pull_done(event)
                return [*effects, *self._run_if_complete(event.seq_id)]
            case PullFailed():
                return self.arrivals.on_pull_failed(event)
            case Adopted(seq):
                return self._adopt(seq)
            case _:
                return []

    def _enqueue(
        self, gateway_id: GatewayId, message: Decode, guide: OpenedGuide | None
    ) -> list[Effect]:
        if self._is_known(message.seq_id):
            return [Emit(gateway_id, GivenBack(message.seq_id, "the id is in use"))]
        seq = self._intake.open(gateway_id, message, guide)
        if isinstance(seq, GivenBack):
            return [Emit(gateway_id, seq)]
        if self.memory.blocks_of(len(seq.token_ids) + 1) > self._pool.num_blocks:
            return [Emit(seq.gateway_id, GivenBack(seq.seq_id, "prompt exceeds the KV pool"))]
        num_seen = message.num_draft_tokens if self.drafts.has_draft_model else None
        return [self.arrivals.enqueue(seq, message, num_seen)]

    def _is_known(self, seq_id: SeqId) -> bool:
        return seq_id in self.arrivals or seq_id in self.running

    def _adopt(self, seq: Sequence) -> list[Effect]:
        if self._is_known(seq.seq_id):
            seq.release(self._pool)
            return [Emit(seq.gateway_id, GivenBack(seq.seq_id, "the id is in use"))]
        self.running.join(seq)
        return []

    def _on_first_token(self, seq_id: SeqId, token: int) -> list[Effect]:
        arriving = self.arrivals.arriving.get(seq_id) or self.arrivals.queued.get(seq_id)
        if arriving is None:
            return []
        if not self._intake.knows(token):
            given_back = GivenBack(seq_id, "the first token is not in the vocabulary")
            return [Emit(arriving.seq.gateway_id, given_back), *self._cancel(seq_id)]
        arriving.first_token = token
        return self._run_if_complete(seq_id)

    def _run_if_complete(self, seq_id: SeqId) -> list[Effect]:
        arriving = self.arrivals.arriving.get(seq_id)
        if arriving is None or not arriving.kv_here or arriving.first_token is None:
            return []
        del self.arrivals.arriving[seq_id]
        seq = arriving.seq
        finish = seq.append(arriving.first_token)
        if finish is not None:  # a correct gateway does not hand over a finished sequence
            seq.release(self._pool)
            return [Emit(seq.gateway_id, Tokens(seq.seq_id, [], finish))]
        self.running.join(seq)
        return []

    def _hand_over(self, gateway_id: GatewayId, message: HandOver) -> list[Emit | Leaving]:
        if message.seq_id not in self.running:
            return [Emit(gateway_id, HandedOver(message.seq_id, None))]
        return [Leaving(self.running.leave(message.seq_id), message.as_seq_id)]

    def _cancel(self, seq_id: SeqId) -> list[Effect]:
        if seq_id in self.running:
            self.running.end(seq_id)
            return []
        return self.arrivals.cancel(seq_id)

    def _remove_gateway(self, gateway_id: GatewayId) -> list[Effect]:
        seqs = [*reversed(self.arrivals.seqs()), *self.running.seqs()]
        mine = [seq.seq_id for seq in seqs if seq.gateway_id == gateway_id]
        return [effect for seq_id in mine for effect in self._cancel(seq_id)]

    def give_back(self, accepts: Callable[[type], bool]) -> list[Effect]:
        """Gives waiting sequences back if this worker accepts no new sequences any more."""
        if accepts(Decode):
            return []
        effects: list[Effect] = []
        # The gateway puts each returned sequence at the front of its queue.
        for seq in reversed(self.arrivals.seqs()):
            effects += self._cancel(seq.seq_id)
            effects.append(Emit(seq.gateway_id, GivenBack(seq.seq_id, ROLE_CHANGED)))
        return effects

    # ------------------------------------------------------------ steps

    def schedule(self, budget_tokens: int, now_s: float, *, ahead: bool = False) -> Scheduled:
        """Returns a row for each running sequence; admits sequences while the pool has room.

        With a step in flight (`ahead`), nothing is scheduled if drafts depend on that step, or if
        a sequence would have to be given back for want of memory.
        """
        if ahead and (self.drafts.needs_last_step or not self.running.has_room()):
            return Scheduled(waits=True)
        if not (len(self.running) or self.arrivals.queued or self._hold.is_open):
            return NOTHING
        due = self.running.due()
        effects = self.running.make_room(due, self._drop_copy)
        if effects:
            due = self.running.due()  # `make_room` may have given sequences back
        chosen = due[:budget_tokens]
        admitted: list[Effect] = []
        is_any_running = bool(len(self.running))
        if self.arrivals.queued:
            max_arriving = self._max_running - len(self.running)
            admitted = self.arrivals.admit(max_arriving, self._has_room)
            admitted += self.arrivals.give_back_stuck(now_s, is_any_running=is_any_running)
        arriving = self.arrivals.arriving.keys()
        if self._hold.is_open and self._hold.holds(now_s, arriving, is_any_running=is_any_running):
            return Scheduled(effects=effects + admitted, held_until_s=self.held_until_s)
        # Drafts get half of the remaining budget, so that prompts still make progress.
        has_drafts = self.drafts.plan(chosen, (budget_tokens - len(chosen)) // 2, self._growing)
        started = self.running.start(chosen)
        rows = [self.running.row(seq) for seq in chosen]
        num_tokens = len(rows)
        if has_drafts:
            num_tokens += sum([row.max_drafted for row in rows])
        if ahead and (num_pending := sum(row.is_pending for row in rows)):
            self._counters["pending_rows"] += num_pending
        if chosen:
            self._counters["steps"] += 1
            self._counters["spec_steps"] += has_drafts
        return Scheduled(rows, num_tokens, effects + started + admitted)

    def advance(self, rows: Items[Row], results: Items[RowResult], now_s: float) -> list[Effect]:
        """Appends the tokens of each row; ends the sequences whose answers are complete."""
        effects: list[Effect] = []
        for row, result in zip(rows, results, strict=True):
            seq = self.running.land(row)
            if seq is None:  # the sequence ended during the step
                self._counters["void_rows"] += 1
            elif seq.guide is not None and (fault := seq.fault) is not None:
                self.running.end(row.seq_id)
                given_back = GivenBack(row.seq_id, fault, hopeless=True)
                effects.append(Emit(seq.gateway_id, given_back))
            else:
                effects.append(Emit(seq.gateway_id, self._extend(seq, row, result)))
        return effects

    def _extend(self, seq: Sequence, row: Row, result: RowResult) -> Tokens:
        """Appends the tokens of a row to its sequence. The answer may end with these tokens."""
        chosen, drafts = result.token_ids, self.drafts
        taken, finish = seq.extend(chosen)  # cuts the tokens past the answer's end
        num_taken = len(taken)
        num_accepted = min(len(chosen) - 1, num_taken) if len(chosen) > 1 else 0
        num_computed = len(row.token_ids) + num_accepted
        if not drafts.marked:
            num_seen = seq.num_draft_tokens if drafts.has_draft_model else None
            seq.advance(num_computed, self._pool, num_draft_tokens=num_seen)
        else:
            num_seen = drafts.num_seen(row, result, seq)
            seq.advance(num_computed, self._pool, num_draft_tokens=num_seen)
            drafts.learn(row.seq_id, result, num_accepted)
        self._counters["step_tokens"] += num_taken
        if finish is not None:
            self.running.end(row.seq_id)
        elif row.draft or row.num_to_draft:
            seq.trim(self._pool)
        logprobs = list(result.logprobs[:num_taken]) if result.logprobs else []
        return Tokens(row.seq_id, taken, finish, logprobs, result.num_drafted, num_accepted)

    def _has_room(self, candidate: Sequence) -> bool:
        num_admitted = len(self.running) + len(self.arrivals.arriving)
        return self.memory.has_room(candidate, num_admitted=num_admitted, admitted=self._growing)

    def _growing(self) -> list[Sequence]:
        """Returns the sequences that have memory and will need more."""
        arriving = [arriving.seq for arriving in self.arrivals.arriving.values()]
        return self.running.seqs() + arriving

    def _drop_copy(self) -> Effect | None:
        return self.arrivals.drop_copy() if self.arrivals.copies else None

    def validate(self) -> None:
        """Asserts the scheduler's invariants."""
        self.arrivals.validate()
        self.running.validate()
        states = (self.arrivals.queued, self.arrivals.arriving, self.arrivals.copies)
        assert not any(seq_id in self.running for state in states for seq_id in state)
