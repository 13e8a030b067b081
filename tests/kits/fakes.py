"""Workers in memory: the real cores and protocol machines around a fake model, network and gateway.

    FakeRunner     a model whose KV is a list of numbers, each made of all tokens before it; a wrong
                   block table, or a block overwritten in use, changes every token that follows;
                   and its draft model, which may read only what it has computed itself
    FakeGuides     grammars that forbid some tokens, depending on all of the answer before
    WilfulSpeculator   drafts for no reason
    SpoilingPool   fills with garbage what nobody may read
    FakeEndpoint   the real SourceMachine and SinkMachine, connected by queues
    FakeWorker     the real WorkerCore around these
    FakeGateway    places requests, cancels them, and checks each token against `answer`
    FakeCluster    all of them, and every move that could come next

Nothing happens by itself: a test chooses one of `FakeCluster.moves()` at a time, so any order in
which threads and messages could run is within reach, and none needs a thread or a clock.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count

import numpy as np

from decode.acceptance import Proposer
from decode.scheduler import DecodeScheduler
from decode.speculation import Candidate, Proposal, Speculator
from engine.config import Speculate
from engine.errors import GrammarError
from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import (
    Cancel,
    Decode,
    DecodeStarted,
    FinishReason,
    FirstToken,
    GatewayId,
    Generate,
    GivenBack,
    Grammar,
    HandedOver,
    HandOver,
    Incarnation,
    KvReady,
    LeaseRef,
    Limits,
    Logprobs,
    OfferPrefix,
    Prefill,
    PrefillDone,
    PrefillStarted,
    PrefixOffered,
    Role,
    RoleChanged,
    Sampling,
    SeqId,
    SetRole,
    Tokens,
    ToWorker,
    TransferAddress,
    WorkerId,
    decode_to_gateway,
    decode_to_worker,
    encode_frame,
)
from engine.worker.batch import BatchPlan, BatchResult, Row, RowResult, StepTimes
from engine.worker.blocks import BlockHash, BlockId, BlockPool, hash_blocks
from engine.worker.core import Duties, WorkerCore
from engine.worker.events import (
    AbortPull,
    Effect,
    Emit,
    EmitToAll,
    Event,
    FromGateway,
    GatewayLost,
    GrowLease,
    HoldLease,
    LeaseEnded,
    OpenLease,
    PullDone,
    PullFailed,
    RevokeLease,
    StartPull,
)
from engine.worker.intake import Intake
from engine.worker.offers import PrefixOffers
from kvtransfer.lease.effects import (
    CloseSource,
    Fetch,
    SendBlocks,
    SendToSink,
    SendToSource,
    SinkEffect,
    SourceEffect,
    UseSource,
)
from kvtransfer.lease.pull import Means
from kvtransfer.lease.sink import SinkMachine
from kvtransfer.lease.source import SourceMachine
from kvtransfer.lease.terms import Timing
from kvtransfer.messages import (
    MAX_BLOCKS_PER_READ,
    Data,
    Identity,
    Offers,
    Read,
    ToSink,
    ToSource,
    decode_to_sink,
    decode_to_source,
    encode,
)
from prefill.scheduler import PrefillScheduler

BLOCK_SIZE = 4
VOCAB_SIZE = 11
LAYOUT = KVLayout(BLOCK_SIZE, KVFormat.FP32, (KVSection(1, 1, 2),))
PARTS = ("steps", "transfer", "orders", "events")  # two threads, and the queue of each
TIMING = Timing(ttl_s=6.0, hold_every_s=1.0, reread_s=1.5, silence_s=3.0)

Kv = tuple[int, int]  # what target and draft model keep of one token; garbage is negative
TARGET, DRAFT = 0, 1
Writes = dict[tuple[BlockId, int, int], int]  # by block, offset and model
WILFUL = "wilful"  # beside the modes of `Speculate`


# ---------------------------------------------------------------- the model


def kv_of(context: int, token: int) -> int:
    """K and V of a token, given what its predecessors amount to."""
    return abs(hash((context, token)))


def extend(context: int, kv: int) -> int:
    """What a context amounts to with one token more; it is 0 when there is none."""
    return hash((context, kv))


def contexts_of(token_ids: Iterable[int], context: int = 0) -> tuple[list[int], list[int]]:
    """K and V of tokens behind a context, and what that amounts to after each."""
    kvs, contexts = [], []
    for token in token_ids:
        kvs.append(kv_of(context, token))
        context = extend(context, kvs[-1])
        contexts.append(context)
    return kvs, contexts


def kvs_of(token_ids: Iterable[int]) -> list[Kv]:
    """What a block holds of every token when both models have computed it."""
    return [(kv, kv) for kv in contexts_of(token_ids)[0]]


@dataclass(frozen=True, slots=True)
class Asked:
    """All that a token depends on beside its context."""

    sampling: Sampling
    banned: Sequence[int] = ()
    history: Sequence[int] | None = None
    prompt_len: int = 0
    allowed: Sequence[int] = range(VOCAB_SIZE)


def choose(context: int, asked: Asked) -> int:
    """The token that follows a context."""
    facts: list[object] = [context, asked.sampling.seed]
    if asked.sampling.has_penalties:
        assert asked.history is not None
        facts += [tuple(asked.history), asked.prompt_len]
    token = hash(tuple(facts)) % VOCAB_SIZE
    while token in asked.banned or token not in asked.allowed:
        token = (token + 1) % VOCAB_SIZE
    return token


def logprobs_of(context: int, token: int, num_top: int) -> Logprobs:
    """Some numbers that depend on all that they should depend on."""
    likeliest = tuple(range(num_top))
    return Logprobs(float(hash((context, token)) % 97), token, likeliest, (0.0,) * num_top)


class FakeGuide:
    """Which tokens may come next depends on all tokens of the answer so far."""

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
    """Follows grammars whose source is a number."""

    def open(self, grammar: Grammar, answer: Sequence[int], salt: bytes = b"") -> FakeGuide:
        if not grammar.source.isdigit():
            raise GrammarError("not a number")
        return FakeGuide(int(grammar.source), answer)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request must be answered with, wherever it runs."""

    token_ids: tuple[int, ...]
    finish: FinishReason
    logprobs: tuple[Logprobs, ...]  # one a token, where asked for


