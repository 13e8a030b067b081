"""Checks that the GPU's sampler chooses the tokens of the definition."""

from collections.abc import Callable, Sequence

import torch
from msgspec import structs

from engine.messages import Sampling
from engine.model.sampling import choosing
from engine.model.sampling import cuda as triton_sampling
from engine.model.sampling.changes import TokenChoice

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
    """Complaints over rows of all kinds: spread, tied and masked logits in bf16 and fp32."""
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
