"""One request's progress inside one worker."""

from collections.abc import Collection
from dataclasses import dataclass, field

from engine.blocks import BlockHash, BlockId, BlockPool, hash_block, hash_blocks
from engine.messages import FinishReason, GatewayId, Limits, Sampling, SeqId


@dataclass(slots=True)
class Sequence:
    """Tokens, and the blocks that hold the KV of the first `num_computed_tokens` of them.

    Always `num_cached_tokens <= num_computed_tokens <= len(token_ids)`, and the block table covers
    at least the computed tokens. Cached are those that this sequence did not compute: they were
    found here or pulled.
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
    num_cached_tokens: int = 0
    num_hashed_blocks: int = 0  # blocks whose hash the pool knows

    def __post_init__(self) -> None:
        self.block_hashes = hash_blocks(self.token_ids, self.block_size, self.salt)

    @property
    def num_blocks(self) -> int:
        """Blocks that all present tokens need."""
        return -(-len(self.token_ids) // self.block_size)

    def banned(self) -> tuple[int, ...]:
        """Ids that may not come next: those that would end the sequence before its least length."""
        if len(self.token_ids) + 1 > self.limits.min_len:
            return ()
        return self.limits.stop_token_ids

    def append(self, token: int) -> FinishReason | None:
        """Adds a sampled token; says whether the sequence is now complete."""
        self.token_ids.append(token)
        return self.limits.finish_reason(len(self.token_ids), token)

    def advance(self, num_tokens: int, pool: BlockPool) -> None:
        """Counts tokens as computed and tells the pool which blocks are full now."""
        self.num_computed_tokens += num_tokens
        assert self.num_computed_tokens <= len(self.token_ids)
        num_full = self.num_computed_tokens // self.block_size
        for i in range(self.num_hashed_blocks, num_full):
            if i == len(self.block_hashes):
                parent = self.block_hashes[-1] if self.block_hashes else None
                tokens = self.token_ids[i * self.block_size : (i + 1) * self.block_size]
                self.block_hashes.append(hash_block(parent, tokens, self.salt))
            pool.set_hash(self.block_table[i], self.block_hashes[i])
        self.num_hashed_blocks = max(self.num_hashed_blocks, num_full)

    def adopt_cached(self, blocks: list[BlockId], pool: BlockPool) -> None:
        """Starts from a prefix hit: owns `blocks` and counts their tokens as computed."""
        assert not self.block_table
        pool.own(blocks)
        self.block_table.extend(blocks)
        self.num_computed_tokens = self.num_cached_tokens = len(blocks) * self.block_size
        self.num_hashed_blocks = len(blocks)

    def keep_pulled(self, arrived: Collection[int], pool: BlockPool) -> None:
        """Goes on from blocks that a pull brought, given by their places in the block table.

        Of these the run that follows the computed tokens counts, in full blocks: what lies behind
        a gap or ends in the middle of a block cannot be found by its hash.
        """
        first = self.num_computed_tokens // self.block_size
        num_full = min(len(self.token_ids) // self.block_size, len(self.block_table))
        end = next((i for i in range(first, num_full) if i not in arrived), num_full)
        if end > first:
            self.advance(end * self.block_size - self.num_computed_tokens, pool)
            self.num_cached_tokens = self.num_computed_tokens

    def release(self, pool: BlockPool) -> None:
        """Lets go of every block: nothing is computed any more."""
        pool.disown(self.block_table)
        self.block_table = []
        self.num_computed_tokens = self.num_cached_tokens = self.num_hashed_blocks = 0
