"""Makes models with random weights in memory, and checks their results.

check_model      compares CudaForward, with captured steps, with the hook over torch's attention
check_sampling   compares the tokens of the GPU's sampler with those of the definition

Both return complaints, one line each.
"""

from collections.abc import Callable, Iterator, Sequence
from random import Random

import torch
from msgspec import structs
from transformers import AutoConfig, AutoModelForCausalLM

from bench.common.shapes import config_of
from bench.engine.jobs import GPU_SHAPES, GpuShape, scattered_tables
from engine.config import WeightFormat
from engine.layout import KVFormat, KVLayout
from engine.messages import Sampling, SeqId
from engine.model.attention import plain as torch_attention
from engine.model.attention.base import build_batch
from engine.model.attention.hook import PAGED, ForwardContext, attach, forward
from engine.model.attention.kvcache import KVCache, allocate_buffer
from engine.model.cuda import CudaForward
from engine.model.loading.checkpoint import LoadedModel
from engine.model.sampling import choosing
from engine.model.sampling import cuda as triton_sampling
from engine.model.sampling.changes import TokenChoice
from engine.worker.batch import Row
from engine.worker.blocks import BlockId

SEED = 0
BLOCK_SIZE = 16
MODEL_TOLERANCE = {  # tolerated difference of logits, relative to the spread of the logits
    WeightFormat.FP32: 1e-3,
    WeightFormat.BF16: 0.1,
    WeightFormat.FP8: 0.3,
}


def random_llama(
    shape: GpuShape, kv_format: KVFormat, device: str, *, dtype: torch.dtype
) -> LoadedModel:
    """Makes a Llama of this shape with random weights, as `engine.model.loading.checkpoint` returns
    models.
    """
    config = AutoConfig.for_model(**config_of(shape.model))
    torch.manual_seed(SEED)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = model.to(device).eval().requires_grad_(requires_grad=False)
    context = ForwardContext()
    attach(model, context)
    model.set_attn_implementation(PAGED)
    return LoadedModel(
        model=model,
        context=context,
        layout=KVLayout(BLOCK_SIZE, kv_format, (shape.section(),)),
        device=torch.device(device),
        context_len=shape.model.max_positions,
        vocab_size=shape.model.vocab_size,
        eos_token_ids=(),
        fingerprint="random",
        quant_method=None,
    )


def check_model(weights: WeightFormat, kv_format: KVFormat, device: str) -> list[str]:
    """Returns complaints about a small model's logits, over prompts in chunks and varied decode
    steps.
    """
    shape = GPU_SHAPES["tiny"]
    dtype = torch.float32 if weights is WeightFormat.FP32 else torch.bfloat16
    loaded = random_llama(shape, kv_format, device, dtype=dtype)
    tables = scattered_tables([200] * 5, BLOCK_SIZE, seed=1)
    num_blocks = sum(map(len, tables))
    cache = KVCache(loaded.layout, allocate_buffer(loaded.layout, num_blocks, device))
    ours = CudaForward(loaded, weights, captured_rows=(1, 2, 4))
    ours.open(cache)
    attend = loaded.context.attend
    twin = KVCache(loaded.layout, allocate_buffer(loaded.layout, num_blocks, device))
    found = [f"{what} is not used" for what in ours.fallbacks]
    if device != "cpu" and not ours.is_fused:
        found.append("no decode step was captured")
    for rows in _steps(tables, shape.model.vocab_size):
        keep = _last_tokens(rows)
        logits = ours.logits(rows, keep).float()
        loaded.context.attend, loaded.context.cache = torch_attention.attend, twin
        expected = _logits_of_the_hook(loaded, twin, rows, keep)
        loaded.context.attend, loaded.context.cache = attend, cache
        error = float((logits - expected).abs().max() / expected.std())
        if not error <= MODEL_TOLERANCE[weights]:
            found.append(f"{len(rows)} rows, {sum(len(r.token_ids) for r in rows)} tokens: {error}")
    ours.close()
    # Clears compiled code: the next model would first try the code of this model.
    torch._dynamo.reset()
    return [f"model, weights {weights}, KV {kv_format}: {line}" for line in found]


def _steps(tables: Sequence[Sequence[BlockId]], vocab_size: int) -> Iterator[list[Row]]:
    """Yields steps: prompts in chunks, decode steps of one to five rows, verification, and a mixed
    step.
    """
    rng = Random(0)
    lens = [0] * len(tables)
    for chunks in (
        {0: 40, 1: 7},
        {0: 1, 1: 20, 2: 70},
        *({0: 1, 1: 1, 2: 1},) * 3,
        {2: 1},
        {0: 2, 1: 4, 2: 3},
        {1: 8, 2: 5},
        {0: 1, 3: 90, 4: 3},
        *({0: 1, 1: 1, 3: 1, 4: 1}, dict.fromkeys(range(5), 1)) * 2,
    ):
        rows = []
        for i, count in chunks.items():
            ids = [rng.randrange(vocab_size) for _ in range(count)]
            rows.append(Row(SeqId(f"s{i}"), ids, lens[i], tables[i], None))
            lens[i] += count
        yield rows


def _last_tokens(rows: Sequence[Row]) -> list[int]:
    ends = []
    end = 0
    for row in rows:
        end += len(row.token_ids)
        ends.append(end - 1)
    return ends


def _logits_of_the_hook(
    loaded: LoadedModel, cache: KVCache, rows: Sequence[Row], keep: Sequence[int]
) -> torch.Tensor:
    loaded.context.batch = build_batch(rows, cache)
    ids = [token for row in rows for token in row.token_ids]
    positions = [position for row in rows for position in range(row.start, row.end)]
    with torch.inference_mode():
        return forward(loaded.model, ids, positions, keep).float()


VOCABS = (1_000, 32_000, 128_256, 151_936, 262_144)
ROWS_OF_A_KIND = 8
KINDS = (
    Sampling(temperature=0.0),
    Sampling(),
    Sampling(temperature=0.7, top_k=40),
    Sampling(temperature=0.8, top_p=0.9),
    Sampling(temperature=30.0, top_p=0.7),
    Sampling(min_p=0.05),
    Sampling(temperature=1.2, top_k=50, top_p=0.95, min_p=0.01),
)


def check_sampling(
    device: str,
    sampler: Callable[[torch.Tensor, Sequence[TokenChoice]], torch.Tensor] = triton_sampling.sample,
    vocabs: Sequence[int] = VOCABS,
) -> list[str]:
    """Returns complaints about sampled tokens, over rows with spread, tied and masked logits in
    bf16 and fp32.
    """
    rng = torch.Generator(device).manual_seed(0)
    kinds = [kind for kind in KINDS for _ in range(ROWS_OF_A_KIND)]
    found = []
    for vocab in vocabs:
        choices = [
            TokenChoice(structs.replace(kind, seed=(i + 1) * 0x9E3779B97F4A7C15), 1000 + i)
            for i, kind in enumerate(kinds)
        ]
        spread = 3 * torch.randn(len(kinds), vocab, generator=rng, device=device)
        for what, logits in (
            ("fp32", spread),
            ("bf16", spread.bfloat16()),
            ("tied", spread.mul(2).round().div(2)),
            ("masked", spread.masked_fill(spread < 2, -torch.inf)),
        ):
            wrong = (sampler(logits, choices) != choosing.sample(logits, choices)).nonzero()
            if len(wrong):
                rows = wrong.flatten().tolist()
                found.append(f"sampling from {vocab} {what} logits: rows {rows} differ")
    return found
