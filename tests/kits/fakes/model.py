"""A model in memory, its draft model, its grammars, and the expected answers.

The KV of a token is a number computed from all tokens before it. So a wrong block table, or a
block that is overwritten in use, changes every later token.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np

from engine.errors import GrammarError
from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import FinishReason, Grammar, Limits, Logprobs, Sampling, SeqId
from engine.worker.batch import BatchPlan, BatchResult, Row, RowResult, StepTimes
from engine.worker.blocks import BlockId

BLOCK_SIZE = 4
VOCAB_SIZE = 11
LAYOUT = KVLayout(BLOCK_SIZE, KVFormat.FP32, (KVSection(1, 1, 2),))

Kv = tuple[int, int]  # KV of one token in the target and in the draft model; garbage is negative
TARGET, DRAFT = 0, 1
Writes = dict[tuple[BlockId, int, int], int]  # KV by block, offset and model


def kv_of(context: int, token: int) -> int:
    """Returns the KV of a token after this context."""
    return abs(hash((context, token)))


def extend(context: int, kv: int) -> int:
    """Returns the context extended by one token; the empty context is 0."""
    return hash((context, kv))


def contexts_of(token_ids: Iterable[int], context: int = 0) -> tuple[list[int], list[int]]:
    """Returns the KV of each token that follows a context, and the context after each token."""
    kvs, contexts = [], []
    for token in token_ids:
        kvs.append(kv_of(context, token))
        context = extend(context, kvs[-1])
        contexts.append(context)
    return kvs, contexts


def kvs_of(token_ids: Iterable[int]) -> list[Kv]:
    """Returns a block's contents after both models have computed all its tokens."""
    return [(kv, kv) for kv in contexts_of(token_ids)[0]]


@dataclass(frozen=True, slots=True)
class TokenFacts:
    """Everything that a token depends on besides its context."""

    sampling: Sampling
    banned: Sequence[int] = ()
    history: Sequence[int] | None = None
    prompt_len: int = 0
    allowed: Sequence[int] = range(VOCAB_SIZE)


def choose(context: int, asked: TokenFacts) -> int:
    """Returns the token that follows a context."""
    facts: list[object] = [context, asked.sampling.seed]
    if asked.sampling.has_penalties:
        assert asked.history is not None
        facts += [tuple(asked.history), asked.prompt_len]
    token = hash(tuple(facts)) % VOCAB_SIZE
    while token in asked.banned or token not in asked.allowed:
        token = (token + 1) % VOCAB_SIZE
    return token


def logprobs_of(context: int, token: int, num_top: int) -> Logprobs:
    """Returns log-probabilities that depend on the context and the token."""
    likeliest = tuple(range(num_top))
    return Logprobs(float(hash((context, token)) % 97), token, likeliest, (0.0,) * num_top)


class FakeGuide:
    """A grammar whose next tokens depend on all tokens of the answer so far."""

    def __init__(self, modulus: int, answer: Sequence[int]) -> None:
        self._modulus = modulus
        self._answer: list[int] = []
        self.fault: str | None = None
        for token in answer:
            self.consume(token)

    def consume(self, token_id: int) -> None:
        assert token_id in self.allowed(), "the grammar forbids this token"
        self._answer.append(token_id)

    def num_allowed(self, ahead: Sequence[int]) -> int:
        for i, token in enumerate(ahead):
            if token not in self.allowed(ahead[:i]):
                return i
        return len(ahead)

    def masks(self, ahead: Sequence[int]) -> np.ndarray:
        assert self.num_allowed(ahead) == len(ahead)
        words = [sum(1 << t for t in self.allowed(ahead[:i])) for i in range(len(ahead) + 1)]
        return np.array(words, dtype=np.uint32)[:, None]

    def allowed(self, ahead: Sequence[int] = ()) -> list[int]:
        answer = [*self._answer, *ahead]
        seen = 5 * len(answer) + sum(answer)
        return [token for token in range(VOCAB_SIZE) if (seen + token) % self._modulus]


class FakeGuides:
    """Opens grammars whose source is a number."""

    def open(self, grammar: Grammar, answer: Sequence[int], salt: bytes = b"") -> FakeGuide:
        if not grammar.source.isdigit():
            raise GrammarError("not a number")
        return FakeGuide(int(grammar.source), answer)


@dataclass(frozen=True, slots=True)
class Answer:
    """The expected answer of a request, on whichever worker it runs."""

    token_ids: tuple[int, ...]
    finish: FinishReason
    logprobs: tuple[Logprobs, ...]  # one entry per token, if requested


