"""Stored responses: chains, owners, bounds, leases and events."""

import sqlite3

import pytest

from engine.config import GatewayConfig
from router.gateway.responses import table
from router.gateway.responses.table import KeptEvent, NewResponse
from router.inbox.api_errors import ApiError

CONFIG = GatewayConfig()
DAY_S = 86_400.0


@pytest.fixture
def db():
    connection = sqlite3.connect(":memory:")
    connection.executescript(table.TABLES)
    yield connection
    assert_totals(connection)
    connection.close()


def assert_totals(db):
    """Asserts that the sums kept by the triggers equal the rows."""
    counted = db.execute("SELECT owner, num, num_bytes FROM response_totals ORDER BY owner")
    found = db.execute(
        "SELECT owner, COUNT(*), SUM(num_bytes) FROM responses GROUP BY owner ORDER BY owner"
    )
    assert counted.fetchall() == found.fetchall()
    for name in ("response_items", "response_events"):
        (num,) = db.execute(
            f"SELECT COUNT(*) FROM {name} WHERE response NOT IN (SELECT number FROM responses)"
        ).fetchone()
        assert num == 0, name


def text(id, size=1):
    return {"id": id, "type": "message", "text": "x" * size}


def new(id, *, owner="a", previous=None, status="completed", size=1):
    fields = {"id": id, "status": status, "background": True, "error": None}
    output = [] if status in ("queued", "in_progress") else [text(f"out-{id}")]
    return NewResponse(id, owner, previous, fields, [text(f"in-{id}", size)], output)


def put(db, id, *, at=0.0, config=CONFIG, lease=None, **fields):
    table.insert(db, new(id, **fields), config, at, lease_end_s=lease, has_events=True)


def ids(db, at=0.0):
    return [id for (id,) in db.execute("SELECT id FROM responses ORDER BY number")]


def test_a_response_is_found_by_its_owner_alone(db):
    put(db, "r1")
    found = table.get(db, "r1", "a", 0.0)
    assert found.body()["output"] == [text("out-r1")]
    assert table.get(db, "r1", "b", 0.0) is None
    assert table.conversation(db, "r1", "b", 0.0, 10**6) is None
    assert table.kept_items(db, ["out-r1"], "b") == {}
    assert table.input_items(db, "r1", "b", 10**6) is None
    assert not table.delete(db, "r1", "b")
    table.cancel(db, "r1", "b")
    assert table.get(db, "r1", "a", 0.0).status == "completed"


def test_a_conversation_has_all_items_in_order(db):
    put(db, "r1")
    put(db, "r2", previous="r1")
    put(db, "r3", previous="r2")
    names = ["in-r1", "out-r1", "in-r2", "out-r2", "in-r3", "out-r3"]
    assert [i["id"] for i in table.conversation(db, "r3", "a", 1.0, 10**6)] == names
    assert [i["id"] for i in table.input_items(db, "r3", "a", 10**6)] == names[:-1]
    assert table.kept_items(db, ["in-r2", "nothing"], "a") == {"in-r2": text("in-r2")}


def test_a_conversation_without_its_beginning_is_none(db):
    put(db, "r1")
    put(db, "r2", previous="r1")
    assert table.delete(db, "r1", "a")
    assert table.conversation(db, "r2", "a", 0.0, 10**6) is None
    assert table.get(db, "r2", "a", 0.0) is not None


def test_a_conversation_that_is_too_long_is_refused(db):
    put(db, "r1", size=100)
    with pytest.raises(ApiError) as caught:
        table.conversation(db, "r1", "a", 0.0, 100)
    assert caught.value.param == "previous_response_id"


def test_what_was_not_used_for_longest_goes_first(db):
    config = GatewayConfig(max_key_responses=3)
    for at, id in enumerate(("r1", "r2", "r3")):
        put(db, id, at=at, config=config)
    table.conversation(db, "r1", "a", 5.0, 10**6)
    put(db, "r4", at=6.0, config=config)
    assert ids(db) == ["r1", "r3", "r4"]


def test_a_chain_is_used_as_a_whole(db):
    config = GatewayConfig(max_responses=3, max_key_responses=3)
    put(db, "r1", at=0, config=config)
    put(db, "other", at=1, config=config)
    put(db, "r2", at=2, previous="r1", config=config)
    table.conversation(db, "r2", "a", 3.0, 10**6)
    put(db, "r3", at=4, previous="r2", config=config)
    assert ids(db) == ["r1", "r2", "r3"]


