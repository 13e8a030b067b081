"""Reads declarations and updates, compares them with the running deployment, and returns orders.

A declaration is a TOML file of `baton serve`, or baton.yaml.

Settings that the file omits keep their running values. There are three kinds of settings:

- of a version: `model`, `gateway.model_name` and `[worker]`. A changed setting makes a new version,
  which takes over. A changed setting in `[models.NAME]` makes a new version of that model. Only one
  version takes over at a time.
- of the controller: pools, `[planner]`, `[update]`, and `LIVE_POOLS`. These change at once.
- all other settings are read at the start of a process, so changing them needs a restart.

While the planner is on, it sets the pools: the declared numbers apply only at the start.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import count
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from deploy.admin.schema import RESTART, Declaration, Difference, PoolCounts, UpdateBody
from deploy.base.defaults import load_up_config, pools_of, read_yaml
from deploy.model_source import pinned
from deploy.pools.formats import check_version
from deploy.pools.orders import AddVersion, Adjust, SetPlanner, SetPools
from deploy.pools.versions.rollout import least
from engine.config import (
    UNSET,
    Config,
    DeviceKind,
    ModelConfig,
    PlannerMode,
    WorkerConfig,
    check_canary,
    config_of,
    load_config,
    read_toml,
)
from engine.config_reference import SECRETS
from engine.control import (
    MAIN_LINE,
    SERVING_ROLES,
    Intent,
    LiveSettings,
    Pools,
    Version,
    first_name,
)
from engine.errors import ConfigError

POOLS, PLANNER = "baton pools set", "baton planner"
UPDATE, APPLY = "baton update", "baton apply"
MODELS = "models"
HIDDEN = "(hidden)"
LIVE_POOLS = (
    *("max_workers", "spares", "price_per_hour"),
    *("drain_timeout_s", "update_timeout_s", "inexact_after_s"),
)
_COUNTS = tuple(role.value for role in SERVING_ROLES)
# If these settings are unset, Baton chooses their values at its start and keeps the values.
_CHOSEN = (
    *("gateway.model_name", "gateway.processes", "admin.key"),
    *(f"pools.{name}" for name in _COUNTS),
)


class Declared:
    """Compares a declaration with the running deployment.

    Raises ConfigError if the declaration cannot be applied.
    """

    def __init__(self, body: Declaration, started: Config, intent: Intent) -> None:
        """`started` is the configuration in force, without the settings of the current version."""
        self._body = body
        self._intent = intent
        self._current = intent.current
        self._running = running = _running(started, intent)
        tree = msgspec.to_builtins(running)
        for section, keys in body.settings.items():
            left = {name for name in keys if _is_left_to_baton(section, name, keys[name])}
            tree.setdefault(section, {}).update({n: v for n, v in keys.items() if n not in left})
        self._config = config_of(tree, source="declared")
        self._pools = pools_of(self._config.pools)
        self._said = [
            (section, name)
            for section, keys in body.settings.items()
            if section != MODELS
            for name in keys
        ]
        self.differences = list(self._found())

    def _found(self) -> Iterator[Difference]:
        if self._body.model not in (None, self._current.model):
            yield Difference("model", self._current.model, self._body.model, UPDATE)
        for section, name in self._said:
            key = f"{section}.{name}"
            runs, value = (
                getattr(getattr(config, section), name) for config in (self._running, self._config)
            )
            is_planned = section == "pools" and name in _COUNTS and self._planner_decides
            if value == runs or is_planned:
                continue
            if key in SECRETS:
                runs = value = HIDDEN
            runs, value = msgspec.to_builtins(runs), msgspec.to_builtins(value)
            yield Difference(key, runs, value, _order_for(section, name))
        for name in self._body.settings.get(MODELS, {}):
            found = _of_model(name, self._running.models.get(name), self._config.models[name])
            yield from (each for each in found if each.order != POOLS or not self._planner_decides)

    @property
    def _planner_decides(self) -> bool:
        return self._config.planner.mode is PlannerMode.ON

    def orders(self) -> list[Adjust | SetPlanner | SetPools | UpdateBody]:
        """Returns the orders that apply the differences, except differences that need a restart.

        Only one version takes over at a time, so changed versions of other models are ordered
        later.
        """
        found: list[Adjust | SetPlanner | SetPools | UpdateBody] = []
        by_order = {
            order: [
                each.key
                for each in self.differences
                if each.order == order and not each.key.startswith(f"{MODELS}.")
            ]
            for order in (APPLY, PLANNER, UPDATE, POOLS)
        }
        if by_order[APPLY]:
            found.append(Adjust(self._adjusted(by_order[APPLY])))
        if by_order[PLANNER]:
            found.append(SetPlanner(self._config.planner.mode))
        if by_order[UPDATE]:
            found.append(self._update(by_order[UPDATE], counts=bool(by_order[POOLS])))
        elif by_order[POOLS]:
            found.append(SetPools(self._pools))
        for name in self._body.settings.get(MODELS, {}):
            found += self._orders_of_model(name)
        updates = [each for each in found if isinstance(each, UpdateBody)]
        return [*(each for each in found if each not in updates), *updates[:1]]

    def _orders_of_model(self, name: str) -> Iterator[SetPools | UpdateBody]:
        of_model = [each for each in self.differences if each.key.startswith(f"{MODELS}.{name}.")]
        orders = {each.order for each in of_model}
        if not orders & {UPDATE, POOLS}:
            return
        declared = self._config.models[name]
        pools = pools_of(declared)
        if UPDATE not in orders:
            yield SetPools(pools, version=self._intent.of_line(name)[0].name)
            return
        settings = [each.key.rpartition(".")[2] for each in of_model if ".worker." in each.key]
        worker = msgspec.to_builtins(declared.worker)
        is_other = any(each.key == f"{MODELS}.{name}.model" for each in of_model)
        yield UpdateBody(
            of=name,
            model=declared.model if is_other else None,
            worker={setting: worker[setting] for setting in settings} or None,
            pools=PoolCounts(*(pools.of(role) for role in SERVING_ROLES)),
        )

    def _adjusted(self, keys: list[str]) -> LiveSettings:
        """Returns the running sections of the configuration, in which these keys have their
        declared values.
        """
        names = LiveSettings.__struct_fields__
        sections: dict[str, Any] = {name: getattr(self._running, name) for name in names}
        for key in keys:
            section, _, name = key.partition(".")
            value = getattr(getattr(self._config, section), name)
            sections[section] = msgspec.structs.replace(sections[section], **{name: value})
        return LiveSettings(**sections)

    def _update(self, keys: list[str], *, counts: bool) -> UpdateBody:
        worker = msgspec.to_builtins(self._config.worker)
        names = [key.partition(".")[2] for key in keys if key.startswith("worker.")]
        gateway = self._config.gateway
        return UpdateBody(
            model=self._body.model if "model" in keys else None,
            model_name=gateway.model_name if "gateway.model_name" in keys else None,
            worker={name: worker[name] for name in names} or None,
            pools=PoolCounts(*(self._pools.of(role) for role in SERVING_ROLES)) if counts else None,
        )


def _running(started: Config, intent: Intent) -> Config:
    """Returns the configuration, in which operators' values replace the values at the start."""
    current = intent.current
    counts = {role.value: current.pools.of(role) for role in SERVING_ROLES}
    replace = msgspec.structs.replace
    return replace(
        started,
        worker=current.worker,
        gateway=replace(started.gateway, model_name=current.model_name),
        pools=replace(started.pools, **counts),
        planner=replace(started.planner, mode=intent.planner),
        models={name: _as_it_runs(name, each, intent) for name, each in started.models.items()},
    )


