"""Builds a wheel of this tree, and installs it into a separate environment."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

TREE = Path(__file__).parents[3]
PACKAGES = ("engine", "kvtransfer", "prefill", "decode", "router", "deploy", "bench")
FILES = ("pyproject.toml", "README.md", "LICENSE", "NOTICE", "constraints.txt")
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
TIMEOUT_S = 110.0


def build_wheel(folder: Path) -> Path:
    """Builds in a copy of the tree, so that the tree is unchanged; returns the wheel.

    The build backend comes from the test environment: nothing is downloaded.
    """
    copy, out = folder / "tree", folder / "dist"
    for package in (*PACKAGES, "tests"):
        shutil.copytree(
            TREE / package, copy / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for file in FILES:
        shutil.copy(TREE / file, copy / file)
    out.mkdir()
    _run([sys.executable, "-c", BUILD, str(out)], cwd=copy)
    (wheel,) = out.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """Makes a virtual environment with only the wheel; returns its `bin` folder.

    Dependencies come from the test environment's site-packages by path. The .pth files in that
    folder are not read, so an editable install of the tree there has no effect.
    """
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    _run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)])
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder / "bin"


def outside_environment() -> dict[str, str]:
    """Returns the environment variables of this process, without the tree on Python's path."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _run(command: list[str], cwd: Path | None = None) -> None:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=outside_environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
