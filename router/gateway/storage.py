"""The gateway's database: stored responses, files and batches.

SQLite, in memory or in a file that all gateway processes of a machine share. Each process uses the
database from one dedicated thread, so that no stream waits for a disk. A unit of work is one
transaction: after `kill -9` a unit is either complete or absent.
"""

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from engine.errors import ConfigError
from router.gateway.batches.tables import TABLES as BATCH_TABLES
from router.gateway.responses.table import TABLES as RESPONSE_TABLES
from router.inbox.api_errors import ApiError

MAX_WAITING = 1024  # maximum waiting units of work; further units are refused
LOG_PAUSE_S = 0.02
BUSY_TIMEOUT_S = 10.0  # seconds; other processes lock the file for milliseconds

# The whole schema. Each part of the gateway adds its tables to the schema, with IF NOT EXISTS.
TABLES = BATCH_TABLES + RESPONSE_TABLES

P = ParamSpec("P")
T = TypeVar("T")


class Storage:
    """One process's connection to the database. `open` or the first use opens the connection."""

    def __init__(self, path: Path | None, tables: str = TABLES) -> None:
        """`path` is the file.

        If `path` is None, the database is in memory, for this process only.
        """
        self._path = path
        self._tables = tables
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="storage")
        self._connection: sqlite3.Connection | None = None
        self._num_waiting = 0

    async def open(self) -> None:
        """Opens the file and creates the tables. Raises ConfigError."""
        try:
            await self._in_thread(self._opened)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"gateway.store: {self._path}: {error}") from error

    async def run(
        self,
        work: Callable[Concatenate[sqlite3.Connection, P], T],
        *args: P.args,
        **given: P.kwargs,
    ) -> T:
        """Calls `work` with the connection in one transaction, and returns the result of `work`.

        If `work` raises an exception, the transaction is rolled back. Raises ApiError if too many
        units of work are waiting.
        """
        if self._num_waiting >= MAX_WAITING:
            raise ApiError("the store is busy; try again", code="overloaded", status=503)
        return await self._in_thread(lambda: self._transaction(work, *args, **given))

    async def close(self) -> None:
        """Waits for the work in progress, and closes the file."""
        await self._in_thread(self._close)
        self._thread.shutdown()

    async def _in_thread(self, call: Callable[[], T]) -> T:
        self._num_waiting += 1
        future = asyncio.get_running_loop().run_in_executor(self._thread, call)
        future.add_done_callback(self._record_done)
        try:
            return await future
        finally:
            del future  # the future has the error, whose traceback has this frame

    def _record_done(self, _: object) -> None:
        self._num_waiting -= 1

    def _opened(self) -> sqlite3.Connection:
        if self._connection is not None:
            return self._connection
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch(mode=0o600)  # the file holds users' requests and answers
        connection = sqlite3.connect(
            ":memory:" if self._path is None else self._path,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,  # `_transaction` starts transactions
            check_same_thread=False,
        )
        _keep_a_log(connection)
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.executescript(self._tables)
        self._connection = connection
        return connection

    def _transaction(
        self,
        work: Callable[Concatenate[sqlite3.Connection, P], T],
        *args: P.args,
        **given: P.kwargs,
    ) -> T:
        connection = self._opened()
        connection.execute("BEGIN IMMEDIATE")
        try:
            result = work(connection, *args, **given)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        return result

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _keep_a_log(connection: sqlite3.Connection) -> None:
    """Switches SQLite to a write-ahead log, so that readers do not wait for writers.

    The switch needs a lock for which SQLite does not wait. All gateways of a machine start at the
    same time, so the switch is tried again if another gateway has the lock. Raises sqlite3.Error.
    """
    for _ in range(round(BUSY_TIMEOUT_S / LOG_PAUSE_S)):
        with suppress(sqlite3.OperationalError):
            connection.execute("PRAGMA journal_mode = WAL")
            return
        threading.Event().wait(LOG_PAUSE_S)
    connection.execute("PRAGMA journal_mode = WAL")
