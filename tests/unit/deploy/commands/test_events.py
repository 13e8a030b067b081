"""`baton events` lists the steps of the pools and the planner's decisions, in order, each once."""

import json

import msgspec
import pytest
from typer.testing import CliRunner

from deploy.admin.client import AdminError
from deploy.admin.schema import DecisionInfo, LogsAnswer, StepInfo
from deploy.commands import events, options
from deploy.commands.events import PoolEvents, event_line
from deploy.commands.main import app
from engine.errors import ConfigError
from engine.messages import Role

DEATH = StepInfo(4, 30.0, "worker-1", "has died", "no news for 3 s", Role.DECODE)
START = StepInfo(5, 10.0, "worker-2", "starts", "")
DECISION = msgspec.convert(
    {
        "number": 1,
        "age_s": 20.0,
        "mode": "dry-run",
        "before": {"prefill": 1, "decode": 2},
        "after": {"prefill": 2, "decode": 1},
        "num_workers": 3,
        "outcome": "only told",
        "why_refused": "",
        "summary": "flip 1 to prefill",
        "reasons": ["prompts wait"],
    },
    DecisionInfo,
)


def test_events_are_in_order_of_time_and_come_once():
    log = PoolEvents()
    events = list(log.new([DEATH, START], [DECISION]))
    assert [event.subject for event in events] == ["worker-1", "planner", "worker-2"]
    assert log.last_step == 5
    assert list(log.new([DEATH, START], [DECISION])) == []
    assert [e.number for e in log.new([msgspec.structs.replace(START, number=6)], [])] == [6]


def test_lines_have_reasons():
    death, decision = (event_line(event) for event in PoolEvents().new([DEATH], [DECISION]))
    assert "[bold]worker-1 (decode)[/bold] has died" in death
    assert "has died[dim]: no news for 3 s" in death
    assert "dry-run: flip 1 to prefill[dim]: prompts wait" in decision


def test_refused_decisions_say_why():
    refused = msgspec.structs.replace(DECISION, why_refused="no room")
    [event] = PoolEvents().new([], [refused])
    assert event.what.endswith("(refused: no room)")


LINE = {"time": "t1", "level": "warning", "process": "worker-0", "logger": "here"}


def lines(*messages):
    return [LINE | {"message": message} for message in messages]


def answer(*messages, after="", **fields):
    told = {"has_more": False, "overwritten": [], "silent": [], **fields}
    return LogsAnswer(lines=lines(*messages), after=after, **told)


class FakeLogs:
    """A client whose deployment gives these answers and then ends the session."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def logs(self, service, number=None, after=None):
        self.asked.append((service, number, after))
        if not self.answers:
            raise AdminError("it does not answer")
        return self.answers.pop(0)


@pytest.fixture
def run(monkeypatch):
    """Runs the command with a client, and counts how often the command paused."""

    class Pause:
        num_waits = 0

        def wait(self, _seconds):
            Pause.num_waits += 1

    monkeypatch.setattr(events.threading, "Event", Pause)

    def invoke(client, *arguments):
        monkeypatch.setattr(options, "connect", lambda *_: client)
        done = CliRunner().invoke(app, ["logs", *arguments], env={"COLUMNS": "200"})
        return done, Pause.num_waits

    return invoke


def test_people_get_lines_and_remarks(run):
    client = FakeLogs(answer("one", "two\x1b[2J", overwritten=["worker-0"], silent=["abc"]))
    done, _ = run(client, "worker-0", "-n", "5")
    assert done.stdout.splitlines() == [
        "t1 worker-0 warning here: one",
        "t1 worker-0 warning here: two\\x1b[2J",
    ]
    assert "lines of worker-0 are missing" in done.stderr
    assert "node abc did not answer" in done.stderr
    assert client.asked == [("worker-0", 5, None)]


def test_programs_get_lines_only(run):
    done, _ = run(FakeLogs(answer("one", overwritten=["worker-0"])), "--json")
    assert [json.loads(line) for line in done.stdout.splitlines()] == lines("one")


def test_without_lines_people_learn_how_to_get_more(run):
    assert "--log-level info" in run(FakeLogs(answer()))[0].stdout
    assert run(FakeLogs(answer()), "--json")[0].stdout == ""


def test_following_pauses_only_when_all_lines_were_read(run):
    client = FakeLogs(
        answer("one", after="a"),
        answer("two", after="b", has_more=True),
        answer("three", after="c"),
        answer(after="d"),
    )
    done, num_waits = run(client, "-f")
    assert isinstance(done.exception, AdminError)
    assert [line.rpartition(" ")[2] for line in done.stdout.splitlines()] == ["one", "two", "three"]
    assert [after for *_, after in client.asked] == [None, "a", "b", "c", "d"]
    assert num_waits == 3


@pytest.mark.parametrize("number", ["-1", "5001", "x"])
def test_numbers_of_lines_are_bounded(run, number):
    assert run(FakeLogs(), "-n", number)[0].exit_code == 2


def test_a_deployment_that_was_not_named_is_not_asked(monkeypatch):
    def connect(*_):
        raise ConfigError("several deployments run")

    monkeypatch.setattr(options, "connect", connect)
    assert "several" in str(CliRunner().invoke(app, ["logs"]).exception)
