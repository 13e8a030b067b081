"""Block hashes of one prompt, by block size."""

from collections.abc import Mapping, Sequence

from engine.worker.blocks import BlockHash, hash_blocks


class PrefixHashes:
    """Block hashes of one prompt and its answer, each computed once and only when asked for."""

    def __init__(
        self, known: Mapping[int, Sequence[BlockHash]] | None = None, *, salt: bytes = b""
    ) -> None:
        """`known` are those of the first full blocks, by block size."""
        self._salt = salt
        self._hashes = {size: list(hashes) for size, hashes in (known or {}).items()}

    def copy(self) -> "PrefixHashes":
        """The same hashes, for a prompt that begins with all of their tokens."""
        return PrefixHashes(self._hashes, salt=self._salt)

    def leading(
        self, token_ids: Sequence[int], *, num_tokens: int, block_size: int
    ) -> list[BlockHash]:
        """Hashes of the full blocks among the first `num_tokens`; `token_ids` may only grow."""
        num_blocks = num_tokens // block_size
        hashes = self._hashes.setdefault(block_size, [])
        if num_blocks > len(hashes):
            new = token_ids[len(hashes) * block_size : num_blocks * block_size]
            parent = hashes[-1] if hashes else None
            hashes += hash_blocks(new, block_size, self._salt, parent=parent)
        return hashes[:num_blocks]
