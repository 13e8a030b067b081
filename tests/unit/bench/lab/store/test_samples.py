"""Samples of stores are read from a gateway's metrics."""

import pytest

from bench.lab.store.parts import num_slots, store_samples

TEXT = """# HELP baton_store_slots Slots of the store's memory by state
# TYPE baton_store_slots gauge
baton_store_slots{state="free",store="store-v1"} 5.0
baton_store_slots{state="cached",store="store-v1"} 3.0
baton_store_slots{state="leased",store="store-v1"} 2.0
baton_store_slots{state="free",store="store-v2"} 7.0
baton_store_open_leases{store="store-v1"} 1.0
baton_store_tier_reads_total{medium="disk",store="store-v1"} 1.2e+03
baton_store_failed_loads_total{medium="disk",reason="EIO",store="store-v1"} 1.0
baton_store_failed_loads_total{medium="disk",reason="short",store="store-v1"} 2.0
baton_worker_blocks{role="prefill",state="free",worker="worker-0"} 99.0
"""


def test_samples_of_all_stores_are_added_and_those_of_workers_are_left_out():
    assert store_samples(TEXT) == {
        "slots:free": 12.0,
        "slots:cached": 3.0,
        "slots:leased": 2.0,
        "open_leases": 1.0,
        "tier_reads_total:disk": 1200.0,
        "failed_loads_total:disk": 3.0,
    }


@pytest.mark.parametrize(("text", "slots"), [(TEXT, 17.0), ("", 0.0)])
def test_slots_in_all_states_are_the_size_of_memory(text, slots):
    assert num_slots(store_samples(text)) == slots
