"""A gateway's report to controllers about its requests."""

import asyncio
from types import SimpleNamespace

import pytest

from engine.config import PlannerMode
from engine.control import (
    MAIN_LINE,
    GatewayReport,
    Intent,
    Members,
    RequestList,
    decode_from_gateway,
)
from engine.messages import Role
from engine.net.trust import Secret
from router.membership import ControlServer
from tests.kits.router.demand import ask, machine_of


class SetClock:
    at_s = 0.0

    def now_s(self):
        return self.at_s


class World:
    """A gateway's connection to its controllers, and the members that they publish."""

    def __init__(self):
        self.machine = machine_of(Role.PREFILL, Role.DECODE)
        router = SimpleNamespace(
            machine=self.machine,
            readiness=lambda: None,
            workers=dict,
            queue_len=lambda: 0,
            queued_s=lambda: 0.0,
        )
        self.clock = SetClock()
        routers = SimpleNamespace(
            routers=lambda: {"v1": router},
            versions=router,
            reports=dict,
            follow=lambda members: None,
        )
        self.server = ControlServer(routers, secret=Secret("token"), clock=self.clock)
        self.version = 0

    def seen(self, mode, at_s):
        """Returns the observation in the gateway's report, or None if the planner is off."""
        self.clock.at_s = at_s
        self.version += 1
        seen = self.server._take(Members(self.version, (), Intent(planner=mode))).seen
        assert set(seen) <= {MAIN_LINE}
        return seen.get(MAIN_LINE)


def test_nothing_is_observed_while_the_planner_is_off():
    world = World()
    assert world.server._report().seen == {}
    assert [world.seen(PlannerMode.OFF, t) for t in (0.0, 1.0, 2.0)] == [None] * 3
    ask(world.machine, "r")
    assert world.machine.demand._sums.num_requests == 0


def test_each_report_carries_the_observation_for_all_controllers():
    world = World()
    assert world.seen(PlannerMode.DRY_RUN, 0.0) is None
    ask(world.machine, "r")
    first = world.seen(PlannerMode.ON, 1.0)
    assert first.requests_per_s == 1.0
    assert world.seen(PlannerMode.ON, 1.5) is first
    assert world.seen(PlannerMode.OFF, 1.9) is None
    assert world.seen(PlannerMode.ON, 2.0) is None


def test_however_many_answers_there_are_a_report_is_sent_each_second():
    world, sent = World(), []

    async def answer_for_ever():
        outbox = asyncio.Queue()
        outbox.put_nowait(RequestList(0, 0, []))

        class Line:
            async def send(self, frame):
                sent.extend(decode_from_gateway(frame))
                if len(sent) == 20:
                    raise ConnectionError
                world.clock.at_s += 0.125
                outbox.put_nowait(RequestList(0, 0, []))

        await world.server._send_all(outbox, Line())

    with pytest.raises(ConnectionError):
        asyncio.run(answer_for_ever())
    assert [n for n, one in enumerate(sent) if isinstance(one, GatewayReport)] == [8, 16]
