"""The page of log lines: the queries that it refuses, and its answers."""

import logging
from pathlib import Path

import pytest

from deploy.admin.schema import LogsAnswer
from deploy.logs.lines import JsonFormatter
from deploy.logs.reading import LogsQuery, read_pieces
from deploy.logs.ring import LogRing
from engine.control import Pools
from tests.unit.deploy.admin.test_api import FakeController, ask


class WithLogs(FakeController):
    """A controller whose services write log lines into a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Pools(1, 1))
        self.folder = folder

    async def logs(self, query: LogsQuery):
        return read_pieces(self.folder, query)


@pytest.fixture
def controller(tmp_path):
    return WithLogs(tmp_path)


def say(controller, service, *messages):
    ring = LogRing(controller.folder, service, JsonFormatter(service))
    for message in messages:
        ring.emit(logging.LogRecord("here", logging.WARNING, "", 0, message, (), None))
    ring.close()


def answer(controller, query=""):
    given = ask("GET", f"/v1/logs?{query}", controller=controller)
    assert given.status_code == 200, given.text
    return LogsAnswer(**given.json())


def messages(found):
    return [line["message"] for line in found.lines]


def test_last_lines_of_all_or_of_one(controller):
    say(controller, "gateway", "a", "b")
    say(controller, "worker-1", "c")
    assert messages(answer(controller)) == ["a", "b", "c"]
    assert messages(answer(controller, "lines=2")) == ["b", "c"]
    assert messages(answer(controller, "service=gateway&lines=1")) == ["b"]
    assert messages(answer(controller, "lines=0")) == []


def test_lines_after_an_answer_come_once(controller):
    say(controller, "worker-1", "a")
    first = answer(controller, "lines=0")
    say(controller, "worker-1", "b")
    say(controller, "worker-0", "c")  # the first line of worker-0
    second = answer(controller, f"after={first.after}")
    assert sorted(messages(second)) == ["b", "c"]
    assert messages(answer(controller, f"after={second.after}")) == []


def test_a_known_service_without_lines_has_none(controller):
    for name in ("worker-0", "worker-1", "controller"):
        found = answer(controller, f"service={name}")
        assert found.lines == []
        say(controller, name, "first")
        later = answer(controller, f"service={name}&after={found.after}")
        assert messages(later) == ["first"]


@pytest.mark.parametrize(
    ("query", "status", "reason"),
    [
        ("service=worker_0", 404, "there is no service 'worker_0': did you mean worker-0"),
        ("service=zzz", 404, "'zzz': controller, worker-0, worker-1"),
        (f"service={'z' * 5000}", 404, "zzz…'"),
        ("service=..%2F..%2Fetc", 404, "no service"),
        ("lines=-1", 400, ">= 0"),
        ("lines=999999", 400, "<= 5000"),
        ("lines=many", 400, "int"),
        ("after=!", 400, "no cursor"),
    ],
)
def test_wrong_questions_are_refused(controller, query, status, reason):
    given = ask("GET", f"/v1/logs?{query}", controller=controller)
    assert (given.status_code, reason in given.json()["error"]["message"]) == (status, True), (
        given.text
    )
