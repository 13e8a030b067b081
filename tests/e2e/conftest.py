"""Fixtures that all end-to-end tests of a session share. They are closed with the session."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from deploy.local.nursery_port import NurseryPort
from deploy.ray import own_ray
from tests.kits.models.real import CACHE
from tests.kits.services.cluster import NURSERY
from tests.kits.services.served import HANDS_OVER, Served, serve

own_ray.prepare(os.environ)  # must precede Ray's import in any test
# must precede the nursery's start, because its workers inherit the variable
os.environ["BATON_CACHE"] = str(CACHE)


@pytest.fixture(autouse=True, scope="session")
def _nursery() -> Iterator[None]:
    yield
    NURSERY.close()


@pytest.fixture(scope="session")
def lent() -> Iterator[tuple[str, ...]]:
    """A `baton` command whose processes are children of this session's nursery.

    A nursery for each command would import torch again.
    """
    with tempfile.TemporaryDirectory() as folder:
        port = NurseryPort(NURSERY, Path(folder) / "nursery")
        port.open()
        yield sys.executable, "-m", "tests.kits.services.lent_nursery", str(port.path)
        port.close()


@pytest.fixture(scope="session")
def served(lent) -> Iterator[Served]:
    """A deployment shared by tests that only send requests.

    It hands every prompt over, and drafts where drafts save time.
    """
    options = ("--launcher", "process", "--speculate", "auto", "--grpc-port", "0")
    with serve(*options, command=lent, **HANDS_OVER) as running:
        yield running


@pytest.fixture(scope="session")
def client(served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as c:
        yield c
