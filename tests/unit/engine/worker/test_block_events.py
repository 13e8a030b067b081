"""Block events of workers: the wire format, the event log, and the restored order."""

from typing import Any

import msgspec
import pytest

from engine.errors import ProtocolError
from engine.messages import GatewayId, Incarnation, Limits, Sampling, SeqId, WorkerId
from engine.worker import block_events
from engine.worker.block_events import (
    END_NUMBER,
    AllBlocksCleared,
    BlockRemoved,
    EventLog,
    decode_answer,
    decode_batch,
    decode_number,
    encode_number,
    topic_of,
)
from engine.worker.blocks import (
    HASH_BYTES,
    ORDINARY,
    OWNED,
    BlockHash,
    BlockPool,
    Evicted,
    Stored,
    hash_blocks,
)
from engine.worker.sequence import Sequence
from router import block_news
from router.block_news import (
    ANSWER_TIMEOUT_S,
    FIRST_PAUSE_S,
    MAX_PAUSE_S,
    OVERDUE_S,
    Apply,
    AskBatches,
    AskSnapshot,
    BlockNews,
    Counted,
    EventsMissed,
    Garbled,
    NewsEnded,
    NewsPiece,
    NewsTick,
    Published,
    apply_events,
)
from tests.kits.fakes.block_events import stored
from tests.kits.twins.prefix_map import PrefixMap

BLOCK_SIZE = 4
A, B = WorkerId("a"), WorkerId("b")


def hashes(num, first=0):
    return hash_blocks(range(first, first + BLOCK_SIZE * num), BLOCK_SIZE)


def chain(num, first=0):
    """Returns the events of `num` stored blocks of one prompt."""
    found = hashes(num, first)
    tokens = range(first, first + BLOCK_SIZE * num)
    return [
        Stored(h, parent, tokens[BLOCK_SIZE * i : BLOCK_SIZE * (i + 1)])
        for i, (h, parent) in enumerate(zip(found, [None, *found], strict=False))
    ]


def opened_log(**options):
    return EventLog(block_size=BLOCK_SIZE, **options)


def events_of(numbered):
    return [(number, decode_batch(batch)) for number, batch in numbered]


# ---------------------------------------------------------------- wire format


class VllmBatch(msgspec.Struct, array_like=True):
    """`EventBatch` of vLLM 0.32."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class VllmStored(msgspec.Struct, tag="BlockStored"):
    """`BlockStored` of vLLM 0.32, with the mandatory fields."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class VllmRemoved(msgspec.Struct, tag="BlockRemoved"):
    """`BlockRemoved` of vLLM 0.32, with the mandatory fields."""

    block_hashes: list[bytes | int]
    medium: str | None


class VllmCleared(msgspec.Struct, tag="AllBlocksCleared"):
    """`AllBlocksCleared` of vLLM 0.32."""


class VllmBlockBatch(VllmBatch):
    events: list[VllmStored | VllmRemoved | VllmCleared]


def test_a_subscriber_of_vllm_can_read_what_is_published():
    news = [*chain(2), Evicted(hashes(1)[0])]
    [(number, payload)] = opened_log(with_token_ids=True).append(news, 5.5)
    batch = msgspec.msgpack.decode(payload, type=VllmBlockBatch)
    first, second = hashes(2)
    assert (number, batch.ts) == (0, 5.5)
    assert batch.events == [
        VllmStored([first, second], None, list(range(8)), 4, None, None, None),
        VllmRemoved([first], None),
    ]
    _, piece = next(opened_log().snapshot(0.0))
    assert msgspec.msgpack.decode(piece, type=VllmBlockBatch).events == [VllmCleared()]


def test_an_event_is_a_map_that_names_its_kind_within_a_batch_that_is_an_array():
    [(_, payload)] = opened_log().append([Evicted(hashes(1)[0])], 1.0)
    assert msgspec.msgpack.decode(payload) == [
        1.0,
        [{"type": "BlockRemoved", "block_hashes": hashes(1), "medium": None}],
        0,
    ]


def test_numbers_are_eight_bytes_and_the_last_is_minus_one():
    assert encode_number(258) == b"\0\0\0\0\0\0\1\2"
    assert decode_number(encode_number(258)) == 258
    assert encode_number(END_NUMBER) == (-1).to_bytes(8, "big", signed=True)
    with pytest.raises(ProtocolError):
        decode_number(b"1")


def test_no_topic_is_the_beginning_of_anothers():
    topics = [topic_of(WorkerId(w), Incarnation(i)) for w in ("a", "ab") for i in ("1f", "2e")]
    assert not [(s, t) for s in topics for t in topics if s != t and t.startswith(s)]


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockMoved"}]]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved", "block_hashes": [b"short"]}]]),
        b"\x92\xca\0\0\0\0" + b"\x91" * 100_000,
    ],
    ids=lambda frame: repr(frame[:12]),
)
def test_invalid_batches_are_a_typed_error(frame):
    with pytest.raises(ProtocolError):
        decode_batch(frame)
    with pytest.raises(ProtocolError):
        decode_answer([encode_number(1), frame])


