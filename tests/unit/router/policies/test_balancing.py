"""Sequences that leave a full decode worker, and cases in which none leaves."""

import pytest
from msgspec.structs import replace

from engine.demand import DecodeCost
from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import PROTOCOL_VERSION, Role, SeqId, Welcome, WorkerId
from engine.worker.costs import PullCost, WorkerCosts
from router.cluster.estimates import Estimates
from router.cluster.learning import ENOUGH, AnswerLengths
from router.cluster.view import ClusterView, Foreign
from router.policies.balancing import AT_ONCE, Lenders, Relief, is_idle_lender, relief

LAYOUT = KVLayout(block_size=16, kv_format=KVFormat.FP32, sections=(KVSection(1, 1, 4),))
PULL = PullCost(fixed_s=0.0, block_s=1e-4, bytes_per_s=1e12)
BY_ROWS = WorkerCosts(decode=DecodeCost(0.01, 0.001, 0.0), pull=PULL)
FLAT = WorkerCosts(decode=DecodeCost(0.02, 1e-5, 0.0), pull=PULL)


class Pool:
    """A cluster of decode workers with sequences of equal length."""

    def __init__(self, costs: WorkerCosts = BY_ROWS) -> None:
        self.view = ClusterView()
        self.costs = Estimates(costs)
        self.lengths = AnswerLengths()
        self.stay: set[str] = set()
        self.room_s = 0.0  # seconds that prompts lose per token of KV on a prefill worker

    def add(self, name: str, num_seqs: int, *, max_tokens: int = 500, prompt: int = 64, **info):
        fields = {"num_blocks": 10_000, "max_running": 256, **info}
        welcome = Welcome(PROTOCOL_VERSION, WorkerId(name), "inc", Role.DECODE, "fp", LAYOUT, 1, 1)
        worker = self.view.add(replace(welcome, **fields))
        for number in range(num_seqs):
            worker.reserve_decode(
                SeqId(f"{name}/{number}"),
                LAYOUT.num_blocks_for(prompt + max_tokens),
                context_tokens=prompt + 1,
                prompt_tokens=prompt,
                max_tokens=max_tokens,
            )
        return worker

    def relief(self, least_gain: float = 0.2, **idle_s: float) -> Relief | None:
        return relief(
            self.view,
            self.costs,
            self.lengths,
            least_gain=least_gain,
            may_leave=lambda seq_id, target: seq_id not in self.stay,
            lenders=Lenders({WorkerId(name): s for name, s in idle_s.items()}, self.room_s),
        )

    def carry_out(self, found: Relief) -> None:
        """Applies the moves at once."""
        source, target = (self.view.workers[i] for i in (found.source, found.target))
        for seq_id in found.seq_ids:
            claim = source.decodes[seq_id]
            source.release_decode(seq_id)
            target.reserve_decode(
                seq_id,
                claim.blocks,
                context_tokens=claim.context_tokens,
                prompt_tokens=claim.prompt_tokens,
                max_tokens=claim.max_tokens,
            )


def test_a_fresh_worker_takes_half_of_a_full_one_in_a_few_rounds_and_nothing_comes_back():
    pool = Pool()
    full, fresh = pool.add("d0", 57), pool.add("d1", 6)
    rounds = 0
    while (found := pool.relief()) is not None:
        assert (found.source, found.target) == ("d0", "d1")
        assert len(found.seq_ids) <= AT_ONCE
        pool.carry_out(found)
        rounds += 1
    assert rounds == 2
    assert (len(full.decodes), len(fresh.decodes)) == (32, 31)


