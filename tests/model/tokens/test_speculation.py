"""Speculation changes no token and no log-probability: the bundled pair on its CPU path.

Clients record what a decode scheduler records: the tokens that the draft model has computed, the
proposals, and the kept tokens. Their results are compared with the results without proposals.
"""

import random
from array import array
from functools import partial
from itertools import pairwise
from threading import Lock

import msgspec
import numpy as np
import pytest
import torch

from deploy.base.defaults import BUNDLED_MODEL
from engine.clock import MonotonicClock
from engine.config import WeightFormat
from engine.layout import KVFormat
from engine.messages import Sampling
from engine.model import runner as runner_module
from engine.model.runner import TorchRunner
from engine.model.sampling.draft import DraftedRow, Masks, draft_step_by_step
from engine.model.sampling.verify import verify_by_parts
from engine.worker.batch import BatchPlan, Row
from engine.worker.blocks import BlockId
from tests.kits.checkpoints import tiny_checkpoint
from tests.kits.models.sequences import as_on_a_gpu, scattered

pytestmark = pytest.mark.torch

BUNDLED = BUNDLED_MODEL.parent
BLOCK_SIZE = 16
NUM_BLOCKS = 160
NUM_NEW_TOKENS = 24
MAX_DRAFTED = 6
VOCAB_SIZE = 4096
BANNED = tuple(range(0, VOCAB_SIZE, 3))

SAMPLINGS = {
    "greedy": Sampling(temperature=0.0),
    "temperature": Sampling(temperature=0.9, seed=1),
    "nucleus": Sampling(temperature=0.8, top_p=0.9, seed=2, logprobs=2),
    "top k": Sampling(temperature=1.2, top_k=20, min_p=0.02, seed=3),
    "penalties": Sampling(
        temperature=0.7,
        seed=4,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logprobs=0,
    ),
    "greedy penalties": Sampling(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.5),
    "bias": Sampling(temperature=1.0, seed=5, logit_bias=((100, 4.0), (7, -50.0), (333, 6.0))),
    "bans": Sampling(temperature=0.9, seed=6),
    "grammar": Sampling(temperature=0.9, seed=7, logprobs=1),
    "greedy grammar": Sampling(temperature=0.0, presence_penalty=0.5),
}


class ParityGuide:
    """Allows two of three ids, depending on the previous token and on the length."""

    def __init__(self):
        self._answer = []
        self._used = Lock()
        self.num_masks = 0

    def consume(self, token_id):
        with self._alone():
            assert self._allowed(self._answer)[token_id]
            self._answer.append(token_id)

    def num_allowed(self, ahead):
        with self._alone():
            for i, token_id in enumerate(ahead):
                if not self._allowed([*self._answer, *ahead[:i]])[token_id]:
                    return i
            return len(ahead)

    def masks(self, ahead):
        with self._alone():
            contexts = [[*self._answer, *ahead[:i]] for i in range(len(ahead) + 1)]
            for context, token_id in zip(contexts, ahead, strict=False):
                assert self._allowed(context)[token_id]
            self.num_masks += len(contexts)
            bits = np.stack([self._allowed(context) for context in contexts])
            return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)

    def _allowed(self, context):
        before = context[-1] if context else 0
        return (np.arange(VOCAB_SIZE) + before + len(context)) % 3 != 0

    def _alone(self):
        assert not self._used.locked(), "two threads use one guide"
        return self._used


