"""A nursery's port: another process orders children just like the owner."""

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from deploy.local.nursery import NoChild, Nursery
from deploy.local.nursery_port import DistantNursery, NurseryPort
from tests.kits.nurseries import nursery_of_shells

SOON_S = 10.0


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    made = nursery_of_shells("read status; exit $status")
    yield made
    made.close()


@pytest.fixture
def distant(nursery) -> Iterator[DistantNursery]:
    # a short path, because a socket path has at most 107 bytes
    with TemporaryDirectory(prefix="baton-") as folder:
        port = NurseryPort(nursery, Path(folder) / "nursery")
        port.open()
        yield DistantNursery(str(port.path))
        port.close()
        with pytest.raises(OSError, match="refused"):
            DistantNursery(str(port.path)).fork("worker")


def test_a_distant_child_is_started_watched_and_reports_its_status(distant):
    child = distant.fork("worker")
    child.await_start(SOON_S)
    assert child.is_running()
    child.stdin.write(b"7\n")
    child.hang_up()
    child.wait(SOON_S)
    assert child.exit_status == 7
    child.close()


def test_malformed_requests_leave_the_port_open(distant):
    for request in (b"", b"worker"):  # requests without file descriptors
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asks:
            asks.connect(distant._path)
            asks.send(request)
    child = distant.fork("worker")
    child.await_start(SOON_S)
    child.kill()
    child.wait(SOON_S)
    child.close()


def test_a_nursery_without_an_answer_is_given_up_from_afar(nursery, distant):
    nursery.open()
    os.kill(nursery._process.pid, signal.SIGSTOP)
    child = distant.fork("worker")
    with pytest.raises(TimeoutError):
        child.await_start(0.05)
    distant.give_up()
    with pytest.raises(NoChild, match="the nursery ended"):
        child.await_start(SOON_S)
    child.close()
    later = distant.fork("worker")
    later.await_start(SOON_S)
    assert nursery.num_lost == 1
    later.kill()
    later.wait(SOON_S)
    later.close()
