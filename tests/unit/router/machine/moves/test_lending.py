"""Where sequences on a lending prefill worker move, while prompts wait for that worker."""

from types import SimpleNamespace

import pytest

from engine.demand import DecodeCost
from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import PROTOCOL_VERSION, Role, Welcome, WorkerId
from engine.worker.costs import PrefillCost, PullCost, WorkerCosts
from router.cluster.estimates import Estimates
from router.cluster.view import ClusterView, WorkerView
from router.machine.moves.free import Lending
from router.policies.base import EMPTY, Need, Queue

LAYOUT = KVLayout(16, KVFormat.BF16, (KVSection(1, 1, 8),))
# 10 ms plus 2 ms for each sequence
COSTS = WorkerCosts(PrefillCost(0.0, 1e-3), DecodeCost(0.01, 0.002, 0.0), PullCost(0.0, 0.0, 1e12))
NEED = Need(100, 200)  # 100 tokens are still to be generated


def worker(name, role, num_seqs):
    info = Welcome(
        PROTOCOL_VERSION, WorkerId(name), "life", role, "fp", LAYOUT, 1000, 999, stretch=4.0
    )
    view = WorkerView(info)
    for number in range(num_seqs):
        view.reserve_decode(f"s{number}", 4)
        view.begin_decode(f"s{number}")
    return view


def pays(queue, *, num_there, bound_s=None):
    """Returns whether a move pays off for one of two sequences on a prefill worker."""
    lending = Lending(
        SimpleNamespace(estimates=Estimates(COSTS)),
        SimpleNamespace(queue=lambda flight, now_s: queue),
        None,
    )
    flight = SimpleNamespace(limits=SimpleNamespace(tpot_s=bound_s), length=100)
    way = worker("p0", Role.PREFILL, 2), worker("d0", Role.DECODE, num_there)
    return lending._pays(flight, NEED, way, 0.0)


@pytest.mark.parametrize(("bound_s", "is_moved"), [(0.021, False), (0.023, True)])
def test_a_bound_must_hold_where_it_goes(bound_s, is_moved):
    """With the moved sequence, a step of the six sequences on d0 takes 22 ms."""
    assert pays(Queue(9.0, 9.0), num_there=5, bound_s=bound_s) is is_moved


@pytest.mark.parametrize(
    ("queue", "is_moved"),
    [
        (EMPTY, False),
        # Waiting prompts would save less than 1.4 s: the moved sequence loses 0.8 s, d0's others
        # the rest.
        (Queue(1.0, 0.8), False),
        (Queue(4.0, 1.0), True),
        # prompts keep arriving, so the sequence is no faster on p0
        (Queue(1.0, 0.1, busy=0.9), True),
    ],
)
def test_without_a_bound_it_moves_if_prompts_save_more_than_it_loses(queue, is_moved):
    assert pays(queue, num_there=5) is is_moved


def test_it_moves_to_where_it_is_quicker():
    assert pays(EMPTY, num_there=0)


@pytest.mark.parametrize(
    ("num_there", "bound_s", "target"),
    [
        ((3, 4), 0.03, "p2"),  # the fuller lender: its step takes 20 ms with the moved sequence
        ((3, 4), 0.019, "p1"),  # its step takes 18 ms with the moved sequence
        ((3, 4), 0.017, None),
        ((2, 1), 0.03, None),  # no lender is fuller than the present worker
        ((3, 240), 9.0, "p1"),  # p2 has no memory left to lend
    ],
)
def test_with_a_bound_it_moves_to_a_fuller_lender(num_there, bound_s, target):
    """The present worker has two sequences. Each sequence holds four of 1,000 blocks."""
    view = ClusterView()
    for i, num_seqs in enumerate((2, *num_there)):
        name = f"p{i}"
        view.workers[WorkerId(name)] = worker(name, Role.PREFILL, num_seqs)
    view.measure()
    lending = Lending(SimpleNamespace(view=view, estimates=Estimates(COSTS)), None, None)
    assert lending._fuller_lender(NEED, view.workers[WorkerId("p0")], bound_s) == target
    view.severed = {(WorkerId("p0"), WorkerId(f"p{i}")): 1.0 for i in (1, 2)}
    assert lending._fuller_lender(NEED, view.workers[WorkerId("p0")], bound_s) is None
