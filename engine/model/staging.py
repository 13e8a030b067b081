"""Inputs of steps: packed into pinned host memory, and copied from there to the device.

The host waits only before it reuses pinned memory: for the copy, two steps earlier, from this
memory. On a CPU the memory is not pinned.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.model import packing
from engine.model.attention.base import AttentionBatch, Extent
from engine.model.packing import Inputs, Packing, PackingShape, StepSize
from engine.model.parallel.steps import PackedStep
from engine.worker.batch import Row


class Staged:
    """Pinned host memory for one step's inputs, and an event after the last copy from this
    memory.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._copied = torch.cuda.Event() if pinned else None
        self.memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, num_bytes: int) -> np.ndarray:
        """Waits until the last copy from the memory has ended. Returns `num_bytes` of it for
        writing.
        """
        if self._copied is not None:
            self._copied.synchronize()
        if self.memory.numel() < num_bytes:
            size = 1 << num_bytes.bit_length()
            self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        return self.memory[:num_bytes].numpy()

    def copy_to(self, device_memory: torch.Tensor) -> None:
        """Queues the copy from this memory to `device_memory`."""
        device_memory.copy_(self.memory[: device_memory.numel()], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class CudaStep(NamedTuple):
    """A step that is ready to launch. It must be launched before two more steps are prepared."""

    staged: Staged
    packing: Packing
    extents: tuple[Extent, ...]  # empty for a captured step, which has extents of its own
    num_kept: int
    keeps_first: bool  # True if `keep` is the first tokens, in their order
    size: StepSize | None  # the size after padding; None: the batch is not padded


class StepStaging:
    """Packs the inputs of steps, alternately into two pieces of host memory."""

    def __init__(self, block_size: int, *, pinned: bool) -> None:
        self._block_size = block_size
        self._staged = tuple(Staged(pinned=pinned) for _ in range(2))
        self._num_packed = 0
        self._tables = packing.Tables()

    def pack(
        self,
        rows: Sequence[Row],
        keep: Sequence[int],
        *,
        shape: PackingShape,
        size: StepSize | None,
        follows: Sequence[int | None] = (),
        is_captured: bool = False,
    ) -> CudaStep:
        """Packs the inputs of `rows`, padded to `size` if it is given."""
        plan = packing.plan(shape)
        staged = self._next_staged()
        inputs = packing.arrays(staged.reserve(plan.num_bytes), plan)
        packing.fill(
            inputs,
            rows,
            keep,
            tables=self._tables,
            block_size=self._block_size,
            row_len=None if size is None else size.row_len,
            follows=follows,
        )
        extents = () if is_captured else _extents(inputs)
        return CudaStep(staged, plan, extents, len(keep), _keeps_first(inputs, len(keep)), size)

    def stage(self, step: PackedStep, size: StepSize | None, *, is_captured: bool) -> CudaStep:
        """Copies inputs that rank 0 packed."""
        plan = packing.plan(step.shape)
        staged = self._next_staged()
        memory = staged.reserve(plan.num_bytes)
        memory[:] = step.memory
        inputs, num_kept = packing.arrays(memory, plan), step.num_kept
        extents = () if is_captured else _extents(inputs)
        return CudaStep(staged, plan, extents, num_kept, _keeps_first(inputs, num_kept), size)

    def _next_staged(self) -> Staged:
        staged = self._staged[self._num_packed % len(self._staged)]
        self._num_packed += 1
        return staged


def bring(prepared: CudaStep, memory: torch.Tensor) -> tuple[Inputs[torch.Tensor], AttentionBatch]:
    """Queues the copy of a step's inputs to the device memory `memory`. Returns views of the
    copies.
    """
    prepared.staged.copy_to(memory)
    inputs = tensors(memory, prepared.packing)
    batch = AttentionBatch(
        extents=prepared.extents,
        cu_seqlens_q=inputs.cu_seqlens_q,
        context_lens=inputs.context_lens,
        block_tables=inputs.block_tables,
        slot_mapping=inputs.slot_mapping,
    )
    return inputs, batch


def tensors(memory: torch.Tensor, plan: Packing) -> Inputs[torch.Tensor]:
    """Returns the inputs as views of the bytes in `memory`."""
    return Inputs(
        *(
            memory[place.offset_bytes : place.end_bytes]
            .view(getattr(torch, place.dtype))
            .view(place.shape)
            for place in plan.places
        )
    )


def _extents(inputs: Inputs[np.ndarray]) -> tuple[Extent, ...]:
    starts = inputs.cu_seqlens_q
    lens = np.diff(starts)
    return tuple(map(Extent, starts.tolist(), lens.tolist(), inputs.context_lens.tolist()))


def _keeps_first(inputs: Inputs[np.ndarray], num_kept: int) -> bool:
    return np.array_equal(inputs.keep[:num_kept], np.arange(num_kept))
