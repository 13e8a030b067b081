"""In which formats workers hold KV, by role, and which of them go together."""

from collections.abc import Mapping
from itertools import product

import msgspec

from engine.config import WorkerConfig
from engine.control import SERVING_ROLES
from engine.errors import ConfigError
from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import Role
from kvtransfer.messages import Identity
from kvtransfer.wire import Disagreement, agree


def formats_of(config: WorkerConfig) -> dict[Role, KVFormat]:
    """What workers of each role hold. One can be flipped to a role whose format is its own."""
    return {role: config_of(role, config).kv_dtype for role in SERVING_ROLES}


def config_of(role: Role, config: WorkerConfig) -> WorkerConfig:
    """What workers of that role are started with.

    `kv_dtype` is the format of their pool; `decode_kv_dtype` still says whether decode workers have
    one of their own, so that none becomes what it cannot be. `prefills_locally` is left only where
    KV that they compute is, to the bit, what would be handed over to them.
    """
    kv_dtype = config.kv_dtype
    if role is Role.DECODE and config.decode_kv_dtype is not None:
        kv_dtype = config.decode_kv_dtype
    formats = {config.kv_dtype, kv_dtype, config.kv_wire_dtype or kv_dtype}
    return msgspec.structs.replace(
        config,
        kv_dtype=kv_dtype,
        prefills_locally=config.prefills_locally and len(formats) == 1,
    )


def check_formats(configs: Mapping[Role, WorkerConfig]) -> None:
    """Raises ConfigError if KV could not get from a worker that prefills to one that decodes."""
    for source, sink in product(configs, configs):
        if source.prefills and sink.decodes and not _exchange(configs[source], configs[sink]):
            raise ConfigError(_refusal(configs[source], configs[sink]))


def _exchange(source: WorkerConfig, sink: WorkerConfig) -> bool:
    """Whether the formats of two workers go together."""
    try:
        agree(_identity(source), _identity(sink))
    except Disagreement:
        return False
    return True


def _identity(config: WorkerConfig) -> Identity:
    """As a worker of some model: which one makes no difference to formats."""
    layout = KVLayout(config.block_size, config.kv_dtype, (KVSection(1, 1, head_dim=2),))
    return Identity("", layout, kv_wire_dtype=config.kv_wire_dtype)


def _refusal(source: WorkerConfig, sink: WorkerConfig) -> str:
    """Names the flags, and what they could be."""
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
