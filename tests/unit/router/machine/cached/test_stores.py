"""The request machine with stores: what it pulls from them, and which requests they never get."""

import pytest
from msgspec.structs import replace

from engine.config import RouterConfig
from engine.demand import DecodeCost
from engine.layout import KVFormat
from engine.messages import (
    PROTOCOL_VERSION,
    Cancel,
    FinishReason,
    Generate,
    LeaseRef,
    LoadReport,
    OfferPrefix,
    Prefetch,
    Prefill,
    PrefillDone,
    PrefillStarted,
    PrefixOffered,
    Role,
    RoleChanged,
    StepReport,
    TransferAddress,
    Welcome,
)
from engine.worker.block_events import LOWER_MEDIA, AllBlocksCleared, BlockRemoved, Medium
from engine.worker.blocks import hash_blocks
from engine.worker.costs import PrefillCost, PullCost, WorkerCosts
from router.cluster.estimates import PULL_OVERHEAD_S, Estimates
from router.machine.events import BlockEventsMissed, BlocksChanged, Tick, WorkerJoined, WorkerLost
from router.machine.machine import RouterMachine
from router.planning.demand import members
from tests.kits.fakes.block_events import stored
from tests.kits.router.machine import LAYOUT, LEASE, Driver, First, sent

# Prefill takes 10 ms per token; a pull costs only its fixed overhead.
COSTS = WorkerCosts(PrefillCost(0.0, 0.01), DecodeCost(0.01, 0.001, 0.0), PullCost(0.0, 0.0, 1e12))
LONG = tuple(range(100))
OFFERED = LeaseRef("r.0.prefix", TransferAddress("s0", "inc", "tcp://x"), 24)
DISK, OBJECT = LOWER_MEDIA


class WithStores(Driver):
    """A driver whose stores publish their blocks. Costs are known only if given."""

    def __init__(self, *workers: str, costs: WorkerCosts | None = COSTS, **config) -> None:
        super().__init__()
        estimates = Estimates(costs)
        self.machine = RouterMachine(RouterConfig(**config), estimates=estimates, rng=First())
        for name in workers:
            self.join(name, 1000)

    def tell(self, worker: str, *events) -> None:
        self.handle(BlocksChanged(worker, events))

    def holds(self, store: str, medium: str | None, num_tokens: int = 100) -> None:
        hashes = hash_blocks(LONG[:num_tokens], 4)
        self.tell(store, stored(hashes, None, block_size=4, medium=medium))

    def reads_in(self, store: str, medium: str, *, fixed_s: float, block_s: float) -> None:
        gauges = {f"load_fixed_s:{medium}": fixed_s, f"load_block_s:{medium}": block_s}
        self.say(store, LoadReport(*(0,) * 8, gauges=gauges))

    def decision(self, name: str = "r"):
        return self.machine.state.flights[name].decision


# ---------------------------------------------------------------- stores are not workers


def test_a_store_that_joins_first_is_harmless():
    driver = WithStores("s0")
    assert driver.machine.view.missing() == "no prefill worker"
    driver.holds("s0", Medium.HOST)
    driver.ask(prompt=LONG)  # the request waits, since a store cannot serve it
    effects = driver.join("p0")
    assert not sent(effects, OfferPrefix)
    driver.join("d0")
    assert driver.decision().pulled_from == "s0"


def test_no_prompt_and_no_sequence_goes_to_a_store():
    driver = WithStores("s0", "s1", costs=None)
    driver.ask(prompt=LONG)
    assert driver.machine.queue_len == 1
    assert driver.machine.view.capacity_tokens is None
    driver.join("m0", 1000)
    assert [worker for worker, _ in sent(driver.ask("other", (1, 2)), Generate)] == ["m0"]


