"""The tables of files and batches. Each change of the tables is one transaction.

Every function takes the connection of a transaction (`router.gateway.storage`). So after `kill -9`
each change is either complete or absent:

- One transaction stores a result and updates the count of its batch. A request has at most one
  result.
- One transaction appends a piece to an output file, changes the file's size, and removes the
  results in the piece.
- Only the gateway process with the lease runs the batches of a database. All its changes are
  checked against the lease, so a process that was paused for too long cannot change a batch.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.config import GatewayConfig
from router.gateway.batches.lines import (
    InputLine,
    duplicate,
    parse_line,
    split_lines,
    unanswered_line,
)
from router.gateway.batches.records import (
    ACTIVE,
    CANCELLABLE,
    NEXT,
    BatchRecord,
    BatchStatus,
    FilePurpose,
    FileRecord,
    LineFault,
)
from router.inbox.api_errors import ApiError, invalid_value

TABLES = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    purpose TEXT NOT NULL,
    filename TEXT NOT NULL,
    num_bytes INTEGER NOT NULL DEFAULT 0,
    created_s INTEGER NOT NULL,
    expires_s INTEGER,
    touched_s INTEGER,  -- while it is being written; NULL: it is complete
    expires_after_s INTEGER
) STRICT;
CREATE INDEX IF NOT EXISTS files_of_tenants ON files (tenant, number);
CREATE TABLE IF NOT EXISTS file_pieces (
    file_id TEXT NOT NULL,
    start INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (file_id, start)
) STRICT;
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    sharing TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    window TEXT NOT NULL,
    metadata TEXT NOT NULL,
    output_expires_after_s INTEGER,
    status TEXT NOT NULL,
    ending TEXT,
    created_s INTEGER NOT NULL,
    expires_s INTEGER NOT NULL,
    in_progress_s INTEGER,
    finalizing_s INTEGER,
    cancelling_s INTEGER,
    ended_s INTEGER,
    num_lines INTEGER NOT NULL DEFAULT 0,
    num_completed INTEGER NOT NULL DEFAULT 0,
    num_failed INTEGER NOT NULL DEFAULT 0,
    num_read_bytes INTEGER NOT NULL DEFAULT 0,
    num_read_lines INTEGER NOT NULL DEFAULT 0,
    num_written_lines INTEGER NOT NULL DEFAULT 0,
    output_file_id TEXT,
    error_file_id TEXT,
    errors TEXT NOT NULL DEFAULT '[]'
) STRICT;
CREATE INDEX IF NOT EXISTS batches_of_tenants ON batches (tenant, number);
CREATE INDEX IF NOT EXISTS batches_by_status ON batches (status);
CREATE TABLE IF NOT EXISTS batch_lines (
    batch_id TEXT NOT NULL,
    number INTEGER NOT NULL,  -- of the line in the file, from 1
    custom_id TEXT NOT NULL,
    body BLOB,
    result BLOB,  -- NULL: not answered yet
    is_error INTEGER NOT NULL DEFAULT 0,
    num_lost INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (batch_id, number)
) STRICT;
CREATE UNIQUE INDEX IF NOT EXISTS batch_custom_ids ON batch_lines (batch_id, custom_id);
CREATE INDEX IF NOT EXISTS batch_lines_left ON batch_lines (batch_id, number) WHERE result IS NULL;
CREATE TABLE IF NOT EXISTS batch_runner (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    owner TEXT NOT NULL,
    until_s INTEGER NOT NULL
) STRICT;
"""

LEASE_S = 6
MAX_LINES = 50_000
MAX_FAULTS = 100
MAX_FILES = 10_000  # maximum files per tenant
MAX_ACTIVE_BATCHES = 64  # maximum unfinished batches per tenant
MAX_KEPT_BATCHES = 10_000  # maximum batches per tenant; the oldest ended ones are removed
SLICE_LINES = 200  # maximum lines per transaction
SLICE_BYTES = 2**18
UPLOAD_SILENCE_S = 600  # seconds without a new piece until an upload is removed

