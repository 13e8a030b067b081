"""Work that a gateway does beside the answers to its clients."""

from typing import Protocol


class BackgroundPart(Protocol):
    """One kind of such work."""

    async def open(self) -> None:
        """Begins. The routers are open."""
        ...

    async def close(self) -> None:
        """Stops. The routers are still open."""
        ...


class BackgroundWork:
    """All such work of one application: `create_app` adds it, and who serves the app opens it."""

    def __init__(self) -> None:
        self._parts: list[BackgroundPart] = []

    def add(self, part: BackgroundPart) -> None:
        """Adds work that is not open yet."""
        self._parts.append(part)

    async def open(self) -> None:
        """Begins all work."""
        for part in self._parts:
            await part.open()

    async def close(self) -> None:
        """Stops all work, the latest first."""
        for part in reversed(self._parts):
            await part.close()
