"""A task group that leaves no reference cycle when it raises."""

import asyncio
from types import TracebackType


class LightTaskGroup(asyncio.TaskGroup):
    """A TaskGroup of asyncio without the reference from its frame to the error that it raises.

    Such a cycle keeps the bodies and answers of all frames in the traceback, until a garbage
    collection. It arises whenever a task fails, and whenever a client leaves.
    """

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Waits for all tasks. Raises the same errors as asyncio's group."""
        try:
            await super().__aexit__(kind, error, traceback)
        except BaseException as raised:
            raised.__traceback__ = traceback if raised is error else None
            raise
        finally:
            # The frame that holds this group may be in the traceback of a task's error.
            self._parent_task = None
            del error, traceback
