"""Decisions of the fleet against the rule in plain Python, and what they reserve."""

import math
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from engine.blocks import BlockHash
from engine.messages import Role, WorkerId
from router.fleet import Bounds, ClassCosts, Decision, Fleet, FleetWorker, Load, Refusal

BLOCK = 16
H200 = ClassCosts(3e-3, 5e-5, 8e-10, 1e-2, 2e-5, 3e-8, 2e-3, 1e-4)
ROUND = ClassCosts(1.0, 0.25, 0.0, 1.0, 0.5, 0.0, 2.0, 1.0)  # sums are exact, so there are ties
SLOW_PULL = ROUND._replace(pull_s=1e6)


# ---------------------------------------------------------------- the rule


@dataclass
class TwinWorker:
    spec: FleetWorker
    is_open: bool = True
    busy_until_s: float = 0.0
    others_until_s: float = 0.0
    others: Load = field(default_factory=Load)
    prefills: dict = field(default_factory=dict)  # seconds by request
    decodes: dict = field(default_factory=dict)  # (tokens, blocks) by request

    @property
    def num_running(self):
        return len(self.decodes) + self.others.num_running

    @property
    def room(self):
        used = sum(blocks for _, blocks in self.decodes.values()) + self.others.num_blocks
        return self.spec.num_blocks - used


