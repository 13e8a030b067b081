"""Builds a library of C++ once per machine and keeps the result.

A library is compiled for the processor it is built on, so its name in the cache holds a digest of
the sources, the compiler, the flags and what the processor can do: a home folder that several kinds
of machines share keeps one library for each.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-ffp-contract=off",  # which products are fused is written out: results must not depend on it
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
    "-pthread",
)
BUILD_TIMEOUT_S = 300.0


class BuildError(Exception):
    """A library cannot be built here; the text says why, in one line."""


@dataclass(frozen=True, slots=True)
class Sources:
    """What a library is made of: `main`, which includes what it needs of the same folder."""

    name: str  # of the library, in the cache
    folder: Path
    main: str


def built_library(sources: Sources, flags: tuple[str, ...] = FLAGS) -> Path:
    """The compiled library, built if it is not in the cache. Raises BuildError."""
    compiler = find_compiler()
    target = cache_folder() / f"{sources.name}-{_digest(sources, compiler, flags)}.so"
    if not target.exists():
        _build([compiler, *flags, str(sources.folder / sources.main)], target)
    return target


def open_library(path: Path, signatures: Mapping[str, tuple[Any, Sequence[Any]]]) -> ctypes.CDLL:
    """The library in `path`, its functions declared: by name, what each returns and takes."""
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


def find_compiler() -> str:
    """The C++ compiler: $CXX, else g++, else clang++. Raises BuildError."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        raise BuildError(f"nothing in C++ for {platform.machine()} processors")
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise BuildError("no C++ compiler: neither $CXX, g++ nor clang++ is there")


def cache_folder() -> Path:
    """Where libraries are kept: below $XDG_CACHE_HOME, else below ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "baton" / "native"


def _build(command: list[str], target: Path) -> None:
    """Compiles to a file beside `target` and renames it, so that workers may race."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            done = subprocess.run(
                [*command, "-o", str(made)],
                capture_output=True,
                text=True,
                timeout=BUILD_TIMEOUT_S,
                check=False,
            )
            if done.returncode:
                raise BuildError(f"{command[0]} failed: {_first_error(done.stderr)}")
            made.replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"building {target.name} failed: {error}") from error


def _digest(sources: Sources, compiler: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for source in sorted(sources.folder.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    try:
        version = subprocess.run(
            [compiler, "--version"], capture_output=True, timeout=BUILD_TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{compiler} does not run: {error}") from error
    digest.update(version + " ".join(flags).encode() + _processor().encode())
    return digest.hexdigest()


def _processor() -> str:
    """What the processor can do, as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("flags")), platform.processor())


def _first_error(text: str) -> str:
    lines = text.strip().splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")
