"""Ray and Kubernetes accept the files in `deploy/cluster`, and the files set what Baton needs."""

import importlib.metadata
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

import deploy
from deploy.pools.placement import Node, NodePlacement, nodes_to_start_on
from deploy.ray.cluster_nodes import CONSTRAINTS
from engine.config import PoolsConfig
from engine.control import Pools

pytestmark = pytest.mark.ray  # yaml is one of Ray's dependencies

FOLDER = Path(deploy.__file__).parent / "cluster"
KUBERNETES = Path(deploy.__file__).parent / "kubernetes"
RAY_UP = ("onprem", "aws", "gcp")

# KubeRay's own definition, ray-operator/config/crd/bases/ray.io_rayclusters.yaml (August 2026).
RAY_CLUSTER = """
    authOptions autoscalerOptions enableInTreeAutoscaling gcsFaultToleranceOptions headGroupSpec
    headServiceAnnotations managedBy networkPolicy rayVersion suspend tlsOptions upgradeStrategy
    workerGroupSpecs
"""
HEAD_GROUP = "headService labels rayStartParams resources serviceType template"
WORKER_GROUP = """
    groupName idleTimeoutSeconds labels maxReplicas minReplicas numOfHosts priority rayStartParams
    replicas resources scaleStrategy suspend template
"""
GCS_OPTIONS = "backend externalStorageNamespace redisAddress redisPassword redisUsername"


def read(name: str) -> dict[str, Any]:
    import yaml

    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


def kubernetes() -> dict[str, dict[str, Any]]:
    """Returns the objects of the files in `deploy/kubernetes`, by kind and name."""
    import yaml

    files = sorted(KUBERNETES.glob("*/*.yaml"))
    found = [one for file in files for one in yaml.safe_load_all(file.read_text())]
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in found if "metadata" in one}


def unknown(given: dict[str, Any], fields: str) -> set[str]:
    return set(given) - set(fields.split())


def commands(config: dict[str, Any]) -> list[str]:
    return [line for key, lines in config.items() if key.endswith("_commands") for line in lines]


@pytest.mark.parametrize("name", RAY_UP)
def test_ray_accepts_the_cluster_file(name):
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(read(name)))


@pytest.mark.parametrize("name", RAY_UP)
def test_every_command_parses_as_shell(name):
    for command in commands(read(name)):
        subprocess.run(["bash", "-n", "-c", command], check=True, timeout=10)


@pytest.mark.parametrize("name", RAY_UP)
def test_gcs_stores_its_state_in_redis_and_nodes_wait_for_it(name):
    config = read(name)
    (head,) = (c for c in config["head_start_ray_commands"] if "ray start" in c)
    (worker,) = (c for c in config["worker_start_ray_commands"] if "ray start" in c)
    assert "RAY_REDIS_ADDRESS=rediss://127.0.0.1:6380" in head
    assert "RAY_external_storage_namespace=" in head
    assert all("RAY_gcs_rpc_server_reconnect_timeout_s=600" in c for c in (head, worker))


@pytest.mark.parametrize("name", RAY_UP)
def test_services_have_the_priority_of_other_programs(name):
    config = read(name)
    starts = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    starts = [command for command in starts if "ray start" in command]
    assert len(starts) == 2
    assert all("RAY_worker_niceness=0" in command for command in starts)


@pytest.mark.parametrize(
    "path", [*(FOLDER / f"{name}.yaml" for name in RAY_UP), *sorted(KUBERNETES.glob("*.yaml"))]
)
def test_no_password_is_on_a_command_line(path):
    text = path.read_text()
    assert "--redis-password" not in text
    assert "--requirepass" not in text
    assert "REDISCLI_AUTH" not in text


@pytest.mark.parametrize("name", RAY_UP)
def test_ray_requires_the_token_that_every_node_gets(name):
    config = read(name)
    path = "~/.baton/ray_auth_token"
    assert config["file_mounts"][path] == path
    starts = [command for command in commands(config) if "ray start" in command]
    assert len(starts) == 2
    for command in starts:
        assert f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={path} " in command


@pytest.mark.parametrize("name", RAY_UP)
def test_nodes_install_exact_versions(name):
    config = read(name)
    path = "~/.baton/constraints.txt"
    assert config["file_mounts"][path] == path
    installs = [command for command in commands(config) if "pip install" in command]
    assert installs
    for command in installs:
        words = shlex.split(command.partition("pip install")[2])
        packages = [word for word in words if not word.startswith(("-", "~/"))]
        assert packages
        assert all("==" in package for package in packages), packages
        assert words[words.index("--constraint") + 1] == path
    version = importlib.metadata.version("baton-serve")
    assert f"baton-serve[serve]=={version}" in shlex.split(" ".join(installs))


