"""Steps that are planned and queued during the step before choose the same tokens.

The GPU's forward pass runs on a CPU here. `tests/props/test_worker_pair.py` tests the order of
events, with a fake model that delays its results.
"""

from itertools import pairwise

import pytest
import torch

from deploy.base.defaults import BUNDLED_MODEL
from engine.config import WeightFormat
from engine.grammar.guides import LlGuides
from engine.messages import Role
from engine.model.attention.kvcache import KVCache
from engine.model.cuda import CudaForward
from engine.model.overlap import TokenMemory
from engine.model.runner import TorchRunner
from tests.kits.gpu.cuda_forward import attend_but_pads
from tests.kits.models.pools import Pools, Worker, counted
from tests.kits.models.requests import EOS, requests

pytestmark = pytest.mark.torch

NUM_REQUESTS = 40
SIZES = (1, 2, 4, 8)  # numbers of rows of padded steps


@pytest.fixture(scope="module")
def runner():
    runner = TorchRunner(BUNDLED_MODEL, num_blocks=600, weights=WeightFormat.FP32)
    runner.open()
    loaded = runner._forward._loaded
    buffer = torch.frombuffer(runner.buffer, dtype=torch.uint8)
    forward = CudaForward(
        loaded,
        WeightFormat.FP32,
        attend=attend_but_pads,
        captured_rows=SIZES,
        captured_lens=(1,),
        compiler=None,
    )
    forward.open(KVCache(runner.layout, buffer.view(runner.num_blocks, -1)))
    runner._forward = forward
    runner._overlap()
    assert runner.overlaps
    return runner


def answers(runner, seed):
    guides = LlGuides(
        BUNDLED_MODEL / "tokenizer.json", vocab_size=runner.vocab_size, eos_token_ids=EOS
    )
    worker = Worker("w", Role.MIXED, runner, guides=guides)
    found = Pools(worker, worker).answer(requests(NUM_REQUESTS, seed=seed))
    return found, counted(worker)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_overlapped_steps_choose_the_tokens_of_steps_one_by_one(runner, seed, monkeypatch):
    found, counters = answers(runner, seed)
    assert counters["pending_rows"] > 100
    assert counters["void_rows"] > 0
    monkeypatch.setattr(runner, "overlaps", False)
    expected, counters = answers(runner, seed)
    assert "pending_rows" not in counters
    for one, other in zip(found, expected, strict=True):
        assert one.answer == other.answer, one.sampling
        assert one.is_finished
        # The last bits of results depend on the other rows of a batch.
        assert _values(one) == pytest.approx(_values(other), abs=1e-4)


def test_a_part_that_the_model_does_without_is_counted_for_metrics(runner):
    assert runner.counters == {}
    runner._forward.fallbacks["torch_compile"] += 1
    assert runner.counters == {"fallbacks:torch_compile": 1}
    runner._forward.fallbacks.clear()


def _values(asked):
    return [logprobs.logprob for logprobs in asked.logprobs]


def test_memory_for_tokens_is_used_again_by_the_second_next_step():
    memory = TokenMemory(4, pinned=False)
    taken = [memory.reserve(3).data_ptr() for _ in range(4)]
    assert taken[0] == taken[2] != taken[1] == taken[3]
    assert all(a != b for a, b in pairwise(taken))