Connection = sqlite3.Connection


class LeaseLost(Exception):
    """Another process has taken the lease to run batches."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a listing: at most `limit` rows after the row with the id `after`."""

    limit: int
    after: str | None = None
    is_ascending: bool = False  # True: oldest row first


# ---------------------------------------------------------------- the table of files


def begin_file(
    connection: Connection, file: FileRecord, expires_after_s: int | None = None
) -> None:
    """Adds an empty file, which is hidden until it is complete. Raises ApiError."""
    (number,) = connection.execute(
        "SELECT count(*) FROM files WHERE tenant = ?", (file.tenant,)
    ).fetchone()
    if number >= MAX_FILES and file.purpose == FilePurpose.BATCH:
        text = f"one tenant may have {MAX_FILES} files: delete some"
        raise ApiError(text, param="file", code="file_quota_exceeded")
    connection.execute(
        "INSERT INTO files (id, tenant, purpose, filename, created_s, touched_s, expires_after_s)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            file.id,
            file.tenant,
            file.purpose,
            file.filename,
            file.created_s,
            file.created_s,
            expires_after_s,
        ),
    )


def append_piece(
    connection: Connection,
    file_id: str,
    data: bytes,
    now_s: int,
    config: GatewayConfig | None = None,
) -> None:
    """Appends a piece to a file that is being written.

    Raises ApiError if the file gets too large.
    """
    row = connection.execute(
        "SELECT num_bytes, tenant FROM files WHERE id = ? AND touched_s IS NOT NULL", (file_id,)
    ).fetchone()
    if row is None:  # the file was removed because its upload was too slow
        raise ApiError("the upload took too long", code="request_timeout", status=408)
    start, tenant = row
    if config is not None:
        _check_quota(connection, tenant, start + len(data), len(data), config)
    connection.execute(
        "INSERT INTO file_pieces (file_id, start, data) VALUES (?, ?, ?)", (file_id, start, data)
    )
    connection.execute(
        "UPDATE files SET num_bytes = num_bytes + ?, touched_s = ? WHERE id = ?",
        (len(data), now_s, file_id),
    )


def too_large(config: GatewayConfig) -> ApiError:
    """Returns the error of a file that is longer than allowed."""
    text = f"file is longer than {config.max_file_bytes} bytes"
    return ApiError(text, param="file", code="request_too_large", status=413)


def _check_quota(
    connection: Connection, tenant: str, file_bytes: int, more_bytes: int, config: GatewayConfig
) -> None:
    if file_bytes > config.max_file_bytes:
        raise too_large(config)
    total, theirs = connection.execute(
        "SELECT sum(num_bytes), sum(CASE tenant WHEN ? THEN num_bytes ELSE 0 END) FROM files",
        (tenant,),
    ).fetchone()
    if theirs + more_bytes > config.max_tenant_file_bytes:
        text = f"the files of one tenant may have {config.max_tenant_file_bytes} bytes: delete some"
        raise ApiError(text, param="file", code="file_quota_exceeded")
    if total + more_bytes > config.max_store_bytes:
        text = "the server has no room for more files"
        raise ApiError(text, param="file", code="file_quota_exceeded")


def complete_file(
    connection: Connection, file_id: str, *, filename: str, expires_s: int | None
) -> FileRecord:
    """Makes a file visible to its tenant, and returns its record."""
    connection.execute(
        "UPDATE files SET touched_s = NULL, filename = ?, expires_s = ? WHERE id = ?",
        (filename, expires_s, file_id),
    )
    found = _file_where(connection, "id = ?", (file_id,))
    if found is None:
        raise ApiError("the upload took too long", code="request_timeout", status=408)
    return found


