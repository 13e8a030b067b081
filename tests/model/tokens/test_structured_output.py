"""Answers of the bundled model under schemas: complete answers are valid, and drafts change
nothing.
"""

import json
from dataclasses import dataclass, field
from functools import cache
from math import log

import pytest
from tokenizers import Tokenizer

from deploy.base.defaults import BUNDLED_MODEL
from engine.config import WeightFormat
from engine.grammar.guide import Guide
from engine.grammar.guides import LlGuides
from engine.messages import Grammar, GrammarKind, Sampling, SeqId
from engine.model.runner import TorchRunner
from engine.worker.batch import BatchPlan, Row
from tests.kits.schemas import faults, random_schema, terseness

pytestmark = pytest.mark.torch

BUNDLED = BUNDLED_MODEL.parent
TOKENIZER = BUNDLED / "target" / "tokenizer.json"
SEEDS = range(300, 500)  # seeds that the unit test does not use
BLOCK_SIZE = 16
MAX_TOKENS = 240  # most tokens of prompt, answer and drafts
BLOCKS_EACH = MAX_TOKENS // BLOCK_SIZE + 1
NUM_ROWS = 40
NUM_DRAFTED = 4
NUM_BIASED = 60


@dataclass
class Client:
    """A sequence whose answer must follow a schema."""

    seed: int
    blocks: list[int]
    guide: Guide
    sampling: Sampling
    token_ids: list[int]
    prompt_len: int
    num_drafted: int = 0
    num_accepted: int = 0
    ended: bool = False
    schema: dict = field(default_factory=dict)

    def row(self, num_to_draft):
        is_first = len(self.token_ids) == self.prompt_len
        given = self.token_ids if is_first else self.token_ids[-1:]
        return Row(
            SeqId(str(self.seed)),
            given,
            len(self.token_ids) - len(given),
            self.blocks,
            self.sampling,
            num_to_draft=0 if is_first else num_to_draft,
            # Passes the whole answer again, because this client does not record which tokens have
            # draft KV.
            draft_token_ids=self.token_ids if num_to_draft else (),
            guide=self.guide,
        )

    def take(self, result, eos):
        self.num_drafted += result.num_drafted
        self.num_accepted += result.num_accepted
        for token_id in result.token_ids:
            if token_id in eos or len(self.token_ids) >= MAX_TOKENS - NUM_DRAFTED - 1:
                self.ended = True
                return
            self.guide.consume(token_id)
            self.token_ids.append(token_id)


@cache
def tokenizer():
    return Tokenizer.from_file(str(TOKENIZER))


@pytest.fixture(scope="module")
def runner():
    runner = TorchRunner(
        BUNDLED / "target",
        draft=BUNDLED / "draft",
        block_size=BLOCK_SIZE,
        num_blocks=NUM_ROWS * BLOCKS_EACH,
        weights=WeightFormat.AUTO,
    )
    runner.open()
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def guides(runner):
    return LlGuides(TOKENIZER, vocab_size=runner.vocab_size, eos_token_ids=runner.eos_token_ids)


@cache
def brevity():
    """Returns biases with which a small model ends its answers early."""
    texts = [tokenizer().decode([i], skip_special_tokens=False) for i in range(4096)]
    weights = terseness(texts)
    likely = weights.argsort()[::-1][:NUM_BIASED].tolist()
    return tuple((i, log(weights[i])) for i in likely)


def client(seed, slot, guides):
    schema = random_schema(seed)
    prompt = tokenizer().encode("As JSON: ", add_special_tokens=False).ids
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    return Client(
        seed=seed,
        blocks=list(range(slot * BLOCKS_EACH, (slot + 1) * BLOCKS_EACH)),
        guide=guides.open(grammar, ()),
        sampling=Sampling(temperature=0.7, seed=seed, grammar=grammar, logit_bias=brevity()),
        token_ids=prompt,
        prompt_len=len(prompt),
        schema=schema,
    )


def answers(runner, guides, seeds, num_to_draft=0):
    """Returns clients of these seeds after their answers. Up to NUM_ROWS clients share each
    step.
    """
    waiting, running, done = list(seeds), [], []
    slots = list(range(NUM_ROWS))
    while waiting or running:
        while waiting and slots:
            running.append(client(waiting.pop(0), slots.pop(), guides))
        result = runner.run(BatchPlan([c.row(num_to_draft) for c in running]))
        for c, row_result in zip(running, result.rows, strict=True):
            c.take(row_result, runner.eos_token_ids)
            assert c.guide.fault is None
        done += [c for c in running if c.ended]
        slots += [c.blocks[0] // BLOCKS_EACH for c in running if c.ended]
        running = [c for c in running if not c.ended]
    return sorted(done, key=lambda c: c.seed)


def text_of(c):
    return tokenizer().decode(c.token_ids[c.prompt_len :], skip_special_tokens=False)


def is_finished(c):
    return len(c.token_ids) < MAX_TOKENS - NUM_DRAFTED - 1


def test_every_finished_answer_of_a_model_validates_in_a_batch_of_many_schemas(runner, guides):
    done = answers(runner, guides, SEEDS)
    finished = [c for c in done if is_finished(c)]
    for c in finished:
        assert not faults(c.schema, text_of(c)), (c.seed, text_of(c))
    assert len(done) == len(SEEDS)
    assert len(finished) > 0.85 * len(done)


def test_drafts_are_masked_too_and_change_no_token(runner, guides):
    seeds = SEEDS[:NUM_ROWS]
    plain = answers(runner, guides, seeds)
    drafted = answers(runner, guides, seeds, num_to_draft=NUM_DRAFTED)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert sum(c.num_accepted for c in drafted) > 0.2 * sum(c.num_drafted for c in drafted)
