"""Continuous batching of sequences whose prompts were computed, elsewhere or in this worker.

Life of a sequence here:

    queued    holds its lease at the source, but no memory
    pulling   owns blocks for its prompt; those it lacks are being pulled
    ready     all KV is here; waits for its first token, which the gateway forwards
    running   has a row in every step

A sequence that was prefilled in this worker (`Adopted`) begins as a running one. A running one that
is to go on elsewhere (`HandOver`) leaves between two steps, with its blocks (`Leaving`). Where it
goes on it comes like any other; of its last tokens the draft model may have seen nothing.

Only a queue head that the pool has room for is admitted, in order of arrival, and room includes the
growth of the sequences admitted before it within the next `growth_tokens` tokens each. If memory
runs short all the same, the youngest running sequence is given back to the gateway, which
continues it elsewhere or later with the same tokens; its blocks stay cached here.

A sequence that comes from where it ran already (`Decode.is_moved`) lacks a block or two, and its
client waits in the middle of an answer. So the step that would begin while these are pulled is held
for them, for `HOLD_S` at most: else all of a step would pass before its own. No step is held twice,
no sequence is waited for twice, and what runs here is not kept waiting again for `REST_S`, however
many move here one after another.

A copy of what runs elsewhere still (`Decode.is_copy`) is pulled like any, and then only held: no
row is kept for it. Nobody waits for its sake: without room it is given back at once, and once it is
here before any sequence waits for memory or is given back, the youngest copy first.

Blocks that a prefix hit finds here are not pulled. A cancelled sequence keeps its blocks until the
transfer endpoint has reported that nothing writes into them any more.

A running sequence has a row of one token, or of more where a `Speculator` has something drafted:
an n-gram of its own, or as many tokens as the draft model shall propose. Blocks for drafted tokens
are those that nobody else is promised; what the rejected ones needed comes back after the step.
The draft model may leave sequences out; its K and V of them are made up for when it drafts again,
and when a block is full, which others cannot find before.

Of a pull that fails or is cancelled half-way, the blocks that are here stay cached, so the next
attempt on this worker pulls only the rest; the gateway is told how much that is.

The scheduler knows no clock, tensor or socket.

Sources: continuous batching, Yu et al., Orca, OSDI 2022; two owners of a block, sglang#24527.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import msgspec

from decode.acceptance import Proposer
from decode.lockstep import Lockstep, NextTokens
from decode.ngram import Match, NgramIndex
from decode.speculation import MAX_UNSEEN_TOKENS, Candidate, Proposal, Speculator
from engine.grammar.guide import OpenedGuide
from engine.messages import (
    PREEMPTED,
    PULL_FAILED,
    ROLE_CHANGED,
    Cancel,
    Decode,
    DecodeStarted,
    FinishReason,
    FirstToken,
    GatewayId,
    GivenBack,
    HandedOver,
    HandOver,
    KvReady,
    OfferPrefix,
    SeqId,
    Tokens,
)
from engine.worker.batch import Row, RowResult
from engine.worker.blocks import BlockId, BlockPool
from engine.worker.core import Scheduled, Workload
from engine.worker.events import (
    AbortPull,
    Adopted,
    Effect,
    Emit,
    Event,
    FromGateway,
    GatewayLost,
    HoldLease,
    LeaseEnded,
    Leaving,
    PassedOn,
    PullDone,
    PullFailed,
    StartPull,
)
from engine.worker.intake import Intake
from engine.worker.sequence import Sequence

INDEXED_TOKENS = 256  # of long prompts together, in one step
_ARRIVALS = (Decode, FirstToken, OfferPrefix)  # running sequences are none of their business
_NEWS_OF_TRANSFERS = (PullDone, PullFailed, LeaseEnded, Adopted)
HOLD_S = 0.02  # that a step waits for what is pulled for sequences that have moved here
REST_S = 0.05  # that no step waits after one that did
CATCH_UP_TOKENS = 512  # that the draft model makes up for in one step, of sequences that it leaves


@dataclass(slots=True)
class _Arriving:
    """A sequence whose KV is not all here, or whose first token is not."""

    seq: Sequence
    pulled: tuple[BlockId, ...] | None = None  # being written; None while queued
    kv_here: bool = False
    first_token: int | None = None
    num_draft_tokens: int | None = None  # that the draft model has seen at the source; None: all
    is_copy: bool = False
    is_moved: bool = False

    def may_keep(self, index: int, block_size: int) -> bool:
        """Whether a block of the prompt is all that others expect of it."""
        seen = self.num_draft_tokens
        return seen is None or (index + 1) * block_size <= seen


@dataclass(slots=True)
class _Running:
    seq: Sequence
    ngrams: NgramIndex | None = None
    has_run: bool = False
    # In the step that is planned or runs:
    match: Match | None = None
    proposal: Proposal | None = None
    is_seen: bool = False  # by the draft model


class Alike(NamedTuple):
    """So many steps of the same rows, one token each. The contexts are those of the first step."""

    num_rows: int
    num_context_tokens: int
    num_steps: int


class DecodeScheduler:
    """Sequences arriving and running; `max_running` bounds the two together."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        intake: Intake,
        max_running: int,
        growth_tokens: int = 128,
        speculator: Speculator | None = None,
    ) -> None:
        """Where the runner has a draft model there must be a speculator, be it one that drafts
        nothing: it sees to it that blocks are complete. What `intake` does not let in is given
        back.
        """
        self._pool = pool
        self._intake = intake
        self._block_size = intake.block_size
        self._max_running = max_running
        self._growth_tokens = growth_tokens
        self._speculator = speculator
        self._has_draft_model = speculator is not None and speculator.has_draft_model
        self._queued: OrderedDict[SeqId, _Arriving] = OrderedDict()
        self._arriving: dict[SeqId, _Arriving] = {}
        self._copies: dict[SeqId, Sequence] = {}  # complete; oldest first
        self._running: dict[SeqId, _Running] = {}  # oldest first
        self._aborting: dict[SeqId, _Arriving] = {}  # cancelled; their pulls may still write
        self._awaited: set[SeqId] = set()  # moved here, and pulling since the last step
        self._held_until_s: float | None = None  # the next step is
        self._keeps_waiting = False  # sequences that run are, by a step that is held
        self._rests_until_s = -inf  # no step is held before
        self._counters: Counter[str] = Counter()
        self._lockstep: Lockstep | None = None  # what it counts is not written down

    @property
    def num_waiting(self) -> int:
        """Sequences whose KV or first token is missing, copies among them."""
        return len(self._queued) + len(self._arriving) + len(self._copies)

    @property
    def num_running(self) -> int:
        """Sequences that generate."""
        return len(self._running)

    @property
    def held_until_s(self) -> float | None:
        """No step was scheduled since it is held: until then, or for an event."""
        return self._held_until_s

    @property
    def workload(self) -> Workload:
        """The sequences here, at their present lengths; those that were cancelled do not count."""
        seqs = self._waiting()
        num_blocks = num_context_tokens = 0
        if self._lockstep is not None:
            num_blocks = self._lockstep.num_blocks
            num_context_tokens = self._lockstep.num_context_tokens
        else:
            seqs += [running.seq for running in self._running.values()]
        return Workload(
            decode_seqs=self.num_waiting + len(self._running),
            decode_blocks=num_blocks + sum(seq.num_blocks for seq in seqs),
            context_tokens=num_context_tokens + sum(len(seq.token_ids) for seq in seqs),
        )

    @property
    def counters(self) -> Mapping[str, int]:
        """What has happened here.

        preempted              sequences given back for want of memory
        copies_dropped         copies given back for want of memory, of what runs elsewhere
        kept_blocks            blocks that pulls left here without coming to their end
        held_steps, of these held_steps:late  where what runs here waited for what has moved; where
                               that came too late
        steps, step_tokens     steps that decoded, and the tokens that they came to
        spec_steps             of those steps, the ones in which anything was drafted
        drafted:<proposer>     tokens verified; accepted:<proposer>, of these, the ones kept
        accepted_len:<tokens>  drafts of which so many tokens were kept
        """
        return self._counters

    def accepts(self, kind: type) -> bool:
        """Sequences are decoded here, handed over or prefilled in this worker."""
        return kind in (Decode, Adopted)

    def give_back(self, accepts: Callable[[type], bool]) -> list[Effect]:
        """Those whose KV or first token is missing, if new ones are not accepted any more."""
        if accepts(Decode):
            return []
        effects: list[Effect] = []
        # Who comes back last is first in the queue again.
        for seq in reversed(self._waiting()):
            effects += self._cancel(seq.seq_id)
            effects.append(Emit(seq.gateway_id, GivenBack(seq.seq_id, ROLE_CHANGED)))
        return effects

    def handle(self, event: Event, now_s: float) -> Items[Effect | PassedOn]:
        """Takes note of an event."""
        if self._lockstep is not None and not _is_arrival(event):
            self._lockstep.catch_up()
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
                return self._forget_gateway(gateway_id)
            case PullDone():
                return self._on_pull_done(event)
            case PullFailed():
                return self._on_pull_failed(event)
            case Adopted(seq):
                return self._adopt(seq)
            case _:
                return []

    def schedule(self, budget_tokens: int, now_s: float) -> Scheduled:
        """A row of every running sequence; admits what the pool has room for."""
        self._leave_lockstep()
        scheduled = Scheduled()
        scheduled.effects += self._make_room()
        chosen = list(self._running.values())[:budget_tokens]
        admitted = self._admit()
        if self._is_held(now_s):
            return Scheduled([], scheduled.effects + admitted, self._held_until_s)
        if self._speculator is not None and chosen:
            # Of what plain rows leave, half is for drafts: prompts must get on beside them.
            self._draft(chosen, self._speculator, (budget_tokens - len(chosen)) // 2)
        for running in chosen:
            seq = running.seq
            if not running.has_run:
                running.has_run = True
                scheduled.effects.append(Emit(seq.gateway_id, DecodeStarted(seq.seq_id)))
            scheduled.rows.append(self._row(running))
        scheduled.effects += admitted
        if chosen:
            self._counters["steps"] += 1
            self._counters["spec_steps"] += any(r.proposal is not None for r in chosen)
        return scheduled

    def advance(self, row: Row, result: RowResult, now_s: float) -> list[Effect]:
        """A sequence has its next tokens."""
        running = self._running[row.seq_id]
        seq = running.seq
        if (fault := seq.fault) is not None:
            self._leave(row.seq_id)
            return [Emit(seq.gateway_id, GivenBack(row.seq_id, fault, hopeless=True))]
        taken, finish = seq.extend(result.token_ids)  # what is behind the end is not wanted
        num_accepted = min(result.num_accepted, len(taken))
        num_computed = len(row.token_ids) + num_accepted
        seq.advance(num_computed, self._pool, num_draft_tokens=self._num_seen(row, result, seq))
        self._count(running, result, num_tokens=len(taken), num_accepted=num_accepted)
        if finish is None:
            seq.trim(self._pool)
        else:
            self._leave(row.seq_id)
        tokens = Tokens(
            seq_id=row.seq_id,
            token_ids=taken,
            finish=finish,
            logprobs=list(result.logprobs[: len(taken)]) if result.logprobs else [],
            num_drafted=result.num_drafted,
            num_accepted=num_accepted,
        )
        return [Emit(seq.gateway_id, tokens)]

    # ------------------------------------------------------------ many steps at once

    def schedule_alike(self, choose: NextTokens, now_s: float) -> tuple[Alike | None, list[Effect]]:
        """As `schedule`, for who prices steps and does not run them: how many there are until an
        answer ends or a block is full. `advance_alike` is told how many of them were. None where
        nothing runs, or a step is held (`held_until_s`).

        The tokens will be those that `choose` says. No grammars, penalties, stop tokens or drafts.
        """
        lockstep = self._lockstep or self._enter_lockstep(choose)
        effects: list[Effect] = []
        for seq in lockstep.changed():
            if seq.seq_id in self._running:
                effects += self._give_blocks(self._running[seq.seq_id])
        new = [r for s in lockstep.changed() if not (r := self._running[s.seq_id]).has_run]
        # Who comes into memory now does not run yet.
        num_rows, num_context_tokens = len(self._running), lockstep.num_context_tokens
        admitted = self._admit()
        if self._is_held(now_s):
            return None, effects + admitted
        for running in new:
            running.has_run = True
            effects.append(Emit(running.seq.gateway_id, DecodeStarted(running.seq.seq_id)))
        effects += admitted
        num_steps = lockstep.plan([running.seq.seq_id for running in new])
        return (Alike(num_rows, num_context_tokens, num_steps) if num_rows else None), effects

    def advance_alike(self, num_steps: int) -> list[Effect]:
        """So many steps have been run. Tokens are told of answers that have begun or ended by them;
        which ones is for those to say who have chosen them.
        """
        lockstep = self._lockstep
        assert lockstep is not None
        self._counters["steps"] += num_steps
        self._counters["step_tokens"] += num_steps * len(lockstep)
        effects: list[Effect] = []
        for seq in lockstep.go(num_steps):
            finish = None
            if len(seq.token_ids) >= seq.limits.max_len:
                finish = FinishReason.LENGTH
                self._leave(seq.seq_id)
            effects.append(Emit(seq.gateway_id, Tokens(seq.seq_id, [], finish)))
        return effects

    def _enter_lockstep(self, choose: NextTokens) -> Lockstep:
        assert self._speculator is None
        self._lockstep = Lockstep(self._pool, choose)
        for running in self._running.values():
            self._lockstep.join(running.seq)
        return self._lockstep

    def _leave_lockstep(self) -> None:
        if self._lockstep is not None:
            self._lockstep.catch_up()
            self._lockstep = None

    def validate(self) -> None:
        """Asserts the scheduler's invariants."""
        if self._lockstep is not None:
            self._lockstep.catch_up()
        assert not set(self._queued) & set(self._arriving)
        assert not set(self._arriving) & set(self._running)
        assert not set(self._arriving) & set(self._aborting)
        assert not set(self._copies) & {*self._queued, *self._arriving, *self._running}
        for queued in self._queued.values():
            assert queued.pulled is None
            assert not queued.seq.block_table
            assert queued.seq.num_computed_tokens == 0
        for arriving in self._arriving.values():
            assert arriving.pulled is not None
            assert not (arriving.kv_here and arriving.first_token is not None)
        for aborting in self._aborting.values():
            assert aborting.pulled is not None
            assert not aborting.kv_here
        for running in self._running.values():
            seq = running.seq
            assert seq.num_computed_tokens == len(seq.token_ids) - 1
            assert len(seq.block_table) <= seq.num_blocks
            assert self._has_draft_model or seq.num_unseen_tokens == 0

    # ------------------------------------------------------------ arrival

    def _enqueue(
        self, gateway_id: GatewayId, message: Decode, guide: OpenedGuide | None
    ) -> list[Effect]:
        if self._is_known(message.seq_id):
            return [Emit(gateway_id, GivenBack(message.seq_id, "the id is in use"))]
        seq = self._intake.open(gateway_id, message, guide)
        if isinstance(seq, GivenBack):
            return [Emit(gateway_id, seq)]
        if self._blocks_of(len(seq.token_ids) + 1) > self._pool.num_blocks:
            return [Emit(seq.gateway_id, GivenBack(seq.seq_id, "prompt exceeds the KV pool"))]
        num_draft_tokens = message.num_draft_tokens if self._has_draft_model else None
        self._queued[seq.seq_id] = _Arriving(
            seq,
            num_draft_tokens=num_draft_tokens,
            is_copy=message.is_copy,
            is_moved=message.is_moved,
        )
        return [HoldLease(seq.seq_id, message.lease)]

    def _is_known(self, seq_id: SeqId) -> bool:
        states = (self._queued, self._arriving, self._copies, self._running, self._aborting)
        return any(seq_id in state for state in states)

    def _adopt(self, seq: Sequence) -> list[Effect]:
        if self._is_known(seq.seq_id):
            seq.release(self._pool)
            return [Emit(seq.gateway_id, GivenBack(seq.seq_id, "the id is in use"))]
        self._run(seq)
        return []

    def _admit(self) -> list[Effect]:
        """Gives memory to queued sequences and starts their pulls."""
        effects: list[Effect] = []
        while self._queued and len(self._running) + len(self._arriving) < self._max_running:
            arriving = next(iter(self._queued.values()))
            seq = arriving.seq
            cached = self._pool.match(seq.block_hashes)
            seq.adopt_cached(cached, self._pool)
            if not self._has_room(seq):
                seq.release(self._pool)
                if arriving.is_copy:
                    effects += [*self._cancel(seq.seq_id), self._dropped(seq)]
                elif self._copies:
                    effects.append(self._drop_copy())
                else:
                    break
                continue
            blocks = self._pool.allocate(seq.num_blocks - len(cached))
            self._pool.begin_write(blocks)
            seq.block_table += blocks
            arriving.pulled = tuple(blocks)
            del self._queued[seq.seq_id]
            self._arriving[seq.seq_id] = arriving
            if arriving.is_moved:
                self._awaited.add(seq.seq_id)
            indices = range(len(cached), seq.num_blocks)
            effects.append(StartPull(seq.seq_id, tuple(zip(indices, blocks, strict=True))))
        return effects

    def _is_held(self, now_s: float) -> bool:
        """Whether no step begins yet: what is pulled for those that moved here is still to come."""
        self._awaited &= self._arriving.keys()
        if self._awaited and now_s >= self._rests_until_s:
            if self._held_until_s is None:
                self._held_until_s = now_s + HOLD_S
            if now_s < self._held_until_s:
                self._keeps_waiting = self._keeps_waiting or bool(self._running)
                return True
        if self._keeps_waiting:
            self._counters["held_steps"] += 1
            self._counters["held_steps:late"] += bool(self._awaited)
            self._rests_until_s = now_s + REST_S
        self._awaited.clear()
        self._held_until_s, self._keeps_waiting = None, False
        return False

    def _has_room(self, candidate: Sequence) -> bool:
        """Whether its prompt fits, and with it the growth to come unless nothing else runs."""
        num_idle = self._pool.num_idle
        num_admitted = len(self._running) + len(self._arriving)
        if not num_admitted:
            return candidate.num_blocks - len(candidate.block_table) <= num_idle
        # Nobody soon lacks more than growth takes, a block begun before and one not yet given.
        most = self._growth_tokens // self._block_size + 2
        if self._soon_blocks(candidate) + num_admitted * most <= num_idle:
            return True
        if self._lockstep is not None:
            self._lockstep.catch_up()
        admitted = self._admitted()
        return sum(map(self._soon_blocks, (candidate, *admitted))) <= self._pool.num_idle

    def _waiting(self) -> list[Sequence]:
        """Sequences whose KV or first token is missing, those with memory first."""
        arriving = [a.seq for a in (*self._arriving.values(), *self._queued.values())]
        return [*self._copies.values(), *arriving]

    def _admitted(self) -> list[Sequence]:
        """Sequences that have memory and will need more."""
        admitted = [r.seq for r in self._running.values()]
        return admitted + [a.seq for a in self._arriving.values()]

    def _soon_blocks(self, seq: Sequence) -> int:
        """Blocks that it lacks for the tokens it has and the next `growth_tokens`."""
        length = min(seq.limits.max_len, len(seq.token_ids) + self._growth_tokens)
        return self._blocks_of(length) - len(seq.block_table)

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _on_pull_done(self, done: PullDone) -> list[Effect]:
        arriving = self._end_pull(done.seq_id)
        if arriving is None:
            return []
        seq = arriving.seq
        num_seen = arriving.num_draft_tokens
        if num_seen is not None:
            num_seen = min(max(num_seen, seq.num_draft_tokens), len(seq.token_ids))
        num_missing = len(seq.token_ids) - seq.num_computed_tokens
        seq.advance(num_missing, self._pool, num_draft_tokens=num_seen)
        if self._aborting.pop(done.seq_id, None) is not None:
            seq.release(self._pool)
            return []
        assert arriving.pulled is not None
        arriving.kv_here = True
        num_pulled = len(arriving.pulled)
        ready = KvReady(
            seq_id=done.seq_id,
            num_pulled_blocks=num_pulled,
            num_cached_blocks=len(seq.block_table) - num_pulled,
            transport=done.transport,
            transfer_s=done.transfer_s,
            exposed_s=done.exposed_s,
        )
        return [Emit(seq.gateway_id, ready), *self._join_if_complete(arriving)]

    def _on_first_token(self, seq_id: SeqId, token: int) -> list[Effect]:
        arriving = self._arriving.get(seq_id) or self._queued.get(seq_id)
        if arriving is None:
            return []
        if not self._intake.knows(token):
            given_back = GivenBack(seq_id, "the first token is not in the vocabulary")
            return [Emit(arriving.seq.gateway_id, given_back), *self._cancel(seq_id)]
        arriving.first_token = token
        return self._join_if_complete(arriving)

    def _join_if_complete(self, arriving: _Arriving) -> list[Effect]:
        if arriving.is_copy and arriving.kv_here:
            seq_id = arriving.seq.seq_id
            self._copies[seq_id] = self._arriving.pop(seq_id).seq
            return []
        if not arriving.kv_here or arriving.first_token is None:
            return []
        seq = arriving.seq
        del self._arriving[seq.seq_id]
        finish = seq.append(arriving.first_token)
        if finish is not None:  # nobody should have handed it over
            seq.release(self._pool)
            return [Emit(seq.gateway_id, Tokens(seq.seq_id, [], finish))]
        self._run(seq)
        return []

    def _run(self, seq: Sequence) -> None:
        uses_ngrams = self._speculator is not None and self._speculator.uses_ngrams
        ngrams = NgramIndex(seq.token_ids) if uses_ngrams else None
        self._running[seq.seq_id] = _Running(seq, ngrams)
        if self._lockstep is not None:
            self._lockstep.join(seq)

    def _on_pull_failed(self, failed: PullFailed) -> list[Effect]:
        seq_id = failed.seq_id
        reason = f"{PULL_FAILED}: {failed.reason}"
        if (queued := self._queued.pop(seq_id, None)) is not None:
            return [Emit(queued.seq.gateway_id, GivenBack(seq_id, reason))]
        arriving = self._end_pull(seq_id)
        if arriving is None:
            return []
        num_kept_tokens = self._keep(arriving, failed.arrived)
        if self._aborting.pop(seq_id, None) is not None:
            return []
        del self._arriving[seq_id]
        return [Emit(arriving.seq.gateway_id, GivenBack(seq_id, reason, num_kept_tokens))]

    def _keep(self, arriving: _Arriving, arrived: tuple[int, ...]) -> int:
        """Lets go of a sequence; the tokens whose KV stays cached with what has arrived of it."""
        seq = arriving.seq
        num_cached_tokens = seq.num_computed_tokens
        kept = frozenset(i for i in arrived if arriving.may_keep(i, self._block_size))
        seq.keep_pulled(kept, self._pool)
        num_kept_tokens = seq.num_computed_tokens
        num_new_blocks = (num_kept_tokens - num_cached_tokens) // self._block_size
        self._counters["kept_blocks"] += num_new_blocks
        seq.release(self._pool)
        return num_kept_tokens

    def _end_pull(self, seq_id: SeqId) -> _Arriving | None:
        """The sequence whose pull is over, wanted or not: its blocks have one holder less."""
        arriving = self._arriving.get(seq_id) or self._aborting.get(seq_id)
        if arriving is None or arriving.kv_here:
            return None
        assert arriving.pulled is not None
        self._pool.end_write(arriving.pulled)
        return arriving

    # ------------------------------------------------------------ running

    def _row(self, running: _Running) -> Row:
        seq, proposal = running.seq, running.proposal
        draft: list[int] = []
        num_to_draft = 0
        if proposal is not None and proposal.proposer is Proposer.DRAFT:
            num_to_draft = proposal.num_tokens
        elif proposal is not None:
            assert running.ngrams is not None
            assert running.match is not None
            draft = running.ngrams.follow(running.match, proposal.num_tokens)
        return Row(
            seq_id=seq.seq_id,
            token_ids=seq.token_ids[-1:],
            start=seq.num_computed_tokens,
            block_table=seq.block_table,
            sampling=seq.sampling,
            banned=seq.banned(),
            draft=draft,
            num_to_draft=num_to_draft,
            draft_token_ids=seq.token_ids[seq.num_draft_tokens :] if running.is_seen else (),
            history=seq.history,
            prompt_len=seq.limits.prompt_len,
            guide=seq.guide,
        )

    def _num_seen(self, row: Row, result: RowResult, seq: Sequence) -> int | None:
        """Tokens of which the draft model has K and V after a step; None where there is none.

        It has proposed its last token without computing it.
        """
        if not self._has_draft_model:
            return None
        if not row.draft_token_ids:
            return seq.num_draft_tokens
        proposed = result.num_drafted if row.num_to_draft else 0
        num_seen = row.end + min(result.num_accepted, max(proposed - 1, 0))
        return min(num_seen, len(seq.token_ids))

    def _count(
        self, running: _Running, result: RowResult, *, num_tokens: int, num_accepted: int
    ) -> None:
        """Takes note of what came of a draft."""
        self._counters["step_tokens"] += num_tokens
        proposal = running.proposal
        if proposal is None or self._speculator is None:
            return
        self._counters[f"drafted:{proposal.proposer}"] += result.num_drafted
        self._counters[f"accepted:{proposal.proposer}"] += num_accepted
        self._counters[f"accepted_len:{num_accepted}"] += 1
        self._speculator.learn(
            running.seq.seq_id,
            proposal,
            num_drafted=result.num_drafted,
            num_accepted=result.num_accepted,
        )

    def _leave(self, seq_id: SeqId) -> Sequence:
        """A running sequence is over here."""
        seq = self._forget(seq_id)
        seq.release(self._pool)
        return seq

    def _forget(self, seq_id: SeqId) -> Sequence:
        """A running sequence is not decoded here any more; it has its blocks still."""
        if self._lockstep is not None:
            self._lockstep.leave(seq_id)
        if self._speculator is not None:
            self._speculator.forget(seq_id)
        return self._running.pop(seq_id).seq

    def _hand_over(self, gateway_id: GatewayId, message: HandOver) -> list[Emit | Leaving]:
        if message.seq_id not in self._running:
            return [Emit(gateway_id, HandedOver(message.seq_id, None))]
        return [Leaving(self._forget(message.seq_id), message.as_seq_id)]

    # ------------------------------------------------------------ drafts

    def _draft(self, chosen: list[_Running], speculator: Speculator, budget_tokens: int) -> None:
        """Decides what is drafted, within budget and memory, and whom the draft model sees."""
        if speculator.is_on and not speculator.rests():
            self._propose(chosen, speculator, budget_tokens)
        else:
            for running in chosen:
                running.proposal = None
        if self._has_draft_model:
            self._look(chosen, speculator)

    def _propose(self, chosen: list[_Running], speculator: Speculator, budget_tokens: int) -> None:
        for proposal, running in zip(
            speculator.plan(self._candidates(chosen, speculator)), chosen, strict=True
        ):
            running.proposal = None
            if proposal is None:
                continue
            num_tokens = min(proposal.num_tokens, budget_tokens)
            num_tokens = self._take_blocks(running.seq, num_tokens)
            budget_tokens -= num_tokens
            if num_tokens:
                running.proposal = (
                    proposal
                    if num_tokens == proposal.num_tokens
                    else msgspec.structs.replace(proposal, num_tokens=num_tokens)
                )

    def _candidates(self, chosen: list[_Running], speculator: Speculator) -> list[Candidate]:
        to_index = INDEXED_TOKENS
        candidates = []
        for running in chosen:
            seq = running.seq
            if running.ngrams is not None:
                # Also where others have long prompts, an answer's own new tokens are taken in.
                to_index -= running.ngrams.index(max(to_index, speculator.max_draft_tokens + 1))
                running.match = running.ngrams.find()
            candidates.append(
                Candidate(
                    seq_id=seq.seq_id,
                    context_len=len(seq.token_ids),
                    max_tokens=min(speculator.max_draft_tokens, seq.max_drafted()),
                    match_len=running.match.length if running.match is not None else 0,
                    num_unseen=seq.num_unseen_tokens,
                )
            )
        return candidates

    def _take_blocks(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks for so many drafted tokens; returns for how many of them there is room.

        Those that others may need soon stay where they are.
        """
        length = len(seq.token_ids)
        num_missing = self._blocks_of(length + num_tokens) - len(seq.block_table)
        if num_missing > 0:
            others = sum(map(self._soon_blocks, self._admitted())) - self._soon_blocks(seq)
            num_blocks = min(num_missing, self._pool.num_idle, self._pool.num_idle - others)
            seq.block_table += self._pool.allocate(max(num_blocks, 0))
        return min(num_tokens, len(seq.block_table) * self._block_size - length)

    def _look(self, chosen: list[_Running], speculator: Speculator) -> None:
        """Which sequences the draft model computes: those that it drafts for, and others of which a
        block would be full if it had seen them.
        """
        late: list[_Running] = []
        num_passes = 1
        for running in chosen:
            seq, proposal = running.seq, running.proposal
            running.is_seen = proposal is not None and proposal.proposer is Proposer.DRAFT
            if running.is_seen:
                num_passes = 0
            elif len(seq.token_ids) // self._block_size > seq.num_draft_tokens // self._block_size:
                late.append(running)
        late.sort(key=lambda running: running.seq.num_unseen_tokens)
        num_tokens, num_seen = 0, 0
        for running in late:
            num_unseen = running.seq.num_unseen_tokens
            if num_unseen > MAX_UNSEEN_TOKENS or (num_tokens and num_tokens > CATCH_UP_TOKENS):
                break
            num_tokens += num_unseen + 1
            num_seen += 1
        if num_seen and speculator.may_catch_up(num_tokens, num_passes):
            for running in late[:num_seen]:
                running.is_seen = True

    # ------------------------------------------------------------ memory and ends

    def _make_room(self) -> list[Effect]:
        """Gives running sequences the blocks of their next tokens; the youngest may have to go."""
        effects: list[Effect] = []
        for seq_id in list(self._running):
            running = self._running.get(seq_id)
            if running is not None:
                effects += self._give_blocks(running)
        return effects

    def _give_blocks(self, running: _Running) -> list[Effect]:
        effects: list[Effect] = []
        seq = running.seq
        while len(seq.block_table) < seq.num_blocks:
            if self._pool.num_idle:
                seq.block_table += self._pool.allocate(1)
                continue
            if self._copies:
                effects.append(self._drop_copy())
                continue
            youngest = next(reversed(self._running))
            effects += self._preempt(youngest)
            if youngest == seq.seq_id:
                break
        return effects

    def _preempt(self, seq_id: SeqId) -> list[Effect]:
        self._counters["preempted"] += 1
        seq = self._leave(seq_id)
        return [Emit(seq.gateway_id, GivenBack(seq_id, PREEMPTED))]

    def _drop_copy(self) -> Effect:
        """The youngest copy is not held any longer; it stays cached as long as there is memory."""
        _, seq = self._copies.popitem()
        seq.release(self._pool)
        return self._dropped(seq)

    def _dropped(self, copy: Sequence) -> Effect:
        self._counters["copies_dropped"] += 1
        return Emit(copy.gateway_id, GivenBack(copy.seq_id, PREEMPTED))

    def _cancel(self, seq_id: SeqId) -> list[Effect]:
        if seq_id in self._running:
            self._leave(seq_id)
            return []
        if (copy := self._copies.pop(seq_id, None)) is not None:
            copy.release(self._pool)
            return []
        if self._queued.pop(seq_id, None) is not None:
            return [AbortPull(seq_id)]
        arriving = self._arriving.pop(seq_id, None)
        if arriving is None:
            return []
        if arriving.kv_here:
            arriving.seq.release(self._pool)
            return []
        self._aborting[seq_id] = arriving  # until its pull is over
        return [AbortPull(seq_id)]

    def _forget_gateway(self, gateway_id: GatewayId) -> list[Effect]:
        seqs = [*reversed(self._waiting()), *(r.seq for r in self._running.values())]
        mine = [seq.seq_id for seq in seqs if seq.gateway_id == gateway_id]
        return [effect for seq_id in mine for effect in self._cancel(seq_id)]


def _is_arrival(event: Event) -> bool:
    """Whether it leaves running sequences as they are."""
    if isinstance(event, FromGateway):
        return isinstance(event.message, _ARRIVALS)
    return isinstance(event, _NEWS_OF_TRANSFERS)
