"""Runs the GPU's forward pass on a CPU, and compares it with the forward pass of the hook."""

import random
from itertools import pairwise

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.config import WeightFormat
from engine.layout import KVFormat, KVLayout, KVSection
from engine.model.attention import plain as torch_attention
from engine.model.attention.base import AttentionBatch, Extent, build_batch
from engine.model.attention.hook import PAGED, ForwardContext, attach, forward
from engine.model.attention.kvcache import KVCache, allocate_buffer, dequantise
from engine.model.cuda import CudaForward
from engine.model.loading.checkpoint import LoadedModel, load
from engine.model.packing import PAD_SLOT
from engine.worker.batch import Row
from tests.kits.checkpoints import COMMON, KINDS

BLOCK_SIZE = 4
NUM_BLOCKS = 60
CHUNKS = (  # rows of each step: (sequence, number of tokens); four sequences
    ((0, 5), (1, 9)),
    ((0, 1), (1, 3), (2, 7)),
    ((2, 1), (0, 1), (1, 1)),
    ((3, 2), (1, 1)),
    ((3, 1), (0, 1), (2, 1), (1, 1)),
    ((1, 1),),
)


def steps_of(vocab_size, *, seed=0):
    """Yields the rows of each step of CHUNKS, with scattered blocks."""
    rng = random.Random(seed)
    blocks = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    lens = [0] * 4
    for chunks in CHUNKS:
        rows = []
        for sequence, count in chunks:
            ids = [rng.randrange(vocab_size) for _ in range(count)]
            table = blocks[sequence * 15 : sequence * 15 + 15]
            rows.append(Row(f"s{sequence}", ids, lens[sequence], table, None))
            lens[sequence] += count
        yield rows


def attend_but_pads(query, key, value, cache, layer, batch, scoring):
    """Computes torch's attention of all tokens but padding. Lengths are those on the device.

    Padding tokens stand first in their row, and padding rows are last in the batch.
    """
    starts, contexts = batch.cu_seqlens_q.tolist(), batch.context_lens.tolist()
    is_real = batch.slot_mapping != PAD_SLOT
    rows = [
        (is_real[a:b].tolist(), c) for (a, b), c in zip(pairwise(starts), contexts, strict=True)
    ]
    assert all(flags == sorted(flags) for flags, _ in rows)
    lens = [sum(flags) for flags, _ in rows]
    num_rows = sum(context > 0 for context in contexts)
    assert all(lens[:num_rows])
    assert not any(contexts[num_rows:] + lens[num_rows:])
    out = torch.full_like(query, torch.nan)
    if num_rows:
        begins = np.cumsum([0, *lens[:num_rows]])
        real = AttentionBatch(
            extents=tuple(map(Extent, begins.tolist(), lens[:num_rows], contexts)),
            cu_seqlens_q=torch.from_numpy(begins).int(),
            context_lens=batch.context_lens[:num_rows],
            block_tables=batch.block_tables[:num_rows],
            slot_mapping=batch.slot_mapping[is_real],
        )
        projected = (x[is_real] for x in (query, key, value))
        out[is_real] = torch_attention.attend(*projected, cache, layer, real, scoring)
    return out


def fresh_cache(layout):
    return KVCache(layout, allocate_buffer(layout, NUM_BLOCKS))


def loaded_from(path):
    return load(path, kv_format=KVFormat.FP32, block_size=BLOCK_SIZE, dtype=torch.float32)


def opened(loaded, **options):
    options.setdefault("compiler", None)
    forward = CudaForward(loaded, options.pop("weights", WeightFormat.FP32), **options)
    forward.open(fresh_cache(loaded.layout))
    return forward


def last_tokens(rows):
    return [int(i) - 1 for i in np.cumsum([len(row.token_ids) for row in rows])]


def logits_of_the_hook(loaded):
    """Returns the logits of each step's last tokens by `hook.forward`, and the cache afterwards."""
    context, attend = loaded.context, loaded.context.attend
    context.cache = cache = fresh_cache(loaded.layout)
    context.attend = torch_attention.attend
    found = []
    for rows in steps_of(loaded.vocab_size):
        context.batch = build_batch(rows, cache)
        ids = [token for row in rows for token in row.token_ids]
        where = [position for row in rows for position in range(row.start, row.end)]
        found.append(forward(loaded.model, ids, where, last_tokens(rows)))
    context.cache, context.batch, context.attend = None, None, attend
    return found, cache


def logits_of(forward, loaded):
    """Returns the logits of each step's last tokens by a CudaForward."""
    steps = steps_of(loaded.vocab_size)
    return [forward.logits(rows, last_tokens(rows)).clone() for rows in steps]


def check_like_the_hook(forward, loaded, expected, *, tolerance=3e-5):
    wanted, their_cache = expected
    cache = loaded.context.cache
    for found, logits in zip(logits_of(forward, loaded), wanted, strict=True):
        torch.testing.assert_close(found, logits, rtol=0, atol=tolerance)
    for ours, theirs in zip(_stored(cache), _stored(their_cache), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


def _stored(cache):
    """Returns the stored K and V of each layer."""
    for layer in range(cache.section.num_layers):
        for elements, scales in (
            (cache.keys, cache.key_scales),
            (cache.values, cache.value_scales),
        ):
            yield dequantise(elements[layer], scales and scales[layer], cache.kv_format)


def random_model(num_layers, *, kv_format=KVFormat.FP32):
    """Returns a loaded model with random weights, without files."""
    properties = COMMON | KINDS["llama"] | {"num_hidden_layers": num_layers}
    config = AutoConfig.for_model(**properties)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(requires_grad=False)
    context = ForwardContext()
    attach(model, context)
    model.set_attn_implementation(PAGED)
    section = KVSection(num_layers, config.num_key_value_heads, config.head_dim)
    return LoadedModel(
        model=model,
        context=context,
        layout=KVLayout(BLOCK_SIZE, kv_format, (section,)),
        device=torch.device("cpu"),
        context_len=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        eos_token_ids=(),
        fingerprint="random",
        quant_method=None,
    )