@pytest.mark.parametrize("role", [Role.MIXED, Role.DECODE, Role.DRAINED])
def test_a_store_is_a_store_for_life(role):
    driver = WithStores("s0", "m0")
    driver.say("s0", RoleChanged(role))
    driver.say("m0", RoleChanged(Role.STORE))
    roles = [worker.info.role for worker in driver.machine.view.workers.values()]
    assert roles == [Role.STORE, Role.MIXED]
    assert driver.machine.counters["role changed", "not possible"] == 2


def test_a_store_is_no_candidate_for_a_flip():
    driver = WithStores("s0", "p0", "d0")
    assert [member.worker_id for member in members(driver.machine.view)] == ["p0", "d0"]


def test_steps_of_a_store_teach_nothing():
    driver = WithStores("s0", "p0", "d0", costs=None)
    driver.say("s0", LoadReport(*(0,) * 8, steps=[StepReport(1.0, num_rows=1)]))
    assert driver.machine.state.estimates.step_s(driver.machine.view.workers["d0"], 1, 1) is None


# ---------------------------------------------------------------- media of a store


def matched(driver: WithStores):
    return driver.machine.prefixes.longest(hash_blocks(LONG, 4))


def test_blocks_are_known_by_medium():
    driver = WithStores("p0", "d0", "s0")
    driver.holds("s0", Medium.HOST, 40)
    driver.holds("s0", DISK, 80)
    driver.holds("s0", OBJECT, 100)
    assert matched(driver) == {"s0": 10, "s0|disk": 20, "s0|object": 25}
    driver.tell("s0", BlockRemoved(hash_blocks(LONG, 4)[5:], DISK))
    assert matched(driver) == {"s0": 10, "s0|disk": 5, "s0|object": 25}
    driver.tell("s0", AllBlocksCleared())
    assert matched(driver) == {}


@pytest.mark.parametrize("end", ["unheard", "lost"])
def test_all_media_are_forgotten_with_the_store_or_its_events(end):
    driver = WithStores("p0", "d0", "s0")
    for medium in (Medium.HOST, *LOWER_MEDIA):
        driver.holds("s0", medium)
    if end == "unheard":
        driver.handle(BlockEventsMissed("s0", "silent"))
    else:
        driver.handle(WorkerLost("s0", "gone"))
        driver.join("s0")
    assert matched(driver) == {}


def test_unknown_media_are_ignored_and_counted():
    driver = WithStores("p0", "d0", "s0")
    driver.holds("s0", "tape")
    driver.holds("s0", None)
    driver.holds("p0", "disk")
    assert matched(driver) == {}
    driver.holds("p0", None)
    assert matched(driver) == {"p0": 25}
    assert driver.machine.counters["block events", "unknown medium"] == 3


# ---------------------------------------------------------------- predicted costs


def test_memory_of_a_store_is_pulled_at_once():
    driver = WithStores("p0", "d0", "s0")
    driver.holds("s0", Medium.HOST, 80)
    effects = driver.ask(prompt=LONG)
    assert [worker for worker, _ in sent(effects, OfferPrefix)] == ["s0"]
    decision = driver.decision()
    assert (decision.pulled_from, decision.pulled_medium) == ("s0", Medium.HOST)
    assert decision.num_pulled_tokens == 80
    assert decision.predicted_ttft_s == pytest.approx(PULL_OVERHEAD_S + 0.2)
    [(worker, prefill)] = sent(driver.say("s0", PrefixOffered("r.0", OFFERED)), Prefill)
    assert (worker, prefill.prefix) == ("p0", OFFERED)


def test_a_disk_is_read_while_it_is_pulled():
    driver = WithStores("p0", "d0", "s0")
    driver.reads_in("s0", DISK, fixed_s=0.1, block_s=0.01)
    driver.holds("s0", Medium.HOST, 40)
    driver.holds("s0", DISK, 80)
    driver.ask(prompt=LONG)
    decision = driver.decision()
    assert (decision.pulled_medium, decision.num_pulled_tokens) == (DISK, 80)
    assert decision.predicted_load_s == pytest.approx(0.1 + 10 * 0.01)  # ten blocks are in memory
    assert decision.predicted_ttft_s == pytest.approx(0.2 + 0.2)
    claim = driver.machine.view.workers["p0"].prefills["r.0"]
    assert claim.seconds == pytest.approx(0.2 + 0.2)


