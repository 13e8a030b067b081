"""Tensors over the bytes of KV blocks: K and V of each layer, placed by `engine.layout`.

    buffer                    [num_blocks, block_bytes] uint8: what other workers read and write
    keys, values              per layer [num_blocks, num_kv_heads, block_size, head_dim]: the stored
                              elements; int4: bytes that hold two each [..., head_dim // 2]
    key_scales, value_scales  per layer [num_blocks, num_kv_heads, block_size]: fp32; int4: int32
                              that holds step and low; None in formats without scales

All tensors are strided views of the buffer. `quantise` and `dequantise` define each format in
torch. Tests compare the kernels that read or write the record with these two functions.

This module does not know which sequence owns a block.
"""

import torch

from engine.errors import ConfigError
from engine.layout import ALIGNMENT_BYTES, SCALE_BYTES, KVFormat, KVLayout
from engine.model.memory import aligned_bytes

ELEMENT_DTYPES = {
    KVFormat.FP32: torch.float32,
    KVFormat.BF16: torch.bfloat16,
    KVFormat.FP8_E4M3: torch.float8_e4m3fn,
    KVFormat.INT8: torch.int8,
    KVFormat.INT4: torch.uint8,
}
LARGEST = {KVFormat.FP8_E4M3: 448.0, KVFormat.INT8: 127.0, KVFormat.INT4: 15.0}


def allocate_buffer(layout: KVLayout, num_blocks: int, device: str = "cpu") -> torch.Tensor:
    """Allocates a zeroed buffer [num_blocks, block_bytes] that starts on a cache line."""
    num_bytes = num_blocks * layout.block_bytes
    if str(device) == "cpu":
        return aligned_bytes(num_bytes).view(num_blocks, layout.block_bytes)
    raw = torch.zeros(num_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
    start = -raw.data_ptr() % ALIGNMENT_BYTES
    return raw[start : start + num_bytes].view(num_blocks, layout.block_bytes)


def wrap_buffer(memory: memoryview, layout: KVLayout, num_blocks: int) -> torch.Tensor:
    """Returns the first bytes of `memory` as a buffer [num_blocks, block_bytes], without a copy.

    Raises ConfigError if the memory is too small, read-only or not aligned to a cache line.
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
        self.layout = layout
        self.section_index = section
        self.section = layout.sections[section]
        self.kv_format = layout.kv_format
        self.buffer = buffer  # [num_blocks, block_bytes] uint8
        self.num_blocks = buffer.shape[0]
        self.device = buffer.device
        first = layout.section_offset_bytes(section)
        starts = [first + n * layout.layer_bytes(section) for n in range(self.section.num_layers)]
        values = layout.layer_bytes(section) // 2  # bytes from a layer's K to its V
        self.keys = [self._elements(start) for start in starts]
        self.values = [self._elements(start + values) for start in starts]
        self.key_scales = self.value_scales = None
        if self.kv_format.has_scales:
            self.key_scales = [self._scales(start) for start in starts]
            self.value_scales = [self._scales(start + values) for start in starts]

    def write(
        self, layer: int, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Stores K and V [num_tokens, num_kv_heads, head_dim] in the slots [num_tokens]."""
        size = self.layout.block_size
        block = slot_mapping // size
        where = (block, slice(None), slot_mapping - block * size)
        for x, elements_of, scales_of in (
            (key, self.keys, self.key_scales),
            (value, self.values, self.value_scales),
        ):
            elements, scales = quantise(x, self.kv_format)
            elements_of[layer][where] = elements
            if scales_of is not None:
                scales_of[layer][where] = scales

    def _heads(self, start: int) -> torch.Tensor:
        """Returns all heads of K or V of one layer: [num_blocks, num_kv_heads, head_bytes]."""
        num_heads = self.section.num_kv_heads
        head_bytes = self.layout.head_bytes(self.section_index)
        return self.buffer[:, start : start + num_heads * head_bytes].unflatten(
            1, (num_heads, head_bytes)
        )

    def _elements(self, start: int) -> torch.Tensor:
        num_tokens = self.layout.block_size
        end = num_tokens * self.layout.token_bytes(self.section_index)
        elements = self._heads(start)[..., :end].view(ELEMENT_DTYPES[self.kv_format])
        return elements.unflatten(2, (num_tokens, -1))

    def _scales(self, start: int) -> torch.Tensor:
        begin = self.layout.scales_offset_bytes(self.section_index)
        end = begin + self.layout.block_size * SCALE_BYTES
        dtype = torch.int32 if self.kv_format is KVFormat.INT4 else torch.float32
        return self._heads(start)[..., begin:end].view(dtype)


def quantise(x: torch.Tensor, kv_format: KVFormat) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the elements and scales that a record has for `x` [..., head_dim]: see
    `engine.layout`.

    Elements [..., head_dim], int4: [..., head_dim // 2]. Scales [...], or None in formats without
    scales.
    """
    if not kv_format.has_scales:
        return x.to(ELEMENT_DTYPES[kv_format]), None
    x = x.float()
    if kv_format is KVFormat.INT4:
        return _quantise_int4(x)
    largest = LARGEST[kv_format]
    scale = x.abs().amax(-1, keepdim=True) / largest
    scaled = _divide(x, scale).clamp(-largest, largest)  # a subnormal scale may be far from exact
    if kv_format is KVFormat.INT8:
        scaled = scaled.round()
    return scaled.to(ELEMENT_DTYPES[kv_format]), scale.squeeze(-1)


def dequantise(
    elements: torch.Tensor, scales: torch.Tensor | None, kv_format: KVFormat
) -> torch.Tensor:
    """Returns the values that `quantise` stored, in fp32: [..., head_dim]."""
    if scales is None:
        return elements.float()
    if kv_format is KVFormat.INT4:
        step, low = scales[..., None].view(torch.bfloat16).float().split(1, dim=-1)
        q = torch.cat((elements & 15, elements >> 4), dim=-1)
        return low + q.float() * step
    return elements.float() * scales[..., None]


def _quantise_int4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    largest = LARGEST[KVFormat.INT4]
    low = x.amin(-1, keepdim=True).bfloat16()
    step = ((x.amax(-1, keepdim=True) - low.float()) / largest).bfloat16()
    q = _divide(x - low.float(), step.float()).round().clamp(0, largest).to(torch.uint8)
    first, second = q.chunk(2, dim=-1)
    packed = torch.cat((step, low), dim=-1).view(torch.int32)  # little-endian: step in lower half
    return first | second << 4, packed.squeeze(-1)


def _divide(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Returns x / scale. If the scale is zero, returns x, which is then almost zero."""
    return x / torch.where(scale == 0, torch.ones_like(scale), scale)
