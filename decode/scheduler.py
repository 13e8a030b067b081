"""Continuous batching of sequences whose prompts have been computed, by this worker or another one.

The life of a sequence, and the part that owns it:

    queued    its lease is held at the source; it has no memory      `decode.arrivals`
    pulling   owns blocks for its prompt; missing blocks are         `decode.arrivals`
              being pulled
    ready     all KV is here; waits for its first token, which the   `decode.arrivals`
              gateway forwards
    running   has a row in every step                                `decode.running`

A sequence that was prefilled in this worker is running from the start. The router may move a
running sequence to another worker (`HandOver`). Then the sequence leaves between two steps with its
blocks (`engine.worker.offers`), and arrives at the other worker like any sequence. The other
worker's draft model may lack the KV of the last tokens.

A row has one token, or more if a draft is verified (`decode.drafts`). A sequence is admitted if
there is also room for the growth of the sequences admitted before (`DecodeMemory`). The start of a
step may be delayed for sequences that have just moved here (`StepHold`).

The scheduler uses no clock, tensor or socket.

Source: continuous batching, Yu et al., Orca, OSDI 2022.
"""

from collections import Counter
from collections.abc import Container, Mapping
from collections.abc import Sequence as Items

from decode.arrivals import Arrivals, DecodeMemory, StepHold
from decode.drafts import DraftPlanner
from decode.running import RunningBatch
from decode.speculation import Speculator
from engine.grammar.guide import OpenedGuide
from engine.messages import (
    ROLE_CHANGED,
    Decode,
    GatewayId,
    GivenBack,
    SeqId,
    Tokens,
)
from engine.worker.batch import Row, RowResult
from engine.worker.blocks import BlockPool
from engine.worker.events import NOTHING, Effect, Emit, PullDone, PullFailed, Scheduled
from engine.worker.intake import Intake
from engine.worker.sequence import Sequence


