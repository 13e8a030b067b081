"""C++ placements compared with the `slo` policy in Python, and the updates that C++ receives."""

import math
import random
from collections import Counter
from types import SimpleNamespace

import msgspec
import pytest

from engine.demand import DecodeCost
from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import (
    PROTOCOL_VERSION,
    ROLES_OF_WORKERS,
    LoadReport,
    Role,
    RoleChanged,
    StepReport,
    Welcome,
    WorkerId,
)
from engine.worker.block_events import LOWER_MEDIA, Medium
from engine.worker.blocks import BlockHash
from engine.worker.costs import PrefillCost, PullCost, WorkerCosts
from router.cluster.estimates import Estimates
from router.cluster.view import ClusterView
from router.native.fleet import Fleet
from router.native.index import PrefixIndex, name_on
from router.policies.base import (
    EMPTY,
    Asked,
    Busy,
    Candidates,
    Decision,
    Impossible,
    Need,
    Placement,
    Queue,
)
from router.policies.candidates import LEAST_WAIT_S, Backlog, find
from tests.kits.seeds import seeds
from tests.kits.twins.slo import choose

BLOCK = 16
BACKLOG_S = 3.0
QUEUES = EMPTY, Queue(0.5, 0.25), Queue(busy=0.6), Queue(4.0, 2.0, 0.5)
LAYOUT = KVLayout(BLOCK, KVFormat.BF16, (KVSection(1, 1, 8),))
NARROW = KVLayout(BLOCK, KVFormat.INT8, (KVSection(1, 1, 8),))
# Sums of these numbers are exact, so ties occur.
ROUND = WorkerCosts(
    PrefillCost(0.125, 2**-7, 0.0), DecodeCost(0.125, 2**-6, 2**-14), PullCost(0.0, 2**-5, math.inf)
)
CURVED = WorkerCosts(PrefillCost(0.125, 2**-7, 2**-16), ROUND.decode, ROUND.pull)
NEVER_PULL = WorkerCosts(ROUND.prefill, ROUND.decode, PullCost(1e6, 0.0, math.inf))
QUICK = WorkerCosts(PrefillCost(0.0, 2**-12, 0.0), DecodeCost(0.25, 0.0, 0.0), ROUND.pull)


def welcome(name, role, *, local=False, num_blocks=100, max_running=8, layout=LAYOUT, wire=None):
    return Welcome(
        PROTOCOL_VERSION,
        WorkerId(name),
        "life",
        role,
        "fp",
        layout,
        num_blocks,
        max_running,
        kv_wire_dtype=wire,
        stretch=4.0 if local else None,
    )


