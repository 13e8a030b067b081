"""Finds the parameters of Llama 3's scaled rotary embeddings from the factors that GGUF stores.

llama.cpp's converter computes a factor for each frequency from four parameters, and stores the
factors only. transformers needs the parameters. All models of this kind share three of them; the
fourth is the largest factor.
"""

import math
from collections.abc import Sequence
from typing import Any

ORIGINAL_CONTEXT_LEN, LOW, HIGH = 8192, 1.0, 4.0
TOLERANCE = 1e-4  # relative error of a factor in fp32


def parameters_of(factors: Sequence[float], theta: float) -> dict[str, Any] | None:
    """Returns the parameters that make these factors; None if no known ones do."""
    if not all(1 <= factor < math.inf for factor in factors):
        return None
    factor = round(max(factors), 3)
    if factor == 1:
        return {"rope_type": "default"}
    expected = _factors(len(factors), theta, factor)
    if any(abs(a - b) > TOLERANCE * b for a, b in zip(factors, expected, strict=True)):
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LOW,
        "high_freq_factor": HIGH,
        "original_max_position_embeddings": ORIGINAL_CONTEXT_LEN,
    }


def _factors(number: int, theta: float, factor: float) -> list[float]:
    turns = [  # full rotations of each frequency within the original context
        ORIGINAL_CONTEXT_LEN / (2 * math.pi * theta ** (i / number)) for i in range(number)
    ]
    shares = [min(max((turn - LOW) / (HIGH - LOW), 0.0), 1.0) for turn in turns]
    return [1 / ((1 - share) / factor + share) for share in shares]