class Client:
    """A sequence, computed in the way of schedulers. `propose` returns what a step drafts."""

    def __init__(self, name, kind, prompt, blocks, propose=None, chunks=()):
        self.name, self.kind = name, kind
        self.sampling = SAMPLINGS[kind]
        self.token_ids = list(prompt)
        self.prompt_len = len(prompt)
        self.blocks = blocks
        self.chunks = list(chunks)
        self.guide = ParityGuide() if "grammar" in kind else None
        self.num_computed = self.num_seen = 0
        self.propose = propose or (lambda client, room: {})
        self.logprobs = []
        self.num_drafted = self.num_kept = 0
        self.steps = []

    @property
    def answer(self):
        return self.token_ids[self.prompt_len :]

    def next_row(self):
        left = len(self.token_ids) - self.num_computed
        chunk = min(left, self.chunks.pop(0)) if self.chunks else left
        start, end = self.num_computed, self.num_computed + chunk
        options = {"draft_token_ids": self.token_ids[self.num_seen : end]}
        samples = end == len(self.token_ids)
        if samples:
            room = NUM_NEW_TOKENS - len(self.answer) - 1
            if self.answer:
                options |= self.propose(self, min(MAX_DRAFTED, room))
            if self.sampling.has_penalties:
                options |= {"history": array("i", self.token_ids), "prompt_len": self.prompt_len}
            options["guide"] = self.guide
            options["banned"] = BANNED if self.kind == "bans" else ()
        row = self.token_ids[start:end]
        return Row(
            self.name, row, start, self.blocks, self.sampling if samples else None, **options
        )

    def take(self, row, result):
        self.num_computed = row.end + result.num_accepted
        if row.draft_token_ids:
            self.num_seen = row.end + min(result.num_accepted, max(row.num_to_draft - 1, 0))
        self.num_seen = min(self.num_seen, self.num_computed)
        assert result.num_drafted <= row.max_drafted
        assert len(result.token_ids) <= result.num_drafted + 1
        if row.num_to_draft:
            assert result.num_drafted == row.num_to_draft
        self.num_drafted += result.num_drafted
        self.num_kept += result.num_accepted
        self.steps.append(result)
        for token in result.token_ids:
            if self.guide is not None:
                self.guide.consume(token)
            self.token_ids.append(token)
        self.logprobs += result.logprobs

    @property
    def outcome(self):
        return self.answer, self.logprobs


def serve(runner, clients):
    """Runs all clients in common batches until each client has its new tokens."""
    while running := [c for c in clients if len(c.answer) < NUM_NEW_TOKENS]:
        rows = [client.next_row() for client in running]
        result = runner.run(BatchPlan(rows))
        for client, row, row_result in zip(running, rows, result.rows, strict=True):
            client.take(row, row_result)
    return clients


def serve_until_answering(runner, client):
    while not client.answer:
        row = client.next_row()
        (result,) = runner.run(BatchPlan([row])).rows
        client.take(row, result)


def prompt(i):
    return random.Random(i).choices(range(300, 1200), k=3 + 7 * i)


tables = partial(scattered, num_blocks=NUM_BLOCKS)


@pytest.fixture(scope="module")
def pair():
    runner = TorchRunner(
        BUNDLED / "target",
        draft=BUNDLED / "draft",
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        kv_format=KVFormat.INT8,
        weights=WeightFormat.INT8,
    )
    runner.open()
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def plain(pair):
    """Returns the result of one client of each kind alone, without proposals."""
    (blocks,) = tables(1)
    clients = {kind: Client("alone", kind, prompt(i), blocks) for i, kind in enumerate(SAMPLINGS)}
    for client in clients.values():
        serve(pair, [client])
        assert client.num_drafted == 0
        assert all(len(step.token_ids) == 1 for step in client.steps)
    return {kind: client.outcome for kind, client in clients.items()}


def by_model(rng):
    """Lets the draft model propose in some steps, and leaves it out of other steps."""

    def propose(client, room):
        if rng.random() < 0.2:
            return {"draft_token_ids": ()}
        return {"num_to_draft": rng.randint(0, room)}

    return propose


def garbage(rng, vocab_size=VOCAB_SIZE):
    ids = range(vocab_size)
    return lambda client, room: {"draft": rng.choices(ids, k=rng.randint(0, room))}


def perfect(rng, answer):
    def propose(client, room):
        done = len(client.answer)
        return {"draft": answer[done : done + rng.randint(0, room)]}

    return propose


def nearly_perfect(rng, answer):
    """Proposes the right tokens, except for one token at a random place."""
    right = perfect(rng, answer)

    def propose(client, room):
        draft = list(right(client, room)["draft"])
        if draft:
            wrong = rng.randrange(len(draft))
            draft[wrong] = (draft[wrong] + 1) % VOCAB_SIZE
        return {"draft": draft}

    return propose


