"""Computes which blocks a call of a session used: hashes of its prompts and answers. Pure.

Hashes of prompts are computed when the prompts are checked, in a thread if the prompts are long.
Hashes of an answer are computed when the answer ends. Without a session or a store, no hashes are
computed.
"""

from collections.abc import Sequence

import msgspec

from engine.messages import MAX_HASHES, SessionUse
from engine.worker.blocks import BlockHash, hash_blocks
from router.gateway.hints.claims import SessionClaim
from router.machine.requests import PrefixHashes, Request


class SessionNotes(msgspec.Struct, frozen=True):
    """The data for the report that stores get when a call ends.

    `hashes` has one item per prompt.
    """

    claim: SessionClaim
    block_size: int  # tokens per block in stores
    hashes: tuple[PrefixHashes, ...]

    def use(self, index: int, prompt: Sequence[int], answer: Sequence[int]) -> SessionUse | None:
        """Returns the report of the blocks that a prompt and its answer used; None if no block is
        full.

        The last token of an answer is not an input of the model, so it has no KV.
        """
        token_ids = [*prompt, *answer]
        hashes = self.hashes[index].leading(
            token_ids,
            num_tokens=_bounded(len(token_ids) - 1, self.block_size),
            block_size=self.block_size,
        )
        if not hashes:
            return None
        claim = self.claim
        return SessionUse(claim.key, claim.session, [*hashes], claim.keep_s)


def notes_of(claim: SessionClaim, block_size: int, leaders: Sequence[Request]) -> SessionNotes:
    """Returns the notes of a call, with the block hashes of its prompts."""
    hashes = [
        PrefixHashes({block_size: prompt_hashes(each, block_size)}, salt=each.salt)
        for each in leaders
    ]
    return SessionNotes(claim, block_size, tuple(hashes))


def prompt_hashes(request: Request, block_size: int) -> list[BlockHash]:
    """Returns the hashes of a prompt's full blocks, limited to the hashes that one message may
    have.
    """
    num_tokens = _bounded(len(request.token_ids), block_size)
    return hash_blocks(request.token_ids[:num_tokens], block_size, request.salt)


def _bounded(num_tokens: int, block_size: int) -> int:
    """Returns `num_tokens`, limited to the tokens whose block hashes fit into one message."""
    return min(num_tokens, MAX_HASHES * block_size)
