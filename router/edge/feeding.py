"""Shares the parsing of HTTP among the connections of a loop: bounded work in each turn.

A body may come in chunks of one byte. Then the parser calls Python once per six bytes, and a buffer
of 256 KiB takes 0.2 s in one piece. So input is parsed in slices. When the work of a turn is used
up, the rest waits for the next pass of the loop, where connections take turns. A connection with
waiting input is not read. Usual requests and long bodies never wait.
"""

import asyncio
import logging
from collections import deque
from typing import Protocol

log = logging.getLogger(__name__)

SLICE_BYTES = 2048
WORK_PER_TURN = 4000  # units; 2 to 4 ms
PART_WORK, FIELD_WORK = 4, 1  # work per callback: part of a body, header field


class FedConnection(Protocol):
    """A connection whose input is fed by a `Feeder`."""

    def parse(self, data: bytes | memoryview) -> bool:
        """Parses a slice. Returns False if the rest must be discarded."""
        ...

    def hold(self) -> None:
        """Stops reading."""
        ...

    def let_go(self) -> None:
        """Resumes reading, unless there are other reasons to pause."""
        ...

    def cut(self) -> None:
        """Closes the connection at once."""
        ...


class Feeder:
    """Feeds input to the connections of one event loop."""

    def __init__(self) -> None:
        self._work_left = WORK_PER_TURN
        self._is_due = False  # True while a turn is scheduled
        self._waiting: dict[FedConnection, deque[memoryview]] = {}  # waiting input, next first

    def spend(self, work: int) -> None:
        """Adds work that the parser caused."""
        self._work_left -= work

    def take(self, connection: FedConnection, data: bytes) -> None:
        """Feeds input to a connection, at once or in later turns."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn)
        if (inputs := self._waiting.get(connection)) is not None:
            inputs.append(memoryview(data))
            connection.hold()  # it had resumed reading for another reason
        elif len(data) <= SLICE_BYTES and self._work_left > 0:
            connection.parse(data)
        else:
            self._begin(connection, memoryview(data))

    def remove(self, connection: FedConnection) -> None:
        """Discards the waiting input of a connection."""
        if self._waiting.pop(connection, None) is not None:
            connection.let_go()

    def _begin(self, connection: FedConnection, data: memoryview) -> None:
        while data and self._work_left > 0:
            if not connection.parse(data[:SLICE_BYTES]):
                return
            data = data[SLICE_BYTES:]
        if data:
            self._waiting[connection] = deque((data,))
            connection.hold()

    def _turn(self) -> None:
        self._work_left = WORK_PER_TURN
        self._is_due = bool(self._waiting)
        if self._is_due:
            asyncio.get_running_loop().call_soon(self._turn)
        while self._waiting and self._work_left > 0:
            connection = next(iter(self._waiting))
            inputs = self._waiting[connection]
            data = inputs.popleft()
            try:
                goes_on = connection.parse(data[:SLICE_BYTES])
            except Exception:  # other connections must not be affected
                log.exception("parsing the input of a connection failed: it is cut")
                connection.cut()
                goes_on = False
            if not goes_on:
                self.remove(connection)
                continue
            if len(data) > SLICE_BYTES:
                inputs.appendleft(data[SLICE_BYTES:])
            if not inputs:
                self.remove(connection)
            elif self._waiting.pop(connection, None) is not None:  # it is still open
                self._waiting[connection] = inputs