def find_file(connection: Connection, tenant: str, file_id: str, now_s: int) -> FileRecord:
    """Returns a complete file of a tenant. Raises ApiError if there is none."""
    where = "tenant = ? AND id = ? AND touched_s IS NULL AND (expires_s IS NULL OR expires_s > ?)"
    found = _file_where(connection, where, (tenant, file_id, now_s))
    if found is None:
        raise no_file(file_id)
    return found


def no_file(file_id: str) -> ApiError:
    """Returns the error of an unknown file."""
    message = f"no file has the id {file_id[:80]!r}"
    return ApiError(message, param="file_id", code="file_not_found", status=404)


def list_files(
    connection: Connection, tenant: str, purpose: str | None, page: Page, now_s: int
) -> list[FileRecord]:
    """Returns a page of a tenant's complete files."""
    where = "tenant = ? AND touched_s IS NULL AND (expires_s IS NULL OR expires_s > ?)"
    arguments: list[object] = [tenant, now_s]
    if purpose is not None:
        where += " AND purpose = ?"
        arguments.append(purpose)
    rows = _page(connection, "files", where, arguments, page)
    return [msgspec.convert(row, FileRecord) for row in rows]


def read_piece(connection: Connection, file_id: str, start: int) -> bytes:
    """Returns the piece of a file that starts at byte `start`; empty at the end of the file."""
    row = connection.execute(
        "SELECT data FROM file_pieces WHERE file_id = ? AND start = ?", (file_id, start)
    ).fetchone()
    return b"" if row is None else bytes(row[0])


def delete_file(connection: Connection, file_id: str) -> None:
    """Removes a file, complete or not."""
    connection.execute("DELETE FROM file_pieces WHERE file_id = ?", (file_id,))
    connection.execute("DELETE FROM files WHERE id = ?", (file_id,))


def delete_old_files(connection: Connection, now_s: int) -> int:
    """Removes one file that has expired or whose upload broke off.

    Returns the number of removed files.
    """
    row = connection.execute(
        "SELECT id FROM files WHERE expires_s <= ? OR (touched_s < ? AND purpose = ?) LIMIT 1",
        (now_s, now_s - UPLOAD_SILENCE_S, FilePurpose.BATCH),
    ).fetchone()
    if row is None:
        return 0
    delete_file(connection, row[0])
    return 1


# ---------------------------------------------------------------- the table of batches


def create_batch(connection: Connection, batch: BatchRecord, now_s: int) -> BatchRecord:
    """Adds a batch. Raises ApiError if its file is missing or the tenant has too many batches."""
    file = find_file(connection, batch.tenant, batch.input_file_id, now_s)
    if file.purpose != FilePurpose.BATCH:
        message = f"input_file_id names a file for {file.purpose!r}, not for 'batch'"
        raise invalid_value(message, "input_file_id")
    marks = ", ".join("?" * len(ACTIVE))
    (number,) = connection.execute(
        f"SELECT count(*) FROM batches WHERE tenant = ? AND status IN ({marks})",
        (batch.tenant, *ACTIVE),
    ).fetchone()
    if number >= MAX_ACTIVE_BATCHES:
        message = f"{MAX_ACTIVE_BATCHES} batches are not over yet"
        raise ApiError(message, code="rate_limit_exceeded", status=429)
    connection.execute(
        "DELETE FROM batches WHERE tenant = ? AND ended_s IS NOT NULL AND number <="
        " (SELECT number FROM batches WHERE tenant = ? ORDER BY number DESC LIMIT 1 OFFSET ?)",
        (batch.tenant, batch.tenant, MAX_KEPT_BATCHES - 1),
    )
    fields = _as_row(batch)
    names = ", ".join(fields)
    marks = ", ".join("?" * len(fields))
    connection.execute(
        f"INSERT INTO batches ({names}) VALUES ({marks})",
        tuple(fields.values()),
    )
    return batch


