"""Makes the prompts of a trace, in the form that the gateway and the workers read.

If the workers' block size is the trace's, a block's hash is computed from the trace's block id and
the previous hash. A real hash is computed from tokens instead. Code that would hash a prompt's
tokens gets these hashes, so that millions of tokens are not hashed three times. The tokens of full
blocks are then never read, so they are all equal and are not stored (`Unwritten`). The memory of a
prompt depends on its number of blocks, not on its length. With another block size, the tokens are
stored.

The tokens of an answer depend only on seed and position, so they do not depend on the worker.
"""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import chain, repeat
from typing import cast, overload

from bench.simulator.traces import Trace, TraceRequest, prompt_tokens
from engine.messages import HASH_BYTES, ComputePrompt, Decode, OfferPrefix, RequestId, Sampling
from engine.worker.blocks import BlockHash, hash_block
from engine.worker.intake import MAX_ID, PromptFacts, read_prompt
from router.machine.requests import PrefixHashes

_SEED_STRIDE, _SEEDS = 7919, 2**30  # constants that make the tokens of different seeds differ


def base_of(sampling: Sampling) -> int:
    """Returns the base of an answer's tokens: the token at position i is base + i."""
    return sampling.seed * _SEED_STRIDE % _SEEDS


class Unwritten(Sequence[int]):
    """A sequence of tokens, a prompt and its answer so far, that stores no token.

    It has the methods of a list of tokens; a slice is another `Unwritten`. Only the answer's next
    tokens can be appended, and they are not stored either.
    """

    __slots__ = ("_base", "_fill", "_length", "_prompt_len")

    def __init__(self, fill: int, prompt_len: int, base: int, length: int | None = None) -> None:
        """Makes a sequence of `prompt_len` times `fill`, followed by `base` + i at each position
        i.
        """
        self._fill = fill
        self._prompt_len = prompt_len
        self._base = base
        self._length = prompt_len if length is None else length

    def copy(self) -> "Unwritten":
        """Returns a copy, to which tokens are appended independently."""
        return Unwritten(self._fill, self._prompt_len, self._base, self._length)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        num_filled = min(self._prompt_len, self._length)
        answer = range(self._base + num_filled, self._base + self._length)
        return chain(repeat(self._fill, num_filled), answer)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> "Unwritten": ...
    def __getitem__(self, at: int | slice) -> "int | Unwritten":
        if isinstance(at, int):
            position = at if at >= 0 else at + self._length
            if not 0 <= position < self._length:
                raise IndexError(at)
            return self._fill if position < self._prompt_len else self._base + position
        start, stop, stride = at.indices(self._length)
        assert stride == 1
        prompt_len = max(self._prompt_len - start, 0)
        return Unwritten(self._fill, prompt_len, self._base + start, max(stop - start, 0))

    def __add__(self, tokens: Sequence[int]) -> "Unwritten":
        grown = self.copy()
        grown += tokens
        return grown

    def append(self, token: int) -> None:
        """Appends the answer's next token."""
        assert token == self._base + self._length
        self._length += 1

    def __iadd__(self, tokens: Sequence[int]) -> "Unwritten":
        assert not tokens or tokens[0] == self._base + self._length
        self._length += len(tokens)
        return self


class SimulatedPrompts:
    """The prompts of the requests that have not ended."""

    def __init__(self, trace: Trace, block_size: int) -> None:
        self._block_tokens = trace.block_tokens
        self._block_size = block_size
        self._hashes: dict[str, list[BlockHash]] = {}

    def open(
        self, request_id: RequestId, asked: TraceRequest, sampling: Sampling
    ) -> tuple[Sequence[int], PrefixHashes | None]:
        """Returns a prompt's tokens, and its blocks' hashes. The hashes are None if they are
        computed from tokens.
        """
        if self._block_tokens != self._block_size:
            return tuple(prompt_tokens(asked, self._block_tokens)), None
        hashes = _hashes(asked.block_ids[: asked.input_len // self._block_size])
        self._hashes[request_id] = hashes
        last_id = asked.block_ids[-1]  # id of the last block, which may be partly filled
        tokens = Unwritten(last_id, asked.input_len, base_of(sampling))
        return tokens, PrefixHashes({self._block_size: hashes})

    def close(self, request_id: RequestId) -> None:
        """Removes a request that has ended."""
        self._hashes.pop(request_id, None)

    def read(self, message: ComputePrompt | Decode | OfferPrefix, block_size: int) -> PromptFacts:
        """Returns the facts of a prompt. It is an `engine.worker.intake.ReadPrompt`."""
        request_id, _, _ = message.seq_id.partition(".")
        known = self._hashes.get(request_id)
        if known is None:
            return read_prompt(message, block_size)
        hashes = _with_answer(known, message.token_ids, block_size)
        tokens: object = message.token_ids
        if not isinstance(tokens, Unwritten):
            return PromptFacts(hashes, MAX_ID)
        return PromptFacts(hashes, MAX_ID, cast("list[int]", tokens.copy()))


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
    """Returns the hashes of all full blocks in a prompt, in a part of it, or in a prompt with its
    answer.
    """
    num_full = len(token_ids) // block_size
    hashes = known if num_full >= len(known) else known[:num_full]
    for index in range(len(known), num_full):
        parent = hashes[-1] if hashes else None
        block = token_ids[index * block_size : (index + 1) * block_size]
        hashes = [*hashes, hash_block(parent, block)]
    return hashes
