"""The tables of stored responses. Each function is called within a transaction.

A response is one row, with a further row for each item of its own input and of its output. A
conversation is a chain: each response has the id of its predecessor. Using a response counts as
using its whole chain, and the chain that was unused for longest is deleted first. So a conversation
is deleted as a whole.

The row of a background response has the time at which the lease of its process ends. After that
time the process counts as dead, and the response as failed. A response that was cancelled or
deleted is no longer alive. The process that makes the response detects this when it renews its
lease.

Triggers count rows and bytes of each owner, and delete the items and events of a deleted response.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from engine.config import GatewayConfig
from router.gateway.responses.items import Item
from router.inbox.api_errors import ApiError

MAX_TURNS = 4096  # maximum responses in a conversation
LONG_ITEM_BYTES = 65_536
MAX_EVENTS_BYTES = 8 * 2**20  # maximum bytes of events per response
LOST = "the gateway process that made this response has ended"

TABLES = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    previous TEXT,
    used_s REAL NOT NULL,
    status TEXT NOT NULL,
    fields BLOB NOT NULL,
    num_bytes INTEGER NOT NULL,
    lease_end_s REAL,
    has_events INTEGER NOT NULL DEFAULT 0,
    events_bytes INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS responses_by_owner ON responses (owner, used_s, number);
CREATE INDEX IF NOT EXISTS responses_by_use ON responses (used_s, number);
CREATE INDEX IF NOT EXISTS responses_by_lease ON responses (lease_end_s)
    WHERE lease_end_s IS NOT NULL;
CREATE TABLE IF NOT EXISTS response_items (
    response INTEGER NOT NULL,
    is_output INTEGER NOT NULL,
    position INTEGER NOT NULL,
    id TEXT NOT NULL,
    item BLOB NOT NULL,
    PRIMARY KEY (response, is_output, position)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS response_items_by_id ON response_items (id);
CREATE TABLE IF NOT EXISTS response_events (
    response INTEGER NOT NULL,
    number INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (response, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS response_totals (
    owner TEXT PRIMARY KEY,
    num INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL
);
CREATE TRIGGER IF NOT EXISTS responses_inserted AFTER INSERT ON responses BEGIN
    INSERT INTO response_totals VALUES (NEW.owner, 1, NEW.num_bytes)
        ON CONFLICT (owner) DO UPDATE SET num = num + 1, num_bytes = num_bytes + NEW.num_bytes;
END;
CREATE TRIGGER IF NOT EXISTS responses_changed AFTER UPDATE OF num_bytes ON responses BEGIN
    UPDATE response_totals SET num_bytes = num_bytes + NEW.num_bytes - OLD.num_bytes
        WHERE owner = NEW.owner;
END;
CREATE TRIGGER IF NOT EXISTS responses_deleted AFTER DELETE ON responses BEGIN
    DELETE FROM response_items WHERE response = OLD.number;
    DELETE FROM response_events WHERE response = OLD.number;
    UPDATE response_totals SET num = num - 1, num_bytes = num_bytes - OLD.num_bytes
        WHERE owner = OLD.owner;
    DELETE FROM response_totals WHERE owner = OLD.owner AND num = 0;
END;
"""

_ALIVE = "status IN ('queued', 'in_progress')"
_CHAIN = f"""
WITH RECURSIVE chain (number, previous, depth) AS (
    SELECT number, previous, 0 FROM responses WHERE id = ? AND owner = ?
    UNION ALL
    SELECT r.number, r.previous, depth + 1 FROM responses r JOIN chain c ON r.id = c.previous
        WHERE r.owner = ? AND depth < {MAX_TURNS}
)
SELECT number, previous FROM chain ORDER BY depth DESC
"""

_encode = msgspec.json.Encoder().encode


class KeptResponse(NamedTuple):
    """A stored response."""

    number: int
    id: str
    status: str
    fields: dict[str, Any]
    output: list[Item]
    has_events: bool

    @property
    def is_alive(self) -> bool:
        """True while the answer of the response is queued or being made."""
        return self.status in ("queued", "in_progress")

    def body(self) -> dict[str, Any]:
        """Returns the response in the form of the API."""
        body = {**self.fields, "status": self.status, "output": self.output}
        if self.status == "failed" and body.get("error") is None:
            body["error"] = {"code": "server_error", "message": LOST}
        return body


