"""Makes a version take over from the other versions. Pure: each step returns the next `Intent`.

A version takes over in these steps. Each step waits until the step before is complete.

1. The smallest pools that can serve the version are started beside all other versions, at weight 0.
   Gateways probe the version.
2. The version's share of new requests rises to its share of the workers. With a canary, the version
   first gets each of the canary's shares for a while.
3. The version gets one more worker if there is room. Otherwise another version loses one worker,
   but never the last worker of a role. Then step 2 follows again.
4. Once the version has all its workers, or no more room can be made, it gets all new requests. The
   other versions start to leave.
5. A leaving version is over when no gateway has a request of this version. Then its workers are
   stopped.
6. A version that is over and has no workers left is removed. If room was short, step 3 continues.

A leaving version gets no new requests. It keeps the workers that its running requests need.

An abort starts with step 4 in the other direction: the new version leaves. The other versions get
their shares of requests back at once. Then the current version gets its workers back by step 3, and
after that the other versions get theirs. If no version has lost a worker yet, the abort is complete
once the new version has left.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from deploy.pools.workers.record import PoolWorker, WorkerState
from engine.control import (
    FULL_WEIGHT,
    NO_WORKERS,
    SERVING_ROLES,
    GatewayReport,
    Intent,
    Pools,
    Version,
)
from engine.errors import ConfigError
from engine.messages import Role, WorkerId

MAX_FORMER = 4  # former versions that a rollback can choose from
MAX_VERSIONS = 4  # per line; each gateway has a router, a tokenizer and metrics for each version


@dataclass(frozen=True, slots=True)
class Scene:
    """The latest facts about workers and gateways, from which a rollout's next step is chosen.

    `reports` has an entry for each gateway: None if its report predates the present members.
    """

    workers: Mapping[WorkerId, PoolWorker]
    reports: Sequence[GatewayReport | None]
    room: int  # maximum number of workers that can serve

    def serving(self, name: str) -> Counter[Role | None]:
        """Counts the serving workers of a version by role."""
        return Counter(
            worker.target
            for worker in self.workers.values()
            if worker.version == name
            and worker.state is WorkerState.SERVING
            and worker.is_connected
        )

    def is_quiet(self, versions: Sequence[Version]) -> bool:
        """True if these versions have all their workers, and no worker is changing its state."""
        names = {version.name for version in versions}
        return all(is_complete(self.serving(v.name), v.pools) for v in versions) and all(
            worker.state in (WorkerState.SERVING, WorkerState.DRAINED) and worker.is_connected
            for worker in self.workers.values()
            if worker.version in names
        )

    def is_served(self, name: str) -> bool:
        """True if every gateway can place requests of a version."""
        return all(
            report is not None
            and (said := report.versions.get(name)) is not None
            and said.missing is None
            for report in self.reports
        )

    def fault_of_probes(self, name: str) -> str | None:
        """Returns the fault that gateways' probes of a version found. Empty if there is no fault.

        None until all gateways have probed the version.
        """
        said = [None if r is None else r.versions.get(name) for r in self.reports]
        probes = [None if each is None else each.probe for each in said]
        if None in probes:
            return None
        return next((probe for probe in probes if probe), "")

    def longest_len(self, names: Collection[str]) -> int:
        """Returns the tokens of the longest current or recent sequence of these versions."""
        lens = (
            said.longest_len
            for report in self.reports
            if report is not None
            for name, said in report.versions.items()
            if name in names
        )
        return max(lens, default=0)

    def most_len(self, version: Version) -> int | None:
        """Returns the tokens of the longest sequence that a version can hold; None if unknown."""
        own = [w for w in self.workers.values() if w.version == version.name and w.decodes()]
        if not own or any(worker.load is None for worker in own):
            return None
        blocks = max(w.load.num_blocks for w in own if w.load is not None)
        contexts = (worker.context_len for worker in own if worker.context_len)
        return min([blocks * version.worker.block_size, *contexts])

    def is_asked_for(self, name: str) -> bool:
        """True if a gateway has a request of a version.

        Requests that wait for workers count too.
        """
        return any(
            report is not None
            and (said := report.versions.get(name)) is not None
            and said.num_requests > 0
            for report in self.reports
        )

    def num_ended(self, name: str) -> int:
        """Returns the number of ended requests of a version, summed over gateways with a report."""
        return sum(
            said.num_ended
            for report in self.reports
            if report is not None and (said := report.versions.get(name)) is not None
        )

    def is_deserted(self, name: str) -> bool:
        """True if no gateway has a request of a version."""
        return all(
            report is not None
            and ((said := report.versions.get(name)) is None or said.num_requests == 0)
            for report in self.reports
        )


@dataclass(frozen=True, slots=True)
class RolloutStep:
    """A step of a rollout: the new intent, and the text that describes the step to operators."""

    intent: Intent
    subject: str
    what: str
    why: str = ""


def is_complete(serving: Mapping[Role | None, int], pools: Pools) -> bool:
    """True if each pool has its wanted number of serving workers."""
    return all(serving.get(role, 0) == pools.of(role) for role in SERVING_ROLES)


def least(pools: Pools) -> Pools:
    """Returns the smallest pools that can serve: one worker of each role, or one mixed worker."""
    if pools.prefill and pools.decode:
        return Pools(1, 1)
    return Pools(0, 0, 1)


def next_change(intent: Intent, scene: Scene, *, has_held: bool = True) -> RolloutStep | None:
    """Returns the next step of the intent's rollout, or None.

    `has_held`: the canary's present share has lasted long enough.
    """
    return _gone(intent, scene) or _over(intent, scene) or _rolled(intent, scene, has_held=has_held)


def _gone(intent: Intent, scene: Scene) -> RolloutStep | None:
    for version in intent.versions:
        if version.is_over and not any(w.version == version.name for w in scene.workers.values()):
            others = tuple(each for each in intent.versions if each is not version)
            changed = msgspec.structs.replace(intent, versions=others)
            return RolloutStep(changed, version.name, "is gone")
    return None


def _over(intent: Intent, scene: Scene) -> RolloutStep | None:
    for version in intent.versions:
        if version.is_leaving and not version.is_over and scene.is_deserted(version.name):
            changed = intent.changed(version.name, pools=NO_WORKERS)
            return RolloutStep(
                changed, version.name, "is over", "the last of its requests has ended"
            )
    return None


def _rolled(intent: Intent, scene: Scene, *, has_held: bool) -> RolloutStep | None:
    rollout = intent.rollout
    if rollout is None:
        return None
    to = named(intent, rollout.to)
    own = intent.of_line(to.line)
    concerned = [version for version in own if version.name not in rollout.stay]
    there = [version for version in concerned if not version.is_over]
    if not scene.is_quiet(there) or not scene.is_served(to.name):
        return None
    others = [version for version in concerned if version is not to]
    if not others and to.pools == rollout.pools:
        if rollout.stay:
            return RolloutStep(ended(intent), to.name, "has its workers back")
        return RolloutStep(ended(intent), to.name, "is the only version", "the update is complete")
    if rollout.canary and any(not version.is_leaving for version in others):
        return _canary(intent, to, others, has_held=has_held)
    return (
        _shared(intent, to, others)
        or _grown(intent, to, others, scene.room)
        or _alone(intent, to, others)
    )


def ended(intent: Intent) -> Intent:
    """Ends the rollout. Versions that stay get their former pools back."""
    rollout = intent.rollout
    assert rollout is not None
    for was in rollout.before:
        version = intent.version(was.name)
        if was.name in rollout.stay and version is not None and not version.is_leaving:
            intent = intent.changed(was.name, pools=was.pools)
    replaced = tuple(was for was in rollout.before if was.name not in (rollout.to, *rollout.stay))
    gone = [was for was in replaced if intent.version(was.name) is None]
    kept = [was for was in intent.former if was.name not in {was.name for was in gone}]
    return msgspec.structs.replace(intent, rollout=None, former=(*kept, *gone)[-MAX_FORMER:])


def _canary(
    intent: Intent, to: Version, others: Sequence[Version], *, has_held: bool
) -> RolloutStep | None:
    """Before step 2: gives the version the canary's shares of requests, each for a while."""
    rollout = intent.rollout
    assert rollout is not None
    share, *later = rollout.canary
    staying = {v.name: v.weight for v in others if not v.is_leaving}
    weights = {to.name: share, **dict(_scaled(staying, FULL_WEIGHT - share))}
    if any(named(intent, name).weight != weight for name, weight in weights.items()):
        changed = with_weights(intent, weights)
        why = f"it is watched for {rollout.hold_s:g} s"
        return RolloutStep(changed, to.name, f"has {share} % of the requests", why)
    if not has_held:
        return None
    changed = msgspec.structs.replace(
        intent, rollout=msgspec.structs.replace(rollout, canary=tuple(later))
    )
    return RolloutStep(changed, to.name, f"has served {share} % of the requests well")