@pytest.mark.parametrize(
    ("disk_s", "object_s", "medium"),
    [(0.1, 0.1, OBJECT), (0.1, 9.0, DISK), (9.0, 9.0, Medium.HOST), (9.0, 0.1, Medium.HOST)],
)
def test_the_quickest_medium_is_chosen(disk_s, object_s, medium):
    driver = WithStores("p0", "d0", "s0")
    driver.say("s0", LoadReport(*(0,) * 8, gauges=loads(disk_s, object_s)))
    for held, num_tokens in ((Medium.HOST, 40), (DISK, 68), (OBJECT, 96)):
        driver.holds("s0", held, num_tokens)
    driver.ask(prompt=LONG)
    assert driver.decision().pulled_medium == medium


def loads(disk_s: float, object_s: float) -> dict[str, float]:
    fixed = {f"load_fixed_s:{DISK}": disk_s, f"load_fixed_s:{OBJECT}": object_s}
    return {**fixed, f"load_block_s:{DISK}": 0.0, f"load_block_s:{OBJECT}": 0.0}


def test_a_prefix_that_is_read_too_slowly_is_computed():
    driver = WithStores("p0", "d0", "s0")
    driver.reads_in("s0", DISK, fixed_s=0.0, block_s=1.0)
    driver.holds("s0", DISK)
    assert sent(driver.ask(prompt=LONG), Prefill)
    assert driver.decision().pulled_from is None


def test_of_two_stores_the_one_that_reads_faster_is_asked():
    driver = WithStores("p0", "d0", "s0", "s1")
    driver.reads_in("s0", DISK, fixed_s=0.2, block_s=0.0)
    driver.reads_in("s1", DISK, fixed_s=0.1, block_s=0.0)
    for store in ("s0", "s1"):
        driver.holds(store, DISK)
    driver.ask(prompt=LONG)
    assert driver.decision().pulled_from == "s1"


def test_mixed_workers_pull_from_each_other_before_any_pull_was_seen():
    costs = WorkerCosts(prefill=COSTS.prefill, decode=COSTS.decode)
    driver = WithStores("m0", "m1", costs=costs)
    driver.holds("m0", None)
    driver.ask("backlog", range(500, 900))
    assert driver.decision("backlog").prefill_worker == "m0"
    assert [worker for worker, _ in sent(driver.ask(prompt=LONG), OfferPrefix)] == ["m0"]
    assert (driver.decision().prefill_worker, driver.decision().pulled_medium) == ("m1", None)


@pytest.mark.parametrize(("num_tokens", "is_pulled"), [(64, True), (60, False)])
@pytest.mark.parametrize("workers", ["p0 d0", "m0"])
def test_a_first_prompt_after_a_restart_comes_from_the_store(num_tokens, is_pulled, workers):
    driver = WithStores(*workers.split(), "s0", costs=None)
    driver.holds("s0", Medium.HOST, num_tokens)
    driver.ask(prompt=LONG)
    assert (driver.decision().pulled_from == "s0") is is_pulled
    [claim] = driver.machine.view.workers[workers.split()[0]].prefills.values()
    assert claim.seconds == 0.0  # the time is unknown, because no cost has been measured


@pytest.mark.parametrize(("in_memory", "medium"), [(0, DISK), (32, DISK), (64, Medium.HOST)])
def test_an_unmeasured_disk_must_spare_as_much_more(in_memory, medium):
    driver = WithStores("p0", "d0", "s0", costs=None)
    driver.holds("s0", Medium.HOST, in_memory)
    driver.holds("s0", DISK, 96)
    driver.ask(prompt=LONG)
    assert driver.decision().pulled_medium == medium


# ---------------------------------------------------------------- learning from pulls


