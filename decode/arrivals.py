"""Sequences on their way into the running batch, and copies of sequences that run elsewhere.

    queued    holds its lease at the source, but has no memory
    arriving  owns blocks for its prompt. The missing ones are being pulled, or all KV is here and
              the first token, which the gateway forwards, is missing
    copy      all KV of a sequence that runs elsewhere is here; it has no row in any step
    aborting  cancelled, but its pull may still write into its blocks

Only the head of the queue is admitted, in order of arrival, if the pool has room for it. If it
waits for `STUCK_S` while nothing arrives or runs here, it is given back: then prompts that wait for
other workers hold the memory, and these may wait for memory that the head's prompt holds. A copy is
never waited for: without room it is given back at once. Complete copies are dropped, the youngest
first, before any sequence waits for memory or is given back.

Blocks that a prefix hit finds here are not pulled. If a pull fails or is cancelled half-way, the
blocks that arrived stay cached, so the next attempt on this worker pulls only the rest. The
gateway is told how many tokens that is.

Source: two owners of a block, sglang#24527.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from decode.hold import StepHold
from engine.messages import PREEMPTED, PULL_FAILED, STUCK, Decode, GivenBack, KvReady, SeqId
from engine.worker.blocks import BlockId, BlockPool
from engine.worker.events import AbortPull, Effect, Emit, HoldLease, PullDone, PullFailed, StartPull
from engine.worker.sequence import Sequence

STUCK_S = 2.0


@dataclass(slots=True)
class ArrivingSequence:
    """A sequence whose KV or whose first token is not here yet."""

    seq: Sequence
    pulled: tuple[BlockId, ...] | None = None  # being written; None while queued
    kv_here: bool = False
    first_token: int | None = None
    num_draft_tokens: int | None = None  # that the source's draft model has seen; None: all
    is_copy: bool = False
    is_moved: bool = False

    @property
    def is_complete(self) -> bool:
        """True if the sequence can run: its KV and its first token are here."""
        return self.kv_here and self.first_token is not None

    def may_keep(self, index: int, block_size: int) -> bool:
        """True if a block of the prompt is full for the draft model too."""
        seen = self.num_draft_tokens
        return seen is None or (index + 1) * block_size <= seen


class Arrivals:
    """Queued, arriving and aborting sequences, and copies. Owns their blocks."""

    def __init__(
        self, pool: BlockPool, *, block_size: int, hold: StepHold, counters: Counter[str]
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._hold = hold
        self._counters = counters
        self.queued: OrderedDict[SeqId, ArrivingSequence] = OrderedDict()
        self.arriving: dict[SeqId, ArrivingSequence] = {}
        self.copies: dict[SeqId, Sequence] = {}  # complete; oldest first
        self.aborting: dict[SeqId, ArrivingSequence] = {}
        self._stuck_id: SeqId | None = None  # the head of the queue, while nothing else is here
        self._stuck_until_s = inf

    @property
    def stuck_until_s(self) -> float | None:
        """When `give_back_stuck` gives the head of the queue back; None if it is not stuck."""
        return self._stuck_until_s if self._stuck_id in self.queued else None

    def __contains__(self, seq_id: SeqId) -> bool:
        states = (self.queued, self.arriving, self.copies, self.aborting)
        return any(seq_id in state for state in states)

    @property
    def num_waiting(self) -> int:
        """Sequences that are not cancelled, copies among them."""
        return len(self.queued) + len(self.arriving) + len(self.copies)

    def seqs(self) -> list[Sequence]:
        """Returns the sequences that are not cancelled, those with memory first."""
        arriving = [a.seq for a in (*self.arriving.values(), *self.queued.values())]
        return [*self.copies.values(), *arriving]

    # ------------------------------------------------------------ admission

    def enqueue(self, seq: Sequence, message: Decode, num_draft_tokens: int | None) -> Effect:
        """Takes a sequence in and holds its lease."""
        self.queued[seq.seq_id] = ArrivingSequence(
            seq,
            num_draft_tokens=num_draft_tokens,
            is_copy=message.is_copy,
            is_moved=message.is_moved,
        )
        return HoldLease(seq.seq_id, message.lease)

    def admit(self, max_arriving: int, has_room: Callable[[Sequence], bool]) -> list[Effect]:
        """Gives memory to queued sequences and starts their pulls, at most `max_arriving` at once.

        `has_room` judges a sequence after its cached blocks are taken.
        """
        effects: list[Effect] = []
        while self.queued and len(self.arriving) < max_arriving:
            arriving = next(iter(self.queued.values()))
            seq = arriving.seq
            cached = self._pool.match(seq.block_hashes)
            seq.adopt_cached(cached, self._pool)
            if has_room(seq):
                effects.append(self._start_pull(arriving, len(cached)))
                continue
            seq.release(self._pool)
            if arriving.is_copy:
                effects += [*self.cancel(seq.seq_id), self._dropped(seq)]
            elif self.copies:
                effects.append(self.drop_copy())
            else:
                break
        return effects

    def give_back_stuck(self, now_s: float, *, is_any_running: bool) -> list[Effect]:
        """Gives the head of the queue back if it waited for `STUCK_S` while nothing else was here.

        To be called when a step is planned.
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
        blocks = self._pool.allocate(seq.num_blocks - num_cached)
        self._pool.begin_write(blocks)
        seq.block_table += blocks
        arriving.pulled = tuple(blocks)
        self.arriving[seq.seq_id] = self.queued.pop(seq.seq_id)
        if arriving.is_moved:
            self._hold.await_blocks(seq.seq_id)
        indices = range(num_cached, seq.num_blocks)
        return StartPull(seq.seq_id, tuple(zip(indices, blocks, strict=True)))

    # ------------------------------------------------------------ pulled blocks

    def on_pull_done(self, done: PullDone) -> list[Effect]:
        """Counts the pulled tokens as computed; the sequence may be complete now."""
        arriving = self._end_pull(done.seq_id)
        if arriving is None:
            return []
        seq = arriving.seq
        num_seen = arriving.num_draft_tokens
        if num_seen is not None:
            num_seen = min(max(num_seen, seq.num_draft_tokens), len(seq.token_ids))
        num_missing = len(seq.token_ids) - seq.num_computed_tokens
        seq.advance(num_missing, self._pool, num_draft_tokens=num_seen)
        if self.aborting.pop(done.seq_id, None) is not None:
            seq.release(self._pool)
            return []
        assert arriving.pulled is not None
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

    def on_pull_failed(self, failed: PullFailed) -> list[Effect]:
        """Gives a sequence back; the blocks that arrived stay cached."""
        seq_id = failed.seq_id
        reason = f"{PULL_FAILED}: {failed.reason}"
        if (queued := self.queued.pop(seq_id, None)) is not None:
            return [Emit(queued.seq.gateway_id, GivenBack(seq_id, reason))]
        arriving = self._end_pull(seq_id)
        if arriving is None:
            return []
        num_kept_tokens = self._keep(arriving, failed.arrived)
        if self.aborting.pop(seq_id, None) is not None:
            return []
        del self.arriving[seq_id]
        return [Emit(arriving.seq.gateway_id, GivenBack(seq_id, reason, num_kept_tokens))]

    def find(self, seq_id: SeqId) -> ArrivingSequence | None:
        """Returns a queued or arriving sequence."""
        return self.arriving.get(seq_id) or self.queued.get(seq_id)

    def take_complete(self, seq_id: SeqId) -> ArrivingSequence | None:
        """Removes and returns the sequence if its KV and its first token are here."""
        arriving = self.arriving.get(seq_id)
        if arriving is None or not arriving.is_complete:
            return None
        return self.arriving.pop(seq_id)

    def _keep(self, arriving: ArrivingSequence, arrived: tuple[int, ...]) -> int:
        """Releases a sequence; returns the tokens whose KV stays cached with the arrived blocks."""
        seq = arriving.seq
        num_cached_tokens = seq.num_computed_tokens
        kept = frozenset(i for i in arrived if arriving.may_keep(i, self._block_size))
        seq.keep_pulled(kept, self._pool)
        num_kept_tokens = seq.num_computed_tokens
        num_new_blocks = (num_kept_tokens - num_cached_tokens) // self._block_size
        self._counters["kept_blocks"] += num_new_blocks
        seq.release(self._pool)
        return num_kept_tokens

    def _end_pull(self, seq_id: SeqId) -> ArrivingSequence | None:
        """Ends the pull's hold on its blocks; returns its sequence, cancelled or not."""
        arriving = self.arriving.get(seq_id) or self.aborting.get(seq_id)
        if arriving is None or arriving.kv_here:
            return None
        assert arriving.pulled is not None
        self._pool.end_write(arriving.pulled)
        return arriving

    # ------------------------------------------------------------ ends

    def cancel(self, seq_id: SeqId) -> list[Effect]:
        """Forgets a sequence or copy; its blocks stay until its pull is over."""
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

    def drop_copy(self) -> Effect:
        """Gives back the youngest copy; its blocks stay cached as long as there is memory."""
        _, seq = self.copies.popitem()
        seq.release(self._pool)
        return self._dropped(seq)

    def _dropped(self, copy: Sequence) -> Effect:
        self._counters["copies_dropped"] += 1
        return Emit(copy.gateway_id, GivenBack(copy.seq_id, PREEMPTED))

    def validate(self) -> None:
        """Asserts the invariants of arrivals."""
        assert not set(self.queued) & set(self.arriving)
        assert not set(self.arriving) & set(self.aborting)
        assert not set(self.copies) & {*self.queued, *self.arriving}
        for queued in self.queued.values():
            assert queued.pulled is None
            assert not queued.seq.block_table
            assert queued.seq.num_computed_tokens == 0
        for arriving in self.arriving.values():
            assert arriving.pulled is not None
            assert not arriving.is_complete
        for aborting in self.aborting.values():
            assert aborting.pulled is not None
            assert not aborting.kv_here
