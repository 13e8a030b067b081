"""Requests through real schedulers and runners in this process, without sockets and a router.

    colocated      one worker prefills and decodes
    handed over    one worker prefills, another decodes; KV is copied from pool to pool
    both           as handed over, but the decode worker prefills some prompts itself
    moving         two workers prefill and decode; running sequences move between them

This module does the gateway's part in its simplest form. All requests are sent at once. A rejected
sequence is sent again, with its tokens so far, after another request has finished.
"""

import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from decode.acceptance import Proposer
from decode.choosing import Candidate, Proposal
from decode.speculation import Speculator
from deploy.worker.core import WorkerCore
from engine.config import Speculate
from engine.grammar.guide import Guides
from engine.messages import (
    Cancel,
    Decode,
    FirstToken,
    GatewayId,
    Generate,
    GivenBack,
    HandedOver,
    HandOver,
    Incarnation,
    KvReady,
    LeaseId,
    LeaseRef,
    Limits,
    Logprobs,
    OfferPrefix,
    Prefill,
    PrefillDone,
    PrefillStarted,
    PrefixOffered,
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
MOVES_EVERY = 6  # in each step, one in six sequences is moved


@dataclass(slots=True)
class Asked:
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
    def so_far(self) -> list[int]:
        """Returns the prompt and the answer so far."""
        return [*self.token_ids, *self.answer]

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
    """Drafts at random, even where the real speculator would not draft by its measured times."""

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
    """A core with an opened runner whose pool is empty."""

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
        self.core = WorkerCore(
            self.pool,
            WorkerShape(role, max_batch_tokens=256, chunk_tokens=64, max_running=max_running),
            intake=Intake(runner.layout.block_size, guides),
            address=self.address,
            role=role,
            stretch=stretch,
            speculator=self.speculator,
            growth_tokens=growth_tokens,
        )

    @property
    def blocks(self) -> np.ndarray:
        """The runner's pool, uint8 [num_blocks, block_bytes]."""
        flat = np.frombuffer(self.runner.buffer, np.uint8)
        return flat.reshape(-1, self.runner.layout.block_bytes)


class Pools:
    """The workers, and the requests that they answer."""

    def __init__(
        self,
        prefill: Worker,
        *decode: Worker,
        every_local: int | None = None,
        moves: random.Random | None = None,
    ) -> None:
        """If `prefill` is also the decode worker, serving is colocated.

        One in `every_local` attempts is prefilled and decoded by a decode worker alone; decode
        workers take turns. With `moves` there are two decode workers, and running sequences move
        between them at random steps.
        """
        self._every_local = 1 if prefill in decode else every_local
        self._local: set[SeqId] = set()
        self._prefill = prefill
        self._decode = decode
        self._workers = list(dict.fromkeys((prefill, *decode)))
        self._asked: dict[SeqId, Asked] = {}
        self._at: dict[SeqId, Worker] = {}  # worker that decodes each sequence
        # computed blocks of each lease, with their worker
        self._granted: dict[LeaseId, tuple[Worker, list[BlockId]]] = {}
        self._lease_of: dict[SeqId, LeaseRef] = {}
        # pulls not carried out yet
        self._wanted: dict[SeqId, tuple[Worker, tuple[tuple[int, BlockId], ...]]] = {}
        self._num_attempts = 0
        self._given_back: deque[Asked] = deque()
        self._moves = moves
        self._as: dict[SeqId, SeqId] = {}  # moving sequences: old id to new id
        self._copied: dict[SeqId, SeqId] = {}  # copy's id to the id of its sequence
        self.num_moves: Counter[bool] = Counter()  # by True: the draft model's KV was complete
        self.num_found = self.num_pulled = 0  # numbers of blocks

    @property
    def num_local(self) -> int:
        """Returns the number of attempts that were not handed over."""
        return len(self._local)

    def answer(self, requests: Sequence[Asked]) -> list[Asked]:
        """Answers all requests together; afterwards every block is free or cached."""
        for asked in requests:
            self._send(asked)
        for _ in range(MAX_STEPS):
            if not (self._asked or any(worker.inbox for worker in self._workers)):
                break
            for worker in self._workers:
                self._move_some(worker)
                self._step(worker)
        assert not self._asked, f"{len(self._asked)} requests are not finished"
        assert not self._given_back
        for worker in self._workers:
            worker.core.validate()
            counts = worker.pool.counts()
            assert counts.free + counts.cached == counts.total, counts
        return list(requests)

    def _step(self, worker: Worker) -> None:
        while worker.inbox:
            self._perform(worker, worker.core.handle(worker.inbox.popleft()))
        plan, effects = worker.core.plan(0.0)
        self._perform(worker, effects)
        if plan is not None:
            worker.in_flight.append(worker.runner.launch(plan))
            if worker.runner.overlaps and len(worker.in_flight) == 1:
                return
        if worker.in_flight:
            result = worker.in_flight.popleft().result()
            self._perform(worker, worker.core.finish(result, 0.0))

    def _send(self, asked: Asked) -> None:
        self._num_attempts += 1
        seq_id = SeqId(f"s{self._num_attempts}")
        self._asked[seq_id] = asked
        sink = self._at[seq_id] = self._decode[self._num_attempts % len(self._decode)]
        fields = (seq_id, asked.so_far, asked.sampling, asked.limits)
        if self._every_local is not None and self._num_attempts % self._every_local == 0:
            self._local.add(seq_id)
            self._tell(sink, Generate(*fields))
        else:
            self._tell(self._prefill, Prefill(*fields))

    def _tell(self, worker: Worker, message) -> None:
        worker.inbox.append(FromGateway(GATEWAY, message))

    # ------------------------------------------------------------ leases and pulls

    def _perform(self, worker: Worker, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Emit(_, message):
                    self._on_message(worker, message)
                case OpenLease(lease_id):
                    self._granted[lease_id] = worker, []
                case GrowLease(lease_id, block_ids):
                    self._granted[lease_id][1].extend(block_ids)
                    self._pull_what_is_there()
                case RevokeLease(lease_id):
                    self._end_lease(lease_id, "revoked")
                case HoldLease(seq_id, lease):
                    self._lease_of[seq_id] = lease
                case StartPull(seq_id, blocks):
                    self._wanted[seq_id] = worker, blocks
                    self._pull_what_is_there()
                case AbortPull(seq_id):
                    if self._wanted.pop(seq_id, None) is not None:
                        worker.inbox.append(PullFailed(seq_id, "aborted"))

    def _pull_what_is_there(self) -> None:
        """Carries out each pull whose lease has grown to its full length."""
        for seq_id, (sink, blocks) in list(self._wanted.items()):
            lease = self._lease_of[seq_id]
            if lease.lease_id not in self._granted:
                del self._wanted[seq_id]
                sink.inbox.append(PullFailed(seq_id, "lease revoked"))
                continue
            source, granted = self._granted[lease.lease_id]
            if len(granted) < lease.num_blocks:
                continue
            del self._wanted[seq_id]
            for index, block in blocks:
                sink.blocks[block] = source.blocks[granted[index]]
            sink.inbox.append(PullDone(seq_id, "copied"))
            self._end_lease(lease.lease_id, "released")

    def _end_lease(self, lease_id: LeaseId, reason: str) -> None:
        if lease_id in self._granted:
            source, _ = self._granted.pop(lease_id)
            source.inbox.append(LeaseEnded(lease_id, reason))
            self._pull_what_is_there()

    # ------------------------------------------------------------ messages

    def _on_message(self, worker: Worker, message) -> None:
        if message.seq_id in self._copied:
            self._on_copy(worker, message)
            return
        asked = self._asked.get(message.seq_id)
        if asked is None:
            return
        match message:
            case PrefillStarted(seq_id, _, lease) if lease is not None:
                fields = (seq_id, asked.so_far, asked.sampling, asked.limits)
                self._tell(self._at[seq_id], Decode(*fields, lease))
            case PrefillDone(seq_id, token, finish):
                asked.answer.append(token)
                asked.logprobs += [] if message.logprobs is None else [message.logprobs]
                sink = self._at[seq_id]
                self._finish(seq_id, finish)
                if seq_id not in self._local:
                    more = FirstToken(seq_id, token) if finish is None else Cancel(seq_id)
                    self._tell(sink, more)
            case Tokens(seq_id, token_ids, finish):
                asked.answer += token_ids
                asked.logprobs += message.logprobs
                asked.num_drafted += message.num_drafted
                asked.num_accepted += message.num_accepted
                self._finish(seq_id, finish)
            case KvReady(_, num_pulled, num_cached):
                self.num_pulled += num_pulled
                self.num_found += num_cached
            case HandedOver(seq_id, lease):
                self._on_handed_over(seq_id, lease, message.num_draft_tokens)
            case GivenBack(seq_id):
                asked.num_given_back += 1
                del self._asked[seq_id]
                self._given_back.append(asked)
                self._go_on()

    def _finish(self, seq_id: SeqId, finish: object) -> None:
        if finish is not None:
            self._stay(seq_id)
            del self._at[seq_id]
            self._asked.pop(seq_id).is_finished = True
            self._go_on(1)

    def _go_on(self, num_requests: int = 0) -> None:
        """Sends rejected sequences again, after other requests have finished and freed blocks."""
        while self._given_back and (num_requests > 0 or not self._asked):
            self._send(self._given_back.popleft())
            num_requests -= 1

    # ------------------------------------------------------------ moves

    def _move_some(self, worker: Worker) -> None:
        if self._moves is None:
            return
        for seq_id in [s for s, at in self._at.items() if at is worker]:
            asked = self._asked[seq_id]
            if seq_id not in self._as and asked.answer and self._moves.randrange(MOVES_EVERY) == 0:
                as_seq_id = SeqId(f"{seq_id}+")
                copy_id = SeqId(f"{as_seq_id}.copy")
                self._as[seq_id], self._copied[copy_id] = as_seq_id, seq_id
                self._tell(worker, OfferPrefix(copy_id, asked.so_far))

    def _other(self, worker: Worker) -> Worker:
        return self._decode[self._decode[0] is worker]

    def _on_copy(self, worker: Worker, message) -> None:
        """Copies full blocks while the sequence still runs, then orders the hand-over."""
        seq_id = self._copied[message.seq_id]
        match message:
            case PrefixOffered(copy_id, lease) if lease is not None:
                num_tokens = lease.num_blocks * worker.runner.layout.block_size
                token_ids = self._asked[seq_id].so_far[:num_tokens]
                limits = Limits(len(token_ids) + 1)
                copy = Decode(copy_id, token_ids, Sampling(), limits, lease, is_copy=True)
                self._tell(self._other(worker), copy)
            case PrefixOffered() | KvReady():
                self._tell(self._at[seq_id], HandOver(seq_id, self._as[seq_id]))

    def _on_handed_over(
        self, seq_id: SeqId, lease: LeaseRef | None, num_draft_tokens: int | None
    ) -> None:
        if lease is None:  # the sequence has just arrived and has no token decoded here yet
            self._stay(seq_id)
            return
        self.num_moves[num_draft_tokens is None] += 1
        asked, as_seq_id = self._asked.pop(seq_id), self._as.pop(seq_id)
        sink = self._other(self._at.pop(seq_id))
        self._asked[as_seq_id], self._at[as_seq_id] = asked, sink
        self._local.add(as_seq_id)
        *token_ids, last = asked.so_far
        fields = (as_seq_id, token_ids, asked.sampling, asked.limits, lease, num_draft_tokens)
        self._tell(sink, Decode(*fields, is_moved=True))
        self._tell(sink, FirstToken(as_seq_id, last))
        self._end_copy(sink, as_seq_id)

    def _stay(self, seq_id: SeqId) -> None:
        """Cancels the move of a sequence, if a move has begun."""
        as_seq_id = self._as.pop(seq_id, None)
        if as_seq_id is not None:
            for worker in self._decode:
                self._end_copy(worker, as_seq_id)

    def _end_copy(self, worker: Worker, as_seq_id: SeqId) -> None:
        copy_id = SeqId(f"{as_seq_id}.copy")
        self._copied.pop(copy_id, None)
        self._tell(worker, Cancel(copy_id))


def counted(worker: Worker) -> Mapping[str, float]:
    """Returns the counters of the worker's schedulers."""
    return worker.core.load(0, {}).counters
