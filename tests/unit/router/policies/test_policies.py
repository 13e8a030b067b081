"""Placements by each policy: the chosen worker, waiting, and requests that can never run."""

import random

import msgspec
import pytest

from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import PROTOCOL_VERSION, Role, Welcome
from router.cluster.view import ClusterView, WorkerView
from router.policies.base import Asked, Busy, Decision, Impossible, Need, Placement
from router.policies.candidates import Backlog, decode_blocks, find
from router.policies.pulling import Holders, bid
from router.policies.simple import LeastLoaded

LAYOUT = KVLayout(block_size=4, kv_format=KVFormat.FP32, sections=(KVSection(1, 1, 4),))
ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED}
BACKLOG = 20
NEED = Need(num_tokens=8, max_len=16)  # needs up to four blocks, of which prefill needs two


class First(random.Random):
    """Chooses the first worker by name among equals."""

    def choice(self, seq):
        return seq[0]


class Nothing:
    """Knows no cached prefixes and no costs."""

    def matched_tokens(self):
        return {}

    def matched_below(self):
        return {}

    def prefill_s(self, worker, num_tokens, num_cached):
        return None

    def pull_s(self, worker, num_tokens):
        return 1.0

    def offer_s(self):
        return 0.0

    def step_s(self, worker, num_seqs, context_tokens):
        return None


class Held(Nothing):
    """Knows cached leading blocks. A token takes a second, a pull the given time."""

    def __init__(self, blocks, pull_s) -> None:
        self.blocks = blocks
        self.pull_seconds = pull_s
        self.asked = []

    def matched_tokens(self):
        return {name: 4 * n for name, n in self.blocks.items()}

    def prefill_s(self, worker, num_tokens, num_cached):
        return float(num_tokens - num_cached)

    def pull_s(self, worker, num_tokens):
        self.asked.append(num_tokens)
        return self.pull_seconds


def worker(
    name: str, *, tokens: int = 0, blocks: int = 0, num_blocks: int = 10, max_running: int = 4
) -> WorkerView:
    """Returns a worker with these reservations. The first letter of its name is its role."""
    role = ROLES[name[0]]
    info = Welcome(PROTOCOL_VERSION, name, "life", role, "fp", LAYOUT, num_blocks, max_running)
    view = WorkerView(info)
    if tokens:
        view.reserve_prefill("other", tokens)
    if blocks:
        view.reserve_decode("other", blocks)
    return view


def place(*workers: WorkerView, need: Need = NEED):
    return least_loaded(ClusterView({w.info.worker_id: w for w in workers}), need)


def least_loaded(view: ClusterView, need: Need) -> Placement | Busy | Impossible:
    found = find(view, need, Backlog(BACKLOG, 1.0, Nothing(), 0.0))
    if isinstance(found, Busy | Impossible):
        return found
    choice = LeastLoaded().choose(Asked(view, found, need, Nothing(), Nothing(), 0.0, First()))
    assert isinstance(choice, Decision)
    return choice.placement


P0, D0, M0 = worker("p0"), worker("d0"), worker("m0")


@pytest.mark.parametrize(
    ("workers", "severed", "expected"),
    [
        (["p0", "p1", "d0"], ["p0 d0"], Placement("p1", "d0")),
        (["p0", "d0", "d1"], ["p0 d0"], Placement("p0", "d1")),
        (["p0", "p1", "d0", "d1"], ["p0 d0", "p1 d1"], Placement("p0", "d1")),
        (["p0", "p1", "d0", "d1"], ["p0 d0", "p0 d1", "p1 d0"], Placement("p1", "d1")),
        (["p0", "p1", "d0"], ["p0 d0", "p1 d0"], Placement("p0", "d0")),
        (["p0", "m0", "d0"], ["p0 d0", "p0 m0"], Placement("m0", "m0")),
        (["m0"], ["m0 d0"], Placement("m0", "m0")),
    ],
    ids=["prefill", "decode", "the first pair", "the last pair", "all", "mixed", "lost"],
)
def test_workers_between_which_kv_does_not_arrive_are_kept_apart(workers, severed, expected):
    view = ClusterView(
        {name: worker(name) for name in workers}, {tuple(pair.split()): 9.0 for pair in severed}
    )
    assert least_loaded(view, NEED) == expected


