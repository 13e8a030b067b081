"""Objects of `deploy/kubernetes` match the schemas of Kubernetes, and use each other's names."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import deploy
from engine.config import GatewayConfig, PoolsConfig

FOLDER = Path(deploy.__file__).parent / "kubernetes"
EXAMPLE = FOLDER / "example"
yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

# Taken from the Prometheus operator's definition of a ServiceMonitor.
MONITOR = {"selector", "jobLabel", "endpoints"}
ENDPOINT = {"port", "path", "interval", "authorization"}


def documents() -> list[dict[str, Any]]:
    files = sorted(FOLDER.glob("*/*.yaml"))
    return [one for file in files for one in yaml.safe_load_all(file.read_text())]


def objects() -> dict[str, dict[str, Any]]:
    return {
        f"{one['kind']}/{one['metadata']['name']}": one for one in documents() if "metadata" in one
    }


OBJECTS = objects()
CLUSTER = OBJECTS["RayCluster/baton"]["spec"]
KUSTOMIZATION = yaml.safe_load((EXAMPLE / "kustomization.yaml").read_text())
VALUES = OBJECTS["ConfigMap/baton-values"]["data"]


def templates() -> Iterator[tuple[str, dict[str, Any]]]:
    """Returns the pods that KubeRay creates, by group."""
    yield "head", CLUSTER["headGroupSpec"]["template"]
    for group in CLUSTER["workerGroupSpecs"]:
        yield group["groupName"], group["template"]


def pods() -> list[dict[str, Any]]:
    found = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, **template}
        for name, template in templates()
    ]
    stateful = OBJECTS["StatefulSet/baton-redis"]["spec"]["template"]["spec"]
    return [
        *found,
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "redis"}, "spec": stateful},
    ]


CHECKED = [
    each for each in OBJECTS.values() if each["kind"] not in ("RayCluster", "ServiceMonitor")
]


@pytest.mark.parametrize("one", [*CHECKED, *pods()], ids=lambda one: one["metadata"]["name"])
def test_kubernetes_accepts_every_object(one):
    validator = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    validator.validate(one, validator.latest_version(), strict=True)


def test_every_file_is_listed():
    for folder in filter(Path.is_dir, FOLDER.iterdir()):
        kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
        listed = {"kustomization.yaml", *kustomization.get("resources", ())}
        for made in kustomization.get("configMapGenerator", ()):
            listed.update(made["files"])
        assert {path.name for path in folder.glob("*.yaml")} == listed - {"../base"}


def test_every_value_has_its_place():
    sizes = yaml.safe_load((FOLDER / "sizes" / "kustomization.yaml").read_text())
    sources = [each["source"]["fieldPath"] for each in sizes["replacements"]]
    assert sorted(sources) == sorted(f"data.{name}" for name in VALUES)


def rendered(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns kustomize's output for a deployment, by kind and name."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    for name in ("keys.json", "prometheus.key", "redis.password"):
        (folder / name).write_text("secret")
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return {
        f"{one['kind']}/{one['metadata']['name']}": one for one in yaml.safe_load_all(done.stdout)
    }


def test_what_a_user_sets_reaches_the_cluster(tmp_path):
    own = tmp_path / "own"
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    shutil.copytree(EXAMPLE, own)
    values = (own / "values.yaml").read_text()
    for was, now in (('_pods: "1"', '_pods: "3"'), ('_gpus: "4"', '_gpus: "8"'), ("128Gi", "99Gi")):
        values = values.replace(was, now)
    (own / "values.yaml").write_text(values)
    kustomization = (own / "kustomization.yaml").read_text()
    kustomization = kustomization.replace("<registry>", "registry.example")
    (own / "kustomization.yaml").write_text(kustomization)
    found = rendered(own)
    assert "ConfigMap/baton-values" not in found
    assert {each["metadata"]["namespace"] for each in found.values()} == {"baton"}
    for group in found["RayCluster/baton"]["spec"]["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        assert group["replicas"] == 3
        assert container["image"] == "registry.example/baton:0.1.0"
        limits = container["resources"]["limits"]
        assert (limits["nvidia.com/gpu"], limits["memory"]) == ("8", "99Gi")
    assert "model:" in found["ConfigMap/baton-config"]["data"]["baton.yaml"]
    (own / "kustomization.yaml").write_text(kustomization.replace("# - ../without", "- ../without"))
    assert "nvidia" not in str(rendered(own)["RayCluster/baton"])


@pytest.mark.parametrize("pod", pods(), ids=lambda one: one["metadata"]["name"])
def test_pods_have_no_privileges(pod):
    assert pod["spec"]["securityContext"]["runAsNonRoot"]
    for container in pod["spec"]["containers"]:
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert not container["securityContext"]["allowPrivilegeEscalation"]


def test_secrets_and_configuration_are_made():
    made = {
        each["name"]
        for key in ("secretGenerator", "configMapGenerator")
        for each in KUSTOMIZATION[key]
    }
    text = "".join(path.read_text() for path in FOLDER.glob("*/*.yaml"))
    head = CLUSTER["headGroupSpec"]["template"]["spec"]["volumes"]
    mounted = {each["configMap"]["name"] for each in head if "configMap" in each}
    mounted |= {each["secret"]["secretName"] for each in head if "secret" in each}
    assert mounted | {"baton-redis", "baton-prometheus"} == made
    assert all(name in text for name in made)


def test_configuration_fits_the_cluster():
    given = yaml.safe_load((EXAMPLE / "baton.yaml").read_text())
    pools = msgspec.convert(given["pools"], PoolsConfig)
    gateway = msgspec.convert(given["gateway"], GatewayConfig)
    groups = {
        group["groupName"]: str(group["rayStartParams"]) for group in CLUSTER["workerGroupSpecs"]
    }
    assert str(pools.prefill_resource) in groups["prefill"]
    assert str(pools.decode_resource) in groups["decode"]
    for name in ("prefill", "decode"):
        assert str({"resources": VALUES[f"{name}_workers"]}) == groups[name]
    (port,) = OBJECTS["Service/baton"]["spec"]["ports"]
    assert port["targetPort"] == gateway.port
    head = CLUSTER["headGroupSpec"]["template"]["spec"]["containers"][0]
    mounts = [mount["mountPath"] for mount in head["volumeMounts"]]
    assert str(Path(str(gateway.keys_file)).parent) in mounts


def test_monitor_uses_existing_fields_and_the_service():
    spec = OBJECTS["ServiceMonitor/baton"]["spec"]
    assert set(spec) <= MONITOR
    (endpoint,) = spec["endpoints"]
    assert set(endpoint) <= ENDPOINT
    service = OBJECTS["Service/baton"]
    assert spec["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert endpoint["port"] == service["spec"]["ports"][0]["name"]


def test_only_the_gateway_is_open_to_others():
    rules = [one["spec"] for one in OBJECTS.values() if one["kind"] == "NetworkPolicy"]
    ports = [
        port["port"]
        for spec in rules
        for rule in spec["ingress"]
        if "from" not in rule
        for port in rule["ports"]
    ]
    assert ports == [GatewayConfig().port]
