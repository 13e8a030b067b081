"""Single requests and groups, on workers that join, leave, return sequences, stall and die.

A fake worker computes each token from all tokens before it, so the test finds at once a retry that
loses, repeats or changes a token. Messages between the router and one worker keep their order.
Messages of different workers may arrive in any order.
"""

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import inf

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.config import RouterConfig, RouterPolicy
from engine.demand import DecodeCost
from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import (
    PREEMPTED,
    PROTOCOL_VERSION,
    ROLE_CHANGED,
    ROLES_OF_WORKERS,
    WRONG_ROLE,
    Cancel,
    Decode,
    DecodeStarted,
    FinishReason,
    FirstToken,
    Generate,
    GivenBack,
    HandedOver,
    HandOver,
    KvReady,
    LeaseRef,
    Limits,
    LoadReport,
    OfferPrefix,
    Prefetch,
    Prefill,
    PrefillDone,
    PrefillStarted,
    PrefixOffered,
    RequestId,
    Role,
    RoleChanged,
    Sampling,
    ToGateway,
    Tokens,
    ToWorker,
    TransferAddress,
    Welcome,
    decode_to_gateway,
    decode_to_worker,
    encode_frame,
)
from engine.net.trust import SALT_BYTES
from engine.worker.block_events import (
    LOWER_MEDIA,
    AllBlocksCleared,
    BlockEvent,
    BlockRemoved,
    BlockStored,
    Medium,
)
from engine.worker.blocks import BlockHash, hash_blocks
from engine.worker.costs import LoadCost, PrefillCost, PullCost
from router.cluster.estimates import Estimates
from router.cluster.view import WorkerView
from router.machine.events import (
    Arrived,
    BlockEventsMissed,
    BlocksChanged,
    ClientGone,
    FromWorker,
    RouterEvent,
    SendTo,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from router.machine.flight import BALANCED, DRAINED, GATHERED, GIVEN_BACK
from router.machine.machine import RouterMachine
from router.machine.requests import Cancelled, Finished, Outcome, Rejected, Request, Update
from router.recording.records import Recorder, replay
from tests.kits.seeds import seeds

LAYOUT = KVLayout(block_size=4, kv_format=KVFormat.FP32, sections=(KVSection(1, 1, 4),))
NUM_BLOCKS, MAX_RUNNING = 8, 3
CONFIG = RouterConfig(
    max_queue=4,
    queue_timeout_s=20.0,
    progress_timeout_s=10.0,
    slowest_prefill_tokens_per_s=10.0,
    max_attempts=3,
    prefill_backlog_s=0.012,  # as long as the prefill of twelve tokens
    offer_timeout_s=2.0,
)
VOCAB_SIZE = 7
ROLES = {
    "p": Role.PREFILL,
    "d": Role.DECODE,
    "m": Role.MIXED,
    "l": Role.DECODE,
    "f": Role.PREFILL,
    "s": Role.STORE,
}
FLUID = "lf"  # first letters of fluid workers, which also take whole requests
NAMES = [f"{letter}{i}" for letter in ROLES for i in range(2)]


def salt_of(name: str) -> bytes:
    """Returns the salt of a group. Each group is a tenant of its own."""
    return name.encode().ljust(SALT_BYTES, b".")


def next_token(token_ids: list[int]) -> int:
    return sum((i + 1) * token for i, token in enumerate(token_ids)) % VOCAB_SIZE


def answer_to(request: Request) -> tuple[list[int], FinishReason]:
    """Returns the only correct answer to a request, which does not depend on the worker."""
    token_ids = list(request.token_ids)
    while True:
        token_ids.append(next_token(token_ids))
        finish = request.limits.finish_reason(len(token_ids), token_ids[-1])
        if finish is not None:
            return token_ids[len(request.token_ids) :], finish


# ---------------------------------------------------------------- a worker


@dataclass
class Seq:
    """A sequence at a fake worker, and the progress that the worker has reported."""

    token_ids: list[int]
    limits: Limits
    kind: type
    prefix: LeaseRef | None = None
    lease: LeaseRef | None = None  # set if another worker computed the prompt
    started: bool = False
    kv_here: bool = False
    first_token: int | None = None
    decoding: bool = False

    def append(self) -> tuple[int, FinishReason | None]:
        token = next_token(self.token_ids)
        self.token_ids.append(token)
        return token, self.limits.finish_reason(len(self.token_ids), token)


class FakeWorker:
    """A worker that sends random valid messages, in an order that the protocol allows."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.role = ROLES[name[0]]
        self.inbox: deque[bytes] = deque()
        self.outbox: deque[bytes] = deque()
        self.seqs: dict[str, Seq] = {}
        # offers that the router asked for: the number of full blocks of the prompt
        self.asked: dict[str, int] = {}
        # leases on offered prefixes, by the sequence that will pull them
        self.offers: dict[str, LeaseRef] = {}
        # tokens of sequences that moved away, by their id at the target
        self.moved: dict[str, list[int]] = {}
        # leases of other workers that this worker no longer needs
        self.released: list[LeaseRef] = []
        self._seen: set[str] = set()

    @property
    def welcome(self) -> Welcome:
        return Welcome(
            PROTOCOL_VERSION,
            self.name,
            "life",
            self.role,
            "fp",
            LAYOUT,
            NUM_BLOCKS,
            MAX_RUNNING,
            stretch=4.0 if self.name[0] in FLUID else None,
        )

    @property
    def is_local(self) -> bool:
        return self.name[0] in FLUID and self.role in (Role.PREFILL, Role.DECODE)

    def change_role(self, role: Role) -> None:
        """Changes the role: started sequences finish here, the others are given back."""
        self.role = role
        self._say(RoleChanged(role))
        for seq_id, seq in list(self.seqs.items()):
            has_begun = seq.decoding or (seq.kind is not Decode and seq.started)
            if not has_begun and not self._accepts(seq.kind):
                del self.seqs[seq_id]
                self._say(GivenBack(seq_id, ROLE_CHANGED))

    def _accepts(self, kind: type) -> bool:
        if kind is Generate:
            return self.role is Role.MIXED or self.is_local
        return self.role.prefills if kind is Prefill else self.role.decodes or self.is_local

    def _hand_over(self, seq_id: str, as_seq_id: str) -> None:
        """Hands a sequence over to another worker. Only a decoding sequence gets a lease."""
        seq = self.seqs.get(seq_id)
        is_decoding = seq is not None and (seq.decoding or (seq.kind is Generate and seq.kv_here))
        lease = None
        if seq is not None and is_decoding:
            del self.seqs[seq_id]
            num_blocks = LAYOUT.num_blocks_for(len(seq.token_ids) - 1)
            lease = self._lease_ref(f"{as_seq_id}.moved", num_blocks)
            self.moved[as_seq_id] = seq.token_ids
        self._say(HandedOver(seq_id, lease))

    def take(self) -> None:
        """Handles the next message of the router."""
        (message,) = decode_to_worker(self.inbox.popleft())
        match message:
            case Prefill() | Generate() | Decode():
                assert message.seq_id not in self._seen, "a sequence was sent twice"
                assert self.role is not Role.STORE, "work for a store"
                self._seen.add(message.seq_id)
                if not self._accepts(type(message)):
                    self._say(GivenBack(message.seq_id, WRONG_ROLE))
                    return
                seq = Seq(list(message.token_ids), message.limits, type(message))
                if not isinstance(message, Decode):
                    seq.prefix = message.prefix
                elif message.lease.lease_id.endswith((".moved", ".prefix")):
                    seq.lease = message.lease
                self.seqs[message.seq_id] = seq
            case FirstToken(seq_id, token):
                assert seq_id in self._seen, "the first token came before its sequence"
                if seq_id in self.seqs:
                    assert self.seqs[seq_id].first_token is None
                    assert token == next_token(self.seqs[seq_id].token_ids)
                    self.seqs[seq_id].first_token = token
            case OfferPrefix(seq_id, token_ids):
                assert seq_id not in self.asked
                assert seq_id not in self.offers
                self.asked[seq_id] = (len(token_ids) - 1) // LAYOUT.block_size
            case Cancel(seq_id):
                self.seqs.pop(seq_id, None)
                self.asked.pop(seq_id, None)
                self.offers.pop(seq_id, None)
                self.moved.pop(seq_id, None)
            case HandOver(seq_id, as_seq_id):
                self._hand_over(seq_id, as_seq_id)
            case Prefetch(hashes):
                assert self.role is Role.STORE
                assert hashes
            case other:
                raise AssertionError(f"not for a worker: {other}")

    def work(self, rng: random.Random) -> None:
        """Advances a random sequence by one stage."""
        if self.asked and rng.random() < 0.5:
            self._offer(rng)
        elif self.seqs:
            seq_id = rng.choice(list(self.seqs))
            self._advance(seq_id, self.seqs[seq_id], rng)

    def give_back(self, rng: random.Random) -> None:
        """Gives back a random sequence. If it is decoding, the reason is preemption."""
        if self.seqs:
            seq_id = rng.choice(list(self.seqs))
            seq = self.seqs.pop(seq_id)
            kept = LAYOUT.block_size * rng.randint(0, len(seq.token_ids) // LAYOUT.block_size)
            generates = seq.kind is Generate and seq.kv_here
            reason = PREEMPTED if seq.decoding or generates else "no room"
            self._say(GivenBack(seq_id, reason, kept))

    def report(self, rng: random.Random, *, others: float = 0.3) -> None:
        load = LoadReport(rng.randint(0, NUM_BLOCKS), 0, 1, 1, 1, 0, len(self.seqs), 0)
        if rng.random() < others:  # the reported load includes load of other gateways
            load = msgspec.structs.replace(
                load, prompt_tokens=20, decode_seqs=2, decode_blocks=5, context_tokens=15
            )
        self._say(load)

    def _offer(self, rng: random.Random) -> None:
        seq_id, num_blocks = self.asked.popitem()
        lease = None
        if (num_held := rng.randint(0, num_blocks)) > 0:
            lease = self.offers[seq_id] = self._lease_ref(f"{seq_id}.prefix", num_held)
        self._say(PrefixOffered(seq_id, lease))

    def _advance(self, seq_id: str, seq: Seq, rng: random.Random) -> None:
        if seq.kind is Decode:
            self._advance_arriving(seq_id, seq)
        elif not seq.started:
            seq.started = True
            if seq.prefix is not None:
                self.released.append(seq.prefix)
            num_pulled = 0 if seq.prefix is None else seq.prefix.num_blocks
            lease = self._lease(seq_id, seq)
            self._say(PrefillStarted(seq_id, 0, lease, num_pulled, 0.01 * num_pulled))
        elif not seq.kv_here:
            seq.kv_here = True
            token, finish = seq.append()
            self._say(PrefillDone(seq_id, token, finish))
            if finish is not None or seq.kind is Prefill:
                del self.seqs[seq_id]
        else:
            self._decode(seq_id, seq, rng)
        if seq.kind is Decode and seq.kv_here and seq.decoding:
            self._decode(seq_id, seq, rng)

    def _advance_arriving(self, seq_id: str, seq: Seq) -> None:
        if not seq.kv_here:
            seq.kv_here = True
            if seq.lease is not None:
                self.released.append(seq.lease)
            self._say(KvReady(seq_id, 1, 0, "fake", 0.01, 0.005))
        elif not seq.decoding and seq.first_token is not None:
            seq.decoding = True
            seq.token_ids.append(seq.first_token)
            self._say(DecodeStarted(seq_id))

    def _decode(self, seq_id: str, seq: Seq, rng: random.Random) -> None:
        token_ids = []
        for _ in range(rng.choice([1, 1, 1, 3])):
            token, finish = seq.append()
            token_ids.append(token)
            if finish is not None:
                del self.seqs[seq_id]
                break
        self._say(Tokens(seq_id, token_ids, finish))

    def _lease(self, seq_id: str, seq: Seq) -> LeaseRef | None:
        if seq.kind is Generate or seq.limits.max_len <= len(seq.token_ids) + 1:
            return None
        return self._lease_ref(seq_id, LAYOUT.num_blocks_for(len(seq.token_ids)))

    def _lease_ref(self, lease_id: str, num_blocks: int) -> LeaseRef:
        address = TransferAddress(self.name, "life", f"fake://{self.name}")
        return LeaseRef(lease_id, address, num_blocks)

    def _say(self, message: ToGateway) -> None:
        self.outbox.append(encode_frame([message]))


# ---------------------------------------------------------------- the whole deployment


@dataclass
class Client:
    """The updates that one client has received."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    gone: bool = False

    @cached_property
    def answer(self) -> tuple[list[int], FinishReason]:
        return answer_to(self.request)


class EverythingPays(Estimates):
    """Estimates without a time model: every possible pull pays, and all workers are equally
    fast.
    """

    def prefill_cost(self, worker: WorkerView) -> PrefillCost:
        return PrefillCost(0.0, 1e-3)

    def pull_cost(self, worker: WorkerView) -> PullCost:
        return PullCost(0.0, 0.0, inf)

    def load_cost(self, store: WorkerView, medium: str) -> LoadCost:
        return LoadCost(0.0, 0.0)

    def decode_cost(self, worker: WorkerView) -> DecodeCost:
        return DecodeCost(0.01, 0.0, 0.0)


class World:
    """A router machine, its live workers, and all messages between them.

    Long runs are validated only after every few events: an invariant that breaks stays broken.
    """

    def __init__(self, config: RouterConfig = CONFIG, *, validates_every: int = 5) -> None:
        self.config = config
        self.validates_every = validates_every
        self.num_events = 0
        self.machine = fresh_machine(config)
        self.lines: list[bytes] = []
        self.recorder = Recorder(config, self.lines.append)
        self.now_s = 100.0
        self.workers: dict[str, FakeWorker] = {}
        self.clients: dict[str, Client] = {}
        self.placed: dict[str, str] = {}  # the worker of each attempt
        # number of followers placed with their leader (True), or with another worker (False)
        self.num_followers: Counter[bool] = Counter()

    # ------------------------------------------------------------ what can happen

    def join(self, name: str) -> None:
        if name not in self.workers:
            worker = self.workers[name] = FakeWorker(name)
            self._handle(WorkerJoined(worker.welcome))

    def lose(self, name: str) -> None:
        if self.workers.pop(name, None) is not None:
            self._handle(WorkerLost(name, "gone"))

    def ask(
        self, prompt: list[int], max_tokens: int, stop: tuple[int, ...], num_choices: int = 1
    ) -> None:
        """Submits several requests with the same prompt, as a client that wants several answers
        does.
        """
        leader = None
        limits = Limits(len(prompt) + max_tokens, len(prompt) + 1, stop)
        for _ in range(num_choices):
            name = RequestId(f"r{len(self.clients)}")
            salt = salt_of(leader or name)
            request = Request(
                name,
                tuple(prompt),
                Sampling(),
                limits,
                self.now_s,
                None,
                leader,
                salt=salt,
                tenant="abc"[len(self.clients) % 3],
                has_key=True,
            )
            self.clients[name] = Client(request)
            self._handle(Arrived(request))
            leader = leader or name

    def change_role(self, worker: FakeWorker, role: Role) -> None:
        if worker.role is not Role.STORE:
            worker.change_role(role)

    def publish(self, store: FakeWorker, rng: random.Random) -> None:
        """Makes a store report the blocks of a prompt that it keeps, on a known or unknown
        medium.
        """
        if store.role is not Role.STORE or not self.clients:
            return
        request = rng.choice(list(self.clients.values())).request
        self.publish_of(store, hash_blocks(request.token_ids, LAYOUT.block_size, request.salt), rng)

    def publish_next(self, prompt: list[int], rng: random.Random) -> None:
        """Makes a store report that it keeps the next prompt."""
        stores = [worker for worker in self.workers.values() if worker.role is Role.STORE]
        salt = salt_of(f"r{len(self.clients)}")
        if stores:
            hashes = hash_blocks(prompt, LAYOUT.block_size, salt)
            self.publish_of(rng.choice(stores), hashes, rng)

    def publish_of(self, store: FakeWorker, hashes: list[BlockHash], rng: random.Random) -> None:
        medium = rng.choice([Medium.HOST, *LOWER_MEDIA, *LOWER_MEDIA, "tape", None])
        events: list[BlockEvent] = [
            BlockStored(hashes, None, [], LAYOUT.block_size, None, medium, None)
        ]
        if rng.random() < 0.3:
            events = [BlockRemoved(hashes[rng.randint(0, len(hashes)) :], medium)]
        if rng.random() < 0.05:
            events = [AllBlocksCleared()]
        self._handle(BlocksChanged(store.name, events))
        if rng.random() < 0.05:
            self._handle(BlockEventsMissed(store.name, "silent"))

    def leave(self, rng: random.Random) -> None:
        live = [c for c in self.clients.values() if not c.outcomes]
        if live:
            client = rng.choice(live)
            client.gone = True
            self._handle(ClientGone(client.request.request_id))
            assert client.outcomes == [Cancelled()]

    def take(self, worker: FakeWorker) -> None:
        if worker.inbox:
            worker.take()

    def work(self, worker: FakeWorker, rng: random.Random) -> None:
        worker.work(rng)
        while worker.released:
            lease = worker.released.pop()
            holder = self.workers.get(lease.source.worker_id)
            if holder is not None:
                holder.offers.pop(lease.lease_id.removesuffix(".prefix"), None)
                holder.moved.pop(lease.lease_id.removesuffix(".moved"), None)

    def tell(self, worker: FakeWorker) -> None:
        if worker.outbox:
            (message,) = decode_to_gateway(worker.outbox.popleft())
            self._handle(FromWorker(worker.name, message))

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self._handle(Tick())
        wake_s = self.machine.next_wake_s()
        assert wake_s is None or wake_s > self.now_s, "a deadline was passed over"

    def run_down(self, rng: random.Random) -> None:
        """Runs until all requests have ended, without faults or other gateways' load."""
        for worker in self.workers.values():
            self.change_role(worker, ROLES[worker.name[0]])
            worker.report(rng, others=0.0)
        for _ in range(3000):  # more steps than the queue timeout allows a request to wait
            if self.machine.num_flights == 0:
                break
            for worker in list(self.workers.values()):
                self.take(worker)
                self.work(worker, rng)
                self.tell(worker)
            busy = any(worker.inbox or worker.seqs for worker in self.workers.values())
            # while workers are idle, all requests wait for a worker, so time may pass faster
            self.pass_time(0.01 if busy else 0.25)
        self.validate()
        assert self.machine.num_flights == self.machine.queue_len == 0
        for client in self.clients.values():
            assert len(client.outcomes) == 1
        for view in self.machine.view.workers.values():
            assert view.reserved_tokens == view.reserved_blocks == 0
            assert not view.prefills
            assert not view.decodes
        for worker in self.workers.values():
            while worker.inbox:
                worker.take()
            assert not worker.seqs, "a worker was not told that this is wanted no more"
            assert not worker.asked
            assert not worker.offers, "a prefix stays offered without a taker"
            assert not worker.moved, "a sequence stays leased without a taker"

    # ------------------------------------------------------------ invariants

    def validate(self) -> None:
        self.machine.validate()
        live = sum(not client.outcomes for client in self.clients.values())
        assert self.machine.num_flights == live
        assert set(self.machine.view.workers) == set(self.workers)
        for view in self.machine.view.workers.values():
            outgrown = self.machine.counters["answer", "longer than predicted"] > 0
            assert view.reserved_blocks <= NUM_BLOCKS or outgrown
            assert len(view.decodes) <= MAX_RUNNING
            if self.machine.state.policy.binds_late:
                # The first prompt may be late. The last prompt was placed when only the others were
                # assigned.
                others_s = sum(claim.seconds for claim in list(view.prefills.values())[1:-1])
                assert others_s < CONFIG.prefill_backlog_s + 1.1e-3

    def _handle(self, event: RouterEvent) -> None:
        effects = self.machine.handle(event, self.now_s)
        self.recorder.record(event, self.now_s, effects)
        for effect in effects:
            match effect:
                case SendTo(worker_id, message):
                    self._send(worker_id, message)
                case Update(token_ids, outcome, request_id=request_id):
                    client = self.clients[request_id]
                    assert not client.outcomes, "an update after the end"
                    assert token_ids or outcome is not None
                    client.token_ids += token_ids
                    assert client.token_ids == client.answer[0][: len(client.token_ids)]
                    if outcome is not None:
                        self._end(client, outcome)
        self.num_events += 1
        if self.num_events % self.validates_every == 0:
            self.validate()

    def _send(self, worker_id: str, message: ToWorker) -> None:
        if isinstance(message, Prefill | Generate | Decode | OfferPrefix):
            name, _, _ = message.seq_id.partition(".")
            request = self.clients[name].request
            assert message.salt == request.salt == salt_of(request.leader or name)
        if isinstance(message, Prefill | Generate) and message.prefix is not None:
            source = message.prefix.source.worker_id
            assert source != worker_id, "a worker is to pull from itself"
            assert message.prefix.lease_id == f"{message.seq_id}.prefix"
            assert source in self.workers
        if isinstance(message, Prefill | Generate):
            self._check_follower(worker_id, message.seq_id)
        self.workers[worker_id].inbox.append(encode_frame([message]))

    def _check_follower(self, worker_id: str, seq_id: str) -> None:
        """Asserts that a follower was placed only after its leader's prompt was computed or
        failed.
        """
        name, _, attempt = seq_id.partition(".")
        leader_name = self.clients[name].request.leader
        self.placed[seq_id] = worker_id
        if leader_name is None or attempt != "0":
            return
        leader = self.clients[leader_name]
        has_lost_an_attempt = f"{leader_name}.0" not in self.machine.state.by_seq
        assert leader.outcomes or leader.token_ids or has_lost_an_attempt
        if leader.token_ids and not leader.outcomes and not has_lost_an_attempt:
            self.num_followers[worker_id == self.placed[f"{leader_name}.0"]] += 1

    def _end(self, client: Client, outcome: Outcome) -> None:
        client.outcomes.append(outcome)
        assert len(client.outcomes) == 1, "a second outcome"
        if isinstance(outcome, Finished):
            assert (client.token_ids, outcome.reason) == client.answer
        if isinstance(outcome, Rejected):
            assert not client.token_ids
        assert isinstance(outcome, Cancelled) == client.gone


class Requests(RuleBasedStateMachine):
    """A hypothesis state machine that tries many orders of events."""

    @initialize(names=st.sets(st.sampled_from(NAMES)), seed=st.integers(0, 2**32))
    def begin(self, names, seed):
        self.rng = random.Random(seed)  # source of the fake workers' random choices only
        self.world = World(validates_every=1)
        for name in sorted(names):
            self.world.join(name)

    @rule(name=st.sampled_from(NAMES))
    def join(self, name):
        self.world.join(name)

    @rule(name=st.sampled_from(NAMES))
    def lose(self, name):
        self.world.lose(name)

    @rule(
        prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=14),
        max_tokens=st.one_of(st.integers(1, 12), st.just(100)),
        stop=st.sampled_from([(), (0,), (1, 2)]),
        num_choices=st.sampled_from([1, 1, 2, 3]),
    )
    def ask(self, prompt, max_tokens, stop, num_choices):
        self.world.ask(prompt, max_tokens, stop, num_choices)

    @rule()
    def leave(self):
        self.world.leave(self.rng)

    @precondition(lambda self: self.world.workers)
    @rule(what=st.lists(st.tuples(st.integers(0, 5), st.sampled_from("ttwwwrr")), min_size=5))
    def work(self, what):
        """Lets workers take messages, work, and report, in a random order."""
        workers = list(self.world.workers.values())
        for number, act in what:
            worker = workers[number % len(workers)]
            if act == "t":
                self.world.take(worker)
            elif act == "w":
                self.world.work(worker, self.rng)
            else:
                self.world.tell(worker)

    @precondition(lambda self: self.world.workers)
    @rule(number=st.integers(0, 5))
    def give_back(self, number):
        workers = list(self.world.workers.values())
        workers[number % len(workers)].give_back(self.rng)

    @precondition(lambda self: self.world.workers)
    @rule(number=st.integers(0, 5), role=st.sampled_from(sorted(ROLES_OF_WORKERS)))
    def change_role(self, number, role):
        workers = list(self.world.workers.values())
        self.world.change_role(workers[number % len(workers)], role)

    @precondition(lambda self: self.world.workers)
    @rule(number=st.integers(0, 5))
    def report(self, number):
        workers = list(self.world.workers.values())
        workers[number % len(workers)].report(self.rng)

    @precondition(lambda self: self.world.workers)
    @rule(number=st.integers(0, 5))
    def publish(self, number):
        workers = list(self.world.workers.values())
        self.world.publish(workers[number % len(workers)], self.rng)

    @rule(seconds=st.sampled_from([0.0, 0.5, 10.0, 12.0, 25.0]))
    def pass_time(self, seconds):
        self.world.pass_time(seconds)

    def teardown(self):
        if hasattr(self, "world"):
            self.world.run_down(self.rng)


