"""Packs a model: replaces modules that multiply by modules over packed matrices.

    nn.Linear, Conv1D              PackedLinear
    experts of a mixture           one of `native.experts`
    other matrices, as of routers  none: see `InvariantProducts`

A linear layer whose weights other modules read is left unchanged. A token's results are the same
bits in any batch.
"""

from collections.abc import Collection, Iterator

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine.config import WeightFormat
from engine.model.loading.stored import widen
from engine.model.native.experts import (
    PackedExperts,
    PackedRuns,
    kind_of_experts,
    router_layers,
)
from engine.model.native.matrix import PackedMatrix, Team, multiply
from engine.model.native.matrix import exact_in_bf16 as exact_in_bf16


class PackedLinear(nn.Module):
    """An `nn.Linear` or a `Conv1D` over a packed matrix, for fp32 activations on a CPU."""

    def __init__(self, linear: nn.Linear | Conv1D, team: Team, form: WeightFormat) -> None:
        super().__init__()
        weight = linear.weight.T if isinstance(linear, Conv1D) else linear.weight
        self.out_features, self.in_features = weight.shape
        self.matrix = PackedMatrix(team, weight, form)
        if linear.bias is not None:
            self.matrix.set_bias(linear.bias)
        self._team = team

    @property
    def num_bytes(self) -> int:
        """The bytes of the weights and of their scales."""
        return self.matrix.num_bytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies [..., in_features] by the weights. Returns [..., out_features]."""
        return multiply(x, self.matrix, self._team)


def pack_linears(
    model: nn.Module, team: Team, form: WeightFormat, read_outside: Collection[str] = ()
) -> int:
    """Packs the linear layers and experts of `model`. Returns the bytes of all its matrices.

    Routers are packed in fp32. Modules named in `read_outside` are left unchanged, because other
    modules read their weights.

    Each weight is packed from its present dtype and freed before the next weight is packed. All
    unpacked weights are fp32 afterwards. Modules that a quantised checkpoint has changed (other
    weights, another `forward`) are left unchanged.
    """
    num_bytes = 0
    for name, wanted in reversed(_packable(model, form).items()):  # children before their parents
        if name in read_outside:
            continue
        packed = _packed(model.get_submodule(name), team, wanted)
        num_bytes += packed.num_bytes
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, packed)
        del packed
    widen(model)
    return num_bytes + bare_bytes(model, read_outside)


def bare_bytes(model: nn.Module, read_outside: Collection[str] = ()) -> int:
    """Returns the bytes of the matrices of a packed model that are still in fp32, because the
    model's own code uses them.
    """
    return sum(x.nbytes for x in _bare_matrices(model, read_outside))


def _packable(model: nn.Module, form: WeightFormat) -> dict[str, WeightFormat]:
    """Returns the names of the modules to replace, with the weight format of each. Returns names
    only, so that no module is kept alive.
    """
    routers = set(router_layers(model))
    return {
        name: WeightFormat.FP32 if module in routers else form
        for name, module in model.named_modules(remove_duplicate=False)
        if kind_of_experts(module) is not None or _is_plain(module)
    }


def _packed(
    module: nn.Module, team: Team, form: WeightFormat
) -> PackedLinear | PackedExperts | PackedRuns:
    return (kind_of_experts(module) or PackedLinear)(module, team, form)


def _bare_matrices(model: nn.Module, read_outside: Collection[str]) -> Iterator[nn.Parameter]:
    """Yields the matrices of the model's own modules. Leaves out tables, and layers that
    quantisation has changed.
    """
    for path, module in model.named_modules():
        is_left_linear = type(module) is nn.Linear and path not in read_outside
        if not isinstance(module, nn.Embedding) and not is_left_linear:
            for parameter in module.parameters(recurse=False):
                if parameter.ndim > 1 and parameter.dtype is torch.float32:
                    yield parameter


def _is_plain(module: nn.Module) -> bool:
    is_linear = type(module) in (nn.Linear, Conv1D) and "forward" not in vars(module)
    return is_linear and module.weight.is_floating_point()