class DecodeScheduler:
    """Schedules arriving and running sequences; `max_running` bounds their total number."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        intake: Intake,
        max_running: int,
        growth_tokens: int = 128,
        speculator: Speculator | None = None,
    ) -> None:
        """A runner with a draft model needs a speculator, even if nothing is drafted.

        Only with a speculator does the draft model compute all tokens, so that blocks become
        complete. Sequences that `intake` refuses are given back.
        """
        self._intake = intake
        self._max_running = max_running
        self._pool = pool
        self._counters: Counter[str] = Counter()
        memory = self.memory = DecodeMemory(
            pool, block_size=intake.block_size, growth_tokens=growth_tokens
        )
        self._hold = StepHold(self._counters)
        self.drafts: DraftPlanner | None = None
        if speculator is not None:
            self.drafts = DraftPlanner(speculator, memory, self._counters)
        self.arrivals = Arrivals(memory, hold=self._hold, counters=self._counters)
        self.running = RunningBatch(memory, self.drafts, self._counters)

    @property
    def num_waiting(self) -> int:
        """The number of sequences that lack KV or their first token, including copies."""
        return self.arrivals.num_waiting

    @property
    def num_running(self) -> int:
        """The number of sequences that generate tokens."""
        return len(self.running.members)

    def _seqs(self) -> list[Sequence]:
        """Returns all sequences of this scheduler that are not cancelled."""
        return [*self.arrivals.seqs(), *self.running.members.values()]

    @property
    def num_blocks(self) -> int:
        """The number of blocks that all sequences need at their present lengths."""
        return sum([-(-len(seq.token_ids) // seq.block_size) for seq in self._seqs()])

    @property
    def num_context_tokens(self) -> int:
        """The number of tokens of all sequences."""
        return sum([len(seq.token_ids) for seq in self._seqs()])

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

    # ------------------------------------------------------------ events

    def enqueue(
        self, gateway_id: GatewayId, message: Decode, guide: OpenedGuide | None
    ) -> list[Effect]:
        """Appends a sequence whose KV is at another worker, or gives the sequence back."""
        if self._is_known(message.seq_id):
            return [Emit(gateway_id, GivenBack(message.seq_id, "the id is in use"))]
        seq = self._intake.open(gateway_id, message, guide)
        if isinstance(seq, GivenBack):
            return [Emit(gateway_id, seq)]
        if len(seq.token_ids) // seq.block_size + 1 > self._pool.num_blocks:
            return [Emit(gateway_id, GivenBack(seq.seq_id, "prompt exceeds the KV pool"))]
        has_draft_model = self.drafts is not None and self.drafts.has_draft_model
        num_seen = message.num_draft_tokens if has_draft_model else None
        return [self.arrivals.enqueue(seq, message, num_seen)]

    def _is_known(self, seq_id: SeqId) -> bool:
        arrivals = self.arrivals
        return (
            seq_id in self.running.members
            or seq_id in arrivals.queued
            or seq_id in arrivals.arriving
            or seq_id in arrivals.copies
            or seq_id in arrivals.aborting
        )

    def adopt(self, seq: Sequence) -> list[Effect]:
        """Adds a sequence that this worker has prefilled to the running batch."""
        if self._is_known(seq.seq_id):
            seq.release(self._pool)
            return [Emit(seq.gateway_id, GivenBack(seq.seq_id, "the id is in use"))]
        self.running.join(seq)
        return []

    def on_pull_ended(self, ended: PullDone | PullFailed) -> list[Effect] | None:
        """Keeps the blocks that arrived. Returns None if the pull belongs to no sequence of this
        scheduler.
        """
        seq_id, arrivals = ended.seq_id, self.arrivals
        if isinstance(ended, PullFailed) and seq_id in arrivals.queued:
            return arrivals.on_lease_lost(ended)
        arriving = arrivals.arriving.get(seq_id) or arrivals.aborting.get(seq_id)
        if arriving is None or arriving.kv_here:
            return None
        if isinstance(ended, PullFailed):
            return arrivals.on_pull_failed(arriving, ended)
        return arrivals.on_pull_done(arriving, ended) + self._run_if_complete(seq_id)

    def on_first_token(self, seq_id: SeqId, token: int) -> list[Effect]:
        """Records the first token of a sequence, which may be complete now."""
        arriving = self.arrivals.arriving.get(seq_id) or self.arrivals.queued.get(seq_id)
        if arriving is None:
            return []
        if not 0 <= token <= self._intake.last_id:
            given_back = GivenBack(seq_id, "the first token is not in the vocabulary")
            return [Emit(arriving.seq.gateway_id, given_back), *self.cancel(seq_id)]
        arriving.first_token = token
        return self._run_if_complete(seq_id)

    def _run_if_complete(self, seq_id: SeqId) -> list[Effect]:
        arriving = self.arrivals.arriving.get(seq_id)
        if arriving is None or not arriving.kv_here or arriving.first_token is None:
            return []
        del self.arrivals.arriving[seq_id]
        seq = arriving.seq
        _, finish = seq.extend((arriving.first_token,))
        if finish is not None:  # a correct gateway does not hand over a sequence that is finished
            seq.release(self._pool)
            return [Emit(seq.gateway_id, Tokens(seq.seq_id, [], finish))]
        self.running.join(seq)
        return []

    def remove_running(self, seq_id: SeqId) -> Sequence | None:
        """Removes a running sequence with its blocks. Returns None if no such sequence runs."""
        return self.running.leave(seq_id) if seq_id in self.running.members else None

    def cancel(self, seq_id: SeqId) -> list[Effect]:
        """Removes a sequence."""
        if seq_id in self.running.members:
            self.running.remove(seq_id)
            return []
        return self.arrivals.cancel(seq_id)

    def remove_gateway(self, gateway_id: GatewayId) -> list[Effect]:
        """Cancels all sequences of a lost gateway."""
        seqs = [*reversed(self.arrivals.seqs()), *self.running.members.values()]
        mine = [seq.seq_id for seq in seqs if seq.gateway_id == gateway_id]
        return [effect for seq_id in mine for effect in self.cancel(seq_id)]

    def give_back(self, accepted: Container[type]) -> list[Effect]:
        """Gives waiting sequences back if this worker no longer accepts new sequences."""
        if Decode in accepted:
            return []
        effects: list[Effect] = []
        # The gateway puts each returned sequence at the front of its queue.
        for seq in reversed(self.arrivals.seqs()):
            effects += self.cancel(seq.seq_id)
            effects.append(Emit(seq.gateway_id, GivenBack(seq.seq_id, ROLE_CHANGED)))
        return effects

    # ------------------------------------------------------------ steps

    def schedule(self, budget_tokens: int, now_s: float, *, ahead: bool = False) -> Scheduled:
        """Returns a row for each running sequence, and admits sequences while the pool has room.

        While a step is in flight (`ahead`), nothing is scheduled if drafts depend on that step, or
        if lack of memory would force the worker to give a sequence back.
        """
        running, arrivals, hold = self.running, self.arrivals, self._hold
        if ahead and (self.drafts is not None or not running.has_room()):
            return Scheduled(waits=True)
        if not (running.members or arrivals.queued or hold.is_open):
            return NOTHING
        due, short = running.due()
        effects: list[Effect] = []
        if short:
            effects += running.make_room(short, arrivals.drop_copy)
            due, _ = running.due()  # `make_room` may have given back some of the sequences
        chosen = due[:budget_tokens]
        admitted: list[Effect] = []
        is_any_running = bool(running.members)
        if arrivals.queued:
            admitted = arrivals.admit(self._max_running - len(running.members))
            if arrivals.queued:
                admitted += arrivals.give_back_stuck(now_s, is_any_running=is_any_running)
        if hold.is_open and hold.holds(
            now_s, arrivals.arriving.keys(), is_any_running=is_any_running
        ):
            return Scheduled(effects=effects + admitted, held_until_s=hold.until_s)
        # Drafts get half of the remaining token budget, so that prompts still make progress.
        has_drafts = self.drafts is not None and self.drafts.plan(
            chosen, (budget_tokens - len(chosen)) // 2
        )
        started = running.start(chosen) if running.joined else []
        rows = running.rows(chosen)
        num_tokens = len(rows)
        if has_drafts:
            num_tokens += sum([row.max_drafted for row in rows])
        if ahead:
            self._counters["pending_rows"] += sum(row.is_pending for row in rows)
        if chosen:
            self._counters["steps"] += 1
            self._counters["spec_steps"] += has_drafts
        return Scheduled(rows, num_tokens, effects + started + admitted)

    def advance(self, rows: Items[Row], results: Items[RowResult]) -> list[Effect]:
        """Appends the new tokens of each row. Ends the sequences whose answers are complete."""
        effects: list[Effect] = []
        members = self.running.members
        for row, result in zip(rows, results, strict=True):
            seq = members.get(row.seq_id)
            if seq is None or not seq.in_flight or seq.in_flight[0] is not row:
                self._counters["void_rows"] += 1  # the sequence ended while the step ran
                continue
            del seq.in_flight[0]
            if seq.guide is not None and (fault := seq.fault) is not None:
                self.running.remove(row.seq_id)
                given_back = GivenBack(row.seq_id, fault, hopeless=True)
                effects.append(Emit(seq.gateway_id, given_back))
            else:
                effects.append(Emit(seq.gateway_id, self._extend(seq, row, result)))
        return effects

    def _extend(self, seq: Sequence, row: Row, result: RowResult) -> Tokens:
        """Appends the tokens of a row to its sequence. The answer may end with these tokens."""
        chosen, drafts = result.token_ids, self.drafts
        taken, finish = seq.extend(chosen)  # drops the tokens past the answer's end
        num_taken = len(taken)
        num_accepted = min(len(chosen) - 1, num_taken) if len(chosen) > 1 else 0
        num_computed = len(row.token_ids) + num_accepted
        num_seen = None if drafts is None else drafts.num_seen(row, result, seq)
        seq.advance(num_computed, self._pool, num_draft_tokens=num_seen)
        if drafts is not None and drafts.marked:
            drafts.learn(row.seq_id, result, num_accepted)
        self._counters["step_tokens"] += num_taken
        if finish is not None:
            self.running.remove(row.seq_id)
        elif row.draft or row.num_to_draft:
            seq.trim(self._pool)
        logprobs = list(result.logprobs[:num_taken]) if result.logprobs else []
        return Tokens(row.seq_id, taken, finish, logprobs, result.num_drafted, num_accepted)

    def validate(self) -> None:
        """Asserts the scheduler's invariants."""
        self.arrivals.validate()
        self.running.validate()
        states = (self.arrivals.queued, self.arrivals.arriving, self.arrivals.copies)
        assert not any(seq_id in self.running.members for state in states for seq_id in state)
