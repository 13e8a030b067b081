"""The controller as an actor: requests go on when it is killed, and the next takes over."""

import os
import secrets
import signal

import pytest

from deploy.admin.client import AdminClient
from deploy.commands.defaults import BUNDLED_MODEL
from deploy.controller.plan import ControllerPlan
from deploy.local.deployment import with_admin_key
from deploy.ray.own_ray import OwnRay
from engine.config import Config, GatewayConfig, WorkerConfig
from engine.control import Pools
from tests.kits.operator import CHANGE_S, Trickle
from tests.kits.services.served import poll_until

pytest.importorskip("ray", reason="Ray is not installed")
# Each worker imports torch for itself, which takes up to a minute where others compute too.
pytestmark = [pytest.mark.torch, pytest.mark.ray, pytest.mark.timeout(300)]


def test_requests_survive_a_killed_controller(tmp_path, monkeypatch):
    import ray

    from deploy.ray.controller import find_controller, start_controller, stop_deployment
    from deploy.ray.places import reserved

    monkeypatch.setenv("BATON_RUN_DIR", str(tmp_path / "run"))
    config = with_admin_key(
        Config(worker=WorkerConfig(kv_mib=64), gateway=GatewayConfig(port=0, model_name="tiny"))
    )
    pools = Pools(0, 0, mixed=1)  # the fewest that can serve
    plan = ControllerPlan(str(BUNDLED_MODEL), config, pools, secrets.token_hex(16), cores=2)
    own_ray = OwnRay()
    own_ray.open()
    try:
        url, pid = start_controller(plan)
        key = config.admin.key
        with AdminClient(url, key) as admin:
            admin.set_pools({"mixed": 2})
            poll_until(lambda: admin.pools().settled, lambda: str(admin.pools()), CHANGE_S)
            before = admin.pools()
        with Trickle(before.gateways[0].url) as trickle:
            poll_until(lambda: len(trickle.answers) > 0, "requests run", CHANGE_S)
            os.kill(pid, signal.SIGKILL)
            count = len(trickle.answers)
            poll_until(lambda: len(trickle.answers) > count + 1, "requests go on", CHANGE_S)
            url, again = find_controller()
            assert again != pid
            with AdminClient(url, key) as admin:
                poll_until(lambda: admin.pools().settled, lambda: str(admin.pools()), CHANGE_S)
                after = admin.pools()
                assert after.wanted == Pools(0, 0, mixed=2)
                assert after.version > before.version
                assert {place.worker for place in reserved()} == {
                    w.worker_id for w in after.workers
                }
                pids = {w.worker_id: w.pid for w in after.workers}
                assert pids == {w.worker_id: w.pid for w in before.workers}
                os.kill(pids["mixed-1"], signal.SIGKILL)
                poll_until(lambda: not admin.pools().settled, "its end is seen", CHANGE_S)
                poll_until(lambda: admin.pools().settled, lambda: str(admin.pools()), CHANGE_S)
        trickle.check()
        stop_deployment()
        left = ray.util.list_named_actors(all_namespaces=True)
        assert left == []
        assert reserved() == []
    finally:
        own_ray.close()
