"""Shares the parsing of HTTP between the connections of a loop: bounded work in each turn.

A body may come in chunks of one byte. Then the parser calls Python once for six bytes, and a buffer
of 256 KiB takes 0.2 s in one piece. So input is parsed in slices. When the work of a turn is spent,
the rest waits for the next pass of the loop, where connections take turns. A connection whose input
waits is not read from. Usual requests and long bodies never wait.
"""

import asyncio
import logging
from collections import deque
from typing import Protocol

log = logging.getLogger(__name__)

SLICE_BYTES = 2048
WORK_PER_TURN = 4000  # 2 to 4 ms
PART_WORK, FIELD_WORK = 4, 1  # work of one callback: for a part of a body, for a header field


class FedConnection(Protocol):
    """A connection that is given its input."""

    def parse(self, data: bytes | memoryview) -> bool:
        """Parses a slice. Returns False if the rest must be thrown away."""
        ...

    def hold(self) -> None:
        """Stops reading."""
        ...

    def let_go(self) -> None:
        """Reads again, unless there are other reasons not to."""
        ...

    def cut(self) -> None:
        """Ends the connection at once."""
        ...


class Feeder:
    """Gives input to the connections of one loop."""

    def __init__(self) -> None:
        self._work_left = WORK_PER_TURN
        self._is_due = False  # a turn is scheduled
        self._waiting: dict[FedConnection, deque[memoryview]] = {}  # the next one comes first

    def spend(self, work: int) -> None:
        """Counts work that the parser caused."""
        self._work_left -= work

    def take(self, connection: FedConnection, data: bytes) -> None:
        """Gives input to a connection, at once or in later turns."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn)
        if (inputs := self._waiting.get(connection)) is not None:
            inputs.append(memoryview(data))
            connection.hold()  # it reads again, for another reason than ours
        elif len(data) <= SLICE_BYTES and self._work_left > 0:
            connection.parse(data)
        else:
            self._begin(connection, memoryview(data))

    def remove(self, connection: FedConnection) -> None:
        """Throws away what waits for a connection."""
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
            except Exception:  # other connections go on
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
            elif self._waiting.pop(connection, None) is not None:  # it has not ended meanwhile
                self._waiting[connection] = inputs
