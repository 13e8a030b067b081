"""The pool metrics of a gateway, with and without a controller."""

from prometheus_client.core import CounterMetricFamily

from engine.control import ControllerReport, Intent, Members, Pools, Version
from engine.messages import Role, WorkerId
from router.gateway.metrics.families import encode_metrics
from router.gateway.metrics.pools import STALE_S, PoolBoard
from router.port import WorkerStatus
from tests.kits.router.gateway import FakeRouter, versions_of


class SetClock:
    at_s = 100.0

    def now_s(self) -> float:
        return self.at_s


def board(router: FakeRouter) -> tuple[PoolBoard, SetClock]:
    clock = SetClock()
    found = PoolBoard(versions_of(router), clock)
    found.members = Members(3, (), Intent((Version(pools=Pools(2, 3)),)))
    return found, clock


def exported(found: PoolBoard) -> dict[str, dict[tuple[str, ...], float]]:
    return {
        family.name: {tuple(s.labels.values()): s.value for s in family.samples}
        for family in found.families()
    }


def news(count: float = 1.0) -> ControllerReport:
    family = CounterMetricFamily("baton_told", "by a controller", count)
    return ControllerReport(encode_metrics([family]), ("http://10.0.0.1:8000",))


def test_wanted_and_serving_workers_need_no_controller():
    router = FakeRouter()
    for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE)):
        router.statuses[WorkerId(name)] = WorkerStatus(role, None, 0, 0)
    found, _ = board(router)
    assert exported(found) == {
        "baton_controller_up": {(): 0.0},
        "baton_pool_wanted_workers": {
            ("v1", "prefill"): 2,
            ("v1", "decode"): 3,
            ("v1", "mixed"): 0,
        },
        "baton_pool_serving_workers": {
            ("v1", "prefill"): 1,
            ("v1", "decode"): 2,
            ("v1", "mixed"): 0,
        },
    }


def test_a_version_that_is_not_served_yet_has_no_serving_workers():
    found, _ = board(FakeRouter())
    found.members = Members(4, (), Intent((Version("v1"), Version("v2"))))
    serving = exported(found)["baton_pool_serving_workers"]
    assert serving["v2", "decode"] == 0


def test_news_are_exported_until_they_are_old():
    found, clock = board(FakeRouter())
    found.take(news(7.0))
    assert exported(found)["baton_told"] == {(): 7.0}
    assert exported(found)["baton_controller_up"] == {(): 1.0}
    clock.at_s += STALE_S + 0.1
    assert "baton_told" not in exported(found)
    assert exported(found)["baton_controller_up"] == {(): 0.0}
    assert found.gateways == ("http://10.0.0.1:8000",)  # still the last known gateways


def test_news_that_cannot_be_read_leave_the_rest():
    found, _ = board(FakeRouter())
    found.take(ControllerReport(b"\xc1"))
    assert exported(found)["baton_controller_up"] == {(): 1.0}
