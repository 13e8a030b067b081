"""KV buffers of two sections with a value in every slot."""

import torch

from engine.layout import KVSection
from engine.model.attention.kvcache import KVCache, allocate_buffer

NUM_BLOCKS = 4
SECTIONS = (
    KVSection(num_layers=2, num_kv_heads=3, head_dim=6),
    KVSection(num_layers=1, num_kv_heads=2, head_dim=80),
)


def numbers(rng, shape, exponent):
    """Returns random [..., head_dim] of one magnitude; some rows are offset, zero or constant.

    No number is so large that the step of int4, a 15th of the range, would be infinite.
    """
    x = torch.randn(shape, generator=rng)
    rows = torch.randint(9, shape[:-1], generator=rng)
    x[rows == 0] += 100
    x[rows == 1] = x[rows == 1].abs()
    x[rows == 2] = -x[rows == 2].abs()
    x[rows == 3] = 0
    x[rows == 4] = -1.7
    x[rows == 5, ::2] = 0
    # bf16 rounds 1.7 up: int4's low exceeds all elements, and its step is negative
    x[rows == 6] = 1.7
    return (x.double() * 10.0**exponent).clamp(-1.6e38, 1.6e38).float()


def fill(layout, exponent):
    """Returns a buffer with a value in every slot."""
    rng = torch.Generator().manual_seed(0)
    buffer = allocate_buffer(layout, NUM_BLOCKS)
    slots = torch.arange(NUM_BLOCKS * layout.block_size)
    for index, section in enumerate(layout.sections):
        cache = KVCache(layout, buffer, index)
        for layer in range(section.num_layers):
            shape = (len(slots), section.num_kv_heads, section.head_dim)
            key, value = numbers(rng, shape, exponent), numbers(rng, shape, exponent)
            cache.write(layer, slots, key, value)
    return buffer