TestRequests = Requests.TestCase
TestRequests.settings = settings(deadline=None, max_examples=80, stateful_step_count=50)


def some_prompt(rng: random.Random, world: World) -> list[int]:
    """Returns a new prompt, or one that continues an earlier answer."""
    clients = list(world.clients.values())
    if clients and rng.random() < 0.5:
        earlier = rng.choice(clients)
        conversation = [*earlier.request.token_ids, *earlier.token_ids]
        return [*conversation[:13], rng.randrange(VOCAB_SIZE)]
    return [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 14))]


def make_trouble(rng: random.Random, world: World) -> None:
    """Injects one random fault."""
    trouble = rng.randrange(9)
    if trouble == 0:
        world.lose(rng.choice(NAMES))
    elif trouble == 1:
        world.leave(rng)
    elif trouble == 2 and world.workers:
        with_work = [worker for worker in world.workers.values() if worker.seqs]
        rng.choice(with_work or list(world.workers.values())).give_back(rng)
    elif trouble == 3 and world.workers:
        rng.choice(list(world.workers.values())).report(rng)
    elif trouble == 4:
        world.pass_time(rng.choice([9.0, 25.0]))
    elif trouble in (5, 6, 7) and world.workers:
        workers = list(world.workers.values())
        busy = [w for w in workers if any(seq.decoding for seq in w.seqs.values())]
        worker = rng.choice(busy or workers)
        world.change_role(worker, rng.choice(sorted(ROLES_OF_WORKERS)))