@pytest.mark.parametrize("busy", [worker("p1", tokens=19), worker("d1", blocks=9)])
def test_to_wait_for_workers_that_kv_can_reach_is_better_than_to_try_again(busy):
    workers = [worker("p0"), worker("d0"), busy]
    view = ClusterView({w.info.worker_id: w for w in workers}, {("p0", "d0"): 9.0})
    assert least_loaded(view, NEED) == Busy()


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([P0, D0], Placement("p0", "d0")),
        ([M0], Placement("m0", "m0")),
        ([M0, D0], Placement("m0", "m0")),
        ([P0, M0], Placement("m0", "m0")),
        ([worker("p0"), worker("m0", tokens=1)], Placement("p0", "m0")),
        ([worker("p0", tokens=8), worker("p1", tokens=7), D0], Placement("p1", "d0")),
        ([worker("p1"), worker("p0"), D0], Placement("p0", "d0")),
        ([P0, worker("d0", blocks=3), worker("d1", blocks=2)], Placement("p0", "d1")),
        (
            [P0, worker("d0", blocks=5), worker("d1", blocks=6, num_blocks=20)],
            Placement("p0", "d1"),
        ),
        ([P0, worker("d1"), worker("d0")], Placement("p0", "d0")),
        ([worker("m0", blocks=7), worker("p0", tokens=9), D0], Placement("p0", "d0")),
    ],
    ids=[
        "one of each",
        "mixed alone",
        "mixed goes on decoding",
        "mixed before prefill by name",
        "mixed only decodes",
        "shortest backlog",
        "first by name",
        "most free memory",
        "most free memory, as a share",
        "first decode worker by name",
        "mixed without memory for the answer",
    ],
)
def test_the_least_loaded_workers_are_chosen(workers, expected):
    assert place(*workers) == expected


@pytest.mark.parametrize(
    ("workers", "lacks"),
    [
        ([worker("p0", tokens=13), D0], Role.PREFILL),
        ([P0, worker("d0", blocks=7)], Role.DECODE),
        ([P0, worker("d0", blocks=1, max_running=1)], Role.DECODE),
        ([worker("m0", tokens=13)], Role.PREFILL),
        ([worker("m0", blocks=7)], Role.DECODE),
        ([worker("p0", tokens=13), worker("m0", blocks=7), D0], Role.PREFILL),
        ([worker("p0", num_blocks=1), worker("p1", tokens=13), D0], Role.PREFILL),
        ([P0, worker("d0", num_blocks=1), worker("d1", blocks=7)], Role.DECODE),
        ([D0], Role.PREFILL),
        ([P0], Role.DECODE),
    ],
    ids=[
        "backlog",
        "memory",
        "places",
        "mixed backlog",
        "mixed memory",
        "each lacks something",
        "one too small, the other busy",
        "one too small, the other full",
        "none prefills",
        "none decodes",
    ],
)
def test_a_request_waits_when_all_fitting_workers_are_full(workers, lacks):
    assert place(*workers) == Busy(lacks=lacks)


def test_a_backlog_may_be_filled_exactly():
    assert place(worker("p0", tokens=12), D0) == Placement("p0", "d0")


def test_an_idle_worker_takes_a_prompt_longer_than_any_backlog():
    need = Need(num_tokens=30, max_len=40)
    assert place(P0, D0, need=need) == Placement("p0", "d0")


def test_memory_may_be_filled_exactly():
    assert place(P0, worker("d0", blocks=6)) == Placement("p0", "d0")


@pytest.mark.parametrize(
    ("workers", "reason"),
    [
        ([P0, worker("d0", num_blocks=3)], "memory of any decode worker"),
        ([worker("m0", num_blocks=3)], "memory of any decode worker"),
        ([worker("p0", num_blocks=1), D0], "memory of any prefill worker"),
        ([worker("m0", num_blocks=3), D0], "memory of any prefill worker"),
    ],
    ids=[
        "answer too long",
        "answer too long for mixed",
        "prompt too long",
        "mixed cannot hold the answer, and would have to",
    ],
)
def test_request_beyond_every_live_worker_is_impossible(workers, reason):
    choice = place(*workers)
    assert isinstance(choice, Impossible)
    assert reason in choice.reason


def test_a_prompt_goes_to_a_worker_that_can_hold_it():
    small, large = worker("p0", num_blocks=1), worker("p1", tokens=12)
    assert place(small, large, D0) == Placement("p1", "d0")


def test_too_large_request_stays_impossible_on_full_workers():
    choice = place(worker("p0", tokens=20), worker("d0", num_blocks=3, blocks=3))
    assert isinstance(choice, Impossible)


def test_the_choice_does_not_depend_on_the_order_of_the_view():
    workers = [worker("p0"), worker("p1"), worker("d0"), worker("d1"), worker("m0", tokens=3)]
    assert place(*workers) == place(*reversed(workers)) == Placement("p0", "d0")


