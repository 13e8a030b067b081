"""Linear layers with fp8 weights: 8 bits a weight and activation, for Hopper and later.

    y[m, n] = sum over k of x8[m, k] * w8[n, k] * x_scale[m] * w_scale[n]

Both sides are float8 e4m3. Weights are quantised once, with a scale max |w| / 448 for each output
row. Activations are quantised at every call, with a scale for each token, so a token's numbers do
not depend on the tokens beside it. On a capable GPU torch multiplies them on the tensor cores
(`_scaled_mm` with scales per row). Elsewhere they are multiplied as plain numbers: slow, and kept
as the reference.

torch requires of the operands: the right one is column-major, as a row-major weight [n, k] is when
transposed; n and k are multiples of 16; scales are fp32 [m, 1] and [1, n]; the result is bf16. Rows
are filled up to a multiple of 16, because kernels have read scales beyond the last row
(pytorch/pytorch#133334), and some are slow below 16 rows.

Layers of an unfit size, and those named in `skip`, stay as they are. The last layer should be
skipped, since nothing averages out the errors of its logits.
"""

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad

LARGEST = 448.0  # the largest e4m3 number
MULTIPLE = 16  # sizes must be multiples of this
LEAST_SCALE = 1e-12  # of an activation, for rows of zeros
FIRST_CAPABILITY = (8, 9)  # the first compute capability with fp8


class Replaced(NamedTuple):
    """Names of the linear layers that were replaced, and of those that were not."""

    replaced: tuple[str, ...]
    kept: tuple[str, ...]


class Fp8Linear(nn.Module):
    """Replaces an `nn.Linear` in inference; the result has the dtype of the input.

    It must stay on the device on which it was made.
    """

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("weight", weight)  # [out_features, in_features] float8_e4m3fn
        self.register_buffer("scales", scales)  # [out_features] fp32
        self.register_buffer("bias", bias)  # [out_features] or None
        # Decided here, not at every call: torch.compile could not trace the check.
        self._multiply = scaled_matmul if can_multiply(weight.device) else reference_matmul

    @classmethod
    def of(cls, linear: nn.Linear) -> "Fp8Linear":
        """Returns the linear layer with its weights quantised."""
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
    """Replaces every linear layer by an Fp8Linear, one by one, so that only one is held twice at a
    time.

    Layers stay if their name ends in one of `skip`, or if other modules read their weights.
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
    """True if torch multiplies fp8 on this device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises `x` [m, k] to e4m3 [m, k]; returns it with its scales [m, 1] in fp32, one for each
    row.
    """
    x = x.float()
    scales = (x.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=LEAST_SCALE)
    return (x / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


def scaled_matmul(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor
) -> torch.Tensor:
    """The product defined above, [m, n] in bf16, by torch's kernels for fp8.

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
    """The definition of `scaled_matmul`, in fp32."""
    return (x.float() * x_scales) @ (weight.float() * weight_scales[:, None]).t()
