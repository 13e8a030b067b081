"""Block events over real sockets, from a worker's publisher to the gateways' feeds."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import zmq

from deploy.worker.block_publisher import BlockPublisher
from engine.clock import MonotonicClock
from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import (
    PROTOCOL_VERSION,
    EventsAddress,
    Incarnation,
    Role,
    Welcome,
    WorkerId,
)
from engine.net.curve import Channel, Doorkeeper, client_keys, secure_server, server_keys
from engine.net.trust import Secret
from engine.worker.block_events import (
    END_NUMBER,
    EventLog,
    decode_batch,
    decode_number,
    encode_number,
    topic_of,
)
from engine.worker.blocks import BlockHash, Evicted, Stored, hash_blocks
from router import block_feed, block_news
from router.block_feed import BlockFeed
from router.block_news import Apply, EventsMissed, apply_events
from tests.kits.router.scripted_workers import ScriptedWorker, serving
from tests.kits.services.cluster import until
from tests.kits.twins.prefix_map import PrefixMap

SECRET = Secret("internal token")
WORKER = WorkerId("w")
LIFE = Incarnation("0123456789abcdef")
BLOCK_SIZE = 4
LAYOUT = KVLayout(BLOCK_SIZE, KVFormat.FP32, (KVSection(1, 1, 4),))
NUM_BLOCKS = 10_000
IN_TIME_S = 20.0


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def hashes(num: int, first: int = 0) -> list[BlockHash]:
    return hash_blocks(range(first, first + BLOCK_SIZE * num), BLOCK_SIZE)


def chain(num: int, first: int = 0, token_ids: Sequence[int] = ()) -> list[Stored]:
    found = hashes(num, first)
    return [Stored(h, p, token_ids) for h, p in zip(found, [None, *found], strict=False)]


@dataclass
class Gateway:
    """A gateway's feed of one worker, and the events that the gateway applied."""

    info: Welcome
    index: PrefixMap = field(default_factory=PrefixMap)
    counted: Counter[str] = field(default_factory=Counter)
    unheard: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.index.add(WORKER, NUM_BLOCKS)
        assert self.info.events is not None
        self.feed = BlockFeed(
            self.info,
            self.info.events,
            secret=SECRET,
            clock=MonotonicClock(),
            on_news=self._take,
            count=lambda what: self.counted.update([what]),
        )

    def _take(self, news: Apply | EventsMissed) -> None:
        match news:
            case Apply(events):
                apply_events(self.index, WORKER, events)
            case EventsMissed(reason):
                self.unheard.append(reason)

    def num_known(self, blocks: Sequence[BlockHash]) -> int:
        return self.index.longest(blocks).get(WORKER, 0)


def welcome(events: EventsAddress, incarnation: Incarnation = LIFE) -> Welcome:
    who = (PROTOCOL_VERSION, WORKER, incarnation, Role.MIXED, "model", LAYOUT)
    return Welcome(*who, num_blocks=NUM_BLOCKS, max_running=4, events=events)


def publisher(**options: Any) -> BlockPublisher:
    log = EventLog(block_size=BLOCK_SIZE, with_token_ids=True)
    who = {"worker_id": WORKER, "incarnation": LIFE}
    return BlockPublisher(log, secret=SECRET, clock=MonotonicClock(), **who, **options)


@contextmanager
def publishing(**options: Any) -> Iterator[tuple[BlockPublisher, EventsAddress]]:
    source = publisher(**options)
    address = source.open()
    try:
        yield source, address
    finally:
        source.close()


@contextmanager
def opened_context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)


def trusted_client(socket: "zmq.Socket[bytes]") -> None:
    """Sets the three keys that an external indexer receives before it connects."""
    mine = client_keys(SECRET, Channel.BLOCK_EVENTS)
    socket.set(zmq.CURVE_SERVERKEY, server_keys(SECRET, Channel.BLOCK_EVENTS).public)
    socket.set(zmq.CURVE_PUBLICKEY, mine.public)
    socket.set(zmq.CURVE_SECRETKEY, mine.secret)


