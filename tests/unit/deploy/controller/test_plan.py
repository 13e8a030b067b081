"""How many gateways run, and what they are started with."""

import msgspec
import pytest

from deploy.controller.plan import ControllerPlan, gateway_processes
from engine.config import Config, GatewayConfig
from engine.control import Intent, Members, Pools

PLAN = ControllerPlan("model", Config(), Pools(1, 1), "token", cores=8, ports="/run/ports")
MEMBERS = Members(1, (), Intent())


@pytest.mark.parametrize(
    ("gateway", "cores", "number"),
    [
        (GatewayConfig(), 2, 1),
        (GatewayConfig(), 4, 2),
        (GatewayConfig(processes=3), 1, 3),
        (GatewayConfig(processes=1), 64, 1),
        (GatewayConfig(requests_per_s=5), 64, 1),
        (GatewayConfig(keys_file="/keys.json"), 64, 1),
    ],
)
def test_two_gateways_run_where_cores_and_limits_allow(gateway, cores, number):
    assert gateway_processes(gateway, cores) == number


def test_gateways_of_a_machine_keep_their_files_in_one_store():
    alone = PLAN.gateway_spec("gateway", MEMBERS, ())
    assert (alone.gateway.store, alone.ports) == (None, "/run/ports")
    config = Config(gateway=GatewayConfig(processes=2))
    two = msgspec.structs.replace(PLAN, config=config, siblings="/run/siblings")
    stores = {two.gateway_spec(name, MEMBERS, ()).gateway.store for name in two.gateways}
    assert stores == {"/run/store.sqlite"}
    config = Config(gateway=GatewayConfig(processes=2, store="/var/own"))
    named = msgspec.structs.replace(two, config=config)
    assert named.gateway_spec("gateway-0", MEMBERS, ()).gateway.store == "/var/own"