class NewResponse(NamedTuple):
    """The data of a response that is to be stored."""

    id: str
    owner: str
    previous: str | None
    fields: dict[str, Any]
    input: Sequence[Item]
    output: Sequence[Item]


class KeptEvent(NamedTuple):
    """A server-sent event, encoded, with its number."""

    number: int
    data: bytes


def insert(
    db: sqlite3.Connection,
    new: NewResponse,
    config: GatewayConfig,
    now_s: float,
    *,
    lease_end_s: float | None = None,
    has_events: bool = False,
) -> None:
    """Stores a response. Old responses are deleted to make room.

    Raises ApiError if the response is too large.
    """
    fields, items = _encode(new.fields), _encoded(new.input, new.output)
    num_bytes = _size(fields, items)
    if num_bytes > min(config.max_responses_bytes, config.max_key_responses_bytes):
        message = f"the response has {num_bytes} bytes, too many to be kept"
        raise ApiError(message, code="overloaded", status=503)
    status = new.fields["status"]
    row = (new.id, new.owner, new.previous, now_s, status, fields, num_bytes)
    cursor = db.execute(
        "INSERT INTO responses (id, owner, previous, used_s, status, fields, num_bytes,"
        " lease_end_s, has_events) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (*row, lease_end_s, has_events),
    )
    _insert_items(db, cursor.lastrowid or 0, items)
    make_room(db, new.owner, config, now_s)


def finish(
    db: sqlite3.Connection,
    id: str,
    fields: dict[str, Any],
    output: Sequence[Item],
    events: Sequence[KeptEvent],
    config: GatewayConfig,
) -> bool:
    """Stores the end of a background response.

    Returns False if the response was cancelled or deleted before.
    """
    found = db.execute(
        f"SELECT number, owner, used_s FROM responses WHERE id = ? AND {_ALIVE}", (id,)
    ).fetchone()
    if found is None:
        return False
    number, owner, used_s = found
    add_events(db, id, events)
    encoded, items = _encode(fields), _encoded((), output)
    _insert_items(db, number, items)
    db.execute(
        "UPDATE responses SET fields = ?, status = ?, lease_end_s = NULL,"
        " num_bytes = num_bytes + ? WHERE number = ?",
        (encoded, fields["status"], _size(encoded, items), number),
    )
    make_room(db, owner, config, used_s)
    return True


def get(db: sqlite3.Connection, id: str, owner: str, now_s: float) -> KeptResponse | None:
    """Returns the response of this owner with this id; None if there is none."""
    fail_lost(db, now_s)
    row = db.execute(
        "SELECT number, id, status, fields, has_events FROM responses WHERE id = ? AND owner = ?",
        (id, owner),
    ).fetchone()
    if row is None:
        return None
    number, _, status, fields, has_events = row
    output = _items(db, number, "AND is_output = 1")
    return KeptResponse(
        number, id, status, msgspec.json.decode(fields), output, has_events=bool(has_events)
    )


def delete(db: sqlite3.Connection, id: str, owner: str) -> bool:
    """Deletes a response. Returns False if there is none."""
    cursor = db.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (id, owner))
    return cursor.rowcount > 0


def cancel(db: sqlite3.Connection, id: str, owner: str) -> None:
    """Cancels a background response. Does nothing if the response has ended."""
    db.execute(
        f"UPDATE responses SET status = 'cancelled', lease_end_s = NULL"
        f" WHERE id = ? AND owner = ? AND lease_end_s IS NOT NULL AND {_ALIVE}",
        (id, owner),
    )


