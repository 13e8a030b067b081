"""Where the bytes of a KV block lie. Integers only: no tensor, no model.

A block is one contiguous record that holds `block_size` tokens of every layer of every section (the
target model, and the draft model where there is one):

    record = section 0: layer 0: K [num_kv_heads, block_size, head_dim]
                                 V [num_kv_heads, block_size, head_dim]
                        layer 1: …
             section 1: …
             padding up to a multiple of 64 bytes

Heads come before tokens, so a slice of heads is contiguous. One descriptor moves a whole block.

Sources: paged KV, Kwon et al., SOSP 2023; one record across layers, Qin et al., Mooncake, FAST
2025.
"""

from enum import StrEnum

import msgspec

ALIGNMENT_BYTES = (
    64  # a cache line; misaligned `rep movsb` copies are ten times slower on some CPUs
)


class KVFormat(StrEnum):
    """How one element of K or V is stored."""

    FP32 = "fp32"
    BF16 = "bf16"

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return {KVFormat.FP32: 4, KVFormat.BF16: 2}[self]


class KVSection(msgspec.Struct, frozen=True):
    """The KV shape of one model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def elements(self, block_size: int) -> int:
        """K and V elements of one block, all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * block_size


class KVLayout(msgspec.Struct, frozen=True):
    """Everything that two workers must agree on before a block moves between them."""

    block_size: int  # tokens
    kv_format: KVFormat
    sections: tuple[KVSection, ...]

    @property
    def data_bytes(self) -> int:
        """Bytes of one block without padding."""
        elements = sum(s.elements(self.block_size) for s in self.sections)
        return elements * self.kv_format.element_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes from one block to the next."""
        return -(-self.data_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token, all layers and sections."""
        return self.data_bytes // self.block_size

    def section_offset_bytes(self, section: int) -> int:
        """Start of a section's data within a block."""
        before = sum(s.elements(self.block_size) for s in self.sections[:section])
        return before * self.kv_format.element_bytes

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def difference(self, other: "KVLayout") -> str | None:
        """Name of the first field that differs, or None if blocks are interchangeable."""
        for field in self.__struct_fields__:
            if getattr(self, field) != getattr(other, field):
                return field
        return None
