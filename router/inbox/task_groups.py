"""A task group that leaves no reference cycle when it raises an error."""

import asyncio
from types import TracebackType


class LightTaskGroup(asyncio.TaskGroup):
    """A TaskGroup of asyncio whose frame does not refer to the error that it raises.

    Such a reference is a cycle, which keeps the bodies and answers of all frames in the traceback
    until a garbage collection. It would arise whenever a task fails, and whenever a client
    disconnects.
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
            # The traceback of a task's error may include the frame that refers to this group.
            self._parent_task = None
            del error, traceback
