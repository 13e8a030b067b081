"""Skips each test file, with the reason, if torch or transformers are not installed."""

import importlib.util

import pytest

ABSENT = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]


class SkippedModule(pytest.Module):
    """A test file that is skipped without being imported."""

    def collect(self):
        pytest.skip(f"{' and '.join(ABSENT)} not installed", allow_module_level=True)


if ABSENT:

    def pytest_pycollect_makemodule(module_path, parent):
        return SkippedModule.from_parent(parent, path=module_path)


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    import torch

    torch.set_num_threads(1)