def find_batch(connection: Connection, tenant: str, batch_id: str) -> BatchRecord:
    """Returns a batch of a tenant. Raises ApiError if there is none."""
    found = _batch_where(connection, "tenant = ? AND id = ?", (tenant, batch_id))
    if found is None:
        message = f"no batch has the id {batch_id[:80]!r}"
        raise ApiError(message, param="batch_id", code="batch_not_found", status=404)
    return found


def list_batches(connection: Connection, tenant: str, page: Page) -> list[BatchRecord]:
    """Returns a page of a tenant's batches."""
    rows = _page(connection, "batches", "tenant = ?", [tenant], page)
    return [_batch_of(row) for row in rows]


def cancel_batch(connection: Connection, tenant: str, batch_id: str, now_s: int) -> BatchRecord:
    """Starts to cancel a batch.

    Raises ApiError if the batch has ended or its output is being written.
    """
    batch = find_batch(connection, tenant, batch_id)
    if batch.status is BatchStatus.CANCELLING:
        return batch
    if batch.status not in CANCELLABLE:
        message = f"the batch is {batch.status}, so it cannot be cancelled"
        raise ApiError(message, param="batch_id", code="invalid_value", status=409)
    ending = BatchStatus.CANCELLED
    return _enter(connection, batch, BatchStatus.CANCELLING, cancelling_s=now_s, ending=ending)


# ---------------------------------------------------------------- functions for the runner


def take_lease(connection: Connection, owner: str, now_s: int) -> bool:
    """Takes or extends the right to run batches. Returns False if another process has the right.

    A lease that ends too far in the future is ignored: it was written before the wall clock was set
    back.
    """
    row = connection.execute("SELECT owner, until_s FROM batch_runner").fetchone()
    if row is not None and row[0] != owner and now_s < row[1] <= now_s + LEASE_S:
        return False
    connection.execute(
        "INSERT OR REPLACE INTO batch_runner (only, owner, until_s) VALUES (1, ?, ?)",
        (owner, now_s + LEASE_S),
    )
    return True


def drop_lease(connection: Connection, owner: str) -> None:
    """Releases the right to run batches, so that others need not wait for the lease's end."""
    connection.execute("DELETE FROM batch_runner WHERE owner = ?", (owner,))


def check_lease(connection: Connection, owner: str) -> None:
    """Raises LeaseLost if this owner does not have the lease."""
    row = connection.execute("SELECT owner FROM batch_runner").fetchone()
    if row is None or row[0] != owner:
        raise LeaseLost


def active_batches(connection: Connection) -> list[BatchRecord]:
    """Returns all unfinished batches, oldest first."""
    marks = ", ".join("?" * len(ACTIVE))
    rows = _rows(
        connection,
        f"SELECT * FROM batches WHERE status IN ({marks}) ORDER BY number",
        ACTIVE,
    )
    return [_batch_of(row) for row in rows]


def validate_slice(
    connection: Connection, owner: str, batch_id: str, max_line_bytes: int, now_s: int
) -> BatchRecord:
    """Validates the next lines of a batch's input file.

    After the last line, the requests of the batch may run.

    If a line has a fault, the batch fails after the last line and lists all faults.
    """
    check_lease(connection, owner)
    batch = _active(connection, batch_id)
    if batch.status is not BatchStatus.VALIDATING:
        return batch
    file = _file_where(connection, "id = ? AND touched_s IS NULL", (batch.input_file_id,))
    if file is None:
        fault = LineFault("file_not_found", "the input file was deleted", "input_file_id")
        return _fail(connection, batch, [fault], now_s)
    data = _read_from(connection, file, batch.num_read_bytes, max_line_bytes)
    is_last = batch.num_read_bytes + len(data) >= file.num_bytes
    lines, num_bytes = split_lines(data, is_last=is_last)
    if not lines and not is_last:
        fault = LineFault("line_too_long", f"a line has more than {max_line_bytes} bytes", None)
        return _fail(connection, batch, [*batch.errors, fault], now_s)
    if len(lines) > SLICE_LINES:
        lines, is_last = lines[:SLICE_LINES], False
        num_bytes = sum(map(len, lines)) + len(lines)
    faults, num_added = _add_lines(connection, batch, lines, max_line_bytes)
    batch = _change(
        connection,
        batch,
        num_read_bytes=batch.num_read_bytes + num_bytes,
        num_read_lines=batch.num_read_lines + len(lines),
        num_lines=batch.num_lines + num_added,
        errors=[*batch.errors, *faults][:MAX_FAULTS],
    )
    if batch.num_lines > MAX_LINES:
        fault = LineFault("too_many_tasks", f"a batch may have {MAX_LINES} requests")
        return _fail(connection, batch, [fault], now_s)
    if not is_last:
        return batch
    if not batch.num_lines and not batch.errors:
        fault = LineFault("empty_file", "the input file has no request")
        return _fail(connection, batch, [fault], now_s)
    if batch.errors:
        return _fail(connection, batch, batch.errors, now_s)
    return _enter(connection, batch, BatchStatus.IN_PROGRESS, in_progress_s=now_s)


