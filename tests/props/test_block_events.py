"""One worker's pool, and two gateways that follow it over a network that loses and repeats batches.

The worker's side is the real pool and log; a gateway's side is the real `BlockNews` and
`PrefixMap`. The network may deliver the batches in any order, twice, or never. The worker may
restart. A gateway that has received every batch up to a number knows exactly the blocks that were
cached at that batch. Once the network is quiet, a gateway knows exactly the cached blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.messages import WorkerId
from engine.worker import block_events
from engine.worker.block_events import BlockStored, EventLog, Numbered, decode_batch
from engine.worker.blocks import ORDINARY, OWNED, BlockHash, BlockId, BlockPool
from router import block_news
from router.block_news import (
    Apply,
    AskBatches,
    AskSnapshot,
    BlockNews,
    Counted,
    EventsMissed,
    NewsEffect,
    NewsEnded,
    NewsEvent,
    NewsPiece,
    NewsTick,
    Published,
    apply_events,
)
from tests.kits.twins.prefix_map import PrefixMap

WORKER = WorkerId("w")
NUM_BLOCKS = 4
HASHES = [BlockHash(bytes([i] * 16)) for i in range(6)]


@pytest.fixture(autouse=True, scope="module")
def _small_bounds():
    """Makes the limits of the log and of gateways so small that the test reaches all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_events, "MAX_BLOCKS_PER_BATCH", 2)
        patch.setattr(block_news, "MAX_EARLY_BATCHES", 3)
        yield


@dataclass
class Gateway:
    """A gateway in one session with the worker."""

    news: BlockNews = field(default_factory=BlockNews)
    index: PrefixMap = field(default_factory=PrefixMap)
    # batches that the network has not delivered
    batches: list[Numbered] = field(default_factory=list)
    # the gateway's last unanswered request; empty without one
    asks: list[AskBatches | AskSnapshot] = field(default_factory=list)
    # The pieces of the worker's answer, in order, without the end marker.
    answer: list[Numbered] = field(default_factory=list)
    is_answered: bool = False
    is_unconfirmed: bool = False

    def perform(self, effects: Sequence[NewsEffect]) -> None:
        for effect in effects:
            match effect:
                case Apply(events):
                    apply_events(self.index, WORKER, events)
                    self.is_unconfirmed = False
                case AskBatches() | AskSnapshot():
                    self.asks, self.answer, self.is_answered = [effect], [], False
                case EventsMissed():
                    assert not self.is_unconfirmed, "it was said twice"
                    self.asks, self.answer, self.is_answered = [], [], False
                    self.is_unconfirmed = True

    def knows(self) -> set[BlockHash]:
        return {h for h in HASHES if self.index.longest([h])}


