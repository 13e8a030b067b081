"""Default settings by device."""

import msgspec
import pytest

from engine.config import DeviceKind, PoolsConfig, WeightFormat, WorkerConfig
from engine.devices.settings import (
    WorkerSettings,
    choose_device,
    gpus_of_worker,
    kv_formats,
    resolve,
)
from engine.errors import ConfigError
from engine.layout import KVFormat

AUTO, CPU, CUDA = DeviceKind.AUTO, DeviceKind.CPU, DeviceKind.CUDA


def sizes(settings: WorkerSettings) -> tuple[int, int, int]:
    return settings.max_batch_tokens, settings.chunk_tokens, settings.max_running


def test_a_cpu_has_small_steps_and_kv_in_fp32():
    settings = resolve(WorkerConfig(), CPU)
    assert (settings.device, settings.kv_dtype, settings.weights) == (
        CPU,
        KVFormat.FP32,
        WeightFormat.AUTO,
    )
    assert sizes(settings) == (512, 256, 64)


def test_a_gpu_has_large_steps_and_everything_in_bf16():
    settings = resolve(WorkerConfig(), CUDA)
    assert (settings.device, settings.kv_dtype, settings.weights) == (
        CUDA,
        KVFormat.BF16,
        WeightFormat.BF16,
    )
    assert sizes(settings) == (8192, 8192, 256)


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_what_is_configured_stays(device):
    config = WorkerConfig(
        kv_dtype=KVFormat.INT8,
        weights=WeightFormat.FP8,
        max_batch_tokens=100,
        chunk_tokens=7,
        max_running=3,
        kv_mib=5,
    )
    settings = resolve(config, device)
    for name in set(WorkerConfig.__struct_fields__) - {"device"}:
        assert getattr(settings, name) == getattr(config, name)
    assert settings.device is device


def test_settings_are_their_own_settings_and_survive_a_message():
    settings = resolve(WorkerConfig(threads=3), CUDA)
    assert resolve(settings, CUDA) == settings
    assert msgspec.json.decode(msgspec.json.encode(settings), type=WorkerSettings) == settings


def test_a_default_that_does_not_fit_what_is_configured_is_an_error():
    config = WorkerConfig(max_running=600)
    assert sizes(resolve(config, CUDA)) == (8192, 8192, 600)
    with pytest.raises(ConfigError, match=r"worker\.max_running .* worker\.max_batch_tokens"):
        resolve(config, CPU)


@pytest.mark.parametrize(
    ("wanted", "num_gpus", "has_gpus", "expected"),
    [
        (AUTO, None, False, CPU),
        (AUTO, None, True, CUDA),
        (AUTO, 0.5, True, CUDA),
        (AUTO, 0.0, True, CPU),
        (CPU, None, True, CPU),
        (CUDA, None, False, CUDA),  # the launcher or the worker reports the missing device
    ],
)
def test_auto_takes_gpus_where_workers_get_them(wanted, num_gpus, has_gpus, expected):
    pools = PoolsConfig(num_gpus=num_gpus)
    assert choose_device(wanted, pools, has_gpus=has_gpus) is expected


def test_gpus_without_gpus_are_refused():
    with pytest.raises(ConfigError, match=r"pools\.num_gpus is 0"):
        choose_device(CUDA, PoolsConfig(num_gpus=0), has_gpus=True)


@pytest.mark.parametrize(
    ("num_gpus", "device", "devices", "expected"),
    [
        (None, CPU, 1, 0.0),
        (None, CUDA, 1, 1.0),
        (None, CUDA, 4, 4.0),
        (0.5, CUDA, 1, 0.5),
        (4.0, CUDA, 4, 4.0),
        (1.0, CPU, 1, 1.0),  # reserves a place for another program of the operator
    ],
)
def test_a_worker_takes_whole_gpus_unless_told_otherwise(num_gpus, device, devices, expected):
    assert gpus_of_worker(PoolsConfig(num_gpus=num_gpus), device, devices) == expected


def test_a_worker_of_several_gpus_gets_no_fewer():
    with pytest.raises(ConfigError, match=r"needs 2 GPUs, and pools.num_gpus is 0.5"):
        gpus_of_worker(PoolsConfig(num_gpus=0.5), CUDA, 2)


def test_pools_have_the_format_of_their_device_or_their_own():
    assert kv_formats(WorkerConfig(), CPU) == {KVFormat.FP32}
    assert kv_formats(WorkerConfig(), CUDA) == {KVFormat.BF16}
    mixed = WorkerConfig(kv_dtype=KVFormat.BF16, decode_kv_dtype=KVFormat.INT8)
    assert kv_formats(mixed, CPU) == {KVFormat.BF16, KVFormat.INT8}