def lines_left(
    connection: Connection, batch_id: str, after: int, limit: int
) -> list[tuple[int, str, bytes, int]]:
    """Returns requests without a result, in the order of the file.

    A row has the number, `custom_id`, body and number of lost workers of a request.
    """
    return connection.execute(
        "SELECT number, custom_id, body, num_lost FROM batch_lines"
        " WHERE batch_id = ? AND result IS NULL AND number > ? ORDER BY number LIMIT ?",
        (batch_id, after, limit),
    ).fetchall()


def keep_result(
    connection: Connection, owner: str, batch_id: str, number: int, result: bytes, *, is_error: bool
) -> bool:
    """Stores the result of a request and counts it. Returns True if the result was stored.

    Stores nothing if the request already has a result or its batch has ended.
    """
    check_lease(connection, owner)
    changed = connection.execute(
        "UPDATE batch_lines SET result = ?, is_error = ?, body = NULL"
        " WHERE batch_id = ? AND number = ? AND result IS NULL",
        (result, int(is_error), batch_id, number),
    ).rowcount
    if changed:
        column = "num_failed" if is_error else "num_completed"
        connection.execute(
            f"UPDATE batches SET {column} = {column} + 1 WHERE id = ?",
            (batch_id,),
        )
    return bool(changed)


def record_lost(connection: Connection, owner: str, batch_id: str, number: int) -> None:
    """Records that workers were lost once more while they computed a request."""
    check_lease(connection, owner)
    connection.execute(
        "UPDATE batch_lines SET num_lost = num_lost + 1 WHERE batch_id = ? AND number = ?",
        (batch_id, number),
    )


def begin_end(
    connection: Connection, owner: str, batch_id: str, ending: BatchStatus, now_s: int
) -> BatchRecord:
    """Starts to write the output files of a batch that is complete or has expired.

    A batch is not complete while one of its requests has no result. Such a batch is not changed.
    """
    check_lease(connection, owner)
    batch = _active(connection, batch_id)
    if batch.status in (BatchStatus.CANCELLING, BatchStatus.FINALIZING):
        return batch
    if ending is BatchStatus.COMPLETED and lines_left(connection, batch_id, 0, 1):
        return batch
    return _enter(connection, batch, BatchStatus.FINALIZING, ending=ending, finalizing_s=now_s)