def pulled(driver: WithStores, medium: str) -> None:
    """Runs a prompt of which 24 blocks are pulled in half a second."""
    driver.holds("s0", medium)
    driver.ask(prompt=LONG)
    driver.say("s0", PrefixOffered("r.0", OFFERED))
    driver.say("p0", PrefillStarted("r.0", 96, LEASE, num_pulled_blocks=24, pull_s=0.5))


def test_a_prefix_pull_teaches_its_price_and_counts_by_medium():
    driver = WithStores("p0", "d0", "s0", costs=None)
    pulled(driver, Medium.HOST)
    p0 = driver.machine.view.workers["p0"]
    assert driver.machine.state.estimates.pull_s(p0, 96) == pytest.approx(0.5 + PULL_OVERHEAD_S)
    assert driver.machine.counters["pulled tokens", Medium.HOST] == 96
    [moved] = driver.machine.state.transfers.pairs
    assert (moved.source, moved.sink, moved.seconds) == ("s0", "p0", 0.5)
    assert moved.num_bytes == moved.timed_bytes == 24 * p0.info.layout.block_bytes


def test_the_time_of_a_disk_is_not_taken_for_that_of_a_pull():
    driver = WithStores("p0", "d0", "s0", costs=None)
    p0 = driver.machine.view.workers["p0"]
    before_s = driver.machine.state.estimates.pull_s(p0, 96)
    pulled(driver, DISK)
    assert driver.machine.state.estimates.pull_s(p0, 96) == before_s
    assert driver.machine.counters["pulled tokens", DISK] == 96


def test_a_pull_from_a_worker_counts_as_such():
    driver = WithStores("p0", "p1", "d0", costs=None)
    driver.holds("d0", None)
    driver.ask(prompt=LONG)
    driver.say("d0", PrefixOffered("r.0", OFFERED))
    driver.say("p0", PrefillStarted("r.0", 96, LEASE, num_pulled_blocks=24, pull_s=0.5))
    assert driver.machine.counters["pulled tokens", "worker"] == 96


@pytest.mark.parametrize(("num_blocks", "num_tokens"), [(-3, 0), (0, 0), (10**9, 100)])
def test_no_more_is_counted_than_a_prompt_has(num_blocks, num_tokens):
    driver = WithStores("p0", "d0", "s0", costs=None)
    driver.holds("s0", Medium.HOST)
    driver.ask(prompt=LONG)
    driver.say("s0", PrefixOffered("r.0", OFFERED))
    driver.say("p0", PrefillStarted("r.0", 96, LEASE, num_blocks, 0.5))
    assert driver.machine.counters["pulled tokens", Medium.HOST] == num_tokens


# ---------------------------------------------------------------- prefetches


def crowded(*stores: str) -> WithStores:
    """Returns a driver in which the next prompt must wait."""
    driver = WithStores("p0", "d0", *stores)
    for number in range(2):
        driver.ask(f"busy{number}", range(1000 * (number + 1), 1000 * (number + 1) + 400))
    assert driver.machine.queue_len == 1
    return driver


def test_a_store_reads_what_a_waiting_prompt_needs():
    driver = crowded("s0", "s1")
    driver.reads_in("s0", DISK, fixed_s=0.1, block_s=0.0)
    driver.holds("s0", DISK, 80)
    driver.holds("s1", Medium.HOST, 40)
    hashes = [bytes(block) for block in hash_blocks(LONG[:80], 4)]
    assert sent(driver.ask(prompt=LONG), Prefetch) == [("s0", Prefetch(hashes))]
    assert driver.machine.counters["prefetch", "asked"] == 1
    assert not sent(driver.handle(Tick()), Prefetch)
    assert not sent(driver.say("p0", PrefillStarted("busy0.0", 0, LEASE)), Prefetch)


@pytest.mark.parametrize(
    ("medium", "num_tokens", "block_s"), [(Medium.HOST, 100, 0.0), (DISK, 40, 0.0), (DISK, 80, 1.0)]
)
def test_nothing_is_read_ahead_that_would_not_pay(medium, num_tokens, block_s):
    driver = crowded("s0", "s1")
    driver.reads_in("s0", DISK, fixed_s=0.0, block_s=block_s)
    driver.holds("s0", medium, num_tokens)
    driver.holds("s1", Medium.HOST, 40)
    assert not sent(driver.ask(prompt=LONG), Prefetch)


