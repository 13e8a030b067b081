"""Pulls on one host end without an answer of the source; the ordering thread runs short ones
itself.
"""

import threading

import numpy as np
import pytest

from engine.config import Transport
from engine.worker.events import PullDone
from kvtransfer import endpoint as endpoints
from tests.kits.endpoints import fill, until, worker

pytestmark = pytest.mark.parametrize("transport", [Transport.SHM, Transport.NIXL])


def hold_until_known(source, sink, name):
    """Leases out two blocks, and waits until the sink knows that they are ready."""
    lease = source.lease(name, [3, 4])
    sink.hold(name, lease)
    until(
        lambda: any(len(p.source_blocks) == 2 for p in list(sink.endpoint.sink._pulls.values())),
        "the sink knows the blocks",
    )


def pull_with(transport, then):
    with worker("source", transport) as source, worker("sink", transport) as sink:
        fill(source.pool, seed=1)
        then(source, sink)


def test_a_pull_is_done_while_its_source_cannot_answer(transport):
    def then(source, sink):
        hold_until_known(source, sink, "s")
        with source.endpoint._lock:
            sink.start("s", [(0, 7), (1, 8)])
            assert isinstance(sink.end_of_pull(), PullDone)
            assert np.array_equal(sink.pool.blocks[[7, 8]], source.pool.blocks[[3, 4]])
        assert source.end_of_lease().reason == "released"

    pull_with(transport, then)


@pytest.mark.parametrize("is_short", [True, False])
def test_only_a_short_pull_is_carried_out_by_the_thread_that_orders_it(
    transport, is_short, monkeypatch
):
    if not is_short:
        monkeypatch.setattr(endpoints, "SHORT_PULL_BYTES", 2**13)
    threads = []

    def then(source, sink):
        report = sink.endpoint._on_event
        sink.endpoint._on_event = lambda event: (
            threads.append(threading.current_thread()),
            report(event),
        )
        # repeated, since the endpoint's thread may carry out some of the pulls
        for number in range(40):
            hold_until_known(source, sink, f"s{number}")
            sink.start(f"s{number}", [(0, 7), (1, 8)])
            assert isinstance(sink.end_of_pull(), PullDone)
            if threading.current_thread() in threads:
                return

    pull_with(transport, then)
    assert (threading.current_thread() in threads) == is_short


def test_blocks_of_a_pull_that_waits_are_touched_before_they_come(transport, monkeypatch):
    touched = []
    monkeypatch.setattr(endpoints, "touch", lambda blocks, block: touched.append(block) or True)

    def then(source, sink):
        lease = source.lease("l", [3, 4, 5], ready=0)
        sink.hold("s", lease)
        sink.start("s", [(0, 7), (1, 8), (2, 9)])
        until(lambda: touched == [7, 8, 9], "touched")
        source.grow("l", [3, 4, 5])
        assert isinstance(sink.end_of_pull(), PullDone)
        assert np.array_equal(sink.pool.blocks[[7, 8, 9]], source.pool.blocks[[3, 4, 5]])

    pull_with(transport, then)
