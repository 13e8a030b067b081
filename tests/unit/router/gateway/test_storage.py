"""The gateway's database: transactions, several processes, bounds."""

import asyncio
import sqlite3
from pathlib import Path

import pytest

from engine.errors import ConfigError
from router.gateway import storage
from router.gateway.storage import Storage
from router.inbox.api_errors import ApiError

TABLE = "CREATE TABLE IF NOT EXISTS numbers (number INTEGER PRIMARY KEY)"


def add(connection: sqlite3.Connection, number: int) -> None:
    connection.execute("INSERT INTO numbers VALUES (?)", (number,))


def numbers(connection: sqlite3.Connection) -> list[int]:
    rows = connection.execute("SELECT number FROM numbers ORDER BY number")
    return [number for (number,) in rows]


async def opened(path: Path | None) -> Storage:
    store = Storage(path, TABLE)
    await store.open()
    return store


async def test_processes_that_start_at_once_wait_for_each_other(tmp_path: Path) -> None:
    for turn in range(5):
        stores = [Storage(tmp_path / str(turn), TABLE) for _ in range(4)]
        await asyncio.gather(*(store.open() for store in stores))
        await asyncio.gather(*(store.run(add, i) for i, store in enumerate(stores)))
        assert await stores[0].run(numbers) == [0, 1, 2, 3]
        await asyncio.gather(*(store.close() for store in stores))


async def test_a_file_outlives_the_process_and_memory_does_not(tmp_path: Path) -> None:
    for path, kept in ((tmp_path / "new" / "store.sqlite", [1]), (None, [])):
        first = await opened(path)
        await first.run(add, 1)
        await first.close()
        second = await opened(path)
        assert await second.run(numbers) == kept
        await second.close()


async def test_two_processes_share_a_file_that_others_cannot_read(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    first, second = await opened(path), await opened(path)
    await first.run(add, 1)
    await second.run(add, 2)
    assert await first.run(numbers) == [1, 2]
    assert path.stat().st_mode & 0o077 == 0
    await first.close()
    await second.close()


async def test_work_that_fails_changes_nothing() -> None:
    store = await opened(None)

    def work(connection: sqlite3.Connection) -> None:
        add(connection, 1)
        raise KeyError("of the work")

    with pytest.raises(KeyError):
        await store.run(work)
    with pytest.raises(sqlite3.IntegrityError):
        await store.run(lambda connection: [add(connection, 2), add(connection, 2)])
    assert await store.run(numbers) == []
    await store.close()


async def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    path.write_bytes(b"not a database" * 100)
    store = Storage(path, TABLE)
    with pytest.raises(ConfigError, match=r"gateway\.store: .*store\.sqlite"):
        await store.open()
    await store.close()


async def test_too_much_waiting_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = await opened(None)
    monkeypatch.setattr(storage, "MAX_WAITING", 0)
    with pytest.raises(ApiError) as caught:
        await store.run(numbers)
    assert (caught.value.status, caught.value.code) == (503, "overloaded")
    await store.close()
