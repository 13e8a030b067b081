"""The controller's sessions: how long a gateway's report counts."""

from deploy.controller.links import REPORT_STALE_S, GatewayLink
from engine.control import GatewayReport, encode_control


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
    assert link.report == report  # operators still see the last report
    link.take(encode_control([report]))
    assert link.fresh_report == report
