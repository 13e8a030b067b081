"""The store metrics on /metrics; no series of a worker contains a store."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.messages import (
    GatewayId,
    Incarnation,
    LoadReport,
    OfferPrefix,
    Role,
    SeqId,
    TransferAddress,
    WorkerId,
)
from engine.worker.block_events import Medium
from engine.worker.blocks import BlockHash
from engine.worker.events import FromGateway
from engine.worker.intake import read_prompt
from kvtransfer.store.eviction.leaf_lru import LeafLru
from kvtransfer.store.intake import IntakePace
from kvtransfer.store.machine import StoreMachine, StoreTerms
from kvtransfer.store.shelf import Shelf
from router.gateway.metrics.stores import StoreCount, read_count, store_families
from router.machine.requests import Forecast
from router.port import WorkerStatus
from tests.kits.router.gateway import FakeRouter, make_app, samples
from tests.kits.tree.metric_table import full_load, full_store_load

STORE = (("store", "store-v1"),)


def shown(load, role=Role.STORE):
    """Returns all samples of a gateway with one store, which sent this report."""
    router = FakeRouter()
    router.statuses[WorkerId("store-v1")] = WorkerStatus(
        role, load, 0, 0, Forecast(wait_s=1.0, tpot_s=1.0), kernels="cpu avx2"
    )
    return samples(make_app(router))


def of_store(found, name):
    """Returns a metric's series by their labels after the store's label."""
    return {
        tuple(dict(key)[label] for label in ("medium", "reason", "state") if label in dict(key)): n
        for key, n in found[name].items()
    }


def reported(counters=(), gauges=()):
    return LoadReport(1, 2, 3, 4, 5, 0, 0, 6, dict(counters), gauges=dict(gauges))


@pytest.mark.parametrize(
    ("key", "count"),
    [
        ("taken_blocks", ("taken_blocks", None, None)),
        ("prefix_offers:not_held", ("prefix_offers", None, "not_held")),
        ("offered_blocks:host", ("offered_blocks", "host", None)),
        ("dropped_writes:disk_queue_full", ("dropped_writes", "disk", "queue_full")),
        ("failed_loads:object_missing", ("failed_loads", "object", "missing")),
        ("disk_read_bytes", ("tier_read_bytes", "disk", "")),
        ("disk_errors:EIO", ("tier_errors", "disk", "EIO")),
        ("object_segments_put", ("tier_segments_put", "object", "")),
        ("fallbacks:load_too_slow", ("fallbacks", None, "load_too_slow")),
        ("not_known_yet:why", ("not_known_yet", None, "why")),
    ],
)
def test_keys_say_tier_and_reason(key, count):
    found = read_count(key)
    assert isinstance(found, StoreCount)
    assert (found.name, found.medium, found.reason) == count


@given(st.text(max_size=30))
def test_any_key_of_a_count_is_read(key):
    assert read_count(key).text


def test_hits_and_faults_are_shown_by_tier():
    found = shown(
        reported(
            {
                "offered_blocks:host": 7.0,
                "offered_blocks:disk": 2.0,
                "failed_writes:disk_EIO": 1.0,
                "disk_errors:EIO": 3.0,
                "disk_offs": 1.0,
                "dropped_blocks:orphan": 4.0,
                "object_bytes": 900.0,
            },
            {"store_blocks:host": 11.0, "store_blocks:disk": 40.0, "load_block_s:disk": 0.5},
        )
    )
    assert of_store(found, "baton_store_offered_blocks_total") == {("host",): 7, ("disk",): 2}
    assert of_store(found, "baton_store_failed_writes_total") == {("disk", "EIO"): 1}
    assert of_store(found, "baton_store_tier_errors_total") == {("disk", "EIO"): 3}
    assert of_store(found, "baton_store_tier_offs_total") == {("disk",): 1}
    assert of_store(found, "baton_store_dropped_blocks_total") == {("orphan",): 4}
    assert of_store(found, "baton_store_blocks") == {("host",): 11, ("disk",): 40}
    assert of_store(found, "baton_store_load_block_seconds") == {("disk",): 0.5}
    assert found["baton_store_object_bytes"] == {STORE: 900}
    assert "baton_store_object_bytes_total" not in found
    assert found["baton_store_open_leases"] == {STORE: 6}


def test_no_series_of_workers_or_engines_has_a_store():
    """A worker with the same report has these series, which proves that the test can fail."""
    worker, store = shown(full_load(), Role.DECODE), shown(full_store_load())
    about_workers = {
        name
        for name, series in worker.items()
        if any("store-v1" in (value for _, value in key) for key in series)
    }
    assert len(about_workers) > 40
    assert any(name.startswith("vllm:") for name in about_workers)
    for name in about_workers:
        assert not any("store-v1" in dict(key).values() for key in store.get(name, {})), name
    assert not any(name.startswith("baton_store_") for name in worker)


LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=6)


@given(LENGTHS, st.integers(1, 8))
def test_slots_of_a_store_sum_to_its_memory_in_every_state(lengths, num_slots):
    address = TransferAddress(WorkerId("s0"), Incarnation("life"), "tcp://s0")
    shelves = {Medium.HOST: Shelf(num_slots, LeafLru()), Medium.DISK: Shelf(20, LeafLru())}
    store = StoreMachine(StoreTerms("s0", 1, 64, address, IntakePace()), shelves)
    router, seen, now_s = FakeRouter(), set[str](), 0.0
    for number, length in enumerate(lengths):
        tokens = list(range(number, number + length + 1))
        message = OfferPrefix(SeqId(str(number)), tokens)
        hashes = read_prompt(message, 1).block_hashes[:length]
        parents = [None, *hashes[:-1]]
        for block, parent in zip(hashes, parents, strict=True):
            if number % 2 and (place := store.holdings.take_place(Medium.DISK)) is not None:
                store.holdings.written(Medium.DISK, place, BlockHash(block), parent, now_s)
            elif slots := store.holdings.take(1):
                store.holdings.put(slots[0], BlockHash(block), parent, now_s)
        now_s += 1.0
        # opens leases, and loads blocks from disk
        store.handle(FromGateway(GatewayId("g"), message), now_s)
        store.validate()
        router.statuses[WorkerId("s0")] = WorkerStatus(Role.STORE, store.load(0, {}), 0, 0)
        slots_of = {each.name: each for each in store_families(router)}["baton_store_slots"]
        by_state = {each.labels["state"]: each.value for each in slots_of.samples}
        assert sum(by_state.values()) == num_slots
        seen |= {state for state, number in by_state.items() if number}
    assert seen - {"free"}
