"""Measures what KV formats and weight formats cost in quality, on held-out text.

The text is the held-out part of the bundled corpus (`bench.quality.corpus`). It is divided into
windows, each with its own context. The model computes the probability of each token of the text,
given the tokens before it. Attention reads K and V only from the cache record. So one pass over a
window stores and reads the same values as decoding it token by token.

    capacity            tokens per GiB of KV blocks of this model, scales and padding included
    attention_error     root of Σ|o' - o|² / Σ|o|² over all layers: o is attention over fp32 KV, o'
                        over the format, on the queries, keys and values of the fp32 model
    perplexity          exp of the mean negative log likelihood of the tokens
    perplexity_change   relative to fp32 weights and KV
    top1_agreement      share of positions with the same most likely token as fp32
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer

from bench.common.command import Say, say_nothing
from bench.common.report import Figure, Result, results_of
from bench.quality import corpus
from engine.config import WeightFormat
from engine.layout import KVFormat, KVLayout
from engine.messages import SeqId
from engine.model.attention import plain as torch_attention
from engine.model.attention.base import AttentionBatch, Scoring, build_batch
from engine.model.attention.hook import forward
from engine.model.attention.kvcache import KVCache, allocate_buffer
from engine.model.cpu import CpuForward
from engine.model.loading.checkpoint import load
from engine.worker.batch import Row
from engine.worker.blocks import BlockId

BLOCK_SIZE = 16
GIB = 2**30
ATTENTION_WINDOWS = 4  # few windows, because plain torch is slow and the error varies little

Window = list[int]


@dataclass(frozen=True, slots=True)
class QualitySetting:
    """A format of weights and a format of KV."""

    weights: WeightFormat
    kv_format: KVFormat

    @property
    def name(self) -> str:
        """Returns the setting's name in results: the KV format, the weight format, or both. fp32 is
        left out.
        """
        if self.weights is WeightFormat.FP32:
            return f"kv_{self.kv_format}"
        kv = "" if self.kv_format is KVFormat.FP32 else f"_kv_{self.kv_format}"
        return f"weights_{self.weights}{kv}"


EXACT = QualitySetting(WeightFormat.FP32, KVFormat.FP32)
SETTINGS = (
    EXACT,
    *(QualitySetting(WeightFormat.FP32, form) for form in KVFormat if form is not KVFormat.FP32),
    QualitySetting(WeightFormat.INT8, KVFormat.FP32),
    QualitySetting(WeightFormat.INT8, KVFormat.INT8),
)


@dataclass(frozen=True, slots=True)
class Scores:
    """A model's predictions for all tokens of the windows."""

    log_likelihood: float  # mean natural log-likelihood of the tokens
    choices: torch.Tensor  # [num_predictions] int64: the most likely token of each position

    @property
    def perplexity(self) -> float:
        """Returns the perplexity of the text's tokens."""
        return math.exp(-self.log_likelihood)

    def agreement(self, other: "Scores") -> float:
        """Returns the share of positions at which both models have the same most likely token."""
        return float((self.choices == other.choices).float().mean())


def measure(
    checkpoint: Path, windows: Sequence[Window], *, threads: int, say: Say = say_nothing
) -> tuple[Result, ...]:
    """Returns all results, in the order of the table in this module's docstring."""
    torch.set_num_threads(threads)
    say("attention over each KV format")
    figures = capacities(checkpoint) | attention_errors(checkpoint, windows[:ATTENTION_WINDOWS])
    exact = None
    for setting in SETTINGS:
        say(f"perplexity: {setting.name}")
        scores = score(checkpoint, setting, windows, threads=threads)
        exact = exact or scores
        figures |= figures_of(setting, scores, exact)
    return results_of([figures])


