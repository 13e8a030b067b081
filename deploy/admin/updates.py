"""Turns the body of an update into a version, and checks it before any worker starts."""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import msgspec

from deploy.admin.schema import PoolCounts, UpdateBody
from deploy.model_source import pinned
from deploy.pools.formats import check_formats, config_of
from deploy.pools.orders import AddVersion
from deploy.pools.versions.rollout import least
from engine.config import WorkerConfig
from engine.control import SERVING_ROLES, Intent, Pools, Version
from engine.errors import ConfigError


def order_of(body: UpdateBody, intent: Intent) -> AddVersion:
    """Returns the order for an update. Omitted fields are as in the current version.

    Without a weight the version takes over. If the model names a branch, this asks the hub for its
    commit, so call it in a thread. Raises ConfigError.
    """
    current = intent.current
    worker = _changed(current.worker, body.worker or {})
    draft = worker.draft_path
    if draft is not None and not draft.is_dir():
        raise ConfigError(f"{draft}: no such model directory")
    otherwise = current.pools if body.weight is None else least(current.pools)
    pools = pools_of(body.pools, otherwise)
    check_formats({role: config_of(role, worker) for role in SERVING_ROLES if pools.of(role)})
    version = Version(
        name=body.name or _next_name([version.name for version in intent.versions]),
        model=current.model if body.model is None else pinned(body.model),
        model_name=body.model_name or current.model_name,
        worker=worker,
        pools=pools,
        weight=body.weight or 0,
    )
    return AddVersion(version, takes_over=body.weight is None)


def pools_of(counts: PoolCounts | None, otherwise: Pools) -> Pools:
    """Returns the given counts, with 0 for omitted roles; `otherwise` if there are none."""
    if counts is None:
        return otherwise
    return Pools(counts.prefill or 0, counts.decode or 0, counts.mixed or 0)


def _changed(worker: WorkerConfig, changes: Mapping[str, Any]) -> WorkerConfig:
    """Returns the configuration with changes. Raises ConfigError if the result is not valid."""
    try:
        return msgspec.convert({**msgspec.to_builtins(worker), **changes}, WorkerConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"worker: {error}") from error


def _next_name(taken: Sequence[str]) -> str:
    return next(name for i in count(len(taken) + 1) if (name := f"v{i}") not in taken)