def conversation(
    db: sqlite3.Connection, id: str, owner: str, now_s: float, max_bytes: int
) -> list[Item] | None:
    """Returns all items of a conversation up to the end of this response.

    Returns None if a response of the chain is missing.

    The call counts as a use of the conversation. Raises ApiError if the items have more than
    `max_bytes` in total.
    """
    chain = _chain(db, id, owner)
    if chain is None:
        return None
    items: list[Item] = []
    num_bytes = 0
    for number in chain:
        db.execute("UPDATE responses SET used_s = MAX(used_s, ?) WHERE number = ?", (now_s, number))
        (size,) = db.execute(
            "SELECT TOTAL(LENGTH(item)) FROM response_items WHERE response = ?", (number,)
        ).fetchone()
        num_bytes += int(size)
        if num_bytes > max_bytes:
            message = f"the conversation has more than {max_bytes} bytes"
            raise ApiError(message, param="previous_response_id", code="context_length_exceeded")
        items += _items(db, number)
    return items


def input_items(db: sqlite3.Connection, id: str, owner: str, max_bytes: int) -> list[Item] | None:
    """Returns all input items of a response, after the items of the earlier conversation."""
    row = db.execute(
        "SELECT number, previous, used_s FROM responses WHERE id = ? AND owner = ?", (id, owner)
    ).fetchone()
    if row is None:
        return None
    number, previous, used_s = row
    before = [] if previous is None else conversation(db, previous, owner, used_s, max_bytes) or []
    return before + _items(db, number, "AND is_output = 0")


def kept_items(db: sqlite3.Connection, ids: Iterable[str], owner: str) -> dict[str, Item]:
    """Returns the owner's stored items with these ids. Unknown ids are left out."""
    found: dict[str, Item] = {}
    for id in ids:
        row = db.execute(
            "SELECT i.item FROM response_items i JOIN responses r ON r.number = i.response"
            " WHERE i.id = ? AND r.owner = ? ORDER BY i.response DESC LIMIT 1",
            (id, owner),
        ).fetchone()
        if row is not None:
            found[id] = _item_of(row[0])
    return found


def renew(db: sqlite3.Connection, running: dict[str, str], lease_end_s: float) -> set[str]:
    """Renews the leases of this process's running responses, and stores their status.

    Returns the ids of responses that are no longer alive.
    """
    gone: set[str] = set()
    for id, status in running.items():
        cursor = db.execute(
            f"UPDATE responses SET lease_end_s = ?, status = ? WHERE id = ? AND {_ALIVE}",
            (lease_end_s, status, id),
        )
        if cursor.rowcount == 0:
            gone.add(id)
    return gone


def fail_lost(db: sqlite3.Connection, now_s: float) -> None:
    """Marks responses whose lease has ended as failed."""
    db.execute(
        "UPDATE responses SET status = 'failed', lease_end_s = NULL WHERE lease_end_s < ?", (now_s,)
    )


def add_events(db: sqlite3.Connection, id: str, events: Sequence[KeptEvent]) -> None:
    """Stores events of a response. The response's oldest events are deleted to make room."""
    row = db.execute("SELECT number, events_bytes FROM responses WHERE id = ?", (id,)).fetchone()
    if row is None or not events:
        return
    number, before = row
    db.executemany(
        "INSERT INTO response_events VALUES (?, ?, ?)",
        [(number, event.number, event.data) for event in events],
    )
    kept = before + sum(len(event.data) for event in events)
    while kept > MAX_EVENTS_BYTES:
        oldest = db.execute(
            "SELECT number, LENGTH(data) FROM response_events WHERE response = ?"
            " ORDER BY number LIMIT 1",
            (number,),
        ).fetchone()
        db.execute(
            "DELETE FROM response_events WHERE response = ? AND number = ?", (number, oldest[0])
        )
        kept -= oldest[1]
    db.execute(
        "UPDATE responses SET num_bytes = num_bytes + ?, events_bytes = ? WHERE number = ?",
        (kept - before, kept, number),
    )


def events_after(db: sqlite3.Connection, number: int, last: int, max_bytes: int) -> list[KeptEvent]:
    """Returns the next events after number `last`, up to the event that reaches `max_bytes`."""
    events: list[KeptEvent] = []
    num_bytes = 0
    cursor = db.execute(
        "SELECT number, data FROM response_events WHERE response = ? AND number > ?"
        " ORDER BY number",
        (number, last),
    )
    for each, data in cursor:
        events.append(KeptEvent(each, data))
        num_bytes += len(data)
        if num_bytes >= max_bytes:
            break
    cursor.close()
    return events