class Cluster:
    """A view and its C++ fleet, and the Python policy with the same inputs."""

    def __init__(self, *workers, costs=ROUND, seed=0, backlog_s=BACKLOG_S):
        self.view = ClusterView()
        self.on_lower = {}  # by the name in the index: store and medium
        self.index = PrefixIndex(seed=seed)
        self.estimates = Estimates(costs)
        self.backlog_s = backlog_s
        self.queue = EMPTY
        self.fleet = Fleet(self.view, self.index, self.estimates, backlog_s=backlog_s, seed=seed)
        for info in workers:
            self.add(info)

    def add(self, info):
        self.index.add(info.worker_id, info.num_blocks)
        if info.role is Role.STORE:
            for medium in LOWER_MEDIA:
                lower = name_on(info.worker_id, medium)
                self.index.add(lower, info.num_blocks)
                self.on_lower[lower] = info.worker_id, medium
        self.fleet.add(self.view.add(info))

    def lose(self, name):
        self.fleet.remove(self.view.remove(name))
        for each in [name, *(i for i, (store, _) in self.on_lower.items() if store == name)]:
            self.index.remove(each)
            self.on_lower.pop(each, None)

    def change_role(self, name, message):
        worker = self.view.workers[name]
        self.fleet.remove(worker)
        worker.change_role(message)
        self.view.measure()
        self.fleet.add(worker)

    def change_info(self, name, **fields):
        worker = self.view.workers[name]
        self.fleet.remove(worker)
        worker.info = msgspec.structs.replace(worker.info, **fields)
        self.view.measure()
        self.fleet.add(worker)

    def hold(self, name, hashes):
        self.index.stored(WorkerId(name), hashes)

    def fleet_choice(self, need, hashes=(), now_s=0.0, other_than=None):
        known = list(hashes)[: (need.num_tokens - 1) // BLOCK]
        choice = self.fleet.choose(need, known, now_s, self.queue, other_than=other_than)
        if isinstance(choice, Decision):  # nothing stays claimed: the reservation is undone
            self.view.touched |= {choice.placement.prefill, choice.placement.decode}
        return choice

    def asked(self, need, hashes=(), now_s=0.0, seed=0):
        backlog = Backlog(10**6, self.backlog_s, self.estimates, now_s)
        found = find(self.view, need, backlog, is_fluid=True)
        if not isinstance(found, Candidates):
            return found
        known = list(hashes)[: (need.num_tokens - 1) // BLOCK]
        held = {i: n * BLOCK for i, n in self.index.longest(known).items()}
        matched = {i: n for i, n in held.items() if i not in self.on_lower}
        below = {self.on_lower[i]: n for i, n in held.items() if i in self.on_lower}
        return Asked(
            self.view,
            found,
            need,
            SimpleNamespace(matched_tokens=lambda: matched, matched_below=lambda: below),
            self.estimates,
            now_s,
            random.Random(seed),
            wait_bound_s=self.backlog_s + LEAST_WAIT_S,
        )

    def policy_choice(self, need, hashes=(), now_s=0.0, seed=0):
        asked = self.asked(need, hashes, now_s, seed)
        return choose(asked, self.queue) if isinstance(asked, Asked) else asked


def chain(seed, num_blocks=12):
    rng = random.Random(seed)
    return [BlockHash(rng.randbytes(16)) for _ in range(num_blocks)]


# ---------------------------------------------------------------- random clusters


TIES = 60  # random tie-breaks tried before two choices count as different


class RandomCluster:
    """A cluster of workers with random claims and blocks."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.now_s = 10.0
        costs = rng.choice([ROUND, CURVED, NEVER_PULL, QUICK])
        self.cluster = Cluster(costs=costs, seed=seed)
        self.chains = [chain(100 + i) for i in range(4)]
        self.num_seqs = 0
        self.outcomes = Counter()
        self.media = Counter()  # number of prefix pulls, by medium
        mixes = [Role.PREFILL, Role.DECODE], [Role.MIXED], sorted(ROLES_OF_WORKERS)
        self.roles = rng.choice(mixes)
        # A rule may choose either of two idle prefill workers, so either all are fluid or none.
        self.are_fluid = rng.random() < 0.7
        self.sizes = [(rng.randint(20, 80), rng.randint(1, 6)) for _ in range(2)]
        self.num_workers = rng.choice([2, 3, 5, 70, 150])
        self.num_stores = rng.choice([0, 1, 3, 50])  # more than the C++ code checks one by one
        for name in rng.sample([f"s{i}" for i in range(self.num_stores)], self.num_stores // 2):
            self.add(name)  # some stores join before the first worker
        for i in range(self.num_workers):
            self.add(f"w{i}")

    def add(self, name):
        rng = self.rng
        role = Role.STORE if name[0] == "s" else rng.choice(self.roles)
        num_blocks, max_running = rng.choice(self.sizes)
        self.cluster.add(
            welcome(
                name,
                role,
                local=role is not Role.STORE and self.are_fluid,
                num_blocks=num_blocks,
                max_running=max_running,
                layout=rng.choice([LAYOUT, LAYOUT, NARROW]),
                wire=rng.choice([None, None, KVFormat.INT8]),
            )
        )
        if role is Role.STORE:
            self.tell_loads(self.cluster.view.workers[name])

    @property
    def workers(self):
        return list(self.cluster.view.workers.values())

    def step(self):
        self.rng.choices(
            [
                *(self.prefill, self.decode, self.end, self.report, self.store),
                *(self.lose, self.join, self.observe, self.go_on, self.change_role),
            ],
            [4, 4, 4, 2, 6, 0.4, 0.8, 1, 4, 1],
        )[0]()
        self.now_s += self.rng.choice([0.0, 0.125, 1.0])
        self.compare()

    def next_seq(self):
        self.num_seqs += 1
        return f"s{self.num_seqs}"

    def prefill(self):
        worker = self.rng.choice(self.workers)
        if worker.info.role.prefills or worker.info.generates:
            worker.reserve_prefill(
                self.next_seq(),
                self.rng.randint(1, 99),
                seconds=self.rng.choice([0.25, 1.0, 2.5]),
                now_s=self.now_s,
                waits=self.rng.random() < 0.2,
            )

    def decode(self):
        worker = self.rng.choice(self.workers)
        if worker.info.role.decodes or (worker.info.is_fluid and self.rng.random() < 0.4):
            seq_id = self.next_seq()
            worker.reserve_decode(
                seq_id, self.rng.randint(1, 12), context_tokens=self.rng.randint(1, 99)
            )
            if self.rng.random() < 0.5:
                worker.begin_decode(seq_id)

    def go_on(self):
        worker = self.rng.choice(self.workers)
        for seq_id in list(worker.prefills)[:1]:
            worker.begin_prefill(seq_id, self.now_s)
        for seq_id, claim in list(worker.decodes.items())[:1]:
            worker.extend_decode(seq_id, claim.blocks + 5)
            worker.begin_decode(seq_id)

    def end(self):
        worker = self.rng.choice(self.workers)
        for seq_id in list(worker.prefills)[:2]:
            worker.release_prefill(seq_id, self.now_s)
        for seq_id in list(worker.decodes)[:1]:
            worker.release_decode(seq_id)

    def report(self):
        rng, worker = self.rng, self.rng.choice(self.workers)
        if worker.is_store:
            self.tell_loads(worker)
            return
        load = LoadReport(
            *(0,) * 8,
            prompt_tokens=rng.choice([0, 0, 64, 256]),
            decode_seqs=rng.randint(0, 2),
            decode_blocks=rng.randint(0, 9),
            context_tokens=rng.randint(0, 99),
        )
        worker.report(load, self.now_s)

    def tell_loads(self, store):
        """Reports a store's costs of lower media. Some costs are missing or invalid."""
        rng = self.rng
        gauges = {}
        for medium in LOWER_MEDIA:
            fixed_s, block_s = rng.choice([0.0, 2**-5, 0.25]), rng.choice([0.0, 2**-8, 2**-5])
            gauges[f"load_fixed_s:{medium}"] = fixed_s
            gauges[f"load_block_s:{medium}"] = rng.choice([*(block_s,) * 8, math.nan, -1.0])
        for name in [name for name in gauges if rng.random() < 0.1]:
            del gauges[name]
        store.report(LoadReport(*(0,) * 8, gauges=gauges), self.now_s)

    def store(self):
        # nearly all workers, like a system prompt
        most = self.rng.choice([1, 2, len(self.workers)])
        for worker in self.rng.sample(self.workers, self.rng.randint(1, most)):
            blocks = self.rng.choice(self.chains)
            self.cluster.hold(worker.info.worker_id, blocks[: self.rng.randint(0, 12)])
            for medium in LOWER_MEDIA if worker.is_store else ():
                name = name_on(worker.info.worker_id, medium)
                self.cluster.hold(name, blocks[: self.rng.randint(0, 12)])
                if self.rng.random() < 0.7:  # evicts some blocks from the media above
                    above = worker.info.worker_id, name_on(worker.info.worker_id, "disk")
                    for each in above[: LOWER_MEDIA.index(medium) + 1]:
                        self.cluster.index.removed(each, blocks[self.rng.randint(0, 12) :])

    def lose(self):
        if len(self.workers) > 2:
            self.cluster.lose(self.rng.choice(self.workers).info.worker_id)

    def join(self):
        """Adds a worker, sometimes with the name of a lost worker."""
        name = f"w{self.rng.randrange(2 * self.num_workers)}"
        if self.num_stores and self.rng.random() < 0.5:
            name = f"s{self.rng.randrange(self.num_stores)}"
        if name not in self.cluster.view.workers:
            self.add(name)

    def change_role(self):
        """Changes a worker's role. Claims remain, even claims that the new role would not get."""
        role = self.rng.choice(sorted(ROLES_OF_WORKERS))
        worker = self.rng.choice(self.workers)
        if not worker.is_store:
            self.cluster.change_role(worker.info.worker_id, RoleChanged(role))

    def observe(self):
        """Observes costs, sometimes often enough to change the estimates."""
        rng, worker, estimates = self.rng, self.rng.choice(self.workers), self.cluster.estimates
        for _ in range(rng.choice([1, 20])):
            num_tokens = rng.choice([16, 64, 256])
            estimates.observe_prefill(worker, num_tokens, num_cached=0, seconds=num_tokens / 64)
            step = StepReport(0.25, num_rows=1, num_context_tokens=num_tokens)
            estimates.observe_steps(worker, [step])

    def compare(self):
        rng = self.rng
        hashes = rng.choice(self.chains)[: rng.randint(0, 12)]
        num_tokens = len(hashes) * BLOCK + rng.randint(0, 30) or 1
        max_len = num_tokens + rng.randint(1, 200)
        need = Need(
            num_tokens,
            max_len,
            predicted_len=rng.choice([None, num_tokens + 20]),
            tpot_bound_s=rng.choice([None, 0.2, 0.3]),
            may_pull=rng.random() < 0.9,
            kept_tokens=self.some_workers(16),
            preempted_s=self.some_workers(self.now_s),
        )
        self.cluster.queue = rng.choice(QUEUES)
        ours = self.cluster.fleet_choice(need, hashes, self.now_s)
        theirs = self.cluster.policy_choice(need, hashes, self.now_s, seed=rng.random())
        self.outcomes[_outcome(ours)] += 1
        if ours is None:
            # a store neither prefills nor decodes
            roles = [worker.info.role for worker in self.workers]
            complete = any(r.prefills for r in roles) and any(r.decodes for r in roles)
            # C++ then leaves the decision to Python
            assert isinstance(theirs, Impossible) or not complete
        elif isinstance(ours, Busy):
            assert isinstance(theirs, Busy)
            assert ours.lacks is theirs.lacks
            if ours.until_s is not None:
                assert ours.until_s == pytest.approx(theirs.until_s)
        else:
            if ours.predicted_ttft_s != pytest.approx(theirs.predicted_ttft_s):
                theirs = self.another(ours, hashes, need)
            self.check(ours, theirs, hashes, need)

    def some_workers(self, value):
        """Sets this value for some workers, with a low probability."""
        names = [worker.info.worker_id for worker in self.workers if not worker.is_store]
        num = min(self.rng.choice([0] * 8 + [1, 2, 40]), len(names))
        return dict.fromkeys(self.rng.sample(names, num), value)

    def another(self, ours, hashes, need):
        """Returns another choice of the Python policy.

        Of decode workers with equal TPOT, some prefill locally; random tie-breaks choose between
        them.
        """
        for seed in range(TIES):
            theirs = self.cluster.policy_choice(need, hashes, self.now_s, seed)
            if ours.predicted_ttft_s == pytest.approx(theirs.predicted_ttft_s):
                break
        return theirs

    def check(self, ours, theirs, hashes, need):
        """Asserts that both choices are equally good, and that C++ describes its choice
        correctly."""
        assert ours.predicted_ttft_s == pytest.approx(theirs.predicted_ttft_s)
        apart = ours.placement.prefill != ours.placement.decode
        if apart and theirs.placement.prefill != theirs.placement.decode:
            assert ours.predicted_tpot_s == pytest.approx(theirs.predicted_tpot_s)
        matched = self.cluster.index.longest(hashes[: (need.num_tokens - 1) // BLOCK])
        assert ours.num_matched_tokens == matched.get(ours.placement.prefill, 0) * BLOCK
        view = self.cluster.view.workers
        if ours.pulled_from is None:
            assert (ours.pulled_medium, ours.predicted_load_s) == (None, 0.0)
            return
        source = view[ours.pulled_from]
        assert (ours.pulled_medium is not None) == source.is_store
        self.media[ours.pulled_medium] += 1
        name = name_on(ours.pulled_from, ours.pulled_medium or Medium.HOST)
        assert ours.num_cached_tokens == matched[name] * BLOCK
        assert view[ours.placement.prefill].can_pull_from(source)
        if theirs.placement.prefill == ours.placement.prefill:
            assert (
                ours.pulled_medium in (None, Medium.HOST)
                or theirs.pulled_medium == ours.pulled_medium
            )
            assert ours.predicted_load_s == pytest.approx(theirs.predicted_load_s)


def _outcome(choice):
    if not isinstance(choice, Decision):
        return type(choice).__name__
    return choice.why


@pytest.mark.parametrize("seed", seeds(40))
def test_the_fleet_chooses_as_well_as_the_policy(seed):
    both = RandomCluster(seed)
    for _ in range(50):
        both.step()
    both.cluster.view.validate()
    both.cluster.fleet.validate()


def test_random_clusters_are_decided_in_every_way():
    outcomes, media = Counter(), Counter()
    for seed in seeds(100):
        both = RandomCluster(seed)
        for _ in range(25):
            both.step()
        outcomes += both.outcomes
        media += both.media
    local = ("decoded where it is prefilled", "prefilled by a decode worker")
    ways = ["least TTFT", *(f"least TTFT, {why}" for why in local)]
    ways += [f"{why}, with a prefix pulled" for why in ways]
    lent = "least TTFT, decoded by an idle prefill worker"
    apart = "least TTFT, decoded by another prefill worker"
    either = {
        f"{why}{pulled}" for why in (lent, apart) for pulled in ("", ", with a prefix pulled")
    }
    assert outcomes.keys() | either == {*ways, *either, "Busy", "NoneType"}
    assert outcomes[lent] > 0
    assert min(media[medium] for medium in (None, Medium.HOST, *LOWER_MEDIA)) > 1


# ---------------------------------------------------------------- single cases

P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED
BLOCKS = chain(1, 8)
NEED = Need(8 * BLOCK + 1, 8 * BLOCK + 40)


def cluster_of(*roles, **fields):
    """Returns a cluster of p0, p1, d0, …; l0, l1, … are decode workers that prefill locally."""
    kinds = {"p": P, "d": D, "l": D, "m": M, "s": Role.STORE}
    return Cluster(*(welcome(n, kinds[n[0]], local=n[0] == "l") for n in roles), **fields)


def test_decision_is_reserved_for_the_next_one():
    cluster = cluster_of("p0", "p1", "d0", "d1")
    first, second = (cluster.fleet.choose(NEED, [], 0.0) for _ in range(2))
    assert {first.placement.prefill, second.placement.prefill} == {"p0", "p1"}
    assert {first.placement.decode, second.placement.decode} == {"d0", "d1"}
    third = cluster.fleet.choose(NEED, [], 0.0)
    assert third.predicted_ttft_s == pytest.approx(2 * first.predicted_ttft_s)


def test_claims_other_than_the_decision_count():
    cluster = cluster_of("p0", "p1", "d0")
    first = cluster.fleet.choose(NEED, [], 0.0)
    for name in ("p0", "p1"):
        cluster.view.workers[name].reserve_prefill("s", 9, seconds=0.5)
        cluster.view.workers[name].release_prefill("s")
    assert cluster.fleet.choose(NEED, [], 0.0).predicted_ttft_s == first.predicted_ttft_s


def test_an_idle_decode_worker_takes_a_prompt_that_would_wait():
    cluster = cluster_of("p0", "l0", costs=QUICK)
    cluster.view.workers["p0"].reserve_prefill("s", 9, seconds=1.0)
    for need in (NEED, Need(1400, 1450)):
        choice = cluster.fleet_choice(need)
        assert (choice.placement, choice.slowdown) == (Placement("l0", "l0"), 1.0)
        assert choice.why == "least TTFT, prefilled by a decode worker"


@pytest.mark.parametrize(("bound_s", "slowdown"), [(None, 4 / 3), (0.5, 2.0), (0.3, 6.0)])
def test_a_prompt_takes_longer_beside_decoding_sequences(bound_s, slowdown):
    """A decode step takes a quarter of a second, and a prompt takes a third of a step."""
    cluster = cluster_of("p0", "l0", costs=QUICK)
    decode_one(cluster, "l0")
    need = Need(1400, 1450, tpot_bound_s=bound_s)
    alone_s = 1400 / 4096
    # without a TPOT bound, the sequence's delay is added
    weight = slowdown if bound_s else slowdown + 1
    for busy_s, is_local in ((weight - 1.05, False), (weight - 0.95, True)):
        worker = cluster.view.workers["p0"]
        worker.reserve_prefill("s", 9, seconds=busy_s * alone_s)
        for choice in (cluster.fleet_choice(need), cluster.policy_choice(need)):
            assert choice.placement == Placement("l0" if is_local else "p0", "l0")
            assert choice.slowdown == pytest.approx(slowdown if is_local else 1.0)
        worker.release_prefill("s")


def test_sequences_that_leave_no_time_take_no_prompts():
    cluster = cluster_of("p0", "l0", costs=QUICK)
    cluster.view.workers["p0"].reserve_prefill("s", 9, seconds=9.0)
    decode_one(cluster, "l0")
    need = Need(1400, 1450, tpot_bound_s=0.25)
    assert cluster.fleet_choice(need) == cluster.policy_choice(need) == Busy(6.0, Role.PREFILL)
    assert isinstance(cluster.fleet_choice(Need(1400, 1450, tpot_bound_s=0.26)), Decision)


def decode_one(cluster, name):
    """Makes a sequence of one block decode on this worker."""
    cluster.view.workers[name].reserve_decode("s", 1)
    cluster.view.workers[name].begin_decode("s")


def lending(**fields):
    """Returns a cluster with a full decode worker and an idle, fluid prefill worker."""
    cluster = Cluster(welcome("p0", P, local=True, **fields), welcome("d0", D), costs=QUICK)
    for i in range(8):
        cluster.view.workers["d0"].reserve_decode(f"s{i}", 1)
    return cluster


def test_an_idle_prefill_worker_decodes_what_no_decode_worker_has_room_for():
    cluster = lending()
    for choice in (cluster.fleet_choice(NEED), cluster.policy_choice(NEED)):
        assert choice.placement == Placement("p0", "p0")
        assert choice.why == "least TTFT, decoded by an idle prefill worker"


@pytest.mark.parametrize(
    "why", ["it has a long prompt", "its share of memory is too little", "a wall"]
)
def test_a_prefill_worker_decodes_nothing_if(why):
    cluster = lending(num_blocks=14 if "share" in why else 100)
    if why == "a wall":
        cluster.change_info("p0", stretch=None)
    if why == "it has a long prompt":
        cluster.view.workers["p0"].reserve_prefill("s", 9, seconds=BACKLOG_S + 1.0)
    assert cluster.fleet_choice(NEED) == cluster.policy_choice(NEED) == Busy()


@pytest.mark.parametrize(
    ("num_seqs", "bound_s", "queue", "is_lent"),
    [
        (0, None, EMPTY, False),
        (1, None, EMPTY, True),
        (1, None, Queue(0.5, 5.5), True),
        (1, None, Queue(0.5, 6.0), False),
        (1, None, Queue(0.0, 0.0, 0.05), True),
        (1, None, Queue(0.0, 0.0, 0.1), False),
        (1, 9.0, EMPTY, True),
        (1, 9.0, Queue(0.5, 2.0), True),
        (1, 9.0, Queue(0.5, 2.5), False),
        (1, 9.0, Queue(0.0, 0.0, 0.05), True),
        (1, 9.0, Queue(0.0, 0.0, 0.2), False),
    ],
)
def test_a_prefill_worker_decodes_what_would_be_slower_elsewhere(num_seqs, bound_s, queue, is_lent):
    """Alone on the prefill worker, each of its 39 tokens takes 0.625 s. This is allowed only if few
    and short prompts wait.

    On the decode worker each token takes 0.75 s, and other sequences lose 0.125 s, which counts
    if they have no bound.
    """
    costs = WorkerCosts(QUICK.prefill, DecodeCost(0.5, 0.125, 0.0), QUICK.pull)
    cluster = Cluster(welcome("p0", P, local=True), welcome("d0", D, max_running=20), costs=costs)
    cluster.queue = queue
    for i in range(num_seqs):
        cluster.view.workers["d0"].reserve_decode(f"s{i}", 1)
    need = msgspec.structs.replace(NEED, tpot_bound_s=bound_s)
    for choice in (cluster.fleet_choice(need), cluster.policy_choice(need)):
        assert (choice.placement.decode == "p0") is is_lent


def test_few_prefill_workers_decode_what_no_decode_worker_has_room_for():
    """Each prompt takes a tenth of a second, and prompts arrive all the time."""
    costs = WorkerCosts(PrefillCost(0.0, 2**-10, 0.0), QUICK.decode, QUICK.pull)
    fluid = [welcome(f"p{i}", P, local=True) for i in range(3)]
    cluster = Cluster(*fluid, welcome("d0", D, max_running=1), costs=costs)
    cluster.view.workers["d0"].reserve_decode("s", 1)
    decode_one(cluster, "p1")
    idle = {("p0", "p0"), ("p2", "p2")}
    for busy, ways in ((0.0, idle), (0.5, {("p0", "p1"), ("p2", "p1")})):
        cluster.queue = Queue(busy=busy)
        chosen = [cluster.fleet_choice(NEED).placement for _ in range(20)]
        chosen += [cluster.policy_choice(NEED, seed=i).placement for i in range(20)]
        assert {(each.prefill, each.decode) for each in chosen} == ways


@pytest.mark.parametrize(("busy", "lender"), [(0.0, "p0"), (0.5, "p1")])
def test_of_equal_lenders_the_fullest_decodes_while_prompts_come(busy, lender):
    """A further sequence costs every lender the same."""
    cluster = Cluster(
        *(welcome(f"p{i}", P, local=True) for i in range(3)),
        welcome("d0", D, max_running=1),
        costs=WorkerCosts(PrefillCost(0.0, 2**-10, 0.0), DecodeCost(0.125, 2**-6, 0), QUICK.pull),
    )
    cluster.view.workers["d0"].reserve_decode("s", 1)
    for name, num_seqs in (("p0", 1), ("p1", 3), ("p2", 2)):
        for i in range(num_seqs):
            cluster.view.workers[name].reserve_decode(f"s{i}", 1)
    cluster.queue = Queue(busy=busy)
    for choice in (cluster.fleet_choice(NEED), cluster.policy_choice(NEED)):
        assert choice.placement.decode == lender


@pytest.mark.parametrize(("queued", "waits"), [(0.0, True), (0.5, True), (1.5, False)])
def test_a_prompt_waits_for_a_worker_that_is_not_slowed_down(queued, waits):
    """The prompt takes 0.25 s, or twice as long beside p0's decodes. p1 is free in a tenth of a
    second."""
    costs = WorkerCosts(PrefillCost(0.0, 2**-9, 0.0), DecodeCost(0.125, 0.0, 0.0), QUICK.pull)
    fluid = [welcome(f"p{i}", P, local=True) for i in range(2)]
    cluster = Cluster(*fluid, welcome("d0", D), costs=costs, backlog_s=0.0)
    decode_one(cluster, "p0")
    cluster.view.workers["p1"].reserve_prefill("s", 9, seconds=0.125)
    cluster.queue = Queue(queued)
    need = Need(129, 168, tpot_bound_s=0.25)
    for choice in (cluster.fleet_choice(need), cluster.policy_choice(need)):
        if waits:
            assert isinstance(choice, Busy)
            assert choice.lacks is Role.PREFILL
            assert choice.until_s == pytest.approx(0.125, abs=0.002)
        else:
            assert choice.placement.prefill == "p0"


def test_a_prefill_worker_answers_with_one_token_even_if_prompts_would_stand_still():
    """A step of the prefill worker takes as long as the bound.

    An answer of one token needs no step.
    """
    cluster = lending()
    cluster.queue = Queue(busy=0.5)
    need = Need(129, 130, tpot_bound_s=0.25)
    for choice in (cluster.fleet_choice(need), cluster.policy_choice(need)):
        assert choice.placement == Placement("p0", "p0")


def test_what_prefill_workers_decode_is_decided_alike():
    """No two prefill workers have the same load, so there are no ties."""
    costs = WorkerCosts(PrefillCost(0.0, 2**-10, 0.0), DecodeCost(0.125, 2**-6, 2**-12), ROUND.pull)
    names, ways = [f"p{i}" for i in range(5)], Counter()
    for seed in range(60):
        rng = random.Random(seed)
        fluid = [welcome(name, P, local=True) for name in names]
        cluster = Cluster(*fluid, welcome("d0", D, max_running=1), costs=costs, backlog_s=0.5)
        cluster.view.workers["d0"].reserve_decode("s", 1)
        for name in names:
            worker = cluster.view.workers[name]
            worker.reserve_prefill("s", 9, seconds=rng.random())
            for i in range(rng.choice([0, 1, 3])):
                worker.reserve_decode(f"s{i}", rng.randint(1, 9), context_tokens=rng.randint(1, 99))
                worker.begin_decode(f"s{i}")
        cluster.queue = Queue(busy=rng.random())
        need = Need(129, 168, tpot_bound_s=rng.choice([0.25, 0.3, 0.5]))
        ours, theirs = cluster.fleet_choice(need), cluster.policy_choice(need)
        if isinstance(ours, Busy):
            assert isinstance(theirs, Busy)
            ways["busy"] += 1
        else:
            assert ours.placement == theirs.placement
            assert ours.predicted_tpot_s == pytest.approx(theirs.predicted_tpot_s)
            assert (ours.why, ours.slowdown) == (theirs.why, pytest.approx(theirs.slowdown))
            ways[ours.why] += 1
    assert len(ways) == 3
    assert min(ways.values()) > 1


def test_an_idle_prefill_worker_is_preferred_to_a_decode_worker_as_quick():
    cluster = cluster_of("p0", "l0", costs=QUICK)
    assert cluster.fleet_choice(NEED).placement == Placement("p0", "l0")
    cluster.hold("l0", BLOCKS)
    assert cluster.fleet_choice(NEED, BLOCKS).placement == Placement("l0", "l0")


def test_the_decode_worker_with_the_least_time_to_first_token_prefills():
    costs = WorkerCosts(QUICK.prefill, DecodeCost(0.25, 2**-6, 0.0), NEVER_PULL.pull)
    cluster = Cluster(
        welcome("p0", P),
        *(welcome(f"l{i}", D, local=True, max_running=2) for i in range(3)),
        costs=costs,
    )
    cluster.view.workers["p0"].reserve_prefill("s", 9, seconds=2.9)
    # l0 has no room for the sequence
    for name, num_blocks, num_seqs in (("l0", 8, 2), ("l1", 4, 1)):
        cluster.hold(name, BLOCKS[:num_blocks])
        for i in range(num_seqs):
            cluster.view.workers[name].reserve_decode(f"s{i}", 1)
    for choice in (cluster.fleet_choice(NEED, BLOCKS), cluster.policy_choice(NEED, BLOCKS)):
        assert choice.placement == Placement("l1", "l1")  # half of the load, but a third longer


def test_many_deep_stores_do_not_hide_the_decode_worker_that_holds_most():
    stores = [f"s{i}" for i in range(40)]  # more than the C++ code checks one by one
    costs = WorkerCosts(QUICK.prefill, DecodeCost(0.25, 2**-6, 0.0), NEVER_PULL.pull)
    cluster = cluster_of("p0", "l0", "l1", *stores, costs=costs)
    cluster.view.workers["p0"].reserve_prefill("s", 9, seconds=2.9)
    cluster.view.workers["l0"].reserve_decode("s", 1)
    cluster.hold("l0", BLOCKS[:7])
    for store in stores:
        cluster.hold(store, BLOCKS)
    for choice in (cluster.fleet_choice(NEED, BLOCKS), cluster.policy_choice(NEED, BLOCKS)):
        assert choice.placement == Placement("l0", "l0")


def test_of_equally_deep_stores_those_that_read_fastest_are_asked():
    names = [f"s{i}" for i in range(6)]
    cluster = cluster_of("p0", "d0", *names)
    for number, name in enumerate(names):
        fixed_s = 0.0 if number % 2 else 0.125
        gauges = {"load_fixed_s:disk": fixed_s, "load_block_s:disk": 0.0}
        cluster.view.workers[name].report(LoadReport(*(0,) * 8, gauges=gauges), 0.0)
        cluster.hold(name_on(name, "disk"), BLOCKS)
    asked = {cluster.fleet_choice(NEED, BLOCKS).pulled_from for _ in range(60)}
    assert asked == {"s1", "s3", "s5"}
    for name in ("s1", "s3", "s5"):
        cluster.lose(name)
    assert cluster.fleet_choice(NEED, BLOCKS).pulled_from in {"s0", "s2", "s4"}
    cluster.fleet.validate()


def test_local_prefill_needs_memory_for_the_longest_answer():
    small = welcome("m0", M, num_blocks=10)
    cluster = Cluster(welcome("p0", P), welcome("d0", D), small)
    cluster.hold("m0", BLOCKS)
    cluster.view.workers["d0"].reserve_decode("s", 1)
    for max_len, chosen in ((160, "m0"), (161, "p0")):
        need = Need(8 * BLOCK + 1, max_len, predicted_len=8 * BLOCK + 2)
        for choice in (cluster.fleet_choice(need, BLOCKS), cluster.policy_choice(need, BLOCKS)):
            assert choice.placement.prefill == chosen


def test_others_that_are_as_good_are_all_chosen_and_by_a_seed_the_same():
    def chosen(seed):
        names = [f"{'p' if i % 2 else 'd'}{i}" for i in range(200)]
        cluster = cluster_of(*names, seed=seed)
        return [cluster.fleet_choice(NEED).placement for _ in range(600)]

    first = chosen(1)
    assert first == chosen(1)
    assert first != chosen(2)
    assert len({placement.prefill for placement in first}) > 90
    assert len({placement.decode for placement in first}) > 90


def test_equal_holders_are_chosen_and_pulled_from_alike():
    cluster = cluster_of(*(f"p{i}" for i in range(100)), "p-other", "d0")
    for i in range(100):
        cluster.hold(f"p{i}", BLOCKS)
    holders = {cluster.fleet_choice(NEED, BLOCKS).placement.prefill for _ in range(400)}
    assert len(holders) > 80
    assert "p-other" not in holders
    for i in range(100):
        cluster.view.workers[f"p{i}"].reserve_prefill("s", 9, seconds=2.9)
    sources = Counter(cluster.fleet_choice(NEED, BLOCKS).pulled_from for _ in range(400))
    assert len(sources) > 80
    assert None not in sources


def test_a_holder_that_can_answer_at_once_is_preferred():
    cluster = cluster_of("p0", "p1", "d0", "d1")
    for name in ("p0", "d0"):
        cluster.hold(name, BLOCKS)
    cluster.view.workers["p0"].reserve_prefill("s", 9, seconds=2.9)
    choices = [cluster.fleet_choice(NEED, BLOCKS) for _ in range(20)]
    assert {(choice.placement.prefill, choice.pulled_from) for choice in choices} == {("p1", "d0")}


@pytest.mark.parametrize("need", [Need(100, 5000), Need(5000, 5001)])
def test_what_no_worker_could_hold_is_left_to_the_policy(need):
    assert cluster_of("p0", "d0").fleet_choice(need) is None


def test_the_worker_that_kept_most_tokens_decodes_if_it_has_room():
    cluster = cluster_of("p0", "d0", "d1", "d2")
    cluster.view.workers["d1"].reserve_decode("s", 1)
    need = msgspec.structs.replace(NEED, kept_tokens={"d1": 32, "d2": 16})
    assert cluster.fleet_choice(need).placement.decode == "d1"
    cluster.view.workers["d1"].reserve_decode("much", 95)
    assert cluster.fleet_choice(need).placement.decode == "d2"


def test_a_second_attempt_leaves_out_the_worker_of_the_first():
    cluster = cluster_of("p0", "p1", "d0")
    cluster.hold("p0", BLOCKS)
    assert cluster.fleet_choice(NEED, BLOCKS).placement.prefill == "p0"
    assert cluster.fleet_choice(NEED, BLOCKS, other_than="p0").placement.prefill == "p1"
    assert cluster.fleet_choice(NEED, BLOCKS).placement.prefill == "p0"
    cluster.fleet.validate()


@pytest.mark.parametrize("seed", seeds(20))
def test_severed_workers_are_not_combined_while_there_are_others(seed):
    rng, cluster = random.Random(seed), cluster_of("p0", "p1", "p2", "d0", "d1", "d2", seed=seed)
    pairs = [(f"p{i}", f"d{j}") for i in range(3) for j in range(3)]
    for _ in range(20):
        apart = rng.sample(pairs, rng.choice([1, 4, 8, 9]))
        cluster.view.severed = dict.fromkeys(apart, 9.0)
        placement = cluster.fleet_choice(NEED).placement
        assert len(apart) == 9 or (placement.prefill, placement.decode) not in apart
    cluster.fleet.validate()


def test_a_prompt_waits_for_workers_that_are_not_severed():
    cluster = cluster_of("p0", "p1", "d0")
    cluster.view.severed["p0", "d0"] = 9.0
    cluster.view.workers["p1"].reserve_prefill("s", 9, seconds=9.0)
    assert isinstance(cluster.fleet_choice(NEED), Busy)
    cluster.view.remove_severed(10.0)
    assert cluster.fleet_choice(NEED).placement == Placement("p0", "d0")


def test_workers_with_another_block_size_are_left_to_the_policy():
    cluster = cluster_of("p0", "d0")
    odd = KVLayout(2 * BLOCK, KVFormat.BF16, (KVSection(1, 1, 8),))
    cluster.add(welcome("odd", P, layout=odd))
    assert cluster.fleet_choice(NEED) is None
    cluster.fleet.validate()
    cluster.lose("odd")
    assert cluster.fleet_choice(NEED).placement == Placement("p0", "d0")


def test_nothing_is_decided_before_something_was_measured():
    cluster = cluster_of("p0", "d0", costs=None)
    assert cluster.fleet_choice(NEED) is None
    prefill, decode = (cluster.view.workers[name] for name in ("p0", "d0"))
    cluster.estimates.observe_prefill(prefill, 100, num_cached=0, seconds=1.0)
    assert cluster.fleet_choice(NEED) is None
    cluster.estimates.observe_steps(decode, [StepReport(0.1, num_rows=1)])
    assert cluster.fleet_choice(NEED).predicted_ttft_s == pytest.approx(0.01 * NEED.num_tokens)


def test_prompts_without_a_prediction_are_left_to_the_policy():
    cluster = cluster_of("p0", "p1", "d0")
    cluster.view.workers["p0"].reserve_prefill("s", 100)
    assert cluster.fleet_choice(NEED) is None
    cluster.view.workers["p0"].release_prefill("s")
    assert cluster.fleet_choice(NEED) is not None


def test_a_worker_may_come_back_hundreds_of_times():
    cluster = cluster_of("p0", "d0")
    for _ in range(300):
        cluster.lose("d0")
        cluster.add(welcome("d0", D))
    assert cluster.fleet_choice(NEED).placement == Placement("p0", "d0")
    cluster.fleet.validate()


def test_a_worker_of_one_kind_too_many_is_left_to_the_policy():
    cluster = cluster_of("p0", "d0")
    for i in range(256):
        cluster.add(welcome(f"x{i}", D, num_blocks=200 + i))
    assert cluster.fleet_choice(NEED) is None
    cluster.fleet.validate()


@pytest.mark.parametrize("joins", [False, True])
def test_work_of_other_gateways_is_repriced_only_when_costs_change(monkeypatch, joins):
    cluster = cluster_of("p0", "d0", costs=WorkerCosts(decode=ROUND.decode, pull=ROUND.pull))
    p0 = cluster.view.workers["p0"]
    p0.report(LoadReport(0, 0, 0, 0, 0, 0, 0, 0, prompt_tokens=100), 0.0)
    cluster.estimates.observe_prefill(p0, 100, num_cached=0, seconds=1.0)
    assert cluster.fleet_choice(NEED).predicted_ttft_s == pytest.approx(
        1.0 + 0.01 * NEED.num_tokens
    )
    cluster.fleet.update()
    told = []
    monkeypatch.setattr(
        cluster.fleet, "_put_load", lambda _, worker, **_hidden: told.append(worker)
    )
    # a single observation does not change the estimate
    cluster.estimates.observe_pull(p0, 1, seconds=1.0)
    cluster.fleet.update()
    assert told == []
    monkeypatch.undo()
    cluster.estimates.observe_prefill(p0, 100, num_cached=0, seconds=1.5)
    if joins:  # a join also updates the costs in C++
        cluster.add(welcome("d1", D))
    ttft_s = cluster.fleet_choice(NEED).predicted_ttft_s
    assert ttft_s == cluster.policy_choice(NEED).predicted_ttft_s > 1.2 + 0.012 * NEED.num_tokens


def test_no_timed_wait_for_a_worker_with_a_late_first_prompt():
    cluster = cluster_of("p0", "d0")
    for seq_id in "ab":
        cluster.view.workers["p0"].reserve_prefill(seq_id, 9, seconds=4.0)
    ours, theirs = (
        choose(NEED, now_s=1.0) for choose in (cluster.fleet_choice, cluster.policy_choice)
    )
    assert ours == theirs == Busy(lacks=Role.PREFILL)


def test_foreign_load_is_repriced_with_new_costs():
    cluster = cluster_of("p0", "d0")
    worker = cluster.view.workers["p0"]
    worker.report(LoadReport(*(0,) * 8, prompt_tokens=256), 0.0)
    before = cluster.fleet_choice(NEED)
    for num_tokens in (16, 64, 256) * 5:
        seconds = num_tokens / 100
        cluster.estimates.observe_prefill(worker, num_tokens, num_cached=0, seconds=seconds)
    after = cluster.fleet_choice(NEED)
    assert after.predicted_ttft_s == pytest.approx(cluster.policy_choice(NEED).predicted_ttft_s)
    assert after.predicted_ttft_s > before.predicted_ttft_s + 0.5


def test_without_workers_there_is_no_decision():
    cluster = cluster_of()
    assert cluster.fleet_choice(NEED) is None
    cluster.add(welcome("p0", P))
    cluster.lose("p0")
    assert cluster.fleet_choice(NEED) is None
    cluster.fleet.validate()