@pytest.mark.parametrize("length", [0, 8, HASH_BYTES - 1, HASH_BYTES, HASH_BYTES + 1])
@pytest.mark.parametrize("place", ["stored", "parent", "removed"])
def test_a_hash_of_wrong_length_is_refused(place, length):
    good, odd = BlockHash(bytes(HASH_BYTES)), BlockHash(bytes(length))
    event = {
        "stored": stored([good, odd], None, block_size=4),
        "parent": stored([good], odd, block_size=4),
        "removed": BlockRemoved([good, odd], None),
    }[place]
    frame = msgspec.msgpack.encode([1.0, [event]])
    if length == HASH_BYTES:
        assert decode_batch(frame) == [event]
        return
    with pytest.raises(ProtocolError, match="length"):
        decode_batch(frame)


def test_an_answer_ends_with_an_empty_batch():
    assert decode_answer([encode_number(END_NUMBER), b""]) is None
    with pytest.raises(ProtocolError):
        decode_answer([encode_number(END_NUMBER)])


# ---------------------------------------------------------------- events of a pool


def test_a_pool_notes_stored_and_evicted_blocks():
    pool = BlockPool(2, keeps_events=True)
    first, second = hashes(2)
    blocks = pool.allocate(2)
    pool.set_hashes([blocks[0]], [first], token_ids=[(0, 1, 2, 3)])
    pool.set_hashes([blocks[1]], [second], parent=first)
    assert pool.pop_events() == [Stored(first, None, (0, 1, 2, 3)), Stored(second, first)]
    pool.release(OWNED, blocks, ORDINARY)
    assert pool.pop_events() == []  # the block is still cached
    pool.release(OWNED, pool.allocate(1), ORDINARY)
    assert pool.pop_events() == [Evicted(second)]  # the last block of a prefix is evicted first


def test_a_duplicate_block_is_reported_once():
    pool = BlockPool(2, keeps_events=True)
    one, other = pool.allocate(2)
    [content] = hashes(1)
    pool.set_hashes([one], [content])
    pool.set_hashes([other], [content])
    assert pool.pop_events() == [Stored(content, None)]
    pool.release(OWNED, [other], ORDINARY)
    pool.release(OWNED, pool.allocate(1), ORDINARY)
    assert pool.pop_events() == []
    pool.release(OWNED, [one], ORDINARY)
    pool.release(OWNED, pool.allocate(2), ORDINARY)
    assert pool.pop_events() == [Evicted(content)]


def test_pool_without_readers_records_no_events():
    pool = BlockPool(1)
    pool.set_hashes(pool.allocate(1), hashes(1))
    assert pool.pop_events() == []
    assert pool._events is None


def test_a_sequence_reports_parent_and_tokens_of_each_block():
    pool = BlockPool(3, keeps_events=True)
    ids = SeqId("a"), GatewayId("g")
    seq = Sequence(*ids, list(range(10)), Sampling(), Limits(max_len=20), BLOCK_SIZE)
    seq.block_table = pool.allocate(3)
    seq.advance(6, pool)
    seq.advance(4, pool)
    first, second = hashes(2)
    assert pool.pop_events() == [
        Stored(first, None, [0, 1, 2, 3]),
        Stored(second, first, [4, 5, 6, 7]),
    ]


# ---------------------------------------------------------------- log of events


def test_blocks_that_follow_one_another_are_one_event():
    log = opened_log()
    other = chain(1, first=50)
    [(_, events)] = events_of(log.append([*chain(3), *other], 0.0))
    assert events == [
        stored(hashes(3), None, block_size=BLOCK_SIZE),
        stored(hashes(1, first=50), None, block_size=BLOCK_SIZE),
    ]
    evicted = [Evicted(h) for h in hashes(3)]
    [(_, events)] = events_of(log.append([*evicted[:2], *chain(1), evicted[2]], 0.0))
    assert events == [
        BlockRemoved(hashes(2), None),
        stored(hashes(1), None, block_size=BLOCK_SIZE),
        BlockRemoved(hashes(3)[2:], None),
    ]


def test_batches_are_numbered_and_never_empty():
    log = opened_log()
    assert log.append([], 0.0) == []
    assert [number for number, _ in log.append(chain(1), 0.0)] == [0]
    assert [number for number, _ in log.append(chain(1), 0.0)] == [1]
    assert log.num_batches == 2


