"""Tasks and threads of the controller: the failure of one does not stop the others."""

import asyncio
import sys

import pytest

from deploy.controller.tasks import ControllerTasks


@pytest.mark.parametrize("way", ["in_thread", "in_start_thread"])
def test_a_library_that_ends_its_thread_does_not_end_the_loop(way):
    async def scene() -> int:
        tasks = ControllerTasks(lambda _: None)
        with pytest.raises(RuntimeError, match=r"ended its thread: SystemExit\(3\)"):
            await getattr(tasks, way)(sys.exit, 3)
        answer: int = await getattr(tasks, way)(int, "7")
        await tasks.close(1.0)
        return answer

    assert asyncio.run(scene()) == 7