def anything(rng, answer):
    """Proposes in a different way in each step."""
    ways = by_model(rng), garbage(rng), perfect(rng, answer), nearly_perfect(rng, answer)
    return lambda client, room: rng.choice(ways)(client, room)


PROPOSERS = {
    "model": lambda rng, answer: by_model(rng),
    "garbage": lambda rng, answer: garbage(rng),
    "perfect": perfect,
    "nearly perfect": nearly_perfect,
    "anything": anything,
}


@pytest.mark.parametrize("company", ["of all kinds", "without grammars"])
@pytest.mark.parametrize("name", PROPOSERS)
def test_proposals_change_neither_tokens_nor_logprobs(pair, plain, name, company):
    """Batches contain decode rows and chunks of other prompts.

    If a client follows a grammar, Python computes more of the step.
    """
    rng = random.Random(0)
    kinds = [k for k in SAMPLINGS if company == "of all kinds" or "grammar" not in k]
    places = zip(SAMPLINGS, tables(len(SAMPLINGS), seed=7), strict=True)
    clients = [
        Client(f"s{i}", kind, prompt(i), blocks, PROPOSERS[name](rng, plain[kind][0]), (i + 1, 5))
        for i, (kind, blocks) in enumerate(places)
        if kind in kinds
    ]
    rng.shuffle(clients)
    for client in serve(pair, clients):
        assert client.outcome == plain[client.kind], client.kind
        assert client.num_drafted > 0
        if name == "perfect":
            assert client.num_kept == client.num_drafted
    kept = sum(client.num_kept for client in clients)
    drafted = sum(client.num_drafted for client in clients)
    if name == "garbage":
        assert kept < 0.05 * drafted
    elif name != "perfect":
        assert 0.1 * drafted < kept < drafted


def test_a_perfect_draft_is_kept_with_one_token_more(pair, plain):
    answer, logprobs = plain["nucleus"]
    (blocks,) = tables(1)
    client = Client("a", "nucleus", prompt(2), blocks)
    client.propose = lambda client, room: {"draft": answer[len(client.answer) :][:room]}
    serve(pair, [client])
    assert [len(step.token_ids) for step in client.steps] == [1, 7, 7, 7, 2]
    assert client.outcome == (answer, logprobs)


def test_a_step_overwrites_the_kv_of_rejected_tokens(pair, plain):
    """Long wrong proposals are followed by steps without proposals, which must overwrite their
    KV.
    """
    (blocks,) = tables(1)
    client = Client("a", "temperature", prompt(1), blocks)
    rng = random.Random(3)

    def propose(client, room):
        return (
            {"draft": rng.choices(range(VOCAB_SIZE), k=room)} if len(client.steps) % 3 == 1 else {}
        )

    client.propose = propose
    serve(pair, [client])
    assert client.num_drafted > 20
    assert client.outcome == plain["temperature"]


def test_a_draft_proposes_as_it_would_choose_as_a_target(plain):
    """Noise, penalties, bans, bias and masks are the same: a model that drafts for itself proposes
    only tokens that are kept.
    """
    runner = TorchRunner(
        BUNDLED / "draft",
        draft=BUNDLED / "draft",
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        kv_format=KVFormat.INT8,
    )
    runner.open()
    try:
        places = zip(SAMPLINGS, tables(len(SAMPLINGS)), strict=True)
        clients = [
            Client(f"s{i}", kind, prompt(i), blocks, lambda _, room: {"num_to_draft": room})
            for i, (kind, blocks) in enumerate(places)
        ]
        for client in serve(runner, clients):
            assert client.num_kept == client.num_drafted == NUM_NEW_TOKENS - 5, client.kind
    finally:
        runner.close()


