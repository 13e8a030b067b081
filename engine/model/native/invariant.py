"""Batch-invariant versions of torch's functions, for the code of models.

Two kinds of torch's own functions are not batch-invariant:

1. Element-wise functions such as sigmoid. torch computes the elements after the last multiple of
   32 by other code, so a row's last bits depend on the row's place in the tensor. The versions here
   call torch's functions over memory whose size is such a multiple.
2. Matrix products. A BLAS divides a product in a way that depends on the number of rows. Products
   with a model's own weights (a router's, an expert's) are computed over packed matrices here. A
   matrix is packed at its first use in a product, because other tensors, such as tables, look the
   same before.

`install` registers both kinds with torch's dispatcher, through which all calls go. They have an
effect only within `InvariantProducts.active`. At other times they compute the same as torch.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from engine.config import WeightFormat
from engine.model.native.matrix import PackedMatrix, Team, multiply

UNIT = 64  # elements; torch's vector loops process 32 of fp32 or 64 of bf16
ELEMENTWISE = (
    "cos",
    "elu",
    "erf",
    "exp",
    "expm1",
    "gelu",
    "log",
    "log1p",
    "mish",
    "sigmoid",
    "silu",
    "sin",
    "softplus",
    "tanh",
)
IN_PLACE = ("elu", "exp", "gelu", "mish", "sigmoid", "silu", "tanh")

_active: "InvariantProducts | None" = None  # set while a model runs with these versions


class InvariantProducts:
    """Packs the matrices that a model's own code uses in products, and multiplies by them."""

    def __init__(self, model: nn.Module, team: Team) -> None:
        """From now on the model's weights must keep their addresses."""
        install()
        self._team = team
        self._weights = [x for x in model.parameters() if x.ndim > 1 and x.numel()]
        self._storages = {x.untyped_storage().data_ptr() for x in self._weights}
        self._packed: dict[tuple[int, ...], PackedMatrix] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Returns a context in which torch computes as described above. torch must use one
        thread.
        """
        global _active  # global, because torch's dispatcher is global
        before, _active = _active, self
        try:
            yield
        finally:
            _active = before

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        """Multiplies `x` [rows, inputs] by `weight` [inputs, outputs]; returns None if the weight
        is not one of the model's.
        """
        if weight.untyped_storage().data_ptr() not in self._storages:
            return None
        if not x.dtype == weight.dtype == torch.float32:
            return None
        key = (weight.data_ptr(), *weight.shape, *weight.stride())
        matrix = self._packed.get(key)
        if matrix is None:
            matrix = PackedMatrix(self._team, weight.T, WeightFormat.FP32)
            self._packed[key] = matrix
        return multiply(x, matrix, self._team)


@cache
def install() -> torch.library.Library:
    """Registers all functions, once per process."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that it already had kernels
        for name in ELEMENTWISE:
            library.impl(name, partial(_apply, getattr(torch.ops.aten, name).out), "CPU")
        for name in IN_PLACE:
            compute = partial(_apply, getattr(torch.ops.aten, name).out)
            library.impl(f"{name}_", partial(_apply_in_place, compute), "CPU")
        for name, function in (("mm", _mm), ("addmm", _addmm), ("bmm", _bmm)):
            library.impl(name, function, "CPU")
    return library


def _apply(
    compute: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Applies the element-wise function `compute` to `x`."""
    if not x.dtype.is_floating_point and not x.dtype.is_complex:
        x = x.to(torch.get_default_dtype())
    num_elements = x.numel()
    if _active is None or _has_no_remainder(x):
        return compute(x, *args, **kwargs, out=torch.empty_like(x))
    padded = x.new_zeros(math.ceil(num_elements / UNIT) * UNIT)
    found = padded[:num_elements].view(x.shape)
    found.copy_(x)
    compute(padded, *args, **kwargs, out=padded)
    return found


def _has_no_remainder(x: torch.Tensor) -> bool:
    if x.is_contiguous():
        return x.numel() % UNIT == 0
    return x.shape[-1] % UNIT == 0 and x.stride(-1) == 1


def _apply_in_place(
    compute: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    return x.copy_(compute(x, *args, **kwargs))


def _mm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    found = None if _active is None else _active.multiply(x, weight)
    if found is not None:
        return found
    return torch.ops.aten.mm.out(x, weight, out=x.new_empty(x.shape[0], weight.shape[1]))


def _addmm(
    bias: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    found = None if _active is None or alpha != 1 or beta != 1 else _active.multiply(x, weight)
    if found is not None:
        return found.add_(bias)
    out = x.new_empty(x.shape[0], weight.shape[1])
    return torch.ops.aten.addmm.out(bias, x, weight, beta=beta, alpha=alpha, out=out)


def _bmm(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    if _active is not None and len(x):
        found = [_active.multiply(*pair) for pair in zip(x, weights, strict=True)]
        if found[0] is not None:
            return torch.stack(found)
    out = x.new_empty(x.shape[0], x.shape[1], weights.shape[2])
    return torch.ops.aten.bmm.out(x, weights, out=out)