def answer(prompt: Sequence[int], sampling: Sampling, limits: Limits) -> Answer:
    """The reference: no blocks, no batches, no workers, no drafts."""
    token_ids = list(prompt)
    logprobs: list[Logprobs] = []
    guide = None if sampling.grammar is None else FakeGuides().open(sampling.grammar, ())
    while True:
        may_stop = len(token_ids) + 1 > limits.min_len
        asked = Asked(
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
    """The reference for all tokens of a prompt but the first."""
    contexts = contexts_of(prompt)[1]
    pairs = zip(contexts, prompt[1:], strict=False)
    return [logprobs_of(context, token, num_top) for context, token in pairs]


class FakeRunner:
    """A `Runner` that keeps K and V in `memory[block][offset]` and reads them by block table.

    Its draft model keeps what the target keeps, so that each step can check whether it reads
    anything that it has not computed. The share `right` of its proposals are the target's choice.
    """

    def __init__(
        self,
        num_blocks: int,
        layout: KVLayout = LAYOUT,
        *,
        has_draft_model: bool = True,
        right: float = 0.7,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self._has_draft_model = has_draft_model
        self._right = right
        self._garbage = count(1)
        self.memory: list[list[Kv]] = [[] for _ in range(num_blocks)]
        self.spoil(BlockId(i) for i in range(num_blocks))

    def spoil(self, blocks: Iterable[BlockId]) -> None:
        """Makes what blocks hold useless; no two spoilt tokens are the same."""
        for block in blocks:
            garbage = [-next(self._garbage) for _ in range(self.layout.block_size)]
            self.memory[block] = [(kv, kv) for kv in garbage]

    def run(self, plan: BatchPlan) -> BatchResult:
        """Computes every row from memory as it was before the step, then writes."""
        results, writes = self.compute(plan)
        for (block, offset, model), kv in writes.items():
            kept = list(self.memory[block][offset])
            kept[model] = kv
            self.memory[block][offset] = (kept[TARGET], kept[DRAFT])
        num_tokens = sum(len(row.token_ids) + row.max_drafted for row in plan.rows)
        num_drafted = sum(len(row.draft_token_ids) + row.num_to_draft for row in plan.rows)
        times = StepTimes(0.0, 1e-3 + 1e-5 * num_tokens, 0.0, draft_s=1e-5 * num_drafted)
        return BatchResult(results, times)

    def compute(self, plan: BatchPlan) -> tuple[list[RowResult], Writes]:
        """What a plan comes to, without carrying it out."""
        writes: Writes = {}
        return [self._compute_row(row, writes) for row in plan.rows], writes

    def _compute_row(self, row: Row, writes: Writes) -> RowResult:
        assert row.token_ids, "a row computes nothing"
        draft = list(row.draft)
        if self._has_draft_model and row.draft_token_ids:
            draft += self._propose(row, writes)
        if row.guide is not None:
            draft = draft[: row.guide.num_allowed(draft)]
        context = 0
        for position in range(row.start):
            context = extend(context, self._read(row, position)[TARGET])
        kvs, contexts = contexts_of([*row.token_ids, *draft], context)
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
        """The draft model's part of a row."""
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

    def _asked(self, row: Row, ahead: list[int]) -> Asked:
        assert row.sampling is not None
        allowed = list(range(VOCAB_SIZE))
        if row.guide is not None:
            (word,) = row.guide.masks(ahead)[-1]
            allowed = [t for t in allowed if int(word) >> t & 1]
        history = None if row.history is None else [*row.history, *ahead]
        return Asked(row.sampling, row.banned, history, row.prompt_len, allowed)

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


class WilfulSpeculator:
    """In place of a `Speculator`: who drafts how much is decided by lot."""

    def __init__(self, rng: random.Random, *, has_draft_model: bool) -> None:
        self._rng = rng
        self.max_draft_tokens = rng.randint(1, 5)
        self.has_draft_model = has_draft_model
        self.uses_ngrams = self.is_on = True

    def plan(self, candidates: Sequence[Candidate]) -> list[Proposal | None]:
        return [self._propose(candidate) for candidate in candidates]

    def _propose(self, candidate: Candidate) -> Proposal | None:
        ways = [Proposer.DRAFT] if self.has_draft_model else []
        ways += [Proposer.NGRAM] if candidate.match_len else []
        if not ways or candidate.max_tokens == 0 or self._rng.randrange(3) == 0:
            return None
        num_tokens = self._rng.randint(1, candidate.max_tokens)
        return Proposal(self._rng.choice(ways), num_tokens, candidate.match_len)

    def rests(self):
        return False

    def may_catch_up(self, num_tokens: int, num_passes: int) -> bool:
        return self._rng.randrange(2) == 0

    def learn(
        self, seq_id: SeqId, proposal: Proposal, *, num_drafted: int, num_accepted: int
    ) -> None:
        assert 0 <= num_accepted <= num_drafted <= proposal.num_tokens

    def forget(self, seq_id: SeqId) -> None:
        pass

    def observe(self, plan: BatchPlan, result: BatchResult, now_s: float) -> None:
        pass


# ---------------------------------------------------------------- a worker


class SpoilingPool(BlockPool):
    """A pool that spoils blocks when it hands them out and when nobody may read them any more."""

    def __init__(self, runner: FakeRunner) -> None:
        super().__init__(runner.num_blocks)
        self._runner = runner

    def allocate(self, num_blocks: int) -> list[BlockId]:
        blocks = super().allocate(num_blocks)
        self._runner.spoil(blocks)
        return blocks

    def disown(self, blocks: Sequence[BlockId]) -> None:
        super().disown(blocks)
        self._spoil_free(blocks)

    def end_lease(self, blocks: Sequence[BlockId]) -> None:
        super().end_lease(blocks)
        self._spoil_free(blocks)

    def end_write(self, blocks: Sequence[BlockId]) -> None:
        super().end_write(blocks)
        self._spoil_free(blocks)

    def is_leased(self, block: BlockId) -> bool:
        return self._leased[block] > 0

    def is_in_flight(self, block: BlockId) -> bool:
        return self._in_flight[block] > 0

    def holders(self) -> tuple[list[int], list[int], list[int]]:
        """How often each block is owned, leased and in flight."""
        return self._owned, self._leased, self._in_flight

    def known(self) -> Iterator[tuple[BlockId, BlockHash]]:
        """Blocks that a prefix match can find."""
        return ((block, block_hash) for block_hash, block in self._by_hash.items())

    def _spoil_free(self, blocks: Sequence[BlockId]) -> None:
        self._runner.spoil(b for b in blocks if b in self._idle and self._hash[b] is None)


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """How large a fake worker is. What it does says which schedulers it has."""

    role: Role
    prefills_locally: bool = False
    num_blocks: int = 10
    max_batch_tokens: int = 8
    chunk_tokens: int = 6
    max_running: int = 3
    growth_tokens: int = 4
    copies_at_once: bool = True  # as shared memory does; otherwise bytes travel in Data
    window_blocks: int = MAX_BLOCKS_PER_READ
    has_draft_model: bool = True  # the same in all workers of a cluster
    speculate: Speculate | str = Speculate.OFF  # or WILFUL

    def speculator(self) -> Speculator:
        """What decides about drafts in such a worker."""
        if self.speculate == WILFUL:
            rng = random.Random(self.num_blocks)
            return WilfulSpeculator(rng, has_draft_model=self.has_draft_model)  # type: ignore[return-value]
        return Speculator(
            Speculate(self.speculate), max_draft_tokens=5, has_draft_model=self.has_draft_model
        )


class FakeWorker:
    """One worker: events wait in `inbox`, orders in its endpoint, a step lies between two moves."""

    def __init__(self, name: str, shape: WorkerShape, cluster: "FakeCluster") -> None:
        self.worker_id = WorkerId(name)
        self.shape = shape
        self._cluster = cluster
        self.runner = FakeRunner(shape.num_blocks, has_draft_model=shape.has_draft_model)
        self.pool = SpoilingPool(self.runner)
        self.endpoint = FakeEndpoint(self, cluster)
        speculator = shape.speculator()
        intake = Intake(BLOCK_SIZE, FakeGuides(), VOCAB_SIZE)
        self.decode = DecodeScheduler(
            self.pool,
            intake=intake,
            max_running=shape.max_running,
            growth_tokens=shape.growth_tokens,
            speculator=speculator,
        )
        self.prefill = PrefillScheduler(
            self.pool,
            intake=intake,
            chunk_tokens=shape.chunk_tokens,
            address=self.endpoint.address,
        )
        self.offers = PrefixOffers(self.pool, block_size=BLOCK_SIZE, address=self.endpoint.address)
        self.core = WorkerCore(
            [self.decode, self.prefill, self.offers],
            self.pool,
            shape.max_batch_tokens,
            duties=Duties(shape.role, prefills_locally=shape.prefills_locally),
            observe=speculator.observe,
        )
        self.inbox: deque[Event] = deque()
        self.plan: BatchPlan | None = None  # what runs now
        self.stuck: set[str] = set()  # what stands still: see PARTS

    def take_event(self) -> None:
        self._perform(self.core.handle(self.inbox.popleft(), self._cluster.now_s))

    def begin_step(self) -> None:
        self.plan, effects = self.core.plan(self._cluster.now_s)
        self._perform(effects)
        if self.plan is not None:
            rows = self.plan.rows
            lengths = [len(row.token_ids) for row in rows]
            num_drafted = sum(row.max_drafted for row in rows)
            assert sum(lengths) + num_drafted <= self.shape.max_batch_tokens
            assert max(lengths) <= self.shape.chunk_tokens
            assert len({row.seq_id for row in rows}) == len(rows)
            self._early = self.runner.compute(self.plan)

    def end_step(self) -> None:
        assert self.plan is not None
        late = self.runner.compute(self.plan)
        assert late == self._early, "a block changed while a step used it"
        result = self.runner.run(self.plan)
        self.plan = None
        self._perform(self.core.finish(result, self._cluster.now_s))

    def validate(self) -> None:
        """The worker's own invariants, and those that need a look into all its parts."""
        if self.plan is None:
            self.core.validate()
        self.endpoint.source.validate()
        self.endpoint.sink.validate()
        self._check_holders()
        for block, block_hash in self.pool.known():
            kvs = self._cluster.block_contents.get(block_hash)
            assert self.runner.memory[block] == kvs, f"block {block} holds something else"

    def _check_holders(self) -> None:
        """Every hold on a block is somebody's: no block can leak or be let go twice."""
        prefill, decode = self.prefill, self.decode
        pulling = [*prefill.waiting.pulling.values(), *prefill.waiting.aborting.values()]
        arriving = [*decode.arrivals.arriving.values(), *decode.arrivals.aborting.values()]
        holders = [*prefill.computing.values(), *pulling, *arriving]
        seqs = [*(holder.seq for holder in holders), *decode.running.seqs()]
        tables = [seq.block_table for seq in seqs]
        leases = [lease.block_ids for lease in prefill.leases.open_leases.values()]
        leases += [offer.block_ids for offer in self.offers._offers.values()]
        pulls = [job.pulled for job in pulling]
        pulls += [a.pulled or () for a in arriving if not a.kv_here]
        owned, leased, in_flight = self.pool.holders()
        assert owned == self._tally(tables)
        assert leased == self._tally(leases)
        assert in_flight == self._tally(pulls)
        assert max(in_flight) <= 1, "two pulls write to one block"

    def _tally(self, holds: Iterable[Iterable[BlockId]]) -> list[int]:
        """How many holds there are on each block."""
        tally = [0] * self.pool.num_blocks
        for block in chain.from_iterable(holds):
            tally[block] += 1
        return tally

    def seq_ids(self) -> set[SeqId]:
        """Sequences that wait or run here."""
        prefill, decode = self.prefill, self.decode
        prompts = [*prefill.waiting.prompts(), *prefill.computing.values()]
        prefilling = {prompt.seq.seq_id for prompt in prompts}
        arriving = {*decode.arrivals.queued, *decode.arrivals.arriving}
        return prefilling | arriving | {seq.seq_id for seq in decode.running.seqs()}

    def is_at_rest(self) -> bool:
        """Holds nothing."""
        counts = self.pool.counts()
        return (
            counts.free + counts.cached == counts.total
            and self.endpoint.source.num_leases == self.endpoint.sink.num_pulls == 0
            and not self.seq_ids()
        )

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Emit):
                gateway = self._cluster.gateways.get(effect.gateway_id)
                if gateway is not None:
                    gateway.links[self.worker_id].to_gateway.append(encode_frame([effect.message]))
            elif isinstance(effect, EmitToAll):
                for gateway in self._cluster.gateways.values():
                    gateway.links[self.worker_id].to_gateway.append(encode_frame([effect.message]))
            else:
                self.endpoint.orders.append(effect)


@dataclass(slots=True)
class Connection:
    """A sink's connection to a source. Each direction keeps its order."""

    peer: bytes
    sink: "FakeEndpoint"
    source: "FakeEndpoint"
    to_source: deque[bytes] = field(default_factory=deque)
    to_sink: deque[tuple[bytes, list[list[Kv]]]] = field(default_factory=deque)


class FakeEndpoint:
    """Both ends of the lease protocol, over connections that the cluster delivers."""

    def __init__(self, worker: FakeWorker, cluster: "FakeCluster") -> None:
        self.worker = worker
        self._cluster = cluster
        name = worker.worker_id
        self.address = TransferAddress(name, Incarnation(f"life of {name}"), f"fake://{name}")
        identity = Identity("fake model", LAYOUT)
        incarnation = self.address.incarnation
        self.source = SourceMachine(
            incarnation=incarnation,
            identity=identity,
            num_blocks=worker.shape.num_blocks,
            timing=TIMING,
            offers=Offers(),
        )
        self.sink = SinkMachine(
            incarnation=incarnation,
            identity=identity,
            timing=TIMING,
        )
        self.orders: deque[Effect] = deque()

    def take_order(self) -> None:
        now_s = self._cluster.now_s
        match self.orders.popleft():
            case OpenLease(lease_id, num_blocks):
                self._do_source(self.source.open(lease_id, num_blocks, now_s))
            case GrowLease(lease_id, block_ids):
                self._do_source(self.source.grow(lease_id, block_ids, now_s))
            case RevokeLease(lease_id):
                self._do_source(self.source.revoke(lease_id, now_s))
            case HoldLease(seq_id, lease):
                self._do_sink(self.sink.hold(seq_id, lease, now_s))
            case StartPull(seq_id, blocks):
                self._do_sink(self.sink.start(seq_id, blocks, now_s))
            case AbortPull(seq_id):
                self._do_sink(self.sink.abort(seq_id, now_s))
            case other:
                raise AssertionError(f"not an order: {other}")

    def sweep(self) -> None:
        self._do_source(self.source.sweep(self._cluster.now_s))
        self._do_sink(self.sink.sweep(self._cluster.now_s))

    def take_from_sink(self, connection: Connection) -> None:
        message: ToSource = decode_to_source(connection.to_source.popleft())
        self._do_source(self.source.receive(connection.peer, message, self._cluster.now_s))

    def take_from_source(self, connection: Connection) -> None:
        header, payload = connection.to_sink.popleft()
        message: ToSink = decode_to_sink(header)
        address, now_s = connection.source.address.address, self._cluster.now_s
        good: list[int] = []
        if isinstance(message, Data):
            places = self.sink.places(address, message)
            for index, place, kvs in zip(message.indices, places, payload, strict=True):
                if place is not None:
                    self._write(place, kvs)
                    good.append(index)
        self._do_sink(self.sink.receive(address, message, now_s))
        if isinstance(message, Data):
            fetched = self.sink.fetched(message.lease_id, good, now_s, sent_by_source=True)
            self._do_sink(fetched)

    def _write(self, block: BlockId, kvs: list[Kv]) -> None:
        assert self.worker.pool.is_in_flight(block), "a pull writes into a stranger's block"
        self.worker.runner.memory[block] = list(kvs)

    def _do_source(self, effects: list[SourceEffect]) -> None:
        for effect in effects:
            match effect:
                case SendToSink(peer, message):
                    self._cluster.send_to_sink(peer, message, [])
                case SendBlocks():
                    assert all(self.worker.pool.is_leased(b) for b in effect.block_ids)
                    payload = [list(self.worker.runner.memory[b]) for b in effect.block_ids]
                    data = Data(effect.lease_id, list(effect.indices), 0)
                    self._cluster.send_to_sink(effect.peer, data, payload)
                case LeaseEnded():
                    self.worker.inbox.append(effect)

    def _do_sink(self, effects: list[SinkEffect]) -> None:
        todo = deque(effects)
        while todo:
            effect = todo.popleft()
            match effect:
                case SendToSource(address, message):
                    self._cluster.send_to_source(self, address, message)
                case UseSource(address):
                    self.sink.use_transport(address, self._means())
                case Fetch():
                    todo += self._fetch(effect)
                case CloseSource(address):
                    self._cluster.disconnect(self, address)
                case PullDone() | PullFailed():
                    self.worker.inbox.append(effect)

    def _fetch(self, effect: Fetch) -> list[SinkEffect]:
        if not self.worker.shape.copies_at_once:
            read = Read(effect.lease_id, list(effect.indices))
            self._cluster.send_to_source(self, effect.address, read)
            return []
        source = self._cluster.endpoint_at(effect.address)
        for block_id, source_block in zip(effect.block_ids, effect.source_blocks, strict=True):
            self._write(block_id, source.worker.runner.memory[source_block])
        now_s = self._cluster.now_s
        return self.sink.fetched(effect.lease_id, effect.indices, now_s, sent_by_source=False)

    def _means(self) -> Means:
        shape = self.worker.shape
        return Means("fake", window_blocks=shape.window_blocks, resends=not shape.copies_at_once)


# ---------------------------------------------------------------- a gateway


@dataclass(frozen=True, slots=True)
class Route:
    """Where an attempt runs. One worker for both keeps the sequence where it was prefilled.

    `holder` is asked to offer the prompt's prefix before.
    """

    prefill: WorkerId
    decode: WorkerId
    holder: WorkerId | None = None


@dataclass(slots=True)
class Ask:
    """One request, and what its client has so far."""

    name: str
    prompt: tuple[int, ...]
    sampling: Sampling
    limits: Limits
    routes: Sequence[Route]  # of its attempts, in turn
    expected: Answer
    num_top: int | None = None  # log-probabilities of the prompt are asked for
    tokens: list[int] = field(default_factory=list)
    outcome: str | None = None  # finished, cancelled or lost
    seq_id: SeqId | None = None
    num_attempts: int = 0
    news: list[type] = field(default_factory=list)  # of the present attempt
    waits_for_offer: bool = False
    num_moves: int = 0
    moved: Route | None = None  # of the present attempt, if it goes on from another worker's
    moves_as: SeqId | None = None  # while its worker has been told to hand it over
    moves_to: WorkerId | None = None

    @property
    def worker_id(self) -> WorkerId:
        """Where it is decoded."""
        return self.route.decode

    @property
    def hands_over(self) -> bool:
        return self.route.prefill != self.route.decode

    @property
    def route(self) -> Route:
        if self.moved is not None:
            return self.moved
        return self.routes[self.num_attempts % len(self.routes)]

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt, *self.tokens]