def busy_day(rng: random.Random, *, troubles: float, config: RouterConfig = CONFIG) -> World:
    """Runs many requests with random faults. Returns the world."""
    world = World(config)
    for name in ("s0", "p0", "d0", "m0", "p1", "d1", "s1"):
        world.join(name)
    for _ in range(400):
        if rng.random() < 0.25:
            prompt = some_prompt(rng, world)
            stop = rng.choice([(), (0,), (1, 2)])
            if rng.random() < 0.3:
                world.publish_next(prompt, rng)
            world.ask(prompt, rng.randint(1, 12), stop, rng.choice([1, 1, 1, 2, 3]))
        for worker in list(world.workers.values()):
            for act in (world.take, world.tell, lambda w: world.work(w, rng)):
                if rng.random() < 0.7:
                    act(worker)
            if rng.random() < 0.2:
                world.publish(worker, rng)
        if rng.random() < troubles:
            make_trouble(rng, world)
        if rng.random() < 0.1:
            world.join(rng.choice(NAMES))
        world.pass_time(0.01)
    world.run_down(rng)
    return world


@pytest.mark.parametrize("seed", range(5))
def test_without_faults_every_accepted_request_is_answered(seed):
    world = busy_day(random.Random(seed), troubles=0.0)
    outcomes = [client.outcomes[0] for client in world.clients.values()]
    assert sum(isinstance(outcome, Finished) for outcome in outcomes) > 50
    assert all(isinstance(outcome, Finished | Rejected) for outcome in outcomes)


