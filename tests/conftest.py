"""Hooks for all tests. A test that needs an absent library or device is skipped with a reason."""

import asyncio
import gc
import importlib.util
import inspect
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# importable modules that each mark needs
NEEDS = {"torch": ("torch", "transformers"), "ray": ("ray",)}

# No deadlines, and slow examples are allowed, because test machines also do other work. Every run
# uses the same few examples; tests that plant mistakes find each mistake with these examples. `make
# fuzz` searches with new examples.
BUSY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("baton", BUSY, derandomize=True, max_examples=40)
settings.register_profile("search", BUSY, max_examples=500)
settings.load_profile("baton")


def _absent(mark: str) -> str | None:
    """Returns the reason why tests with this mark cannot run on this machine, or None."""
    absent = [name for name in NEEDS.get(mark, ()) if importlib.util.find_spec(name) is None]
    if absent:
        return f"{' and '.join(absent)} not installed"
    if mark == "gpu" and not Path("/proc/driver/nvidia/version").exists():
        return "no CUDA device"
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Collects tests without the garbage collector, because nearly all imported objects stay."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Exempts all imported objects from later garbage collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)  # tests create many short-lived objects
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons = {mark: _absent(mark) for mark in (*NEEDS, "gpu")}
    for item in items:
        for mark, reason in reasons.items():
            if reason is not None and item.get_closest_marker(mark) is not None:
                item.add_marker(pytest.mark.skip(reason=f"marked {mark}: {reason}"))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a coroutine test, and checks that the test leaves no task running."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames

    async def run() -> None:
        await pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
    return True
