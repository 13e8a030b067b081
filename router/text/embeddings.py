"""Converts embeddings to the form that a client requested.

Source: OpenAI API reference, "Create embeddings".
"""

from base64 import b64encode

import msgspec
import numpy as np

MIN_LENGTH = 1e-12  # a minimum that keeps zeros unchanged, like torch's `normalize`
_FP32 = np.dtype("<f4")


class EmbeddingForm(msgspec.Struct, frozen=True):
    """The form of the embeddings that a client requested: their first `size` numbers."""

    size: int
    is_normalized: bool  # True: the kept numbers are scaled to length 1
    is_base64: bool
    dtype: str = "<f4"  # numpy's name of the number type in base64


def are_numbers(data: bytes, form: EmbeddingForm) -> bool:
    """True if all numbers of an embedding in this form are finite."""
    return bool(np.isfinite(np.frombuffer(data, _FP32)[: form.size]).all())


def shaped(data: bytes, form: EmbeddingForm) -> list[float] | str:
    """Returns an embedding in this form. `data` is fp32 [hidden], little-endian."""
    numbers = np.frombuffer(data, _FP32)[: form.size]
    if form.is_normalized:
        wide = numbers.astype(np.float64)  # in fp32, squares may overflow
        numbers = (wide / max(float(np.linalg.norm(wide)), MIN_LENGTH)).astype(_FP32)
    if form.is_base64:
        return b64encode(numbers.astype(form.dtype).tobytes()).decode()
    found: list[float] = numbers.tolist()
    return found
