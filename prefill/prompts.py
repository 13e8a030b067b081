"""Prompts that wait for memory or for their prefix, and the state of a prompt.

    waiting    owns no blocks; starts when the pool has blocks for the whole prompt
    pulling    owns its blocks; the prefix that another worker offered is being pulled into the
               first of these blocks, while later prompts go ahead
    aborting   cancelled, but its pull may still write into its blocks

An offered prefix is held from arrival on, but not while memory is short. Otherwise two workers that
wait for memory and hold each other's blocks could wait for ever. A prompt does not depend on its
pull: blocks that the pull does not bring are computed.

Source: two owners of a block, sglang#24527.
"""

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field

from engine.messages import Generate, LeaseId, LeaseRef, Logprobs, Prefill, SeqId
from engine.worker.blocks import BlockId, BlockPool
from engine.worker.events import (
    AbortPull,
    Effect,
    HoldLease,
    PullDone,
    PullFailed,
    StartPull,
)
from engine.worker.sequence import Sequence


@dataclass(slots=True)
class PendingPrompt:
    """A sequence whose prompt is not computed yet."""

    seq: Sequence
    hands_over: bool  # True if the KV is leased to another worker, which decodes
    place: int  # in the order of arrival
    prefix: LeaseRef | None = None  # held until its pull starts or it is given up
    pulled: tuple[BlockId, ...] = ()  # blocks that the pull writes: from the first uncached one
    num_pulled: int = 0  # blocks that a successful pull brought
    pull_s: float = 0.0  # time of the pull
    lease_id: LeaseId | None = None  # open from the first chunk until the lease ends
    num_leased_ready: int = 0  # leased blocks that are ready
    num_top: int | None = None  # top log-probabilities per prompt token; None: no scores are wanted
    scored: list[Logprobs] = field(default_factory=list)  # from the chunks computed so far

    @property
    def kind(self) -> type:
        """The type of the message that brought the prompt."""
        return Prefill if self.hands_over else Generate


