"""Chooses tokens on a GPU: `engine.model.sampling.choosing.sample` as one Triton kernel.

The host queues one small copy from pinned memory, the sampling parameters of all rows, and does not
wait. The result stays on the device. If logits of rows must be changed first, torch changes them
(`changes`).

triton is needed when this is called, not when it is imported. It runs on CPU tensors if triton
interprets (TRITON_INTERPRET=1), but not on tensors of a device that is not the current one.
"""

import math
from collections.abc import Collection, Sequence
from functools import cache
from struct import Struct
from types import ModuleType

import numpy as np
import torch

from engine.messages import Sampling
from engine.model.memory import brought
from engine.model.sampling.changes import TokenChoice, changed

TILE = 4096  # number of logits that are read at a time
NUM_WARPS = 16
MASK_64 = 2**64 - 1
# A row's parameter words for the kernel: temperature, top_p, log(min_p), seed, position, top_k (0:
# all).
PARAMETERS = Struct("=dddQqq")


def sample(logits: torch.Tensor, choices: Sequence[TokenChoice]) -> torch.Tensor:
    """Returns a token for each row of `logits` [num_rows, vocab], as a tensor [num_rows].

    Raises IndexError if a choice names an id that is not in the vocabulary.
    """
    logits = changed(logits, choices)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_rows, vocab = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        packed = b"".join([_packed(choice, vocab) for choice in choices])
        parameters = brought(np.frombuffer(packed, np.int64), logits.device)
        _kernels().sample_kernel[num_rows,](
            tokens, logits, parameters, vocab, logits.stride(0), TILE=TILE, num_warps=NUM_WARPS
        )
    return tokens


def warm_up(vocab: int, dtypes: Collection[torch.dtype], device: torch.device) -> None:
    """Compiles the kernel for logits of these types. The kernel then serves all choices and numbers
    of rows.
    """
    for dtype in dtypes:
        sample(torch.zeros(1, vocab, dtype=dtype, device=device), [TokenChoice(Sampling(), 0)])


def _packed(choice: TokenChoice, vocab: int) -> bytes:
    sampling = choice.sampling
    return PARAMETERS.pack(
        sampling.temperature,
        sampling.top_p,
        math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf,
        sampling.seed & MASK_64,
        choice.position,
        sampling.top_k if 0 < sampling.top_k < vocab else 0,
    )


@cache
def _kernels() -> ModuleType:
    from engine.model.sampling import kernels

    return kernels
