"""Metrics, `/ready` and the controller report workers whose kernels differ."""

from deploy.base.defaults import BUNDLED_MODEL
from deploy.local.deployment import Deployment
from engine.config import Config, GatewayConfig, PoolsConfig
from tests.kits.services.cluster import NURSERY
from tests.kits.services.null_workers import NullWorkers
from tests.kits.services.served import HTTP, matching, metrics, poll_until

KERNELS = {
    "worker-0": "cpu avx512 fused",
    "worker-1": "cpu avx512 fused",
    "worker-2": "cpu avx2 fused",
}
TROUBLE = "differ: worker-2 with cpu avx2 fused, the others with cpu avx512 fused"


def test_different_kernels_are_reported_everywhere(tmp_path, monkeypatch):
    monkeypatch.setenv("BATON_RUN_DIR", str(tmp_path))
    config = Config(gateway=GatewayConfig(port=0), pools=PoolsConfig(mixed=3))
    running = Deployment(NullWorkers(NURSERY, kernels=KERNELS), model=BUNDLED_MODEL, config=config)
    url = running.open().url
    try:
        found = matching(r"baton_worker_kernels\{", metrics(url))
        labels = 'role="mixed",split="",version="v1"'
        assert found == {
            f'baton_worker_kernels{{kernels="{kernels}",{labels},worker="{name}"}}': 1.0
            for name, kernels in KERNELS.items()
        }
        poll_until(lambda: TROUBLE in str(running.controller.machine.troubles()), "told")
        poll_until(lambda: TROUBLE in HTTP.get(f"{url}/ready").text, "the gateway tells it")
    finally:
        running.close()
