"""Linear layers and experts with fp8 weights: 8 bits a weight and activation, for Hopper and later.

    y[m, n] = sum over k of x8[m, k] * w8[n, k] * x_scale[m] * w_scale[n]

Weights and activations are float8 e4m3. Weights are quantised once, with a scale max |w| / 448 for
each output row. Activations are quantised at every call, with a scale for each token, so a token's
numbers do not depend on other tokens. On a capable GPU torch multiplies them on the tensor cores
(`_scaled_mm` with scales per row). On other devices they are multiplied in fp32: slow, and used as
the reference.

Requirements of torch: the right operand is column-major, which is the layout of a transposed
row-major weight [n, k]; n and k are multiples of 16; scales are fp32 [m, 1] and [1, n]; the result
is bf16. The number of rows is padded to a multiple of 16, because kernels have read scales after
the last row (pytorch/pytorch#133334), and some kernels are slow below 16 rows.

**Experts** of a mixture (`native.experts` describes their modules) are quantised in the same way,
one expert at a time. The pairs of a token and one of its experts are sorted by expert. Then one
grouped product computes all experts, and the host need not know their numbers of tokens
(`_scaled_grouped_mm`, Hopper and Blackwell). On other capable GPUs there is one product for each
expert, and the host waits for the experts' numbers of tokens.

Layers of an unsuitable size, layers named in `skip` and routers are not quantised. The last layer
should be skipped, because nothing averages out the errors of its logits.
"""

from collections.abc import Callable, Collection
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad

from engine.model.native.experts import holds_experts, router_layers

LARGEST = 448.0  # the largest e4m3 number
MULTIPLE = 16  # sizes of matrices must be multiples of this number
LEAST_SCALE = 1e-12  # smallest scale of activations, used for rows of zeros
FIRST_CAPABILITY = (8, 9)  # the first compute capability that supports fp8
GROUPED_CAPABILITIES = (9, 10)  # major compute capabilities that support grouped products

# (rows [m, k], scales [m, 1], weights [n, k], scales [n]) → [m, n]
Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Replaced(NamedTuple):
    """The names of the replaced layers or experts, and the names of the unchanged ones."""

    replaced: tuple[str, ...]
    kept: tuple[str, ...]


