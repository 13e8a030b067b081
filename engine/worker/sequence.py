"""The progress of one request in one worker."""

from array import array
from collections.abc import Collection
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from engine.grammar.guide import Guide
from engine.messages import FinishReason, GatewayId, Limits, Sampling, SeqId
from engine.worker.batch import Row
from engine.worker.blocks import (
    EVICT_FIRST,
    LIKELY_REUSED,
    ORDINARY,
    OWNED,
    BlockHash,
    BlockId,
    BlockPool,
    hash_blocks,
)


@dataclass(slots=True)
class Sequence:
    """The tokens of a request, and the blocks with KV of the first `num_computed_tokens` tokens.

    Always `num_cached_tokens <= num_computed_tokens <= len(token_ids)`, and the block table covers
    at least the computed tokens. Cached tokens were not computed by this sequence: this worker
    already had their KV, or pulled it.

    `block_hashes` are the hashes of all full blocks of the tokens. They are computed here unless
    the caller passes them.

    The draft model's KV exists for the first `num_draft_tokens` computed tokens. Without a draft
    model, `num_draft_tokens` equals the number of computed tokens. Other sequences can use a full
    block only if it has the KV of both models.

    `in_flight` are the sequence's rows in unfinished steps, oldest first. The last row may be
    pending.

    With `evict_first`, another worker keeps the cached blocks, so this worker evicts them before
    others. `likely_reused` blocks are evicted later than others.

    `history` is a packed copy of the tokens for penalties. `guide` is the state of the grammar
    after the answer so far.
    """

    seq_id: SeqId
    gateway_id: GatewayId
    token_ids: list[int]
    sampling: Sampling
    limits: Limits
    block_size: int
    salt: bytes = b""
    block_table: list[BlockId] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_draft_tokens: int = 0
    num_cached_tokens: int = 0
    num_hashed_blocks: int = 0  # number of blocks whose hashes the pool knows
    num_prompt_blocks: int = 0  # number of blocks for the tokens of the gateway's message
    evict_first: bool = False
    likely_reused: bool = False
    history: "array[int] | None" = None
    guide: Guide | None = None
    in_flight: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt_blocks = -(-len(self.token_ids) // self.block_size)
        if not self.block_hashes:
            self.block_hashes = hash_blocks(self.token_ids, self.block_size, self.salt)
        if self.sampling.has_penalties:
            self.history = array("i", self.token_ids)

    @property
    def num_unseen_tokens(self) -> int:
        """Returns the number of computed tokens whose draft KV is missing."""
        return self.num_computed_tokens - self.num_draft_tokens

    @property
    def fault(self) -> str | None:
        """Returns the reason why the grammar cannot be followed any further, or None. If there is a
        reason, the last chosen token is not valid.
        """
        if self.guide is None or self.guide.fault is None:
            return None
        return f"grammar: {self.guide.fault}"

    def banned(self, num_pending: int = 0) -> tuple[int, ...]:
        """Returns the ids that must not come next, because they would end the sequence before its
        minimum length. Pending tokens are counted.
        """
        if len(self.token_ids) + num_pending + 1 > self.limits.min_len:
            return ()
        return self.limits.stop_token_ids

    def max_drafted(self) -> int:
        """Returns how many tokens a step may draft and still choose the same tokens as single
        steps.

        The answer must not exceed its maximum length, and the same ids must be banned for the first
        and the last token of the step.
        """
        length = len(self.token_ids)
        end = self.limits.max_len
        if self.banned():
            end = min(end, self.limits.min_len)
        return max(end - length - 1, 0)

    def extend(self, tokens: Tokens[int]) -> tuple[list[int], FinishReason | None]:
        """Adds chosen tokens, up to the token that completes the sequence. Returns the added tokens
        and the finish reason, or None.
        """
        limits, guide, length = self.limits, self.guide, len(self.token_ids)
        if guide is None and not limits.stop_token_ids:
            room = max(limits.max_len - length, 1)
            taken = list(tokens if len(tokens) <= room else tokens[:room])
            finish = FinishReason.LENGTH if taken and len(taken) >= room else None
        else:
            taken, finish = [], None
            for token in tokens:
                taken.append(token)
                finish = limits.finish_reason(length + len(taken), token)
                if finish is not None:
                    break
                if guide is not None:
                    guide.consume(token)
        self.token_ids += taken
        if self.history is not None:
            self.history.extend(taken)
        return taken, finish

    def advance(
        self, num_tokens: int, pool: BlockPool, *, num_draft_tokens: int | None = None
    ) -> None:
        """Counts tokens as computed, and reports newly full blocks to the pool.

        The draft model's KV exists for all computed tokens, or only for the sequence's first
        `num_draft_tokens` tokens.
        """
        num_computed = self.num_computed_tokens + num_tokens
        assert num_computed <= len(self.token_ids)
        if num_draft_tokens is None:
            num_draft_tokens = num_computed
        assert self.num_draft_tokens <= num_draft_tokens <= num_computed
        self.num_computed_tokens, self.num_draft_tokens = num_computed, num_draft_tokens
        num_full = num_draft_tokens // self.block_size
        if num_full > self.num_hashed_blocks:
            self._report_hashes(num_full, pool)

    def _report_hashes(self, num_full: int, pool: BlockPool) -> None:
        """Reports the hashes of newly full blocks to the pool: of the prompt, then of the
        answer.
        """
        size, hashes, first = self.block_size, self.block_hashes, self.num_hashed_blocks
        num_known = min(num_full, len(hashes))
        if num_full > num_known:
            answer = self.token_ids[num_known * size : num_full * size]
            hashes += hash_blocks(answer, size, self.salt, parent=hashes[-1] if hashes else None)
        for begin, end in ((first, num_known), (num_known, num_full)):
            if begin < end:
                tokens: list[list[int]] = []
                if pool.wants_tokens:
                    tokens = [self.token_ids[i * size : (i + 1) * size] for i in range(begin, end)]
                pool.set_hashes(
                    self.block_table[begin:end],
                    hashes[begin:end],
                    parent=hashes[begin - 1] if begin else None,
                    token_ids=tokens,
                    is_answer=end > num_known,
                )
        self.num_hashed_blocks = num_full

    def trim(self, pool: BlockPool) -> None:
        """Frees the blocks that only rejected drafts used."""
        num_blocks = -(-len(self.token_ids) // self.block_size)
        if len(self.block_table) > num_blocks:
            pool.release(OWNED, self.block_table[num_blocks:], ORDINARY)
            del self.block_table[num_blocks:]

    def adopt_cached(self, blocks: list[BlockId], pool: BlockPool) -> None:
        """Starts from a prefix hit: acquires `blocks` and counts their tokens as computed."""
        assert not self.block_table
        pool.hold(OWNED, blocks)
        self.block_table.extend(blocks)
        num_tokens = len(blocks) * self.block_size
        self.num_computed_tokens = self.num_cached_tokens = self.num_draft_tokens = num_tokens
        self.num_hashed_blocks = len(blocks)

    def keep_pulled(self, arrived: Collection[int], pool: BlockPool) -> None:
        """Continues from pulled blocks. They are given by their indices in the block table.

        Only full blocks that directly follow the computed tokens are kept. Partial blocks, and
        blocks after a gap, cannot be found by a hash.
        """
        first = self.num_computed_tokens // self.block_size
        num_full = min(len(self.token_ids) // self.block_size, len(self.block_table))
        end = next((i for i in range(first, num_full) if i not in arrived), num_full)
        if end > first:
            self.advance(end * self.block_size - self.num_computed_tokens, pool)
            self.num_cached_tokens = self.num_computed_tokens

    def release(self, pool: BlockPool) -> None:
        """Releases all blocks. No token counts as computed afterwards."""
        mark = LIKELY_REUSED if self.likely_reused else ORDINARY
        pool.release(OWNED, self.block_table, EVICT_FIRST if self.evict_first else mark)
        self.block_table = []
        self.num_computed_tokens = self.num_cached_tokens = self.num_draft_tokens = 0
        self.num_hashed_blocks = 0