DAYS_OF_FAULTS = seeds(25)


@cache  # cached, since two tests use the same runs
def day_of_faults(seed: int) -> tuple[list[Outcome], Counter[tuple[str, str]], Counter[bool]]:
    """Returns the outcomes of a run with faults, the machine's counters, and the followers."""
    rng = random.Random(seed)
    world = busy_day(rng, troubles=rng.choice([0.1, 0.3, 0.6]))
    outcomes = [client.outcomes[0] for client in world.clients.values()]
    return outcomes, world.machine.counters, world.num_followers


@pytest.mark.parametrize("seed", DAYS_OF_FAULTS)
def test_each_request_ends_once_and_correctly_despite_faults(seed):
    outcomes, _, _ = day_of_faults(seed)
    assert any(isinstance(outcome, Finished) for outcome in outcomes)


def day_of_flips(rng: random.Random) -> World:
    """Runs long answers on decode workers that often change their roles."""
    world = World(msgspec.structs.replace(CONFIG, move_timeout_s=0.5))
    for name in ("p0", "m0", "d0", "d1"):
        world.join(name)
    for step in range(400):
        if rng.random() < 0.2:
            world.ask(some_prompt(rng, world)[:8], rng.randint(10, 16), (), 1)
        for worker in list(world.workers.values()):
            for act in (
                world.take,
                world.tell,
                world.take,
                world.tell,
                lambda w: world.work(w, rng),
            ):
                if rng.random() < 0.9:
                    act(worker)
        if step % 5 == 0:
            worker = world.workers[rng.choice(("m0", "d0", "d1"))]
            decodes = worker.role.decodes
            roles = (Role.PREFILL, Role.DRAINED) if decodes else (ROLES[worker.name[0]],)
            world.change_role(worker, rng.choice(roles))
        copying = [w for w in world.workers.values() if any(i.endswith(".copy") for i in w.seqs)]
        if copying and rng.random() < 0.2:
            rng.choice(copying).give_back(rng)
        world.pass_time(0.01 if rng.random() < 0.95 else 0.6)
    world.run_down(rng)
    return world


