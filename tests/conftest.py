"""For all tests: what needs a library or a device that is absent is skipped, and says so."""

import asyncio
import gc
import importlib.util
import inspect
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

NEEDS = {"torch": ("torch", "transformers"), "ray": ("ray",)}  # by mark

# No deadlines, and examples may be drawn slowly: machines that test also do other things. A change
# is judged by the same few examples every time: tests that plant mistakes find each among them. New
# examples are searched for by `make fuzz`.
BUSY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("baton", BUSY, derandomize=True, max_examples=40)
settings.register_profile("search", BUSY, max_examples=500)
settings.load_profile("baton")


def _absent(mark: str) -> str | None:
    """Returns why tests with this mark cannot run here, or None."""
    absent = [name for name in NEEDS.get(mark, ()) if importlib.util.find_spec(name) is None]
    if absent:
        return f"{' and '.join(absent)} not installed"
    if mark == "gpu" and not Path("/proc/driver/nvidia/version").exists():
        return "no CUDA device"
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Imports without looking for garbage: nearly all that they make stays."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Lets no later search for garbage look at what was imported."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)  # tests make much that is dropped at once
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons = {mark: _absent(mark) for mark in (*NEEDS, "gpu")}
    for item in items:
        for mark, reason in reasons.items():
            if reason is not None and item.get_closest_marker(mark) is not None:
                item.add_marker(pytest.mark.skip(reason=f"marked {mark}: {reason}"))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine, and checks that it leaves no task behind."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames

    async def run() -> None:
        await pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
    return True
