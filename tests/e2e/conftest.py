"""What end-to-end tests of a session have in common ends with it."""

import os
from collections.abc import Iterator

import openai
import pytest

from deploy.ray import own_ray
from tests.kits.services.cluster import NURSERY
from tests.kits.services.served import HANDS_OVER, Served, serve

own_ray.prepare(os.environ)  # before a test imports Ray


@pytest.fixture(autouse=True, scope="session")
def _nursery() -> Iterator[None]:
    yield
    NURSERY.close()


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """A deployment of all tests that only ask: hands every prompt over, drafts where that pays."""
    options = ("--launcher", "process", "--speculate", "auto", "--grpc-port", "0")
    with serve(*options, **HANDS_OVER) as running:
        yield running


@pytest.fixture(scope="session")
def client(served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as c:
        yield c
