"""The memory of the largest step is measured once, before the size of KV memory is set."""

import pytest
import torch

from deploy.base.defaults import BUNDLED_MODEL
from engine.config import WeightFormat
from engine.layout import KVFormat
from engine.model import profiling
from engine.model.loading import checkpoint
from engine.model.loading.checkpoint import load
from engine.model.profiling import CudaMeter, DeviceNeeds, LargestStep, MemoryUse, measure_needs
from engine.model.runner import TorchRunner
from tests.kits.fakes.meter import FakeMeter

pytestmark = pytest.mark.torch

USE = MemoryUse(free_bytes=100, total_bytes=200, own_bytes=50)


@pytest.fixture(scope="module")
def loaded():
    return load(BUNDLED_MODEL, kv_format=KVFormat.BF16, block_size=16, dtype=torch.float32)


@pytest.mark.parametrize("largest", [LargestStep(5, 9), LargestStep(40, 3), LargestStep(5000, 2)])
def test_the_largest_step_is_full_and_runs_once(loaded, largest, monkeypatch):
    meter = FakeMeter(USE, 7)
    ran = []

    class Watched(profiling.CudaForward):
        def logits(self, rows, keep):
            ran.append((rows, list(keep)))
            num_kept = len(keep)
            return torch.zeros(num_kept, loaded.vocab_size)

    monkeypatch.setattr(profiling, "CudaForward", Watched)
    assert measure_needs(loaded, WeightFormat.FP32, largest, meter) == DeviceNeeds(USE, 7)
    assert meter.num_calls == 1
    [(rows, kept)] = ran
    assert sum(len(row.token_ids) for row in rows) == largest.num_tokens
    assert len(rows) >= min(largest.num_rows, largest.num_tokens)
    assert max(row.end for row in rows) <= loaded.context_len
    assert kept[-1] == largest.num_tokens - 1
    assert loaded.context.cache is None


def test_a_real_step_is_computed(loaded):
    meter = FakeMeter(USE, 7)
    measure_needs(loaded, WeightFormat.FP32, LargestStep(40, 3), meter)
    assert meter.num_calls == 1


def test_a_runner_reports_the_memory_that_its_device_needs():
    told = []
    runner = TorchRunner(
        BUNDLED_MODEL,
        kv_bytes=lambda needs: told.append(needs) or 2**22,
        weights=WeightFormat.FP32,
        largest=LargestStep(32, 4),
        meter=FakeMeter(USE, 7),
    )
    runner.open()
    assert [needs.device for needs in told] == [DeviceNeeds(USE, 7)]
    assert runner.warm_up() > 0  # the trial has left the model unchanged
    assert runner.kv_address % 64 == 0
    runner.close()


def test_a_cpu_measures_nothing():
    told = []
    runner = TorchRunner(
        BUNDLED_MODEL,
        kv_bytes=lambda needs: told.append(needs) or 2**22,
        largest=LargestStep(32, 4),
    )
    runner.open()
    assert told[0].device is None
    runner.enter_thread()
    runner.close()


def test_weights_that_go_straight_to_a_device_are_the_same():
    config = checkpoint._load_config(BUNDLED_MODEL)
    usual, straight = (
        checkpoint._load_weights(BUNDLED_MODEL, config, torch.float32, device)
        for device in ("cpu", "cpu:0")
    )
    named = dict(straight.state_dict())
    assert all(torch.equal(named[name], tensor) for name, tensor in usual.state_dict().items())
    for ours, theirs in zip(usual.buffers(), straight.buffers(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.gpu
def test_a_gpu_counts_the_memory_that_a_call_holds():
    meter = CudaMeter(torch.device("cuda:0"))
    kept = []
    before = meter.read()
    held = meter.peak_bytes(lambda: kept.append(torch.empty(2**28, dtype=torch.uint8, device=0)))
    assert held >= 2**28
    after = meter.read()
    assert after.own_bytes - before.own_bytes >= 2**28
    assert after.free_bytes < before.free_bytes <= before.total_bytes
