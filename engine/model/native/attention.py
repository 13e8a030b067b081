"""Paged attention in C++: an `Attend` for CPUs, for models that are not computed as a whole."""

import ctypes

import torch

from engine.model.attention.base import AttentionBatch, Scoring
from engine.model.attention.kvcache import KVCache
from engine.model.native import structs as native
from engine.model.native.decoder import batch_struct, cache_struct
from engine.model.native.linear import Team


class NativeAttention:
    """Stores K and V and attends, as `engine.model.attention.base` defines it; callable as an
    `Attend`.
    """

    def __init__(self, team: Team) -> None:
        self._team = team

    def __call__(  # noqa: PLR0913 - the seam of all implementations
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        layer: int,
        batch: AttentionBatch,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Computes attention; queries of other dtypes are converted to fp32."""
        inputs = [x.to(torch.float32).contiguous() for x in (query, key, value)]
        out = torch.empty_like(inputs[0])
        score = native.NativeScoring(
            scaling=scoring.scaling, softcap=scoring.softcap or 0.0, window=scoring.window or 0
        )
        self._team.library.baton_attend(
            self._team.handle,
            ctypes.byref(cache_struct(cache, self._team.library)),
            ctypes.byref(batch_struct(batch)),
            layer,
            ctypes.byref(score),
            query.shape[1],
            *(x.data_ptr() for x in inputs),
            out.data_ptr(),
        )
        return out.to(query.dtype)