def make_room(db: sqlite3.Connection, owner: str, config: GatewayConfig, now_s: float) -> None:
    """Deletes old responses, and the least recently used responses if there are too many.

    Running responses are not deleted.
    """
    fail_lost(db, now_s)
    db.execute(
        "DELETE FROM responses WHERE used_s < ? AND lease_end_s IS NULL",
        (now_s - config.response_days * 86_400.0,),
    )
    while (totals := _totals(db, owner)) and _is_over(totals, config):
        num, num_bytes, *_ = totals
        by_owner = num > config.max_key_responses or num_bytes > config.max_key_responses_bytes
        condition, values = ("AND owner = ?", (owner,)) if by_owner else ("", ())
        cursor = db.execute(
            "DELETE FROM responses WHERE number = (SELECT number FROM responses"
            f" WHERE lease_end_s IS NULL {condition} ORDER BY used_s, number LIMIT 1)",
            values,
        )
        if cursor.rowcount == 0:
            return  # all other responses are running; their number is limited


def _totals(db: sqlite3.Connection, owner: str) -> tuple[int, int, int, int]:
    """Returns the numbers of responses and bytes of the owner, then of all owners."""
    own = db.execute(
        "SELECT num, num_bytes FROM response_totals WHERE owner = ?", (owner,)
    ).fetchone() or (0, 0)
    everyone = db.execute(
        "SELECT COALESCE(SUM(num), 0), COALESCE(SUM(num_bytes), 0) FROM response_totals"
    ).fetchone()
    return (*own, *everyone)


def _is_over(totals: tuple[int, int, int, int], config: GatewayConfig) -> bool:
    bounds = (
        config.max_key_responses,
        config.max_key_responses_bytes,
        config.max_responses,
        config.max_responses_bytes,
    )
    return any(total > bound for total, bound in zip(totals, bounds, strict=True))


def _chain(db: sqlite3.Connection, id: str, owner: str) -> list[int] | None:
    """Returns the numbers of the responses of a conversation, first response first."""
    rows = db.execute(_CHAIN, (id, owner, owner)).fetchall()
    if not rows or rows[0][1] is not None:
        return None
    return [number for number, _ in rows]


def _items(db: sqlite3.Connection, number: int, condition: str = "") -> list[Item]:
    rows = db.execute(
        f"SELECT item FROM response_items WHERE response = ? {condition}"
        " ORDER BY is_output, position",
        (number,),
    )
    return [_item_of(item) for (item,) in rows]


def _item_of(data: bytes) -> Item:
    """Returns a stored item. Long items keep log-probabilities as JSON, to save seconds."""
    if len(data) < LONG_ITEM_BYTES:
        item: Item = msgspec.json.decode(data)
        return item
    fields = msgspec.json.decode(data, type=dict[str, Raw])
    parts = fields.pop("content", Raw(b"[]"))
    item = {name: msgspec.json.decode(value) for name, value in fields.items()}
    item["content"] = [
        {n: v if n == "logprobs" else msgspec.json.decode(v) for n, v in part.items()}
        for part in msgspec.json.decode(parts, type=list[dict[str, Raw]])
    ]
    return item


_Row = tuple[int, int, str, bytes]


def _encoded(input: Sequence[Item], output: Sequence[Item]) -> list[_Row]:
    return [
        (is_output, position, item["id"], _encode(item))
        for is_output, items in enumerate((input, output))
        for position, item in enumerate(items)
    ]


def _insert_items(db: sqlite3.Connection, number: int, items: Sequence[_Row]) -> None:
    db.executemany(
        "INSERT INTO response_items VALUES (?, ?, ?, ?, ?)", [(number, *row) for row in items]
    )


def _size(fields: bytes, items: Sequence[_Row]) -> int:
    return len(fields) + sum(len(item) for *_, item in items)