def _as_it_runs(name: str, started: ModelConfig, intent: Intent) -> ModelConfig:
    """Returns a model's declaration at the start, changed by the operators' later orders."""
    current = intent.of_line(name)[0]
    is_first = current.name == first_name(name)  # its model name is as the operator wrote it
    pools = current.pools if current.asleep is None else current.asleep.pools
    return msgspec.structs.replace(
        started,
        model=started.model if is_first else current.model,
        worker=current.worker,
        **{role.value: pools.of(role) for role in SERVING_ROLES},
    )


def _of_model(
    name: str, running: ModelConfig | None, declared: ModelConfig
) -> Iterator[Difference]:
    """Yields the differences between declared and running settings of a model other than the main
    one.
    """
    if running is None:
        yield Difference(f"{MODELS}.{name}", None, declared.model, RESTART)
        return
    for key, order in (("model", UPDATE), ("idle_s", RESTART)):
        runs, value = getattr(running, key), getattr(declared, key)
        if runs != value:
            yield Difference(f"{MODELS}.{name}.{key}", runs, value, order)
    ours, theirs = pools_of(running), pools_of(declared)
    for role in SERVING_ROLES:
        if ours.of(role) != theirs.of(role):
            key = f"{MODELS}.{name}.{role.value}"
            yield Difference(key, ours.of(role), theirs.of(role), POOLS)
    before, after = (msgspec.to_builtins(each.worker) for each in (running, declared))
    for key in before:
        if before[key] != after[key]:
            yield Difference(f"{MODELS}.{name}.worker.{key}", before[key], after[key], UPDATE)