@asynccontextmanager
async def following(*gateways: Gateway) -> AsyncIterator[None]:
    with opened_context() as context:
        for gateway in gateways:
            gateway.feed.open(context)
        try:
            yield
        finally:
            for gateway in gateways:
                gateway.feed.close()


# ---------------------------------------------------------------- publisher of one worker


def test_followers_learn_stored_and_evicted_blocks():
    async def test() -> None:
        with publishing() as (source, address):
            source.publish(chain(3))  # no subscriber is connected yet
            gateways = [Gateway(welcome(address)), Gateway(welcome(address))]
            async with following(*gateways):
                for gateway in gateways:
                    await until(lambda g=gateway: g.num_known(hashes(3)) == 3, "all is known")
                source.publish(chain(1, first=90))
                source.publish([Evicted(hashes(3)[2])])
                for gateway in gateways:
                    # like a report over the gateway's session
                    gateway.feed.counted(source.num_batches)
                    await until(lambda g=gateway: g.num_known(hashes(3)) == 2, "it is taken back")
                    assert gateway.num_known(hashes(1, first=90)) == 1
                    assert gateway.feed.is_following
                    assert gateway.unheard == []

    run(test)


@pytest.mark.parametrize(("num_batches", "means"), [(150, "batches"), (400, "snapshot")])
def test_slow_subscriber_recovers_lost_batches(monkeypatch, num_batches, means):
    """Publishes batches of 100 kB, so that buffers overflow. About 160 batches can be replayed."""
    monkeypatch.setattr(block_feed, "MAX_UNREAD_BATCHES", 2)
    token_ids = [2**32 - 1] * 20_000

    async def test() -> None:
        with publishing(max_unread_batches=2) as (source, address):
            gateway = Gateway(welcome(address))
            async with following(gateway):
                await until(lambda: gateway.feed.is_following, "it follows")
                first = [chain(1, first=i, token_ids=token_ids) for i in range(num_batches)]
                for news in first:  # the event loop does not read during this
                    source.publish(news)
                gateway.feed.counted(source.num_batches)
                blocks = [news[0].block_hash for news in first]
                await until(
                    lambda: sum(gateway.num_known([h]) for h in blocks) == num_batches,
                    "all is known",
                    IN_TIME_S,
                )
                assert gateway.counted["batches asked for"] >= 1
                assert (gateway.counted["snapshot asked for"] > 1) == (means == "snapshot")
                assert gateway.unheard == []
                source.publish(chain(1, first=9000))  # the subscriber follows new batches again
                await until(lambda: gateway.num_known(hashes(1, first=9000)) == 1, "it follows")

    run(test)


def test_vllm_subscriber_gets_batches_and_replays():
    async def test() -> None:
        with publishing() as (source, address), opened_context() as context:
            batches, asked = context.socket(zmq.SUB), context.socket(zmq.DEALER)
            for socket in (batches, asked):
                socket.set(zmq.RCVTIMEO, 10_000)
                trusted_client(socket)
            batches.set(zmq.SUBSCRIBE, b"kv@")
            batches.connect(address.published)
            asked.connect(address.asked)
            for first in range(3):
                source.publish(chain(1, first=first))

            def ask_for(number: int) -> list[list[bytes]]:
                asked.send_multipart((b"", encode_number(number)))
                answer = [asked.recv_multipart()]
                while answer[-1][1] != encode_number(END_NUMBER):
                    answer.append(asked.recv_multipart())
                return answer

            clock = MonotonicClock()
            end_s = clock.now_s() + IN_TIME_S
            answer = await asyncio.to_thread(ask_for, 1)
            # The publisher is still sending the last batches.
            while len(answer) < 3 and clock.now_s() < end_s:
                answer = await asyncio.to_thread(ask_for, 1)
            assert [decode_number(frames[1]) for frames in answer[:-1]] == [1, 2]
            assert answer[-1] == [b"", encode_number(END_NUMBER), b""]
            [event] = decode_batch(answer[0][2])
            assert event.block_hashes == hashes(1, first=1)

            def next_batch() -> list[bytes]:
                return batches.recv_multipart()

            reading = asyncio.create_task(asyncio.to_thread(next_batch))
            while not reading.done():  # a subscription may take a moment to become active
                source.publish(chain(1))
                await asyncio.wait([reading], timeout=0.05)
            topic, number, payload = reading.result()
            assert topic == topic_of(WORKER, LIFE)
            assert decode_number(number) >= 3
            [event] = decode_batch(payload)
            assert event.block_hashes == hashes(1)

    run(test)