class WaitingPrompts:
    """Prompts without a computed chunk, and their offered prefixes."""

    def __init__(self, pool: BlockPool, *, block_size: int, counters: Counter[str]) -> None:
        self._pool = pool
        self._block_size = block_size
        self._counters = counters
        self.waiting: deque[PendingPrompt] = deque()
        self.pulling: dict[SeqId, PendingPrompt] = {}
        self.aborting: dict[SeqId, PendingPrompt] = {}

    def __contains__(self, seq_id: SeqId) -> bool:
        return (
            seq_id in self.pulling
            or seq_id in self.aborting
            or any(prompt.seq.seq_id == seq_id for prompt in self.waiting)
        )

    def __len__(self) -> int:
        return len(self.waiting) + len(self.pulling)

    def prompts(self) -> list[PendingPrompt]:
        """Returns the prompts that are not cancelled."""
        return [*self.waiting, *self.pulling.values()]

    # ------------------------------------------------------------ arrival and start

    def enqueue(self, prompt: PendingPrompt, prefix: LeaseRef | None) -> list[Effect]:
        """Appends a prompt and holds the prefix that was offered for it."""
        self.waiting.append(prompt)
        if prefix is None:
            return []
        held: Effect = HoldLease(prompt.seq.seq_id, prefix)
        if prompt.num_top is not None:
            return [held, AbortPull(prompt.seq.seq_id)]  # frees the source from keeping the blocks
        prompt.prefix = prefix
        return [held]

    def start_next(self) -> tuple[PendingPrompt | None, list[Effect]]:
        """Gives the first waiting prompt its blocks, and starts to pull its prefix.

        Returns the prompt. Its next chunk can run unless the prompt is `pulling`. If memory is
        short, returns None: the prompt stays first, and all held prefixes are given up.
        """
        prompt = self.waiting[0]
        if not self._take_blocks(prompt):
            return None, self._give_up_prefixes()
        self.waiting.popleft()
        effects: list[Effect] = []
        if prompt.prefix is not None:
            effects.append(self._start_pull(prompt, prompt.prefix))
        if prompt.pulled:
            self.pulling[prompt.seq.seq_id] = prompt
        return prompt, effects

    def _take_blocks(self, prompt: PendingPrompt) -> bool:
        """Takes blocks for a whole prompt. Returns False if memory is short."""
        seq = prompt.seq
        num_reusable = self._reusable_blocks(seq) if prompt.num_top is None else 0
        cached = self._pool.match(seq.block_hashes[:num_reusable])
        seq.adopt_cached(cached, self._pool)
        missing = seq.num_blocks - len(cached)
        if missing > self._pool.num_idle:
            seq.release(self._pool)
            return False
        seq.block_table += self._pool.allocate(missing)
        return True

    def _reusable_blocks(self, seq: Sequence) -> int:
        """Returns how many full blocks may be reused: at least one token must be computed."""
        return (len(seq.token_ids) - 1) // self._block_size

    def _start_pull(self, prompt: PendingPrompt, prefix: LeaseRef) -> Effect:
        """Pulls the offered blocks that are not cached here; aborts the pull if all are cached."""
        seq = prompt.seq
        first = seq.num_computed_tokens // self._block_size
        indices = range(first, min(prefix.num_blocks, self._reusable_blocks(seq)))
        prompt.prefix = None
        if not indices:
            return AbortPull(seq.seq_id)
        prompt.pulled = tuple(seq.block_table[indices.start : indices.stop])
        self._pool.begin_write(prompt.pulled)
        return StartPull(seq.seq_id, tuple(zip(indices, prompt.pulled, strict=True)))

    def _give_up_prefixes(self) -> list[Effect]:
        """Gives up all held prefixes: a prompt that waits for memory must hold no remote blocks."""
        effects: list[Effect] = []
        for prompt in self.waiting:
            if prompt.prefix is not None:
                prompt.prefix = None
                self._counters["fallbacks:prefix_without_memory"] += 1
                effects.append(AbortPull(prompt.seq.seq_id))
        return effects

    # ------------------------------------------------------------ ends

    def end_pull(self, ended: PullDone | PullFailed) -> PendingPrompt | None:
        """Keeps the blocks that arrived. Returns the prompt, which can be computed from now on."""
        seq_id = ended.seq_id
        failed = ended if isinstance(ended, PullFailed) else None
        prompt = self.pulling.get(seq_id) or self.aborting.get(seq_id)
        if prompt is None:
            if failed is not None:
                self._lose_offer(seq_id)
            return None
        if isinstance(ended, PullDone):
            prompt.num_pulled, prompt.pull_s = len(prompt.pulled), ended.transfer_s
        seq = prompt.seq
        self._pool.end_write(prompt.pulled)
        first = seq.num_computed_tokens // self._block_size
        everything = range(first, first + len(prompt.pulled))
        arrived: Collection[int] = everything if failed is None else frozenset(failed.arrived)
        seq.keep_pulled(arrived, self._pool)
        prompt.pulled = ()
        self._counters["pulled_prefix_blocks"] += (
            seq.num_computed_tokens // self._block_size - first
        )
        if self.aborting.pop(seq_id, None) is not None:
            seq.release(self._pool)
            return None
        if failed is not None:
            self._counters["fallbacks:prefix_pull_failed"] += 1
        return self.pulling.pop(seq_id)

    def _lose_offer(self, seq_id: SeqId) -> None:
        """Records that the lease on a prefix ended before the prompt had memory."""
        for prompt in self.waiting:
            if prompt.seq.seq_id == seq_id and prompt.prefix is not None:
                prompt.prefix = None
                self._counters["fallbacks:prefix_pull_failed"] += 1

    def cancel(self, seq_id: SeqId) -> list[Effect]:
        """Removes a prompt. While its prefix is being pulled, its blocks stay allocated."""
        if (prompt := self.pulling.pop(seq_id, None)) is not None:
            self.aborting[seq_id] = prompt
            return [AbortPull(seq_id)]
        dropped = [prompt for prompt in self.waiting if prompt.seq.seq_id == seq_id]
        self.waiting = deque(p for p in self.waiting if p.seq.seq_id != seq_id)
        return [AbortPull(seq_id) for prompt in dropped if prompt.prefix is not None]

    def validate(self) -> None:
        """Asserts the invariants of waiting prompts."""
        for prompt in self.waiting:
            assert not prompt.seq.block_table
            assert prompt.seq.num_computed_tokens == 0
            assert not prompt.pulled
        assert not set(self.pulling) & set(self.aborting)
        for prompt in (*self.pulling.values(), *self.aborting.values()):
            assert prompt.pulled
            assert prompt.lease_id is None
            assert prompt.prefix is None
