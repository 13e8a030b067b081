"""CudaForward over the Triton kernels under triton's interpreter, on a CPU.

`test_cuda.py` runs this file in a process of its own, because triton decides at import if it
interprets.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

from engine.layout import KVFormat
from engine.model import cuda
from engine.model.attention import cuda as triton_attention
from tests.kits.models.cuda_forward import (
    check_like_the_hook,
    logits_of_the_hook,
    opened,
    random_model,
)


def test_ragged_and_filled_up_steps(monkeypatch):
    monkeypatch.setattr(cuda, "WARM_UP_LENS", (8,))  # interpreted, more would take minutes
    loaded = random_model(1, kv_format=KVFormat.INT8)
    expected = logits_of_the_hook(loaded)
    forward = opened(loaded, attend=triton_attention.attend, captured_rows=(4,))
    assert not loaded.context.cache.buffer.any()  # the warm-up stores nothing
    check_like_the_hook(forward, loaded, expected, tolerance=1e-3)
