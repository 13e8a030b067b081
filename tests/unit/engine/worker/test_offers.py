"""Leases on prefixes that a worker has cached."""

import pytest

from engine.messages import LeaseId, Role, SeqId
from engine.worker.offers import prefix_lease_id
from tests.kits.worker_core import (
    Blocks,
    Rig,
    Step,
    blocks,
    cancel,
    ended,
    grown,
    lost,
    offer_prefix,
    offered,
    opened,
    prefill,
    revoked,
)

HELD = 13  # tokens, of which three full blocks, 0 to 2, are cached afterwards


@pytest.fixture
def rig() -> Rig:
    r = Rig(Role.PREFILL)
    r.take(prefill("a", HELD, more=1))
    while r.step():
        pass
    assert r.take(Blocks()) == blocks(free=5, cached=3)
    return r


def test_the_cached_part_of_a_prompt_is_leased_at_once(rig):
    rig.play(
        (
            offer_prefix("b", [*range(12), 50, 51]),
            [opened("b.prefix", 3), grown("b.prefix", 0, 1, 2), offered("b", 3)],
        ),
        (Blocks(), blocks(free=5, leased=3)),
        (Step(), []),
        (ended("b.prefix", "released"), []),
        (Blocks(), blocks(free=5, cached=3)),
    )
    assert rig.offers.counters == {"prefix_offers:held": 1}


@pytest.mark.parametrize(
    ("prompt", "num_blocks"),
    [([*range(4), 50, 51, 52, 53, 54], 1), (range(8), 1), (range(9), 2), (range(30), 3)],
    ids=["the beginning", "one token is left to compute", "all but one token", "no more is held"],
)
def test_only_whole_blocks_that_are_held_and_useful_are_offered(rig, prompt, num_blocks):
    assert rig.take(offer_prefix("b", prompt))[-1] == offered("b", num_blocks)


@pytest.mark.parametrize("prompt", [range(1, 14), range(4), range(1)])
def test_without_a_whole_block_there_is_no_lease(rig, prompt):
    rig.play((offer_prefix("b", prompt), [offered("b", 0)]), (Blocks(), blocks(free=5, cached=3)))
    assert rig.offers.counters == {"prefix_offers:not_held": 1}


def test_a_worker_offers_running_sequences_with_their_answers():
    r = Rig(Role.DECODE)
    r.arrive("a", 6, 70)
    for sampled in (71, 72):
        r.step(sampled)
    r.play(
        (
            offer_prefix("b", [*range(6), 70, 71, 72, 50]),
            [opened("b.prefix", 2), grown("b.prefix", 0, 1), offered("b", 2)],
        ),
        (cancel("a"), []),
        (Blocks(), blocks(free=6, leased=2)),
        (cancel("b"), [revoked("b.prefix")]),
        (ended("b.prefix", "revoked"), []),
        (Blocks(), blocks(free=6, cached=2)),
    )


def test_a_prefix_can_be_offered_to_several_workers_at_once(rig):
    rig.take(offer_prefix("b", HELD))
    rig.take(offer_prefix("c", HELD))
    rig.play(
        (ended("b.prefix", "released"), []),
        (Blocks(), blocks(free=5, leased=3)),
        (ended("c.prefix", "expired"), []),
        (Blocks(), blocks(free=5, cached=3)),
    )


def test_an_offer_requested_twice_is_made_once(rig):
    rig.take(offer_prefix("b", HELD))
    rig.play((offer_prefix("b", HELD), []), (ended("b.prefix", "released"), []))
    assert rig.take(Blocks()) == blocks(free=5, cached=3)


def test_an_offer_ends_by_its_gateways_cancel_or_loss(rig):
    rig.take(offer_prefix("b", HELD, gateway="g1"))
    rig.take(offer_prefix("c", HELD, gateway="g2"))
    rig.play(
        (cancel("b", gateway="g1"), [revoked("b.prefix")]),
        (lost("g2"), [revoked("c.prefix")]),
        (Blocks(), blocks(free=5, leased=3)),
        (ended("b.prefix", "revoked"), []),
        (ended("c.prefix", "revoked"), []),
        (Blocks(), blocks(free=5, cached=3)),
    )


def test_events_of_unknown_offers_change_nothing(rig):
    rig.play(*[(event, []) for event in (cancel("x"), ended("x.prefix", "expired"), lost("x"))])


def test_offers_are_counted_in_the_report_and_never_wait_or_run(rig):
    rig.take(offer_prefix("b", HELD))
    report = rig.core.load(1, {"pulls_done": 2.0})
    assert report.counters == {"prefix_offers:held": 1, "pulls_done": 2.0}
    assert (report.waiting_seqs, report.running_seqs, report.leased_blocks) == (0, 0, 3)
    assert len(rig.offers.leases.opened) == 1


def test_a_prefix_and_a_handover_have_different_leases():
    assert prefix_lease_id(SeqId("a")) != LeaseId("a")