def answer(prompt: Sequence[int], sampling: Sampling, limits: Limits) -> Answer:
    """Computes the reference answer without blocks, batches, workers or drafts."""
    token_ids = list(prompt)
    logprobs: list[Logprobs] = []
    guide = None if sampling.grammar is None else FakeGuides().open(sampling.grammar, ())
    while True:
        may_stop = len(token_ids) + 1 > limits.min_len
        asked = TokenFacts(
            sampling,
            banned=() if may_stop else limits.stop_token_ids,
            history=token_ids,
            prompt_len=len(prompt),
            allowed=range(VOCAB_SIZE) if guide is None else guide.allowed(),
        )
        context = contexts_of(token_ids)[1][-1]
        token_ids.append(choose(context, asked))
        if guide is not None:
            guide.consume(token_ids[-1])
        if sampling.logprobs is not None:
            logprobs.append(logprobs_of(context, token_ids[-1], sampling.logprobs))
        answered = tuple(token_ids[len(prompt) :])
        if may_stop and token_ids[-1] in limits.stop_token_ids:
            return Answer(answered, FinishReason.STOP, tuple(logprobs))
        if len(token_ids) >= limits.max_len:
            return Answer(answered, FinishReason.LENGTH, tuple(logprobs))


def prompt_logprobs_of(prompt: Sequence[int], num_top: int) -> list[Logprobs]:
    """Returns the reference log-probabilities of a prompt, from its second token on."""
    contexts = contexts_of(prompt)[1]
    pairs = zip(contexts, prompt[1:], strict=False)
    return [logprobs_of(context, token, num_top) for context, token in pairs]


class FakeStep(NamedTuple):
    """A launched step of a `FakeRunner`."""

    runner: "FakeRunner"
    plan: BatchPlan

    def result(self) -> BatchResult:
        return self.runner.end(self)


