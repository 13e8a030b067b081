"""The core, and these tests, need neither torch nor transformers nor Ray."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
FOLDERS = ("engine", "prefill", "decode", "router", "kvtransfer", "tests/unit")

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
    """Every module of the core and of the unit tests; the latter are no package."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    return [name.removeprefix("tests.unit.") for name in names]


def test_the_core_and_the_unit_tests_import_without_heavy_libraries():
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'unit'}"}
    command = [sys.executable, "-c", IMPORT_ALL, *module_names()]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
