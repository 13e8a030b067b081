"""Events are the steps of the pools and the planner's decisions, in order and each once."""

import msgspec

from deploy.admin.schema import DecisionInfo, StepInfo
from deploy.commands.events import PoolEvents, event_line
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
