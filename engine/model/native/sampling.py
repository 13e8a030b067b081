"""Choosing tokens in C++: `engine.model.sampling.sample` on a CPU, the same tokens."""

from collections.abc import Sequence
from ctypes import c_int32
from itertools import accumulate, chain

import torch

from engine.messages import Sampling
from engine.model.native.library import Draw
from engine.model.native.matrix import Team

MASK_64 = 2**64 - 1


def sample(
    logits: torch.Tensor,
    samplings: Sequence[Sampling],
    positions: Sequence[int],
    banned: Sequence[Sequence[int]],
    *,
    team: Team,
) -> torch.Tensor:
    """The token [num_rows] int64 of each row of `logits` [num_rows, vocab].

    Logits are fp32, or of a type that fp32 holds; a row with NaN gets some token. Raises IndexError
    where a banned id is not in the vocabulary.
    """
    logits = logits.to(torch.float32).contiguous()
    num_rows, vocab = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64)
    draws = (Draw * num_rows)(*map(_draw, samplings, positions, [vocab] * num_rows))
    starts = (c_int32 * (num_rows + 1))(0, *accumulate(map(len, banned)))
    ids = (c_int32 * starts[num_rows])(*_checked(banned, vocab))
    team.library.baton_sample(
        team.handle, logits.data_ptr(), vocab, num_rows, draws, starts, ids, tokens.data_ptr()
    )
    return tokens


def _draw(sampling: Sampling, position: int, vocab: int) -> Draw:
    return Draw(
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.seed & MASK_64,
        position,
        sampling.top_k if 0 < sampling.top_k < vocab else 0,
    )


def _checked(banned: Sequence[Sequence[int]], vocab: int) -> list[int]:
    """All banned ids, row by row."""
    ids = list(chain.from_iterable(banned))
    if ids and not (min(ids) >= 0 and max(ids) < vocab):
        raise IndexError(f"banned ids {min(ids)} … {max(ids)} of a vocabulary of {vocab}")
    return ids
