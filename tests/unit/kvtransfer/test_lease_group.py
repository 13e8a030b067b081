"""Pulls and leases of several members end once, after all members have ended."""

import pytest

from engine.messages import LeaseRef, TransferAddress
from engine.worker.events import (
    AbortPull,
    GrowLease,
    HoldLease,
    LeaseEnded,
    OpenLease,
    PullDone,
    PullFailed,
    RevokeLease,
    StartPull,
)
from kvtransfer.lease.group import LeaseGroups, PullGroups, ToMember

LEASE = LeaseRef("l", TransferAddress("p0", "life", "tcp://p0"), 3)
START = StartPull("s", ((0, 7), (2, 9)))
ABORT = AbortPull("s")
ABORTED = PullFailed("s", "aborted")
MEMBERS = (0, 1, 2)


def done(transfer_s: float = 0.0, exposed_s: float = 0.0, transport: str = "shm") -> PullDone:
    return PullDone("s", transport, transfer_s, exposed_s)


def to(order: object, *members: int) -> list[ToMember]:
    return [ToMember(member, order) for member in members]


def held(*, idle: tuple[int, ...] = ()) -> PullGroups:
    groups = PullGroups()
    held = groups.hold("s", dict.fromkeys(MEMBERS, LEASE), idle=idle)
    assert held == to(HoldLease("s", LEASE), *MEMBERS)
    return groups


def pulling(*, idle: tuple[int, ...] = ()) -> PullGroups:
    groups = held(idle=idle)
    groups.start(START)
    return groups


def ended(groups: PullGroups, *reports: tuple[int, PullDone | PullFailed]) -> list[object]:
    """Returns the effects of these reports in this order."""
    effects = []
    for member, report in reports:
        effects += groups.ended(member, report)
        groups.validate()
    return effects


def test_a_pull_is_done_with_its_last_part_and_took_as_long_as_the_longest():
    groups = pulling()
    parts = [(1, done(2.0, 0.5, "nixl")), (0, done(1.0, 1.0)), (2, done(0.5, 0.0))]
    assert ended(groups, *parts[:2]) == []
    assert ended(groups, parts[2]) == [PullDone("s", "nixl", 2.0, 1.0)]
    assert groups.num_pulls == 0


def test_the_others_are_aborted_when_a_part_fails_and_the_end_waits_for_them():
    groups = pulling()
    assert ended(groups, (1, PullFailed("s", "source silent"))) == to(ABORT, 0, 2)
    assert ended(groups, (0, ABORTED)) == []
    assert ended(groups, (2, ABORTED)) == [PullFailed("s", "source silent")]
    assert groups.num_pulls == 0


def test_a_block_has_arrived_if_all_members_have_it():
    groups = pulling()
    effects = ended(
        groups, (0, done()), (1, PullFailed("s", "broken", (0, 2))), (2, PullFailed("s", "x", (2,)))
    )
    assert effects[-1] == PullFailed("s", "broken", (2,))


def test_an_aborted_pull_waits_for_all_parts_and_may_be_done_nevertheless():
    groups = pulling()
    assert groups.abort(ABORT) == to(ABORT, *MEMBERS)
    assert groups.abort(ABORT) == []
    effects = ended(groups, (0, done()), (1, done()), (2, done()))
    assert effects == [PullDone("s", "shm")]


def test_a_pull_that_ends_while_held_is_not_started():
    groups = held()
    assert ended(groups, (0, PullFailed("s", "lease expired"))) == to(ABORT, 1, 2)
    assert groups.start(START) == []
    effects = ended(groups, (1, ABORTED), (2, ABORTED))
    assert effects == [PullFailed("s", "lease expired")]


def test_a_pull_that_failed_while_held_fails_again_when_it_is_started():
    groups = held()
    ended(groups, (0, PullFailed("s", "lease expired")), (1, ABORTED), (2, ABORTED))
    assert groups.start(START) == [PullFailed("s", "lease was lost while waiting")]
    assert groups.abort(ABORT) == []


def test_an_idle_member_is_asked_for_no_blocks_and_delays_none():
    groups = held(idle=(1,))
    nothing = StartPull("s", ())
    assert groups.start(START) == [*to(START, 0), *to(nothing, 1), *to(START, 2)]
    parts = [(1, done(9.0, 0.0, "")), (0, done(1.0)), (2, PullFailed("s", "broken", (0,)))]
    assert ended(groups, *parts) == [PullFailed("s", "broken", (0,))]


def test_a_lost_member_fails_all_its_pulls_and_later_ones():
    groups = pulling()
    groups.hold("t", {0: LEASE, 1: LEASE})
    effects = groups.lose(2, "rank 2 died")
    assert effects == to(ABORT, 0, 1)
    assert ended(groups, (0, ABORTED), (1, ABORTED)) == [PullFailed("s", "rank 2 died")]
    assert groups.hold("u", dict.fromkeys(MEMBERS, LEASE)) == [PullFailed("u", "rank 2 died")]
    assert groups.num_pulls == 1


# ---------------------------------------------------------------- leases

OPEN, REVOKE = OpenLease("l", 3), RevokeLease("l")


def opened() -> LeaseGroups:
    groups = LeaseGroups(MEMBERS)
    assert groups.open(OPEN) == to(OPEN, *MEMBERS)
    return groups


def ends(groups: LeaseGroups, *reports: tuple[int, str]) -> list[object]:
    effects = []
    for member, reason in reports:
        effects += groups.ended(member, LeaseEnded("l", reason))
        groups.validate()
    return effects


def test_a_lease_grows_where_it_is_open():
    groups = opened()
    grow = GrowLease("l", (4, 5))
    assert groups.grow(grow) == to(grow, *MEMBERS)
    ends(groups, (1, "released"))
    assert groups.grow(grow) == to(grow, 0, 2)
    assert groups.grow(GrowLease("m", (4,))) == []


def test_a_lease_is_released_when_all_parts_are():
    groups = opened()
    assert ends(groups, (2, "released"), (0, "released")) == []
    assert groups.num_leases == 1
    assert ends(groups, (1, "released")) == [LeaseEnded("l", "released")]
    assert groups.num_leases == 0


def test_the_others_are_revoked_when_a_part_ends_otherwise():
    groups = opened()
    assert ends(groups, (2, "released")) == []
    assert ends(groups, (0, "expired")) == to(REVOKE, 1)
    assert ends(groups, (1, "revoked")) == [LeaseEnded("l", "expired")]


@pytest.mark.parametrize("last", ["revoked", "released"])
def test_a_revoked_lease_ends_after_all_parts(last):
    groups = opened()
    assert ends(groups, (2, "released")) == []
    assert groups.revoke(REVOKE) == to(REVOKE, 0, 1)
    assert groups.revoke(REVOKE) == []
    assert ends(groups, (0, "released"), (1, last)) == [LeaseEnded("l", last)]
    assert groups.revoke(REVOKE) == []


def test_a_lost_member_ends_its_leases_and_later_ones():
    groups = opened()
    ends(groups, (0, "released"))
    assert groups.lose(2, "rank 2 died") == to(REVOKE, 1)
    assert ends(groups, (1, "revoked")) == [LeaseEnded("l", "rank 2 died")]
    assert groups.open(OpenLease("m", 1)) == [LeaseEnded("m", "rank 2 died")]
    assert groups.num_leases == 0
