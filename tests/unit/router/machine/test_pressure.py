"""A worker overcommitted by gateways that do not know each other."""

import random
from dataclasses import dataclass, field

import pytest

from engine.config import RouterConfig
from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import (
    PREEMPTED,
    PROTOCOL_VERSION,
    Cancel,
    FinishReason,
    Generate,
    GivenBack,
    Limits,
    LoadReport,
    PrefillDone,
    PrefillStarted,
    RequestId,
    Role,
    Sampling,
    SeqId,
    Tokens,
    Welcome,
)
from router.machine.events import Arrived, FromWorker, SendTo, Tick
from router.machine.events import WorkerJoined as Joined
from router.machine.machine import RouterMachine
from router.machine.requests import Finished, Request, Update

BLOCK_SIZE = 16
LAYOUT = KVLayout(BLOCK_SIZE, KVFormat.FP32, (KVSection(1, 1, 4),))
STEP_S = 0.02
REPORT_EVERY_S = 1.0


@dataclass
class Gateway:
    """A router machine, and the number of tokens that its only request has received."""

    machine: RouterMachine
    num_tokens: int = 0
    outcomes: list[object] = field(default_factory=list)


@dataclass
class Running:
    """A sequence that owns blocks for all its tokens."""

    gateway: int
    length: int
    max_len: int


class SmallWorker:
    """A mixed worker that admits fitting sequences and gives back the youngest if it lacks
    blocks."""

    def __init__(self, num_blocks: int, gateways: list[Gateway]) -> None:
        self.num_blocks = num_blocks
        self.gateways = gateways
        self.waiting: dict[SeqId, Running] = {}
        self.running: dict[SeqId, Running] = {}  # oldest sequence first
        self.num_prefilled_tokens = 0
        self.num_preempted = 0
        self.now_s = 0.0

    @property
    def num_free(self) -> int:
        return self.num_blocks - sum(LAYOUT.num_blocks_for(s.length) for s in self.running.values())

    def tell(self, gateway: int, message) -> None:
        self.handle(gateway, FromWorker("m0", message))

    def handle(self, gateway: int, event) -> None:
        mine = self.gateways[gateway]
        for effect in mine.machine.handle(event, self.now_s):
            match effect:
                case SendTo(_, Generate(seq_id, token_ids, _, limits)):
                    self.waiting[seq_id] = Running(gateway, len(token_ids), limits.max_len)
                case SendTo(_, Cancel(seq_id)):
                    self.waiting.pop(seq_id, None)
                    self.running.pop(seq_id, None)
                case Update(token_ids, outcome):
                    mine.num_tokens += len(token_ids)
                    if outcome is not None:
                        mine.outcomes.append(outcome)
        mine.machine.validate()

    def step(self) -> None:
        self.admit()
        for seq_id, seq in list(self.running.items()):
            if seq_id not in self.running:
                continue  # the sequence was given back meanwhile
            if seq.length % BLOCK_SIZE == 0 and not self.num_free:
                youngest, given = self.running.popitem()
                self.num_preempted += 1
                self.tell(given.gateway, GivenBack(youngest, PREEMPTED))
                if youngest == seq_id:
                    continue
            self.advance(seq_id, seq)

    def admit(self) -> None:
        for seq_id, seq in list(self.waiting.items()):
            if LAYOUT.num_blocks_for(seq.length + 1) > self.num_free:
                return
            del self.waiting[seq_id]
            self.num_prefilled_tokens += seq.length
            seq.length += 1
            self.running[seq_id] = seq
            self.tell(seq.gateway, PrefillStarted(seq_id, 0, None))
            self.tell(seq.gateway, PrefillDone(seq_id, 1, None))

    def advance(self, seq_id: SeqId, seq: Running) -> None:
        seq.length += 1
        is_last = seq.length >= seq.max_len
        if is_last:
            del self.running[seq_id]
        self.tell(seq.gateway, Tokens(seq_id, [1], FinishReason.LENGTH if is_last else None))

    def report(self) -> None:
        load = LoadReport(self.num_free, 0, self.num_blocks - self.num_free, 0, 0, 0, 0, 0)
        for gateway in range(len(self.gateways)):
            self.tell(gateway, load)


def crowd(lengths: list[int], num_blocks: int) -> SmallWorker:
    """Each gateway submits one request of `num_tokens`. Runs until every request has an outcome."""
    gateways = [Gateway(RouterMachine(RouterConfig(max_attempts=2))) for _ in lengths]
    worker = SmallWorker(num_blocks, gateways)
    info = Welcome(PROTOCOL_VERSION, "m0", "life", Role.MIXED, "fp", LAYOUT, num_blocks, 8)
    for number, length in enumerate(lengths):
        worker.handle(number, Joined(info))
        limits = Limits(8 + length, prompt_len=8)
        request = Request(RequestId(f"r{number}"), (1,) * 8, Sampling(), limits, 0.0)
        worker.handle(number, Arrived(request))
    next_report_s = REPORT_EVERY_S
    while not all(gateway.outcomes for gateway in gateways):
        assert worker.now_s < 500.0, "they evict one another for ever"
        worker.now_s += STEP_S
        worker.step()
        for number, gateway in enumerate(gateways):
            wake_s = gateway.machine.next_wake_s()
            if wake_s is not None and wake_s <= worker.now_s:
                worker.handle(number, Tick())
        if worker.now_s >= next_report_s:
            next_report_s += REPORT_EVERY_S
            worker.report()
    return worker


@pytest.mark.parametrize("seed", range(6))
def test_answers_that_do_not_fit_together_are_completed_in_turn(seed):
    rng = random.Random(seed)
    num_blocks = rng.randint(16, 24)
    longest = num_blocks * BLOCK_SIZE - 8
    lengths = [rng.randint(longest // 2, longest) for _ in range(rng.randint(2, 3))]
    worker = crowd(lengths, num_blocks)
    assert worker.num_preempted > 0
    for gateway, length in zip(worker.gateways, lengths, strict=True):
        assert gateway.outcomes == [Finished(FinishReason.LENGTH)]
        assert gateway.num_tokens == length
    assert worker.num_preempted <= 4 * len(lengths)
