"""Sequences that will join the running batch, and copies of sequences that run at other workers.

    queued    its lease is held at the source, but it has no memory yet
    arriving  owns blocks for its prompt. Missing blocks are being pulled, or all KV is here and
              the first token, which the gateway forwards, is missing
    copy      all KV of a sequence that runs at another worker; it has no row in any step here
    aborting  cancelled, but its pull may still write into its blocks

Sequences are admitted in order of arrival, as long as the pool has room for the first queued
sequence. If this sequence waits for `STUCK_S` while no sequence arrives or runs here, it is given
back. In this case, leases of prompts for other workers occupy the memory here. Those workers may in
turn wait for memory that the first sequence's prompt occupies. A copy never waits: without room it
is given back at once. Complete copies are dropped, the youngest first, before any sequence waits or
is given back.

Blocks that are cached here are not pulled. If a pull fails or is cancelled half-way, the blocks
that arrived stay cached, so the next attempt on this worker pulls only the rest. The gateway is
informed of the number of cached tokens.

**Delayed steps (`StepHold`).** A moved sequence lacks only a block or two, and its client waits in
the middle of an answer. So the start of the next step is delayed while these blocks are pulled, by
`HOLD_S` at most. Without the delay, the sequence would wait for a whole step. No step is delayed
twice, and each sequence delays one step only. For `REST_S` after a delayed step, no step is
delayed, even if many sequences move here in that time.

Source: two owners of a block, sglang#24527.
"""

from collections import Counter, OrderedDict
from collections.abc import Set
from dataclasses import dataclass
from math import inf

from engine.messages import PREEMPTED, PULL_FAILED, STUCK, Decode, GivenBack, KvReady, SeqId
from engine.worker.blocks import IN_FLIGHT, BlockId, BlockPool
from engine.worker.events import AbortPull, Effect, Emit, HoldLease, PullDone, PullFailed, StartPull
from engine.worker.sequence import Sequence

STUCK_S = 2.0
HOLD_S = 0.02  # longest delay of a step
REST_S = 0.05  # time after a delayed step in which no other step is delayed


