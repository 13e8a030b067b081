"""The place of each byte of a KV block. Integers only: no tensor, no model.

A worker may consist of several ranks. Each rank has a share of the heads and layers (`Shard`), and
its records have the layout `of_rank`. The rest of this page describes the records of one rank.

A block is one contiguous record of `block_size` tokens, for every layer of every section. A section
is one model: the target and, if there is one, the draft model:

    record = section 0: layer 0: K head 0, K head 1, …, V head 0, V head 1, …
                        layer 1: …
             section 1: …
    head   = elements [block_size, head_dim], up to a multiple of 64 bytes
             scales [block_size], 4 bytes each, likewise; only in formats that have them

So every head starts on a cache line and a slice of heads is contiguous, scales included. One
descriptor moves a whole block.

The stored form of a number x of K or V, in one token and one head:

    fp32, bf16   x itself
    fp8_e4m3     x / scale as float8 e4m3 (no infinities), scale = max |x| / 448 in fp32
    int8         round(x / scale), scale = max |x| / 127 in fp32
    int4         q = round((x - low) / step) in 0 … 15, x ≈ low + q * step; low = min x and
                 step = (max x - low) / 15, both rounded to bf16, `step` in the scale's lower two
                 bytes, `low` in its upper two; byte i holds q of element i in its lower half and of
                 element i + head_dim / 2 in its upper half

Numbers are little-endian; halves round to even. If the scale or step is zero, the stored numbers
are zeros.

Sources: paged KV, Kwon et al., SOSP 2023; one record across layers, Qin et al., Mooncake, FAST
2025; scales per token and head, KIVI, Liu et al., ICML 2024 (its V) and vLLM's quantised KV.
"""

from enum import StrEnum
from functools import lru_cache

import msgspec

# Bytes of a cache line. Misaligned `rep movsb` copies are ten times slower on some CPUs.
ALIGNMENT_BYTES = 64
SCALE_BYTES = 4
MAX_RANKS = 64  # most ranks of one worker


class KVFormat(StrEnum):
    """The form in which one element of K or V is stored."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8_E4M3 = "fp8_e4m3"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def element_bits(self) -> int:
        """Bits of one element."""
        return {"fp32": 32, "bf16": 16, "fp8_e4m3": 8, "int8": 8, "int4": 4}[self.value]

    @property
    def has_scales(self) -> bool:
        """True if each token and head has a scale beside its elements."""
        return self.element_bits <= 8


class KVSection(msgspec.Struct, frozen=True):
    """The KV shape of one model: the target, or the draft model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


class LayerRange(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive layers of one section of a block."""

    first: int
    num_layers: int


class Shard(msgspec.Struct, frozen=True, omit_defaults=True):
    """The share of a model's heads and layers that one rank has.

    Under tensor parallelism the heads of each section are divided among the ranks as evenly as
    possible. With fewer heads than ranks, several ranks have the same head. Under pipeline
    parallelism a rank has a range of each section's `layers`. Without ranges it has all layers.
    """

    rank: int = 0  # number of this rank in tensor parallelism
    size: int = 1
    layers: tuple[LayerRange, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size <= MAX_RANKS:
            raise ValueError(f"rank {self.rank} of {self.size}")
        if any(min(layers.first, layers.num_layers) < 0 for layers in self.layers):
            raise ValueError("a range of layers is negative")

    def heads_of(self, section: KVSection) -> range:
        """Returns the heads of a section that this rank has."""
        num_heads = section.num_kv_heads
        first = self.rank * num_heads // self.size
        return range(
            first, max(first + min(num_heads, 1), (self.rank + 1) * num_heads // self.size)
        )

    def layers_of(self, layout: "KVLayout", section: int) -> range:
        """Returns the layers of a section that this rank has."""
        if not self.layers:
            return range(layout.sections[section].num_layers)
        layers = self.layers[section]
        return range(layers.first, layers.first + layers.num_layers)

    def fits(self, layout: "KVLayout") -> bool:
        """True if the model can be divided in this way, and this rank's share is not empty."""
        if self.layers and len(self.layers) != len(layout.sections):
            return False
        ends = [self.layers_of(layout, i).stop for i in range(len(layout.sections))]
        exist = all(end <= s.num_layers for end, s in zip(ends, layout.sections, strict=True))
        return exist and layout.of_rank(self).block_bytes > 0


WHOLE = Shard()  # the share of a worker's only rank; encoders leave out this object


class KVLayout(msgspec.Struct, frozen=True):
    """The form of a block. Two workers exchange blocks only if all fields agree.

    A worker of several ranks has one layout of the whole model, which is compared with other
    workers, and one layout for the records of each rank.
    """

    block_size: int  # tokens of one block
    kv_format: KVFormat
    sections: tuple[KVSection, ...]

    def __post_init__(self) -> None:
        for section in self.sections:
            if section.head_dim * self.kv_format.element_bits % 8:
                raise ValueError(f"{self.kv_format} needs an even head_dim")

    def of_rank(self, shard: Shard) -> "KVLayout":
        """Returns the layout of the records of a rank that has this share of the model."""
        sections = tuple(
            KVSection(len(shard.layers_of(self, i)), len(shard.heads_of(section)), section.head_dim)
            for i, section in enumerate(self.sections)
        )
        return msgspec.structs.replace(self, sections=sections)

    def token_bytes(self, section: int) -> int:
        """Returns the bytes of one token's K (or V) in one head, without its scale."""
        return self.sections[section].head_dim * self.kv_format.element_bits // 8

    def scales_offset_bytes(self, section: int) -> int:
        """Returns the distance in bytes from the start of a head to its scales."""
        return _align(self.block_size * self.token_bytes(section))

    def head_bytes(self, section: int) -> int:
        """Returns the bytes of one head's K (or V), scales included, in one layer of one block."""
        scales = _align(self.block_size * SCALE_BYTES) if self.kv_format.has_scales else 0
        return self.scales_offset_bytes(section) + scales

    def layer_bytes(self, section: int) -> int:
        """Returns the bytes of K and V of one layer in one block."""
        return 2 * self.sections[section].num_kv_heads * self.head_bytes(section)

    def section_offset_bytes(self, section: int) -> int:
        """Returns the offset of a section within a block, in bytes; `len(sections)` gives the end
        of the last section.
        """
        return sum(self.sections[i].num_layers * self.layer_bytes(i) for i in range(section))

    @property
    def block_bytes(self) -> int:
        """Returns the bytes of one block."""
        return _block_bytes(self)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks that are needed for `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def difference(self, other: "KVLayout") -> str | None:
        """Returns the name of the first field that differs; None if the workers may exchange
        blocks.
        """
        if self == other:
            return None
        for field in self.__struct_fields__:
            if getattr(self, field) != getattr(other, field):
                return field
        return None


@lru_cache
def _block_bytes(layout: KVLayout) -> int:
    return layout.section_offset_bytes(len(layout.sections))


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
