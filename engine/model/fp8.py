"""Linear layers with fp8 weights: 8 bits a weight and activation, for Hopper and later.

    y[m, n] = sum over k of x8[m, k] * w8[n, k] * x_scale[m] * w_scale[n]

Both sides are float8 e4m3. Weights are quantised once, each output row by max |w| / 448 of its own;
activations at every call, each token by its own, so a token's numbers do not depend on the tokens
beside it. torch multiplies them on the tensor cores (`_scaled_mm` with scales per row) where there
is a GPU that can, and here as plain numbers elsewhere: slow, and kept to check the other.

What torch asks of the operands: the right one column by column in memory, which a weight [n, k] row
by row is when transposed; n and k multiples of 16; scales fp32 [m, 1] and [1, n]; the result bf16.
Rows are filled up to a multiple of 16: kernels have read scales beyond the last row
(pytorch/pytorch#133334), and some are slow below 16 rows.

A layer whose size does not fit, and those named in `skip`, stay as they are. The last layer should:
errors of its logits are not averaged away by anything.
"""

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad

LARGEST = 448.0  # of e4m3
MULTIPLE = 16  # of what sizes have to be
LEAST_SCALE = 1e-12  # of an activation: rows of zeros have no scale of their own
FIRST_CAPABILITY = (8, 9)  # of GPUs that multiply fp8


class Replaced(NamedTuple):
    """Names of the linear layers that were replaced, and of those that were not."""

    replaced: tuple[str, ...]
    kept: tuple[str, ...]


class Fp8Linear(nn.Module):
    """Stands in for an `nn.Linear` in inference; the result has the dtype of the input.

    Stays on the device on which it was made.
    """

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("weight", weight)  # [out_features, in_features] float8_e4m3fn
        self.register_buffer("scales", scales)  # [out_features] fp32
        self.register_buffer("bias", bias)  # [out_features] or None
        # Asked here, not at every call: torch.compile could not follow the question.
        self._multiply = scaled_matmul if can_multiply(weight.device) else reference_matmul

    @classmethod
    def of(cls, linear: nn.Linear) -> "Fp8Linear":
        """The linear layer with its weights quantised."""
        weight, scales = quantise_rows(linear.weight.detach())
        bias = None if linear.bias is None else linear.bias.detach()
        return cls(weight, scales[:, 0], bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [..., in_features] → [..., out_features]."""
        rows = x.reshape(-1, self.in_features)
        y = self._multiply(*quantise_rows(rows), self.weight, self.scales).to(x.dtype)
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], self.out_features)


def replace_linears(
    model: nn.Module,
    skip: Collection[str] = ("lm_head",),
    read_outside: Collection[str] = (),
) -> Replaced:
    """Puts an Fp8Linear in the place of every linear layer, one by one, so that only one is held
    twice at a time.

    Not of those whose name ends in one of `skip`, nor of those whose weights other modules read.
    """
    replaced, kept = [], []
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    for name in linears:
        parent_name, _, last = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        linear = getattr(parent, last)
        if (
            last in skip
            or name in read_outside
            or any(size % MULTIPLE for size in linear.weight.shape)
        ):
            kept.append(name)
            continue
        setattr(parent, last, Fp8Linear.of(linear))
        replaced.append(name)
    return Replaced(tuple(replaced), tuple(kept))


def can_multiply(device: torch.device) -> bool:
    """Whether torch multiplies fp8 on this device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [m, k] as e4m3 [m, k] and its scales [m, 1] in fp32, one for each row."""
    x = x.float()
    scales = (x.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=LEAST_SCALE)
    return (x / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


def scaled_matmul(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor
) -> torch.Tensor:
    """The product defined above, [m, n] in bf16, by torch's kernels for fp8.

    `x` [m, k] with scales [m, 1], `weight` [n, k] with scales [n].
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
    """What `scaled_matmul` computes, said plainly, in fp32."""
    return (x.float() * x_scales) @ (weight.float() * weight_scales[:, None]).t()
