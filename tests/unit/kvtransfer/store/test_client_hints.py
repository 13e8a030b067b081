"""Session hints forwarded by gateways reach the policy of every tier."""

import pytest

from engine.messages import (
    HASH_BYTES,
    GatewayId,
    Incarnation,
    PinBlocks,
    SessionEnd,
    SessionUse,
    TransferAddress,
    UnpinBlocks,
    WorkerId,
)
from engine.worker.block_events import Medium
from engine.worker.events import FromGateway
from kvtransfer.store.eviction.leaf_lru import LeafLru
from kvtransfer.store.eviction.seam import (
    BlocksPinned,
    BlocksUnpinned,
    SessionEnded,
    SessionUsed,
)
from kvtransfer.store.intake import IntakePace
from kvtransfer.store.machine import StoreMachine, StoreTerms
from kvtransfer.store.shelf import Shelf

A, B = bytes(HASH_BYTES), b"b" * HASH_BYTES
PAIRS = [
    (SessionUse("k", "s", [A, B], 60.0), SessionUsed("k", "s", (A, B), 60.0)),
    (SessionUse("k", "s", []), SessionUsed("k", "s", ())),
    (SessionEnd("k", "s"), SessionEnded("k", "s")),
    (PinBlocks("k", [A, B]), BlocksPinned("k", (A, B))),
    (UnpinBlocks("k", [A]), BlocksUnpinned("k", (A,))),
]


class Listening(LeafLru):
    """A policy that records hints with their times."""

    def __init__(self):
        super().__init__()
        self.heard = []

    def hint(self, hint, now_s):
        self.heard.append((hint, now_s))


def a_store():
    policies = {Medium.HOST: Listening(), Medium.DISK: Listening()}
    address = TransferAddress(WorkerId("s0"), Incarnation("life"), "tcp://s0")
    terms = StoreTerms("s0", 16, 1024, address, IntakePace())
    shelves = {medium: Shelf(4, policy) for medium, policy in policies.items()}
    return StoreMachine(terms, shelves), policies.values()


@pytest.mark.parametrize(("message", "hint"), PAIRS, ids=lambda one: type(one).__name__)
def test_a_gateways_message_becomes_a_hint_for_every_tier(message, hint):
    store, policies = a_store()
    assert store.handle(FromGateway(GatewayId("g"), message), 7.0) == []
    assert [policy.heard for policy in policies] == [[(hint, 7.0)]] * 2
    store.validate()
