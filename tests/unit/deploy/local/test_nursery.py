"""The nursery: each child has its own pipes and session, and outlives the other children."""

import io
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from deploy.local.nursery import Child, ChildEnded, ChildStarted, NoChild, Nursery
from deploy.local.nursery_main import _post
from tests.kits.nurseries import nursery_of, nursery_of_shells

SOON_S = 10.0


@contextmanager
def opened(nursery: Nursery) -> Iterator[Nursery]:
    try:
        yield nursery
    finally:
        nursery.close()


@contextmanager
def child_of(nursery: Nursery) -> Iterator[Child]:
    child = nursery.fork("worker")
    try:
        child.await_start(SOON_S)
        yield child
    finally:
        child.kill()
        child.wait(SOON_S)
        child.close()


def line_of(nursery: Nursery) -> bytes:
    with child_of(nursery) as child:
        return child.stdout.readline()


@pytest.fixture(scope="module")
def cats() -> Iterator[Nursery]:
    with opened(nursery_of_shells("read status; cat; exit $status")) as nursery:
        yield nursery


def test_child_has_its_own_pipes_and_session_and_reports_its_status(cats):
    with child_of(cats) as one, child_of(cats) as other:
        one.stdin.write(b"7\nto one\n")
        one.stdin.flush()
        assert one.stdout.readline() == b"to one\n"  # the answer shows that the child is running
        assert os.getsid(one.pid) == one.pid != os.getsid(0)
        one.hang_up()
        one.wait(SOON_S)
        assert one.exit_status == 7
        assert not one.is_running()
        assert other.is_running()
        other.kill()
        other.wait(SOON_S)
        assert other.exit_status == -signal.SIGKILL


def test_waiting_for_a_child_has_a_deadline(cats):
    with child_of(cats) as child, pytest.raises(TimeoutError):
        child.wait(0.01)


def test_child_inherits_no_descriptor_of_the_nursery_or_its_siblings():
    lists = "print(*os.listdir('/proc/self/fd'), flush=True); sys.stdin.read()"
    with opened(nursery_of(lists)) as nursery, child_of(nursery):
        # the last descriptor is that of the directory listing
        assert line_of(nursery).split() == [b"0", b"1", b"2", b"3"]


def test_children_draw_different_random_numbers():
    draws = "print(random.random(), os.urandom(8), flush=True); sys.stdin.read()"
    with opened(nursery_of(draws, prepare="import random; random.random()")) as nursery:
        assert line_of(nursery) != line_of(nursery)


def test_children_outlive_their_nursery_and_a_new_one_is_started(caplog):
    with opened(nursery_of_shells("read line; exit 3")) as nursery, child_of(nursery) as old:
        os.kill(nursery._process.pid, signal.SIGKILL)
        nursery._process.wait()
        assert old.is_running()
        with child_of(nursery) as new:
            assert nursery.num_lost == 1
            assert "the nursery ended with status -9" in caplog.text
            for child in (old, new):
                child.hang_up()
                child.wait(SOON_S)
            assert (old.exit_status, new.exit_status) == (None, 3)


@pytest.mark.parametrize(
    ("end", "has_last_word"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", True),
        ("os._exit(1)", True),  # like a library that exits without a message
        ("nursery.close(); os._exit(0)", False),
    ],
)
def test_nursery_and_children_end_with_their_parent(end, has_last_word):
    """Standard error is closed only after the nursery, which inherited it, has exited too."""
    program = (
        "import os, signal; from tests.kits.nurseries import nursery_of_shells\n"
        "nursery = nursery_of_shells('exec cat')\n"
        "child = nursery.fork('worker'); child.await_start(10)\n"
        f"print(child.pid, flush=True); input(); {end}"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as asks:
        pidfd = os.pidfd_open(int(asks.stdout.readline()))
        try:
            # returns when no process holds standard error
            _, said = asks.communicate(b"\n", timeout=SOON_S)
            last_word = f"process {asks.pid}, which ran the deployment, ended without a word"
            assert (last_word in said.decode()) is has_last_word
            assert select.select([pidfd], [], [], SOON_S)[0]
        finally:
            os.close(pidfd)


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (
            "import threading; wait = threading.Event().wait\n"
            "threading.Thread(target=wait, daemon=True).start()",
            "UnsafeFork: 2 threads run where services are forked",
        ),
        (
            "import types; cuda = types.SimpleNamespace(is_initialized=lambda: True)\n"
            "sys.modules['torch'] = types.SimpleNamespace(cuda=cuda)",
            "UnsafeFork: CUDA is initialised",
        ),
        (
            "def prepare(kind):\n    import nothing_of_this_name",
            "ModuleNotFoundError: No module named 'nothing_of_this_name'",
        ),
    ],
)
def test_nursery_refuses_an_unsafe_fork_with_the_reason(prepare, why):
    with opened(nursery_of("pass", prepare)) as nursery:
        child = nursery.fork("worker")
        with pytest.raises(NoChild, match=why):
            child.await_start(SOON_S)
        assert not child.is_running()
        child.wait(0.0)
        child.close()


def test_child_killed_before_its_start_is_not_awaited(cats):
    os.kill(cats._process.pid, signal.SIGSTOP)
    try:
        child = cats.fork("worker")
        threading.Timer(0.01, child.kill).start()
        with pytest.raises(NoChild, match="stopped"):
            child.await_start(SOON_S)
        child.close()
    finally:
        os.kill(cats._process.pid, signal.SIGCONT)
    with child_of(cats) as next_one:
        assert next_one.is_running()


def test_nursery_that_ends_during_a_request_gives_no_child(caplog):
    with opened(nursery_of("pass", "def prepare(kind):\n    sys.exit(4)")) as nursery:
        child = nursery.fork("worker")
        with caplog.at_level(logging.ERROR), pytest.raises(NoChild, match="the nursery ended"):
            child.await_start(SOON_S)
        child.close()


def test_child_without_a_descriptor_is_refused():
    news, told = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with told:
        child = Child(stdin=io.BytesIO(), stdout=io.BytesIO(), news=news)
        _post(told, ChildStarted(7))
        with pytest.raises(NoChild, match="too many are open here"):
            child.await_start(SOON_S)
        assert not child.is_running()
        child.close()


@pytest.mark.parametrize("unread", [b"", b"which makes it a reset"])
def test_nursery_survives_reports_to_a_closed_parent(unread):
    news, asks = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with news:
        news.sendall(unread)
        asks.close()
        for _ in range(2):
            _post(news, ChildEnded(0))
