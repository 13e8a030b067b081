"""A worker in memory: the real `WorkerCore` and schedulers around the fake model."""

import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from decode.acceptance import Proposer
from decode.choosing import Candidate, Proposal
from decode.speculation import Speculator
from deploy.worker.core import WorkerCore
from engine.config import Speculate
from engine.messages import Role, SeqId, WorkerId, encode_frame
from engine.worker.batch import BatchPlan, BatchResult
from engine.worker.blocks import IN_FLIGHT, LEASED, BlockHash, BlockId, BlockPool
from engine.worker.events import Effect, Emit, EmitToAll, Event
from engine.worker.intake import Intake
from engine.worker.sequence import Sequence as EngineSequence
from kvtransfer.messages import MAX_BLOCKS_PER_READ
from tests.kits.fakes.endpoint import FakeEndpoint
from tests.kits.fakes.model import BLOCK_SIZE, VOCAB_SIZE, FakeGuides, FakeRunner, FakeStep

if TYPE_CHECKING:
    from tests.kits.fakes.cluster import FakeCluster

# the steps and transfer threads, and the queue of each thread
PARTS = ("steps", "transfer", "orders", "events")
WILFUL = "wilful"  # a further speculation mode besides `Speculate`


class WilfulSpeculator:
    """A `Speculator` that chooses at random which sequence drafts how many tokens."""

    def __init__(self, rng: random.Random, *, has_draft_model: bool) -> None:
        self._rng = rng
        self.max_draft_tokens = rng.randint(1, 5)
        self.has_draft_model = has_draft_model
        self.uses_ngrams = self.is_on = True
        self.num_to_pass = 0

    def weighs_draft_model(self, num_rows: int, num_context_tokens: int) -> bool:
        return self._rng.randrange(4) > 0

    def plan(
        self, candidates: Sequence[Candidate], *, num_others: int = 0, others_tokens: int = 0
    ) -> list[Proposal | None]:
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

    def catches_up(self) -> bool:
        return True

    def may_catch_up(self, num_tokens: int, num_passes: int) -> bool:
        return self._rng.randrange(2) == 0

    def learn(
        self, seq_id: SeqId, proposal: Proposal, *, num_drafted: int, num_accepted: int
    ) -> None:
        assert 0 <= num_accepted <= num_drafted <= proposal.num_tokens

    def remove(self, seq_id: SeqId) -> None:
        pass

    def observe(self, plan: BatchPlan, result: BatchResult, now_s: float) -> None:
        pass


# ---------------------------------------------------------------- worker


class SpoilingPool(BlockPool):
    """A pool that fills blocks with garbage when they are allocated or lose their last reader."""

    def __init__(self, runner: FakeRunner) -> None:
        super().__init__(runner.num_blocks)
        self._runner = runner

    def allocate(self, num_blocks: int) -> list[BlockId]:
        blocks = super().allocate(num_blocks)
        self._runner.spoil(blocks)
        return blocks

    def release(self, kind: int, blocks: Sequence[BlockId], mark: int | None = None) -> None:
        super().release(kind, blocks, mark)
        self._spoil_free(blocks)

    def is_leased(self, block: BlockId) -> bool:
        return self._holders[LEASED][block] > 0

    def is_in_flight(self, block: BlockId) -> bool:
        return self._holders[IN_FLIGHT][block] > 0

    def holders(self) -> tuple[list[int], list[int], list[int]]:
        """Returns how many owners, leases and pulls each block has."""
        return self._holders

    def known(self) -> Iterator[tuple[BlockId, BlockHash]]:
        """Returns the blocks that a prefix match can find."""
        return ((block, block_hash) for block_hash, block in self._by_hash.items())

    def _spoil_free(self, blocks: Sequence[BlockId]) -> None:
        self._runner.spoil(b for b in blocks if b in self._evict_first and self._hash[b] is None)

    def end_step(self) -> None:
        freed = list(self._freed_in_flight[0])
        super().end_step()
        self._spoil_free(freed)


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """The size and role of a fake worker."""

    role: Role
    stretch: float | None = None  # set for a fluid worker
    num_blocks: int = 10
    max_batch_tokens: int = 8
    chunk_tokens: int = 6
    max_running: int = 3
    growth_tokens: int = 4
    # true like shared memory; otherwise Data messages transfer the bytes
    copies_at_once: bool = True
    window_blocks: int = MAX_BLOCKS_PER_READ
    has_draft_model: bool = True  # equal in all workers of a cluster
    speculate: Speculate | str = Speculate.OFF  # a mode of `Speculate`, or WILFUL
    overlaps: bool = False  # true: the next step is planned while one is in flight

    def speculator(self) -> Speculator:
        """Returns a speculator for a worker of this shape."""
        if self.speculate == WILFUL:
            rng = random.Random(self.num_blocks)
            return WilfulSpeculator(rng, has_draft_model=self.has_draft_model)  # type: ignore[return-value]
        return Speculator(
            Speculate(self.speculate), max_draft_tokens=5, has_draft_model=self.has_draft_model
        )