@pytest.fixture
def drafting(pair):
    """Generates proposals of every kind, and rows without proposals. At most a prefix of each row
    has draft KV.
    """
    found = []
    for i, (kind, blocks) in enumerate(zip(SAMPLINGS, tables(len(SAMPLINGS)), strict=True)):
        tokens = prompt(i + 1)
        begin = len(tokens) // 2
        pair.run(
            BatchPlan([Row("a", tokens[:begin], 0, blocks, None, draft_token_ids=tokens[:begin])])
        )
        sampling = SAMPLINGS[kind]
        row = Row(
            f"s{i}",
            tokens[-1:],
            len(tokens) - 1,
            blocks,
            sampling,
            BANNED if kind == "bans" else (),
            num_to_draft=i % 6,
            draft_token_ids=tokens[begin:],
            history=array("i", tokens) if sampling.has_penalties else None,
            prompt_len=len(tokens) - 3,
        )
        found.append(row)
    return sorted(found, key=lambda row: -row.num_to_draft)


def drafted(forward, rows, draft):
    proposals = [DraftedRow(row) for row in rows]
    with torch.inference_mode():
        draft(proposals, Masks())
    return [proposal.token_ids for proposal in proposals]


def test_one_call_proposes_the_tokens_of_step_by_step(pair, drafting):
    forward = pair.draft_forward
    stepwise = drafted(forward, drafting, lambda *args: draft_step_by_step(forward, *args))
    assert drafted(forward, drafting, forward.draft) == stepwise
    assert [len(tokens) for tokens in stepwise] == [row.num_to_draft for row in drafting]
    assert len({tuple(tokens) for tokens in stepwise}) > 5


def test_one_call_verifies_like_separate_parts(pair):
    """Rows choose, are scored, both or neither; with proposals and without."""
    rng = random.Random(5)
    proposals = []
    for i, (kind, blocks) in enumerate(zip(SAMPLINGS, tables(len(SAMPLINGS)), strict=True)):
        tokens = prompt(i + 1)
        sampling = SAMPLINGS[kind] if i % 4 else None
        row = Row(
            f"s{i}",
            tokens,
            0,
            blocks,
            sampling,
            BANNED if kind == "bans" else (),
            history=array("i", tokens) if SAMPLINGS[kind].has_penalties else None,
            prompt_len=len(tokens) - 3,
            scored=tokens[1 : i + 1] if i % 3 else (),
        )
        proposed = rng.choices(range(VOCAB_SIZE), k=i % 5) if sampling else []
        proposals.append(DraftedRow(row, proposed))
    steps = proposals, Masks(), MonotonicClock()
    with torch.inference_mode():
        expected = verify_by_parts(pair._forward, *steps)
        found = pair._forward.verify(*steps)
    assert found.chosen == expected.chosen
    assert torch.equal(found.logits, expected.logits)
    assert len(found.logits) > len(found.chosen) > 0


def test_catching_up_proposes_the_same_as_seeing_each_token(pair):
    """The draft model computes missed tokens one by one, in pieces, or all in the pass that
    proposes.
    """
    tokens = prompt(5)
    proposed = []
    cuts = range(len(tokens)), (0, 7, 8, 28), (0,)
    for blocks, begins in zip(tables(3), cuts, strict=True):
        for begin, end in pairwise((*begins, len(tokens))):
            is_last = end == len(tokens)
            row = Row(
                "a",
                tokens[end - 1 : end],
                end - 1,
                blocks,
                SAMPLINGS["nucleus"] if is_last else None,
                num_to_draft=5 if is_last else 0,
                draft_token_ids=tokens[begin:end],
            )
            (found,) = drafted(pair.draft_forward, [row], pair.draft_forward.draft)
        proposed.append(found)
    assert len(proposed[0]) == 5
    assert proposed == [proposed[0]] * 3


