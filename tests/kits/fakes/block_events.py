"""Events of stored blocks."""

from collections.abc import Sequence

from engine.worker.block_events import BlockStored
from engine.worker.blocks import BlockHash


def stored(
    block_hashes: Sequence[BlockHash],
    parent: BlockHash | None,
    *,
    block_size: int,
    token_ids: Sequence[int] = (),
    medium: str | None = None,
) -> BlockStored:
    """Returns an event of a stored block; fields that Baton does not use are empty."""
    ids, hashes = list(token_ids), list(block_hashes)
    return BlockStored(hashes, parent, ids, block_size, lora_id=None, medium=medium, lora_name=None)
