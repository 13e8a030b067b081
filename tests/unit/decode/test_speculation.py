"""The number of draft tokens, on machines with known step costs and drafts of known quality.

The scheduler and its speculator are real. The runner knows the answers and the duration of each
step on the simulated machine, including disturbances.
"""

import random
from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import pytest

from decode.acceptance import Proposer
from decode.choosing import Candidate, Proposal
from decode.speculation import Speculator
from deploy.worker.core import WorkerCore
from engine.config import Speculate
from engine.messages import Cancel, GatewayId, Limits, Role, Sampling, SeqId
from engine.worker.batch import BatchPlan, BatchResult, Row, RowResult, StepTimes
from engine.worker.blocks import BlockPool
from engine.worker.events import FromGateway
from engine.worker.intake import Intake
from engine.worker.sequence import Sequence
from tests.kits.fakes.worker import WorkerShape
from tests.kits.worker_core import HERE

VOCAB_SIZE = 1000
PROMPT_LEN = 64
MAX_DRAFT_TOKENS = 8
MEAN_NOISE = 1 + 0.003 * 3
PIECE = 256  # tokens of a text that are generated at once


@dataclass(frozen=True, slots=True)
class Machine:
    """The step costs of a simulated machine, in milliseconds."""

    step: float = 1.0
    row: float = 0.02
    verifying: float = 0.0
    drafted: float = 0.03
    draft_pass: float = 0.1
    draft_token: float = 0.003
    read: float = 0.01  # ms per thousand tokens of context
    look: float = 0.0  # ms on the host for each row whose draft is chosen

    def target_ms(self, num_rows: int, num_drafted: int, read: float) -> float:
        fixed = self.step + (self.verifying if num_drafted else 0)
        return fixed + self.row * num_rows + self.drafted * num_drafted + self.read * read / 1000

    def draft_ms(self, num_passes: int, num_tokens: int) -> float:
        return self.draft_pass * num_passes + self.draft_token * num_tokens


@dataclass(slots=True)
class Texts:
    """The tokens of each sequence. With `period` the text repeats; None is random text."""

    period: int | None = None
    vocab_size: int = VOCAB_SIZE
    known: dict[SeqId, list[int]] = field(default_factory=dict)

    def at(self, seq_id: SeqId, position: int) -> int:
        text = self.known.setdefault(seq_id, [])
        while len(text) <= position:
            if text and self.period is not None:
                text += text[: self.period]
            else:
                rng = random.Random(f"{seq_id} {len(text)}")
                text += rng.choices(range(self.vocab_size), k=self.period or PIECE)
        return text[position]


class KnownRunner:
    """A runner whose draft model proposes the right token with the probability `acceptance`."""

    def __init__(self, machine: Machine, texts: Texts, acceptance: float, seed: int) -> None:
        self.machine = machine
        self.texts = texts
        self.acceptance = acceptance
        self.spent_ms = 0.0
        self.plain_ms = 0.0  # ms that these tokens would have taken in steps of one token
        self.lengths: Counter[int] = Counter()  # number of drafts by length
        self._rng = random.Random(seed)

    def run(self, plan: BatchPlan) -> BatchResult:
        results = [self._run_row(row) for row in plan.rows]
        num_drafted = sum(result.num_drafted for result in results)
        pairs = list(zip(plan.rows, results, strict=True))
        read = sum(row.end * (1 + result.num_drafted) for row, result in pairs)
        target_ms = self._disturb(self.machine.target_ms(len(plan.rows), num_drafted, read))
        draft_ms = 0.0
        if any(row.draft_token_ids for row in plan.rows):
            passes = max(1, *(row.num_to_draft for row in plan.rows), 0)
            unseen = sum(len(row.draft_token_ids) for row in plan.rows)
            drafted = sum(max(row.num_to_draft - 1, 0) for row in plan.rows)
            draft_ms = self._disturb(self.machine.draft_ms(passes, unseen + drafted))
        self.spent_ms += target_ms + draft_ms
        num_tokens = sum(len(result.token_ids) for result in results)
        plain_ms = self.machine.target_ms(len(pairs), 0, sum(row.end for row in plan.rows))
        self.plain_ms += plain_ms * MEAN_NOISE * num_tokens / len(pairs)
        times = StepTimes(0.0, target_ms * 0.8e-3, target_ms * 0.2e-3, draft_ms * 1e-3)
        return BatchResult(results, times)

    def _run_row(self, row: Row) -> RowResult:
        true = [self.texts.at(row.seq_id, row.end + i) for i in range(row.max_drafted + 1)]
        draft = list(row.draft)
        for i in range(row.num_to_draft):
            draft.append(true[i] if self._rng.random() < self.acceptance else VOCAB_SIZE)
        self.lengths[len(draft)] += 1
        num_accepted = 0
        while num_accepted < len(draft) and draft[num_accepted] == true[num_accepted]:
            num_accepted += 1
        return RowResult(tuple(true[: num_accepted + 1]), len(draft))

    def _disturb(self, milliseconds: float) -> float:
        """Varies the duration of a step slightly; sometimes another process delays the step."""
        noise = self._rng.gauss(1.0, 0.03)
        return milliseconds * noise * (4.0 if self._rng.random() < 0.003 else 1.0)