def test_a_prompt_that_is_placed_at_once_needs_no_hint():
    driver = WithStores("p0", "d0", "s0")
    driver.holds("s0", DISK)
    effects = driver.ask(prompt=LONG)
    assert sent(effects, OfferPrefix)
    assert not sent(effects, Prefetch)


def test_a_policy_that_does_not_pull_has_nothing_read_ahead():
    driver = WithStores("s0", policy="round-robin")  # no worker has joined yet
    driver.holds("s0", DISK)
    driver.join("p0")
    assert not sent(driver.ask(prompt=LONG), Prefetch)
    pulls = WithStores("s0")
    pulls.holds("s0", DISK)
    pulls.join("p0")
    assert sent(pulls.ask(prompt=LONG), Prefetch)


# ---------------------------------------------------------------- faults of stores


def test_a_store_lost_before_its_offer_costs_only_the_prefix():
    driver = WithStores("p0", "d0", "s0")
    driver.holds("s0", DISK)
    assert sent(driver.ask(prompt=LONG), OfferPrefix)
    [(worker, prefill)] = sent(driver.handle(WorkerLost("s0", "gone")), Prefill)
    assert (worker, prefill.prefix) == ("p0", None)
    assert driver.machine.counters["fallback", "prefix holder lost"] == 1
    assert not driver.machine.counters["retried", "worker lost"]


def test_a_store_lost_after_its_offer_is_left_to_the_prefill_worker():
    driver = WithStores("p0", "d0", "s0")
    driver.holds("s0", Medium.HOST)
    driver.ask(prompt=LONG)
    driver.say("s0", PrefixOffered("r.0", OFFERED))
    assert not driver.handle(WorkerLost("s0", "gone"))
    driver.say("p0", PrefillStarted("r.0", 0, LEASE))
    driver.say("p0", PrefillDone("r.0", 9, FinishReason.STOP))
    assert driver.machine.num_flights == 0
    assert not driver.machine.counters["pulled tokens", Medium.HOST]


def test_an_empty_or_late_offer_of_a_store_leads_to_computing():
    for is_late in (False, True):
        driver = WithStores("p0", "d0", "s0")
        driver.holds("s0", DISK)
        driver.ask(prompt=LONG)
        if is_late:
            driver.now_s += driver.machine.state.config.offer_timeout_s
            effects = driver.handle(Tick())
            assert sent(effects, Cancel) == [("s0", Cancel("r.0"))]
        else:
            effects = driver.say("s0", PrefixOffered("r.0", None))
        [(worker, prefill)] = sent(effects, Prefill)
        assert (worker, prefill.prefix) == ("p0", None)
        # only the store's events tell which blocks it holds
        assert matched(driver) == {"s0|disk": 25}


def test_a_store_out_of_reach_is_not_asked():
    driver = WithStores("s0", "p0", "d0")
    driver.holds("s0", Medium.HOST)
    driver.machine.view.severed["s0", "p0"] = driver.now_s + 100.0
    assert sent(driver.ask(prompt=LONG), Prefill)


@pytest.mark.parametrize("difference", [{"block_size": 8}, {"kv_format": KVFormat.INT8}])
def test_a_store_of_another_layout_is_left_alone(difference):
    driver = WithStores()
    layout = replace(LAYOUT, **difference)
    info = Welcome(PROTOCOL_VERSION, "s0", "inc", Role.STORE, "fp", layout, 100, 0)
    driver.handle(WorkerJoined(info))
    driver.holds("s0", Medium.HOST)
    for name in ("p0", "d0"):
        driver.join(name, 1000)
    assert sent(driver.ask(prompt=LONG), Prefill)
    assert driver.machine.view.capacity_tokens == 4000
