"""Sequences handed over at random steps get the same answers as sequences that stay."""

import random
from collections import Counter

import pytest

from deploy.base.defaults import BUNDLED_MODEL
from engine.config import Speculate
from engine.grammar.guides import LlGuides
from engine.messages import (
    Cancel,
    Decode,
    FirstToken,
    Generate,
    HandedOver,
    HandOver,
    KvReady,
    LeaseId,
    Limits,
    OfferPrefix,
    PrefillDone,
    PrefixOffered,
    Role,
    Sampling,
    SeqId,
    Tokens,
)
from engine.worker.blocks import BlockId
from engine.worker.events import (
    Emit,
    FromGateway,
    GrowLease,
    HoldLease,
    LeaseEnded,
    PullDone,
    PullFailed,
    RevokeLease,
    StartPull,
)
from tests.kits.models.pools import GATEWAY, MAX_STEPS, Asked, KeenSpeculator, Worker
from tests.kits.models.requests import EOS, check, requests

pytestmark = pytest.mark.torch

NUM_REQUESTS = 60
EVERY = 6  # each step moves one in this many sequences


class Couple:
    """Two equal workers, and requests that move between them."""

    def __init__(self, workers: tuple[Worker, Worker], *, rng: random.Random | None) -> None:
        """Without a generator no sequence moves."""
        self._workers = workers
        self._rng = rng
        self._asked: dict[SeqId, Asked] = {}
        self._at: dict[SeqId, int] = {}
        self._as: dict[SeqId, SeqId] = {}  # those that are to go on as others
        self._copied: dict[SeqId, SeqId] = {}  # of which sequence a copy is
        self._granted: dict[LeaseId, tuple[int, tuple[BlockId, ...]]] = {}
        self._lease_of: dict[SeqId, LeaseId] = {}
        self.num_moves: Counter[bool] = Counter()  # with all that the draft model should have seen
        self.num_found = self.num_pulled = 0  # blocks of those that moved, when they had stopped

    def answer(self, asked: list[Asked]) -> list[Asked]:
        for i, one in enumerate(asked):
            seq_id = SeqId(f"s{i}")
            self._asked[seq_id], self._at[seq_id] = one, i % 2
            message = Generate(seq_id, list(one.token_ids), one.sampling, one.limits)
            self._tell(i % 2, message)
        for _ in range(MAX_STEPS):
            if not self._asked:
                break
            for number in (0, 1):
                self._move_some(number)
                self._step(number)
        for number, worker in enumerate(self._workers):
            self._take_events(number)
            worker.core.validate()
            counts = worker.pool.counts()
            assert counts.free + counts.cached == counts.total, counts
        assert all(one.is_finished for one in asked)
        return asked

    def _step(self, number: int) -> None:
        worker = self._workers[number]
        self._take_events(number)
        plan, effects = worker.core.plan(0.0)
        self._perform(number, effects)
        if plan is not None:
            self._perform(number, worker.core.finish(worker.runner.run(plan), 0.0))

    def _move_some(self, number: int) -> None:
        for seq_id in [s for s, at in self._at.items() if at == number]:
            is_running = seq_id not in self._as and self._asked[seq_id].answer
            if is_running and self._rng is not None and self._rng.randrange(EVERY) == 0:
                asked, as_seq_id = self._asked[seq_id], SeqId(f"{seq_id}+")
                copy_id = SeqId(f"{as_seq_id}.copy")
                self._as[seq_id], self._copied[copy_id] = as_seq_id, seq_id
                self._tell(number, OfferPrefix(copy_id, [*asked.token_ids, *asked.answer]))

    def _tell(self, number: int, message) -> None:
        self._workers[number].inbox.append(FromGateway(GATEWAY, message))

    def _take_events(self, number: int) -> None:
        worker = self._workers[number]
        while worker.inbox:
            self._perform(number, worker.core.handle(worker.inbox.popleft(), 0.0))

    def _perform(self, number: int, effects) -> None:
        for effect in effects:
            match effect:
                case Emit(_, message):
                    self._on_message(number, message)
                case GrowLease(lease_id, block_ids):
                    self._granted[lease_id] = number, block_ids
                case HoldLease(seq_id, lease):
                    self._lease_of[seq_id] = lease.lease_id
                case StartPull(seq_id, blocks):
                    self._pull(number, seq_id, blocks)
                case RevokeLease(lease_id) if self._granted.pop(lease_id, None) is not None:
                    self._workers[number].inbox.append(LeaseEnded(lease_id, "revoked"))

    def _pull(self, number: int, seq_id: SeqId, blocks) -> None:
        lease_id = self._lease_of.pop(seq_id)
        if lease_id not in self._granted:
            self._workers[number].inbox.append(PullFailed(seq_id, "lease revoked"))
            return
        at, granted = self._granted.pop(lease_id)
        source, sink = self._workers[at], self._workers[number]
        for index, block in blocks:
            sink.blocks[block] = source.blocks[granted[index]]
        sink.inbox.append(PullDone(seq_id, "copied"))
        source.inbox.append(LeaseEnded(lease_id, "released"))

    def _on_message(self, number: int, message) -> None:
        match message:
            case PrefillDone(seq_id, token, finish, logprobs):
                self._add(seq_id, [token], finish, [] if logprobs is None else [logprobs])
            case Tokens(seq_id, token_ids, finish, logprobs):
                self._add(seq_id, token_ids, finish, logprobs)
            case PrefixOffered(copy_id, lease) if copy_id in self._copied:
                self._copy(number, copy_id, lease)
            case KvReady(copy_id) if copy_id in self._copied:
                seq_id = self._copied[copy_id]
                self._tell(1 - number, HandOver(seq_id, self._as[seq_id]))
            case KvReady(_, num_pulled, num_cached):
                self.num_pulled += num_pulled
                self.num_found += num_cached
            case HandedOver(seq_id, lease) if seq_id in self._asked:
                if lease is None:  # it has come a moment ago, and is not decoded yet
                    self._stay(number, seq_id)
                    return
                self.num_moves[message.num_draft_tokens is None] += 1
                asked, as_seq_id = self._asked.pop(seq_id), self._as.pop(seq_id)
                del self._at[seq_id]
                self._asked[as_seq_id], self._at[as_seq_id] = asked, 1 - number
                *token_ids, last = [*asked.token_ids, *asked.answer]
                fields = (as_seq_id, token_ids, asked.sampling, asked.limits, lease)
                self._tell(1 - number, Decode(*fields, message.num_draft_tokens, is_moved=True))
                self._tell(1 - number, FirstToken(as_seq_id, last))
                self._end_copy(1 - number, as_seq_id)

    def _copy(self, number: int, copy_id: SeqId, lease) -> None:
        """Copies the full blocks ahead, while the sequence runs on."""
        seq_id = self._copied[copy_id]
        if lease is None:
            self._tell(number, HandOver(seq_id, self._as[seq_id]))
            return
        asked = self._asked[seq_id]
        block_size = self._workers[number].runner.layout.block_size
        token_ids = [*asked.token_ids, *asked.answer][: lease.num_blocks * block_size]
        limits = Limits(len(token_ids) + 1)
        self._tell(1 - number, Decode(copy_id, token_ids, Sampling(), limits, lease, is_copy=True))

    def _stay(self, number: int, seq_id: SeqId) -> None:
        """Cancels the move of a sequence, or notes that it ended."""
        as_seq_id = self._as.pop(seq_id, None)
        if as_seq_id is not None:
            self._end_copy(number, as_seq_id)
            self._end_copy(1 - number, as_seq_id)

    def _end_copy(self, number: int, as_seq_id: SeqId) -> None:
        copy_id = SeqId(f"{as_seq_id}.copy")
        self._copied.pop(copy_id, None)
        self._tell(number, Cancel(copy_id))

    def _add(self, seq_id: SeqId, token_ids, finish, logprobs) -> None:
        asked = self._asked[seq_id]
        asked.answer += token_ids
        asked.logprobs += logprobs
        if finish is not None:
            asked.is_finished = True
            self._stay(self._at[seq_id], seq_id)
            del self._asked[seq_id], self._at[seq_id]