class Bench:
    """Endless sequences on one machine."""

    def __init__(
        self,
        mode: Speculate,
        machine: Machine,
        *,
        batch: int,
        acceptance: float = 0.0,
        texts: Texts | None = None,
        has_draft_model: bool = True,
    ) -> None:
        self.runner = KnownRunner(machine, texts or Texts(), acceptance, seed=batch)
        speculator = Speculator(
            mode, max_draft_tokens=MAX_DRAFT_TOKENS, has_draft_model=has_draft_model
        )
        pool = BlockPool(batch * 500)
        self.core = WorkerCore(
            pool,
            WorkerShape(Role.DECODE, max_batch_tokens=512, max_running=64),
            intake=Intake(16),
            address=HERE,
            role=Role.DECODE,
            speculator=speculator,
        )
        self.decode = self.core.decode
        self._now_s = 0.0
        self.speculator = speculator
        self.num_looks = 0
        self._choose = speculator.plan
        speculator.plan = self._look  # type: ignore[method-assign]
        self.batch = batch
        self.context_len = float(PROMPT_LEN)
        self._pool = pool
        self._num_adopted = 0
        self._adopt_all()

    def replace_all(self) -> None:
        """Replaces all sequences by new sequences."""
        for i in range(self._num_adopted - self.batch, self._num_adopted):
            self.core.handle(FromGateway(GatewayId("g"), Cancel(SeqId(f"s{i}"))))
        self._adopt_all()

    def _adopt_all(self) -> None:
        for i in range(self.batch):
            self._adopt(SeqId(f"s{self._num_adopted + i}"), PROMPT_LEN + 3 * i, self._pool)
        self._num_adopted += self.batch

    def _adopt(self, seq_id: SeqId, prompt_len: int, pool: BlockPool) -> None:
        tokens = [self.runner.texts.at(seq_id, i) for i in range(prompt_len + 1)]
        seq = Sequence(seq_id, GatewayId("g"), tokens, Sampling(), Limits(10**6), block_size=16)
        seq.block_table = pool.allocate(seq.num_prompt_blocks)
        seq.advance(prompt_len, pool)
        self.decode.adopt(seq)

    def _look(
        self, candidates: Items[Candidate], *, num_others: int, others_tokens: int
    ) -> list[Proposal | None]:
        self.num_looks += 1
        look_ms = self.runner.machine.look * (len(candidates) + num_others)
        self.runner.spent_ms += look_ms
        self._now_s += look_ms * 1e-3
        return self._choose(candidates, num_others=num_others, others_tokens=others_tokens)

    def gain(self, num_steps: int) -> float:
        """Runs steps, and returns their speed-up over steps without drafts."""
        runner = self.runner
        num_before = self.decode.counters["step_tokens"]
        spent_ms, plain_ms = runner.spent_ms, runner.plain_ms
        runner.lengths.clear()
        for _ in range(num_steps):
            plan, _ = self.core.plan(self._now_s)
            assert plan is not None
            result = runner.run(plan)
            assert result.times is not None
            self._now_s += result.times.total_s
            self.core.finish(result, self._now_s)
        self.core.validate()
        num_tokens = self.decode.counters["step_tokens"] - num_before
        self.context_len += num_tokens / self.batch  # context length after the steps
        return (runner.plain_ms - plain_ms) / (runner.spent_ms - spent_ms)


