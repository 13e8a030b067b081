"""What end-to-end tests of a session have in common ends with it."""

from collections.abc import Iterator

import pytest

from tests.e2e.cluster import NURSERY


@pytest.fixture(autouse=True, scope="session")
def _nursery() -> Iterator[None]:
    yield
    NURSERY.close()
