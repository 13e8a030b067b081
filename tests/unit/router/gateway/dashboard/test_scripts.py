"""Scripts of the dashboard without a DOM: tiles, lanes, and views of several gateways.

Skipped without Node.
"""

import pytest

from tests.kits.services.scripts import NODE, called_scripts

pytestmark = pytest.mark.skipif(NODE is None, reason="needs node")

SAMPLE = {
    "at_s": 1.0,
    "unix": 101.0,
    "queue": 0,
    "in_flight": 1,
    "ended": 0,
    "good": 0,
    "unbounded": 0,
    "prompt_tokens": 0,
    "answer_tokens": 5,
    "missed": {},
    "ttft": None,
    "tpot": None,
    "waiting_s": 0.0,
    "num_stalled": 0,
}
STATE = {
    "health": {"level": "good", "word": "Ready", "reasons": ["as wanted"]},
    "now_s": 100.0,
    "has_controller": True,
    "cluster": {"planner": "off", "max_workers": 4},
    "bounds": {"ttft_s": None, "tpot_s": None},
    "pools": [{"version": "v1", "role": "decode", "wanted": 2, "serving": 2}],
    "workers": [{"worker_id": "d0", "role": "decode"}, {"worker_id": "d1", "role": "decode"}],
    "queue": 0,
    "queue_s": 0.0,
    "in_flight": 1,
    "requests": [],
    "running": [],
    "samples": [SAMPLE],
}


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with called_scripts(tmp_path_factory.mktemp("scripts")) as call:
        yield call


@pytest.fixture
def tiles(node):
    def found(**changes):
        rows = node("dashboard/tiles.js", "tilesOf", {**STATE, **changes})
        return {name: (value, note, kind) for name, value, note, kind in rows}

    return found


@pytest.fixture
def goodput(node):
    return lambda **fields: node("dashboard/tiles.js", "goodputOf", [{**SAMPLE, **fields}])


def test_goodput_without_a_bound_says_so(goodput):
    assert goodput(ended=4, unbounded=4) == ["–", "no bound set; 4 requests ended", ""]
    value, note, kind = goodput(ended=4, unbounded=3, missed={"failed": 1})
    assert (value, note, kind) == ("–", "no bound set; 1 of 4 requests failed", "bad")
    assert goodput(ended=2, missed={"failed": 2}) == ["0 %", "all 2 requests failed", "bad"]
    assert goodput() == ["–", "no request ended", ""]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"ended": 100, "good": 100}, ["100 %", "100 of 100 in bounds", ""]),
        ({"ended": 100, "good": 95}, ["95 %", "95 of 100 in bounds", "warn"]),
        ({"ended": 100, "good": 89}, ["89 %", "89 of 100 in bounds", "bad"]),
        ({"ended": 9, "good": 4, "unbounded": 5}, ["100 %", "4 of 4 in bounds, 5 without", ""]),
    ],
)
def test_goodput_is_of_requests_with_bounds(goodput, fields, expected):
    assert goodput(**fields) == expected


def test_the_state_is_told_with_its_worst_reasons(tiles):
    health = {"level": "bad", "word": "Degraded", "reasons": ["a", "b", "c"]}
    assert tiles(health=health)["State"] == ("Degraded", "a, b, +1 more", "bad")


def test_unknown_or_missing_workers_are_no_good_sign(tiles):
    assert tiles()["Workers"] == ("2 / 2", "connected / wanted", "")
    assert tiles(pools=None)["Workers"] == ("2 / ?", "wanted ones are unknown", "warn")
    assert tiles(workers=STATE["workers"][:1])["Workers"][::2] == ("1 / 2", "warn")
    assert tiles(workers=[])["Workers"][::2] == ("0 / 2", "bad")
    assert tiles(has_controller=False)["Planner"] == ("–", "no controller reports", "warn")


