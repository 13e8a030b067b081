"""Files in `deploy/container` match the tree, the pinned versions and each other."""

import re
import tomllib
from pathlib import Path

import pytest

import deploy
from deploy.base.launcher import STOP_TIMEOUT_S
from engine.config import GatewayConfig

ROOT = Path(deploy.__file__).parents[1]
FOLDER = ROOT / "deploy" / "container"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()


def packages() -> set[str]:
    """Returns the folders of the tree from which the wheel is built."""
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    return {pattern.rstrip("*") for pattern in tables["packages"]["find"]["include"]}


def test_image_is_built_from_every_package_and_exact_versions():
    copied = set(re.findall(r"^COPY (\w+) \1$", DOCKERFILE, re.MULTILINE))
    assert copied == packages()
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in packages()} <= set(ignored)
    assert "PIP_CONSTRAINT=/src/constraints.txt" in DOCKERFILE


def test_image_does_not_run_as_root_and_asks_for_readiness():
    assert re.search(r"^USER \d+:\d+$", DOCKERFILE, re.MULTILINE)
    assert "/ready" in DOCKERFILE.partition("HEALTHCHECK")[2]


def compose() -> dict:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return yaml.safe_load((FOLDER / "compose.yaml").read_text())


def test_compose_waits_for_answers_and_grants_no_privilege():
    service = compose()["services"]["baton"]
    least_s = GatewayConfig().drain_timeout_s + 2 * STOP_TIMEOUT_S
    assert int(service["stop_grace_period"].removesuffix("s")) > least_s
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]


def test_compose_mounts_files_that_exist_and_publishes_to_this_machine_only():
    for service in compose()["services"].values():
        for volume in service.get("volumes", ()):
            if volume.startswith("."):
                assert (FOLDER / volume.partition(":")[0]).exists()
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_images_of_others_have_versions():
    images = [each["image"] for each in compose()["services"].values() if "image" in each]
    assert images
    assert all(re.search(r":v?\d+\.\d+\.\d+$", image) for image in images)
