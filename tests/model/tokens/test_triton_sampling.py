"""The Triton sampler, checked without a GPU.

`interpreted_sampling.py` compares its tokens with the definition's under triton's interpreter. Here
the kernel is compiled for a Hopper GPU, and must fit it.
"""

import pytest
import torch

from engine.model.sampling import cuda as triton_sampling
from engine.model.sampling.choosing import TokenChoice
from tests.kits.gpu.hopper import HOPPER_SHARED_BYTES, bytes_on_stack, compile_for_hopper
from tests.kits.gpu.interpreter import check_under_interpreter, needs_triton
from tests.kits.models.sampling_cases import KINDS, random_logits

pytestmark = pytest.mark.torch


@pytest.mark.long
@needs_triton
def test_the_sampler_chooses_the_tokens_of_the_definition_under_the_interpreter():
    check_under_interpreter("interpreted_sampling.py")


class RecordedKernel:
    """Replaces a kernel and records its launches."""

    def __init__(self):
        self.launches = []

    @property
    def sample_kernel(self):
        return self

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.launches.append((grid, arguments, constants))


@needs_triton
@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_fits_a_hopper_multiprocessor(monkeypatch, tmp_path, dtype):
    from engine.model.sampling.kernels import sample_kernel

    recorded = RecordedKernel()
    monkeypatch.setattr(triton_sampling, "_kernels", lambda: recorded)
    choices = [TokenChoice(kind, 3) for kind in KINDS.values()]
    triton_sampling.sample(random_logits(len(choices), 128).to(dtype), choices)
    [(grid, arguments, constants)] = recorded.launches
    assert grid == (len(choices),)
    compiled = compile_for_hopper(sample_kernel, arguments, constants)
    assert compiled.metadata.shared <= HOPPER_SHARED_BYTES
    assert bytes_on_stack(compiled, tmp_path) == 0


def test_parameters_of_all_rows_are_one_array_of_words(monkeypatch):
    recorded = RecordedKernel()
    monkeypatch.setattr(triton_sampling, "_kernels", lambda: recorded)
    choices = [TokenChoice(kind, 3) for kind in KINDS.values()]
    triton_sampling.sample(random_logits(len(choices), 128), choices)
    [(_, (_, _, words, *_), _)] = recorded.launches
    found = words.view(len(choices), -1)
    temperatures = [choice.sampling.temperature for choice in choices]
    assert found.view(torch.float64)[:, 0].tolist() == temperatures
    assert found[:, 4].tolist() == [3] * len(choices)
    tops = [k if 0 < (k := choice.sampling.top_k) < 128 else 0 for choice in choices]
    assert found[:, 5].tolist() == tops