class Twin:
    """The rule of router/fleet.py, worker by worker."""

    def __init__(self):
        self.workers = {}
        self.costs = {}

    def tpot_s(self, worker, end_tokens):
        costs = self.costs[worker.spec.costs]
        tokens = sum(tokens for tokens, _ in worker.decodes.values()) + worker.others.num_tokens
        now = costs.decode_s + costs.decode_row_s * worker.num_running
        now += costs.decode_context_s * tokens
        return now + (costs.decode_row_s + costs.decode_context_s * end_tokens)

    def decoders(self, end_tokens):
        """The predicted TPOT of all that have room."""
        return {
            name: self.tpot_s(worker, end_tokens)
            for name, worker in self.workers.items()
            if worker.is_open
            and worker.spec.role.decodes
            and worker.room >= -(-end_tokens // BLOCK)
            and worker.num_running < worker.spec.max_running
        }

    def work_s(self, worker, num_tokens, own, best):
        """Seconds, and whether blocks are pulled."""
        costs = self.costs[worker.spec.costs]

        def prefill_s(p):
            squares = costs.prefill_square_s * (num_tokens * num_tokens - p * p)
            return costs.prefill_s + costs.prefill_token_s * (num_tokens - p) + squares

        alone_s = prefill_s(own * BLOCK)
        if best <= own or not worker.spec.pulls or worker.spec.blocks_like is None:
            return alone_s, False
        pull_s = costs.pull_s + costs.pull_block_s * (best - own)
        pulled_s = pull_s + prefill_s(best * BLOCK)
        return min(alone_s, pulled_s), pulled_s < alone_s

    def prefillers(self, held, num_tokens, now_s, bounds, decoders):
        """For each that is open: predicted TTFT, wait, work, and where to pull from."""
        found = {}
        for name, worker in self.workers.items():
            wait_s = max(0.0, worker.busy_until_s - now_s)
            if not worker.is_open or not worker.spec.role.prefills or wait_s > bounds.wait_s:
                continue
            if worker.spec.role is Role.MIXED and decoders.get(name, math.inf) > bounds.tpot_s:
                continue
            if worker.spec.role is Role.MIXED and name not in decoders:
                continue
            like = worker.spec.blocks_like
            others = {i: n for i, n in held.items() if self.workers[i].spec.blocks_like == like}
            best = max(others.values(), default=0)
            work_s, is_pulled = self.work_s(worker, num_tokens, held.get(name, 0), best)
            sources = {i for i, n in others.items() if n == best} if is_pulled else {None}
            found[name] = (wait_s + work_s, wait_s, work_s, best, sources)
        return found

    def check(self, decision, held, request_id, num_tokens, end_tokens, now_s, bounds):
        """Asserts that the decision is one of the best, and reserves it."""
        decoders = self.decoders(end_tokens)
        if not decoders:
            assert decision is Refusal.NO_ROOM
            return
        if min(decoders.values()) > bounds.tpot_s:
            assert decision is Refusal.TOO_SLOW
            return
        prefillers = self.prefillers(held, num_tokens, now_s, bounds, decoders)
        if not prefillers:
            assert decision is Refusal.NO_PREFILL
            return
        assert isinstance(decision, Decision)
        ttft_s, wait_s, work_s, best, sources = prefillers[decision.prefill]
        assert ttft_s == min(found[0] for found in prefillers.values())
        assert (decision.ttft_s, decision.wait_s) == (ttft_s, wait_s)
        own = held.get(decision.prefill, 0)
        assert decision.matched_blocks == own
        assert decision.source in sources
        assert decision.pulled_blocks == (0 if decision.source is None else best - own)
        if self.workers[decision.prefill].spec.role is Role.MIXED:
            assert decision.decode == decision.prefill
        else:
            assert decoders[decision.decode] == min(decoders.values())
        assert decision.tpot_s == decoders[decision.decode]
        prefill, decode = self.workers[decision.prefill], self.workers[decision.decode]
        prefill.prefills[request_id] = work_s
        prefill.busy_until_s = max(prefill.busy_until_s, now_s) + work_s
        decode.decodes[request_id] = (end_tokens, -(-end_tokens // BLOCK))

    def prefilled(self, request_id, now_s):
        for worker in self.workers.values():
            if worker.prefills.pop(request_id, None) is not None:
                self._restart(worker, now_s)

    def release(self, request_id, now_s):
        self.prefilled(request_id, now_s)
        for worker in self.workers.values():
            worker.decodes.pop(request_id, None)

    def set_others(self, name, load, now_s):
        worker = self.workers[name]
        worker.others, worker.others_until_s = load, now_s + load.work_s
        self._restart(worker, now_s)

    def _restart(self, worker, now_s):
        others_s = max(0.0, worker.others_until_s - now_s)
        worker.busy_until_s = now_s + sum(worker.prefills.values()) + others_s


# ---------------------------------------------------------------- random fleets


class RandomFleet:
    """A fleet and its twin, told the same."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.fleet = Fleet(block_size=BLOCK, seed=seed)
        self.twin = Twin()
        self.now_s = 0.0
        self.requests = []
        self.outcomes = Counter()
        self.num_asked = 0
        self.chains = [[self.rng.randbytes(16) for _ in range(12)] for _ in range(4)]
        for name in "xy"[: self.rng.randint(1, 2)]:
            self.set_costs(name)
        for i in range(self.rng.choice([2, 5, 70, 200])):
            self.add(WorkerId(f"w{i}"))

    def set_costs(self, name):
        costs = self.rng.choice([ROUND, SLOW_PULL, ROUND._replace(prefill_square_s=1 / 64)])
        self.twin.costs[name] = costs
        self.fleet.set_costs(name, costs)

    def add(self, name):
        rng = self.rng
        spec = FleetWorker(
            role=rng.choice(list(Role)),
            num_blocks=rng.randint(5, 60),
            max_running=rng.randint(1, 5),
            costs=rng.choice(list(self.twin.costs)),
            blocks_like=rng.choice(["p", "p", "q", None]),
            pulls=rng.random() < 0.8,
        )
        self.fleet.add(name, spec)
        self.twin.workers[name] = TwinWorker(spec)
        if rng.random() < 0.2:
            self.store(name)

    def store(self, name):
        blocks = self.rng.choice(self.chains)[: self.rng.randint(0, 12)]
        self.fleet.index.stored(name, [BlockHash(h) for h in blocks])

    def step(self):
        act = self.rng.choices(
            (self.decide, self.prefilled, self.release, self.store_some, self.close, self.report),
            (20, 5, 5, 3, 1, 1),
        )[0]
        act()
        self.now_s += self.rng.choice([0.0, 0.5, 4.0])

    def decide(self):
        rng = self.rng
        self.num_asked += 1
        blocks = [BlockHash(h) for h in rng.choice(self.chains)[: rng.randint(0, 12)]]
        num_tokens = len(blocks) * BLOCK + rng.randint(0, 5) or 1
        ask = {
            "num_tokens": num_tokens,
            "end_tokens": num_tokens + rng.randint(1, 50),
            "now_s": self.now_s,
            "bounds": Bounds(rng.choice([2.0, 3.0, math.inf]), rng.choice([0.0, 50.0, math.inf])),
        }
        known = blocks[: (num_tokens - 1) // BLOCK]
        held = self.fleet.index.longest(known)
        decision = self.fleet.decide(self.num_asked, blocks, **ask)
        self.twin.check(decision, held, self.num_asked, **ask)
        if isinstance(decision, Refusal):
            self.outcomes[decision] += 1
            return
        self.requests.append(self.num_asked)
        self.outcomes["pulled" if decision.source else "not pulled"] += 1
        self.outcomes["mixed" if decision.prefill == decision.decode else "apart"] += 1
        self.outcomes["matched" if decision.matched_blocks else "unmatched"] += 1

    def prefilled(self):
        if self.requests:
            request_id = self.rng.choice(self.requests)
            self.fleet.prefilled(request_id, self.now_s)
            self.twin.prefilled(request_id, self.now_s)

    def release(self):
        if self.requests:
            request_id = self.requests.pop(self.rng.randrange(len(self.requests)))
            self.fleet.release(request_id, self.now_s)
            self.twin.release(request_id, self.now_s)

    def store_some(self):
        names = list(self.twin.workers)
        most = self.rng.choice([1, 2, len(names)])  # nearly all: as with a system prompt
        for name in self.rng.sample(names, self.rng.randint(1, most)):
            self.store(name)

    def close(self):
        name = self.rng.choice(list(self.twin.workers))
        worker = self.twin.workers[name]
        worker.is_open = not worker.is_open
        (self.fleet.reopen if worker.is_open else self.fleet.close)(name)

    def report(self):
        rng = self.rng
        name = rng.choice(list(self.twin.workers))
        load = Load(
            rng.choice([0.0, 2.0]), rng.randint(0, 2), rng.randint(0, 99), rng.randint(0, 9)
        )
        self.fleet.set_others(name, load, self.now_s)
        self.twin.set_others(name, load, self.now_s)


@pytest.mark.parametrize("seed", [*range(12), 17, 23])
def test_every_decision_of_a_random_fleet_is_the_best_by_the_rule(seed):
    both = RandomFleet(seed)
    for _ in range(60):
        both.step()
    both.fleet.validate()
    assert both.fleet.num_reserved == len(both.requests)
    for name, worker in both.twin.workers.items():
        reserved = both.fleet.reserved(name)
        assert reserved.num_running == len(worker.decodes)
        assert reserved.work_s == sum(worker.prefills.values())
        assert reserved.num_blocks == sum(blocks for _, blocks in worker.decodes.values())


def test_random_fleets_decide_in_every_way():
    outcomes = Counter()
    for seed in (1, 7, 17):
        both = RandomFleet(seed)
        for _ in range(60):
            both.step()
        outcomes += both.outcomes
    ways = {"pulled", "not pulled", "mixed", "apart", "matched", "unmatched", *Refusal}
    assert outcomes.keys() == ways


# ---------------------------------------------------------------- by hand


def fleet_of(roles, *, costs=ROUND, num_blocks=100, max_running=8, seed=0):
    fleet = Fleet(block_size=BLOCK, seed=seed)
    fleet.set_costs("c", costs)
    for name, role in roles.items():
        fleet.add(WorkerId(name), FleetWorker(role, num_blocks, max_running, "c", "p"))
    return fleet


P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED
BLOCKS = [BlockHash(random.Random(1).randbytes(16)) for _ in range(1)] + [
    BlockHash(random.Random(i).randbytes(16)) for i in range(2, 9)
]


def ask(fleet, request_id, blocks=(), *, num_tokens=None, now_s=0.0, bounds=None):
    num_tokens = num_tokens or len(blocks) * BLOCK + 1
    return fleet.decide(
        request_id,
        list(blocks),
        num_tokens=num_tokens,
        end_tokens=num_tokens + 10,
        now_s=now_s,
        bounds=bounds or Bounds(),
    )


def test_a_prompt_goes_where_it_is_cached_until_another_worker_is_sooner():
    fleet = fleet_of({"p0": P, "p1": P, "d": D}, costs=SLOW_PULL)
    fleet.index.stored("p0", BLOCKS)
    first, second, third = (ask(fleet, i, BLOCKS) for i in range(3))
    assert (first.prefill, first.matched_blocks, first.ttft_s) == ("p0", 8, 1.25)
    assert (second.prefill, second.wait_s) == ("p0", 1.25)
    assert third.decode == "d"
    while (decision := ask(fleet, "x", BLOCKS)).prefill == "p0":
        fleet.release("x", 0.0)
        fleet.set_others("p0", Load(work_s=fleet.reserved("p0").work_s + 30), 0.0)
    assert (decision.prefill, decision.matched_blocks, decision.source) == ("p1", 0, None)


def test_a_busy_worker_s_prefix_is_pulled_where_that_is_quicker():
    fleet = fleet_of({"p0": P, "p1": P, "d": D})
    fleet.index.stored("p0", BLOCKS)
    fleet.set_others("p0", Load(work_s=100.0), 0.0)
    decision = ask(fleet, 1, BLOCKS)
    assert (decision.prefill, decision.source, decision.pulled_blocks) == ("p1", "p0", 8)
    assert decision.ttft_s == 2 + 8 + 1.25
    assert fleet.reserved("p1").work_s == decision.ttft_s


def test_decode_workers_are_pulled_from_too_but_not_those_that_hold_other_blocks():
    fleet = fleet_of({"p": P, "d": D})
    fleet.index.stored("d", BLOCKS)
    assert ask(fleet, 1, BLOCKS).source == "d"
    fleet.add(WorkerId("e"), FleetWorker(D, 100, 8, "c", "q"))
    fleet.forget("d")
    fleet.index.stored("e", BLOCKS)
    assert ask(fleet, 2, BLOCKS).source is None


def test_one_token_is_always_computed():
    fleet = fleet_of({"p": P, "d": D})
    fleet.index.stored("p", BLOCKS)
    assert ask(fleet, 1, BLOCKS, num_tokens=8 * BLOCK).matched_blocks == 7


def test_a_mixed_worker_decodes_what_it_prefills():
    fleet = fleet_of({"m": M, "d": D})
    decision = ask(fleet, 1)
    assert (decision.prefill, decision.decode) == ("m", "m")
    assert fleet.reserved("m").num_running == 1
    assert fleet.reserved("d").num_running == 0


def test_why_there_is_no_decision_is_told():
    fleet = fleet_of({"p": P, "d": D}, num_blocks=5, max_running=1)
    assert ask(fleet, 1, num_tokens=80) is Refusal.NO_ROOM
    assert ask(fleet, 1, bounds=Bounds(tpot_s=1.4)) is Refusal.TOO_SLOW
    fleet.close("p")
    assert ask(fleet, 1) is Refusal.NO_PREFILL
    fleet.reopen("p")
    assert ask(fleet, 1, bounds=Bounds(tpot_s=1.5)).tpot_s == 1.5
    assert ask(fleet, 2) is Refusal.NO_ROOM  # one runs already
    fleet.release(1, 0.0)
    fleet.set_others("p", Load(work_s=9.0), 0.0)
    assert ask(fleet, 2, bounds=Bounds(wait_s=8.0)) is Refusal.NO_PREFILL
    assert fleet.num_reserved == 0


def test_nobody_decides_where_nobody_is():
    assert ask(Fleet(block_size=BLOCK), 1) is Refusal.NO_ROOM


def test_what_is_reserved_counts_until_it_is_released_once():
    fleet = fleet_of({"p": P, "d": D})
    ask(fleet, 1, BLOCKS)
    assert fleet.reserved("d") == Load(0.0, 1, 139, 9)
    fleet.prefilled(1, 5.0)
    fleet.prefilled(1, 6.0)
    assert fleet.reserved("p") == Load()
    for _ in range(2):
        fleet.release(1, 7.0)
    assert fleet.reserved("d") == Load()
    fleet.validate()


def test_work_that_takes_longer_than_predicted_delays_what_is_behind_it():
    fleet = fleet_of({"p": P, "d": D})
    first = ask(fleet, 1, BLOCKS)
    ask(fleet, 2, BLOCKS)
    fleet.prefilled(1, 100.0)
    assert ask(fleet, 3, BLOCKS, now_s=100.0).wait_s == first.ttft_s


def test_a_worker_that_leaves_takes_its_reservations_along():
    fleet = fleet_of({"p": P, "d": D, "e": D})
    decision = ask(fleet, 1)
    fleet.forget(decision.decode)
    fleet.add(decision.decode, FleetWorker(D, 100, 8, "c", "p"))
    assert fleet.reserved(decision.decode) == Load()
    assert fleet.reserved("p").work_s > 0
    fleet.release(1, 0.0)
    assert fleet.reserved("p") == Load()
    fleet.validate()


def test_new_costs_count_from_the_next_decision_on():
    fleet = fleet_of({"p": P, "d": D})
    before = ask(fleet, 1)
    fleet.set_costs("c", ROUND._replace(prefill_s=7.0, decode_s=3.0))
    after = ask(fleet, 2, now_s=50.0)
    assert after.ttft_s == before.ttft_s + 6
    assert after.tpot_s == before.tpot_s + 2 + 0.5
    fleet.validate()


def test_equal_workers_are_all_chosen_and_by_a_seed_the_same():
    def chosen(seed):
        fleet = fleet_of({f"w{i}": P if i % 2 else D for i in range(200)}, costs=H200, seed=seed)
        decisions = []
        for i in range(600):
            decisions.append(ask(fleet, i))
            fleet.release(i, 0.0)
        return decisions

    first = chosen(1)
    assert first == chosen(1)
    assert first != chosen(2)
    assert len(Counter(decision.prefill for decision in first)) > 90
    assert len(Counter(decision.decode for decision in first)) > 90


def test_of_several_that_hold_the_same_any_is_chosen_and_any_is_pulled_from():
    fleet = fleet_of({**{f"p{i}": P for i in range(100)}, "q": P, "d": D}, costs=ROUND)
    for i in range(100):
        fleet.index.stored(f"p{i}", BLOCKS)
    holders = Counter(_decided_and_released(fleet, i).prefill for i in range(400))
    assert len(holders) > 80
    assert "q" not in holders
    for i in range(100):
        fleet.close(f"p{i}")
    sources = Counter(_decided_and_released(fleet, i).source for i in range(400))
    assert len(sources) > 80
    assert None not in sources


def _decided_and_released(fleet, request_id):
    decision = ask(fleet, request_id, BLOCKS)
    fleet.release(request_id, 0.0)
    return decision
