"""Work that a gateway does beside the answers to its clients."""

from typing import Protocol


class BackgroundPart(Protocol):
    """One kind of such work."""

    async def open(self) -> None:
        """Begins. The routers are open."""
        ...

    def stop_draining(self) -> None:
        """Lets a running `close` wait no longer."""
        ...

    async def close(self, timeout_s: float) -> None:
        """Stops; what a client waits for may take so long. The routers are still open."""
        ...


class BackgroundWork:
    """All such work of one application: `app_of` adds it, and who serves the app opens it."""

    def __init__(self) -> None:
        self._parts: list[BackgroundPart] = []

    def add(self, part: BackgroundPart) -> None:
        """Adds work that is not open yet."""
        self._parts.append(part)

    async def open(self) -> None:
        """Begins all work."""
        for part in self._parts:
            await part.open()

    def stop_draining(self) -> None:
        """Lets a running `close` wait no longer."""
        for part in self._parts:
            part.stop_draining()

    async def close(self, timeout_s: float) -> None:
        """Stops all work, the latest first; what a client waits for may take so long."""
        for part in reversed(self._parts):
            await part.close(timeout_s)
