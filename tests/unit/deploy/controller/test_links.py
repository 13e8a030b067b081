"""The controller's sessions: how long a gateway's report is valid."""

from deploy.controller.links import FIRST_REPORT_S, REPORT_STALE_S, GatewayLink
from engine.control import GatewayReport, encode_control
from engine.net.sessions import BEAT_EVERY_S
from engine.net.silence import Silence


class SetClock:
    at_s = 100.0

    def now_s(self):
        return self.at_s


def test_old_report_is_not_used_for_planning():
    clock = SetClock()
    events: list[object] = []
    link = GatewayLink("gateway", clock=clock, on_welcome=list, on_event=events.append)
    assert link.fresh_report is None
    report = GatewayReport(None, 1, 2, 0, 0, 0.0)
    link.take(encode_control([report]))
    assert link.fresh_report == report
    clock.at_s += REPORT_STALE_S + 0.1
    assert link.fresh_report is None
    assert link.report == report  # operators still get the last report
    link.take(encode_control([report]))
    assert link.fresh_report == report


def test_a_gateway_has_time_for_its_first_report_and_none_after_its_session():
    clock = SetClock()
    link = GatewayLink("gateway", clock=clock, on_welcome=list, on_event=lambda _: None)
    clock.at_s += FIRST_REPORT_S - 0.1
    assert not link.is_late
    clock.at_s += 0.2
    assert link.is_late
    link.take(encode_control([GatewayReport(None, 1, 2, 0, 0, 0.0)]))
    assert not link.is_late
    link.lost("silent")
    assert link.is_late


def test_a_silent_gateway_is_reported_within_three_seconds():
    silence = Silence(0.0)
    silence.broken()
    now_s = silence.check(0.0)
    while silence.check(now_s) < GatewayLink.silence_s:
        now_s += BEAT_EVERY_S
    assert now_s + BEAT_EVERY_S <= 2.5  # the remaining time is a margin for a busy machine
