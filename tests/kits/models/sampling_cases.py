"""The cases in which every sampler must choose the tokens of the reference."""

import math

import torch

from engine.messages import Sampling
from engine.model.sampling.choosing import TokenChoice

KINDS = {
    "greedy": Sampling(temperature=0.0),
    "noisy": Sampling(),
    "cold": Sampling(temperature=0.01),
    "hot": Sampling(temperature=100.0),
    "top_k": Sampling(temperature=0.8, top_k=40),
    "top_k of most": Sampling(temperature=2.0, top_k=900),
    "top_k beyond all": Sampling(temperature=2.0, top_k=2**40),
    "top_p": Sampling(temperature=0.8, top_p=0.9),
    "small top_p": Sampling(temperature=1.5, top_p=0.02),
    "hot top_p": Sampling(temperature=50.0, top_p=0.7),
    "top_p next to all": Sampling(top_p=1 - 2**-53),
    "top_p of none": Sampling(top_p=0.0),
    "min_p": Sampling(min_p=0.05),
    "min_p of the best": Sampling(temperature=3.0, min_p=1.0),
    "all masks": Sampling(temperature=1.2, top_k=50, top_p=0.95, min_p=0.01),
}
LOGITS = {
    "spread": lambda rows, vocab: random_logits(rows, vocab),
    "flat": lambda rows, vocab: random_logits(rows, vocab, scale=1e-3),
    "constant": lambda rows, vocab: torch.full((rows, vocab), -2.5),
    "peaked": lambda rows, vocab: random_logits(rows, vocab, scale=40.0),
    "far from zero": lambda rows, vocab: random_logits(rows, vocab) + 3e4,
    "tied": lambda rows, vocab: random_logits(rows, vocab).mul(2).round().div(2),
    "bf16": lambda rows, vocab: random_logits(rows, vocab).bfloat16(),
    "mostly masked": lambda rows, vocab: random_logits(rows, vocab).masked_fill(
        random_logits(rows, vocab, seed=1) < 4.0, -math.inf
    ),
}


def random_logits(num_rows, vocab, *, seed=0, scale=3.0):
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def with_seed(kind, seed):
    """Returns `kind` with a seed for this row."""
    values = {name: getattr(kind, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    return Sampling(seed=seed * 0x9E3779B97F4A7C15, **values)


def choices_of(samplings, positions, banned):
    return [TokenChoice(*drawn) for drawn in zip(samplings, positions, banned, strict=True)]


def choices_of_kind(kind, num_rows):
    """Returns the sampling choice of each row, all of one kind."""
    drawn = [with_seed(KINDS[kind], seed) for seed in range(num_rows)]
    return choices_of(drawn, range(num_rows), [()] * num_rows)