@dataclass(slots=True)
class Link:
    """A gateway's session with one worker. Each direction keeps its order."""

    is_stuck: bool = False  # nothing gets through for a while
    to_worker: deque[bytes | GatewayLost] = field(default_factory=deque)
    to_gateway: deque[bytes] = field(default_factory=deque)


class FakeGateway:
    """Follows its requests across workers as the router does, but without policy or patience."""

    def __init__(self, name: str, workers: Iterable[WorkerId]) -> None:
        self.gateway_id = GatewayId(name)
        self.links = {worker_id: Link() for worker_id in workers}
        self.asks: dict[SeqId, Ask] = {}  # by their present attempt
        self._lease_sent: set[SeqId] = set()

    def submit(self, ask: Ask) -> None:
        """Starts a request, or its next attempt."""
        seq_id = SeqId(f"{ask.name}.{ask.num_attempts}")
        ask.seq_id, ask.news = seq_id, []
        self.asks[seq_id] = ask
        ask.waits_for_offer = ask.route.holder is not None
        if ask.route.holder is not None:
            self._send(ask.route.holder, OfferPrefix(seq_id, ask.token_ids))
        else:
            self._prefill(ask, None)

    def stop_waiting(self, ask: Ask) -> None:
        """The offer of a prefix has not come in time."""
        if ask.waits_for_offer:
            assert ask.seq_id is not None
            assert ask.route.holder is not None
            self._send(ask.route.holder, Cancel(ask.seq_id))
            self._prefill(ask, None)

    def _prefill(self, ask: Ask, prefix: LeaseRef | None) -> None:
        assert ask.seq_id is not None
        ask.waits_for_offer = False
        kind = Generate if ask.route.prefill == ask.route.decode else Prefill
        num_top = None if ask.tokens else ask.num_top
        message = kind(ask.seq_id, ask.token_ids, ask.sampling, ask.limits, prefix, num_top)
        self._send(ask.route.prefill, message)

    def cancel(self, ask: Ask) -> None:
        """The client is gone."""
        ask.outcome = "cancelled"
        self._end_attempt(ask)

    def set_role(self, worker_id: WorkerId, role: Role) -> None:
        """As who controls the workers does."""
        self._send(worker_id, SetRole(role))

    def hand_over(self, ask: Ask, target: WorkerId) -> None:
        """What has begun to be answered is to go on elsewhere, if it is not on its way already."""
        has_begun = PrefillDone in ask.news and (KvReady in ask.news or not ask.hands_over)
        if has_begun and ask.moves_as is None and ask.worker_id != target:
            assert ask.seq_id is not None
            ask.num_moves += 1
            ask.moves_as = SeqId(f"{ask.name}.{ask.num_attempts}.{ask.num_moves}")
            ask.moves_to = target
            self._send(ask.worker_id, HandOver(ask.seq_id, ask.moves_as))

    def _move(self, ask: Ask, message: HandedOver) -> None:
        """It has stopped, and goes on as one whose prompt has been computed."""
        assert ask.seq_id is not None
        assert ask.moves_as is not None
        assert ask.moves_to is not None
        if message.lease is None:
            self.retry(ask)
            return
        del self.asks[ask.seq_id]
        ask.moved = Route(ask.worker_id, ask.moves_to)
        ask.seq_id, ask.moves_as = ask.moves_as, None
        ask.news = [PrefillStarted, PrefillDone]
        self.asks[ask.seq_id] = ask
        *token_ids, last = ask.token_ids
        fields = (ask.seq_id, token_ids, ask.sampling, ask.limits, message.lease)
        self._send(ask.moves_to, Decode(*fields, message.num_draft_tokens, is_moved=True))
        self._send(ask.moves_to, FirstToken(ask.seq_id, last))

    def retry(self, ask: Ask) -> None:
        """The attempt was given back, or there was no news of it for too long."""
        self._end_attempt(ask)
        ask.num_attempts += 1
        ask.moved = None
        self.submit(ask)

    def give_up(self) -> None:
        """The gateway is gone."""
        for ask in self.asks.values():
            ask.outcome = "lost"
        self.asks.clear()

    def take(self, worker_id: WorkerId) -> None:
        """Takes note of a worker's next message."""
        (message,) = decode_to_gateway(self.links[worker_id].to_gateway.popleft())
        if isinstance(message, RoleChanged):
            return
        ask = self.asks.get(message.seq_id)  # type: ignore[union-attr]
        if ask is None:
            return  # of an attempt that is over
        self._check_order(ask, message)
        match message:
            case PrefixOffered(_, lease):
                if ask.waits_for_offer:
                    self._prefill(ask, lease)
            case PrefillStarted(seq_id, num_cached_tokens, lease):
                assert not ask.waits_for_offer
                assert num_cached_tokens < len(ask.token_ids)
                if lease is not None:
                    assert ask.route.prefill != ask.route.decode
                    self._lease_sent.add(seq_id)
                    decode = Decode(seq_id, ask.token_ids, ask.sampling, ask.limits, lease)
                    self._send(ask.route.decode, decode)
            case PrefillDone(seq_id, token, finish, logprobs, prompt_logprobs):
                asked = ask.num_top if not ask.tokens else None
                wanted = [] if asked is None else prompt_logprobs_of(ask.prompt, asked)
                assert prompt_logprobs == wanted, f"the prompt of {ask.name} was scored wrongly"
                self._deliver(ask, [token], finish, [] if logprobs is None else [logprobs])
                if finish is None and seq_id in self._lease_sent:
                    self._send(ask.route.decode, FirstToken(seq_id, token))
            case KvReady(_, num_pulled_blocks, num_cached_blocks):
                num_prefilled = len(ask.token_ids) - (PrefillDone in ask.news)
                expected_blocks = LAYOUT.num_blocks_for(num_prefilled)
                assert num_pulled_blocks + num_cached_blocks == expected_blocks
            case DecodeStarted():
                pass
            case Tokens(_, token_ids, finish, logprobs, num_drafted, num_accepted):
                assert 0 <= len(token_ids) - 1 <= num_accepted <= num_drafted
                self._deliver(ask, token_ids, finish, logprobs)
            case HandedOver():
                self._move(ask, message)
            case GivenBack(num_kept_tokens=num_kept_tokens):
                assert num_kept_tokens <= len(ask.token_ids)
                assert num_kept_tokens % BLOCK_SIZE == 0
                self.retry(ask)
            case other:
                raise AssertionError(f"unexpected message: {other}")

    def _deliver(
        self,
        ask: Ask,
        token_ids: list[int],
        finish: FinishReason | None,
        logprobs: list[Logprobs],
    ) -> None:
        num_before = len(ask.tokens)
        ask.tokens += token_ids
        expected_logprobs = ask.expected.logprobs[num_before : len(ask.tokens)]
        assert tuple(logprobs) == expected_logprobs, f"{ask.name} was scored wrongly"
        expected = ask.expected.token_ids[: len(ask.tokens)]
        assert tuple(ask.tokens) == expected, f"{ask.name} was answered wrongly"
        complete = len(ask.tokens) == len(ask.expected.token_ids)
        assert finish == (ask.expected.finish if complete else None)
        if finish is not None:
            ask.outcome = "finished"
            self._end_attempt(ask)

    def _check_order(self, ask: Ask, message: object) -> None:
        """News of one attempt come in order, and none but tokens comes twice."""
        kind = type(message)
        needed: dict[type, set[type]] = {
            PrefillDone: {PrefillStarted},
            KvReady: {PrefillStarted},
            DecodeStarted: {PrefillDone},
            Tokens: {PrefillDone, DecodeStarted},
        }
        assert needed.get(kind, set()) <= set(ask.news), f"{kind.__name__} came too early"
        assert kind is Tokens or kind not in ask.news, f"{kind.__name__} came twice"
        ask.news.append(kind)

    def _end_attempt(self, ask: Ask) -> None:
        assert ask.seq_id is not None
        del self.asks[ask.seq_id]
        route = ask.route
        may_be_offered = route.holder is not None and PrefillStarted not in ask.news
        concerned = [route.prefill, route.decode, *([route.holder] if may_be_offered else [])]
        for worker_id in dict.fromkeys(w for w in concerned if w is not None):
            self._send(worker_id, Cancel(ask.seq_id))
        if ask.moves_as is not None:
            self._send(ask.worker_id, Cancel(ask.moves_as))
            ask.moves_as = None

    def _send(self, worker_id: WorkerId, message: ToWorker) -> None:
        self.links[worker_id].to_worker.append(encode_frame([message]))


