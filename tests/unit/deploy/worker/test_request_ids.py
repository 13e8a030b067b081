"""A worker's log lines contain the id of the request that they concern."""

import asyncio
import logging

import pytest

from deploy.worker.gateway_sessions import MAX_KEPT, RequestIds
from engine.log_context import REQUEST
from engine.messages import GatewayId, Generate, Limits, Role, Sampling, SeqId
from engine.worker.events import FromGateway, PullDone, PullFailed
from kvtransfer.lease.sink import ABORTED
from tests.unit.deploy.worker.test_host import host

SEQ_ID = SeqId("cmpl-1.0")


@pytest.fixture
def lines():
    """Collects the logged lines with their request ids."""
    found = []

    class Keeper(logging.Handler):
        def emit(self, record):
            found.append((record.getMessage(), REQUEST.get()))

    keeper, log = Keeper(), logging.getLogger("deploy.worker")
    level = log.level
    log.addHandler(keeper)
    log.setLevel(logging.INFO)
    yield found
    log.removeHandler(keeper)
    log.setLevel(level)


def test_both_ids_are_known_while_a_line_is_logged():
    ids = RequestIds()
    with ids.logged(SEQ_ID, "mine"):
        pass
    with ids.logged(SEQ_ID):
        assert REQUEST.get() == "cmpl-1 mine"
    with ids.logged(SeqId("cmpl-2.0.copy")):
        assert REQUEST.get() == "cmpl-2"
    assert REQUEST.get() == ""


def test_only_the_latest_ids_are_kept():
    ids = RequestIds()
    for number in range(MAX_KEPT + 10):
        with ids.logged(SeqId(f"cmpl-{number}.0"), "mine"), ids.logged(SeqId(f"cmpl-x{number}.0")):
            pass
    assert len(ids._client_ids) == MAX_KEPT
    with ids.logged(SeqId("cmpl-0.0")):
        assert REQUEST.get() == "cmpl-0"
    with ids.logged(SeqId(f"cmpl-{MAX_KEPT + 9}.0")):
        assert REQUEST.get().endswith(" mine")


def test_lines_of_a_sequence_have_its_ids_from_its_start_to_its_failure(lines):
    worker = host(Role.MIXED)
    message = Generate(SEQ_ID, [1, 2, 3], Sampling(), Limits(9), client_id="mine")

    async def receive():
        worker._listen(GatewayId("g")).receive(message)

    asyncio.run(receive())
    worker._on_transfer(PullFailed(SEQ_ID, "lease was lost"))
    worker._on_transfer(PullDone(SEQ_ID, "shm"))
    worker._on_transfer(PullFailed(SEQ_ID, ABORTED))  # the gateway has cancelled the pull
    assert lines == [
        ("takes a sequence: generate, 3 tokens", "cmpl-1 mine"),
        ("a pull of KV failed: lease was lost", "cmpl-1 mine"),
    ]
    assert isinstance(worker._inbox.get_nowait(), FromGateway)
    assert [type(worker._inbox.get_nowait()) for _ in range(2)] == [PullFailed, PullDone]