class RowsCost(EverythingPays):
    """Costs with which each row makes a step much longer, so that balancing the load pays."""

    def decode_cost(self, worker: WorkerView) -> DecodeCost:
        return DecodeCost(0.001, 0.1, 0.0)


def strike_moves(rng: random.Random, world: World) -> None:
    """Injects faults into moves: kills the source or the target, changes its role, or fails the
    copy.
    """
    attempts = [f.attempt for f in world.machine.state.flights.values() if f.attempt is not None]
    ends = [i for a in attempts if a.move is not None for i in (a.decode, a.move.decode)]
    ends += [
        i for a in attempts if a.is_moved and a.kv_ready_s is None for i in (a.prefill, a.decode)
    ]
    if ends and rng.random() < 0.1:
        for _ in range(rng.choice([1, 1, 2])):
            world.lose(rng.choice(ends))
    worker = world.workers.get(rng.choice(ends)) if ends else None
    if worker is not None and rng.random() < 0.05:
        world.change_role(worker, rng.choice((Role.PREFILL, Role.DRAINED)))
    copying = [w for w in world.workers.values() if any(i.endswith(".copy") for i in w.seqs)]
    if copying and rng.random() < 0.05:
        rng.choice(copying).give_back(rng)


def day_of_lending(rng: random.Random, *names: str, tpot_s: float | None = None) -> World:
    """Runs long answers and bursts of prompts on a few fluid workers, which sometimes die."""
    config = msgspec.structs.replace(
        CONFIG, move_timeout_s=0.5, prefill_backlog_s=1e-3, slo_tpot_s=tpot_s
    )
    world = World(msgspec.structs.replace(config, max_attempts=6, max_queue=40))
    world.machine = RouterMachine(world.config, estimates=RowsCost())
    for step in range(500):
        for name in names:
            world.join(name)
        if step % 120 == 60:
            world.lose(rng.choice(names))
        if step % 5 == 0:
            for worker in world.workers.values():
                worker.report(rng, others=0.0)
        for _ in range(3 if step % 50 > 45 else rng.random() < 0.15):
            world.ask(some_prompt(rng, world)[:9], rng.randint(2, 20), (), 1)
        for worker in list(world.workers.values()):
            for act in (world.take, world.tell, world.take, world.tell):
                act(worker)
            world.work(worker, rng)
        world.pass_time(0.05)
    world.run_down(rng)
    return world