def write_slice(connection: Connection, owner: str, batch_id: str, now_s: int) -> BatchRecord:
    """Moves the next results of a batch to its output files.

    If no results are left, the batch ends.
    """
    check_lease(connection, owner)
    batch = _active(connection, batch_id)
    ending = batch.ending
    assert ending is not None
    rows = connection.execute(
        "SELECT number, custom_id, result, is_error FROM batch_lines"
        " WHERE batch_id = ? AND number > ? ORDER BY number LIMIT ?",
        (batch_id, batch.num_written_lines, SLICE_LINES),
    ).fetchall()
    if not rows:
        return _end(connection, batch, ending, now_s)
    output, errors = bytearray(), bytearray()
    for number, custom_id, result, is_error in rows:
        if result is None:
            errors += _unanswered(batch_id, number, custom_id, ending)
        else:
            (errors if is_error else output).extend(result)
    batch = _change(
        connection,
        batch,
        num_written_lines=rows[-1][0],
        output_file_id=_write(connection, batch, "output", bytes(output), now_s),
        error_file_id=_write(connection, batch, "error", bytes(errors), now_s),
    )
    connection.execute(
        "DELETE FROM batch_lines WHERE batch_id = ? AND number <= ?", (batch_id, rows[-1][0])
    )
    return batch


def line_id(batch_id: str, number: int) -> str:
    """Returns the id of the output line of a request."""
    return f"batch_req_{batch_id.removeprefix('batch_')}_{number}"


# ---------------------------------------------------------------- private functions


def _unanswered(batch_id: str, number: int, custom_id: str, ending: BatchStatus) -> bytes:
    name = line_id(batch_id, number)
    if ending is BatchStatus.EXPIRED:
        message = "the completion window ended before this request was answered"
        return unanswered_line(name, custom_id, "batch_expired", message)
    message = "the batch was cancelled before this request was answered"
    return unanswered_line(name, custom_id, "batch_cancelled", message)


def _end(
    connection: Connection, batch: BatchRecord, ending: BatchStatus, now_s: int
) -> BatchRecord:
    for file_id in (batch.output_file_id, batch.error_file_id):
        if file_id is not None:
            connection.execute(
                "UPDATE files SET touched_s = NULL, expires_s = ? + expires_after_s WHERE id = ?",
                (now_s, file_id),
            )
    return _enter(connection, batch, ending, ended_s=now_s)


def _write(
    connection: Connection, batch: BatchRecord, kind: str, data: bytes, now_s: int
) -> str | None:
    """Appends data to an output file, and creates the file for the first data.

    Returns the file's id, or None if there is no data yet.
    """
    file_id = batch.output_file_id if kind == "output" else batch.error_file_id
    if not data:
        return file_id
    if file_id is None:
        file_id = f"file-{batch.id.removeprefix('batch_')}-{kind}"
        name = f"{batch.id}_{kind}.jsonl"
        file = FileRecord(file_id, batch.tenant, FilePurpose.BATCH_OUTPUT, name, 0, now_s, None)
        begin_file(connection, file, batch.output_expires_after_s)
    append_piece(connection, file_id, data, now_s)
    return file_id


def _fail(
    connection: Connection, batch: BatchRecord, faults: Sequence[LineFault], now_s: int
) -> BatchRecord:
    connection.execute("DELETE FROM batch_lines WHERE batch_id = ?", (batch.id,))
    batch = _change(connection, batch, errors=list(faults[:MAX_FAULTS]), num_lines=0)
    return _enter(connection, batch, BatchStatus.FAILED, ended_s=now_s)


def _add_lines(
    connection: Connection, batch: BatchRecord, lines: Sequence[bytes], max_bytes: int
) -> tuple[list[LineFault], int]:
    """Adds the requests of some lines.

    Returns the faulty lines and the number of added requests.
    """
    faults: list[LineFault] = []
    num_added = 0
    for number, data in enumerate(lines, start=batch.num_read_lines + 1):
        if not data.strip():
            continue
        line = parse_line(data, batch.endpoint, max_bytes)
        if isinstance(line, InputLine):
            added = connection.execute(
                "INSERT OR IGNORE INTO batch_lines (batch_id, number, custom_id, body)"
                " VALUES (?, ?, ?, ?)",
                (batch.id, number, line.custom_id, line.body),
            ).rowcount
            num_added += added
            line = line if added else duplicate(line.custom_id)
        if isinstance(line, LineFault):
            faults.append(msgspec.structs.replace(line, line=number))
    return faults, num_added


