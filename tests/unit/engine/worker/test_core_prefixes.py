"""Whole workers in memory: a pulled block is not computed, a block that is here is not pulled."""

import random

from hypothesis import given, reject, settings
from hypothesis import strategies as st

from engine.messages import Limits, Role, WorkerId
from tests.kits.fakes.cluster import FakeCluster
from tests.kits.fakes.gateway import Ask, FakeGateway
from tests.kits.fakes.model import BLOCK_SIZE
from tests.kits.fakes.worker import FakeWorker, WorkerShape

PROMPT = tuple(i % 7 for i in range(14))  # three full blocks and a half
SUFFIX = (8, 9, 10)
seeds = st.integers(0, 2**32)  # for the order in which workers and messages move
any_order = settings(max_examples=20)


class Pair:
    """Two prefill workers, a decode worker and a gateway."""

    def __init__(self, seed: int, *, window_blocks: int = 64, copies_at_once: bool = True) -> None:
        fields = {"num_blocks": 16, "copies_at_once": copies_at_once}
        roles = {"p1": Role.PREFILL, "p2": Role.PREFILL, "d": Role.DECODE}
        self.cluster = FakeCluster(
            {n: WorkerShape(r, window_blocks=window_blocks, **fields) for n, r in roles.items()}
        )
        self.gateway: FakeGateway = self.cluster.add_gateway("g")
        self.rng = random.Random(seed)

    def worker(self, name: str) -> FakeWorker:
        return self.cluster.workers[WorkerId(name)]

    def ask(self, prompt, *route: str) -> Ask:
        limits = Limits(len(prompt) + 6)
        return self.cluster.submit(self.gateway, prompt, limits=limits, routes=[route])

    def drain(self) -> None:
        self.cluster.drain(self.rng)
        for ask in self.cluster.asks:
            assert (ask.outcome, tuple(ask.tokens)) == ("finished", ask.expected.token_ids)
        for worker in self.cluster.workers.values():
            worker.validate()


def computed_by(worker: FakeWorker) -> list[tuple[int, int]]:
    """A list that receives the start and end of each row that the worker runs."""
    rows: list[tuple[int, int]] = []
    launch = worker.runner.launch

    def spy(plan):
        rows.extend((row.start, row.end) for row in plan.rows)
        return launch(plan)

    worker.runner.launch = spy
    return rows


@any_order
@given(seed=seeds, copies_at_once=st.booleans())
def test_a_prefill_worker_pulls_the_computed_prefix_and_computes_the_rest(seed, copies_at_once):
    pair = Pair(seed, copies_at_once=copies_at_once)
    pair.ask(PROMPT, "p1", "d")
    pair.drain()
    rows = computed_by(pair.worker("p2"))
    prompt = PROMPT + SUFFIX
    pair.ask(prompt, "p2", "d", "p1")
    pair.drain()
    counters = pair.worker("p2").prefill.counters
    num_pulled = counters["pulled_prefix_blocks"]
    assert num_pulled == len(PROMPT) // BLOCK_SIZE or counters["fallbacks:prefix_pull_failed"] == 1
    assert min(start for start, _ in rows) == num_pulled * BLOCK_SIZE
    assert max(end for _, end in rows) >= len(prompt)  # more if its answer came back
    assert not pair.worker("p1").offers.leases.opened


def test_a_prefill_worker_pulls_an_answer_from_the_worker_that_generated_it():
    pair = Pair(0)
    first = pair.ask(PROMPT, "p1", "d")
    pair.drain()
    rows = computed_by(pair.worker("p1"))
    prompt = (*PROMPT, *first.tokens, *SUFFIX)
    pair.ask(prompt, "p1", "d", "d")
    pair.drain()
    num_held = (len(PROMPT) + len(first.tokens) - 1) // BLOCK_SIZE
    assert min(start for start, _ in rows) == num_held * BLOCK_SIZE
    own = len(PROMPT) // BLOCK_SIZE
    assert pair.worker("p1").prefill.counters["pulled_prefix_blocks"] == num_held - own > 0


@any_order
@given(seed=seeds)
def test_a_prefix_pull_that_breaks_off_keeps_the_blocks_that_arrived(seed):
    pair = Pair(seed, window_blocks=1, copies_at_once=False)
    pair.ask(PROMPT, "p1", "d")
    pair.drain()
    rows = computed_by(pair.worker("p2"))
    pair.ask(PROMPT + SUFFIX, "p2", "d", "p1")
    break_off(pair, source="p1", sink="p2")
    pair.drain()
    counters = pair.worker("p2").prefill.counters
    num_kept = counters["pulled_prefix_blocks"]
    assert counters["fallbacks:prefix_pull_failed"] == 1
    assert 0 < num_kept < len(PROMPT) // BLOCK_SIZE
    assert min(start for start, _ in rows) == num_kept * BLOCK_SIZE


@any_order
@given(seed=seeds)
def test_a_hand_over_that_breaks_off_goes_on_from_the_blocks_that_arrived(seed):
    pair = Pair(seed, window_blocks=1, copies_at_once=False)
    pair.ask(PROMPT, "p1", "d")
    break_off(pair, source="p1", sink="d")
    num_kept = pair.worker("d").decode.counters["kept_blocks"]
    assert 0 < num_kept < len(PROMPT) // BLOCK_SIZE
    assert pair.worker("d").pool.counts().cached == num_kept
    pair.drain()


def break_off(pair: Pair, *, source: str, sink: str) -> None:
    """Lets a pull bring its first block; then the source is silent until the sink gives up."""
    pulls = pair.worker(sink).endpoint.sink._pulls
    for _ in range(2000):
        if any(pull.here for pull in pulls.values()):
            break
        pair.cluster.move(pair.rng)
    else:
        reject()  # in a rare order of moves the pull ends before its first block is seen
    pair.worker(source).stuck.add("transfer")
    if pair.worker(sink).in_flight:
        pair.worker(sink).end_step()
    for _ in range(30):
        pair.cluster.now_s += 0.25
        pair.worker(sink).endpoint.sweep()
        while pair.worker(sink).inbox:
            pair.worker(sink).take_event()
    assert not pulls