def test_many_events_become_several_batches(monkeypatch):
    monkeypatch.setattr(block_events, "MAX_BLOCKS_PER_BATCH", 2)
    batches = events_of(opened_log().append(chain(3), 0.0))
    first, second, third = hashes(3)
    assert batches == [
        (0, [stored([first, second], None, block_size=BLOCK_SIZE)]),
        (1, [stored([third], second, block_size=BLOCK_SIZE)]),
    ]


def test_the_largest_batch_fits_into_what_a_gateway_accepts():
    block_size = 128
    tokens = [2**32 - 1] * block_size
    log = EventLog(block_size=block_size, with_token_ids=True)
    news = [Stored(bytes(12) + i.to_bytes(4, "big"), None, tokens) for i in range(4096)]
    assert len(news) == block_events.MAX_BLOCKS_PER_BATCH
    [(_, payload)] = log.append(news, 0.0)
    assert len(payload) <= block_events.MAX_BATCH_BYTES


def test_recent_batches_can_be_requested_from_any_number_on():
    log = opened_log(max_batches=3)
    sent = [numbered for i in range(5) for numbered in log.append(chain(1, first=i), 0.0)]
    assert log.since(3) == sent[3:]
    assert log.since(0) == sent[2:]  # the older batches were dropped
    assert log.since(5) == log.since(END_NUMBER) == []


def test_kept_batches_are_bounded_in_bytes():
    log = opened_log(max_kept_bytes=1000)
    sent = [numbered for i in range(50) for numbered in log.append(chain(1, first=i), 0.0)]
    kept = log.since(0)
    assert kept == sent[-len(kept) :]
    assert 1000 - len(kept[0][1]) < sum(len(batch) for _, batch in kept) <= 1000


def test_a_snapshot_holds_all_cached_blocks(monkeypatch):
    monkeypatch.setattr(block_events, "MAX_BLOCKS_PER_BATCH", 2)
    log = opened_log()
    log.append(chain(4), 0.0)
    log.append([Evicted(hashes(4)[3])], 0.0)
    pieces = log.snapshot(0.0)
    log.append(chain(1, first=70), 0.0)  # later events do not change the snapshot
    first, second, third = hashes(3)
    assert events_of(pieces) == [
        (3, [AllBlocksCleared(), stored([first, second], None, block_size=BLOCK_SIZE)]),
        (3, [stored([third], second, block_size=BLOCK_SIZE)]),
    ]


def test_an_empty_snapshot_is_sent():
    assert events_of(opened_log().snapshot(0.0)) == [(0, [AllBlocksCleared()])]


# ---------------------------------------------------------------- restored order


CLEARED = AllBlocksCleared()


def told(i):
    return [stored(hashes(1, first=i), None, block_size=BLOCK_SIZE)]


def following(number=0):
    """Returns a feed that has received its snapshot; `number` is that of the next batch."""
    news = BlockNews()
    assert news.open(0.0) == [AskSnapshot()]
    assert news.handle(NewsPiece(number, [CLEARED]), 0.0) == []
    assert news.handle(NewsEnded(), 0.0) == [Apply([CLEARED])]
    assert news.next_wake_s() is None
    assert news.is_following
    return news


def test_batches_in_order_are_applied_at_once():
    news = following(7)
    assert news.handle(Published(7, told(1)), 0.0) == [Apply(told(1))]
    assert news.handle(Published(8, told(2)), 0.0) == [Apply(told(2))]
    assert news.handle(Counted(9), 100.0) == []
    assert news.handle(NewsTick(), 200.0) == []
    news.validate()


def test_a_missing_batch_is_requested_and_later_ones_wait():
    news = following()
    assert news.handle(Published(2, told(2)), 0.0) == [AskBatches(0)]
    # the missing batch has been requested already
    assert news.handle(Published(3, told(3)), 0.0) == []
    assert news.handle(NewsPiece(0, told(0)), 0.0) == [Apply(told(0))]
    assert news.handle(NewsPiece(1, told(1)), 0.0) == [Apply(told(i)) for i in (1, 2, 3)]
    assert news.handle(NewsPiece(2, told(2)), 0.0) == []
    assert news.handle(NewsEnded(), 0.0) == []
    assert (news.is_following, news.next_wake_s()) == (True, None)


def test_a_lost_last_batch_is_noticed_by_the_workers_count():
    news = following()
    news.handle(Published(0, told(0)), 0.0)
    assert news.handle(Counted(2), 1.0) == []  # the batch may still arrive
    assert news.next_wake_s() == 1.0 + OVERDUE_S
    assert news.handle(NewsTick(), 1.0 + OVERDUE_S) == [AskBatches(1)]
    assert news.handle(NewsPiece(1, told(1)), 2.0) == [Apply(told(1))]
    assert news.handle(NewsEnded(), 2.0) == []
    assert news.next_wake_s() is None


