"""Puts models without requests to sleep, and wakes them for the next request. Pure.

A model with `idle_s` can sleep: then it has no workers. Gateways still list a sleeping model, and
queue its requests. A version falls asleep in two cases:

1. The version has had no request for `idle_s` seconds.
2. Another model must wake up, and there is no room for its workers. Then the least recently used
   model without a running request falls asleep.

A version wakes up when a gateway reports a request for this version. During an update, a model
stays awake.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from deploy.pools.events import PoolEffect
from deploy.pools.versions.rollout import Scene
from deploy.pools.workers.registry import PoolWorkers
from engine.control import NO_WORKERS, Asleep, Intent, Version


@dataclass(slots=True)
class _Use:
    """The time of a version's last use, and the number of its ended requests at that time."""

    at_s: float
    num_ended: int


class ModelSleep:
    """Records the last use of each model, puts models to sleep and wakes them."""

    def __init__(self, workers: PoolWorkers) -> None:
        self._workers = workers
        self._state = workers.state
        self._used: dict[str, _Use] = {}  # by version: its last use
        self._waiting: str | None = None  # a version that lacks room to wake

    def check(self, told: Intent, scene: Scene, now_s: float) -> Iterator[PoolEffect]:
        """Puts at most one version to sleep, or wakes one.

        Does nothing until gateways have received the previous change.
        """
        intent, self._waiting = self._state.intent, None
        versions = [each for line in self._state.limits.idle_s for each in self._able(line)]
        self._record_use(versions, scene, now_s)
        if (intent.versions, intent.rollout) != (told.versions, told.rollout):
            return
        for version in versions:
            if version.asleep is not None and scene.is_asked_for(version.name):
                yield from self._wake(version, versions, scene, now_s)
                return
        for version in versions:
            idle_s = self._state.limits.idle_s[version.line]
            passed_s = now_s - self._used[version.name].at_s
            if passed_s >= idle_s and self._may_sleep(version, scene):
                yield self._put_to_sleep(version, f"no request for {idle_s:g} s", now_s)
                return

    def troubles(self) -> Iterator[str]:
        """Yields a sentence if a request waits for a model that cannot wake up for lack of room."""
        if self._waiting is not None:
            limits = self._state.limits
            why = f": {limits.why_no_more}" if limits.why_no_more else ""
            most = f"there can be {limits.max_workers} workers, and all are in use"
            yield f"{self._waiting} is asked for and cannot wake: {most}{why}"

    def _able(self, line: str) -> Iterator[Version]:
        """Yields the version of a line, unless a rollout is replacing it."""
        own, rollout = self._state.intent.of_line(line), self._state.intent.rollout
        is_rolling = rollout is not None and any(version.name == rollout.to for version in own)
        if len(own) == 1 and not is_rolling:
            yield own[0]

    def _record_use(self, versions: list[Version], scene: Scene, now_s: float) -> None:
        before, self._used = self._used, {}
        for version in versions:
            num_ended = scene.num_ended(version.name)
            use = before.get(version.name) or _Use(now_s, num_ended)
            is_used = scene.is_asked_for(version.name) or num_ended != use.num_ended
            # Idle time is counted from the last use or wake-up, while gateways can take requests.
            if is_used or version.asleep is not None or not scene.reports:
                use = _Use(now_s, num_ended)
            self._used[version.name] = use

    def _may_sleep(self, version: Version, scene: Scene) -> bool:
        return (
            version.asleep is None and scene.is_deserted(version.name) and scene.is_quiet([version])
        )

    def _wake(
        self, version: Version, versions: list[Version], scene: Scene, now_s: float
    ) -> Iterator[PoolEffect]:
        assert version.asleep is not None
        wanted, pools = self._state, version.asleep.pools
        if wanted.intent.num_wanted + pools.total <= self._workers.room():
            wanted.intent = wanted.intent.changed(version.name, pools=pools, asleep=None)
            self._state.counters["models woken"] += 1
            yield self._state.record(now_s, version.name, "wakes", "a request waits for it")
            return
        idle = [each for each in versions if self._may_sleep(each, scene)]
        if idle:
            least = min(idle, key=lambda each: self._used[each.name].at_s)
            yield self._put_to_sleep(least, f"{version.name} needs its room", now_s)
        else:
            self._waiting = version.name

    def _put_to_sleep(self, version: Version, why: str, now_s: float) -> PoolEffect:
        own = [w for w in self._workers.by_id.values() if w.version == version.name]
        asleep = Asleep(version.pools, max(worker.context_len for worker in own))
        intent = self._state.intent
        self._state.intent = intent.changed(version.name, pools=NO_WORKERS, asleep=asleep)
        self._state.counters["models put to sleep"] += 1
        return self._state.record(now_s, version.name, "falls asleep", why)