def best_gain(machine: Machine, acceptance: float, batch: int, context_len: float) -> float:
    """Returns the speed-up of the best constant draft length."""
    plain_ms = machine.target_ms(batch, 0, batch * context_len)
    gains = [1.0]
    for k in range(1, MAX_DRAFT_TOKENS + 1):
        tokens = sum(acceptance**j for j in range(k + 1))
        ms = machine.target_ms(batch, batch * k, batch * context_len * (k + 1))
        ms += machine.draft_ms(k, batch * (k + 0.5))
        gains.append(tokens * plain_ms / ms)
    return max(gains)


LAPTOP = Machine()
FULL = Machine(step=1.0, row=0.3, drafted=0.3, draft_token=0.03)  # every token costs much
GRAPHED = Machine(verifying=2.0)  # steps without drafts have a faster path
DEAR_DRAFT = Machine(draft_pass=0.6)
DEAR_LOOK = Machine(step=0.4, row=0.05, drafted=0.002, look=0.03)
SMALL = Machine(step=0.4, row=0.09, drafted=0.09, look=0.008)  # like the bundled model on two cores


# ---------------------------------------------------------------- no loss of speed


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize(
    ("machine", "acceptance"),
    [(LAPTOP, 0.03), (FULL, 0.1), (GRAPHED, 0.3), (DEAR_DRAFT, 0.35)],
    ids=["laptop", "full", "graphed", "dear draft"],
)
def test_a_poor_draft_costs_less_than_three_percent(machine, acceptance, batch):
    bench = Bench(Speculate.DRAFT, machine, batch=batch, acceptance=acceptance)
    assert bench.gain(1000 if batch == 1 else 400) >= 0.97


def test_a_fair_draft_costs_nothing_in_a_full_batch():
    bench = Bench(Speculate.DRAFT, FULL, batch=32, acceptance=0.6)
    assert bench.gain(500) >= 0.97


@pytest.mark.parametrize("mode", [Speculate.NGRAM, Speculate.AUTO])
@pytest.mark.parametrize("batch", [1, 16])
def test_random_matches_cost_less_than_three_percent(mode, batch):
    noise = Texts(vocab_size=12)  # with so small a vocabulary, n-grams of two tokens always match
    bench = Bench(mode, LAPTOP, batch=batch, acceptance=0.02, texts=noise)
    assert bench.gain(1000) >= 0.97


@pytest.mark.parametrize("mode", [Speculate.NGRAM, Speculate.AUTO])
@pytest.mark.parametrize("batch", [1, 16])
def test_looks_for_matches_that_are_not_worth_it_cost_less_than_three_percent(mode, batch):
    _check_loss(mode, SMALL, batch)


@pytest.mark.parametrize("batch", [1, 16])
def test_drafts_that_do_not_earn_the_time_of_their_looks_are_given_up(batch):
    _check_loss(Speculate.NGRAM, DEAR_LOOK, batch)


def _check_loss(mode: Speculate, machine: Machine, batch: int) -> None:
    """Compares with a worker that never drafts, under the same disturbances."""
    modes = (mode, Speculate.OFF)
    gains = []
    for each in modes:
        noise = Texts(vocab_size=12)
        bench = Bench(each, machine, batch=batch, acceptance=0.02, texts=noise)
        bench.gain(100)
        gains.append(bench.gain(1000 if batch == 1 else 200))
    assert gains[0] >= 0.97 * gains[1]