def test_a_batch_on_its_way_is_not_requested():
    news = following()
    news.handle(Counted(1), 1.0)
    assert news.handle(Published(0, told(0)), 1.0 + OVERDUE_S / 2) == [Apply(told(0))]
    assert news.handle(NewsTick(), 9.0) == []


def test_a_request_without_new_batches_ends_in_a_snapshot():
    news = following()
    news.handle(Counted(1), 0.0)
    assert news.handle(NewsTick(), OVERDUE_S) == [AskBatches(0)]
    assert news.handle(NewsEnded(), 1.0) == [AskSnapshot()]


def test_an_outdated_snapshot_changes_nothing():
    news = following()
    assert news.handle(Published(1, told(1)), 0.0) == [AskBatches(0)]
    assert news.handle(NewsEnded(), 0.0) == [AskSnapshot()]
    assert news.handle(NewsPiece(1, [CLEARED, *told(0)]), 0.0) == []
    # a late batch
    assert news.handle(Published(0, told(0)), 0.0) == [Apply(told(0)), Apply(told(1))]
    assert news.handle(NewsEnded(), 0.0) == []
    assert news.is_following


def test_every_piece_of_an_answer_gives_the_next_one_time():
    news = BlockNews()
    news.open(0.0)
    news.handle(NewsPiece(1, [CLEARED]), 0.9 * ANSWER_TIMEOUT_S)
    assert news.handle(NewsTick(), 1.8 * ANSWER_TIMEOUT_S) == []
    assert news.handle(NewsEnded(), 1.8 * ANSWER_TIMEOUT_S) == [Apply([CLEARED])]


def test_a_silent_worker_is_asked_again_ever_less_often():
    news = following()
    news.handle(Published(1, told(1)), 0.0)
    assert news.handle(NewsTick(), ANSWER_TIMEOUT_S) == [EventsMissed("no answer in time")]
    pauses, now_s = [], ANSWER_TIMEOUT_S
    for _ in range(7):
        asked_s = news.next_wake_s()
        assert news.handle(NewsTick(), asked_s) == [AskSnapshot()]
        pauses.append(asked_s - now_s)
        now_s = news.next_wake_s()
        assert news.handle(NewsTick(), now_s) == []  # the silence has been reported already
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == MAX_PAUSE_S
    now_s = news.next_wake_s()
    news.handle(NewsTick(), now_s)
    news.handle(NewsPiece(9, [CLEARED, *told(1)]), now_s)
    assert news.handle(NewsEnded(), now_s) == [Apply([CLEARED, *told(1)])]
    assert news.handle(Published(10, told(2)), now_s) == [AskBatches(9)]
    later_s = now_s + ANSWER_TIMEOUT_S
    assert news.handle(NewsTick(), later_s) == [EventsMissed("no answer in time")]
    assert news.next_wake_s() == later_s + FIRST_PAUSE_S


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([Garbled("why")], "why"),
        ([NewsEnded()], "no whole snapshot"),
        ([NewsPiece(1, told(1)), NewsEnded()], "no whole snapshot"),
        ([NewsPiece(1, []), NewsEnded()], "no whole snapshot"),
        ([NewsPiece(1, [CLEARED]), NewsPiece(2, [CLEARED])], "pieces of two snapshots"),
    ],
)
def test_impossible_answers_are_ignored(events, reason):
    news = BlockNews()
    news.open(0.0)
    effects = [effect for event in events for effect in news.handle(event, 0.0)]
    assert effects == [EventsMissed(reason)]
    assert news.next_wake_s() == FIRST_PAUSE_S
    news.validate()


def test_an_unrequested_answer_changes_nothing():
    news = following()
    assert news.handle(NewsPiece(0, told(1)), 0.0) == []
    assert news.handle(NewsEnded(), 0.0) == []


def test_a_bounded_number_of_batches_waits_for_a_missing_one(monkeypatch):
    monkeypatch.setattr(block_news, "MAX_EARLY_BATCHES", 2)
    news = following()
    for number in (1, 2, 3):
        news.handle(Published(number, told(number)), 0.0)
    news.validate()
    assert news.handle(NewsPiece(0, told(0)), 0.0) == [Apply(told(i)) for i in (0, 1, 2)]
    news.handle(NewsEnded(), 0.0)  # the end of a reply from before batch 3 was published
    assert not news.is_following
    assert news.handle(NewsTick(), OVERDUE_S) == [AskBatches(3)]


# ---------------------------------------------------------------- blocks known from events


def test_events_of_gone_workers_or_unknown_blocks_are_harmless():
    index = PrefixMap()
    index.add(A, 6)
    for worker_id in (A, B):
        apply_events(index, worker_id, [BlockRemoved(hashes(1), None), AllBlocksCleared()])
    apply_events(index, B, told(1))
    assert index.longest(hashes(1, first=1)) == {}
    index.validate()