class TellingWorker(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.num_steps = 0
        self.start()

    def start(self) -> None:
        """Starts the worker, and opens a session with it for each gateway."""
        self.pool = BlockPool(NUM_BLOCKS, keeps_events=True)
        self.log = EventLog(block_size=1, max_batches=3)
        self.held: list[BlockId] = []
        self.published: list[Numbered] = []
        self.states: list[set[BlockHash]] = [set()]  # the cached blocks before each batch
        self.gateways = [Gateway(), Gateway()]
        for gateway in self.gateways:
            gateway.index.add(WORKER, NUM_BLOCKS)
            gateway.perform(gateway.news.open(self.now_s))
        self.answer(0)  # the first gateway gets its snapshot at once
        self.deliver_answer(0, 2)

    def handle(self, gateway: Gateway, event: NewsEvent) -> None:
        gateway.perform(gateway.news.handle(event, self.now_s))

    # ------------------------------------------------------------ the worker

    @rule(contents=st.lists(st.sampled_from([*HASHES, None]), max_size=4), data=st.data())
    def work(self, contents, data):
        """Runs a step: releases some blocks and fills other blocks, which may evict cached
        blocks.
        """
        self.num_steps += 1
        kept = data.draw(st.lists(st.sampled_from(self.held), max_size=1)) if self.held else []
        self.pool.release(OWNED, [block for block in self.held if block not in kept], ORDINARY)
        self.held = kept
        contents = contents[: self.pool.num_idle]
        for block, content in zip(self.pool.allocate(len(contents)), contents, strict=True):
            self.held.append(block)
            if content is not None:
                self.pool.set_hashes([block], [content], parent=data.draw(st.sampled_from(HASHES)))
        self.publish()

    def publish(self) -> None:
        for number, payload in self.log.append(self.pool.pop_events(), 0.0):
            state = set(self.states[-1])
            for event in decode_batch(payload):
                change = state.update if isinstance(event, BlockStored) else state.difference_update
                change(event.block_hashes)
            self.states.append(state)
            self.published.append((number, payload))
            for gateway in self.gateways:
                gateway.batches.append((number, payload))
        assert self.states[-1] == {h for h in HASHES if self.pool.match([h])}

    @precondition(lambda self: self.num_steps > 12)
    @rule()
    def restart(self):
        """Restarts the worker; gateways drop its state and open new sessions."""
        self.num_steps = 0
        self.start()

    # ------------------------------------------------------------ the network

    @rule(gateway=st.integers(0, 1), is_lost=st.booleans(), data=st.data())
    def deliver(self, gateway, is_lost, data):
        """Delivers any waiting batch, even before older ones, or loses it."""
        there = self.gateways[gateway]
        if there.batches:
            index = data.draw(st.integers(0, len(there.batches) - 1))
            number, payload = there.batches.pop(index)
            if not is_lost:
                self.handle(there, Published(number, decode_batch(payload)))

    @precondition(lambda self: self.published)
    @rule(gateway=st.integers(0, 1), data=st.data())
    def deliver_again(self, gateway, data):
        """Delivers any published batch once more, or late."""
        number, payload = data.draw(st.sampled_from(self.published))
        self.handle(self.gateways[gateway], Published(number, decode_batch(payload)))

    @rule(gateway=st.integers(0, 1), num=st.integers(1, 9))
    def deliver_in_order(self, gateway, num):
        there = self.gateways[gateway]
        now, there.batches = there.batches[:num], there.batches[num:]
        for number, payload in now:
            self.handle(there, Published(number, decode_batch(payload)))

    @rule(gateway=st.integers(0, 1))
    def answer(self, gateway):
        """Delivers the worker's whole answer to a gateway's request."""
        there = self.gateways[gateway]
        if there.asks:
            there.answer = self.answer_to(there.asks.pop())
            there.is_answered = True

    def answer_to(self, ask: AskBatches | AskSnapshot) -> list[Numbered]:
        if isinstance(ask, AskBatches):
            return self.log.since(ask.first)
        return list(self.log.snapshot(0.0))

    @rule(gateway=st.integers(0, 1), num=st.integers(1, 4))
    def deliver_answer(self, gateway, num):
        """Delivers pieces of the worker's answer in order, as a stream does."""
        for _ in range(num):
            self.deliver_piece(self.gateways[gateway])

    def deliver_piece(self, there: Gateway) -> None:
        if there.answer:
            number, payload = there.answer.pop(0)
            self.handle(there, NewsPiece(number, decode_batch(payload)))
        elif there.is_answered:
            there.is_answered = False
            self.handle(there, NewsEnded())

    @rule(gateway=st.integers(0, 1), seconds=st.sampled_from([0.1, 1.0, 10.0]))
    def wait(self, gateway, seconds):
        """Advances the clock by ten seconds, so that unanswered requests fail."""
        self.now_s += seconds
        self.handle(self.gateways[gateway], NewsTick())

    @rule(gateway=st.integers(0, 1))
    def count(self, gateway):
        self.handle(self.gateways[gateway], Counted(self.log.num_batches))

    @invariant()
    def all_is_sound(self):
        self.pool.validate()
        for gateway in self.gateways:
            gateway.news.validate()
            gateway.index.validate()
            if gateway.news._next is not None:  # the gateway has received all earlier batches
                assert gateway.knows() == self.states[gateway.news._next]

    def teardown(self) -> None:
        """Advances the clock and answers every request, so that gateways know all cached blocks."""
        for number, gateway in enumerate(self.gateways):
            gateway.batches.clear()  # undelivered batches are not needed
            for _ in range(20):
                self.count(number)
                self.answer(number)
                while gateway.is_answered:
                    self.deliver_piece(gateway)
                self.wait(number, 2.0)
            assert gateway.news.is_following
            assert gateway.news.next_wake_s() is None
            assert not gateway.is_unconfirmed
            assert gateway.knows() == self.states[-1]


TestTellingWorker = TellingWorker.TestCase
TestTellingWorker.settings = settings(max_examples=150, stateful_step_count=40)
