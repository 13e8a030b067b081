"""One request's progress inside one worker."""

from dataclasses import dataclass, field

from engine.blocks import BlockHash, BlockId, BlockPool, hash_block, hash_blocks
from engine.messages import FinishReason, GatewayId, Limits, Sampling, SeqId


@dataclass(slots=True)
class Sequence:
    """Tokens, and the blocks that hold the KV of the first `num_computed_tokens` of them.

    Always `num_cached_tokens <= num_computed_tokens <= len(token_ids)`, and the block table covers
    at least the computed tokens.
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

    def release(self, pool: BlockPool) -> None:
        """Lets go of every block: nothing is computed any more."""
        pool.disown(self.block_table)
        self.block_table = []
        self.num_computed_tokens = self.num_cached_tokens = self.num_hashed_blocks = 0