class FakeWorker:
    """One worker. Events wait in `inbox`, orders in its endpoint; a step takes two moves."""

    def __init__(self, name: str, shape: WorkerShape, cluster: "FakeCluster") -> None:
        self.worker_id = WorkerId(name)
        self.shape = shape
        self._cluster = cluster
        self.runner = FakeRunner(
            shape.num_blocks, has_draft_model=shape.has_draft_model, overlaps=shape.overlaps
        )
        self.pool = SpoilingPool(self.runner)
        self.endpoint = FakeEndpoint(self, cluster)
        self.core = WorkerCore(
            self.pool,
            shape,
            intake=Intake(BLOCK_SIZE, FakeGuides(), VOCAB_SIZE),
            address=self.endpoint.address,
            role=shape.role,
            stretch=shape.stretch,
            speculator=shape.speculator(),
            growth_tokens=shape.growth_tokens,
        )
        self.decode, self.prefill = self.core.decode, self.core.prefill
        self.offers = self.core.offers
        self.inbox: deque[Event] = deque()
        self.in_flight: deque[FakeStep] = deque()
        # precomputed results of each row of the first step in flight
        self._early: list[object] = []
        self.stuck: set[str] = set()  # the stopped parts, of PARTS

    def take_event(self) -> None:
        self._perform(self.core.handle(self.inbox.popleft()))

    def begin_step(self) -> None:
        plan, effects = self.core.plan(self._cluster.now_s)
        self._perform(effects)
        if plan is not None:
            rows = plan.rows
            lengths = [len(row.token_ids) for row in rows]
            num_drafted = sum(row.max_drafted for row in rows)
            assert sum(lengths) + num_drafted <= self.shape.max_batch_tokens
            assert max(lengths) <= self.shape.chunk_tokens
            assert len({row.seq_id for row in rows}) == len(rows)
            self.in_flight.append(self.runner.launch(plan))
            if len(self.in_flight) == 1:
                self._look()

    def end_step(self) -> None:
        self._check()
        result = self.in_flight.popleft().result()
        self._perform(self.core.finish(result, self._cluster.now_s))
        self._look()

    def _look(self) -> None:
        """Precomputes the results of the first step in flight."""
        if self.in_flight:
            plan = self.in_flight[0].plan
            self._early = [self.runner.compute(BatchPlan([row])) for row in plan.rows]

    def _check(self) -> None:
        """Asserts that no KV of a running sequence has changed since `_look`."""
        living = {id(row) for seq in self._seqs() for row in seq.in_flight}
        for row, early in zip(self.in_flight[0].plan.rows, self._early, strict=True):
            if id(row) in living:
                late = self.runner.compute(BatchPlan([row]))
                assert late == early, "a block changed while a step used it"

    def _seqs(self) -> list[EngineSequence]:
        prompts = self.prefill.computing.values()
        return [*(prompt.seq for prompt in prompts), *self.decode.running.members.values()]

    def validate(self) -> None:
        """Checks the invariants of each part of the worker, and between the parts."""
        self.core.validate()
        self.endpoint.source.validate()
        self.endpoint.sink.validate()
        self._check_holders()
        for block, block_hash in self.pool.known():
            kvs = self._cluster.block_contents.get(block_hash)
            assert self.runner.memory[block] == kvs, f"block {block} holds something else"

    def _check_holders(self) -> None:
        """Asserts that every reference to a block has an owner: no leak and no double release."""
        prefill, decode = self.prefill, self.decode
        pulling = prefill.waiting.pulling.values()
        arriving = [*decode.arrivals.arriving.values(), *decode.arrivals.aborting.values()]
        holders = [*prefill.computing.values(), *pulling, *arriving]
        seqs = [*(holder.seq for holder in holders), *decode.running.members.values()]
        tables = [seq.block_table for seq in seqs]
        tables_of_leases = (prefill.leases, self.offers.leases)
        leases = [lease.block_ids for t in tables_of_leases for lease in t.opened.values()]
        pulls = [job.pulled for job in pulling]
        pulls += [a.pulled or () for a in arriving if not a.kv_here]
        owned, leased, in_flight = self.pool.holders()
        assert owned == self._tally(tables)
        assert leased == self._tally(leases)
        assert in_flight == self._tally(pulls)
        assert max(in_flight) <= 1, "two pulls write to one block"

    def _tally(self, holds: Iterable[Iterable[BlockId]]) -> list[int]:
        """Returns the number of references to each block."""
        tally = [0] * self.pool.num_blocks
        for block in chain.from_iterable(holds):
            tally[block] += 1
        return tally

    def seq_ids(self) -> set[SeqId]:
        """Returns the ids of the sequences that wait or run on this worker."""
        prefill, decode = self.prefill, self.decode
        prompts = [*prefill.waiting.prompts(), *prefill.computing.values()]
        prefilling = {prompt.seq.seq_id for prompt in prompts}
        arriving = {*decode.arrivals.queued, *decode.arrivals.arriving}
        return prefilling | arriving | {seq.seq_id for seq in decode.running.members.values()}

    def is_at_rest(self) -> bool:
        """Returns True if the worker holds no blocks, leases or sequences."""
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
