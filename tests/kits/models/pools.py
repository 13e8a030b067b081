"""Requests through real schedulers and runners in this process, without sockets and a router.

    colocated      one worker prefills and decodes
    handed over    one worker prefills, another decodes; KV is copied from pool to pool
    both           the latter, which prefills some prompts itself

The gateway's part is done in its simplest form. All requests are sent at once. A sequence that a
worker gives back is sent again, with its tokens so far, when another request has ended.
"""

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from decode.acceptance import Proposer
from decode.choosing import Candidate, Proposal
from decode.speculation import Speculator
from deploy.worker.core import worker_core
from engine.config import Speculate
from engine.grammar.guide import Guides
from engine.messages import (
    Cancel,
    Decode,
    FirstToken,
    GatewayId,
    Generate,
    GivenBack,
    Incarnation,
    LeaseId,
    Limits,
    Logprobs,
    Prefill,
    PrefillDone,
    PrefillStarted,
    Role,
    Sampling,
    SeqId,
    Tokens,
    TransferAddress,
    WorkerId,
)
from engine.worker.batch import LaunchedStep
from engine.worker.blocks import BlockId, BlockPool
from engine.worker.events import (
    AbortPull,
    Effect,
    Emit,
    Event,
    FromGateway,
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
from tests.kits.fakes.worker import WorkerShape

GATEWAY = GatewayId("here")
MAX_STEPS = 20_000


@dataclass(slots=True)
class StreamAsk:
    """A request and its answer."""

    token_ids: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    answer: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    num_drafted: int = 0
    num_accepted: int = 0
    num_given_back: int = 0
    is_finished: bool = False

    @property
    def limits(self) -> Limits:
        length = len(self.token_ids)
        return Limits(
            max_len=length + self.max_tokens,
            min_len=length + self.min_tokens,
            stop_token_ids=self.stop_token_ids,
            prompt_len=length,
        )


class KeenSpeculator(Speculator):
    """Drafts at random also where the real speculator, which measures the machine, would not."""

    def __init__(self, mode: Speculate, **options: Any) -> None:
        super().__init__(mode, **options)
        self._rng = random.Random(0)

    def rests(self) -> bool:
        return False

    def weighs_draft_model(self, num_rows: int, num_context_tokens: int) -> bool:
        return True

    def plan(
        self, candidates: Sequence[Candidate], *, num_others: int = 0, others_tokens: int = 0
    ) -> list[Proposal | None]:
        others = {"num_others": num_others, "others_tokens": others_tokens}
        proposals = super().plan(candidates, **others)
        return [
            proposal or self._by_lot(candidate)
            for proposal, candidate in zip(proposals, candidates, strict=True)
        ]

    def _by_lot(self, candidate: Candidate) -> Proposal | None:
        ways = [Proposer.DRAFT] if self.uses_draft_model else []
        ways += [Proposer.NGRAM] if self.uses_ngrams and candidate.match_len else []
        if not ways or candidate.max_tokens == 0 or self._rng.randrange(4):
            return None
        way, num_tokens = self._rng.choice(ways), self._rng.randint(1, candidate.max_tokens)
        return Proposal(way, num_tokens, candidate.match_len if way is Proposer.NGRAM else 0)


class Worker:
    """A core over an opened runner, whose pool is empty."""

    def __init__(
        self,
        name: str,
        role: Role,
        runner,
        *,
        speculate: Speculate = Speculate.OFF,
        guides: Guides | None = None,
        max_running: int = 32,
        num_blocks: int | None = None,
        growth_tokens: int = 128,
        speculator: type[Speculator] = Speculator,
        stretch: float | None = None,
    ) -> None:
        self.address = TransferAddress(WorkerId(name), Incarnation(name), "")
        self.runner = runner
        self.inbox: deque[Event] = deque()
        self.in_flight: deque[LaunchedStep] = deque()
        self.pool = BlockPool(num_blocks or runner.num_blocks)
        self.speculator = speculator(
            speculate, max_draft_tokens=8, has_draft_model=runner.draft_forward is not None
        )
        self.core = worker_core(
            self.pool,
            WorkerShape(role, max_batch_tokens=256, chunk_tokens=64, max_running=max_running),
            intake=Intake(runner.layout.block_size, guides),
            address=self.address,
            role=role,
            stretch=stretch,
            speculator=self.speculator,
            growth_tokens=growth_tokens,
        ).core

    @property
    def blocks(self) -> np.ndarray:
        """The runner's pool, uint8 [num_blocks, block_bytes]."""
        flat = np.frombuffer(self.runner.buffer, np.uint8)
        return flat.reshape(-1, self.runner.layout.block_bytes)


class Pools:
    """The workers, and the requests that they answer."""

    def __init__(self, prefill: Worker, decode: Worker, *, every_local: int | None = None) -> None:
        """The same worker twice means colocated serving.

        The decode worker alone serves one of `every_local` attempts, prompt included.
        """
        self._every_local = 1 if prefill is decode else every_local
        self._local: set[SeqId] = set()
        self._prefill = prefill
        self._decode = decode
        self._workers = list(dict.fromkeys((prefill, decode)))
        self._asked: dict[SeqId, StreamAsk] = {}
        self._granted: dict[LeaseId, list[BlockId]] = {}  # blocks of a lease that are computed
        self._lease_of: dict[SeqId, LeaseId] = {}
        self._lease_blocks: dict[LeaseId, int] = {}
        self._wanted: dict[SeqId, tuple[tuple[int, BlockId], ...]] = {}  # pulls that wait
        self._num_attempts = 0
        self._given_back: deque[StreamAsk] = deque()

    @property
    def num_local(self) -> int:
        """Number of attempts that were not handed over."""
        return len(self._local)

    def answer(self, requests: Sequence[StreamAsk]) -> list[StreamAsk]:
        """Answers all requests together; afterwards every block is free or cached."""
        for asked in requests:
            self._send(asked)
        for _ in range(MAX_STEPS):
            if not (self._asked or any(worker.inbox for worker in self._workers)):
                break
            for worker in self._workers:
                self._take_events(worker)
                plan, effects = worker.core.plan(0.0)
                self._perform(worker, effects)
                if plan is not None:
                    worker.in_flight.append(worker.runner.launch(plan))
                    if worker.runner.overlaps and len(worker.in_flight) == 1:
                        continue
                if worker.in_flight:
                    result = worker.in_flight.popleft().result()
                    self._perform(worker, worker.core.finish(result, 0.0))
        assert not self._asked, f"{len(self._asked)} requests are not finished"
        assert not self._given_back
        for worker in self._workers:
            worker.core.validate()
            counts = worker.pool.counts()
            assert counts.free + counts.cached == counts.total, counts
        return list(requests)

    def _send(self, asked: StreamAsk) -> None:
        self._num_attempts += 1
        seq_id = SeqId(f"s{self._num_attempts}")
        self._asked[seq_id] = asked
        token_ids = [*asked.token_ids, *asked.answer]
        fields = (seq_id, token_ids, asked.sampling, asked.limits)
        if self._every_local is not None and self._num_attempts % self._every_local == 0:
            self._local.add(seq_id)
            self._tell(self._decode, Generate(*fields))
        else:
            self._tell(self._prefill, Prefill(*fields))

    def _tell(self, worker: Worker, message) -> None:
        worker.inbox.append(FromGateway(GATEWAY, message))

    def _take_events(self, worker: Worker) -> None:
        while worker.inbox:
            self._perform(worker, worker.core.handle(worker.inbox.popleft(), 0.0))

    def _perform(self, worker: Worker, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Emit(_, message):
                    self._on_message(message)
                case OpenLease(lease_id, num_blocks):
                    self._granted[lease_id], self._lease_blocks[lease_id] = [], num_blocks
                case GrowLease(lease_id, block_ids):
                    self._granted[lease_id] += block_ids
                    self._pull_what_is_there()
                case RevokeLease(lease_id):
                    self._end_lease(lease_id, "revoked")
                case HoldLease(seq_id, lease):
                    self._lease_of[seq_id] = lease.lease_id
                case StartPull(seq_id, blocks):
                    self._wanted[seq_id] = blocks
                    self._pull_what_is_there()
                case AbortPull(seq_id):
                    if self._wanted.pop(seq_id, None) is not None:
                        worker.inbox.append(PullFailed(seq_id, "aborted"))

    def _pull_what_is_there(self) -> None:
        """Carries out the pulls whose lease has grown to its full length."""
        for seq_id, blocks in list(self._wanted.items()):
            lease_id = self._lease_of[seq_id]
            granted = self._granted.get(lease_id, [])
            if len(granted) < self._lease_blocks.get(lease_id, 1):
                continue
            del self._wanted[seq_id]
            for index, block in blocks:
                self._decode.blocks[block] = self._prefill.blocks[granted[index]]
            self._decode.inbox.append(PullDone(seq_id, "copied"))
            self._end_lease(lease_id, "released")

    def _end_lease(self, lease_id: LeaseId, reason: str) -> None:
        if self._granted.pop(lease_id, None) is not None:
            self._prefill.inbox.append(LeaseEnded(lease_id, reason))
            for seq_id in [s for s in self._wanted if self._lease_of[s] == lease_id]:
                del self._wanted[seq_id]
                self._decode.inbox.append(PullFailed(seq_id, reason))

    def _on_message(self, message) -> None:
        asked = self._asked.get(message.seq_id)
        if asked is None:
            return
        match message:
            case PrefillStarted(seq_id, _, lease) if lease is not None:
                token_ids = [*asked.token_ids, *asked.answer]
                decode = Decode(seq_id, token_ids, asked.sampling, asked.limits, lease)
                self._tell(self._decode, decode)
            case PrefillDone(seq_id, token, finish):
                asked.answer.append(token)
                asked.logprobs += [] if message.logprobs is None else [message.logprobs]
                self._finish(seq_id, finish)
                if seq_id not in self._local:
                    more = FirstToken(seq_id, token) if finish is None else Cancel(seq_id)
                    self._tell(self._decode, more)
            case Tokens(seq_id, token_ids, finish):
                asked.answer += token_ids
                asked.logprobs += message.logprobs
                asked.num_drafted += message.num_drafted
                asked.num_accepted += message.num_accepted
                self._finish(seq_id, finish)
            case GivenBack(seq_id):
                asked.num_given_back += 1
                del self._asked[seq_id]
                self._given_back.append(asked)
                self._go_on()

    def _finish(self, seq_id: SeqId, finish: object) -> None:
        if finish is not None:
            self._asked.pop(seq_id).is_finished = True
            self._go_on(1)

    def _go_on(self, num_requests: int = 0) -> None:
        """Sends sequences again that were given back, once others have ended and made room."""
        while self._given_back and (num_requests > 0 or not self._asked):
            self._send(self._given_back.popleft())
            num_requests -= 1


def counted(worker: Worker) -> Mapping[str, float]:
    """Returns the counters of the worker's schedulers."""
    return worker.core.load(0, {}).counters
