"""Linear layers over packed weights: drop-in modules, and the matrices that the decoder shares.

    int8         one scale per output, symmetric; activations are quantised per token
    fp32, bf16   as they are. A matrix of fp32 whose every value is one of bf16, as in most
                 checkpoints, is kept in bf16 and widened as it is read: the products are the same.

The result for a row has the same bits in any batch.
"""

import ctypes

import torch
from torch import nn

from engine.config import WeightFormat
from engine.model.native.library import BF16, FP32, INT8, Weight

ALIGNMENT = 64
HUGE_PAGE = 2**21


class Team:
    """Threads that compute together, and the library that they compute with. Used by one thread."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self.library = library
        self.threads = threads
        self.handle = library.baton_team_open(threads)
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def close(self) -> None:
        """Ends the threads."""
        self.library.baton_team_close(self.handle)
        self.handle = None

    def scratch(self, num_bytes: int) -> int:
        """Address of that much memory, aligned; valid until the next call."""
        if self._scratch.numel() < num_bytes + ALIGNMENT:
            self._scratch = torch.empty(2 * num_bytes + ALIGNMENT, dtype=torch.uint8)
        address = self._scratch.data_ptr()
        return address + -address % ALIGNMENT


class PackedMatrix:
    """A matrix [rows, cols] as the kernels read it."""

    def __init__(self, library: ctypes.CDLL, weight: torch.Tensor, form: WeightFormat) -> None:
        """`form` is fp32, bf16 or int8."""
        source = weight.detach().to(torch.float32).contiguous()
        rows, cols = source.shape
        kind = _kind(source, form)
        panel = library.baton_panel()
        padded_rows = -(-rows // panel) * panel
        self.form = form
        self.panels = _aligned(library.baton_packed_bytes(kind, rows, cols))
        self.scales = torch.zeros(padded_rows)
        self.offsets = torch.zeros(padded_rows, dtype=torch.int32)
        self.bias: torch.Tensor | None = None
        library.baton_pack(
            kind,
            source.data_ptr(),
            rows,
            cols,
            self.panels.data_ptr(),
            self.scales.data_ptr(),
            self.offsets.data_ptr(),
        )
        self.struct = Weight(
            kind=kind,
            rows=rows,
            cols=cols,
            padded_cols=library.baton_padded_cols(kind, cols),
            panels=self.panels.data_ptr(),
            scales=self.scales.data_ptr(),
            offsets=self.offsets.data_ptr(),
        )

    @property
    def num_bytes(self) -> int:
        """Memory of the weights and their scales."""
        scales = 2 * self.scales.nbytes if self.struct.kind == INT8 else 0
        return self.panels.nbytes + scales

    def set_bias(self, bias: torch.Tensor) -> None:
        """Adds `bias` [rows] to every product from now on."""
        self.bias = torch.zeros_like(self.scales)
        self.bias[: len(bias)] = bias.detach().float()
        self.struct.bias = self.bias.data_ptr()


class PackedLinear(nn.Module):
    """An `nn.Linear` over a packed matrix, for fp32 activations on a CPU."""

    def __init__(self, linear: nn.Linear, team: Team, form: WeightFormat) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.matrix = PackedMatrix(team.library, linear.weight, form)
        if linear.bias is not None:
            self.matrix.set_bias(linear.bias)
        self._team = team

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] → [..., out_features]."""
        flat = x.reshape(-1, self.in_features).contiguous()
        y = flat.new_empty(len(flat), self.out_features)
        team, weight = self._team, ctypes.byref(self.matrix.struct)
        if len(flat):
            needed = team.library.baton_linear_scratch(team.handle, weight, len(flat))
            team.library.baton_linear(
                team.handle, weight, flat.data_ptr(), len(flat), y.data_ptr(), team.scratch(needed)
            )
        return y.view(*x.shape[:-1], self.out_features)


def pack_linears(model: nn.Module, team: Team, form: WeightFormat) -> int:
    """Replaces every `nn.Linear` of `model` by a `PackedLinear`; the bytes of their weights.

    One that a quantised checkpoint has changed (other weights, another forward) stays as it is.
    """
    num_bytes = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if _is_plain(child):
                packed = PackedLinear(child, team, form)
                num_bytes += packed.matrix.num_bytes
                setattr(module, name, packed)
    return num_bytes


def _is_plain(module: nn.Module) -> bool:
    is_linear = type(module) is nn.Linear and "forward" not in vars(module)
    return is_linear and module.weight.is_floating_point()


def exact_in_bf16(values: torch.Tensor) -> bool:
    """Whether bf16 holds every one of these fp32 values."""
    return not bool((values.view(torch.int32) & 0xFFFF).any())


def _kind(source: torch.Tensor, form: WeightFormat) -> int:
    if form is WeightFormat.INT8:
        return INT8
    if form is WeightFormat.BF16 or exact_in_bf16(source):
        return BF16
    return FP32


def _aligned(num_bytes: int) -> torch.Tensor:
    """Uninitialised bytes that start on a cache line, or on a huge page where they fill one."""
    alignment = HUGE_PAGE if num_bytes >= HUGE_PAGE else ALIGNMENT
    raw = torch.empty(num_bytes + alignment, dtype=torch.uint8)
    start = -raw.data_ptr() % alignment
    return raw[start : start + num_bytes]
