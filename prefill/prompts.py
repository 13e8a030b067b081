"""Prompts that wait for memory or for their prefix, and the state of each prompt.

    waiting    owns no blocks; starts when the pool has blocks for the whole prompt
    pulling    owns its blocks; the prefix that another worker offered is being pulled into the
               first of these blocks, while later prompts run. If the prompt is cancelled, it
               stays until its pull has ended

The lease on an offered prefix is held from the prompt's arrival on, but not while memory is short.
Otherwise two workers that wait for memory and hold leases on each other's blocks could wait for
ever. A prompt does not depend on its pull: this worker computes the blocks that do not arrive.

Source: two owners of a block, sglang#24527.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from engine.messages import Generate, LeaseId, LeaseRef, Logprobs, Prefill, SeqId
from engine.worker.blocks import IN_FLIGHT, BlockId, BlockPool
from engine.worker.events import AbortPull, Effect, HoldLease, PullDone, PullFailed, StartPull
from engine.worker.sequence import Sequence


@dataclass(slots=True)
class PendingPrompt:
    """A sequence whose prompt is not completely computed yet."""

    seq: Sequence
    hands_over: bool  # True if another worker decodes, so the KV is leased to that worker
    number: int  # position in the order of arrival
    # lease on the offered prefix, held until the pull starts or the lease is given up
    prefix: LeaseRef | None = None
    # local blocks that the pull writes, which start at the first uncached block
    pulled: tuple[BlockId, ...] = ()
    is_cancelled: bool = False  # True if the prompt was cancelled while its prefix is being pulled
    num_pulled: int = 0  # number of blocks that a successful pull has written
    pull_s: float = 0.0  # duration of the pull, seconds
    # id of the lease on this prompt's blocks, from the first chunk until the lease ends
    lease_id: LeaseId | None = None
    num_leased_ready: int = 0  # number of leased blocks that are ready
    # number of top log-probabilities per prompt token; None: no log-probabilities are wanted
    num_top: int | None = None
    # log-probabilities of the chunks computed so far
    scored: list[Logprobs] = field(default_factory=list)

    @property
    def kind(self) -> type:
        """The type of the message with which the prompt arrived."""
        return Prefill if self.hands_over else Generate


class WaitingPrompts:
    """The prompts without a computed chunk, and the leases on their offered prefixes."""

    def __init__(self, pool: BlockPool, *, block_size: int, counters: Counter[str]) -> None:
        self._pool = pool
        self._block_size = block_size
        self._counters = counters
        self.waiting: OrderedDict[SeqId, PendingPrompt] = OrderedDict()
        self.pulling: dict[SeqId, PendingPrompt] = {}

    def prompts(self) -> list[PendingPrompt]:
        """Returns the prompts that are not cancelled."""
        pulling = [prompt for prompt in self.pulling.values() if not prompt.is_cancelled]
        return [*self.waiting.values(), *pulling]

    # ------------------------------------------------------------ arrival and start

    def enqueue(self, prompt: PendingPrompt, prefix: LeaseRef | None) -> list[Effect]:
        """Appends a prompt, and holds the lease on the prefix that was offered for it."""
        seq_id = prompt.seq.seq_id
        self.waiting[seq_id] = prompt
        if prefix is None:
            return []
        held: Effect = HoldLease(seq_id, prefix)
        if prompt.num_top is not None:
            # releases the lease, so that the source need not keep the blocks
            return [held, AbortPull(seq_id)]
        prompt.prefix = prefix
        return [held]

    def start_next(self) -> tuple[PendingPrompt | None, list[Effect]]:
        """Gives the first waiting prompt its blocks, and starts the pull of its prefix.

        Returns the prompt. The prompt's next chunk can run, unless the prompt is `pulling`. If
        memory is short, returns None: the prompt remains the first, and the leases on all prefixes
        are released.
        """
        prompt = next(iter(self.waiting.values()))
        seq, pool = prompt.seq, self._pool
        # The last token is always computed; if log-probabilities are wanted, all tokens are.
        num_reusable = (len(seq.token_ids) - 1) // self._block_size
        cached = pool.match(seq.block_hashes[:num_reusable]) if prompt.num_top is None else []
        seq.adopt_cached(cached, pool)
        missing = seq.num_prompt_blocks - len(cached)
        if missing > pool.num_idle:
            seq.release(pool)
            return None, self._give_up_prefixes()
        seq.block_table += pool.allocate(missing)
        del self.waiting[seq.seq_id]
        if prompt.prefix is None:
            return prompt, []
        return prompt, [self._start_pull(prompt, prompt.prefix, num_reusable)]

    def _start_pull(self, prompt: PendingPrompt, prefix: LeaseRef, num_reusable: int) -> Effect:
        """Pulls the offered blocks that are not cached here. If all are cached, aborts the pull."""
        seq = prompt.seq
        first = seq.num_computed_tokens // self._block_size
        indices = range(first, min(prefix.num_blocks, num_reusable))
        prompt.prefix = None
        if not indices:
            return AbortPull(seq.seq_id)
        prompt.pulled = tuple(seq.block_table[indices.start : indices.stop])
        self._pool.hold(IN_FLIGHT, prompt.pulled)
        self.pulling[seq.seq_id] = prompt
        return StartPull(seq.seq_id, tuple(zip(indices, prompt.pulled, strict=True)))

    def _give_up_prefixes(self) -> list[Effect]:
        """Releases the leases on all prefixes. A prompt that waits for memory must hold no
        lease.
        """
        effects: list[Effect] = []
        for seq_id, prompt in self.waiting.items():
            if prompt.prefix is not None:
                prompt.prefix = None
                self._counters["fallbacks:prefix_without_memory"] += 1
                effects.append(AbortPull(seq_id))
        return effects

    # ------------------------------------------------------------ ends

    def end_pull(self, ended: PullDone | PullFailed) -> PendingPrompt | None:
        """Keeps the blocks that arrived. Returns the prompt, whose chunks can be computed from now
        on.
        """
        seq_id = ended.seq_id
        failed = ended if isinstance(ended, PullFailed) else None
        prompt = self.pulling.pop(seq_id, None)
        if prompt is None:
            waiting = self.waiting.get(seq_id)
            if failed is not None and waiting is not None and waiting.prefix is not None:
                waiting.prefix = None  # the lease ended before the prompt had memory
                self._counters["fallbacks:prefix_pull_failed"] += 1
            return None
        if isinstance(ended, PullDone):
            prompt.num_pulled, prompt.pull_s = len(prompt.pulled), ended.transfer_s
        seq = prompt.seq
        self._pool.release(IN_FLIGHT, prompt.pulled)
        first = seq.num_computed_tokens // self._block_size
        everything = range(first, first + len(prompt.pulled))
        arrived: Collection[int] = everything if failed is None else frozenset(failed.arrived)
        seq.keep_pulled(arrived, self._pool)
        prompt.pulled = ()
        num_kept_blocks = seq.num_computed_tokens // self._block_size - first
        self._counters["pulled_prefix_blocks"] += num_kept_blocks
        if prompt.is_cancelled:
            seq.release(self._pool)
            return None
        if failed is not None:
            self._counters["fallbacks:prefix_pull_failed"] += 1
        return prompt

    def cancel(self, seq_id: SeqId) -> list[Effect]:
        """Removes a prompt. Its blocks stay allocated while its prefix is being pulled."""
        prompt = self.pulling.get(seq_id)
        if prompt is not None and not prompt.is_cancelled:
            prompt.is_cancelled = True
            return [AbortPull(seq_id)]
        waiting = self.waiting.pop(seq_id, None)
        return [] if waiting is None or waiting.prefix is None else [AbortPull(seq_id)]

    def validate(self) -> None:
        """Asserts the invariants of waiting prompts."""
        assert not self.waiting.keys() & self.pulling.keys()
        for prompt in self.waiting.values():
            assert not prompt.seq.block_table
            assert prompt.seq.num_computed_tokens == 0
            assert not prompt.pulled
        for prompt in self.pulling.values():
            assert prompt.pulled
            assert prompt.lease_id is None
            assert prompt.prefix is None