class FakeRunner:
    """A `Runner` that keeps K and V in `memory[block][offset]` and reads them by block table.

    Like a GPU, it computes steps in order and only when the caller waits for a result. So a step
    sees the memory as it is when the step is computed.

    The draft model has KV of its own, so each step can assert that the draft model reads only KV
    that it has computed. A share `right` of its proposals equals the target's choice.
    """

    def __init__(
        self,
        num_blocks: int,
        layout: KVLayout = LAYOUT,
        *,
        has_draft_model: bool = True,
        right: float = 0.7,
        overlaps: bool = False,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.overlaps = overlaps
        self._in_flight: deque[FakeStep] = deque()
        self._chosen: dict[SeqId, int] = {}  # token chosen for each sequence in the last step
        self._has_draft_model = has_draft_model
        self._right = right
        self._garbage = count(1)
        self.memory: list[list[Kv]] = [[] for _ in range(num_blocks)]
        self.spoil(BlockId(i) for i in range(num_blocks))

    def spoil(self, blocks: Iterable[BlockId]) -> None:
        """Fills blocks with garbage. No two garbage values are equal."""
        for block in blocks:
            garbage = [-next(self._garbage) for _ in range(self.layout.block_size)]
            self.memory[block] = [(kv, kv) for kv in garbage]

    def launch(self, plan: BatchPlan) -> "FakeStep":
        """Records a step."""
        assert len(self._in_flight) <= self.overlaps, "the last step has not ended"
        assert self.overlaps or not any(row.is_pending for row in plan.rows)
        step = FakeStep(self, plan)
        self._in_flight.append(step)
        return step

    def run(self, plan: BatchPlan) -> BatchResult:
        """Launches a step and waits for its result."""
        return self.launch(plan).result()

    def end(self, step: "FakeStep") -> BatchResult:
        """Computes every row from the memory before the step, then writes the results."""
        assert self._in_flight.popleft() is step, "steps end in the order of their launch"
        plan = step.plan
        results, writes = self.compute(plan)
        pairs = zip(plan.rows, results, strict=True)
        self._chosen = {row.seq_id: r.token_ids[0] for row, r in pairs if r.token_ids}
        self.write(writes)
        num_tokens = sum(len(row.token_ids) + row.max_drafted for row in plan.rows)
        num_drafted = sum(len(row.draft_token_ids) + row.num_to_draft for row in plan.rows)
        times = StepTimes(0.0, 1e-3 + 1e-5 * num_tokens, 0.0, draft_s=1e-5 * num_drafted)
        return BatchResult(results, times)

    def write(self, writes: Writes) -> None:
        """Writes K and V to memory."""
        for (block, offset, model), kv in writes.items():
            kept = list(self.memory[block][offset])
            kept[model] = kv
            self.memory[block][offset] = (kept[TARGET], kept[DRAFT])

    def compute(self, plan: BatchPlan) -> tuple[list[RowResult], Writes]:
        """Returns the results and the writes of a plan without performing the writes."""
        writes: Writes = {}
        return [self._compute_row(row, writes) for row in plan.rows], writes

    def _compute_row(self, row: Row, writes: Writes) -> RowResult:
        assert row.token_ids, "a row computes nothing"
        token_ids = [self._chosen[row.seq_id]] if row.is_pending else row.token_ids
        draft = list(row.draft)
        if self._has_draft_model and row.draft_token_ids:
            draft += self._propose(row, writes)
        if row.guide is not None:
            draft = draft[: row.guide.num_allowed(draft)]
        context = 0
        for position in range(row.start):
            context = extend(context, self._read(row, position)[TARGET])
        kvs, contexts = contexts_of([*token_ids, *draft], context)
        self._write(row, row.start, kvs, (TARGET, DRAFT)[: 2 - self._has_draft_model], writes)
        tokens: list[int] = []
        if row.sampling is not None:
            contexts_sampled = contexts[len(row.token_ids) - 1 :]
            for i, context_sampled in enumerate(contexts_sampled):
                tokens.append(choose(context_sampled, self._asked(row, draft[:i])))
                if i == len(draft) or tokens[-1] != draft[i]:
                    break
        num_top = row.sampling and row.sampling.logprobs
        places = zip(contexts[len(row.token_ids) - 1 :], tokens, strict=False)
        logprobs = [] if num_top is None else [logprobs_of(c, t, num_top) for c, t in places]
        scored = zip(contexts, row.scored, strict=False)
        return RowResult(
            token_ids=tuple(tokens),
            num_drafted=len(draft),
            logprobs=tuple(logprobs),
            scored=tuple(logprobs_of(context, token, row.num_top) for context, token in scored),
        )

    def _propose(self, row: Row, writes: Writes) -> list[int]:
        """Returns the draft model's proposal for a row."""
        start = row.end - len(row.draft_token_ids)
        assert start <= row.start
        assert list(row.draft_token_ids[-len(row.token_ids) :]) == list(row.token_ids)
        context = 0
        for position in range(start):
            target, draft = self._read(row, position)
            assert draft == target >= 0, f"the draft model has not computed position {position}"
            context = extend(context, draft)
        kvs, contexts = contexts_of(row.draft_token_ids, context)
        self._write(row, start, kvs, (DRAFT,), writes)
        context = contexts[-1]
        proposed: list[int] = []
        for _ in range(row.num_to_draft):
            if proposed:
                kvs, (context,) = contexts_of(proposed[-1:], context)
                self._write(row, row.end + len(proposed) - 1, kvs, (DRAFT,), writes)
            token = choose(context, self._asked(row, proposed))
            is_right = hash((context, 17)) % 1000 < 1000 * self._right
            proposed.append(token if is_right else (token + 1) % VOCAB_SIZE)
            if row.guide is not None and row.guide.num_allowed(proposed) < len(proposed):
                proposed[-1] = token
        return proposed

    def _asked(self, row: Row, ahead: list[int]) -> TokenFacts:
        assert row.sampling is not None
        allowed = list(range(VOCAB_SIZE))
        if row.guide is not None:
            (word,) = row.guide.masks(ahead)[-1]
            allowed = [t for t in allowed if int(word) >> t & 1]
        history = None if row.history is None else [*row.history, *ahead]
        return TokenFacts(row.sampling, row.banned, history, row.prompt_len, allowed)

    def _read(self, row: Row, position: int) -> Kv:
        block, offset = self._slot(row, position)
        return self.memory[block][offset]

    def _write(
        self, row: Row, start: int, kvs: list[int], models: Sequence[int], writes: Writes
    ) -> None:
        for position, kv in enumerate(kvs, start):
            for model in models:
                slot = (*self._slot(row, position), model)
                assert slot not in writes, f"two rows write to slot {slot}"
                writes[slot] = kv

    def _slot(self, row: Row, position: int) -> tuple[BlockId, int]:
        index, offset = divmod(position, self.layout.block_size)
        return row.block_table[index], offset