@pytest.mark.parametrize("mode", [Speculate.OFF, Speculate.NGRAM])
def test_an_unused_draft_model_costs_less_than_three_percent(mode):
    bench = Bench(mode, FULL, batch=32)
    assert bench.gain(400) >= 0.97
    assert bench.decode.counters["drafted:draft"] == 0


# ---------------------------------------------------------------- gains in speed


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("acceptance", [0.5, 0.7, 0.9])
def test_a_good_draft_is_nearly_as_fast_as_the_best_constant_length(acceptance, batch):
    bench = Bench(Speculate.DRAFT, LAPTOP, batch=batch, acceptance=acceptance)
    bench.gain(100)
    context_len = bench.context_len
    gain = bench.gain(500)
    context_len = (context_len + bench.context_len) / 2
    # Acceptance is random: over all steps this changes the gain by a few percent.
    assert gain >= 0.92 * best_gain(LAPTOP, acceptance, batch, context_len)


@pytest.mark.parametrize("mode", [Speculate.NGRAM, Speculate.AUTO])
def test_text_that_repeats_is_drafted_from_itself(mode):
    bench = Bench(mode, LAPTOP, batch=1, acceptance=0.3, texts=Texts(period=40))
    assert bench.gain(600) > 4
    assert max(bench.runner.lengths) == MAX_DRAFT_TOKENS
    counters = bench.decode.counters
    assert counters["accepted:ngram"] > 0.9 * counters["drafted:ngram"]
    assert counters["drafted:ngram"] > 10 * counters["drafted:draft"]


def test_each_sequence_has_the_length_that_suits_it():
    bench = Bench(Speculate.DRAFT, FULL, batch=2)
    bench.runner._run_row = lambda row: run_row(row)  # type: ignore[method-assign]
    drafted: Counter[SeqId] = Counter()

    def run_row(row: Row) -> RowResult:
        drafted[row.seq_id] += row.num_to_draft
        is_good = row.seq_id == "s0"
        num_accepted = row.num_to_draft if is_good else 0
        true = [bench.runner.texts.at(row.seq_id, row.end + i) for i in range(num_accepted + 1)]
        return RowResult(tuple(true), row.num_to_draft)

    bench.gain(300)
    assert drafted["s0"] > 300
    assert drafted["s1"] < drafted["s0"] / 10


# ---------------------------------------------------------------- changes of conditions


def test_a_draft_that_becomes_poor_is_given_up():
    bench = Bench(Speculate.DRAFT, LAPTOP, batch=1, acceptance=0.8)
    assert bench.gain(400) > 1.5
    bench.runner.acceptance = 0.02
    bench.gain(60)
    assert bench.gain(1500) >= 0.97


def test_a_draft_that_becomes_good_is_found_again():
    bench = Bench(Speculate.DRAFT, LAPTOP, batch=1, acceptance=0.02)
    bench.gain(1000)
    bench.runner.acceptance = 0.85
    bench.gain(1500)
    assert bench.gain(300) >= 0.9 * best_gain(LAPTOP, 0.85, 1, bench.context_len)


def test_a_machine_that_becomes_crowded_is_noticed():
    bench = Bench(Speculate.DRAFT, LAPTOP, batch=8, acceptance=0.8)
    assert bench.gain(200) > 1.2
    bench.runner.machine = Machine(drafted=0.5, draft_pass=1.0)
    bench.gain(200)
    assert bench.gain(800) >= 0.97


def test_trials_become_rare():
    bench = Bench(Speculate.DRAFT, DEAR_DRAFT, batch=1, acceptance=0.0)
    counts = []
    for _ in range(4):
        bench.gain(1000)
        counts.append(1000 - bench.runner.lengths[0])
    assert counts[-1] <= 5  # number of steps of one trial