def test_scored_tokens_have_the_ranks_of_softmax(pair):
    """Prompts are scored at once, or in chunks. The last chunk also chooses a token."""
    tokens = prompt(6)
    whole, chunked = tables(2)
    row = Row("a", tokens, 0, whole, SAMPLINGS["nucleus"], scored=tokens[1:], num_top=3)
    (result,) = pair.run(BatchPlan([row])).rows
    assert len(result.token_ids) == 1
    with torch.inference_mode():
        logits = pair._forward.logits([row], range(len(tokens))).double()
    assert len(result.scored) == len(tokens) - 1
    for found, values, token in zip(result.scored, logits.tolist(), tokens[1:], strict=False):
        total = np.logaddexp.reduce(values)
        best = sorted(range(VOCAB_SIZE), key=lambda i: (-values[i], i))[:3]
        assert found.logprob == pytest.approx(values[token] - total, abs=1e-4)
        assert found.rank == 1 + sum(value > values[token] for value in values)
        assert found.top_ids == tuple(best)
        assert found.top_logprobs == pytest.approx([values[i] - total for i in best], abs=1e-4)

    scored = []
    for begin, end in pairwise((0, 5, 6, 21, len(tokens))):
        sampling = SAMPLINGS["nucleus"] if end == len(tokens) else None
        follow = tokens[begin + 1 : end + 1]
        part = Row("b", tokens[begin:end], begin, chunked, sampling, scored=follow, num_top=3)
        other = Row("c", [1, 2, 3], 0, [BlockId(NUM_BLOCKS - 1)], SAMPLINGS["bias"])
        found, _ = pair.run(BatchPlan([part, other])).rows
        scored += found.scored
    assert tuple(scored) == result.scored
    assert (found.token_ids, found.logprobs) == (result.token_ids, result.logprobs)


def test_verification_reuses_the_masks_of_drafting(pair):
    """The guide computes one mask for each place: for each proposed token, and after the last."""
    (blocks,) = tables(1)
    client = Client("a", "grammar", prompt(1), blocks)
    serve_until_answering(pair, client)
    made = client.guide.num_masks
    client.propose = lambda client, room: {"num_to_draft": 3}
    row = client.next_row()
    asked = []
    masks = row.guide.masks

    def noting(ahead):
        asked.append(len(ahead))
        return masks(ahead)

    row.guide.masks = noting
    pair.run(BatchPlan([row]))
    assert made > 0
    assert asked == [0, 1, 2, 3]


def test_a_grammar_cuts_off_forbidden_proposals(pair):
    (blocks,) = tables(1)
    client = Client("a", "grammar", prompt(1), blocks)
    serve_until_answering(pair, client)
    row = client.next_row()
    allowed = np.flatnonzero(client.guide._allowed(client.answer))
    refused = [i for i in range(VOCAB_SIZE) if not client.guide._allowed([*client.answer, 400])[i]]
    for draft, num in (([int(allowed[0])], 1), ([], 0), ([refused[0]] * 4, None)):
        again = msgspec.structs.replace(row, draft=draft)
        (result,) = pair.run(BatchPlan([again])).rows
        expected = client.guide.num_allowed(draft) if num is None else num
        assert result.num_drafted == expected


@pytest.mark.parametrize("way", ["as on a GPU", "layer by layer"])
def test_every_forward_pass_drafts_and_verifies(tmp_path_factory, monkeypatch, way):
    """The models have random weights, and no two best logits are nearly equal."""
    kinds = ("mixtral", "gpt_neox") if way == "layer by layer" else ("llama", "qwen3")
    target, draft = (tiny_checkpoint(tmp_path_factory, kind) for kind in kinds)
    if way == "as on a GPU":
        monkeypatch.setattr(runner_module, "_forward", as_on_a_gpu((1, 4)))
    runner = TorchRunner(
        target, draft=draft, block_size=BLOCK_SIZE, num_blocks=40, weights=WeightFormat.FP32
    )
    runner.open()
    try:
        outcomes = []
        for propose in (None, by_model(random.Random(0)), garbage(random.Random(0), 256)):
            clients = [
                Client(f"s{i}", kind, range(40 + i), range(10 * i, 10 * i + 10), propose)
                for i, kind in enumerate(("greedy", "temperature", "penalties"))
            ]
            outcomes.append([client.answer for client in serve(runner, clients)])
        assert outcomes == [outcomes[0]] * 3
    finally:
        runner.close()
