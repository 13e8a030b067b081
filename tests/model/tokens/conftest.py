"""Two runners of the bundled pair, for tests in which one worker hands over to another."""

import pytest

from deploy.base.defaults import BUNDLED_DRAFT, BUNDLED_MODEL
from engine.config import WeightFormat
from tests.kits.models.requests import NUM_BLOCKS


@pytest.fixture(scope="module")
def runners():
    from engine.model.runner import TorchRunner

    opened = [
        TorchRunner(
            BUNDLED_MODEL, draft=BUNDLED_DRAFT, num_blocks=NUM_BLOCKS, weights=WeightFormat.INT8
        )
        for _ in range(2)
    ]
    for runner in opened:
        runner.open()
    yield opened
    for runner in opened:
        runner.close()
