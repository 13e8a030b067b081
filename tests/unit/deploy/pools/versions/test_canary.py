"""A new version is watched while it takes over, and removed if it serves worse than the others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from deploy.pools.orders import AddVersion, OrderRefused, Rollback
from deploy.pools.versions.canary import between, fault_of, tally
from engine.config import UpdateConfig
from engine.control import CanaryVerdict, EndedCounts, GatewayReport, Pools, Version, VersionReport
from tests.kits.pools import PoolWorld, settled

V2 = Version("v2", "other", "other", pools=Pools(1, 1), weight=0)
RULES = UpdateConfig(min_requests=20, max_failed=0.02, max_late=0.1)
FINE = (10, 0, 0)


def watched(
    *, v1=FINE, v2=FINE, canary=(5, 50), hold_s=30.0, update_timeout_s=900.0, **order
) -> PoolWorld:
    """Returns pools where v2 takes over with a canary; the versions have these outcomes per
    second."""
    world = settled(Pools(1, 1), update_timeout_s=update_timeout_s)
    world.ends = {"v1": v1, "v2": v2}
    world.run(100)
    world.feed(AddVersion(V2, takes_over=True, canary=canary, hold_s=hold_s, **order))
    return world


def shares(world: PoolWorld, seconds: int) -> list[tuple[int, int]]:
    """Runs for some time. Returns each traffic share of v2 with its duration in seconds."""
    found: list[list[int]] = []
    for _ in range(seconds):
        world.run(1)
        version = world.machine.intent.version("v2")
        weight = 0 if version is None else version.weight
        if not found or found[-1][0] != weight:
            found.append([weight, 0])
        found[-1][1] += 1
    return [(weight, lasted) for weight, lasted in found]


def names(world: PoolWorld) -> list[str]:
    return [version.name for version in world.machine.intent.versions]


def test_each_share_of_a_canary_is_held():
    world = watched()
    found = shares(world, 300)
    assert [weight for weight, _ in found][-3:] == [5, 50, 100]
    assert all(lasted >= 30 for weight, lasted in found if weight in (5, 50))
    assert world.machine.is_settled
    assert names(world) == ["v2"]


def test_the_verdict_on_a_canary_is_reported_from_its_probe_to_its_last_share():
    world = watched(v2=(1, 0, 0))
    assert world.machine.canary.verdict is CanaryVerdict.NOT_PROBED
    assert world.machine.canary.begun_s is None
    while world.machine.intent.version("v2").weight == 0:
        world.run(1)
    world.run(5)
    standing = world.machine.canary
    assert standing.verdict is CanaryVerdict.TOO_FEW
    assert 0 < standing.own.ended < 20
    assert standing.own.ended < standing.others.ended
    while world.machine.canary.verdict is CanaryVerdict.TOO_FEW:
        world.run(1)
    standing = world.machine.canary
    assert (standing.verdict, standing.own) == (CanaryVerdict.GOOD, EndedCounts(20))
    world.settle()
    assert world.machine.canary is None


def test_a_share_is_held_until_enough_requests_have_ended():
    world = watched(v2=(0, 0, 0))
    assert shares(world, 400)[-1][0] == 5
    world.ends["v2"] = (1, 0, 0)
    shares(world, 25)
    assert world.machine.intent.version("v2").weight == 50


@pytest.mark.parametrize(
    ("v2", "says"),
    [
        ((10, 1, 0), "requests failed, of the others' 0 of"),
        ((10, 0, 2), "answers were late, of the others' 0 of"),
    ],
)
def test_version_that_serves_worse_is_given_up_by_itself(v2, says):
    world = watched(v2=v2)
    shares(world, 60)
    world.settle()
    assert names(world) == ["v1"]
    assert world.machine.intent.current.weight == 100
    assert any(says in line for line in world.told)
    assert world.machine.counters["updates given up"] == 1


def test_version_whose_answers_hang_is_given_up_before_one_has_ended():
    world = watched(v2=(0, 0, 0))
    world.hung = {"v1": 1, "v2": 25}
    shares(world, 60)
    assert names(world) == ["v1"]
    said = "25 of its 25 answers were late (25 hang), of the others' 1 of"
    assert any(said in line for line in world.told)


def test_version_hangs_no_more_than_the_others():
    world = watched(v1=(10, 0, 0), v2=(10, 0, 0))
    world.hung = {"v1": 100, "v2": 50}
    shares(world, 300)
    assert names(world) == ["v2"]


def test_version_is_watched_until_it_has_taken_over_also_without_a_canary():
    world = settled(Pools(2, 2))
    world.ends, world.start_s = {"v1": FINE, "v2": (10, 5, 0)}, 10.0
    world.feed(AddVersion(replace(V2, pools=Pools(2, 2)), takes_over=True))
    world.run(100)
    world.settle()
    assert names(world) == ["v1"]


def test_version_that_serves_as_badly_as_the_others_takes_over():
    world = watched(v1=(10, 2, 5), v2=(10, 3, 5))
    shares(world, 300)
    assert names(world) == ["v2"]


def test_only_requests_of_the_present_share_count():
    world = watched(v1=(10, 0, 0), v2=FINE)
    world.ended["v2"] = [500, 100, 0]  # outcomes of an earlier version with the same name
    shares(world, 300)
    assert names(world) == ["v2"]


def test_version_that_cannot_hold_what_was_served_lately_is_refused():
    world = settled(Pools(1, 1))
    world.longest_len["v1"] = 8 * 16 + 1  # a fake worker has 8 blocks
    world.feed(AddVersion(V2, takes_over=True))
    world.run(50)
    world.settle()
    assert names(world) == ["v1"]
    assert any(
        "can hold 128 tokens of a request, and one of 129 runs or ran lately" in t
        for t in world.told
    )
    world.feed(AddVersion(V2, takes_over=True, allows_shorter=True))
    world.settle()
    assert names(world) == ["v2"]


def test_version_takes_over_only_after_it_was_probed():
    world = settled(Pools(1, 1))
    world.probes["v2"] = None
    world.feed(AddVersion(V2, takes_over=True))
    world.run(100)
    assert world.machine.intent.version("v2").weight == 0
    world.probes["v2"] = ""
    world.settle()
    assert names(world) == ["v2"]


def test_version_that_answers_probes_wrongly_is_given_up():
    world = settled(Pools(1, 1))
    world.probes["v2"] = "the long request got no token"
    world.feed(AddVersion(V2, takes_over=True))
    world.run(50)
    world.settle()
    assert names(world) == ["v1"]
    assert any("it was probed: the long request got no token" in line for line in world.told)


def test_rollback_returns_to_the_version_before_also_after_it_is_gone():
    world = settled(Pools(2, 1))
    with pytest.raises(OrderRefused, match="no version was replaced yet"):
        world.feed(Rollback())
    v1 = world.machine.intent.current
    world.feed(AddVersion(V2, takes_over=True))
    world.settle()
    assert names(world) == ["v2"]
    with pytest.raises(OrderRefused, match="no former version is called v7; there are: v1"):
        world.feed(Rollback("v7"))
    world.feed(Rollback())
    world.settle()
    assert names(world) == ["v1"]
    assert world.machine.intent.current == v1
    assert [each.name for each in world.machine.intent.former] == ["v1", "v2"]
    world.feed(Rollback("v2"))
    world.settle()
    assert names(world) == ["v2"]


def test_rollback_gives_up_a_version_that_takes_over():
    world = watched()
    shares(world, 20)
    world.feed(Rollback())
    world.settle()
    assert names(world) == ["v1"]
    assert world.machine.intent.former == ()


def test_few_former_versions_are_remembered():
    world = settled(Pools(1, 1))
    for number in range(2, 9):
        world.feed(AddVersion(Version(f"v{number}", "m", "m", pools=Pools(1, 1)), takes_over=True))
        world.settle()
    assert [each.name for each in world.machine.intent.former] == ["v4", "v5", "v6", "v7"]


def test_faults_need_enough_requests_and_are_compared_with_the_others():
    assert fault_of(EndedCounts(19, 19, 19), EndedCounts(100, 0, 0), RULES) is None
    assert fault_of(EndedCounts(20, 20, 0), EndedCounts(), RULES) is not None
    assert fault_of(EndedCounts(100, 2, 0), EndedCounts(100, 0, 0), RULES) is None
    assert fault_of(EndedCounts(100, 3, 0), EndedCounts(100, 0, 0), RULES) is not None
    assert fault_of(EndedCounts(100, 3, 0), EndedCounts(100, 2, 0), RULES) is None
    assert fault_of(EndedCounts(100, 0, 30), EndedCounts(100, 0, 20), RULES) is None
    assert fault_of(EndedCounts(100, 0, 31), EndedCounts(100, 0, 20), RULES) is not None


counts = st.builds(EndedCounts, *[st.integers(0, 50)] * 3)


def test_what_each_gateway_reports_of_the_versions_adds_up():
    def report(ended: int) -> GatewayReport:
        versions = {name: VersionReport(None, 0, "fp", ended, 1, 2) for name in ("v1", "v2")}
        return GatewayReport(None, 1, 2, 0, 0, 0.0, versions=versions)

    assert tally([report(5), None], ["v2"]) == (EndedCounts(5, 1, 2), EndedCounts())
    assert tally([report(5)], ["v1", "v2"]) == (EndedCounts(10, 2, 4),)


@given(steps=st.lists(st.tuples(counts, st.booleans()), max_size=6), other=counts)
def test_a_gateway_that_starts_again_neither_hides_nor_repeats_what_others_count(steps, other):
    """The other gateway has counted for long. This gateway may restart before each step."""
    long_ago = EndedCounts(10_000, 400, 400)
    now, expected = (long_ago, long_ago), EndedCounts()
    for step, starts_again in steps:
        before = now
        mine = step if starts_again else plus(before[0], step)
        now = (mine, plus(before[1], other))
        assert between(before, now).ended >= other.ended
        if not starts_again or mine.ended < before[0].ended:
            assert between(before, now) == plus(step, other)
        expected = plus(expected, between(before, now))
    assert expected.ended <= sum(step.ended for step, _ in steps) + len(steps) * other.ended


def plus(one: EndedCounts, other: EndedCounts) -> EndedCounts:
    return EndedCounts(one.ended + other.ended, one.failed + other.failed, one.late + other.late)


def test_order_during_a_rollout_is_refused_except_a_rollback():
    world = watched()
    shares(world, 20)
    with pytest.raises(OrderRefused, match="v2 is taking over"):
        world.feed(Rollback("v0"))


def test_mended_version_of_the_same_name_is_not_judged_by_its_earlier_attempt():
    world = watched(v2=(10, 5, 0))
    world.run(100)
    world.settle()
    assert names(world) == ["v1"]
    world.ends["v2"] = FINE
    world.feed(AddVersion(V2, takes_over=True, canary=(5, 50), hold_s=30.0))
    world.settle()
    assert names(world) == ["v2"]


def test_share_may_be_held_for_longer_than_an_update_may_stand_still():
    world = watched(hold_s=100.0, update_timeout_s=90.0)
    world.settle()
    assert names(world) == ["v2"]