def test_choosing_changes_nothing():
    workers = [worker("p0", tokens=3), worker("d0", blocks=2)]
    before = [(w.reserved_tokens, w.reserved_blocks) for w in workers]
    place(*workers)
    assert [(w.reserved_tokens, w.reserved_blocks) for w in workers] == before


@pytest.mark.parametrize(("max_len", "blocks"), [(1, 1), (4, 1), (5, 2), (16, 4)])
def test_decode_memory_is_reserved_for_the_longest_answer(max_len, blocks):
    assert decode_blocks(D0, Need(1, max_len)) == blocks


# ---------------------------------------------------------------- KV of earlier attempts


@pytest.mark.parametrize(
    ("kept", "chosen"),
    [
        ({}, "d0"),
        ({"d1": 4}, "d1"),
        ({"d1": 4, "d2": 8}, "d2"),
        ({"d3": 100, "d1": 4}, "d1"),
        ({"gone": 100}, "d0"),
        ({"d1": 4, "d2": 4}, "d2"),
    ],
    ids=["nothing", "something", "more", "no room", "lost", "the emptier of two"],
)
def test_a_request_goes_back_to_where_an_earlier_attempt_left_blocks(kept, chosen):
    decoders = [D0, worker("d1", blocks=3), worker("d2", blocks=2)]
    full = worker("d3", blocks=8)
    need = Need(num_tokens=8, max_len=16, kept_tokens=kept)
    assert place(P0, *decoders, full, need=need) == Placement("p0", chosen)


# ---------------------------------------------------------------- sources of prefixes


def source(held, *, sink="p0", pull_s=0.0, others=(), known=None):
    """Returns the worker that offers its prefix to `sink`; `held` counts blocks of four tokens."""
    workers = [worker("p0"), worker("p1"), worker("d0"), *others]
    view = ClusterView({w.info.worker_id: w for w in workers})
    return source_in(view, known or Held(held, pull_s), sink)


def source_in(view, known, sink="p0"):
    need = Need(num_tokens=100, max_len=101)
    asked = Asked(view, None, need, known, known, 0.0, First())
    item = (sink, view.workers[sink])
    holders = Holders(asked)
    offer = bid(asked, item, holders.matched.get(sink, 0), holders.best_for(item))
    return offer.source and offer.source.worker_id


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ({}, None),
        ({"p0": 5}, None),
        ({"p0": 5, "p1": 5}, None),
        ({"p0": 5, "p1": 4}, None),
        ({"p0": 5, "p1": 6}, "p1"),
        ({"p1": 6, "d0": 7}, "d0"),
        ({"p1": 6, "d0": 6}, "d0"),
        ({"gone": 9, "p1": 6}, "p1"),
    ],
    ids=["none", "itself", "as much", "less", "more", "most", "by name", "lost"],
)
def test_prefix_is_pulled_from_the_longest_holder(held, expected):
    assert source(held) == expected


@pytest.mark.parametrize(
    ("kv_wire_dtype", "expected"), [(None, "p1"), (KVFormat.FP32, "p1"), (KVFormat.INT8, None)]
)
def test_a_prefix_that_would_be_rounded_on_its_way_is_computed(kv_wire_dtype, expected):
    workers = [worker("p0"), worker("p1")]
    for view in workers:
        view.info = msgspec.structs.replace(view.info, kv_wire_dtype=kv_wire_dtype)
    cluster = ClusterView({view.info.worker_id: view for view in workers})
    assert source_in(cluster, Held({"p1": 6}, 0.0)) == expected


@pytest.mark.parametrize(("pull_s", "expected"), [(15.9, "p1"), (16.0, None)])
def test_whether_it_pays_depends_on_the_blocks_that_are_not_here(pull_s, expected):
    known = Held({"p0": 2, "p1": 6}, pull_s)
    assert source({}, known=known) == expected
    assert known.asked == [16]


def test_no_pull_from_a_worker_after_a_failed_pull():
    view = ClusterView({n: worker(n) for n in ("p0", "p1", "d0")}, {("p1", "d0"): 9.0})
    assert source_in(view, Held({"p1": 6, "d0": 3}, 0.0)) == "d0"


@pytest.mark.parametrize(
    "stranger",
    [{"fingerprint": "other"}, {"layout": KVLayout(8, KVFormat.FP32, LAYOUT.sections)}],
    ids=["model", "layout"],
)
def test_no_pull_between_workers_of_other_models_or_layouts(stranger):
    other = worker("p2")
    other.info = msgspec.structs.replace(other.info, **stranger)
    assert source({"p2": 9, "p1": 3}, others=[other]) == "p1"