def test_fluid_workers_take_and_give_back_work_without_changing_a_token(monkeypatch):
    monkeypatch.setattr(f"{__name__}.NUM_BLOCKS", 64)
    monkeypatch.setattr(f"{__name__}.MAX_RUNNING", 12)
    counted: Counter[tuple[str, str]] = Counter()
    for seed in range(2):
        for names in (("f0", "l0", "l1"), ("f0", "d0")):
            counted += day_of_lending(random.Random(seed), *names).machine.counters
        names = ("f0", "f1", "f2", "d0")  # only a few of these workers meet the bound
        counted += day_of_lending(random.Random(seed), *names, tpot_s=0.45).machine.counters
    for reason in ("prefilled by a decode worker", "decoded by an idle prefill worker"):
        assert counted["placed", f"least TTFT, {reason}"] > 2, counted
    assert counted["moved", GIVEN_BACK] > 0, counted
    assert counted["moved", GATHERED] > 0, counted
    assert counted["ended", "finished"] > 80, counted


def day_of_joins(rng: random.Random) -> World:
    """Runs long answers on decode workers that join late, and may die at any moment of a move."""
    world = World(
        msgspec.structs.replace(CONFIG, move_timeout_s=0.5, balance_gain=0.05, max_attempts=6)
    )
    world.machine = RouterMachine(world.config, estimates=RowsCost())
    for step in range(500):
        if step % 40 == 20:
            for name in ("p0", "p1", "d0", "d1"):
                world.join(name)
                if world.workers[name].role is not ROLES[name[0]]:
                    world.change_role(world.workers[name], ROLES[name[0]])
        if step % 40 == 12:
            world.lose(rng.choice(("d0", "d1")))
        if step % 5 == 0:
            for worker in world.workers.values():
                worker.report(rng, others=0.0)
        if rng.random() < 0.2:
            world.ask(some_prompt(rng, world)[:6], rng.randint(12, 30), (), 1)
        for worker in list(world.workers.values()):
            for act in (world.take, world.tell, world.take, world.tell):
                act(worker)
            world.work(worker, rng)
        strike_moves(rng, world)
        world.pass_time(0.05 if rng.random() < 0.97 else 0.6)
    world.run_down(rng)
    return world


