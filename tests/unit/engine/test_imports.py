"""Neither the core nor its tests need torch, transformers or Ray."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDERS = ("engine", "prefill", "decode", "router", "kvtransfer", "tests/unit")
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


def module_names() -> list[str]:
    """Every module of the core and of the unit tests."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in paths
        if not path.is_relative_to(NEED_TORCH)
    ]


def test_core_and_unit_tests_import_without_torch_or_ray():
    command = [sys.executable, "-c", IMPORT_ALL, *module_names()]
    result = subprocess.run(
        command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