def _is_left_to_baton(section: str, name: str, value: object) -> bool:
    return f"{section}.{name}" in _CHOSEN and value in (None, UNSET)


def _order_for(section: str, name: str) -> str:
    if section == "worker" or (section, name) == ("gateway", "model_name"):
        return UPDATE
    if section == "pools" and name in _COUNTS:
        return POOLS
    if (section, name) == ("planner", "mode"):
        return PLANNER
    is_live = section in ("planner", "update") or (section == "pools" and name in LIVE_POOLS)
    return APPLY if is_live else RESTART


def order_of(
    body: UpdateBody, intent: Intent, device_of: Callable[[WorkerConfig], DeviceKind]
) -> AddVersion:
    """Returns the order for an update. Omitted fields get their values from the current version.

    `device_of` returns the kind of device of workers with a configuration.

    Without a weight the version takes over. If the model is a branch, this function requests the
    branch's commit from the hub. So call this function in a thread. Raises ConfigError.
    """
    current = _current_of(body.of or MAIN_LINE, intent)
    worker = _changed(current.worker, body.worker or {})
    draft = worker.draft_path
    if draft is not None and not draft.is_dir():
        raise ConfigError(f"{draft}: no such model directory")
    awake = current.pools if current.asleep is None else current.asleep.pools
    otherwise = awake if body.weight is None else least(awake)
    pools = counted(body.pools, otherwise)
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


def counted(counts: PoolCounts | None, otherwise: Pools) -> Pools:
    """Returns the given counts, with 0 for omitted roles.

    Returns `otherwise` if no counts are given.
    """
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


def read_declaration(path: Path) -> Declaration:
    """Returns the settings in the file. Environment variables are ignored.

    Raises ConfigError.
    """
    model: str | None = None
    if path.suffix in (".yaml", ".yml"):
        up, tree = load_up_config(path), read_yaml(path)
        config, model = up.config, up.model if "model" in tree else None
    else:
        config, tree = load_config(path, {}, {}), read_toml(path)
    values = msgspec.to_builtins(config)
    sections = [name for name in Config.__struct_fields__ if tree.get(name)]
    settings = {name: {key: values[name][key] for key in tree[name]} for name in sections}
    return Declaration(absolute(model), settings)


def absolute(model: str | None) -> str | None:
    """Makes a local directory absolute: other processes have other working directories."""
    if model is not None and Path(model).is_dir():
        return str(Path(model).resolve())
    return model
