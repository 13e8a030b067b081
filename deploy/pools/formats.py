"""Computes the KV format of each role, and checks which formats can exchange KV."""

from collections.abc import Mapping
from functools import lru_cache
from itertools import product
from types import MappingProxyType

import msgspec

from engine.config import DeviceKind, PoolsConfig, WorkerConfig
from engine.control import SERVING_ROLES, Version
from engine.devices.settings import WorkerSettings, resolve
from engine.errors import ConfigError
from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import Role
from kvtransfer.messages import Identity
from kvtransfer.wire import Disagreement, agree


def formats_of(version: Version) -> Mapping[Role, KVFormat]:
    """Returns the KV format of each role.

    A worker can be flipped only between roles with equal formats.
    """
    return _formats_of(version.worker, version.device)


@lru_cache(maxsize=64)  # cached: every step of the pools calls it, for few versions
def _formats_of(config: WorkerConfig, device: DeviceKind) -> Mapping[Role, KVFormat]:
    formats = {role: config_of(role, config, device).kv_dtype for role in SERVING_ROLES}
    return MappingProxyType(formats)


def config_of(role: Role, config: WorkerConfig, device: DeviceKind) -> WorkerSettings:
    """Returns the settings with which workers of this role start. Raises ConfigError.

    `tp`, `pp` and `ep` are set to the role's values, and `kv_dtype` to the role's KV format.
    `decode_kv_dtype` stays unchanged, so that a worker can refuse a role with another KV format.
    """
    settings = resolve(config, device)
    kv_dtype = settings.kv_dtype
    if role is Role.DECODE and settings.decode_kv_dtype is not None:
        kv_dtype = settings.decode_kv_dtype
    ranks: dict[str, int] = {}
    if role is Role.DECODE:
        own = {"tp": config.decode_tp, "pp": config.decode_pp, "ep": config.decode_ep}
        ranks = {name: number for name, number in own.items() if number is not None}
    return msgspec.structs.replace(settings, kv_dtype=kv_dtype, **ranks)


def stretch_of(config: WorkerConfig, device: DeviceKind, pools: PoolsConfig) -> float | None:
    """Returns the stretch of fluid workers. None if the pools are not fluid.

    Pools are fluid only if locally computed KV has the same bits as handed-over KV. This requires
    that all workers have the same KV format and are split into ranks in the same way.
    """
    settings = resolve(config, device)
    ends = {settings.kv_dtype, settings.decode_kv_dtype or settings.kv_dtype}
    is_exact = len(ends | {settings.kv_wire_dtype or settings.kv_dtype}) == 1
    is_exact &= len({_split_of(config_of(role, config, device)) for role in SERVING_ROLES}) == 1
    return pools.stretch if pools.fluid and is_exact else None


def _split_of(settings: WorkerSettings) -> tuple[int, int, int]:
    return settings.tp, settings.pp, settings.ep


def check_version(version: Version) -> None:
    """Raises ConfigError if a version's settings are invalid or its workers cannot exchange KV."""
    wanted = [role for role in SERVING_ROLES if version.pools.of(role)]
    check_formats({role: config_of(role, version.worker, version.device) for role in wanted})


def check_formats(configs: Mapping[Role, WorkerSettings]) -> None:
    """Raises ConfigError if KV cannot move from a prefilling role to a decoding role."""
    for source, sink in product(configs, configs):
        if source.prefills and sink.decodes and not _exchange(configs[source], configs[sink]):
            raise ConfigError(_refusal(configs[source], configs[sink]))


def _exchange(source: WorkerSettings, sink: WorkerSettings) -> bool:
    """True if two workers can exchange KV."""
    try:
        agree(_identity(source), _identity(sink))
    except Disagreement:
        return False
    return True


def _identity(config: WorkerSettings) -> Identity:
    """Returns a model identity for format checks. The formats are the same for every model."""
    layout = KVLayout(config.block_size, config.kv_dtype, (KVSection(1, 1, head_dim=2),))
    return Identity("", layout, kv_wire_dtype=config.kv_wire_dtype)


def _refusal(source: WorkerSettings, sink: WorkerSettings) -> str:
    """Returns an error text that names flags and values that would work."""
    ends = f"--kv-dtype {source.kv_dtype}"
    if sink.kv_dtype != source.kv_dtype:
        ends += f" and --decode-kv-dtype {sink.kv_dtype}"
    wire = source.kv_wire_dtype
    given = "without --kv-wire-dtype" if wire is None else f"with --kv-wire-dtype {wire}"
    fit = [
        kv_format
        for kv_format in KVFormat
        if _exchange(
            msgspec.structs.replace(source, kv_wire_dtype=kv_format),
            msgspec.structs.replace(sink, kv_wire_dtype=kv_format),
        )
    ]
    return f"{ends} cannot be combined {given}; possible are: {', '.join(fit) or 'none'}"
