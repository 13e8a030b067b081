"""`bench speculate` measures a worker that speculates, on small models."""

import json
from contextlib import contextmanager

import msgspec
import pytest

import bench.lab.speculate.study as speculate
from bench.common.command import say_nothing
from bench.common.shapes import cached_pair
from bench.lab.speculate.figures import mean_acceptance, results
from bench.lab.speculate.plan import GOALS, MAX_DRAFT_TOKENS, identity_asks, random_prompts
from bench.lab.speculate.worker import Bench, CoreAsk, CoreOptions
from engine.config import Speculate, WeightFormat
from engine.layout import KVFormat
from engine.messages import Sampling, SeqId
from engine.worker.batch import BatchPlan, Row
from engine.worker.blocks import BlockId

pytestmark = pytest.mark.torch

VOCAB_SIZE = 512
PROMPTS = random_prompts(VOCAB_SIZE, 32, seed=0)
NUM_TOKENS = 24
GREEDY = [CoreAsk(prompt, NUM_TOKENS, Sampling(temperature=0.0)) for prompt in PROMPTS]
PASSES = {"batch": 2, "context_len": 20, "lens": [0, 1, 4]}


class InProcess:
    """Replaces a `Driven` process: the same commands and answers, also converted to JSON."""

    session = None

    def __init__(self, bench):
        self._bench = bench

    def ask(self, do, *, timeout_s=0.0, **arguments):
        told = json.loads(msgspec.json.encode(arguments))
        return json.loads(json.dumps(getattr(self._bench, do)(**told)))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return cached_pair("tiny", 0, cache=tmp_path_factory.mktemp("pairs"))


def options_of(target, draft, weights=WeightFormat.FP32, kv_tokens=8192):
    return CoreOptions(
        target=str(target),
        draft=str(draft),
        weights=weights,
        kv_format=KVFormat.FP32,
        num_threads=1,
        kv_tokens=kv_tokens,
        max_draft_tokens=MAX_DRAFT_TOKENS,
    )


@pytest.fixture(scope="module")
def loaded(pair):
    """Returns a bench of the pair, and the durations of its single passes, which are measured
    first.
    """
    worker = InProcess(Bench(options_of(pair.target, pair.draft)))
    return worker, worker.ask("passes", **PASSES)


@pytest.fixture
def worker(loaded):
    return loaded[0]


def test_passes_are_timed_by_themselves(loaded):
    _, passes = loaded
    assert passes["plain_s"] > 0
    assert all(seconds > 0 for seconds in passes["verify_s"])
    nothing, *drafts = passes["draft_s"]
    assert nothing < min(drafts)


def test_all_modes_give_the_same_answers(worker):
    asks = identity_asks(PROMPTS, 12, end_token_ids=(2,), seed=0)
    plain, *others = (worker.ask("generate", mode=mode, asks=asks)["answers"] for mode in Speculate)
    assert [len(answer) <= ask.num_tokens for answer, ask in zip(plain, asks, strict=True)]
    assert others == [plain] * 3


@pytest.mark.parametrize("mode", Speculate)
def test_batch_is_timed_until_its_first_answer_is_complete(worker, mode):
    found = worker.ask("decode", mode=mode, asks=GREEDY[:3])
    lens = [len(answer) for answer in found["answers"]]
    assert NUM_TOKENS <= max(lens) <= NUM_TOKENS + MAX_DRAFT_TOKENS
    rows = sum(rows for _, rows, _, _ in found["steps"])
    assert rows == 3 * len(found["steps"]) == sum(rows for *_, rows in found["drafts"])
    kept = sum(accepted * rows for _, accepted, rows in found["drafts"])
    assert found["num_tokens"] == rows + kept
    assert 0 < found["outside_s"] < found["seconds"]
    if mode is Speculate.OFF:
        assert kept == 0


def acceptance(bench, *, num_to_draft=3, num_steps=12):
    """Returns the mean acceptance of drafts of one length. Their cost does not matter here."""
    runner, drafts = bench._paired, []
    table = [BlockId(block) for block in range(runner.num_blocks)]
    for prompt in PROMPTS[:3]:
        token_ids, start, num = prompt, 0, 0
        for _ in range(num_steps):
            row = Row(SeqId("s"), token_ids, start, table, GREEDY[0].sampling)
            row = msgspec.structs.replace(row, draft_token_ids=token_ids, num_to_draft=num)
            [result] = runner.run(BatchPlan([row])).rows
            drafts.append((result.num_drafted, result.num_accepted, 1))
            start += len(token_ids) + result.num_accepted
            # the tokens that the draft model has not computed; after a whole draft, its last token
            # too
            token_ids, num = [*result.token_ids[-1:]], num_to_draft
            if result.num_accepted == result.num_drafted > 0:
                token_ids, start = [*result.token_ids[-2:]], start - 1
    return mean_acceptance(drafts)


def test_a_draft_made_of_the_target_agrees_with_it_and_a_stranger_does_not(pair):
    agrees, differs = (
        acceptance(Bench(options_of(pair.target, draft))) for draft in (pair.draft, pair.stranger)
    )
    assert agrees > 0.6
    assert differs < 0.1


def test_a_sequence_that_is_given_back_is_an_error(pair):
    small = InProcess(Bench(options_of(pair.target, pair.draft, kv_tokens=64)))
    with pytest.raises(RuntimeError, match="given back"):
        small.ask("generate", mode="off", asks=GREEDY[:1])


def test_measurement_holds_every_promised_result(pair, monkeypatch):
    plan = speculate.SpeculateStudy(
        shape="tiny",
        setups="bundled,shape",
        weights=WeightFormat.FP32,
        threads=1,
        batches="1,8",
        tokens=6,
        identity=2,
        repeat=1,
    )

    @contextmanager
    def in_process(plan, target, draft, weights, kv_format):
        bench = Bench(options_of(pair.target, pair.draft, kv_tokens=2**13))
        yield InProcess(bench), bench.facts

    tokens = [[token % VOCAB_SIZE for token in prompt] for prompt in PROMPTS]
    monkeypatch.setattr("bench.lab.speculate.worker.PASSES_S", 0.0)
    monkeypatch.setattr(speculate, "MOST_ROUNDS", 3)
    monkeypatch.setattr(speculate, "_worker", in_process)
    monkeypatch.setattr(speculate, "text_prompts", lambda tokenizer_file, count, seed: tokens)
    measured = speculate.measure(plan, say_nothing)
    found = {result.name: result for result in results(plan, measured)}
    assert found.keys() >= GOALS.keys()
    assert found["identical_share"].value == found["identical_share/fp32"].value == 1
    assert found["identical_share/cells"].value == 1
    assert found["speedup/worst"].value > 0
