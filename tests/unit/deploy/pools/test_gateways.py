"""Gateways that die, hang or come back."""

from deploy.pools.events import (
    Died,
    GatewayFailed,
    GatewayHeard,
    GatewayStopped,
    GatewayUnheard,
)
from deploy.pools.gateways import GATEWAY_UNREACHABLE_S, GatewayState
from engine.control import Pools
from tests.kits.pools import settled


def test_dead_gateway_is_started_again():
    world = settled()
    world.feed(Died("gateway", "ended with status -9"))
    assert world.told == ["gateway ended with status -9: it is started again in 1 s"]
    world.settle()
    assert world.told[-1] == "gateway was started again"
    world.feed(GatewayFailed("gateway", "no port"))
    assert "did not start: no port" in world.told[-1]


def test_unreachable_gateway_is_stopped_and_started_again():
    world = settled(Pools(1, 1))
    begun_s = world.now_s
    world.feed(GatewayUnheard("gateway", "silent for 5.1 s"))
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
    world.feed(GatewayUnheard("gateway", "silent for 5.1 s"))
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
    machine.handle(GatewayStopped("gateway"), 1e4)
    assert machine.gateways["gateway"] is GatewayState.WAITING
