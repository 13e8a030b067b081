"""Fixtures for a deployment's run directory and its admin API. Each test file defines `served`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.admin.client import AdminClient, find_deployment


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("operator") / "run"


@pytest.fixture
def admin(served, run_dir) -> Iterator[AdminClient]:
    with AdminClient(*find_deployment(None, None, {"BATON_RUN_DIR": str(run_dir)})) as client:
        yield client