def test_answers_that_stand_still_and_long_waits_are_warnings(tiles):
    stalled = tiles(samples=[{**SAMPLE, "num_stalled": 45, "answer_tokens": 0}])
    assert stalled["Per token, p50"][1:] == ("45 answers stand still", "warn")
    assert stalled["In flight"] == ("1", "0 tokens/s", "warn")
    waits = tiles(samples=[{**SAMPLE, "waiting_s": 12.0}])
    assert waits["First token, p50"] == ("–", "one waits for 12.0 s", "warn")
    bounds = {"ttft_s": 0.5, "tpot_s": None}
    waits = tiles(samples=[{**SAMPLE, "waiting_s": 0.6}], bounds=bounds)
    assert waits["First token, p50"][2] == "warn"
    assert tiles()["First token, p50"] == ("–", "p95 –, no bound set", "")


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ({"status": "ready"}, ["● Ready. Version 1", "good"]),
        ({"status": "ready", "troubles": ["a", "b"]}, ["● Ready, but: a; b. Version 1", "warn"]),
        ({"status": "not ready", "reason": "no worker"}, ["● Not ready: no worker", "bad"]),
        (
            {"status": "not ready", "reason": "no worker", "troubles": ["a"]},
            ["● Not ready: no worker; a", "bad"],
        ),
    ],
)
def test_the_landing_page_tells_troubles_beside_readiness(node, answer, told):
    assert node("shared/text.js", "readiness", answer, "1") == told


def request(name, *segments, received_s=0.0, runs=True):
    return {"id": name, "received_s": received_s, "segments": segments, "runs": runs}


def lanes(node, *requests, since=0.0):
    return node("dashboard/depth.js", "groupsOf", requests, since)


def test_attempts_are_in_their_own_lanes(node):
    one = request("r", ["d0", "decode_steps", 1, 4], ["d1", "decode_steps", 11.7, 20], received_s=5)
    found = lanes(node, one)
    assert found["d0"][0]["segments"] == [["decode_steps", 6, 9]]
    assert found["d1"][0]["segments"] == [["decode_steps", 16.7, 25]]
    assert list(lanes(node, one, since=10.0)) == ["d1"]


def test_requests_at_the_same_time_are_counted(node):
    requests = [request(str(i), ["d0", "decode_steps", i / 100, 10]) for i in range(45)]
    groups = lanes(node, *requests)["d0"]
    assert node("dashboard/depth.js", "pack", groups) == 45
    after = [request(str(i), ["d0", "decode_steps", i, i + 1]) for i in range(45)]
    assert node("dashboard/depth.js", "pack", lanes(node, *after)["d0"]) == 1
    names = node("dashboard/depth.js", "named", requests)
    assert (len(names), names[-1]) == (9, "+37 more")
    assert node("dashboard/depth.js", "named", requests[:8])[-1] == "7"


def test_lanes_say_if_they_leave_requests_out(node):
    told = node("dashboard/depth.js", "leftOut", 128, 300)
    assert told == "128 of 300 requests that run are drawn, the oldest"
    assert node("dashboard/depth.js", "leftOut", 45, 45) == ""
    assert node("dashboard/depth.js", "leftOut", 44, 45) == ""  # one request has just begun


def test_a_depth_has_the_stages_and_the_gaps_between_them(node):
    requests = [
        request("a", ["d0", "decode_steps", 0, 4], ["d0", "decode_steps", 8, 10]),
        request("b", ["d0", "decode_steps", 0, 4], ["d0", "stalled", 4, 10]),
        request("short", ["d0", "decode_queue", 9.0, 9.01]),
    ]
    groups = lanes(node, *requests)["d0"]
    depth = node("dashboard/depth.js", "depthOf", groups, 0, 10, 10)
    assert depth["decode_steps"] == [2, 2, 2, 2, 0, 0, 0, 0, 1, 1]
    assert depth["stalled"] == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]
    assert depth["decode_queue"] == [0] * 9 + [1]


LINE = {
    "route_s": 0.1,
    "queue_s": 0.2,
    "prefill_queue_s": 0.0,
    "prefill_compute_s": 0.7,
    "prefill_worker": "p0",
    "decode_queue_s": 0.5,
    "stays": [],
}


def test_an_answer_of_one_attempt_has_its_stages(node):
    rows = node("shared/stages.js", "stagesOf", LINE, 9.0)
    assert rows[0] == ["route", 0, 0.1]
    assert rows[-2:] == [["decode_queue", 1.0, 1.5], ["decode_steps", 1.5, 9.0]]


