"""A converted record equals, bit for bit, the record that a cache of the other format would
write.
"""

import msgspec
import numpy as np
import pytest
import torch

from engine.layout import KVFormat, KVLayout, KVSection
from engine.model.attention.kvcache import KVCache, allocate_buffer, dequantise
from kvtransfer.formats import convert, is_defined
from tests.kits.models.kv_records import NUM_BLOCKS, SECTIONS, fill
from tests.kits.twins.formats import FP8_VALUES

pytestmark = pytest.mark.torch

PAIRS = [(source, to) for source in KVFormat for to in KVFormat if is_defined(source, to)]


def rewritten(buffer, layout, to):
    """Returns the buffer of a cache of the other format, after this cache's values are written to
    it.
    """
    sink_layout = msgspec.structs.replace(layout, kv_format=to)
    sink_buffer = allocate_buffer(sink_layout, NUM_BLOCKS)
    slots = torch.arange(NUM_BLOCKS * layout.block_size)
    for index, section in enumerate(layout.sections):
        source, sink = KVCache(layout, buffer, index), KVCache(sink_layout, sink_buffer, index)
        for layer in range(section.num_layers):
            key, value = (
                # [num_blocks, num_kv_heads, block_size, head_dim] as rows of slots
                dequantise(
                    views[layer], None if scales is None else scales[layer], source.kv_format
                )
                .transpose(1, 2)
                .flatten(0, 1)
                for views, scales in (
                    (source.keys, source.key_scales),
                    (source.values, source.value_scales),
                )
            )
            sink.write(layer, slots, key, value)
    return sink_buffer


def unsign_zeros(buffer, layout):
    """Changes -0 in step or low to 0, for int4. For zeros of both signs, torch's minimum may return
    either sign.
    """
    for index in range(len(layout.sections)):
        cache = KVCache(layout, buffer, index)
        for scales in (*cache.key_scales, *cache.value_scales):
            parts = scales[..., None].view(torch.int16)
            parts[parts == -(2**15)] = 0


@pytest.mark.parametrize("block_size", [1, 5, 16])
@pytest.mark.parametrize(("source", "to"), PAIRS)
def test_a_converted_record_equals_a_cache_of_that_format(source, to, block_size):
    layout = KVLayout(block_size, source, SECTIONS)
    sink_layout = msgspec.structs.replace(layout, kv_format=to)
    for exponent in (-45, -42, -39, -37, -10, 0, 4, 30, 38):
        buffer = fill(layout, exponent)
        found = torch.from_numpy(convert(buffer.numpy(), layout, to))
        expected = rewritten(buffer, layout, to)
        if to is KVFormat.INT4:
            unsign_zeros(found, sink_layout)
            unsign_zeros(expected, sink_layout)
        assert torch.equal(found, expected), f"magnitude 1e{exponent}"


@pytest.mark.parametrize("sign", [0.0, -0.0])
@pytest.mark.parametrize("to", KVFormat)
def test_zeros_keep_their_sign_if_torch_keeps_it(to, sign):
    layout = KVLayout(2, KVFormat.FP32, (KVSection(1, 1, 8),))
    buffer = torch.full((NUM_BLOCKS, layout.block_bytes // 4), sign).view(torch.uint8)
    found = torch.from_numpy(convert(buffer.numpy(), layout, to))
    assert torch.equal(found, rewritten(buffer, layout, to))


def test_fp8_values_equal_those_of_torch():
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(FP8_VALUES, expected, equal_nan=True)
    assert np.array_equal(np.signbit(FP8_VALUES[:127]), np.signbit(expected[:127]))
