"""Orders about versions as functions.

Each function returns a new intent, or raises OrderRefused.
"""

from msgspec.structs import replace

from deploy.pools.orders import AddVersion, OrderRefused, SetWeights
from deploy.pools.versions.rollout import MAX_VERSIONS, least, named, with_weights, without
from deploy.pools.workers.record import PoolWorker
from engine.control import FULL_WEIGHT, SERVING_ROLES, Intent, Pools, Rollout, Version
from engine.errors import ConfigError
from engine.messages import Role

MAX_WEIGHT = 1_000_000
MAX_NAME_LEN = 64


def weighed(intent: Intent, order: SetWeights) -> Intent:
    """Sets the versions' shares of new requests."""
    not_rolling(intent)
    for name, weight in order.weights.items():
        if known(intent, name).is_leaving:
            raise OrderRefused(f"{name} is leaving and takes no requests")
        if not 0 <= weight <= MAX_WEIGHT:
            raise OrderRefused(f"a weight is between 0 and {MAX_WEIGHT}", status=400)
    changed = with_weights(intent, order.weights)
    for line in {version.line for version in changed.versions}:
        if not any(version.weight for version in changed.of_line(line)):
            raise OrderRefused("at least one version must have a weight above 0", status=400)
    return changed


def added(intent: Intent, order: AddVersion, room: int) -> Intent:
    """Adds a version.

    With `takes_over` the version starts with the smallest pools, and a rollout begins.
    """
    not_rolling(intent)
    version = order.version
    if not version.name or len(version.name) > MAX_NAME_LEN or not version.name.isprintable():
        raise OrderRefused(f"{version.name!r} cannot be the name of a version", status=400)
    if intent.version(version.name) is not None:
        raise OrderRefused(f"there is a version {version.name} already")
    own = intent.of_line(version.line)
    for each in intent.versions:
        if each.line != version.line and each.model_name == version.model_name:
            raise OrderRefused(f"{each.name} serves the name {each.model_name} already")
    if len(own) >= MAX_VERSIONS:
        there = ", ".join(each.name for each in own)
        raise OrderRefused(f"there can be at most {MAX_VERSIONS} versions; there are: {there}")
    if not 0 <= version.weight <= MAX_WEIGHT:
        raise OrderRefused(f"a weight is between 0 and {MAX_WEIGHT}", status=400)
    wanted = _checked(version.pools)
    first = least(wanted) if order.takes_over else wanted
    _check_room(intent, version, first, room)
    if not order.takes_over:
        return _with(intent, version)
    newcomer = replace(version, pools=first, weight=0)
    if wanted.total > room:
        raise OrderRefused(f"{wanted.total} workers are more than the {room} there can be")
    rollout = Rollout(
        version.name,
        wanted,
        before=own,
        canary=order.canary or (),
        hold_s=order.hold_s or 0.0,
        allows_shorter=order.allows_shorter,
    )
    return replace(_with(intent, newcomer), rollout=rollout)


def _with(intent: Intent, version: Version) -> Intent:
    """Adds a version after the other versions of its line."""
    place = max(n for n, each in enumerate(intent.versions) if each.line == version.line) + 1
    there = intent.versions
    return replace(intent, versions=(*there[:place], version, *there[place:]))


def former(intent: Intent, name: str | None) -> Version:
    """Returns the former version that was replaced last, or the former version `name`."""
    not_rolling(intent)
    found = [each for each in intent.former if name in (None, each.name)]
    if not found:
        there = ", ".join(each.name for each in intent.former) or "none"
        raise OrderRefused(
            f"no former version is called {name}; there are: {there}"
            if name
            else "no version was replaced yet",
            status=404,
        )
    return found[-1]


def _check_room(intent: Intent, newcomer: Version, first: Pools, room: int) -> None:
    there = intent.num_wanted
    if there + first.total <= room:
        return
    why = (
        f"{newcomer.name} needs {first.total} workers beside the {there} of other versions, "
        f"and there can be {room}: "
    )
    current = intent.of_line(newcomer.line)[0]
    smaller: Pools | None = current.pools
    while smaller is not None and there - current.pools.total + smaller.total + first.total > room:
        role = max(SERVING_ROLES, key=smaller.of)
        smaller = without(smaller, role)
    if smaller is None:
        raise OrderRefused(why + "more room is needed, see pools.max_workers")
    counts = " ".join(f"{role}={smaller.of(role)}" for role in SERVING_ROLES if smaller.of(role))
    of = f" --version {current.name}" if current.line else ""
    order = f"baton pools set {counts}{of}"
    raise OrderRefused(why + f"`{order}` would make room, or pools.max_workers")