@pytest.mark.parametrize("least_gain", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("nums", [(1, 0), (2, 1), (9, 8), (40, 3, 3), (200, 0, 90, 7)])
def test_moves_end_with_any_pools_and_gain(nums, least_gain):
    pool = Pool()
    for index, num in enumerate(nums):
        pool.add(f"d{index}", num)
    for _ in range(60):
        found = pool.relief(least_gain)
        if found is None:
            return
        pool.carry_out(found)
    pytest.fail("sequences go round")


SLOW_PULL = PullCost(fixed_s=0.0, block_s=3.0, bytes_per_s=1e12)


@pytest.mark.parametrize(
    ("nums", "costs", "info"),
    [
        ((10, 8), BY_ROWS, {}),
        ((57, 6), FLAT, {}),
        ((57, 0), WorkerCosts(), {}),
        ((40, 0), BY_ROWS, {"max_tokens": 12}),
        ((40, 0), WorkerCosts(decode=BY_ROWS.decode, pull=SLOW_PULL), {}),
    ],
    ids=[
        "little difference",
        "steps that do not depend on the batch",
        "steps that were not measured",
        "sequences near their end",
        "a copy takes as long as the rest",
    ],
)
def test_nothing_moves_where_it_does_not_pay(nums, costs, info):
    pool = Pool(costs)
    pool.add("d0", nums[0], **info)
    pool.add("d1", nums[1])
    assert pool.relief() is None


def test_answers_that_usually_end_soon_stay():
    pool = Pool()
    for _ in range(2 * ENOUGH):
        pool.lengths.observe(500, 12)
    pool.add("d0", 40)
    pool.add("d1", 0)
    assert pool.relief() is None


def test_short_contexts_with_long_answers_go_first():
    pool = Pool()
    worker = pool.add("d0", 20, prompt=2000)
    worker.reserve_decode(SeqId("short"), 40, context_tokens=10, prompt_tokens=9, max_tokens=500)
    pool.add("d1", 0)
    found = pool.relief()
    assert found is not None
    assert found.seq_ids[0] == "short"


def test_only_sequences_that_may_leave_do():
    pool = Pool()
    pool.add("d0", 40)
    pool.add("d1", 0)
    pool.stay = {f"d0/{number}" for number in range(38)}
    found = pool.relief()
    assert found is not None
    assert set(found.seq_ids) == {"d0/38", "d0/39"}


@pytest.mark.parametrize(
    "other",
    [
        {"role": Role.MIXED},
        {"kernels": "avx2"},
        {"layout": replace(LAYOUT, kv_format=KVFormat.INT8)},
        {"role": Role.DRAINED},
    ],
)
def test_workers_that_differ_take_nothing(other):
    pool = Pool()
    pool.add("d0", 40)
    pool.add("d1", 0, **other)
    assert pool.relief() is None


def test_severed_workers_take_nothing():
    pool = Pool()
    pool.add("d0", 40)
    pool.add("d1", 0)
    pool.view.severed["d0", "d1"] = 99.0
    assert pool.relief() is None


def test_the_target_is_not_filled_beyond_its_memory_or_places():
    few = LAYOUT.num_blocks_for(564)
    for limit in ({"num_blocks": 3 * few}, {"max_running": 3}):
        pool = Pool()
        pool.add("d0", 40)
        pool.add("d1", 0, **limit)
        found = pool.relief()
        assert found is not None
        assert len(found.seq_ids) == 3


def test_the_next_fastest_worker_takes_what_the_fastest_has_no_room_for():
    pool = Pool()
    pool.add("d0", 40)
    pool.add("d1", 2, max_running=2)
    pool.add("d2", 4)
    found = pool.relief()
    assert found is not None
    assert found.target == "d2"


def test_each_of_two_gateways_moves_its_share():
    pool = Pool()
    worker = pool.add("d0", 20)
    worker.foreign = Foreign(seqs=20, blocks=100, context_tokens=20 * 65)
    pool.add("d1", 0)
    found = pool.relief()
    assert found is not None
    # the other gateway moves the same number; in total, half of all sequences move
    assert len(found.seq_ids) == 10


def test_a_full_worker_without_sequences_of_ours_gives_way_to_the_next():
    pool = Pool()
    pool.add("d0", 0).foreign = Foreign(seqs=60)
    pool.add("d1", 40)
    pool.add("d2", 0)
    found = pool.relief()
    assert found is not None
    assert (found.source, found.target) == ("d1", "d2")


# ---------------------------------------------------------------- idle prefill workers


def lent(
    num_decoding: int = 9, idle_s: float = 100.0, room_s: float = 0.0, **info
) -> Relief | None:
    """Returns the moves to an idle prefill worker."""
    pool = Pool()
    pool.room_s = room_s
    pool.add("d0", num_decoding)
    pool.add("p0", 0, role=Role.PREFILL, stretch=4.0, **info)
    return pool.relief(p0=idle_s)


def test_an_idle_prefill_worker_takes_sequences_until_steps_count_alike():
    """On a lender, a step counts a tenth more: with 9 sequences, 5 · 1 ms + 10 ms against 14 ms ·
    1.1."""
    found = lent()
    assert found is not None
    assert (found.target, len(found.seq_ids)) == ("p0", 3)


def test_it_takes_none_that_gain_too_little_in_the_time_for_which_it_may_stay_idle():
    """With 9 sequences, 12 ms of decoding gain 7 ms. A copy and four pauses take 150 ms, and the
    way back takes as long again.
    """
    assert lent(idle_s=0.5) is None
    assert lent(idle_s=0.55) is not None


def test_it_takes_none_whose_room_is_worth_more_to_prompts():
    """A sequence needs room for 564 tokens; each of its 499 tokens arrives 7 ms earlier."""
    assert lent(room_s=2e-4) is not None
    assert lent(room_s=5e-4) is None


def test_it_keeps_a_quarter_of_its_memory_for_prompts():
    blocks = LAYOUT.num_blocks_for(564)
    found = lent(num_blocks=4 * blocks)
    assert found is not None
    assert len(found.seq_ids) == 3
    found = lent(40, num_blocks=4 * blocks)
    assert found is not None
    assert len(found.seq_ids) == 3


def test_a_prefill_worker_gives_nothing_and_a_mixed_one_lends_it_nothing():
    pool = Pool()
    pool.add("p0", 9, role=Role.PREFILL, stretch=4.0)
    pool.add("d0", 0)
    assert pool.relief(p0=100.0) is None
    pool = Pool()
    pool.add("m0", 9, role=Role.MIXED, stretch=4.0)
    pool.add("p0", 0, role=Role.PREFILL, stretch=4.0)
    assert pool.relief(p0=100.0) is None


@pytest.mark.parametrize(
    ("info", "prompts", "is_idle"),
    [
        ({}, 0, True),
        ({}, 1, False),
        ({"stretch": None}, 0, False),
        ({"role": Role.DECODE}, 0, False),
        ({"role": Role.MIXED}, 0, False),
    ],
)
def test_fluid_prefill_workers_without_prompts_may_lend(info, prompts, is_idle):
    worker = Pool().add("p0", 2, **{"role": Role.PREFILL, "stretch": 4.0, **info})
    for number in range(prompts):
        worker.reserve_prefill(SeqId(f"p{number}"), 100)
    assert is_idle_lender(worker) is is_idle


def test_prompts_of_other_gateways_count():
    worker = Pool().add("p0", 0, role=Role.PREFILL, stretch=4.0)
    worker.foreign = Foreign(prompt_tokens=1)
    assert not is_idle_lender(worker)
