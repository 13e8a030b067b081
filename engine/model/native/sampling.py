"""Chooses tokens in C++: the same as `engine.model.sampling.choosing.sample`, on a CPU."""

from array import array
from collections.abc import Sequence
from ctypes import addressof
from functools import lru_cache
from struct import Struct

import numpy as np
import torch

from engine.messages import TokenId
from engine.model.native.matrix import Team
from engine.model.native.structs import Changes
from engine.model.sampling.changes import TokenChoice, limited

MASK_64 = 2**64 - 1
CACHED_BIASES = 256
NUMBER_BYTES = 4
# Fields of the kernels' `Draw`: temperature, top_p, min_p, seed, position, top_k (0: all), 0,
# changes.
DRAW = Struct("=dddQqiiQ")


def sample(logits: torch.Tensor, choices: Sequence[TokenChoice], *, team: Team) -> torch.Tensor:
    """Returns tokens [num_rows] int64, one for each row of `logits` [num_rows, vocab].

    Logits are fp32, or of a type that fp32 can represent. A row with NaN gets an arbitrary token.
    Raises IndexError if a choice names an id that is not in the vocabulary.
    """
    logits = logits.to(torch.float32).contiguous()
    num_rows, vocab = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64)
    kept: list[object] = []  # objects whose addresses are in the draws; this list keeps them alive
    draws = draws_of(choices, vocab, kept)
    is_done = team.library.baton_sample(
        team.handle, logits.data_ptr(), vocab, num_rows, draws, tokens.data_ptr()
    )
    if not is_done:
        raise IndexError(f"row {tokens.argmin()} names ids beyond a vocabulary of {vocab}")
    return tokens


def draws_of(choices: Sequence[TokenChoice], vocab: int, kept: list[object]) -> int:
    """Returns the address of the choices, in the form of the kernels. It is valid while the objects
    in `kept` exist.
    """
    draws = array("B", bytes(DRAW.size * len(choices)))
    for i, choice in enumerate(choices):
        sampling = choice.sampling
        DRAW.pack_into(
            draws,
            i * DRAW.size,
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.seed & MASK_64,
            choice.position,
            sampling.top_k if 0 < sampling.top_k < vocab else 0,
            0,
            0 if choice.is_plain else _changes(choice, kept),
        )
    kept.append(draws)
    return draws.buffer_info()[0]


def _changes(choice: TokenChoice, kept: list[object]) -> int:
    """Returns the address of the changes to logits that `choice` makes."""
    sampling = choice.sampling
    changes = Changes(prompt_len=choice.prompt_len, repetition=limited(sampling.repetition_penalty))
    if sampling.has_penalties:
        changes.frequency = limited(sampling.frequency_penalty)
        changes.presence = limited(sampling.presence_penalty)
        changes.history, changes.num_history = _lent(choice.history or (), kept)
        changes.drafted, changes.num_drafted = _lent(choice.drafted, kept)
    if sampling.logit_bias:
        ids, biases = _biases(sampling.logit_bias)
        changes.biased, changes.num_biased = _lent(ids, kept)
        changes.biases, _ = _lent(biases, kept)
    if choice.banned:
        changes.banned, changes.num_banned = _lent(choice.banned, kept)
    if choice.mask is not None:
        words = np.ascontiguousarray(choice.mask)
        assert words.dtype == np.uint32
        changes.mask, changes.num_words = words.ctypes.data, len(words)
        kept.append(words)
    kept.append(changes)
    return addressof(changes)


def _lent(numbers: "array | Sequence[TokenId]", kept: list[object]) -> tuple[int, int]:
    """Returns the address and count of numbers. A sequence that is no array is copied to an int32
    array.

    An array with an exported buffer cannot grow, so its memory does not move.
    """
    if not (isinstance(numbers, array) and numbers.itemsize == NUMBER_BYTES):
        numbers = _int32(numbers)
    kept.append(memoryview(numbers))
    return numbers.buffer_info()


def _int32(ids: Sequence[TokenId]) -> "array[int]":
    """Returns the ids as int32. Raises IndexError for ids that cannot be in any vocabulary."""
    try:
        return array("i", ids)
    except OverflowError:
        raise IndexError(f"ids {min(ids)} … {max(ids)} do not fit in 32 bits") from None


@lru_cache(maxsize=CACHED_BIASES)
def _biases(logit_bias: tuple[tuple[TokenId, float], ...]) -> "tuple[array[int], array[float]]":
    """Returns ids and biases as arrays. They are converted once per request, not once per token."""
    biases = dict(logit_bias)
    return _int32(list(biases)), array("f", map(limited, biases.values()))