# ---------------------------------------------------------------- all of it

Move = tuple[Callable[[], None], FakeWorker | None]  # and the worker that it changes


class FakeCluster:
    """Workers, gateways and all that is on its way between them."""

    def __init__(self, shapes: dict[str, WorkerShape]) -> None:
        self.now_s = 0.0
        self.gateways: dict[GatewayId, FakeGateway] = {}
        self.asks: list[Ask] = []
        self.block_contents: dict[BlockHash, list[Kv]] = {}
        self._connections: list[Connection] = []
        self._peers = count()
        self._orphans: list[tuple[GatewayId, WorkerId, Link]] = []  # of gateways that are gone
        self.workers = {WorkerId(n): FakeWorker(n, shape, self) for n, shape in shapes.items()}

    # ------------------------------------------------------------ what a test does

    def add_gateway(self, name: str) -> FakeGateway:
        gateway = FakeGateway(name, self.workers)
        self.gateways[gateway.gateway_id] = gateway
        return gateway

    def submit(
        self,
        gateway: FakeGateway,
        prompt: Sequence[int],
        *,
        limits: Limits,
        routes: Sequence[tuple[str, ...]],
        sampling: Sampling | None = None,
        num_top: int | None = None,
    ) -> Ask:
        """A client asks. Each attempt takes the next route: prefill worker, decode worker and,
        where there is one, the worker that is asked for the prefix."""
        sampling = Sampling() if sampling is None else sampling
        ask = Ask(
            name=f"r{len(self.asks)}",
            prompt=tuple(prompt),
            sampling=sampling,
            limits=limits,
            routes=[Route(*map(WorkerId, route)) for route in routes],
            expected=answer(prompt, sampling, limits),
            num_top=num_top,
        )
        self.asks.append(ask)
        self._learn([*ask.prompt, *ask.expected.token_ids])
        gateway.submit(ask)
        return ask

    def lose(self, gateway: FakeGateway, num_arriving: int) -> None:
        """A gateway dies; of what it has sent to each worker, so many messages still arrive."""
        gateway.give_up()
        del self.gateways[gateway.gateway_id]
        for worker_id, link in gateway.links.items():
            sent = list(link.to_worker)[:num_arriving]
            link.to_worker = deque([*sent, GatewayLost(gateway.gateway_id)])
            link.to_gateway.clear()
            self._orphans.append((gateway.gateway_id, worker_id, link))

    def unblock(self) -> None:
        """Nothing stands still any more."""
        for worker in self.workers.values():
            worker.stuck.clear()
        for gateway in self.gateways.values():
            for link in gateway.links.values():
                link.is_stuck = False

    def moves(self) -> list[Move]:
        """Everything that could happen next, time apart."""
        moves: list[Move] = []
        for worker in self.workers.values():
            moves += self._moves_of(worker)
        for gateway in self.gateways.values():
            for worker_id, link in gateway.links.items():
                if link.is_stuck:
                    continue
                if link.to_worker:
                    moves.append((partial(self._arrive, gateway.gateway_id, worker_id, link), None))
                if link.to_gateway:
                    moves.append((partial(gateway.take, worker_id), None))
        for gateway_id, worker_id, link in self._orphans:
            if link.to_worker:
                moves.append((partial(self._arrive, gateway_id, worker_id, link), None))
        for connection in self._connections:
            sink, source = connection.sink, connection.source
            if connection.to_source and "transfer" not in source.worker.stuck:
                moves.append((partial(source.take_from_sink, connection), source.worker))
            if connection.to_sink and "transfer" not in sink.worker.stuck:
                moves.append((partial(sink.take_from_source, connection), sink.worker))
        return moves

    def move(self, rng: random.Random) -> None:
        """One thing happens, and all invariants hold afterwards."""
        moves = self.moves()
        if not moves:
            return
        act, worker = rng.choice(moves)
        act()
        if worker is not None:
            worker.validate()

    def drain(self, rng: random.Random, max_rounds: int = 400) -> None:
        """Lets everything come to its end, in any order."""
        self.unblock()
        for _ in range(max_rounds):
            if self.is_at_rest():
                return
            moves = self.moves()
            for _ in range(4 * len(moves)):
                self.move(rng)
            if self._is_quiet():
                self._check_for_orphans()
            self.now_s += 0.25
            for worker in self.workers.values():
                worker.endpoint.sweep()
        raise AssertionError("the cluster does not come to rest")

    def is_at_rest(self) -> bool:
        """Every request has ended and nobody holds anything."""
        return (
            self._is_quiet()
            and all(ask.outcome is not None for ask in self.asks)
            and all(worker.is_at_rest() for worker in self.workers.values())
        )

    def _is_quiet(self) -> bool:
        """Nothing is on its way: everybody knows all that there is to know."""
        links = [link for _, _, link in self._orphans]
        links += [link for gateway in self.gateways.values() for link in gateway.links.values()]
        return not (
            any(link.to_worker or link.to_gateway for link in links)
            or any(c.to_source or c.to_sink for c in self._connections)
            or any(w.inbox or w.endpoint.orders for w in self.workers.values())
            or any(w.plan is not None for w in self.workers.values())
        )

    def _check_for_orphans(self) -> None:
        """In quiet, workers serve only attempts that go on, and lease only for them."""
        wanted = {seq_id for gateway in self.gateways.values() for seq_id in gateway.asks}
        for worker in self.workers.values():
            assert worker.seq_ids() <= wanted, "a sequence goes on that nobody wants"
            moved = {i.removesuffix(".moved") for i in worker.offers._offers if "moved" in i}
            assert moved <= wanted, "a sequence is handed over to nobody"
            assert set(worker.prefill.leases.open_leases) <= wanted, (
                "a lease goes on that nobody wants"
            )

    def _moves_of(self, worker: FakeWorker) -> list[Move]:
        acts: list[Callable[[], None]] = []
        if "transfer" not in worker.stuck:
            acts.append(worker.endpoint.sweep)
            if worker.endpoint.orders and "orders" not in worker.stuck:
                acts.append(worker.endpoint.take_order)
        if "steps" not in worker.stuck:
            if worker.plan is not None:
                acts.append(worker.end_step)
            else:
                acts.append(worker.begin_step)
                if worker.inbox and "events" not in worker.stuck:
                    acts.append(worker.take_event)
        return [(act, worker) for act in acts]

    def _arrive(self, gateway_id: GatewayId, worker_id: WorkerId, link: Link) -> None:
        """A gateway's next message reaches a worker, or the end of its session does."""
        inbox = self.workers[worker_id].inbox
        frame = link.to_worker.popleft()
        if isinstance(frame, GatewayLost):
            inbox.append(frame)
            return
        (message,) = decode_to_worker(frame)
        inbox.append(FromGateway(gateway_id, message))  # type: ignore[arg-type]

    def _learn(self, token_ids: list[int]) -> None:
        """What a block must hold whose hash is one of these."""
        kvs = kvs_of(token_ids)
        for i, block_hash in enumerate(hash_blocks(token_ids, BLOCK_SIZE)):
            self.block_contents[block_hash] = kvs[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]

    # ------------------------------------------------------------ the transfer network

    def endpoint_at(self, address: str) -> FakeEndpoint:
        return self.workers[WorkerId(address.removeprefix("fake://"))].endpoint

    def send_to_source(self, sink: FakeEndpoint, address: str, message: ToSource) -> None:
        source = self.endpoint_at(address)
        for connection in self._connections:
            if connection.sink is sink and connection.source is source:
                break
        else:
            connection = Connection(b"peer %d" % next(self._peers), sink, source)
            self._connections.append(connection)
        connection.to_source.append(encode(message))

    def send_to_sink(self, peer: bytes, message: ToSink, payload: list[list[Kv]]) -> None:
        for connection in self._connections:
            if connection.peer == peer:
                connection.to_sink.append((encode(message), payload))

    def disconnect(self, sink: FakeEndpoint, address: str) -> None:
        source = self.endpoint_at(address)
        self._connections = [
            c for c in self._connections if not (c.sink is sink and c.source is source)
        ]