def _shared(intent: Intent, to: Version, others: Sequence[Version]) -> RolloutStep | None:
    """Step 2: raises the version's share of new requests."""
    staying = [v for v in others if not v.is_leaving]
    if not staying:
        return None
    own, of_others = to.pools.total, sum(v.pools.total for v in staying)
    total = to.weight + sum(v.weight for v in staying)
    weight = max(
        round(FULL_WEIGHT * to.weight / total) if total else 0,
        round(FULL_WEIGHT * own / (own + of_others)),
    )
    rest = dict(_scaled({v.name: v.weight for v in staying}, FULL_WEIGHT - weight))
    weights = {to.name: weight, **rest}
    if all(v.weight == weights[v.name] for v in [to, *staying]):
        return None
    why = f"it has {own} of {own + of_others} workers"
    return RolloutStep(
        with_weights(intent, weights), to.name, f"has {weight} % of the requests", why
    )


def _scaled(parts: Mapping[str, int], total: int) -> Iterator[tuple[str, int]]:
    """Scales parts to whole numbers whose sum is `total`."""
    rest, left = sum(parts.values()), total
    for name, part in parts.items():
        share = round(left * part / rest) if rest else 0
        yield name, share
        rest, left = rest - part, left - share


def _grown(intent: Intent, to: Version, others: Sequence[Version], room: int) -> RolloutStep | None:
    """Step 3: changes the pools so that the version gets one more worker."""
    assert intent.rollout is not None
    lacking = {role: intent.rollout.pools.of(role) - to.pools.of(role) for role in SERVING_ROLES}
    role = max(SERVING_ROLES, key=lambda each: lacking[each])
    lacks = lacking[role] > 0
    for each in SERVING_ROLES:
        if lacks and lacking[each] < 0 and (other := without(to.pools, each, role)) is not None:
            changed = intent.changed(to.name, pools=other)
            return RolloutStep(changed, to.name, f"has a {role} worker in place of a {each} worker")
    if lacks and intent.num_wanted < room:
        changed = intent.changed(to.name, pools=to.pools.moved(Role.DRAINED, role))
        return RolloutStep(changed, to.name, f"gets one more {role} worker")
    for each in SERVING_ROLES:
        if lacking[each] < 0 and (fewer := without(to.pools, each)) is not None:
            changed = intent.changed(to.name, pools=fewer)
            return RolloutStep(changed, to.name, f"has one {each} worker less")
    if not lacks:
        return None
    spare = [
        (version, each, smaller)
        for version in others
        for each in SERVING_ROLES
        if (smaller := without(version.pools, each)) is not None
    ]
    if not spare:
        return None
    version, each, smaller = max(spare, key=lambda s: (s[1] is role, s[0].pools.of(s[1])))
    changed = intent.changed(version.name, pools=smaller)
    return RolloutStep(changed, version.name, f"has one {each} worker less", f"{to.name} gets it")


def without(pools: Pools, role: Role, other: Role = Role.DRAINED) -> Pools | None:
    """Returns pools with one worker moved from `role` to `other`, or removed.

    None if too few workers remain.
    """
    try:
        return pools.moved(role, other).check()
    except ConfigError:
        return None


def _alone(intent: Intent, to: Version, others: Sequence[Version]) -> RolloutStep | None:
    """Step 4: gives the version all new requests."""
    names = [version.name for version in others if not version.is_leaving]
    if not names:
        return None
    changed = intent.changed(to.name, weight=FULL_WEIGHT)
    for name in names:
        changed = changed.changed(name, weight=0, is_leaving=True)
    what = f"leaves: all new requests are for {to.name}"
    return RolloutStep(changed, ", ".join(names), what)


def with_weights(intent: Intent, weights: Mapping[str, int]) -> Intent:
    """Sets the weights of the named versions."""
    for name, weight in weights.items():
        intent = intent.changed(name, weight=weight)
    return intent


def named(intent: Intent, name: str) -> Version:
    """Returns the version of this name, which must exist."""
    version = intent.version(name)
    assert version is not None
    return version
