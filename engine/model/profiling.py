"""Measures the GPU memory that the largest step needs, so that KV can use the rest.

The step runs once, eagerly, over a small KV buffer of its own. It has the greatest number of rows
that may decode. One row is a chunk with all other tokens of the step, and all rows sample a token.
The forward pass is opened in the same way as for serving, so weights have their final format.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch

from engine.config import WeightFormat
from engine.layout import KVLayout
from engine.messages import Sampling, SeqId
from engine.model.attention.kvcache import KVCache, allocate_buffer
from engine.model.cuda import CudaForward
from engine.model.loading.checkpoint import LoadedModel
from engine.model.sampling.changes import TokenChoice
from engine.worker.batch import Row
from engine.worker.blocks import BlockId

PROFILED_SAMPLING = Sampling(temperature=1.0, top_k=64, top_p=0.9, min_p=0.01)


class LargestStep(NamedTuple):
    """The size of the largest step that a worker may run."""

    num_tokens: int
    num_rows: int


class MemoryUse(NamedTuple):
    """A device's memory, and the part of it that this process uses."""

    free_bytes: int
    total_bytes: int
    own_bytes: int


class MemoryMeter(Protocol):
    """Reads the memory use of a device."""

    def read(self) -> MemoryUse:
        """Returns the present use, without memory that the allocator keeps for reuse."""
        ...

    def peak_bytes(self, call: Callable[[], object]) -> int:
        """Runs the call. Returns the largest number of bytes in use during it, minus the bytes in
        use before.
        """
        ...


class CudaMeter:
    """Reads the memory of a GPU of this process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> MemoryUse:
        """Returns the present memory use."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return MemoryUse(free_bytes, total_bytes, torch.cuda.memory_reserved(self._device))

    def peak_bytes(self, call: Callable[[], object]) -> int:
        """Measures the memory that torch's allocator takes from the device, fragments included."""
        before = self.read().own_bytes
        torch.cuda.reset_peak_memory_stats(self._device)
        call()
        torch.cuda.synchronize(self._device)
        peak_bytes = torch.cuda.max_memory_reserved(self._device)
        torch.cuda.empty_cache()
        return max(peak_bytes - before, 0)


class DeviceNeeds(NamedTuple):
    """A device's memory use after the weights are loaded, and the further memory of the largest
    step.
    """

    memory: MemoryUse
    peak_bytes: int


def measure_needs(
    loaded: LoadedModel, weights: WeightFormat, largest: LargestStep, meter: MemoryMeter
) -> DeviceNeeds:
    """Runs the largest step of a model once. The weights have their final format afterwards."""
    rows = _rows(largest, loaded.context_len, loaded.layout)
    peak_bytes = _peak_bytes(loaded, weights, rows, meter)
    return DeviceNeeds(meter.read(), peak_bytes)  # the memory of the step is free again here


def _peak_bytes(
    loaded: LoadedModel, weights: WeightFormat, rows: Sequence[Row], meter: MemoryMeter
) -> int:
    num_blocks = max(len(row.block_table) for row in rows)
    buffer = allocate_buffer(loaded.layout, num_blocks, str(loaded.device))
    forward = CudaForward(loaded, weights, captured_rows=(1,), compiler=None)
    forward.open(KVCache(loaded.layout, buffer))
    choices = [TokenChoice(PROFILED_SAMPLING, row.end) for row in rows]
    ends = [end - 1 for end in accumulate(len(row.token_ids) for row in rows)]
    peak_bytes = meter.peak_bytes(lambda: forward.sample(forward.logits(rows, ends), choices))
    forward.close()
    return peak_bytes


def _rows(largest: LargestStep, context_len: int, layout: KVLayout) -> Sequence[Row]:
    """Returns rows of one token, and a chunk for the remaining tokens. All rows use the same few
    blocks.
    """
    num_short = min(largest.num_rows, largest.num_tokens) - 1
    lens = [1] * num_short
    left = largest.num_tokens - num_short
    while left:
        lens.append(min(left, context_len))
        left -= lens[-1]
    table = [BlockId(i) for i in range(layout.num_blocks_for(max(lens)))]
    return [Row(SeqId("profile"), [0] * n, 0, table, PROFILED_SAMPLING) for n in lens]