class Fp8Linear(nn.Module):
    """Replaces an `nn.Linear` in inference. The result has the dtype of the input.

    The module must stay on the device on which it was made.
    """

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("weight", weight)  # [out_features, in_features] float8_e4m3fn
        self.register_buffer("scales", scales)  # [out_features] fp32
        self.register_buffer("bias", bias)  # [out_features] or None
        # Decided once, because torch.compile cannot trace the check.
        self._multiply = _multiply_on(weight.device)

    @classmethod
    def of(cls, linear: nn.Linear) -> "Fp8Linear":
        """Returns a quantised copy of the linear layer."""
        weight, scales = quantise_rows(linear.weight.detach())
        bias = None if linear.bias is None else linear.bias.detach()
        return cls(weight, scales[:, 0], bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies `x` [..., in_features]. Returns [..., out_features]."""
        rows = x.reshape(-1, self.in_features)
        y = self._multiply(*quantise_rows(rows), self.weight, self.scales).to(x.dtype)
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], self.out_features)


class Fp8Matrices(nn.Module):
    """One fp8 matrix for each expert. It multiplies rows that are sorted by expert."""

    def __init__(self, weights: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Quantises `weights` [num_experts, outputs, inputs]; `bias` is [num_experts, outputs]."""
        super().__init__()
        shape, device = weights.shape, weights.device
        self.register_buffer(
            "weights", torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
        )
        self.register_buffer("scales", torch.empty(shape[:2], device=device))
        self.register_buffer("bias", bias)
        # Quantises one expert at a time, because quantising makes fp32 copies.
        for expert, weight in enumerate(weights):
            rows, scales = quantise_rows(weight)
            self.weights[expert], self.scales[expert] = rows, scales[:, 0]
        self._multiply = (
            grouped_matmul if can_group(device) else partial(one_by_one, _multiply_on(device))
        )

    def forward(self, x: torch.Tensor, ends: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Multiplies `x` [rows, inputs] by the matrices of `experts` [rows]. Returns [rows,
        outputs]. `ends` [num_experts] int32 are the ends of each expert's rows.
        """
        y = self._multiply(*quantise_rows(x), self.weights, self.scales, ends).to(x.dtype)
        return y if self.bias is None else y + self.bias[experts]


class Fp8Experts(nn.Module):
    """Replaces a module for which `holds_experts` is true, in inference. The module must have all
    experts.
    """

    def __init__(self, experts: nn.Module) -> None:
        """Moves the weights out of `experts`, whose activation and gating are still used."""
        super().__init__()
        self.num_experts = experts.down_proj.shape[0]
        self.experts = experts
        self._has_gate = getattr(experts, "has_gate", True)
        self._has_norm = getattr(experts, "has_post_expert_norm", False)
        self.first = _take(experts, "gate_up_proj" if self._has_gate else "up_proj")
        self.second = _take(experts, "down_proj")

    def forward(
        self,
        hidden_states: torch.Tensor,  # [num_tokens, hidden]
        top_k_index: torch.Tensor,  # experts of each token
        top_k_weights: torch.Tensor,  # [num_tokens, top_k]: shares of these experts
    ) -> torch.Tensor:
        """Returns the weighted sum of the experts' results, [num_tokens, hidden]."""
        num_tokens, top_k = top_k_index.shape
        # (token, expert) pairs, sorted by expert.
        chosen, order = top_k_index.reshape(-1).sort(stable=True)
        numbers = torch.arange(self.num_experts, device=chosen.device, dtype=chosen.dtype)
        ends = torch.searchsorted(chosen, numbers, right=True, out_int32=True)
        x = self.first(hidden_states[order // top_k], ends, chosen)
        x = self.experts._apply_gate(x) if self._has_gate else self.experts.act_fn(x)
        x = self.second(x, ends, chosen)
        if self._has_norm:
            x = self.experts.post_expert_norm(x)
        results = torch.empty_like(x).index_copy_(0, order, x).view(num_tokens, top_k, -1)
        return (results * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)


def replace_linears(
    model: nn.Module,
    skip: Collection[str] = ("lm_head",),
    read_outside: Collection[str] = (),
) -> Replaced:
    """Replaces every linear layer by an Fp8Linear, one layer at a time, so that only one layer is
    in memory twice.

    A layer is left unchanged if its name ends in one of `skip`, if it is a router, or if other
    modules read its weights.
    """
    replaced, kept = [], []
    routers = set(router_layers(model))
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    for name in linears:
        parent_name, _, last = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        linear = getattr(parent, last)
        if (
            last in skip
            or linear in routers
            or name in read_outside
            or any(size % MULTIPLE for size in linear.weight.shape)
        ):
            kept.append(name)
            continue
        setattr(parent, last, Fp8Linear.of(linear))
        replaced.append(name)
    return Replaced(tuple(replaced), tuple(kept))


def replace_experts(model: nn.Module, read_outside: Collection[str] = ()) -> Replaced:
    """Replaces every module of experts whose weights no other module reads."""
    replaced, kept = [], []
    for name in [name for name, module in model.named_modules() if holds_experts(module)]:
        experts = model.get_submodule(name)
        sizes = [size for weights in experts.parameters(recurse=False) if weights.ndim == 3
                 for size in weights.shape[1:]]  # fmt: skip
        if name in read_outside or any(size % MULTIPLE for size in sizes):
            kept.append(name)
            continue
        model.set_submodule(name, Fp8Experts(experts))
        replaced.append(name)
    return Replaced(tuple(replaced), tuple(kept))


def can_multiply(device: torch.device) -> bool:
    """True if torch multiplies fp8 on this device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def can_group(device: torch.device) -> bool:
    """True if torch multiplies groups of fp8 rows on this device."""
    if not can_multiply(device) or not hasattr(torch, "_scaled_grouped_mm"):
        return False
    return torch.cuda.get_device_capability(device)[0] in GROUPED_CAPABILITIES


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises `x` [m, k] to e4m3 [m, k]. Also returns the scales [m, 1] in fp32, one for each
    row.
    """
    x = x.float()
    scales = (x.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=LEAST_SCALE)
    return (x / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


def scaled_matmul(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor
) -> torch.Tensor:
    """Computes the product at the top of this module, [m, n] in bf16, with torch's kernels for fp8.

    `x` [m, k] has scales [m, 1], `weight` [n, k] has scales [n].
    """
    num_rows = x.shape[0]
    if num_rows % MULTIPLE:
        fill = (0, 0, 0, -num_rows % MULTIPLE)
        x = pad(x.view(torch.uint8), fill).view(torch.float8_e4m3fn)
        x_scales = pad(x_scales, fill)
    y = torch._scaled_mm(
        x,
        weight.t(),
        scale_a=x_scales,
        scale_b=weight_scales[None],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return y[:num_rows]


def reference_matmul(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor
) -> torch.Tensor:
    """Computes the same product as `scaled_matmul`, in fp32: the reference."""
    return (x.float() * x_scales) @ (weight.float() * weight_scales[:, None]).t()


def grouped_matmul(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weights: torch.Tensor,
    weight_scales: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    """Multiplies each group of rows by the group's weights, with torch's fp8 kernels. `ends` are
    the ends of the groups.

    `x` [m, k] has scales [m, 1], `weights` [num_groups, n, k] have scales [num_groups, n]. The
    result is [m, n] in bf16.
    """
    return torch._scaled_grouped_mm(
        x,
        weights.transpose(1, 2),
        x_scales[:, 0].contiguous(),
        weight_scales,
        offs=ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def one_by_one(
    multiply: Multiply,
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weights: torch.Tensor,
    weight_scales: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    """Computes the same as `grouped_matmul`, with one product per non-empty group. The host waits
    for `ends`.
    """
    runs = enumerate(pairwise([0, *ends.tolist()]))
    return torch.cat(
        [
            multiply(x[start:end], x_scales[start:end], weights[group], weight_scales[group])
            for group, (start, end) in runs
            if start < end
        ]
    )


def _multiply_on(device: torch.device) -> Multiply:
    return scaled_matmul if can_multiply(device) else reference_matmul


def _take(experts: nn.Module, name: str) -> Fp8Matrices:
    """Removes the named parameter and its bias from the module. Returns both, quantised."""
    weights = getattr(experts, name).detach()
    bias = getattr(experts, f"{name}_bias").detach() if experts.has_bias else None
    matrices = Fp8Matrices(weights.transpose(1, 2) if experts.is_transposed else weights, bias)
    delattr(experts, name)
    if experts.has_bias:
        delattr(experts, f"{name}_bias")
    return matrices
