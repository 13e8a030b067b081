"""Prompts of a trace, as the gateway and the workers see them.

Where workers' blocks are the trace's, a block's hash is made of the trace's id for it and of the
hash before, as a real one is of its tokens: whoever would ask for the hashes of a prompt's tokens
is told these, and nobody hashes millions of tokens three times. Nobody looks at the tokens of full
blocks then, so these are all alike. Where blocks are of another size the tokens are real.
"""

from collections.abc import Sequence
from hashlib import blake2b

from bench.simulator.traces import Trace, TraceRequest, prompt_tokens
from engine.blocks import HASH_BYTES, BlockHash, hash_block
from engine.intake import MAX_ID, PromptFacts, read_prompt
from engine.messages import Decode, Generate, OfferPrefix, Prefill, RequestId
from router.prefixes import PrefixHashes


class Prompts:
    """The prompts of requests that have come and are not over."""

    def __init__(self, trace: Trace, block_size: int) -> None:
        self._block_tokens = trace.block_tokens
        self._block_size = block_size
        self._hashes: dict[str, list[BlockHash]] = {}

    def open(
        self, request_id: RequestId, asked: TraceRequest
    ) -> tuple[tuple[int, ...], PrefixHashes | None]:
        """The tokens of a prompt, and the hashes of its blocks if they are not those of tokens."""
        if self._block_tokens != self._block_size:
            return tuple(prompt_tokens(asked, self._block_tokens)), None
        hashes = _hashes(asked.block_ids[: asked.input_len // self._block_size])
        self._hashes[request_id] = hashes
        tokens = (asked.block_ids[-1],) * asked.input_len  # as of the last block, which may grow
        return tokens, PrefixHashes({self._block_size: hashes})

    def close(self, request_id: RequestId) -> None:
        """It is over."""
        self._hashes.pop(request_id, None)

    def read(
        self, message: Prefill | Generate | Decode | OfferPrefix, block_size: int
    ) -> PromptFacts:
        """An `engine.intake.ReadPrompt`."""
        request_id, _, _ = message.seq_id.partition(".")
        known = self._hashes.get(request_id)
        if known is None:
            return read_prompt(message, block_size)
        return PromptFacts(_with_answer(known, message.token_ids, block_size), MAX_ID)


def _hashes(block_ids: Sequence[int]) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    last = b""
    for block_id in block_ids:
        last = blake2b(last + block_id.to_bytes(4), digest_size=HASH_BYTES).digest()
        hashes.append(BlockHash(last))
    return hashes


def _with_answer(
    known: list[BlockHash], token_ids: Sequence[int], block_size: int
) -> list[BlockHash]:
    """The same, and those of blocks that the answer so far has filled."""
    hashes = known
    for index in range(len(known), len(token_ids) // block_size):
        parent = hashes[-1] if hashes else None
        block = token_ids[index * block_size : (index + 1) * block_size]
        hashes = [*hashes, hash_block(parent, block)]
    return hashes