def test_one_owner_does_not_push_out_anothers(db):
    config = GatewayConfig(max_key_responses=2)
    put(db, "b1", owner="b", config=config)
    for index in range(5):
        put(db, f"a{index}", at=index, config=config)
    assert ids(db) == ["b1", "a3", "a4"]


def test_all_owners_together_are_bounded(db):
    config = GatewayConfig(max_responses=2)
    for index, owner in enumerate("abc"):
        put(db, owner, owner=owner, at=index, config=config)
    assert ids(db) == ["b", "c"]


def test_bytes_are_bounded(db):
    config = GatewayConfig(max_key_responses_bytes=3000)
    for index in range(4):
        put(db, f"r{index}", at=index, size=1000, config=config)
    assert ids(db) == ["r2", "r3"]
    with pytest.raises(ApiError) as caught:
        put(db, "large", at=9, size=4000, config=config)
    assert caught.value.status == 503


def test_old_responses_expire(db):
    put(db, "r1", at=0.0)
    put(db, "r2", at=29 * DAY_S)
    put(db, "r3", at=31 * DAY_S)
    assert ids(db) == ["r2", "r3"]


def test_what_runs_stays(db):
    config = GatewayConfig(max_responses=1)
    put(db, "run", status="queued", lease=100.0, config=config)
    put(db, "r1", at=1.0, config=config)
    put(db, "r2", at=40 * DAY_S - 1, config=config)
    assert "run" not in ids(db), "its lease has ended long ago"
    put(db, "run", at=0.0, status="queued", lease=50 * DAY_S, config=config)
    put(db, "r3", at=40 * DAY_S, config=config)
    assert ids(db) == ["run"]


def test_a_lease_that_ends_is_a_failure(db):
    put(db, "run", status="queued", lease=10.0)
    assert table.renew(db, {"run": "in_progress"}, 20.0) == set()
    assert table.get(db, "run", "a", 15.0).status == "in_progress"
    lost = table.get(db, "run", "a", 20.5)
    assert lost.status == "failed"
    assert lost.body()["error"] == {"code": "server_error", "message": table.LOST}
    assert table.renew(db, {"run": "in_progress"}, 30.0) == {"run"}


@pytest.mark.parametrize("end", [table.cancel, table.delete])
def test_what_is_cancelled_or_deleted_shall_not_run(db, end):
    put(db, "run", status="queued", lease=10.0)
    end(db, "run", "a")
    assert table.renew(db, {"run": "in_progress"}, 20.0) == {"run"}
    fields = {"status": "completed"}
    assert not table.finish(db, "run", fields, [text("o")], [], CONFIG)
    found = table.get(db, "run", "a", 0.0)
    assert found is None or found.status == "cancelled"


def test_a_run_ends_with_its_output(db):
    put(db, "run", status="queued", lease=10.0)
    fields = {"status": "completed", "background": True}
    assert table.finish(db, "run", fields, [text("o")], [KeptEvent(0, b"e")], CONFIG)
    found = table.get(db, "run", "a", 999.0)
    assert (found.status, found.output) == ("completed", [text("o")])
    table.cancel(db, "run", "a")
    assert table.get(db, "run", "a", 999.0).status == "completed"


def test_events_are_read_from_a_number_on(db):
    put(db, "run", status="queued", lease=10.0)
    table.add_events(db, "run", [KeptEvent(i, b"%d" % i) for i in range(5)])
    found = table.get(db, "run", "a", 0.0)
    events = table.events_after(db, found.number, 1, 10**6)
    assert [event.number for event in events] == [2, 3, 4]
    assert [e.number for e in table.events_after(db, found.number, -1, 2)] == [0, 1]


def test_the_oldest_events_give_way(db, monkeypatch):
    put(db, "run", status="queued", lease=10.0)
    monkeypatch.setattr(table, "MAX_EVENTS_BYTES", 25)
    for i in range(5):
        table.add_events(db, "run", [KeptEvent(i, b"x" * 10)])
    found = table.get(db, "run", "a", 0.0)
    assert [e.number for e in table.events_after(db, found.number, -1, 10**6)] == [3, 4]


def test_events_of_a_deleted_response_are_dropped(db):
    table.add_events(db, "gone", [KeptEvent(0, b"x")])
    assert db.execute("SELECT COUNT(*) FROM response_events").fetchone() == (0,)
