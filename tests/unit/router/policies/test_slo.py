"""The `slo` policy: the lowest predicted TTFT among placements that keep the TPOT bound."""

import random
from dataclasses import replace

import msgspec
import pytest

from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import PROTOCOL_VERSION, LoadReport, Role, Welcome
from router.cluster.view import ClusterView, WorkerView
from router.policies.base import Asked, Busy, Need, Placement, SharedPrompt
from router.policies.candidates import Backlog, find
from router.policies.slo import Slo
from tests.kits.twins import slo as slo_twin

LAYOUT = KVLayout(block_size=4, kv_format=KVFormat.FP32, sections=(KVSection(1, 1, 4),))
ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED, "s": Role.STORE}
NEED = Need(num_tokens=100, max_len=120)


class Costs:
    """Prefill takes 10 ms per token, a pull 1 ms per token, and a step 10 ms per sequence."""

    def __init__(
        self,
        matched=(),
        *,
        below=(),
        loads=(),
        pull_token_s=1e-3,
        seq_s=1e-2,
        token_s=1e-2,
        busy_offer_s=0.0,
    ) -> None:
        self.matched, self.below, self.loads = dict(matched), dict(below), dict(loads)
        self.busy_offer_s = busy_offer_s
        self.pull_token_s, self.seq_s, self.token_s = pull_token_s, seq_s, token_s

    def matched_tokens(self):
        return self.matched

    def matched_below(self):
        return self.below

    def prefill_s(self, worker, num_tokens, num_cached):
        return None if self.token_s is None else self.token_s * (num_tokens - num_cached)

    def pull_s(self, worker, num_tokens):
        return self.pull_token_s * num_tokens

    def load_s(self, store, medium, num_blocks):
        fixed_s, block_s = self.loads[medium]
        return fixed_s + block_s * num_blocks

    def offer_s(self):
        return self.busy_offer_s

    def step_s(self, worker, num_seqs, context_tokens):
        if self.seq_s is None:
            return None
        return self.seq_s * num_seqs + 1e-5 * context_tokens


def worker(name, *, busy_s=0.0, seqs=0, num_blocks=1000, max_running=50) -> WorkerView:
    role = ROLES[name[0]]
    info = Welcome(PROTOCOL_VERSION, name, "life", role, "fp", LAYOUT, num_blocks, max_running)
    view = WorkerView(info)
    if busy_s:
        view.reserve_prefill("busy", int(100 * busy_s), seconds=busy_s)
    for number in range(seqs):
        view.reserve_decode(f"seq-{number}", 25, context_tokens=100)
    return view


def choose(*workers, need=NEED, known=None, bound_s=9.0, now_s=0.0, severed=(), seed=0):
    asked = asked_of(
        *workers, need=need, known=known, bound_s=bound_s, now_s=now_s, severed=severed, seed=seed
    )
    return slo_twin.choose(asked) if isinstance(asked, Asked) else asked


def asked_of(*workers, need=NEED, known=None, bound_s=9.0, now_s=0.0, severed=(), seed=0):
    view = ClusterView({w.info.worker_id: w for w in workers}, dict.fromkeys(severed, 99.0))
    known = known or Costs()
    found = find(view, need, Backlog(1024, bound_s, known, now_s))
    if isinstance(found, Busy):
        return found
    return Asked(view, found, need, known, known, now_s, random.Random(seed))


D0 = worker("d0")


def test_time_that_has_passed_is_not_waited_for_again():
    late = choose(worker("p0", busy_s=0.5), D0, now_s=0.4)
    assert late.predicted_ttft_s == pytest.approx(0.1 + 1.0)


@pytest.mark.parametrize(("busy_s", "offer_s", "wait_s"), [(0.5, 0.3, 0.3), (0.2, 0.3, 0.2)])
def test_an_offer_of_a_worker_that_computes_is_waited_for(busy_s, offer_s, wait_s):
    known = Costs({"p0": 80}, busy_offer_s=offer_s, pull_token_s=1e-4)
    choice = choose(worker("p0", busy_s=busy_s), worker("p1"), D0, known=known, bound_s=0.01)
    assert (choice.placement.prefill, choice.pulled_from) == ("p1", "p0")
    assert choice.predicted_ttft_s == pytest.approx(wait_s + 0.008 + 0.2)


