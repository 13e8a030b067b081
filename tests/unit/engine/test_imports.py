"""Which modules import what: the core no torch, transformers or Ray; only gateways import gRPC."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDERS = ("engine", "prefill", "decode", "router", "kvtransfer")
NEED_TORCH = ROOT / "engine" / "model"

IMPORT_ALL = """
import importlib, sys

class Absent:
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in ("torch", "transformers", "ray"):
            raise ModuleNotFoundError(f"{fullname} is absent", name=fullname)

sys.meta_path.insert(0, Absent())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""

SETTINGS_OF_GRPC = """
import importlib, os, sys

class Watch:
    def find_spec(self, fullname, path=None, target=None):
        if fullname == "grpc":
            print(os.environ.get("GRPC_EXPERIMENTS"))

sys.meta_path.insert(0, Watch())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def module_names() -> list[str]:
    """Returns every module of the core. `make test-core` runs unit tests without torch and Ray."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in paths
        if not path.is_relative_to(NEED_TORCH)
    ]


def test_core_imports_without_torch_or_ray():
    imported(IMPORT_ALL, *module_names())


def test_a_gateway_loads_grpc_with_its_settings():
    assert "-event_engine_client" in imported(SETTINGS_OF_GRPC, "deploy.services.gateway")


def test_workers_and_stores_load_no_grpc():
    assert imported(SETTINGS_OF_GRPC, "deploy.services.worker", "deploy.services.store") == ""


def imported(program: str, *names: str) -> str:
    """Runs a program that imports modules in a new process. Returns its output."""
    command = [sys.executable, "-c", program, *names]
    result = subprocess.run(
        command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
