"""Turns on the event loop, for work that would block the loop for too long.

Long work is cut into pieces of a few milliseconds. Each pass of the loop runs one waiting piece. So
the loop serves all connections between two pieces, however many answers are being encoded. Tenants
take turns (`router.inbox.turns`).

Threads would not help: such work holds the interpreter lock, and the loop would wait for the lock
longer than for a piece.
"""

import asyncio
from collections.abc import Awaitable, Callable

from router.inbox.turns import TenantTurns

Turn = Callable[[], Awaitable[None]]  # returns when one piece of work may run


async def no_turn() -> None:
    """A `Turn` that does not wait; for short work."""


class LoopTurns:
    """The waiting pieces of work of one event loop; the constructor needs no event loop."""

    def __init__(self) -> None:
        self._waiting: TenantTurns[str, asyncio.Future[None]] = TenantTurns()
        self._is_going = False

    async def take(self, tenant: str) -> None:
        """Returns when a tenant may run one piece of work, within the call."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.put(tenant, turn)
        if not self._is_going:
            self._is_going = True
            loop.call_soon(self._give)
        await turn

    def _give(self) -> None:
        """Gives the next turn; the one after it comes in the next pass of the loop."""
        while (turn := self._waiting.take()) is not None:
            if not turn.done():  # else the client has left
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._give)
                return
        self._is_going = False
