"""Fills in the settings whose defaults depend on a worker's device. Pure.

The configuration leaves some values open, because GPUs and CPUs need different values. All code
that reads these values gets them from `resolve`. The configuration itself is not changed.
"""

from typing import Any

from engine.config import DeviceKind, PoolsConfig, WeightFormat, WorkerConfig
from engine.errors import ConfigError
from engine.layout import KVFormat

_DEFAULTS: dict[DeviceKind, dict[str, Any]] = {
    DeviceKind.CPU: {
        "kv_dtype": KVFormat.FP32,
        "max_batch_tokens": 512,
        "chunk_tokens": 256,
        "max_running": 64,
    },
    DeviceKind.CUDA: {
        "kv_dtype": KVFormat.BF16,
        "max_batch_tokens": 8192,
        "chunk_tokens": 8192,
        "max_running": 256,
    },
}


class WorkerSettings(WorkerConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A worker's configuration with all defaults filled in. `device` is never `auto`.

    `stretch` is `pools.stretch` if the worker is fluid (see `engine.messages.Welcome`).
    """

    kv_dtype: KVFormat
    max_batch_tokens: int
    chunk_tokens: int
    max_running: int
    stretch: float | None = None


def resolve(config: WorkerConfig, device: DeviceKind) -> WorkerSettings:
    """Returns the settings of a worker on a device of this kind. Raises ConfigError.

    On a GPU, `auto` weights become bf16. On a CPU they stay `auto`: only the worker can check if
    its processor has the instructions that int8 needs.
    """
    assert device is not DeviceKind.AUTO, "choose first"
    values = {name: getattr(config, name) for name in config.__struct_fields__}
    values |= {n: value for n, value in _DEFAULTS[device].items() if values[n] is None}
    if device is DeviceKind.CUDA and config.weights is WeightFormat.AUTO:
        values["weights"] = WeightFormat.BF16
    try:
        return WorkerSettings(**{**values, "device": device})
    except ValueError as error:
        raise ConfigError(str(error)) from error


def kv_formats(config: WorkerConfig, device: DeviceKind) -> set[KVFormat]:
    """Returns the formats of KV in the pools of workers on a device of this kind."""
    own: KVFormat = config.kv_dtype or _DEFAULTS[device]["kv_dtype"]
    return {own, config.decode_kv_dtype or own}


def choose_device(wanted: DeviceKind, pools: PoolsConfig, *, has_gpus: bool) -> DeviceKind:
    """Returns the kind of device on which workers compute. Raises ConfigError if the device is
    missing.

    `has_gpus`: the workers' machines have GPUs that torch can use.
    """
    gets_none = pools.num_gpus == 0
    if wanted is DeviceKind.AUTO:
        return DeviceKind.CUDA if has_gpus and not gets_none else DeviceKind.CPU
    if wanted is DeviceKind.CUDA and gets_none:
        raise ConfigError("worker.device = cuda needs GPUs, and pools.num_gpus is 0")
    return wanted


def gpus_of_worker(pools: PoolsConfig, device: DeviceKind, devices_per_worker: int = 1) -> float:
    """Returns the number of GPUs of one worker, which may be a fraction. On a CPU: the configured
    number.

    Raises ConfigError if a worker needs more GPUs than the configuration gives it.
    """
    if pools.num_gpus is None:
        return float(devices_per_worker) if device is DeviceKind.CUDA else 0.0
    if device is DeviceKind.CUDA and devices_per_worker > max(1, pools.num_gpus):
        raise ConfigError(
            f"a worker needs {devices_per_worker} GPUs, and pools.num_gpus is {pools.num_gpus:g}"
        )
    return pools.num_gpus
