"""Tensors over the bytes of KV blocks: K and V of each layer, where `engine.layout` puts them.

    buffer          [num_blocks, block_bytes] uint8: what other workers read and write
    keys, values    per layer [num_blocks, num_kv_heads, block_size, head_dim]: views of it
    rows            [num_blocks * rows_per_block, row_elements]: another view of it

Reading and writing go through `rows`. A row is one token's K or V of one head (`head_dim` elements;
less where sections of different `head_dim` share a record, see `_row_elements`), so a gather by row
number puts any tokens of any blocks into the order that attention wants with a single copy, twice
as fast as indexing blocks and transposing. Row numbers do not depend on the layer: each layer has
its own view of `rows`, moved by the layer's offset, so they are computed once for a batch.

Does not know who owns a block, nor what a sequence is.
"""

from math import gcd

import torch

from engine.errors import ConfigError
from engine.layout import ALIGNMENT_BYTES, KVFormat, KVLayout

TORCH_DTYPES = {KVFormat.FP32: torch.float32, KVFormat.BF16: torch.bfloat16}


def allocate_buffer(layout: KVLayout, num_blocks: int, device: str = "cpu") -> torch.Tensor:
    """A zeroed buffer [num_blocks, block_bytes] that starts on a cache line."""
    num_bytes = num_blocks * layout.block_bytes
    raw = torch.zeros(num_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
    start = -raw.data_ptr() % ALIGNMENT_BYTES
    return raw[start : start + num_bytes].view(num_blocks, layout.block_bytes)


def wrap_buffer(memory: memoryview, layout: KVLayout, num_blocks: int) -> torch.Tensor:
    """The beginning of `memory` as a buffer [num_blocks, block_bytes], without a copy.

    Raises ConfigError if the memory is too small, read-only or off a cache line.
    """
    num_bytes = num_blocks * layout.block_bytes
    if memory.readonly:
        raise ConfigError("the KV buffer is read-only")
    if memory.nbytes < num_bytes:
        raise ConfigError(f"the KV buffer has {memory.nbytes} bytes, {num_bytes} are needed")
    raw = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes)
    if raw.data_ptr() % ALIGNMENT_BYTES:
        raise ConfigError(f"the KV buffer does not start at a multiple of {ALIGNMENT_BYTES} bytes")
    return raw.view(num_blocks, layout.block_bytes)


class KVCache:
    """K and V of one section (one model) in a buffer of blocks."""

    def __init__(self, layout: KVLayout, buffer: torch.Tensor, section: int = 0) -> None:
        shape = layout.sections[section]
        self.layout = layout
        self.section = shape
        self.buffer = buffer  # [num_blocks, block_bytes] uint8
        self.num_blocks = buffer.shape[0]
        elements = buffer.view(TORCH_DTYPES[layout.kv_format])  # [num_blocks, block_elements]
        self.dtype = elements.dtype
        self.device = elements.device
        self._block_elements = elements.shape[1]
        first = layout.section_offset_bytes(section) // layout.kv_format.element_bytes
        self._head_elements = layout.block_size * shape.head_dim  # K or V of one head, in one block
        plane = shape.num_kv_heads * self._head_elements  # K or V of one layer, in one block
        starts = [first + 2 * plane * layer for layer in range(shape.num_layers)]

        per_block = (shape.num_kv_heads, layout.block_size, shape.head_dim)
        self.keys = [elements[:, s : s + plane].unflatten(1, per_block) for s in starts]
        self.values = [
            elements[:, s + plane : s + 2 * plane].unflatten(1, per_block) for s in starts
        ]
        self._row = _row_elements(shape.head_dim, self._block_elements, first)
        rows = elements.view(-1, self._row)
        self._layer_rows = [rows[start // self._row :] for start in starts]
        self._rows_per_token = shape.head_dim // self._row
        head_starts = torch.arange(2 * shape.num_kv_heads, device=self.device) * self._head_elements
        self._head_rows = head_starts // self._row  # [2 * num_kv_heads]: K's heads, then V's

    def row_ids(self, slots: torch.Tensor) -> torch.Tensor:
        """Row numbers of the tokens in `slots` [n, num_tokens], for `gather` and `write`.

        Flat, in the order [n, K's heads then V's, num_tokens, rows of one token].
        """
        size = self.layout.block_size
        block = slots // size
        start = block * self._block_elements + (slots - block * size) * self.section.head_dim
        ids = (start // self._row)[:, None, :] + self._head_rows[:, None]  # [n, 2 heads, tokens]
        if self._rows_per_token > 1:
            ids = ids[..., None] + torch.arange(self._rows_per_token, device=self.device)
        return ids.reshape(-1)

    def gather(self, layer: int, row_ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """K and V of a layer, [n, 2 * num_kv_heads, num_tokens, head_dim]: K's heads, then V's."""
        heads = 2 * self.section.num_kv_heads
        return (
            self._layer_rows[layer]
            .index_select(0, row_ids)
            .view(-1, heads, num_tokens, self.section.head_dim)
        )

    def write(
        self, layer: int, row_ids: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Stores K and V [num_tokens, num_kv_heads, head_dim] of the slots [num_tokens, 1]."""
        both = torch.cat((key, value), dim=1).to(self.dtype)  # [num_tokens, 2 heads, head_dim]
        self._layer_rows[layer].index_copy_(0, row_ids, both.view(-1, self._row))


def _row_elements(head_dim: int, block_elements: int, section_start: int) -> int:
    """The longest row that divides a head, the step between blocks and the section's start."""
    return gcd(head_dim, block_elements, section_start)
