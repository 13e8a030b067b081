"""Block hashes of one prompt, by block size."""

from collections.abc import Mapping, Sequence

from engine.worker.blocks import BlockHash, hash_blocks


class PrefixHashes:
    """Block hashes of one prompt and its answer. Each is computed once, at its first use."""

    def __init__(
        self, known: Mapping[int, Sequence[BlockHash]] | None = None, *, salt: bytes = b""
    ) -> None:
        """`known` has the hashes of the first full blocks, by block size."""
        self._salt = salt
        self._hashes = {size: list(hashes) for size, hashes in (known or {}).items()}

    def copy(self) -> "PrefixHashes":
        """Returns the same hashes for a longer prompt that begins with all of these tokens."""
        return PrefixHashes(self._hashes, salt=self._salt)

    def leading(
        self, token_ids: Sequence[int], *, num_tokens: int, block_size: int
    ) -> list[BlockHash]:
        """Returns hashes of full blocks of the first `num_tokens`; `token_ids` may only grow."""
        num_blocks = num_tokens // block_size
        hashes = self._hashes.setdefault(block_size, [])
        if num_blocks > len(hashes):
            new = token_ids[len(hashes) * block_size : num_blocks * block_size]
            parent = hashes[-1] if hashes else None
            hashes += hash_blocks(new, block_size, self._salt, parent=parent)
        return hashes[:num_blocks]