def finished(intent: Intent, name: str, pools: Pools | None, room: int) -> Intent:
    """Starts a rollout in which one version replaces all other versions of its line."""
    not_rolling(intent)
    version = known(intent, name)
    if version.is_leaving:
        raise OrderRefused(f"{name} is leaving")
    own = intent.of_line(version.line)
    if len(own) == 1:
        raise OrderRefused(f"{name} is the only version")
    wanted = _checked(pools or _as_many(version.pools, own[0].pools))
    if wanted.total > room:
        raise OrderRefused(f"{wanted.total} workers are more than the {room} there can be")
    return replace(intent, rollout=Rollout(name, wanted, before=own))


def _as_many(own: Pools, others: Pools) -> Pools:
    """Returns for each role the larger of both numbers, if both pools are of the same kind."""
    if bool(own.mixed) != bool(others.mixed):
        return own
    return Pools(*(max(own.of(role), others.of(role)) for role in SERVING_ROLES))


def aborted(intent: Intent, name: str) -> Intent:
    """Removes a version, and gives its requests and workers back to the other versions."""
    version, rollout = known(intent, name), intent.rollout
    current = intent.of_line(version.line)[0]
    if version is current:
        raise OrderRefused(f"{name} is the current version: finish another one to end it")
    if current.is_over:
        raise OrderRefused(f"{current.name} has no workers left to serve instead of {name}")
    if rollout is not None and rollout.to == name:
        intent = _given_back(intent, rollout)
    elif version.is_leaving:
        raise OrderRefused(f"{name} is leaving already")
    changed = intent.changed(name, weight=0, is_leaving=True)
    if not any(each.weight for each in changed.of_line(version.line)):
        changed = changed.changed(current.name, weight=FULL_WEIGHT)
    return changed


def _given_back(intent: Intent, rollout: Rollout) -> Intent:
    """Undoes a rollout. The versions that still run get back the workers that they lost."""
    lost = [
        was
        for was in rollout.before
        if was.name != rollout.to
        and not was.is_leaving
        and intent.version(was.name) not in (None, was)
    ]
    changed = replace(intent, rollout=None)
    for was in lost:
        if not named(intent, was.name).is_over:
            changed = changed.changed(was.name, weight=was.weight, is_leaving=False)
    if not lost:
        return changed
    own = changed.of_line(named(intent, rollout.to).line)
    current = own[0]
    had = next(was.pools for was in rollout.before if was.name == current.name)
    stay = tuple(
        each.name
        for each in own
        if each.name not in (current.name, rollout.to) and not each.is_leaving
    )
    return replace(changed, rollout=Rollout(current.name, had, rollout.before, stay))


def resized(intent: Intent, name: str, pools: Pools) -> Intent:
    """Sets the wanted pools of a version."""
    not_rolling(intent)
    _staying(intent, name)
    return intent.changed(name, pools=_checked(pools), asleep=None)


def moved(intent: Intent, worker: PoolWorker, role: Role) -> Intent:
    """Moves one wanted worker from its present pool to the pool of `role`.

    During a rollout this is allowed only for workers of the new version, whose final pools change
    too.
    """
    version, rollout, is_now = _staying(intent, worker.version), intent.rollout, worker.target
    assert is_now is not None
    if rollout is not None:
        if rollout.to != version.name:
            not_rolling(intent)
        in_the_end = _checked(rollout.pools.moved(is_now, role), status=409)
        intent = replace(intent, rollout=replace(rollout, pools=in_the_end))
    pools = _checked(version.pools.moved(is_now, role), status=409)
    return intent.changed(version.name, pools=pools)


def _staying(intent: Intent, name: str) -> Version:
    version = known(intent, name)
    if version.is_leaving:
        raise OrderRefused(f"{name} is leaving, its workers go")
    return version


def not_rolling(intent: Intent) -> None:
    """Raises OrderRefused while a rollout is under way."""
    if intent.rollout is not None:
        to = intent.rollout.to
        raise OrderRefused(f"{to} is taking over: wait until that is done, or abort it")


def known(intent: Intent, name: str) -> Version:
    """Returns the version of this name. Raises OrderRefused if there is no such version."""
    version = intent.version(name)
    if version is None:
        there = ", ".join(each.name for each in intent.versions)
        raise OrderRefused(f"no version is called {name}; there are: {there}", status=404)
    return version


def _checked(pools: Pools, *, status: int = 400) -> Pools:
    try:
        return pools.check()
    except ConfigError as error:
        raise OrderRefused(str(error), status=status) from error