def test_deaths_of_either_end_of_a_balancing_move_change_no_token(monkeypatch):
    monkeypatch.setattr("router.policies.balancing.LEAST_LEFT", 1.0)
    monkeypatch.setattr("router.policies.balancing.PAYBACK", 0.0)
    monkeypatch.setattr("router.machine.moves.rule.REST_S", 0.5)
    monkeypatch.setattr("router.machine.moves.free.LOOK_EVERY_S", 0.1)
    monkeypatch.setattr("router.machine.moves.free.STALE_S", 0.1)
    monkeypatch.setattr(f"{__name__}.NUM_BLOCKS", 64)
    monkeypatch.setattr(f"{__name__}.MAX_RUNNING", 8)
    counted: Counter[tuple[str, str]] = Counter()
    for seed in range(10):
        world = day_of_joins(random.Random(seed))
        counted += world.machine.counters
    assert counted["ended", "finished"] > 300
    assert counted["moved", BALANCED] > 20
    # A move is called off if its target died or its copy did not arrive.
    assert counted["balance", "called off"] > 15
    assert counted["retried", "worker lost"] > 300
    assert counted["moved", ROLE_CHANGED] + counted["moved", DRAINED] > 0
    for reason in ("copy failed", "copy late"):
        assert counted["fallback", reason] > 0, reason