def held_out_windows(
    tokenizer_file: Path, *, num_windows: int, window_len: int, seed: int
) -> list[Window]:
    """Returns random windows of the held-out text, without repetition."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    texts = [
        document.text
        for document in corpus.documents(corpus.standard_library())
        if document.held_out and not document.is_dialogue
    ]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    stream = [token for encoding in encoded for token in encoding.ids]
    starts = range(0, len(stream) - window_len + 1, window_len)
    chosen = Random(seed).sample(starts, k=min(num_windows, len(starts)))
    return [stream[start : start + window_len] for start in sorted(chosen)]


def figures_of(setting: QualitySetting, scores: Scores, exact: Scores) -> dict[str, Figure]:
    """Returns the loss of quality of a setting, relative to fp32 weights and fp32 KV."""
    change = scores.perplexity / exact.perplexity - 1
    return {
        f"perplexity/{setting.name}": Figure(scores.perplexity, ""),
        f"perplexity_change/{setting.name}": Figure(100 * change, "%"),
        f"top1_agreement/{setting.name}": Figure(100 * scores.agreement(exact), "%"),
    }


def capacities(checkpoint: Path) -> dict[str, Figure]:
    """Returns the tokens of KV per GiB, by KV format."""
    sections = load(checkpoint, kv_format=KVFormat.FP32, block_size=BLOCK_SIZE).layout.sections
    layouts = {form: KVLayout(BLOCK_SIZE, form, sections) for form in KVFormat}
    return {
        f"capacity/kv_{form}": Figure(GIB // layout.block_bytes * BLOCK_SIZE, "tokens/GiB")
        for form, layout in layouts.items()
    }


def attention_errors(checkpoint: Path, windows: Sequence[Window]) -> dict[str, Figure]:
    """Returns the error of attention for each KV format except fp32."""
    loaded = load(checkpoint, kv_format=KVFormat.FP32, block_size=BLOCK_SIZE)
    sections, num_tokens = loaded.layout.sections, max(map(len, windows))
    caches = {form: _cache(KVLayout(BLOCK_SIZE, form, sections), num_tokens) for form in KVFormat}
    # Sums of squared differences by format; for fp32, the sum of squared outputs.
    squares = dict.fromkeys(KVFormat, 0.0)

    def attend(  # noqa: PLR0913 (the seam of all implementations)
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        layer: int,
        batch: AttentionBatch,
        scoring: Scoring,
    ) -> torch.Tensor:
        outputs = {
            form: torch_attention.attend(query, key, value, own, layer, batch, scoring).double()
            for form, own in caches.items()
        }
        exact = outputs[KVFormat.FP32]
        for form, output in outputs.items():
            difference = exact if form is KVFormat.FP32 else output - exact
            squares[form] += float(difference.square().sum())
        return exact.to(query.dtype)

    context = loaded.context
    context.attend, context.cache = attend, caches[KVFormat.FP32]
    with torch.inference_mode():
        for window in windows:
            context.batch = build_batch([_row(window, context.cache)], context.cache)
            forward(loaded.model, window, range(len(window)), [len(window) - 1])
    outputs = squares.pop(KVFormat.FP32)
    return {
        f"attention_error/kv_{form}": Figure(100 * math.sqrt(difference / outputs), "%")
        for form, difference in squares.items()
    }


def score(
    checkpoint: Path, setting: QualitySetting, windows: Sequence[Window], *, threads: int
) -> Scores:
    """Returns the engine's predictions. Weights and KV have the formats of a worker with this
    setting.
    """
    loaded = load(checkpoint, kv_format=setting.kv_format, block_size=BLOCK_SIZE)
    engine = CpuForward(loaded, setting.weights, threads=threads)
    cache = _cache(loaded.layout, max(map(len, windows)))
    engine.open(cache)
    likelihoods, choices = [], []
    try:
        for window in windows:
            with torch.inference_mode():
                logits = engine.logits([_row(window[:-1], cache)], range(len(window) - 1))
            following = torch.tensor(window[1:])[:, None]
            likelihoods.append(logits.double().log_softmax(-1).gather(1, following)[:, 0])
            choices.append(logits.argmax(-1))
    finally:
        engine.close()
    return Scores(float(torch.cat(likelihoods).mean()), torch.cat(choices))


def _cache(layout: KVLayout, num_tokens: int) -> KVCache:
    return KVCache(layout, allocate_buffer(layout, layout.num_blocks_for(num_tokens)))


def _row(token_ids: Window, cache: KVCache) -> Row:
    """Returns a row for one window, which uses all blocks of the cache."""
    table = [BlockId(i) for i in range(cache.num_blocks)]
    return Row(SeqId("window"), token_ids, 0, table, None)
