"""The results of `bench kv`, computed from made-up times."""

import pytest

from bench.common.report import Peer
from bench.lab.kv.cases import KIB, KvPulls
from bench.lab.kv.contest import Handoffs, KvMeasured, TimeKey, results, warnings

CASES = KvPulls((64 * KIB,), 3).cases
MOVERS = ("shm", "zmq", "memcpy", "tcp")
BESIDE = {"shm": ["mooncake"], "zmq": ["mooncake"]}
SECONDS = {  # seconds for 64 MiB: 1/16 s is one GiB/s
    ("shm", ""): (1 / 32, 1 / 64, 1 / 48),
    ("zmq", ""): (1 / 16, 1 / 8, 1 / 16),
    ("memcpy", "c"): (1 / 64, 1 / 64, 1 / 80),
    ("memcpy", "ctypes"): (1 / 48, 1 / 48, 1 / 96),
    ("tcp", "1MiB"): (1 / 32, 1 / 32, 1 / 32),
    ("mooncake", ""): (1 / 8, 1 / 16, 1 / 8),
}
MEASURED = KvMeasured(
    seconds={
        TimeKey(mover, way, case): tuple(second / 1000 for second in seconds)
        if case.is_latency
        else seconds
        for (mover, way), seconds in SECONDS.items()
        for case in CASES
    },
    background=(0.01, 0.02, 0.01),
    versions={"mooncake": "0.3"},
)
TIMELINES = (
    {
        "kv_transfer": 0.1,
        "kv_exposed": 0.01,
        "kv_wait": 0.01,
        "decode_queue": 0,
        "first_step": 0.02,
    },
    {
        "kv_transfer": 0.3,
        "kv_exposed": 0.03,
        "kv_wait": 0.03,
        "decode_queue": 0,
        "first_step": 0.02,
    },
)
HANDOFFS = Handoffs("zmq", (TIMELINES, TIMELINES[:1]))


def by_name(measured=MEASURED, handoffs=()):
    return {
        result.name: result for result in results(measured, handoffs, movers=MOVERS, peers=BESIDE)
    }


def test_backend_has_its_limit_and_all_peers():
    shm = by_name()["shm/64KiB"]
    assert shm.runs == pytest.approx((2, 4, 3))
    assert (shm.value, shm.unit) == (pytest.approx(3), "GiB/s")
    assert shm.limit == pytest.approx(4)  # the limit is the C copy, whose median is higher
    assert shm.of_limit == pytest.approx(0.75)
    assert shm.peers == {"mooncake": Peer(pytest.approx(0.5), pytest.approx(6))}
    zmq = by_name()["zmq/64KiB"]
    assert (zmq.limit, zmq.of_limit) == (pytest.approx(2), pytest.approx(0.5))


def test_hidden_share_counts_all_transfer_time_of_a_repetition():
    found = by_name(handoffs=[HANDOFFS])
    assert found["hidden_share/zmq"].runs == pytest.approx((0.9, 0.9))
    assert found["hidden_share/zmq"].unit == "share"
    assert found["kv_transfer/zmq"].runs == pytest.approx((200, 100))
    assert found["kv_exposed/zmq"].runs == pytest.approx((20, 10))


def test_phases_after_the_handoff_are_means_in_milliseconds():
    found = by_name(handoffs=[HANDOFFS])
    phases = {name: r.runs for name, r in found.items() if name.startswith("first_token")}
    assert phases == {
        "first_token_after_handoff/kv_wait/zmq": pytest.approx((20, 10)),
        "first_token_after_handoff/decode_queue/zmq": pytest.approx((0, 0)),
        "first_token_after_handoff/first_step/zmq": pytest.approx((20, 20)),
    }


def test_timeline_without_transfer_times_gives_a_warning_and_no_share():
    plain = {name: TIMELINES[0][name] for name in ("kv_wait", "decode_queue", "first_step")}
    handoffs = [Handoffs("shm", ((plain,),), num_failed=2)]
    found = by_name(handoffs=handoffs)
    assert "hidden_share/shm" not in found
    assert found["first_token_after_handoff/kv_wait/shm"].value == pytest.approx(10)
    assert warnings(MEASURED, handoffs) == [
        "2 requests over shm failed",
        "over shm not every timeline has kv_transfer_s, kv_exposed_s: left out",
    ]
