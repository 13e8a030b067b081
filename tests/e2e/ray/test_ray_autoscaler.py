"""Ray's own autoscaler adds and removes nodes; each node is a process on this machine.

The test runs in an isolated island, so that `ray start` neither finds nor stops another Ray.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kits.services.island import Island, island, unavailable

pytestmark = [
    pytest.mark.long,
    pytest.mark.ray,
    pytest.mark.timeout(180),
    pytest.mark.skipif(unavailable() is not None, reason=f"{unavailable()}"),
]

COMMANDS = (
    *("initialization_commands", "setup_commands"),
    *("head_setup_commands", "head_start_ray_commands"),
    *("worker_setup_commands", "worker_start_ray_commands"),
)
CLUSTER: dict[str, Any] = {
    "cluster_name": "test",
    "max_workers": 3,
    "idle_timeout_minutes": 0.05,
    "provider": {
        "type": "fake_multinode",
        "gcs_address": "127.0.0.1:6379",
        "disable_node_updaters": True,  # the nodes have no ssh server
        "use_node_id_as_ip": True,  # all nodes have the same address
    },
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "pair": {
            "resources": {
                "GPU": 2,
                "prefill_node": 2,
                "decode_node": 2,
                "object_store_memory": 8e7,
            },
            "node_config": {},
            "min_workers": 0,
            "max_workers": 3,
        },
    },
    "head_node_type": "ray.head.default",
    "upscaling_speed": 1.0,
    "auth": {},
    "file_mounts": {},
    "cluster_synced_files": [],
    **{key: [] for key in COMMANDS},
}
START = (
    *("ray.scripts.scripts", "start", "--head", "--node-ip-address=127.0.0.1", "--port=6379"),
    *("--num-cpus=0", "--object-store-memory=83886080", "--include-dashboard=false"),
)
# Prints the room for workers whenever it changes. The last change is caused by a waiting worker.
SCRIPT = """
import ray
from deploy.ray.own_ray import NAMESPACE
from deploy.pools.placement import NodePlacement
from deploy.ray.launcher import ClusterLauncher
from deploy.ray.places import RayPlaces
from engine.control import Pools
from engine.messages import Role
from tests.kits.services.served import poll_until

ray.init(address="127.0.0.1:6379", namespace=NAMESPACE, log_to_driver=False)
placement = NodePlacement(1, "prefill_node", "decode_node")
launcher = ClusterLauncher(placement)
rooms = [launcher.room(1)]
for num_workers, room in ((3, 4), (0, 0)):
    launcher.ask_for(num_workers, Pools(), 1)
    poll_until(lambda: launcher.room(1) == room, f"there is room for {room}")
    rooms.append(launcher.room(1))
places = RayPlaces(placement)
places.take("worker-0", Role.DECODE)
rooms.append(launcher.room(1))
places.give_up_all()
print("rooms", *rooms)
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory) -> Iterator[Island]:
    with island(tmp_path_factory.mktemp("island")) as running:
        file = running.folder / "cluster.json"
        file.write_text(json.dumps(CLUSTER))
        settings = ("RAY_FAKE_CLUSTER=1", "AUTOSCALER_UPDATE_INTERVAL_S=1")
        config = f"--autoscaling-config={file}"
        running.run("env", *settings, sys.executable, "-m", *START, config, timeout_s=90)
        yield running


def test_autoscaler_adds_nodes_for_asked_workers_and_removes_them(machine):
    done = machine.python("-c", SCRIPT, timeout_s=150)
    assert "rooms 0 4 0 2" in done.stdout
