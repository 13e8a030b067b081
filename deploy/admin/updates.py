"""Turns the body of an update into a version, and checks it before any worker starts."""

from collections.abc import Callable, Mapping
from itertools import count
from math import inf
from typing import Any

import msgspec

from deploy.admin.schema import PoolCounts, UpdateBody
from deploy.model_source import pinned
from deploy.pools.formats import check_version
from deploy.pools.orders import AddVersion
from deploy.pools.versions.rollout import least
from engine.config import DeviceKind, WorkerConfig, check_canary
from engine.control import MAIN_LINE, Intent, Pools, Version
from engine.errors import ConfigError


def order_of(
    body: UpdateBody, intent: Intent, device_of: Callable[[WorkerConfig], DeviceKind]
) -> AddVersion:
    """Returns the order for an update. Omitted fields are as in the current version.

    `device_of` returns the kind of device of workers with a configuration.

    Without a weight the version takes over. If the model names a branch, this function asks the
    hub for the branch's commit, so call it in a thread. Raises ConfigError.
    """
    current = _current_of(body.of or MAIN_LINE, intent)
    worker = _changed(current.worker, body.worker or {})
    draft = worker.draft_path
    if draft is not None and not draft.is_dir():
        raise ConfigError(f"{draft}: no such model directory")
    awake = current.pools if current.asleep is None else current.asleep.pools
    otherwise = awake if body.weight is None else least(awake)
    pools = pools_of(body.pools, otherwise)
    version = Version(
        name=body.name or _next_name(current.line, intent),
        model=current.model if body.model is None else pinned(body.model),
        model_name=body.model_name or current.model_name,
        worker=worker,
        pools=pools,
        weight=body.weight or 0,
        line=current.line,
        device=device_of(worker),
    )
    check_version(version)
    if body.canary is not None:
        check_canary(body.canary)
        if body.weight is not None and body.canary:
            raise ConfigError("a version with a weight does not take over: it has no canary")
    if body.hold_s is not None and not 0 <= body.hold_s < inf:
        raise ConfigError(f"hold_s must not be negative, and not {body.hold_s}")
    return AddVersion(
        version,
        takes_over=body.weight is None,
        canary=None if body.canary is None else tuple(body.canary),
        hold_s=body.hold_s,
        allows_shorter=body.allows_shorter,
    )


def pools_of(counts: PoolCounts | None, otherwise: Pools) -> Pools:
    """Returns the given counts, with 0 for omitted roles. Without counts, `otherwise`."""
    if counts is None:
        return otherwise
    return Pools(counts.prefill or 0, counts.decode or 0, counts.mixed or 0)


def _changed(worker: WorkerConfig, changes: Mapping[str, Any]) -> WorkerConfig:
    """Returns the configuration with changes. Raises ConfigError if the result is not valid."""
    try:
        return msgspec.convert({**msgspec.to_builtins(worker), **changes}, WorkerConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"worker: {error}") from error


def _current_of(line: str, intent: Intent) -> Version:
    """Returns the current version of a model. Raises ConfigError."""
    found = intent.of_line(line)
    if not found:
        there = ", ".join(dict.fromkeys(each.line for each in intent.versions if each.line))
        raise ConfigError(f"no model beside the main one is called {line!r}; there are: {there}")
    return found[0]


def _next_name(line: str, intent: Intent) -> str:
    taken = [version.name for version in intent.versions]
    begin = f"{line}-v" if line else "v"
    numbers = count(len(intent.of_line(line)) + 1)
    return next(name for i in numbers if (name := f"{begin}{i}") not in taken)
