"""How a version comes, takes over from the others, or goes again. Pure: from an `Intent` the next.

A version that takes over does so by steps, each when the one before has come true:

1. its least pools are started beside all others, at weight 0
2. it has as large a share of the requests as it has of the workers, or the one that it had
3. it gets one worker more, where there is room; else the others have one less, but never less than
   one of each role. Then 2 again
4. it has all that it is to have, or there is no more room to be had so: it gets all requests, and
   the others leave
5. one that leaves, and of whose requests no gateway has any more, is over: its workers go
6. without workers it is gone; 3 goes on where there was no room

A version that leaves takes no new requests, and keeps what serves those that it has for as long as
they run. To abort begins with 4, in the other direction: the others have their shares of the
requests again at once, the current version gets its workers back by 3, and then each other one that
served beside it. Before anything was taken from anybody the newcomer leaves, and that is all.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from deploy.pools.events import AddVersion, OrderRefused, SetWeights, Worker, WorkerState
from engine.control import (
    FULL_WEIGHT,
    SERVING_ROLES,
    GatewayReport,
    Intent,
    Pools,
    Rollout,
    Version,
)
from engine.errors import ConfigError
from engine.messages import Role, WorkerId

MAX_VERSIONS = 4  # at once; each has a router, a tokenizer and series of metrics in each gateway
MAX_WEIGHT = 1_000_000
MAX_NAME_LEN = 64
NOTHING = Pools(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Scene:
    """What was seen. `reports`: of gateways that serve; None where one has not said what it does
    with the members of now.
    """

    workers: Mapping[WorkerId, Worker]
    reports: Sequence[GatewayReport | None]
    room: int  # for workers that are to serve

    def serving(self, name: str) -> Counter[Role | None]:
        """Workers of a version that serve, by role."""
        return Counter(
            worker.target
            for worker in self.workers.values()
            if worker.version == name
            and worker.state is WorkerState.SERVING
            and worker.is_connected
        )

    def is_quiet(self, versions: Sequence[Version]) -> bool:
        """Whether these versions have what they are to have, and none of it is about to change."""
        names = {version.name for version in versions}
        return all(is_complete(self.serving(v.name), v.pools) for v in versions) and all(
            worker.state in (WorkerState.SERVING, WorkerState.DRAINED) and worker.is_connected
            for worker in self.workers.values()
            if worker.version in names
        )

    def is_served(self, name: str) -> bool:
        """Whether every gateway can give requests to a version."""
        return all(
            report is not None
            and (said := report.versions.get(name)) is not None
            and said.missing is None
            for report in self.reports
        )

    def is_deserted(self, name: str) -> bool:
        """Whether no gateway has a request of a version, nor takes one."""
        return all(
            report is not None
            and ((said := report.versions.get(name)) is None or said.num_requests == 0)
            for report in self.reports
        )


@dataclass(frozen=True, slots=True)
class Change:
    """What is wanted from now on, and what an operator is told of it."""

    intent: Intent
    subject: str
    what: str
    why: str = ""


def is_complete(serving: Mapping[Role | None, int], pools: Pools) -> bool:
    """Whether as many serve as are wanted."""
    return all(serving.get(role, 0) == pools.of(role) for role in SERVING_ROLES)


def least(pools: Pools) -> Pools:
    """As few workers as can serve, of the same kind."""
    if pools.prefill and pools.decode:
        return Pools(1, 1)
    return Pools(0, 0, 1)


# ---------------------------------------------------------------- what happens by itself


def next_change(intent: Intent, scene: Scene) -> Change | None:
    """None where nothing is to be changed now."""
    return _gone(intent, scene) or _over(intent, scene) or _rolled(intent, scene)


def _gone(intent: Intent, scene: Scene) -> Change | None:
    for version in intent.versions:
        if version.is_over and not any(w.version == version.name for w in scene.workers.values()):
            others = tuple(each for each in intent.versions if each is not version)
            changed = msgspec.structs.replace(intent, versions=others)
            return Change(changed, version.name, "is gone")
    return None


def _over(intent: Intent, scene: Scene) -> Change | None:
    for version in intent.versions:
        if version.is_leaving and not version.is_over and scene.is_deserted(version.name):
            changed = intent.changed(version.name, pools=NOTHING)
            return Change(changed, version.name, "is over", "the last of its requests has ended")
    return None


def _rolled(intent: Intent, scene: Scene) -> Change | None:
    rollout = intent.rollout
    if rollout is None:
        return None
    to = _named(intent, rollout.to)
    concerned = [version for version in intent.versions if version.name not in rollout.stay]
    there = [version for version in concerned if not version.is_over]
    if not scene.is_quiet(there) or not scene.is_served(to.name):
        return None
    others = [version for version in concerned if version is not to]
    if not others and to.pools == rollout.pools:
        if rollout.stay:
            return Change(ended(intent), to.name, "has its workers back")
        return Change(ended(intent), to.name, "is all there is", "the update is complete")
    return (
        _shared(intent, to, others)
        or _grown(intent, to, others, scene.room)
        or _alone(intent, to, others)
    )


def ended(intent: Intent) -> Intent:
    """Nothing takes over any more; those that stayed are to have what they had."""
    rollout = intent.rollout
    assert rollout is not None
    for was in rollout.before:
        version = intent.version(was.name)
        if was.name in rollout.stay and version is not None and not version.is_leaving:
            intent = intent.changed(was.name, pools=was.pools)
    return msgspec.structs.replace(intent, rollout=None)


def _shared(intent: Intent, to: Version, others: Sequence[Version]) -> Change | None:
    """Step 2."""
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
    return Change(with_weights(intent, weights), to.name, f"has {weight} % of the requests", why)


def _scaled(parts: Mapping[str, int], total: int) -> Iterator[tuple[str, int]]:
    """The same proportions, as whole numbers of that sum."""
    rest, left = sum(parts.values()), total
    for name, part in parts.items():
        share = round(left * part / rest) if rest else 0
        yield name, share
        rest, left = rest - part, left - share


def _grown(intent: Intent, to: Version, others: Sequence[Version], room: int) -> Change | None:
    """Step 3."""
    assert intent.rollout is not None
    lacking = {role: intent.rollout.pools.of(role) - to.pools.of(role) for role in SERVING_ROLES}
    role = max(SERVING_ROLES, key=lambda each: lacking[each])
    lacks = lacking[role] > 0
    for each in SERVING_ROLES:
        if lacks and lacking[each] < 0 and (other := _without(to.pools, each, role)) is not None:
            changed = intent.changed(to.name, pools=other)
            return Change(changed, to.name, f"has a {role} worker in place of a {each} worker")
    if lacks and sum(version.pools.total for version in intent.versions) < room:
        changed = intent.changed(to.name, pools=to.pools.moved(Role.DRAINED, role))
        return Change(changed, to.name, f"gets one more {role} worker")
    for each in SERVING_ROLES:
        if lacking[each] < 0 and (fewer := _without(to.pools, each)) is not None:
            changed = intent.changed(to.name, pools=fewer)
            return Change(changed, to.name, f"has one {each} worker less")
    if not lacks:
        return None
    spare = [
        (version, each, smaller)
        for version in others
        for each in SERVING_ROLES
        if (smaller := _without(version.pools, each)) is not None
    ]
    if not spare:
        return None
    version, each, smaller = max(spare, key=lambda s: (s[1] is role, s[0].pools.of(s[1])))
    changed = intent.changed(version.name, pools=smaller)
    return Change(changed, version.name, f"has one {each} worker less", f"{to.name} gets it")


def _without(pools: Pools, role: Role, other: Role = Role.DRAINED) -> Pools | None:
    """With one worker less, or one of another role instead; None where too few would be left."""
    try:
        return pools.moved(role, other).check()
    except ConfigError:
        return None


def _alone(intent: Intent, to: Version, others: Sequence[Version]) -> Change | None:
    """Step 4."""
    names = [version.name for version in others if not version.is_leaving]
    if not names:
        return None
    changed = intent.changed(to.name, weight=FULL_WEIGHT)
    for name in names:
        changed = changed.changed(name, weight=0, is_leaving=True)
    what = f"leaves: all new requests are for {to.name}"
    return Change(changed, ", ".join(names), what)


# ---------------------------------------------------------------- what operators order


def with_weights(intent: Intent, weights: Mapping[str, int]) -> Intent:
    """With these weights of these versions."""
    for name, weight in weights.items():
        intent = intent.changed(name, weight=weight)
    return intent


def weighed(intent: Intent, order: SetWeights) -> Intent:
    """Raises OrderRefused."""
    not_rolling(intent)
    for name, weight in order.weights.items():
        if known(intent, name).is_leaving:
            raise OrderRefused(f"{name} is leaving and takes no requests")
        if not 0 <= weight <= MAX_WEIGHT:
            raise OrderRefused(f"a weight is between 0 and {MAX_WEIGHT}", status=400)
    changed = with_weights(intent, order.weights)
    if not any(version.weight for version in changed.versions):
        raise OrderRefused("one version at least must have a weight above 0", status=400)
    return changed


def added(intent: Intent, order: AddVersion, room: int) -> Intent:
    """Raises OrderRefused."""
    not_rolling(intent)
    version = order.version
    if not version.name or len(version.name) > MAX_NAME_LEN or not version.name.isprintable():
        raise OrderRefused(f"{version.name!r} cannot be the name of a version", status=400)
    if intent.version(version.name) is not None:
        raise OrderRefused(f"there is a version {version.name} already")
    if len(intent.versions) >= MAX_VERSIONS:
        there = ", ".join(each.name for each in intent.versions)
        raise OrderRefused(f"there are {MAX_VERSIONS} versions, and no more can be: {there}")
    if not 0 <= version.weight <= MAX_WEIGHT:
        raise OrderRefused(f"a weight is between 0 and {MAX_WEIGHT}", status=400)
    wanted = _checked(version.pools)
    first = least(wanted) if order.takes_over else wanted
    _check_room(intent, version.name, first, room)
    if not order.takes_over:
        return msgspec.structs.replace(intent, versions=(*intent.versions, version))
    newcomer = msgspec.structs.replace(version, pools=first, weight=0)
    if wanted.total > room:
        raise OrderRefused(f"{wanted.total} workers are more than the {room} there can be")
    return msgspec.structs.replace(
        intent,
        versions=(*intent.versions, newcomer),
        rollout=Rollout(version.name, wanted, before=intent.versions),
    )


def _check_room(intent: Intent, name: str, first: Pools, room: int) -> None:
    there = sum(version.pools.total for version in intent.versions)
    if there + first.total <= room:
        return
    why = (
        f"{name} needs {first.total} workers beside the {there} of other versions, and there can "
        f"be {room}: "
    )
    smaller: Pools | None = intent.current.pools
    while smaller is not None and there - intent.pools.total + smaller.total + first.total > room:
        role = max(SERVING_ROLES, key=smaller.of)
        smaller = _without(smaller, role)
    if smaller is None:
        raise OrderRefused(why + "more room is needed, see pools.max_workers")
    counts = " ".join(f"{role}={smaller.of(role)}" for role in SERVING_ROLES if smaller.of(role))
    raise OrderRefused(why + f"`baton pools set {counts}` would make room, or pools.max_workers")


def finished(intent: Intent, name: str, pools: Pools | None, room: int) -> Intent:
    """Raises OrderRefused."""
    not_rolling(intent)
    version = known(intent, name)
    if version.is_leaving:
        raise OrderRefused(f"{name} is leaving")
    if len(intent.versions) == 1:
        raise OrderRefused(f"{name} is all there is")
    wanted = _checked(pools or _as_many(version.pools, intent.pools))
    if wanted.total > room:
        raise OrderRefused(f"{wanted.total} workers are more than the {room} there can be")
    return msgspec.structs.replace(intent, rollout=Rollout(name, wanted, before=intent.versions))


def _as_many(own: Pools, others: Pools) -> Pools:
    """Its own, and as many as the others, where those are of the same kind."""
    if bool(own.mixed) != bool(others.mixed):
        return own
    return Pools(*(max(own.of(role), others.of(role)) for role in SERVING_ROLES))


def aborted(intent: Intent, name: str) -> Intent:
    """Raises OrderRefused."""
    version, current, rollout = known(intent, name), intent.current, intent.rollout
    if version is current:
        raise OrderRefused(f"{name} is the current version: finish another one to end it")
    if current.is_over:
        raise OrderRefused(
            f"{current.name} has no workers any more, to which {name} could give all"
        )
    if rollout is not None and rollout.to == name:
        intent = _given_back(intent, rollout)
    elif version.is_leaving:
        raise OrderRefused(f"{name} is leaving already")
    changed = intent.changed(name, weight=0, is_leaving=True)
    if not any(each.weight for each in changed.versions):
        changed = changed.changed(current.name, weight=FULL_WEIGHT)
    return changed


def _given_back(intent: Intent, rollout: Rollout) -> Intent:
    """As it was before that began, as far as others are still there; what is lacking comes."""
    lost = [
        was
        for was in rollout.before
        if was.name != rollout.to
        and not was.is_leaving
        and intent.version(was.name) not in (None, was)
    ]
    changed = msgspec.structs.replace(intent, rollout=None)
    for was in lost:
        if not _named(intent, was.name).is_over:
            changed = changed.changed(was.name, weight=was.weight, is_leaving=False)
    if not lost:
        return changed
    current = changed.current
    had = next(was.pools for was in rollout.before if was.name == current.name)
    stay = tuple(
        each.name
        for each in changed.versions
        if each.name not in (current.name, rollout.to) and not each.is_leaving
    )
    return msgspec.structs.replace(
        changed, rollout=Rollout(current.name, had, rollout.before, stay)
    )


def resized(intent: Intent, name: str, pools: Pools) -> Intent:
    """Raises OrderRefused."""
    not_rolling(intent)
    _staying(intent, name)
    return intent.changed(name, pools=_checked(pools))


def moved(intent: Intent, worker: Worker, role: Role) -> Intent:
    """One worker less of what it is, and one more of that role. Of the version that takes over that
    may be ordered meanwhile, and is so in the end too. Raises OrderRefused.
    """
    version, rollout, is_now = _staying(intent, worker.version), intent.rollout, worker.target
    assert is_now is not None
    if rollout is not None:
        if rollout.to != version.name:
            not_rolling(intent)
        in_the_end = _checked(rollout.pools.moved(is_now, role), status=409)
        intent = msgspec.structs.replace(
            intent, rollout=msgspec.structs.replace(rollout, pools=in_the_end)
        )
    pools = _checked(version.pools.moved(is_now, role), status=409)
    return intent.changed(version.name, pools=pools)


def _staying(intent: Intent, name: str) -> Version:
    version = known(intent, name)
    if version.is_leaving:
        raise OrderRefused(f"{name} is leaving, its workers go")
    return version


def not_rolling(intent: Intent) -> None:
    """Raises OrderRefused while a version takes over from others."""
    if intent.rollout is not None:
        to = intent.rollout.to
        raise OrderRefused(f"{to} is taking over: wait until that is done, or abort it")


def known(intent: Intent, name: str) -> Version:
    """The version of that name. Raises OrderRefused."""
    version = intent.version(name)
    if version is None:
        there = ", ".join(each.name for each in intent.versions)
        raise OrderRefused(f"no version is called {name}; there are: {there}", status=404)
    return version


def _named(intent: Intent, name: str) -> Version:
    version = intent.version(name)
    assert version is not None
    return version


def _checked(pools: Pools, *, status: int = 400) -> Pools:
    try:
        return pools.check()
    except ConfigError as error:
        raise OrderRefused(str(error), status=status) from error
