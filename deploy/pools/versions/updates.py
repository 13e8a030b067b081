"""Carries out orders about versions, drives rollouts step by step, and gives up hopeless ones."""

from collections.abc import Iterator

from deploy.model_source import is_remote
from deploy.pools.effects import PoolEffect
from deploy.pools.history import PoolHistory
from deploy.pools.orders import Abort, AddVersion, Finish, SetWeights
from deploy.pools.restarts import Restarts
from deploy.pools.versions import orders
from deploy.pools.versions.rollout import Scene, ended, next_change
from deploy.pools.wanted import Wanted
from deploy.pools.workers.orders import counts_text
from deploy.pools.workers.record import WorkerState
from deploy.pools.workers.registry import PoolWorkers
from engine.control import Intent

_COMING = (WorkerState.WAITING, WorkerState.STARTING, WorkerState.JOINING)


class VersionUpdates:
    """Owns the time for which a rollout has made no step."""

    def __init__(
        self, workers: PoolWorkers, wanted: Wanted, restarts: Restarts, history: PoolHistory
    ) -> None:
        self._workers = workers
        self._wanted = wanted
        self._restarts = restarts
        self._history = history
        self._stalled_s = 0.0  # fetches of a model do not count
        self._swept_s: float | None = None

    # ------------------------------------------------------------ orders

    def add(self, order: AddVersion, now_s: float) -> Iterator[PoolEffect]:
        """Adds a version."""
        version = order.version
        self._set(orders.added(self._wanted.intent, order, self._workers.room()))
        what = f"is to have {counts_text(version.pools)}"
        what += ", in place of all others" if order.takes_over else f" and weight {version.weight}"
        yield self._history.tell(now_s, version.name, what, "ordered")

    def set_weights(self, order: SetWeights, now_s: float) -> Iterator[PoolEffect]:
        """Sets the shares of new requests."""
        self._wanted.intent = orders.weighed(self._wanted.intent, order)
        for name, weight in order.weights.items():
            yield self._history.tell(now_s, name, f"has weight {weight}", "ordered")

    def finish(self, order: Finish, now_s: float) -> Iterator[PoolEffect]:
        """Lets a version replace all others."""
        room = self._workers.room()
        self._set(orders.finished(self._wanted.intent, order.name, order.pools, room))
        yield self._history.tell(now_s, order.name, "takes over from all others", "ordered")

    def abort(self, order: Abort, now_s: float) -> Iterator[PoolEffect]:
        """Removes a version."""
        yield from self._abort(order.name, "ordered", now_s)

    def _abort(self, name: str, why: str, now_s: float) -> Iterator[PoolEffect]:
        self._set(orders.aborted(self._wanted.intent, name))
        self._history.counters["updates aborted"] += 1
        what = f"leaves: {self._wanted.intent.current.name} goes on"
        yield self._history.tell(now_s, name, what, why)

    def _set(self, intent: Intent) -> None:
        self._wanted.intent, self._stalled_s = intent, 0.0

    # ------------------------------------------------------------ progress

    def roll(self, told: Intent, scene: Scene, now_s: float) -> Iterator[PoolEffect]:
        """Makes one step at most. Gateways must have been told of it before the next one."""
        intent = self._wanted.intent
        if len(intent.versions) == 1 and intent.rollout is None:
            return
        if (intent.versions, intent.rollout) != (told.versions, told.rollout):
            return  # the gateways' reports are about an earlier step
        step = next_change(intent, scene)
        if step is not None:
            self._set(step.intent)
            yield self._history.tell(now_s, step.subject, step.what, step.why)

    def sweep(self, now_s: float) -> Iterator[PoolEffect]:
        """Gives up a rollout that makes no step, and new versions that cannot start."""
        passed_s = 0.0 if self._swept_s is None else now_s - self._swept_s
        self._swept_s = now_s
        yield from self._give_up_rollout(passed_s, now_s)
        yield from self._give_up_new_versions(now_s)

    def _give_up_rollout(self, passed_s: float, now_s: float) -> Iterator[PoolEffect]:
        intent, timeout_s = self._wanted.intent, self._wanted.limits.update_timeout_s
        to = None if intent.rollout is None else intent.rollout.to
        if to is None or intent.current.is_over:  # it goes, and the next version becomes current
            return
        if any(version.is_leaving for version in intent.versions):
            self._stalled_s = 0.0  # running requests may take their time
        elif not self._fetches(to):
            self._stalled_s += passed_s
        why = self._why_hopeless(to)
        if why is None and self._stalled_s >= timeout_s:
            why = f"no step in {timeout_s:g} s"
        if why is None:
            return
        if intent.current.name != to:
            self._history.counters["updates given up"] += 1
            yield from self._abort(to, why, now_s)
        else:  # no earlier version is left to go back to
            self._wanted.intent = ended(intent)
            yield self._history.tell(now_s, to, "keeps its present workers", why)

    def _give_up_new_versions(self, now_s: float) -> Iterator[PoolEffect]:
        """Aborts versions beside the current one that do not serve and keep failing."""
        intent = self._wanted.intent
        if intent.rollout is not None or intent.current.is_over:
            return
        for version in intent.versions[1:]:
            own = [w for w in self._workers.by_id.values() if w.version == version.name]
            serves = any(w.prefills() for w in own) and any(w.decodes() for w in own)
            why = self._why_hopeless(version.name)
            if why is not None and not serves and not version.is_leaving:
                self._history.counters["updates given up"] += 1
                yield from self._abort(version.name, why, now_s)

    def _fetches(self, name: str) -> bool:
        """True if a worker of a version may be fetching the model; a fetch has its own deadline.

        A worker that ran before has the model already.
        """
        version = self._wanted.intent.version(name)
        return (
            version is not None
            and is_remote(version.model)
            and any(
                worker.version == name
                and worker.state is WorkerState.STARTING
                and not worker.has_run
                for worker in self._workers.by_id.values()
            )
        )

    def _why_hopeless(self, name: str) -> str | None:
        """Returns why a version cannot start: a worker that does not serve fails repeatedly."""
        for worker in self._workers.by_id.values():
            comes = worker.state in _COMING
            if worker.version == name and comes and self._restarts.is_looping(worker.worker_id):
                num_failed = self._restarts.num_failed(worker.worker_id)
                return f"{worker.worker_id} failed {num_failed} times in a row"
        return None
