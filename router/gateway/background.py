"""Background work of a gateway: work that is not an answer to a waiting client."""

from typing import Protocol


class BackgroundPart(Protocol):
    """One kind of background work, for example batches."""

    async def open(self) -> None:
        """Starts the work. The routers are already open."""
        ...

    def stop_draining(self) -> None:
        """Makes a running `close` stop waiting."""
        ...

    async def close(self, timeout_s: float) -> None:
        """Stops the work, while the routers are still open.

        Work that a client waits for may run for `timeout_s` more seconds.
        """
        ...


class BackgroundWork:
    """All background work of an application.

    `app_of` adds the parts, and the application's server opens the parts.
    """

    def __init__(self) -> None:
        self._parts: list[BackgroundPart] = []

    def add(self, part: BackgroundPart) -> None:
        """Adds a part that is not open yet."""
        self._parts.append(part)

    async def open(self) -> None:
        """Starts all work."""
        for part in self._parts:
            await part.open()

    def stop_draining(self) -> None:
        """Makes a running `close` stop waiting."""
        for part in self._parts:
            part.stop_draining()

    async def close(self, timeout_s: float) -> None:
        """Stops all work, latest first.

        Work that a client waits for may run for `timeout_s` more seconds.
        """
        for part in reversed(self._parts):
            await part.close(timeout_s)
