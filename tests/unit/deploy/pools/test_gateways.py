"""Gateways that die, hang or restart."""

from deploy.pools.events import (
    Died,
    GatewayHeard,
    GatewaySeen,
    GatewaySilent,
    ServiceFailed,
    ServiceStopped,
)
from deploy.pools.gateways import GATEWAY_PATIENCE_S, GATEWAY_UNREACHABLE_S, GatewayState
from engine.control import GatewayReport, Pools
from tests.kits.pools import settled


def test_dead_gateway_is_started_again():
    world = settled()
    world.feed(Died("gateway", "ended with status -9"))
    assert world.told == ["gateway ended with status -9: it is started again in 1 s"]
    world.settle()
    assert world.told[-1] == "gateway was started again"
    world.feed(ServiceFailed("gateway", "no port"))
    assert "did not start: no port" in world.told[-1]


def test_unreachable_gateway_is_stopped_and_started_again():
    world = settled(Pools(1, 1))
    begun_s = world.now_s
    world.feed(GatewaySilent("gateway", "silent for 5.1 s"))
    world.run(GATEWAY_UNREACHABLE_S - 1)
    assert not world.stopped_gateways
    world.run(2)
    [(stopped_s, name)] = world.stopped_gateways
    assert name == "gateway"
    assert stopped_s - begun_s <= GATEWAY_UNREACHABLE_S + 1
    world.settle(30)
    assert world.machine.gateways["gateway"] is GatewayState.SERVING
    assert world.machine.counters["gateways unreachable"] == 1
    world.run(30)
    assert len(world.stopped_gateways) == 1


def test_gateway_that_reconnects_in_time_stays():
    world = settled(Pools(1, 1))
    world.feed(GatewaySilent("gateway", "silent for 5.1 s"))
    world.run(GATEWAY_UNREACHABLE_S - 2)
    world.feed(GatewayHeard("gateway"))
    world.run(60)
    assert not world.stopped_gateways


def test_gateway_that_never_gets_a_session_is_restarted():
    world = settled(Pools(1, 1))
    world.hanging.add("gateway")
    world.feed(Died("gateway", "killed"))
    world.run(GATEWAY_UNREACHABLE_S + 3)
    assert len(world.stopped_gateways) == 1
    world.hanging.clear()
    world.run(60)
    assert world.machine.is_settled
    assert len(world.stopped_gateways) == 1


def test_end_of_a_stopped_gateway_is_reported_once():
    machine = settled(Pools(1, 1)).machine
    machine._gateways.states["gateway"] = GatewayState.STOPPING
    assert not machine.handle(Died("gateway", "killed"), 1e4)
    assert machine.gateways["gateway"] is GatewayState.STOPPING
    machine.handle(ServiceStopped("gateway"), 1e4)
    assert machine.gateways["gateway"] is GatewayState.WAITING


def test_a_silent_gateway_is_waited_for_while_another_serves():
    world = settled(Pools(1, 1), gateways=("gateway-0", "gateway-1"))
    world.silent.add("gateway-0")
    world.feed(GatewaySilent("gateway-0", "silent for 5.1 s"))
    world.run(GATEWAY_PATIENCE_S - 2)
    assert not world.stopped_gateways
    [trouble] = world.machine.troubles()
    assert trouble == "gateway-0 does not answer. New requests go to the others."
    world.feed(GatewayHeard("gateway-0"))
    world.run(60)
    assert not world.stopped_gateways
    assert not world.machine.troubles()


def test_a_silent_gateway_is_ended_soon_if_no_other_serves():
    world = settled(Pools(1, 1), gateways=("gateway-0", "gateway-1"))
    world.feed(GatewaySilent("gateway-0", "silent for 5.1 s"))
    world.run(1)
    world.feed(Died("gateway-1", "ended with status -9"))
    world.run(0.0)
    assert "gateway-1 ended with status -9" in world.machine.troubles()
    world.hanging.add("gateway-1")
    world.run(GATEWAY_UNREACHABLE_S + 1)
    assert world.stopped_gateways[0][1] == "gateway-0"


def test_requests_that_end_with_a_gateway_are_counted():
    world = settled(Pools(1, 1), gateways=("gateway-0", "gateway-1"))
    version = world.machine.members.version
    world.feed(GatewaySeen("gateway-0", GatewayReport(None, version, 2, 7, 1, 0.0)))
    world.feed(GatewaySeen("gateway-0", None))
    world.feed(GatewaySilent("gateway-0", "silent for 5.1 s"))
    world.silent.add("gateway-0")
    world.run(GATEWAY_PATIENCE_S + 2)
    assert world.machine.counters["requests lost with gateways"] == 7
    assert any("gateway-0 was stopped, with 7 requests" in line for line in world.told)
