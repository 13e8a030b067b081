"""If two workers hold a prompt's KV, one of them keeps it."""

from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import PROTOCOL_VERSION, Role, Welcome
from router.cluster.view import WorkerView
from router.policies.base import Decision
from router.policies.candidates import keeper

LAYOUT = KVLayout(16, KVFormat.BF16, (KVSection(1, 1, 16),))


def worker(name, role, *, num_blocks=100) -> WorkerView:
    return WorkerView(
        Welcome(PROTOCOL_VERSION, name, "1", role, "model", LAYOUT, num_blocks, max_running=8)
    )


def keep(prefill, decode, num_tokens=160, **cached) -> str:
    decision = Decision("slo", "", prefill.info.worker_id, decode.info.worker_id, 1, **cached)
    return keeper(prefill, decode, decision, num_tokens)


def shares(prefill, decode, number=100) -> list[int]:
    kept = [keep(prefill, decode) for _ in range(number)]
    return [kept.count("p"), kept.count("d")]


def test_equal_caches_keep_equally_much():
    assert shares(worker("p", Role.PREFILL), worker("d", Role.DECODE)) == [50, 50]


def test_a_larger_cache_keeps_more():
    p, d = worker("p", Role.PREFILL, num_blocks=300), worker("d", Role.DECODE)
    assert shares(p, d) == [75, 25]


def test_blocks_that_are_promised_are_no_room_for_others():
    p, d = worker("p", Role.PREFILL), worker("d", Role.DECODE)
    d.reserve_decode("seq", 75)
    assert shares(p, d) == [80, 20]


def test_a_full_decode_worker_still_keeps_a_little():
    p, d = worker("p", Role.PREFILL), worker("d", Role.DECODE)
    d.reserve_decode("seq", 100)
    assert 0 < shares(p, d)[1] < 10


def test_a_prompt_stays_where_most_of_it_is_cached():
    p, d = worker("p", Role.PREFILL), worker("d", Role.DECODE)
    assert all(keep(p, d, num_matched_tokens=144) == "p" for _ in range(9))
    p, d = worker("p", Role.PREFILL), worker("d", Role.DECODE)
    pulled = {"pulled_from": "d", "num_pulled_tokens": 144}
    assert all(keep(p, d, **pulled) == "d" for _ in range(9))


def test_a_worker_that_kept_nothing_for_long_catches_up_by_one_turnover_at_most():
    p, others = worker("p", Role.PREFILL), worker("d", Role.DECODE, num_blocks=10_000)
    p.turnover = 50.0
    assert keep(p, others) == "d"
    assert others.turnover == 49.0
