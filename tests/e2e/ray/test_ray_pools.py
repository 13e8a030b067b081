"""Requests continue when the controller or Ray's GCS is killed, and a replacement takes over.

Orders survive the death of the controller and all gateways.
"""

import os
import secrets
import select
import signal

import pytest

from deploy.admin.client import AdminClient
from deploy.admin.schema import PoolsAnswer
from deploy.base.defaults import BUNDLED_MODEL
from deploy.controller.plan import ControllerPlan
from deploy.local.deployment import with_admin_key
from deploy.ray.gcs_keeper import GCS, running
from deploy.ray.own_ray import OwnRay
from engine.config import Config, GatewayConfig, LogLevel, LogsConfig, WorkerConfig
from engine.control import Pools
from tests.kits.operator import CHANGE_S, Trickle
from tests.kits.services.served import HTTP, poll_until

pytest.importorskip("ray", reason="Ray is not installed")
# Three workers start here one after another, and each imports torch separately. On a busy machine,
# one start takes over a minute.
pytestmark = [pytest.mark.torch, pytest.mark.ray, pytest.mark.timeout(900)]
FIELDS = {"time", "level", "process", "pid", "logger", "message"}


def kill_together(*pids: int) -> None:
    """Kills processes at the same moment, by process descriptors that cannot mean another
    process."""
    pidfds = [os.pidfd_open(pid) for pid in pids]
    try:
        for pidfd in pidfds:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        for pidfd in pidfds:
            assert select.select([pidfd], [], [], CHANGE_S)[0], "it has ended"
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


def orders_outlive_controller_and_gateway(pid: int, before: PoolsAnswer, key: str) -> None:
    """Kills controller, gateway and a worker: only Ray's table still has the order of two
    workers."""
    from deploy.ray.controller import find_controller

    pids = {worker.worker_id: worker.pid for worker in before.workers}
    kill_together(pid, before.gateways[0].pid, pids["worker-1"])
    url, again = find_controller()
    assert again != pid
    with AdminClient(url, key) as admin:
        poll_until(lambda: admin.pools().settled, lambda: str(admin.pools()), CHANGE_S)
        after = admin.pools()
    assert after.wanted == before.wanted
    assert after.version >= before.version
    assert {worker.worker_id: worker.pid for worker in after.workers}["worker-0"] == pids[
        "worker-0"
    ]
    with Trickle(after.gateways[0].url) as trickle:
        poll_until(lambda: len(trickle.answers) > 0, "requests run", CHANGE_S)
    trickle.check()
    with AdminClient(url, key) as admin:
        check_logs(admin, after.gateways[0].url, dead=pids["worker-1"])


def check_logs(admin: AdminClient, url: str, *, dead: int) -> None:
    """Log lines of all processes on all nodes are found and followed, a dead worker's included."""

    def pids() -> set[int]:
        return {line["pid"] for line in admin.logs("worker-1").lines}

    # The next worker of the same name continues the log. A node may need a moment to find its
    # folder.
    poll_until(lambda: dead in pids() and len(pids()) > 1, lambda: f"{pids()}", CHANGE_S)
    poll_until(lambda: told_of_a_request(admin, url), "a worker tells of a request", CHANGE_S)
    later = admin.logs(None, after=admin.logs(None, 0).after)
    found = admin.logs(None, 5000)
    assert all(set(line) >= FIELDS for line in found.lines)
    times = [line["time"] for line in found.lines]
    assert times == sorted(times)
    assert (found.silent, later.overwritten) == ([], [])
    assert {"controller", "gateway", "worker-0", "worker-1"} <= {
        line["process"] for line in found.lines
    }
    news = [line["message"] for line in found.lines if line["logger"] == "baton.news"]
    assert any("worker-1" in message for message in news)


def told_of_a_request(admin: AdminClient, url: str) -> bool:
    """Sends a request with an id. Returns True if a worker has logged a request with that id.

    The number of lines of a kind is bounded (`deploy.logs.lines`), so earlier requests may have
    used up the bound.
    """
    body = {"prompt": "def f(", "max_tokens": 4}
    headers = {"x-request-id": "mine"}
    answer = HTTP.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return any(
        line["process"].startswith("worker-") and line.get("request", "").endswith(" mine")
        for line in admin.logs(None, 5000).lines
    )


def test_requests_survive_a_killed_controller_and_a_killed_gcs(tmp_path, monkeypatch):
    import ray

    from deploy.ray.controller import find_controller, start_controller, stop_deployment
    from deploy.ray.places import reserved

    monkeypatch.setenv("BATON_RUN_DIR", str(tmp_path / "run"))
    config = with_admin_key(
        Config(
            worker=WorkerConfig(kv_mib=64),
            gateway=GatewayConfig(port=0, model_name="tiny"),
            logs=LogsConfig(level=LogLevel.INFO),
        )
    )
    pools = Pools(0, 0, mixed=1)  # the smallest pool that can serve
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
                own = os.getpriority(os.PRIO_PROCESS, 0)  # Ray's default for actors is nice 15
                assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in pids.values()} == {own}
                assert pids == {w.worker_id: w.pid for w in before.workers}
                session = ray.get_runtime_context().get_session_name()
                [gcs] = [each for each in running(GCS) if each.session == session]
                os.kill(gcs.pid, signal.SIGKILL)
                poll_until(lambda: own_ray.num_gcs_restarts == 1, "the GCS runs again", CHANGE_S)
        trickle.check()
        orders_outlive_controller_and_gateway(again, after, key)
        stop_deployment()
        left = ray.util.list_named_actors(all_namespaces=True)
        assert left == []
        assert reserved() == []
    finally:
        own_ray.close()