def test_steps_rest_from_looks_in_vain_and_new_batches_do_not_pay_for_them_again():
    bench = Bench(Speculate.AUTO, SMALL, batch=8, acceptance=0.02)
    bench.gain(400)
    num_before = bench.num_looks
    for _ in range(4):
        bench.replace_all()
        bench.gain(100)
    assert bench.num_looks - num_before < 80


@pytest.mark.parametrize("mode", [Speculate.OFF, Speculate.DRAFT])
def test_most_steps_beside_an_idle_draft_model_plan_and_learn_nothing(mode):
    bench = Bench(mode, DEAR_DRAFT, batch=1)
    bench.gain(1000)
    num_planned = 0
    rests = bench.speculator.rests

    def counted() -> bool:
        nonlocal num_planned
        num_planned += 1
        return rests()

    bench.speculator.rests = counted  # type: ignore[method-assign]
    bench.gain(1000)
    assert num_planned < 300


@pytest.mark.parametrize("batch", [1, 16])
def test_short_answers_cost_less_than_three_percent(batch):
    gains = []
    for mode in (Speculate.AUTO, Speculate.OFF):
        bench = Bench(mode, SMALL, batch=batch, acceptance=0.3, texts=Texts(vocab_size=12))
        bench.gain(100)
        spent = []
        for _ in range(8):
            bench.replace_all()
            spent.append(1 / bench.gain(64))
        gains.append(len(spent) / sum(spent))
    assert gains[0] >= 0.97 * gains[1]


def test_drafts_that_lose_are_given_up_even_if_every_estimate_promises_a_gain():
    bench = Bench(Speculate.DRAFT, LAPTOP, batch=4, acceptance=0.0)
    bench.speculator._chooser.choose = lambda candidates, *_: [  # type: ignore[method-assign]
        Proposal(Proposer.DRAFT, 4) for _ in candidates
    ]
    bench.gain(100)
    assert bench.gain(1000) >= 0.98


# ---------------------------------------------------------------- rules of the speculator


def speculator(mode=Speculate.AUTO, *, has_draft_model=True) -> Speculator:
    return Speculator(mode, max_draft_tokens=8, has_draft_model=has_draft_model)


def test_nothing_is_drafted_if_speculation_is_off():
    candidates = [Candidate(SeqId("a"), 100, 8, match_len=16)]
    assert speculator(Speculate.OFF).plan(candidates) == [None]


@pytest.mark.parametrize("mode", [Speculate.DRAFT, Speculate.AUTO])
def test_without_a_draft_model_it_is_not_proposed(mode):
    candidates = [Candidate(SeqId("a"), 100, 8, match_len=0)]
    chooser = speculator(mode, has_draft_model=False)
    assert [chooser.plan(candidates) for _ in range(100)] == [[None]] * 100


def test_a_long_match_is_used_before_the_draft_model_is_asked():
    candidates = [
        Candidate(SeqId("a"), 100, 1, match_len=16),
        Candidate(SeqId("b"), 100, 1, match_len=0),
    ]
    proposers = [proposal and proposal.proposer for proposal in speculator().plan(candidates)]
    assert proposers == [Proposer.NGRAM, Proposer.DRAFT]


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_a_draft_is_never_longer_than_it_may_be(max_tokens):
    candidates = [Candidate(SeqId("a"), 100, max_tokens, match_len=16)]
    chooser = speculator()
    for _ in range(50):
        for proposal in chooser.plan(candidates):
            assert (0 if proposal is None else proposal.num_tokens) <= max_tokens


def test_the_draft_model_skips_sequences_it_is_too_far_behind():
    candidates = [Candidate(SeqId("a"), 9000, 8, num_unseen=5000)]
    chooser = speculator(Speculate.DRAFT)
    assert [chooser.plan(candidates) for _ in range(100)] == [[None]] * 100


def test_the_same_steps_lead_to_the_same_choices():
    def lengths() -> Counter[int]:
        bench = Bench(Speculate.AUTO, LAPTOP, batch=3, acceptance=0.6, texts=Texts(period=300))
        bench.gain(300)
        return bench.runner.lengths

    assert lengths() == lengths()
