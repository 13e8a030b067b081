"""End-to-end tests end the fixtures that they share with their session."""

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

own_ray.prepare(os.environ)  # before a test imports Ray
os.environ["BATON_CACHE"] = str(CACHE)  # before the nursery starts, whose workers inherit it


@pytest.fixture(autouse=True, scope="session")
def _nursery() -> Iterator[None]:
    yield
    NURSERY.close()


@pytest.fixture(scope="session")
def lent() -> Iterator[tuple[str, ...]]:
    """The command `baton` whose processes are children of this session's nursery.

    Each start with a nursery of its own would import torch again.
    """
    with tempfile.TemporaryDirectory() as folder:
        port = NurseryPort(NURSERY, Path(folder) / "nursery")
        port.open()
        yield sys.executable, "-m", "tests.kits.services.lent_nursery", str(port.path)
        port.close()


@pytest.fixture(scope="session")
def served(lent) -> Iterator[Served]:
    """A deployment of all tests that only ask: hands every prompt over, drafts where that pays."""
    options = ("--launcher", "process", "--speculate", "auto", "--grpc-port", "0")
    with serve(*options, command=lent, **HANDS_OVER) as running:
        yield running


@pytest.fixture(scope="session")
def client(served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as c:
        yield c