class StepHold:
    """Decides whether the next step is delayed. Counts `held_steps` and `held_steps:late`."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        # sequences that moved here since the last step, and whose pull has not ended
        self._awaited: set[SeqId] = set()
        # the next step is delayed until this time; None: no step is delayed
        self.until_s: float | None = None
        self._delays_running = False  # True if the delay makes running sequences wait
        self._rests_until_s = -inf

    @property
    def is_open(self) -> bool:
        """True if the next step is delayed, or may still be delayed for a moved sequence."""
        return bool(self._awaited) or self.until_s is not None

    def await_blocks(self, seq_id: SeqId) -> None:
        """Makes the next step wait for the blocks of a sequence that moved here."""
        self._awaited.add(seq_id)

    def holds(self, now_s: float, arriving: Set[SeqId], *, is_any_running: bool) -> bool:
        """Returns True if no step may start now, because blocks of moved sequences are still being
        pulled.
        """
        self._awaited &= arriving
        if self._awaited and now_s >= self._rests_until_s:
            if self.until_s is None:
                self.until_s = now_s + HOLD_S
            if now_s < self.until_s:
                self._delays_running = self._delays_running or is_any_running
                return True
        if self._delays_running:
            self._counters["held_steps"] += 1
            self._counters["held_steps:late"] += bool(self._awaited)
            self._rests_until_s = now_s + REST_S
        self._awaited.clear()
        self.until_s, self._delays_running = None, False
        return False


@dataclass(slots=True)
class ArrivingSequence:
    """A sequence whose KV or first token has not arrived yet."""

    seq: Sequence
    # local blocks that the pull writes; None while queued
    pulled: tuple[BlockId, ...] | None = None
    kv_here: bool = False
    first_token: int | None = None
    # number of tokens that the source's draft model has computed; None: all
    num_draft_tokens: int | None = None
    is_copy: bool = False
    is_moved: bool = False


class DecodeMemory:
    """The admitted sequences, and the memory that their growth will need.

    `growth_tokens` is the number of tokens of growth to reserve for each sequence.
    """

    def __init__(self, pool: BlockPool, *, block_size: int, growth_tokens: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.growth_tokens = growth_tokens
        self.running: dict[SeqId, Sequence] = {}  # running sequences, oldest first
        self.arriving: dict[SeqId, ArrivingSequence] = {}

    def _soon_blocks(self, seq: Sequence) -> int:
        """Returns the number of blocks that a sequence lacks for its next `growth_tokens`."""
        length = min(seq.limits.max_len, len(seq.token_ids) + self.growth_tokens)
        return max(-(-length // self.block_size) - len(seq.block_table), 0)

    def _growth_blocks(self) -> int:
        """Returns the number of blocks that all admitted sequences may need soon."""
        arriving = [arriving.seq for arriving in self.arriving.values()]
        return sum(map(self._soon_blocks, (*self.running.values(), *arriving)))

    def has_room(self, candidate: Sequence) -> bool:
        """Returns True if the pool has room for a candidate and the growth of all admitted
        sequences.

        If no other sequence is admitted, only the candidate's prompt must fit.
        """
        num_admitted, num_idle = len(self.running) + len(self.arriving), self.pool.num_idle
        if not num_admitted:
            return candidate.num_prompt_blocks - len(candidate.block_table) <= num_idle
        # A sequence lacks at most the blocks of its growth, a partly filled block, and an
        # unassigned block.
        most = self.growth_tokens // self.block_size + 2
        num_soon = self._soon_blocks(candidate)
        if num_soon + num_admitted * most <= num_idle:
            return True
        return num_soon + self._growth_blocks() <= num_idle

    def allocate_for_draft(self, seq: Sequence, num_tokens: int) -> int:
        """Gives a sequence blocks for drafted tokens. Returns the number of tokens that fit.

        Blocks that other sequences may need soon stay idle.
        """
        length = len(seq.token_ids)
        num_missing = -(-(length + num_tokens) // self.block_size) - len(seq.block_table)
        if num_missing > 0:
            others = self._growth_blocks() - self._soon_blocks(seq)
            num_blocks = min(num_missing, self.pool.num_idle, self.pool.num_idle - others)
            seq.block_table += self.pool.allocate(max(num_blocks, 0))
        return min(num_tokens, len(seq.block_table) * self.block_size - length)


class Arrivals:
    """Queued, arriving and aborting sequences, and copies. Owns their blocks."""

    def __init__(self, memory: DecodeMemory, *, hold: StepHold, counters: Counter[str]) -> None:
        self._memory = memory
        self._pool = memory.pool
        self._block_size = memory.block_size
        self._hold = hold
        self._counters = counters
        self.queued: OrderedDict[SeqId, ArrivingSequence] = OrderedDict()
        self.arriving = memory.arriving
        # complete copies of sequences that run at other workers, oldest first
        self.copies: dict[SeqId, Sequence] = {}
        self.aborting: dict[SeqId, ArrivingSequence] = {}
        # the first queued sequence, if this worker has no other sequence
        self._stuck_id: SeqId | None = None
        self._stuck_until_s = inf

    @property
    def stuck_until_s(self) -> float | None:
        """The time at which the stuck first sequence is given back; None if no sequence is
        stuck.
        """
        return self._stuck_until_s if self._stuck_id in self.queued else None

    @property
    def num_waiting(self) -> int:
        """The number of sequences that are not cancelled, including copies."""
        return len(self.queued) + len(self.arriving) + len(self.copies)

    def seqs(self) -> list[Sequence]:
        """Returns the sequences that are not cancelled. Sequences with memory come first."""
        arriving = [a.seq for a in (*self.arriving.values(), *self.queued.values())]
        return [*self.copies.values(), *arriving]

    # ------------------------------------------------------------ admission

    def enqueue(self, seq: Sequence, message: Decode, num_draft_tokens: int | None) -> Effect:
        """Appends a sequence to the queue, and holds the lease on its KV."""
        self.queued[seq.seq_id] = ArrivingSequence(
            seq,
            num_draft_tokens=num_draft_tokens,
            is_copy=message.is_copy,
            is_moved=message.is_moved,
        )
        return HoldLease(seq.seq_id, message.lease)

    def admit(self, max_arriving: int) -> list[Effect]:
        """Gives memory to queued sequences and starts their pulls, up to `max_arriving` pulls."""
        effects: list[Effect] = []
        while self.queued and len(self.arriving) < max_arriving:
            arriving = next(iter(self.queued.values()))
            seq = arriving.seq
            cached = self._pool.match(seq.block_hashes)
            seq.adopt_cached(cached, self._pool)
            if self._memory.has_room(seq):
                effects.append(self._start_pull(arriving, len(cached)))
                continue
            seq.release(self._pool)
            if arriving.is_copy:
                effects += [*self.cancel(seq.seq_id), self._dropped(seq)]
            elif (dropped := self.drop_copy()) is not None:
                effects.append(dropped)
            else:
                break
        return effects

    def give_back_stuck(self, now_s: float, *, is_any_running: bool) -> list[Effect]:
        """Gives the first queued sequence back if nothing ran, arrived or aborted for `STUCK_S`.

        Call this when a step is planned.
        """
        is_alone = not (is_any_running or self.arriving or self.aborting)
        head = next(iter(self.queued), None) if is_alone else None
        if head != self._stuck_id:
            self._stuck_id, self._stuck_until_s = head, now_s + STUCK_S
        if head is None or now_s < self._stuck_until_s:
            return []
        self._counters["stuck"] += 1
        gateway_id = self.queued[head].seq.gateway_id
        return [*self.cancel(head), Emit(gateway_id, GivenBack(head, STUCK))]

    def _start_pull(self, arriving: ArrivingSequence, num_cached: int) -> Effect:
        seq = arriving.seq
        blocks = self._pool.allocate(seq.num_prompt_blocks - num_cached)
        self._pool.hold(IN_FLIGHT, blocks)
        seq.block_table += blocks
        arriving.pulled = tuple(blocks)
        self.arriving[seq.seq_id] = self.queued.pop(seq.seq_id)
        if arriving.is_moved:
            self._hold.await_blocks(seq.seq_id)
        indices = range(num_cached, seq.num_prompt_blocks)
        return StartPull(seq.seq_id, tuple(zip(indices, blocks, strict=True)))

    # ------------------------------------------------------------ pulled blocks

    def on_pull_done(self, arriving: ArrivingSequence, done: PullDone) -> list[Effect]:
        """Counts the pulled tokens as computed. The sequence may be complete now."""
        assert arriving.pulled is not None
        self._pool.release(IN_FLIGHT, arriving.pulled)
        seq = arriving.seq
        num_seen = arriving.num_draft_tokens
        if num_seen is not None:
            num_seen = min(max(num_seen, seq.num_draft_tokens), len(seq.token_ids))
        num_missing = len(seq.token_ids) - seq.num_computed_tokens
        seq.advance(num_missing, self._pool, num_draft_tokens=num_seen)
        if self.aborting.pop(done.seq_id, None) is not None:
            seq.release(self._pool)
            return []
        arriving.kv_here = True
        if arriving.is_copy:
            self.copies[done.seq_id] = self.arriving.pop(done.seq_id).seq
        num_pulled = len(arriving.pulled)
        ready = KvReady(
            seq_id=done.seq_id,
            num_pulled_blocks=num_pulled,
            num_cached_blocks=len(seq.block_table) - num_pulled,
            transport=done.transport,
            transfer_s=done.transfer_s,
            exposed_s=done.exposed_s,
        )
        return [Emit(seq.gateway_id, ready)]

    def on_lease_lost(self, failed: PullFailed) -> list[Effect]:
        """Gives back a queued sequence whose lease has ended."""
        seq = self.queued.pop(failed.seq_id).seq
        return [Emit(seq.gateway_id, GivenBack(seq.seq_id, f"{PULL_FAILED}: {failed.reason}"))]

    def on_pull_failed(self, arriving: ArrivingSequence, failed: PullFailed) -> list[Effect]:
        """Gives back the sequence of a failed pull. The blocks that arrived stay cached."""
        seq, seen, size = arriving.seq, arriving.num_draft_tokens, self._block_size
        assert arriving.pulled is not None
        self._pool.release(IN_FLIGHT, arriving.pulled)
        num_cached_tokens = seq.num_computed_tokens
        # A cached block must also be full for the draft model.
        kept = frozenset(i for i in failed.arrived if seen is None or (i + 1) * size <= seen)
        seq.keep_pulled(kept, self._pool)
        num_kept_tokens = seq.num_computed_tokens
        self._counters["kept_blocks"] += (num_kept_tokens - num_cached_tokens) // size
        seq.release(self._pool)
        if self.aborting.pop(seq.seq_id, None) is not None:
            return []
        del self.arriving[seq.seq_id]
        reason = f"{PULL_FAILED}: {failed.reason}"
        return [Emit(seq.gateway_id, GivenBack(seq.seq_id, reason, num_kept_tokens))]

    # ------------------------------------------------------------ ends

    def cancel(self, seq_id: SeqId) -> list[Effect]:
        """Removes a sequence or copy. Its blocks are freed once its pull has ended."""
        if (copy := self.copies.pop(seq_id, None)) is not None:
            copy.release(self._pool)
            return []
        if self.queued.pop(seq_id, None) is not None:
            return [AbortPull(seq_id)]
        arriving = self.arriving.pop(seq_id, None)
        if arriving is None:
            return []
        if arriving.kv_here:
            arriving.seq.release(self._pool)
            return []
        self.aborting[seq_id] = arriving
        return [AbortPull(seq_id)]

    def drop_copy(self) -> Effect | None:
        """Gives back the youngest copy, if any. Its blocks stay cached until they are evicted."""
        if not self.copies:
            return None
        _, seq = self.copies.popitem()
        seq.release(self._pool)
        return self._dropped(seq)

    def _dropped(self, copy: Sequence) -> Effect:
        self._counters["copies_dropped"] += 1
        return Emit(copy.gateway_id, GivenBack(copy.seq_id, PREEMPTED))

    def validate(self) -> None:
        """Asserts the invariants of arriving sequences and copies."""
        assert not set(self.queued) & set(self.arriving)
        assert not set(self.arriving) & set(self.aborting)
        assert not set(self.copies) & {*self.queued, *self.arriving}
        for queued in self.queued.values():
            assert queued.pulled is None
            assert not queued.seq.block_table
            assert queued.seq.num_computed_tokens == 0
        for arriving in self.arriving.values():
            assert arriving.pulled is not None
            assert not arriving.kv_here or arriving.first_token is None, "it could run"
        for aborting in self.aborting.values():
            assert aborting.pulled is not None
            assert not aborting.kv_here
