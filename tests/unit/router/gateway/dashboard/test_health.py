"""The state of health as one word: missing or unknown parts never count as good."""

import msgspec
import pytest

from engine.messages import Role
from router.gateway.dashboard.health import HealthFacts, Level, health_of
from router.gateway.metrics.pools import PoolCount


def pool(role, wanted, serving, version="v1"):
    return PoolCount(version, role, wanted, serving)


WELL = HealthFacts(
    missing=None,
    pools=[pool(Role.PREFILL, 1, 1), pool(Role.DECODE, 2, 2), pool(Role.MIXED, 0, 0)],
    has_controller=True,
    num_troubles=0,
    is_settled=True,
    num_stalled=0,
)


def state(**changes):
    health = health_of(msgspec.structs.replace(WELL, **changes))
    return health.level, health.word, health.reasons


def test_all_is_well_only_if_everything_is_known_and_there():
    assert state() == (Level.GOOD, "Ready", ["as wanted"])
    assert state(is_settled=False) == (Level.GOOD, "Ready", ["pools are changing"])


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.MIXED])
def test_a_pool_without_a_worker_is_red_even_if_others_stand_in(role):
    pools = [pool(each, 2, 0 if each is role else 3) for each in (*Role,)[:3]]
    level, word, (reason, *_) = state(pools=pools)
    assert (level, word) == (Level.BAD, "Degraded")
    assert reason == f"{role.value}: no worker of 2"


def test_a_pool_of_another_version_counts_too():
    pools = [*WELL.pools, pool(Role.DECODE, 1, 0, "v2")]
    assert state(pools=pools)[::2] == (Level.BAD, ["decode of v2: no worker of 1"])


@pytest.mark.parametrize(
    ("changes", "level", "word"),
    [
        ({"missing": "no worker is connected"}, Level.BAD, "Not ready"),
        ({"pools": [pool(Role.DECODE, 2, 1)]}, Level.WARN, "Limited"),
        ({"pools": None}, Level.WARN, "Ready"),
        ({"has_controller": False}, Level.WARN, "Ready"),
        ({"num_troubles": 1}, Level.WARN, "Ready"),
        ({"num_stalled": 45}, Level.WARN, "Ready"),
    ],
)
def test_what_is_missing_or_unknown_is_not_good(changes, level, word):
    found = state(**changes)
    assert found[:2] == (level, word)
    assert found[2]


def test_the_worst_reasons_come_first():
    changes = {"missing": "no decode worker is connected", "pools": [pool(Role.DECODE, 2, 0)]}
    assert state(**changes, num_troubles=2, num_stalled=1)[2] == [
        "no decode worker is connected",
        "decode: no worker of 2",
        "1 answer stands still",
        "2 troubles",
    ]


def test_a_version_that_sleeps_wants_no_worker():
    assert state(pools=[pool(role, 0, 0) for role in (*Role,)[:3]])[0] is Level.GOOD
