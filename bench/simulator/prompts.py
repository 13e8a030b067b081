"""Prompts of a trace, as the gateway and the workers see them.

Where workers' blocks are the trace's, a block's hash is made of the trace's id for it and of the
hash before, as a real one is of its tokens: whoever would ask for the hashes of a prompt's tokens
is told these, and nobody hashes millions of tokens three times. Nobody looks at the tokens of full
blocks then, so these are all alike, and `Unwritten`: a prompt costs as much as its blocks, however
long it is. Where blocks are of another size the tokens are real.

The tokens of an answer are a function of seed and position alone, so what a request is answered
does not depend on who answers it.
"""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import chain, repeat
from typing import cast, overload

from bench.simulator.traces import Trace, TraceRequest, prompt_tokens
from engine.messages import ComputePrompt, Decode, OfferPrefix, RequestId, Sampling
from engine.worker.blocks import HASH_BYTES, BlockHash, hash_block
from engine.worker.intake import MAX_ID, PromptFacts, read_prompt
from router.prefixes.map import PrefixHashes

_SEED_STRIDE, _SEEDS = 7919, 2**30  # keep the tokens of different seeds apart


def token_at(sampling: Sampling, position: int) -> int:
    """The token that is chosen there."""
    return sampling.seed * _SEED_STRIDE % _SEEDS + position


class Unwritten(Sequence[int]):
    """A prompt of equal tokens and its answer so far, without the memory of a list of these.

    It does what a list of tokens is asked for; a part of it is another one. What it grows by must
    be the answer's next tokens: they are not written down either.
    """

    __slots__ = ("_base", "_fill", "_length", "_prompt_len")

    def __init__(self, fill: int, prompt_len: int, base: int, length: int | None = None) -> None:
        """`prompt_len` times `fill`; from there on, at each position i, `base` + i."""
        self._fill = fill
        self._prompt_len = prompt_len
        self._base = base
        self._length = prompt_len if length is None else length

    def copy(self) -> "Unwritten":
        """One that grows by itself."""
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
            position = range(self._length)[at]
            return self._fill if position < self._prompt_len else self._base + position
        start, stop, stride = at.indices(self._length)
        assert stride == 1
        prompt_len = max(self._prompt_len - start, 0)
        return Unwritten(self._fill, prompt_len, self._base + start, max(stop - start, 0))

    def append(self, token: int) -> None:
        """Grows by the answer's next token."""
        assert token == self._base + self._length
        self._length += 1

    def __iadd__(self, tokens: Sequence[int]) -> "Unwritten":
        assert not tokens or tokens[0] == self._base + self._length
        self._length += len(tokens)
        return self


class SimulatedPrompts:
    """The prompts of requests that have come and are not over."""

    def __init__(self, trace: Trace, block_size: int) -> None:
        self._block_tokens = trace.block_tokens
        self._block_size = block_size
        self._hashes: dict[str, list[BlockHash]] = {}

    def open(
        self, request_id: RequestId, asked: TraceRequest, sampling: Sampling
    ) -> tuple[Sequence[int], PrefixHashes | None]:
        """The tokens of a prompt, and the hashes of its blocks if they are not those of tokens."""
        if self._block_tokens != self._block_size:
            return tuple(prompt_tokens(asked, self._block_tokens)), None
        hashes = _hashes(asked.block_ids[: asked.input_len // self._block_size])
        self._hashes[request_id] = hashes
        last_id = asked.block_ids[-1]  # of the block that may grow
        tokens = Unwritten(last_id, asked.input_len, token_at(sampling, 0))
        return tokens, PrefixHashes({self._block_size: hashes})

    def close(self, request_id: RequestId) -> None:
        """It is over."""
        self._hashes.pop(request_id, None)

    def read(self, message: ComputePrompt | Decode | OfferPrefix, block_size: int) -> PromptFacts:
        """An `engine.worker.intake.ReadPrompt`."""
        request_id, _, _ = message.seq_id.partition(".")
        known = self._hashes.get(request_id)
        if known is None:
            return read_prompt(message, block_size)
        hashes = _with_answer(known, message.token_ids, block_size)
        tokens: object = message.token_ids
        if not isinstance(tokens, Unwritten):  # a journal with an answer that goes on
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
    """The same, and those of blocks that the answer so far has filled; of a part, its own."""
    num_full = len(token_ids) // block_size
    hashes = known if num_full >= len(known) else known[:num_full]
    for index in range(len(known), num_full):
        parent = hashes[-1] if hashes else None
        block = token_ids[index * block_size : (index + 1) * block_size]
        hashes = [*hashes, hash_block(parent, block)]
    return hashes
