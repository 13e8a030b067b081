"""Packed matrices, and the threads that multiply by them. Layers and the C++ decoder share both.

    int8         one scale per output, symmetric; activations are quantised per token
    fp32, bf16   unchanged values. If bf16 can represent every value of a matrix, as in most
                 checkpoints, the matrix is stored in bf16 and widened when it is read: the products
                 are the same. With AMX, each activation is split into three bf16 numbers whose sum
                 is the activation.

A row's results are the same bits in any batch.
"""

import ctypes
import mmap

import torch

from engine.config import WeightFormat
from engine.model.memory import ALIGNMENT, Pieces
from engine.model.native.structs import BF16, BF16_PAIRS, FP32, INT8, Weight
from engine.native.library import Native

CHECKED_AT_ONCE = 2**18


class Team:
    """Threads that compute together, their library, and their memory for weights. Used by one
    thread.
    """

    def __init__(self, library: Native, threads: int) -> None:
        self.library = library
        self.threads = threads
        self.handle = library.baton_team_open(threads)
        self.weights = Pieces()
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def close(self) -> None:
        """Ends the threads."""
        self.library.baton_team_close(self.handle)
        self.handle = None

    def scratch(self, num_bytes: int) -> int:
        """Returns the address of `num_bytes` bytes of aligned working memory; valid until the next
        call.
        """
        if self._scratch.numel() < num_bytes + ALIGNMENT:
            self._scratch = torch.empty(2 * num_bytes + ALIGNMENT, dtype=torch.uint8)
        address = self._scratch.data_ptr()
        return address + -address % ALIGNMENT


class PackedMatrix:
    """A matrix [rows, cols] in the form of the kernels."""

    def __init__(self, team: Team, weight: torch.Tensor, form: WeightFormat) -> None:
        """`form` is fp32, bf16 or int8; `weight` is fp32, bf16 or fp16."""
        library = team.library
        rows, cols = weight.shape
        kind = _kind(weight, form)
        if kind == BF16 and library.baton_uses_amx():
            kind = BF16_PAIRS
        panel = library.baton_panel()
        padded_rows = -(-rows // panel) * panel
        self.form = form
        self.panels = team.weights.reserve(library.baton_packed_bytes(kind, rows, cols))
        self.scales = torch.zeros(padded_rows)
        self.offsets = torch.zeros(padded_rows, dtype=torch.int32)
        self.bias: torch.Tensor | None = None
        source = _fp32(weight.detach())
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
        """The bytes of the weights and of their scales."""
        scales = 2 * self.scales.nbytes if self.struct.kind == INT8 else 0
        return self.panels.nbytes + scales

    def set_bias(self, bias: torch.Tensor) -> None:
        """Adds `bias` [rows] to every product from now on."""
        self.bias = torch.zeros_like(self.scales)
        self.bias[: len(bias)] = bias.detach().float()
        self.struct.bias = self.bias.data_ptr()

    def multiply(self, x: torch.Tensor, y: torch.Tensor, team: Team) -> None:
        """Writes `y` [n, rows] = `x` [n, cols] times the transposed matrix. Both are contiguous
        fp32 arrays.
        """
        rows = x.shape[0]
        if not rows:
            return
        weight = ctypes.byref(self.struct)
        needed = team.library.baton_linear_scratch(team.handle, weight, rows)
        team.library.baton_linear(
            team.handle, weight, x.data_ptr(), rows, y.data_ptr(), team.scratch(needed)
        )


def multiply(x: torch.Tensor, matrix: PackedMatrix, team: Team) -> torch.Tensor:
    """Multiplies `x` [..., cols] by the transposed matrix. Returns [..., rows] in fp32."""
    flat = x.reshape(-1, matrix.struct.cols).contiguous()
    y = flat.new_empty(flat.shape[0], matrix.struct.rows)
    matrix.multiply(flat, y, team)
    return y.view(*x.shape[:-1], matrix.struct.rows)


def exact_in_bf16(values: torch.Tensor) -> bool:
    """True if bf16 can represent each of these fp32 values exactly."""
    parts = values.reshape(-1).split(CHECKED_AT_ONCE)
    return not any(bool((part.float().view(torch.int32) & 0xFFFF).any()) for part in parts)


def _kind(weight: torch.Tensor, form: WeightFormat) -> int:
    if form is WeightFormat.INT8:
        return INT8
    if form is WeightFormat.BF16 or weight.dtype is torch.bfloat16:
        return BF16
    return BF16 if exact_in_bf16(weight) else FP32


def _fp32(weight: torch.Tensor) -> torch.Tensor:
    """Returns the matrix in fp32, row by row.

    Each copy has a memory mapping of its own, which the system gets back at once. On the heap,
    between packed matrices, each copy would leave a gap that is just too small for the next copy.
    """
    if weight.dtype is torch.float32 and weight.is_contiguous():
        return weight
    memory = mmap.mmap(-1, 4 * weight.numel())
    copy = torch.frombuffer(memory, dtype=torch.float32, count=weight.numel())
    return copy.view(weight.shape).copy_(weight)
