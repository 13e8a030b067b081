"""Compares a declaration with the running deployment, and returns the orders to apply it. Pure.

Settings that the file omits keep their running values. There are three kinds of settings:

- of a version: `model`, `gateway.model_name` and `[worker]`. A changed setting makes a new version,
  which takes over. The same holds for `[models.NAME]` and a version of that model. Only one version
  takes over at a time.
- of the controller: pools, `[planner]`, `[update]`, and `LIVE_POOLS`. These change at once.
- all other settings are read at the start of a process, so changing them needs a restart.

While the planner is on, it sets the pools: the declared numbers apply only at the start.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from deploy.admin.schema import RESTART, Declaration, Difference, PoolCounts, UpdateBody
from deploy.base.defaults import pools_of
from deploy.pools.orders import Adjust, SetPlanner, SetPools
from engine.config import UNSET, Config, ModelConfig, PlannerMode, config_of
from engine.config_reference import SECRETS
from engine.control import SERVING_ROLES, Intent, LiveSettings, first_name

POOLS, PLANNER = "baton pools set", "baton planner"
UPDATE, APPLY = "baton update", "baton apply"
MODELS = "models"
HIDDEN = "(hidden)"
LIVE_POOLS = (
    *("max_workers", "spares", "price_per_hour"),
    *("drain_timeout_s", "update_timeout_s", "inexact_after_s"),
)
_COUNTS = tuple(role.value for role in SERVING_ROLES)
# If unset, Baton chooses these values at its start, and they keep running.
_CHOSEN = (
    *("gateway.model_name", "gateway.processes", "admin.key"),
    *(f"pools.{name}" for name in _COUNTS),
)


class Declared:
    """A declaration and the running deployment. Raises ConfigError if it cannot be applied."""

    def __init__(self, body: Declaration, started: Config, intent: Intent) -> None:
        """`started` is the configuration in force, independent of the current version."""
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

        Only one version takes over at a time: other models' versions follow.
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
        """Returns the running sections with the declared values of these keys."""
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
    """Returns the configuration with the intent's values of the same settings."""
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
    """Returns a model's declaration at the start, with the operators' later changes."""
    current = intent.of_line(name)[0]
    is_first = current.name == first_name(name)  # the model name is as the operator wrote it
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
    """Yields the differences of a model other than the main model."""
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
