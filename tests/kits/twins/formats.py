"""Conversion of records in numpy, with which `kvtransfer.formats` is compared bit for bit."""

import msgspec
import numpy as np
import numpy.typing as npt

from engine.layout import SCALE_BYTES, KVFormat, KVLayout
from kvtransfer.formats import num_heads
from kvtransfer.memory import Blocks

LARGEST = {KVFormat.FP8_E4M3: 448, KVFormat.INT8: 127, KVFormat.INT4: 15}

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def convert(records: Blocks, layout: KVLayout, to: KVFormat) -> Blocks:
    """Converts records as `kvtransfer.formats.convert` does."""
    sink_layout = msgspec.structs.replace(layout, kv_format=to)
    out = np.empty((len(records), sink_layout.block_bytes), np.uint8)
    for index in range(len(layout.sections)):
        elements, scales = _load_section(records, layout, index)
        with np.errstate(all="ignore"):  # a subnormal scale may be much too small: see _divisor
            x = _dequantise(elements, scales, layout.kv_format)
            _store_section(out, sink_layout, index, *_quantise(x, to))
    return out


def _load_section(records: Blocks, layout: KVLayout, index: int) -> tuple[Bytes, Bytes]:
    """Returns elements [n, heads, block_size, token_bytes] and scales [n, heads, block_size, 4 or
    0]."""
    begin, end = layout.section_offset_bytes(index), layout.section_offset_bytes(index + 1)
    shape = (len(records), num_heads(layout, index), layout.block_size)
    heads = records[:, begin:end].reshape(*shape[:2], layout.head_bytes(index))
    scales_offset = layout.scales_offset_bytes(index)
    num_bytes = layout.block_size * layout.token_bytes(index)
    scale_bytes = SCALE_BYTES if layout.kv_format.has_scales else 0
    scales = heads[..., scales_offset : scales_offset + layout.block_size * scale_bytes]
    return (
        np.ascontiguousarray(heads[..., :num_bytes]).reshape(*shape, layout.token_bytes(index)),
        np.ascontiguousarray(scales).reshape(*shape, scale_bytes),
    )


def _store_section(
    records: Blocks, layout: KVLayout, index: int, elements: Bytes, scales: Bytes
) -> None:
    """Inverts `_load_section`; writes zeros into the padding between and after the parts."""
    begin, end = layout.section_offset_bytes(index), layout.section_offset_bytes(index + 1)
    num_records, num_heads = elements.shape[:2]
    heads = np.zeros((num_records, num_heads, layout.head_bytes(index)), np.uint8)
    for offset, part in ((0, elements), (layout.scales_offset_bytes(index), scales)):
        num_bytes = part.shape[2] * part.shape[3]
        heads[..., offset : offset + num_bytes] = part.reshape(num_records, num_heads, num_bytes)
    records[:, begin:end] = heads.reshape(num_records, end - begin)


def _dequantise(elements: Bytes, scales: Bytes, kv_format: KVFormat) -> Floats:
    """Returns numbers [..., head_dim] from elements [..., token_bytes] and scales [..., 4]."""
    match kv_format:
        case KVFormat.FP32:
            return elements.view(np.float32)
        case KVFormat.BF16:
            return _from_bf16(elements.view(np.uint16))
        case KVFormat.FP8_E4M3:
            return FP8_VALUES[elements] * scales.view(np.float32)
        case KVFormat.INT8:
            return elements.view(np.int8).astype(np.float32) * scales.view(np.float32)
        case KVFormat.INT4:
            step_and_low = _from_bf16(scales.view(np.uint16))
            q = np.concatenate((elements & 15, elements >> 4), axis=-1).astype(np.float32)
            return step_and_low[..., 1:] + q * step_and_low[..., :1]


def _quantise(x: Floats, kv_format: KVFormat) -> tuple[Bytes, Bytes]:
    """Inverts `_dequantise`, as exactly as the format allows."""
    match kv_format:
        case KVFormat.FP32:
            return x.view(np.uint8), _no_scales(x)
        case KVFormat.BF16:
            return _to_bf16(x).view(np.uint8), _no_scales(x)
        case KVFormat.INT4:
            return _quantise_int4(x)
    largest = np.float32(LARGEST[kv_format])
    scale = np.abs(x).max(axis=-1, keepdims=True) / largest
    scaled = np.clip(x / _divisor(scale), -largest, largest)
    if kv_format is KVFormat.INT8:
        return np.rint(scaled).astype(np.int8).view(np.uint8), scale.view(np.uint8)
    return _to_fp8(scaled), scale.view(np.uint8)


def _quantise_int4(x: Floats) -> tuple[Bytes, Bytes]:
    low_bits = _to_bf16(_smallest(x))
    low = _from_bf16(low_bits)
    largest = np.float32(LARGEST[KVFormat.INT4])
    step_bits = _to_bf16((-_smallest(-x) - low) / largest)
    q = np.clip(np.rint((x - low) / _divisor(_from_bf16(step_bits))), 0, largest).astype(np.uint8)
    first, second = np.split(q, 2, axis=-1)
    return first | second << 4, np.concatenate((step_bits, low_bits), axis=-1).view(np.uint8)


def _smallest(x: Floats) -> Floats:
    """Returns minima [..., 1]. It orders -0 below 0, while numpy may return either."""
    bits = x.view(np.int32)
    smallest = _ordered(_ordered(bits).min(axis=-1, keepdims=True))
    return smallest.view(np.float32)


def _ordered(bits: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Maps the bits of floats to integers in the order of the floats, and back."""
    return bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))


def _divisor(scale: Floats) -> Floats:
    """A scale or step of zero stores what is left, which then is about zero."""
    return np.where(scale == 0, np.float32(1), scale)


def _no_scales(x: Floats) -> Bytes:
    return np.empty((*x.shape[:-1], 0), np.uint8)


def _from_bf16(bits: npt.NDArray[np.uint16]) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_bf16(x: Floats) -> npt.NDArray[np.uint16]:
    """Rounds ties to even; NaN stays NaN."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), bits >> 16 | 0x40, rounded).astype(np.uint16)


def _to_fp8(x: Floats) -> Bytes:
    """Rounds ties to even. All numbers must be within 448."""
    bits = x.view(np.uint32)
    magnitude = bits & 0x7FFFFFFF
    # Below 2^-6 the sum with 2^14 rounds to a whole number of 2^-9, the smallest step.
    small = (np.abs(x) + np.float32(2**14)).view(np.uint32) - np.uint32(0x46800000)
    odd = (magnitude >> 20) & 1
    large = (magnitude - np.uint32((120 << 23) - 0x7FFFF) + odd) >> 20
    rounded = np.where(magnitude < 121 << 23, small, large)
    codes: Bytes = (rounded | bits >> 31 << 7).astype(np.uint8)
    return codes


def _fp8_values() -> Floats:
    """Returns the number that each of the 256 bytes stands for."""
    codes = np.arange(128)
    exponent, mantissa = codes >> 3, codes & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    values = np.where(exponent == 0, np.ldexp(mantissa, -9), normal)
    values[127] = np.nan  # the format has no infinities
    return np.concatenate((values, -values)).astype(np.float32)


FP8_VALUES = _fp8_values()