def test_a_prefix_that_would_be_offered_too_late_is_computed():
    known = Costs({"p0": 80}, busy_offer_s=0.9)
    choice = choose(worker("p0", busy_s=2.0), worker("p1"), D0, known=known)
    assert (choice.placement.prefill, choice.pulled_from) == ("p1", None)


def test_a_store_answers_at_once_where_a_worker_that_computes_does_not():
    known = Costs({"p0": 80, "s0": 80}, busy_offer_s=0.3)
    for seed in range(8):
        choice = choose(
            worker("p0", busy_s=0.5), worker("p1"), worker("s0"), D0, known=known, seed=seed
        )
        assert (choice.pulled_from, choice.pulled_medium) == ("s0", "host")


def test_the_deepest_holders_of_all_media_are_weighed():
    stores = worker("s0"), worker("s1")
    below = {("s0", "disk"): 80, ("s1", "disk"): 60, ("s1", "object"): 96}
    loads = {"disk": (0.1, 0.0), "object": (0.0, 0.05)}
    known = Costs({"p0": 40, "s1": 20}, below=below, loads=loads)
    choice = choose(worker("p0"), *stores, D0, known=known)
    assert (choice.pulled_from, choice.pulled_medium) == ("s0", "disk")
    # the pull's 0.04 s overlaps with the load from disk
    assert choice.predicted_ttft_s == pytest.approx(0.1 + 0.2)
    known.loads["object"] = (0.0, 0.01)
    choice = choose(worker("p0"), *stores, D0, known=known)
    assert (choice.pulled_from, choice.pulled_medium) == ("s1", "object")
    # s1 has 15 blocks on disk and 9 more in the object store, and reads both in parallel
    assert choice.predicted_load_s == pytest.approx(max(0.1, 9 * 0.01))


def test_a_worker_that_holds_more_than_a_store_reads_nothing():
    known = Costs({"p0": 96}, below={("s0", "disk"): 96}, loads={"disk": (0.0, 0.0)})
    assert choose(worker("p0"), worker("s0"), D0, known=known).pulled_from is None


@pytest.mark.parametrize("known", [Costs(token_s=None), Costs(seq_s=None)])
def test_before_costs_are_known_the_shortest_backlog_and_the_emptiest_memory_are_chosen(known):
    workers = worker("p0", busy_s=0.5), worker("p1"), worker("d0", seqs=2), worker("d1", seqs=1)
    choice = Slo().choose(asked_of(*workers, known=known))
    assert choice.placement == Placement("p1", "d1")
    assert (choice.predicted_ttft_s, choice.why) == (None, "nothing was measured yet")


def test_followers_stay_with_their_leader():
    near = Placement("p1", "d1")
    need = Need(num_tokens=100, max_len=120, shared=SharedPrompt(near, 96))
    workers = [worker("p0"), worker("p1"), D0, worker("d1", seqs=3)]
    assert choose(*workers, need=need).placement == near


@pytest.mark.parametrize(("busy_s", "follows"), [(0.0, True), (9.0, False)])
def test_followers_stay_with_a_leader_that_was_prefilled_where_it_decodes(busy_s, follows):
    near = Placement("d1", "d1")
    need = Need(num_tokens=100, max_len=120, shared=SharedPrompt(near, 96))
    local = worker("d1", busy_s=busy_s)
    local.info = msgspec.structs.replace(local.info, stretch=4.0)
    asked = asked_of(worker("p0"), D0, local, need=need)
    asked = replace(asked, wait_bound_s=1.0)
    assert (slo_twin.choose(asked).placement == near) is follows


# ---------------------------------------------------------------- late binding


def test_work_of_other_gateways_is_waited_for_and_done_with_time():
    view = worker("p0")
    view.report(LoadReport(0, 0, 0, 0, 0, 0, 0, 0, prompt_tokens=200), 1.0)
    assert choose(view, D0, bound_s=0.5, now_s=1.0) == Busy(2.5, Role.PREFILL)
    assert choose(view, D0, bound_s=0.5, now_s=2.5).predicted_ttft_s == pytest.approx(0.5 + 1.0)
    assert choose(view, D0, bound_s=0.5, now_s=9.0).predicted_ttft_s == pytest.approx(1.0)