def test_role_flips_reach_all_ends_of_a_move():
    counted: Counter[tuple[str, str]] = Counter()
    for seed in range(10):
        world = day_of_flips(random.Random(seed))
        counted += world.machine.counters
    assert counted["ended", "finished"] > 300
    for reason in (ROLE_CHANGED, DRAINED):
        assert counted["moved", reason] > 5, reason
    for reason in ("nothing to copy", "copy failed", "copy late"):
        assert counted["fallback", reason] > 0, reason


def fresh_machine(config: RouterConfig) -> RouterMachine:
    return RouterMachine(config, estimates=EverythingPays())


@pytest.mark.parametrize("policy", RouterPolicy)
def test_each_policy_finishes_requests_and_replays_exactly(policy):
    config = msgspec.structs.replace(CONFIG, policy=policy, seed=7, slo_ttft_s=5.0)
    world = busy_day(random.Random(1), troubles=0.3, config=config)
    outcomes = [client.outcomes[0] for client in world.clients.values()]
    assert sum(isinstance(outcome, Finished) for outcome in outcomes) > 20
    assert list(replay(world.lines, fresh_machine)) == []


def test_faults_reach_all_outcomes_and_all_ends_of_an_offer():
    counted: Counter[tuple[str, str]] = Counter()
    followers: Counter[bool] = Counter()
    for _, counted_by_day, followers_of_day in map(day_of_faults, DAYS_OF_FAULTS):
        counted += counted_by_day
        followers += followers_of_day
    for outcome in ("finished", "rejected", "failed", "cancelled"):
        assert counted["ended", outcome] > 0, outcome
    assert counted["prefix offer", "asked"] > 100
    for source in ("worker", Medium.HOST, *LOWER_MEDIA):
        assert counted["pulled tokens", source] > 0, source
    assert counted["prefetch", "asked"] > 0
    assert counted["block events", "unknown medium"] > 100
    for reason in ("prefix not held", "prefix offer late", "prefix holder lost"):
        assert counted["fallback", reason] > 0, reason
    assert counted["retried", PREEMPTED] > 20
    assert counted["retried", ROLE_CHANGED] > 20
    assert followers[True] > 60  # placed with the leader, whose worker has the prompt
    assert (
        followers[True] > followers.total() / 3
    )  # the other followers lost their leader, or their leader's worker had no room
