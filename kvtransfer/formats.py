"""Converts records from one KV format to another.

Numbers are rounded exactly as a KV cache of the target format rounds them. If the format has
scales, each token and head has its own scale. So an fp32 pool that sends int8 sends the same bytes
that an int8 pool would contain. `engine.layout` defines the formats, and
`engine.model.attention.kvcache` converts tensors. Numbers must be finite. An infinite number makes
the results of its own token and head undefined.

C++ does the work (`src/transfer/convert.h`).
"""

import sys
from ctypes import byref

import msgspec
import numpy as np

from engine.layout import KVFormat, KVLayout
from engine.native.build import FORMATS
from engine.native.library import library
from kvtransfer.memory import Blocks
from kvtransfer.native.copying import Heads, Section, records_struct

assert sys.byteorder == "little", "records are little-endian, and read as they lie in memory"

FLOATS = (KVFormat.FP32, KVFormat.BF16)


def is_defined(source: KVFormat, to: KVFormat) -> bool:
    """Returns True if this conversion exists. Quantised numbers are never quantised again."""
    return source in FLOATS or to in FLOATS


def is_exact(source: KVFormat, to: KVFormat) -> bool:
    """Returns True if the conversion changes no number."""
    return source is to or (source, to) == (KVFormat.BF16, KVFormat.FP32)


def convert(
    records: Blocks, layout: KVLayout, to: KVFormat, *, out: Blocks | None = None
) -> Blocks:
    """Converts records [n, block_bytes] of `layout` to the format `to`. The padding is set to zero.

    Writes to `out` if given, and returns the result. Raises ValueError if the conversion is not
    defined, the layout cannot have that format, or an array has the wrong record size.
    """
    if not is_defined(layout.kv_format, to):
        raise ValueError(f"no conversion from {layout.kv_format} to {to}")
    sink_layout = msgspec.structs.replace(layout, kv_format=to)
    if out is None:
        out = np.empty((len(records), sink_layout.block_bytes), np.uint8)
    _check(records, len(records), layout)
    _check(out, len(records), sink_layout)
    if not out.flags.writeable:
        raise ValueError("the output is read-only")
    _convert(records, layout, out, sink_layout)
    return out


def _check(records: Blocks, num_records: int, layout: KVLayout) -> None:
    shape = (num_records, layout.block_bytes)
    if records.dtype != np.uint8 or records.shape != shape or not records[:1].flags.c_contiguous:
        raise ValueError(f"not {num_records} records of {layout.block_bytes} bytes")


def _convert(source: Blocks, layout: KVLayout, sink: Blocks, to: KVLayout) -> None:
    sections = [
        Section(
            source=_heads_struct(layout, index),
            sink=_heads_struct(to, index),
            num_heads=num_heads(layout, index),
            head_dim=section.head_dim,
        )
        for index, section in enumerate(layout.sections)
    ]
    library().baton_convert_records(
        (Section * len(sections))(*sections),
        len(sections),
        layout.block_size,
        FORMATS[layout.kv_format],
        FORMATS[to.kv_format],
        byref(records_struct(source)),
        byref(records_struct(sink)),
    )


def _heads_struct(layout: KVLayout, index: int) -> Heads:
    return Heads(
        section_offset=layout.section_offset_bytes(index),
        head_bytes=layout.head_bytes(index),
        token_bytes=layout.token_bytes(index),
        scales_offset=layout.scales_offset_bytes(index),
    )


def num_heads(layout: KVLayout, index: int) -> int:
    """Returns the number of K and V heads of a section, summed over its layers."""
    section = layout.sections[index]
    return 2 * section.num_layers * section.num_kv_heads