# ---------------------------------------------------------------- failures


@pytest.fixture
def _impatient(monkeypatch):
    monkeypatch.setattr(block_news, "ANSWER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(block_news, "FIRST_PAUSE_S", 0.05)


@pytest.mark.usefixtures("_impatient")
def test_events_are_out_of_date_until_the_publisher_answers():
    async def test() -> None:
        probe = publisher()
        address = probe.open()
        probe.close()  # no worker listens at this address
        gateway = Gateway(welcome(address))
        async with following(gateway):
            await until(lambda: gateway.unheard == ["no answer in time"], "it is unheard")
            await until(lambda: gateway.counted["snapshot asked for"] > 2, "it is asked again")
            assert gateway.counted["unheard"] == 1

    run(test)


@pytest.mark.usefixtures("_impatient")
def test_events_of_a_restarted_worker_at_the_address_are_ignored(caplog):
    async def test() -> None:
        with publishing() as (source, address):
            gateway = Gateway(welcome(address, Incarnation("another")))
            async with following(gateway):
                source.publish(chain(2))
                await until(lambda: gateway.unheard == ["no answer in time"], "it is unheard")
                assert gateway.num_known(hashes(2)) == 0

    with caplog.at_level(logging.WARNING):
        run(test)
    assert "the request is for an earlier incarnation of this worker" in caplog.text


@pytest.mark.usefixtures("_impatient")
def test_unreadable_batch_leads_to_a_snapshot():
    async def test() -> None:
        with publishing() as (source, address), opened_context() as context:
            liar = context.socket(zmq.PUB)
            Doorkeeper(SECRET, Channel.BLOCK_EVENTS, MonotonicClock()).open(context)
            secure_server(liar, SECRET, Channel.BLOCK_EVENTS, max_message_bytes=256)
            port = liar.bind_to_random_port("tcp://127.0.0.1")
            source.publish(chain(2))
            lies = msgspec.structs.replace(address, published=f"tcp://127.0.0.1:{port}")
            gateway = Gateway(welcome(lies))
            async with following(gateway):
                await until(lambda: gateway.num_known(hashes(2)) == 2, "all is known")

                def has_noticed() -> bool:
                    liar.send_multipart((topic_of(WORKER, LIFE), encode_number(1), b"\xc1"))
                    return bool(gateway.unheard)

                await until(has_noticed, "it is unheard")
                assert gateway.unheard[0].startswith("bad batch of block events")
                await until(lambda: gateway.feed.is_following, "it was asked for all")

    run(test)


@pytest.mark.parametrize(
    "frames", [(b"",), (b"", b""), (b"", b"1"), (b"", b"x" * 100), (b"", b"1" * 8, b"")]
)
def test_invalid_requests_for_events_are_ignored(frames):
    async def test() -> None:
        with publishing() as (_, address), opened_context() as context:
            asked = context.socket(zmq.DEALER)
            trusted_client(asked)
            asked.connect(address.asked)
            asked.send_multipart(frames)
            # answered at once, so the first request was not answered
            asked.send_multipart((b"", encode_number(0)))
            await until(lambda: bool(asked.poll(0)), "the other is answered")
            assert asked.recv_multipart() == [b"", encode_number(END_NUMBER), b""]
            assert not asked.poll(50)

    run(test)


def test_worker_without_events_is_counted():
    async def test() -> None:
        async with serving(ScriptedWorker("m0")) as r:
            assert r.counters()["block events", "not offered"] == 1

    run(test)