def test_nodes_install_the_versions_of_the_tests():
    import ray

    pins = CONSTRAINTS.read_text().splitlines()
    assert f"ray=={ray.__version__}" in pins
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins if not pin.startswith("#"))
    spec = kubernetes()["RayCluster/baton"]["spec"]
    assert spec["rayVersion"] == ray.__version__
    redis = kubernetes()["StatefulSet/baton-redis"]["spec"]["template"]["spec"]["containers"][0]
    assert re.fullmatch(r"redis:\d+\.\d+\.\d+", redis["image"])


def test_ray_requires_a_token_on_kubernetes():
    assert kubernetes()["RayCluster/baton"]["spec"]["authOptions"] == {"mode": "token"}


@pytest.mark.parametrize("name", RAY_UP)
def test_shells_on_the_head_find_ray_and_the_run_directory(name, tmp_path):
    (command,) = (c for c in commands(read(name)) if ".bashrc" in c)
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    for _ in range(2):
        subprocess.run(["bash", "-c", command], env=environment, check=True, timeout=10)
    shown = ["bash", "-c", ". ~/.bashrc; echo $BATON_RUN_DIR ${PATH%%:*} $RAY_AUTH_TOKEN_PATH"]
    done = subprocess.run(shown, env=environment, capture_output=True, text=True, check=True)
    found = [f"{tmp_path}/.baton/{name}" for name in ("run", "venv/bin", "ray_auth_token")]
    assert done.stdout.split() == found
    assert len((tmp_path / ".bashrc").read_text().splitlines()) == 1


def node_types(name: str) -> list[Node]:
    """Returns one node of each type, with the resources that the file gives to the type."""
    if name == "kuberay":
        groups = kubernetes()["RayCluster/baton"]["spec"]["workerGroupSpecs"]
        params = [json.loads(json.loads(g["rayStartParams"]["resources"])) for g in groups]
        limits = [g["template"]["spec"]["containers"][0]["resources"]["limits"] for g in groups]
        has = [
            {**own, "GPU": float(each["nvidia.com/gpu"]), "CPU": float(each["cpu"])}
            for own, each in zip(params, limits, strict=True)
        ]
    else:
        has = [each["resources"] for each in read(name)["available_node_types"].values()]
    return [Node(str(i), "", resources) for i, resources in enumerate(has)]


@pytest.mark.parametrize("name", ["aws", "gcp", "kuberay"])
def test_cloud_nodes_hold_the_pools_of_baton_yaml(name):
    given = read("baton")["pools"]
    pools = msgspec.convert({**given, "num_gpus": 1}, PoolsConfig)
    usable = nodes_to_start_on(node_types(name), pools, Pools(4, 4), 1.0)
    assert NodePlacement.of(pools, 1.0).room(usable) == 8  # one worker per GPU
    assert len(usable) == 2  # the head node is excluded


@pytest.mark.parametrize("name", ["aws", "gcp"])
def test_cloud_has_nodes_for_both_pools_and_a_head_without_workers(name):
    types = read(name)["available_node_types"]
    assert types["prefill"]["resources"]["prefill_node"] > 0
    assert types["decode"]["resources"]["decode_node"] > 0
    assert not {"prefill_node", "decode_node"} & set(types["head"]["resources"])
    assert "NOT RUN" in (FOLDER / f"{name}.yaml").read_text()


def test_own_machines_offer_both_resources_by_default():
    (start,) = (c for c in read("onprem")["worker_start_ray_commands"] if "ray start" in c)
    assert "/etc/baton-node.json" in start
    assert '{"prefill_node": 1000, "decode_node": 1000}' in start


def test_kuberay_manifest_uses_existing_fields():
    cluster = kubernetes()["RayCluster/baton"]
    spec = cluster["spec"]
    assert cluster["apiVersion"] == "ray.io/v1"
    assert not unknown(spec, RAY_CLUSTER)
    assert not unknown(spec["headGroupSpec"], HEAD_GROUP)
    assert not any(unknown(group, WORKER_GROUP) for group in spec["workerGroupSpecs"])
    assert not unknown(spec["gcsFaultToleranceOptions"], GCS_OPTIONS)
    groups = {group["groupName"]: group["rayStartParams"] for group in spec["workerGroupSpecs"]}
    assert "prefill_node" in groups["prefill"]["resources"]
    assert "decode_node" in groups["decode"]["resources"]


def test_kuberay_manifest_points_the_gcs_to_its_redis():
    documents = kubernetes()
    options = documents["RayCluster/baton"]["spec"]["gcsFaultToleranceOptions"]
    (port,) = documents["Service/baton-redis"]["spec"]["ports"]
    assert options["redisAddress"] == f"baton-redis:{port['port']}"
    secret = options["redisPassword"]["valueFrom"]["secretKeyRef"]
    assert secret == {"name": "baton-redis", "key": "password"}
