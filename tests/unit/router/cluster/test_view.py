"""Reservations on workers: every debit is credited back exactly once."""

import pytest
from msgspec.structs import replace

from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import PROTOCOL_VERSION, Role, RoleChanged, Welcome
from router.cluster.view import ClusterView, WorkerView

LAYOUT = KVLayout(block_size=4, kv_format=KVFormat.FP32, sections=(KVSection(1, 1, 4),))


@pytest.fixture
def worker() -> WorkerView:
    info = Welcome(PROTOCOL_VERSION, "m0", "life", Role.MIXED, "fp", LAYOUT, 10, 4)
    return WorkerView(info)


def test_promises_add_up_and_are_credited_back_one_by_one(worker):
    worker.reserve_prefill("a", 7)
    worker.reserve_prefill("b", 5)
    worker.reserve_decode("a", 3)
    assert (worker.reserved_tokens, worker.reserved_blocks) == (12, 3)
    worker.release_prefill("a")
    assert (worker.reserved_tokens, worker.reserved_blocks) == (5, 3)
    worker.release_decode("a")
    worker.release_prefill("b")
    assert (worker.reserved_tokens, worker.reserved_blocks) == (0, 0)
    ClusterView({"m0": worker}).validate()


def test_second_release_of_a_claim_is_ignored(worker):
    worker.reserve_prefill("a", 7)
    worker.reserve_decode("b", 3)
    for seq_id in ("a", "b", "a", "never promised"):
        worker.release_prefill(seq_id)
        worker.release_decode(seq_id)
    assert (worker.reserved_tokens, worker.reserved_blocks) == (0, 0)


def test_sequences_decode_from_their_first_token_on(worker):
    for seq_id in "abc":
        worker.reserve_decode(seq_id, 4, context_tokens=LAYOUT.block_size)
    for seq_id in ("a", "b", "b"):
        worker.begin_decode(seq_id)
    assert (worker.num_decodes, worker.num_decoding) == (3, 2)
    assert worker.decoding_context_tokens == worker.mean_context_tokens * 2 // 3
    ClusterView({"m0": worker}).validate()
    for seq_id in "ab":
        worker.release_decode(seq_id)
    assert (worker.num_decoding, worker.decoding_context_tokens) == (0, 0)


def test_a_worker_that_waits_for_a_prefix_is_idle(worker):
    worker.reserve_prefill("a", 7, seconds=0.5, now_s=1.0, waits=True)
    assert worker.ready_s(3.0) == 0.5
    worker.begin_prefill("a", 3.0)
    assert worker.ready_s(3.2) == pytest.approx(0.3)


def test_promising_twice_is_a_bug(worker):
    worker.reserve_prefill("a", 7)
    worker.reserve_decode("a", 3)
    with pytest.raises(AssertionError):
        worker.reserve_prefill("a", 7)
    with pytest.raises(AssertionError):
        worker.reserve_decode("a", 3)


@pytest.mark.parametrize("field", ["reserved_tokens", "reserved_blocks", "num_begun"])
def test_validate_finds_a_wrong_sum(worker, field):
    view = ClusterView({"m0": worker})
    view.validate()
    setattr(worker, field, 1)
    with pytest.raises(AssertionError):
        view.validate()


def joined(view: ClusterView, name: str, role: Role, num_blocks: int, *, local: bool = False):
    info = Welcome(PROTOCOL_VERSION, name, "life", role, "fp", LAYOUT, num_blocks, 4)
    return view.add(replace(info, stretch=4.0 if local else None))


def test_capacity_is_the_least_of_the_largest_workers_of_each_role():
    view = ClusterView()
    assert view.capacity_tokens is None
    joined(view, "p0", Role.PREFILL, 10)
    assert view.capacity_tokens is None
    joined(view, "d0", Role.DECODE, 6)
    assert view.capacity_tokens == 24
    joined(view, "d1", Role.DECODE, 12)
    assert view.capacity_tokens == 40
    view.remove("d1")
    assert view.capacity_tokens == 24
    joined(view, "m0", Role.MIXED, 20)
    assert view.capacity_tokens == 80


def test_a_store_is_no_capacity_whatever_it_says():
    view = ClusterView()
    joined(view, "s0", Role.STORE, 1000, local=True)
    assert (view.capacity_tokens, view.prefillers) == (None, [])
    assert view.computing is None
    joined(view, "d0", Role.DECODE, 10)
    assert view.missing() == "no prefill worker"
    assert view.computing is view.workers["d0"]


def test_the_longest_request_follows_roles_and_stays_while_a_role_has_no_worker():
    view = ClusterView()
    joined(view, "p0", Role.PREFILL, 10)
    worker = joined(view, "d0", Role.DECODE, 6, local=True)
    view.remove("p0")
    assert view.capacity_tokens == 24
    worker.change_role(RoleChanged(Role.PREFILL))
    view.measure()
    assert view.capacity_tokens == 24
