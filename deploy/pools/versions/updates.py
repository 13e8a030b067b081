"""Carries out orders about versions, drives rollouts, and aborts rollouts that cannot succeed."""

from collections.abc import Iterator
from dataclasses import replace

import msgspec

from deploy.fetching.names import is_remote
from deploy.pools.events import PoolEffect
from deploy.pools.orders import Abort, AddVersion, Finish, Rollback, SetWeights
from deploy.pools.versions import orders
from deploy.pools.versions.canary import CanaryStanding, CanaryWatch, hung_of, tally
from deploy.pools.versions.rollout import Scene, ended, named, next_change
from deploy.pools.workers.orders import counts_text
from deploy.pools.workers.record import WorkerState
from deploy.pools.workers.registry import PoolWorkers
from engine.control import Intent, Rollout, Version

_COMING = (WorkerState.WAITING, WorkerState.STARTING, WorkerState.JOINING)


class VersionUpdates:
    """Handles orders about versions, and drives rollouts.

    Owns the time since a rollout's last step.
    """

    def __init__(self, workers: PoolWorkers) -> None:
        self._workers = workers
        self._state = workers.state
        self._canary = CanaryWatch(self._state.limits.update)
        self._stalled_s = 0.0  # time without a step; fetches do not count
        self._swept_s: float | None = None

    # ------------------------------------------------------------ orders

    def add(self, order: AddVersion, now_s: float) -> Iterator[PoolEffect]:
        """Adds a version."""
        version, update = order.version, self._state.limits.update
        order = replace(
            order,
            canary=update.canary if order.canary is None else order.canary,
            hold_s=update.hold_s if order.hold_s is None else order.hold_s,
        )
        self._set(orders.added(self._state.intent, order, self._workers.room()))
        what = f"is to have {counts_text(version.pools)}"
        what += ", in place of all others" if order.takes_over else f" and weight {version.weight}"
        yield self._state.record(now_s, version.name, what, "ordered")

    def set_weights(self, order: SetWeights, now_s: float) -> Iterator[PoolEffect]:
        """Sets the shares of new requests."""
        self._state.intent = orders.weighed(self._state.intent, order)
        for name, weight in order.weights.items():
            yield self._state.record(now_s, name, f"has weight {weight}", "ordered")

    def finish(self, order: Finish, now_s: float) -> Iterator[PoolEffect]:
        """Starts a rollout in which one version replaces all other versions."""
        room = self._workers.room()
        self._set(orders.finished(self._state.intent, order.name, order.pools, room))
        yield self._state.record(now_s, order.name, "takes over from all others", "ordered")

    def abort(self, order: Abort, now_s: float) -> Iterator[PoolEffect]:
        """Removes a version."""
        yield from self._abort(order.name, "ordered", now_s)

    def rollback(self, order: Rollback, now_s: float) -> Iterator[PoolEffect]:
        """Makes a former version take over again, or aborts the running takeover."""
        intent = self._state.intent
        rollout = intent.rollout
        if rollout is not None and order.name in (None, current_beside(intent, rollout).name):
            yield from self._abort(rollout.to, "rolled back", now_s)
            return
        was = orders.former(intent, order.name)
        pools = was.pools if was.asleep is None else was.asleep.pools
        newcomer = msgspec.structs.replace(
            was, pools=pools, weight=0, is_leaving=False, asleep=None
        )
        yield from self.add(AddVersion(newcomer, takes_over=True), now_s)

    def _abort(self, name: str, why: str, now_s: float) -> Iterator[PoolEffect]:
        self._set(orders.aborted(self._state.intent, name))
        self._state.counters["updates aborted"] += 1
        line = named(self._state.intent, name).line
        what = f"leaves: {self._state.intent.of_line(line)[0].name} goes on"
        yield self._state.record(now_s, name, what, why)

    def _set(self, intent: Intent) -> None:
        self._state.intent, self._stalled_s = intent, 0.0

    # ------------------------------------------------------------ progress

    def roll(self, told: Intent, scene: Scene, now_s: float) -> Iterator[PoolEffect]:
        """Makes at most one step. Makes no step before gateways have received the previous step."""
        intent = self._state.intent
        if len(intent.versions) == 1 and intent.rollout is None:
            return
        if (intent.versions, intent.rollout) != (told.versions, told.rollout):
            return  # the gateways' reports still refer to an earlier step
        why, has_held = self._judge(intent, scene, now_s)
        if why is not None and intent.rollout is not None:
            self._state.counters["updates given up"] += 1
            yield from self._abort(intent.rollout.to, why, now_s)
            return
        step = None if has_held is None else next_change(intent, scene, has_held=has_held)
        if step is not None:
            self._set(step.intent)
            yield self._state.record(now_s, step.subject, step.what, step.why)

    @property
    def canary(self) -> CanaryStanding | None:
        """The results of the version that takes over.

        None if there is no version that could be aborted.
        """
        intent = self._state.intent
        return self._canary.standing if _may_be_given_up(intent) else None

    def _judge(self, intent: Intent, scene: Scene, now_s: float) -> tuple[str | None, bool | None]:
        """Returns the reason to abort the version that takes over, and if its share has lasted
        enough.

        The version is judged only while another version could take its requests back. The second
        value is None until the version has been probed and its workers have reported their longest
        sequence.
        """
        rollout = intent.rollout
        if rollout is None or not _may_be_given_up(intent):
            return None, True
        self._canary.rules = self._state.limits.update  # an operator may have changed the rules
        to = named(intent, rollout.to)
        others = [each.name for each in intent.of_line(to.line) if each is not to]
        if None in scene.reports:
            return None, False
        if not to.weight:
            self._canary.remove()
            fault = scene.fault_of_probes(to.name)
            if fault is None:
                return None, None
            if fault:
                return f"it was probed: {fault}", True
            return self._too_short(intent, scene, others)
        new, reports = tally(scene.reports, [to.name]), scene.reports
        hung = hung_of(reports, [to.name]), hung_of(reports, others)
        step = to.name, to.weight
        why = self._canary.check(step, new, tally(reports, others), now_s, hung)
        return why, self._canary.has_held(new, rollout.hold_s, now_s)

    @staticmethod
    def _too_short(
        intent: Intent, scene: Scene, others: list[str]
    ) -> tuple[str | None, bool | None]:
        """Returns the reason to abort a version that cannot hold other versions' sequences.

        The second value is as in `_judge`.
        """
        rollout = intent.rollout
        assert rollout is not None
        to = named(intent, rollout.to)
        most_len, longest_len = scene.most_len(to), scene.longest_len(others)
        if rollout.allows_shorter or not longest_len:
            return None, True
        if most_len is None:
            return None, None if scene.serving(to.name) else True
        if longest_len <= most_len:
            return None, True
        return (
            f"it can hold {most_len:,} tokens of a request, and one of {longest_len:,} "
            "runs or ran lately; --allow-shorter lets it take over"
        ), True

    def sweep(self, now_s: float) -> Iterator[PoolEffect]:
        """Aborts a rollout that makes no progress, and new versions that cannot start."""
        passed_s = 0.0 if self._swept_s is None else now_s - self._swept_s
        self._swept_s = now_s
        yield from self._give_up_rollout(passed_s, now_s)
        yield from self._give_up_new_versions(now_s)

    def _give_up_rollout(self, passed_s: float, now_s: float) -> Iterator[PoolEffect]:
        intent, timeout_s = self._state.intent, self._state.limits.pools.update_timeout_s
        rollout = intent.rollout
        if rollout is None or current_beside(intent, rollout).is_over:
            return  # the current version is being removed; the next one becomes current
        to = rollout.to
        if any(version.is_leaving for version in intent.versions):
            self._stalled_s = 0.0  # the running requests of a leaving version have no deadline
        elif not self._fetches(to):
            self._stalled_s += passed_s
        why = self._why_hopeless(to)
        if why is None and self._stalled_s >= timeout_s + rollout.hold_s:
            why = f"no step in {timeout_s:g} s"
        if why is None:
            return
        if current_beside(intent, rollout).name != to:
            self._state.counters["updates given up"] += 1
            yield from self._abort(to, why, now_s)
        else:  # there is no earlier version to which requests could go back
            self._state.intent = ended(intent)
            yield self._state.record(now_s, to, "keeps its present workers", why)

    def _give_up_new_versions(self, now_s: float) -> Iterator[PoolEffect]:
        """Aborts new versions that do not serve because their workers keep failing."""
        intent = self._state.intent
        if intent.rollout is not None:
            return
        for version in intent.versions:
            current = intent.of_line(version.line)[0]
            if version is current or current.is_over:
                continue
            own = [w for w in self._workers.by_id.values() if w.version == version.name]
            serves = any(w.prefills() for w in own) and any(w.decodes() for w in own)
            why = self._why_hopeless(version.name)
            if why is not None and not serves and not version.is_leaving:
                self._state.counters["updates given up"] += 1
                yield from self._abort(version.name, why, now_s)

    def _fetches(self, name: str) -> bool:
        """True if a worker of a version may be fetching the model. A fetch has its own deadline.

        A worker that has run before has the model already.
        """
        version = self._state.intent.version(name)
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
        """Returns the reason why a version cannot start, or None.

        A version cannot start if a worker keeps failing before it serves.
        """
        for worker in self._workers.by_id.values():
            comes = worker.state in _COMING
            if (
                worker.version == name
                and comes
                and self._state.restarts.is_looping(worker.worker_id)
            ):
                num_failed = self._state.restarts.num_failed(worker.worker_id)
                return f"{worker.worker_id} failed {num_failed} times in a row"
        return None


def _may_be_given_up(intent: Intent) -> bool:
    """True while a version takes over and another version could take its requests back."""
    rollout = intent.rollout
    if rollout is None or rollout.stay:
        return False
    current = current_beside(intent, rollout)
    return current.name != rollout.to and not current.is_over


def current_beside(intent: Intent, rollout: Rollout) -> Version:
    """Returns the current version of the line in which this rollout is under way."""
    return intent.of_line(named(intent, rollout.to).line)[0]
