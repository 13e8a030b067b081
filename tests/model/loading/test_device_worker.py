"""A worker on a device, from its start to its end. Host memory replaces the device's memory."""

import pytest

from deploy.base.defaults import BUNDLED_MODEL
from deploy.base.spec import WorkerSpec
from deploy.base.thread import ServiceThread
from deploy.services.worker import WorkerService
from deploy.worker import opening
from engine.config import DeviceKind, Transport, WeightFormat, WorkerConfig
from engine.devices.settings import resolve
from engine.layout import KVFormat
from engine.messages import Role, WorkerId
from engine.model import runner as runner_module
from engine.model.profiling import MemoryUse
from tests.kits.fakes.device import LateDriver
from tests.kits.fakes.meter import FakeMeter

pytestmark = pytest.mark.torch

GIB = 2**30


@pytest.fixture
def _fake_device(monkeypatch):
    """Makes the host look like a device: its name, its driver, and its memory meter."""
    monkeypatch.setattr(opening, "gpu_of", lambda device_id: "cpu")
    monkeypatch.setattr(opening, "CudaDriver", lambda device_id: LateDriver())
    made = runner_module.TorchRunner.__init__

    def with_meter(self, *args, **options):
        meter = FakeMeter(MemoryUse(8 * GIB, 8 * GIB, 1 * GIB), GIB // 2)
        made(self, *args, **options, meter=meter)

    monkeypatch.setattr(runner_module.TorchRunner, "__init__", with_meter)


@pytest.mark.usefixtures("_fake_device")
@pytest.mark.parametrize("part", [1.0, 0.9])
def test_a_worker_sizes_its_kv_and_offers_it_by_ipc(part):
    config = WorkerConfig(max_batch_tokens=64, max_running=8, weights=WeightFormat.FP32)
    settings = resolve(config, DeviceKind.CUDA)
    who = (WorkerId("w"), Role.MIXED, str(BUNDLED_MODEL), settings, "token")
    thread = ServiceThread(WorkerService(WorkerSpec(*who, threads=1, num_gpus=part)), "worker")
    try:
        ready = thread.open()
        assert ready.facts.device == DeviceKind.CUDA
        assert ready.facts.kv_format == KVFormat.BF16
        assert ready.facts.transports == (Transport.IPC, Transport.ZMQ)
        left = 0.9 * part * 8 * GIB - 1 * GIB - GIB // 2  # after weights and the largest step
        assert 0.5 * left < ready.facts.kv_bytes < left
    finally:
        thread.close()
