"""Runs CudaForward with the Triton kernels under triton's interpreter, on a CPU.

`test_cuda.py` runs this file in its own process, because triton decides on import whether it
interprets kernels.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest

from engine.layout import KVFormat
from engine.model import cuda
from engine.model.attention import cuda as triton_attention
from engine.model.sampling import choosing
from engine.model.sampling import cuda as triton_sampling
from engine.model.sampling.choosing import TokenChoice
from engine.worker.batch import Row
from tests.kits.gpu.cuda_forward import (
    check_like_the_hook,
    logits_of_the_hook,
    opened,
    random_model,
)
from tests.kits.models.sampling_cases import KINDS, with_seed


def test_ragged_and_filled_up_steps(monkeypatch):
    # more lengths would take minutes in the interpreter
    monkeypatch.setattr(cuda, "WARM_UP_LENS", (8,))
    monkeypatch.setattr(cuda, "WARM_UP_ROWS", 2)
    loaded = random_model(1, kv_format=KVFormat.INT8)
    expected = logits_of_the_hook(loaded)
    forward = opened(loaded, attend=triton_attention.attend, captured_rows=(4,))
    assert not loaded.context.cache.buffer.any()  # the warm-up writes nothing to the cache
    check_like_the_hook(forward, loaded, expected, tolerance=1e-3)


# a GPU overflows silently
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_tokens_of_a_step_are_those_of_the_definition():
    loaded = random_model(1)
    forward = opened(loaded, sampler=triton_sampling.sample, captured_rows=(4,))
    rows = [Row(f"s{i}", [i, 7, 3 * i], 0, [i], None) for i in range(len(KINDS))]
    logits = forward.logits(rows, [3 * i + 2 for i in range(len(rows))])
    choices = [TokenChoice(with_seed(kind, i), 3) for i, kind in enumerate(KINDS.values())]
    assert forward.sample(logits, choices).tolist() == choosing.sample(logits, choices).tolist()