def answered(runners, *, speculate: Speculate, rng: random.Random | None):
    guides = LlGuides(
        BUNDLED_MODEL / "tokenizer.json", vocab_size=runners[0].vocab_size, eos_token_ids=EOS
    )
    options = {"guides": guides, "speculate": speculate, "max_running": 128}
    workers = [
        Worker(f"w{i}", Role.MIXED, runner, speculator=KeenSpeculator, **options)
        for i, runner in enumerate(runners)
    ]
    couple = Couple(tuple(workers), rng=rng)
    return couple.answer(requests(NUM_REQUESTS, seed=3)), couple


@pytest.fixture(scope="module")
def expected(runners):
    return answered(runners, speculate=Speculate.OFF, rng=None)[0]


@pytest.mark.parametrize("speculate", [Speculate.OFF, Speculate.AUTO])
def test_moving_a_sequence_any_number_of_times_changes_no_token(runners, expected, speculate):
    found, couple = answered(runners, speculate=speculate, rng=random.Random(7))
    check(found, expected)
    assert couple.num_moves.total() > NUM_REQUESTS
    # Copies are of use. How many blocks they save varies: how much is drafted depends on time.
    assert couple.num_found > couple.num_pulled / 2
    # The draft model had not seen all of some: it goes on from there, and drafts all the same.
    assert couple.num_moves[False] > 0