def test_an_answer_of_several_attempts_has_a_row_for_each_and_gaps(node):
    lost = {"prefill_worker": "p0", "decode_worker": "d0", "placed_s": 0.3, "ended_s": 4.0}
    last = {"prefill_worker": "d1", "decode_worker": "d1", "placed_s": 11.7, "ended_s": None}
    rows = node("shared/stages.js", "stagesOf", {**LINE, "stays": [lost, last]}, 20.0)
    assert rows[1:] == [
        ["queue", 0.1, 0.3],
        ["attempt", 0.3, 4.0, "p0 → d0"],
        ["attempt", 11.7, 20.0, "d1"],
    ]


def part(process, *, samples=(), level="good", **fields):
    health = {"level": level, "word": level, "reasons": []}
    counts = {"in_flight": 1, "queue": 2, "queue_s": 0.5, "running": [], "requests": []}
    lists = {"hits": {}, "transfers": [], "versions": [], "counts": []}
    return {
        "process": process,
        "started_s": 100.0,
        "health": health,
        "samples": list(samples),
        **counts,
        **lists,
        **fields,
    }


def joined(node, parts, former=(), **state):
    script = "dashboard/joined.js"
    rings = node(script, "takenUp", None, parts, 100.0)
    return node(script, "joined", {**parts[0], **state}, parts, {"$map": rings}, former)


def test_the_worst_of_all_gateways_is_shown(node):
    parts = [part("0"), part("1", level="bad"), part("2", level="warn")]
    whole = joined(node, parts)
    assert whole["health"]["level"] == "bad"
    assert (whole["in_flight"], whole["queue"], whole["queue_s"]) == (3, 6, 1.5)


def test_samples_of_gateways_are_added_and_the_slower_times_are_reported(node):
    slow, fast = {"p50_s": 2.0, "p95_s": 3.0}, {"p50_s": 0.1, "p95_s": 9.0}
    one = {**SAMPLE, "ended": 3, "good": 1, "missed": {"queue": 2}, "ttft": slow}
    two = {**SAMPLE, "ended": 1, "missed": {"queue": 1}, "ttft": fast, "waiting_s": 4.0}
    (sample,) = joined(node, [part("0", samples=[one]), part("1", samples=[two])])["samples"]
    assert (sample["ended"], sample["good"], sample["missed"]) == (4, 1, {"queue": 3})
    assert sample["ttft"] == {"p50_s": 2.0, "p95_s": 9.0}
    assert (sample["tpot"], sample["waiting_s"], sample["unix"]) == (None, 4.0, 101.0)


def test_samples_that_the_page_has_seen_survive_the_gateway(node):
    former = [{**SAMPLE, "unix": float(unix)} for unix in (90, 91, 101)]
    samples = joined(node, [part("0", samples=[SAMPLE])], former)["samples"]
    assert [each["unix"] for each in samples] == [90.0, 91.0, 101.0]


def test_no_line_is_drawn_where_samples_are_missing(node):
    former = [{**SAMPLE, "unix": float(unix)} for unix in (90, 91, 92)]
    own = [{**SAMPLE, "unix": float(unix)} for unix in (100, 101)]
    shown = node("dashboard/joined.js", "withBreaks", [*former, *own])
    assert [each.get("isBreak", False) for each in shown] == [False] * 3 + [True] + [False] * 2


def test_the_time_axis_reaches_back_to_marks_from_before_the_gateway(node):
    samples = [{**SAMPLE, "unix": float(unix)} for unix in range(1000, 1100)]
    span = node("dashboard/joined.js", "spanOf", samples, [], 1100.0)
    assert span == {"start": 1000, "end": 1100}
    mark = [{"at": 700.0, "kind": "death"}]
    assert node("dashboard/joined.js", "spanOf", samples, mark, 1100.0)["start"] == 695
    old = [{"at": 100.0, "kind": "death"}]
    assert node("dashboard/joined.js", "spanOf", samples, old, 1100.0)["start"] == 500
