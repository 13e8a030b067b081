"""Collects the packages that `bench.gpu --serve` needs, for a GPU machine without a network:

    python -m bench.gpu.wheels DIR [--python 3.12] [--have NAME,NAME…]

The wheels are those of the packages in `constraints.txt` and of their requirements, as installed on
this machine. Packages that the other machine has already are left out: name them with `--have`, as
`pip list` prints them. On the other machine:

    python -m pip install --no-index --no-deps --target SITE DIR/*.whl
    PYTHONPATH=SITE:. python -m bench.gpu --serve CHECKPOINT

Exit status: 0; 1 if pip fails, or if the wheels are larger than `--limit-mib`.
"""

import argparse
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
HAVE = ("torch", "triton", "transformers", "numpy", "safetensors", "setuptools")
# minor versions of glibc 2 for which wheels are built, the newest first
GLIBC = (39, 34, 31, 28, 27, 24, 17)
PLATFORMS = (*(f"manylinux_2_{n}_x86_64" for n in GLIBC), "manylinux2014_x86_64")
LIMIT_MIB = 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def main(arguments: Sequence[str] | None = None) -> int:
    """Downloads the wheels and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.wheels", description="Collects packages for a GPU machine."
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--python", default="3.12", help="version of Python there")
    parser.add_argument("--have", default="", help="further packages that are there")
    parser.add_argument("--limit-mib", type=float, default=LIMIT_MIB)
    options = parser.parse_args(arguments)
    roots = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    have = {*HAVE, *filter(None, options.have.split(","))}
    versions = pinned((ROOT / "constraints.txt").read_text())
    names = needed(map(name_of, roots), needs_of, have=have, known=versions)
    wanted = [f"{name}=={versions[name]}" for name in names]
    options.folder.mkdir(parents=True, exist_ok=True)
    status = subprocess.run(command_of(wanted, options.folder, options.python), check=False)
    if status.returncode:
        return 1
    wheels = {path.name: path.stat().st_size for path in options.folder.glob("*.whl")}
    sys.stdout.write(f"{len(wheels)} wheels, {sum(wheels.values()) / 2**20:.1f} MiB\n")
    if sum(wheels.values()) <= options.limit_mib * 2**20:
        return 0
    largest = sorted(wheels, key=lambda name: -wheels[name])[:5]
    sys.stderr.write(f"more than {options.limit_mib:g} MiB; the largest: {', '.join(largest)}\n")
    return 1


def pinned(constraints: str) -> dict[str, str]:
    """Returns the version of each package, by its canonical name."""
    lines = (line.partition("#")[0].strip() for line in constraints.splitlines())
    pairs = (line.split("==") for line in lines if "==" in line)
    return {name_of(name): version for name, version in pairs}


def name_of(requirement: str) -> str:
    """Returns the canonical name of the package that a requirement names."""
    found = _NAME.match(requirement.strip())
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def needs_of(name: str) -> list[str]:
    """Returns the requirements of an installed package, without extras; empty if it is absent."""
    try:
        required = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [name_of(each) for each in required if "extra ==" not in each]


def needed(
    roots: Iterable[str],
    needs: Callable[[str], Iterable[str]],
    *,
    have: Collection[str],
    known: Mapping[str, str],
) -> list[str]:
    """Returns the packages to download, sorted by name.

    Packages in `have`, and their requirements, count as installed on the other machine. A package
    without a known version is not needed on this kind of system.
    """
    there, lacking = {name_of(each) for each in have}, set[str]()
    todo = list(roots)
    while todo:
        name = todo.pop()
        if name in lacking or name in there or name not in known:
            continue
        lacking.add(name)
        todo += needs(name)
    return sorted(lacking)


def command_of(wanted: Sequence[str], folder: Path, python: str) -> list[str]:
    """Returns the pip command that downloads wheels for Linux on x86-64."""
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    return [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
        *("--only-binary=:all:", "--implementation", "cp", "--python-version", python),
        *(*platforms, "--dest", str(folder), *wanted),
    ]


if __name__ == "__main__":
    sys.exit(main())