def _read_from(connection: Connection, file: FileRecord, start: int, max_line_bytes: int) -> bytes:
    """Returns a part of a file, from the byte `start`.

    The part has at least one whole line, unless the line is too long.
    """
    data = bytearray()
    rows = connection.execute(
        "SELECT start, data FROM file_pieces WHERE file_id = ? AND start >="
        " (SELECT max(start) FROM file_pieces WHERE file_id = ? AND start <= ?) ORDER BY start",
        (file.id, file.id, start),
    )
    for piece_start, piece in rows:
        data += piece[max(start - piece_start, 0) :]
        if len(data) >= SLICE_BYTES and (b"\n" in data or len(data) > max_line_bytes):
            break
    return bytes(data)


def _active(connection: Connection, batch_id: str) -> BatchRecord:
    found = _batch_where(connection, "id = ?", (batch_id,))
    assert found is not None
    return found


def _enter(
    connection: Connection, batch: BatchRecord, status: BatchStatus, **changes: Any
) -> BatchRecord:
    """Changes the status of a batch, and other columns in the same statement."""
    assert status in NEXT[batch.status], (batch.status, status)
    return _change(connection, batch, status=status, **changes)


def _change(connection: Connection, batch: BatchRecord, **changes: Any) -> BatchRecord:
    changed = msgspec.structs.replace(batch, **changes)
    row = _as_row(changed)
    sets = ", ".join(f"{name} = ?" for name in changes)
    connection.execute(
        f"UPDATE batches SET {sets} WHERE id = ?",
        (*(row[name] for name in changes), batch.id),
    )
    return changed


def _as_row(batch: BatchRecord) -> dict[str, Any]:
    row = msgspec.structs.asdict(batch)
    row["metadata"] = msgspec.json.encode(batch.metadata).decode()
    row["errors"] = msgspec.json.encode(batch.errors).decode()
    return row


def _batch_of(row: dict[str, Any]) -> BatchRecord:
    row["metadata"] = msgspec.json.decode(row["metadata"])
    row["errors"] = msgspec.json.decode(row["errors"])
    return msgspec.convert(row, BatchRecord)


def _batch_where(
    connection: Connection, where: str, arguments: Sequence[object]
) -> BatchRecord | None:
    rows = _rows(connection, f"SELECT * FROM batches WHERE {where}", arguments)
    return next((_batch_of(row) for row in rows), None)


def _file_where(
    connection: Connection, where: str, arguments: Sequence[object]
) -> FileRecord | None:
    rows = _rows(connection, f"SELECT * FROM files WHERE {where}", arguments)
    return next((msgspec.convert(row, FileRecord) for row in rows), None)


def _page(
    connection: Connection, table: str, where: str, arguments: Sequence[object], page: Page
) -> Iterator[dict[str, Any]]:
    """Returns a page of a tenant's rows; `arguments` begins with the tenant. Raises ApiError."""
    arguments = list(arguments)
    if page.after is not None:
        row = connection.execute(
            f"SELECT number FROM {table} WHERE id = ? AND tenant = ?", (page.after, arguments[0])
        ).fetchone()
        if row is None:
            raise invalid_value(f"after is {page.after[:80]!r}, which is not in the list", "after")
        where += f" AND number {'>' if page.is_ascending else '<'} ?"
        arguments.append(row[0])
    order = "ASC" if page.is_ascending else "DESC"
    query = f"SELECT * FROM {table} WHERE {where} ORDER BY number {order} LIMIT ?"
    return _rows(connection, query, [*arguments, page.limit])


def _rows(
    connection: Connection, query: str, arguments: Sequence[object]
) -> Iterator[dict[str, Any]]:
    cursor = connection.execute(query, arguments)
    names = [column[0] for column in cursor.description]
    return (dict(zip(names, row, strict=True)) for row in cursor)
