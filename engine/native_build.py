"""Builds a library of C++ once per machine and keeps the result.

A library is compiled for the processor that builds it. Its name in the cache holds a digest of the
sources, the compiler, the flags and the processor's features. So a home folder that several kinds
of machines share keeps one library for each.

Processes that start together want the same library: one of them builds it, and the others wait.

A library that another user can have written is never loaded (`engine.ownership`). If the cache is
not to be trusted, the library is built again in a private folder, for this process alone.
"""

import atexit
import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from engine.errors import BuildError, UntrustedFile
from engine.ownership import make_folder, require_trusted

log = logging.getLogger(__name__)

FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-ffp-contract=off",  # sources say which products are fused, so compilers agree
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
    "-pthread",
)
BUILD_TIMEOUT_S = 300.0
LibraryT = TypeVar("LibraryT", bound=ctypes.CDLL)


counters = {"private_builds": 0}  # libraries built for this process alone


@dataclass(frozen=True, slots=True)
class Sources:
    """The files of a library: `main` is compiled and includes others of the same folder."""

    name: str  # the library's, in the cache
    folder: Path
    main: str
    flags: tuple[str, ...] = FLAGS


def built_library(sources: Sources) -> Path:
    """Path of the compiled library, built if it is not in the cache. Raises BuildError."""
    compiler = find_compiler()
    name = f"{sources.name}-{_digest(sources, compiler)}.so"
    command = [compiler, *sources.flags, str(sources.folder / sources.main)]
    try:
        return _cached(command, name)
    except UntrustedFile as error:
        target = _private_folder(name, error) / name
    except OSError as error:
        raise BuildError(f"building {name} failed: {error}") from error
    _build(command, target)
    return target


def is_built(sources: Sources) -> bool:
    """True if the cache has the library. It may be untrusted. Raises BuildError."""
    compiler = find_compiler()
    return (cache_folder() / f"{sources.name}-{_digest(sources, compiler)}.so").exists()


def compiler_cache(name: str) -> Path:
    """A folder where another compiler may keep its results: other users cannot write to it."""
    top = cache_top()
    folder = top / "baton" / name
    try:
        make_folder(folder, top=top, mode=0o700)
    except (UntrustedFile, OSError) as error:
        return _private_folder(name, error)
    return folder


def _cached(command: list[str], name: str) -> Path:
    """Path of the library in the cache, built if need be. Raises BuildError, UntrustedFile,
    OSError.
    """
    folder, top = cache_folder(), cache_top()
    make_folder(folder, top=top, mode=0o700)
    target = folder / name
    if not target.exists():
        with _sole_builder(target):
            if not target.exists():
                _build(command, target)
    require_trusted(target, top=top)
    return target


@contextlib.contextmanager
def _sole_builder(target: Path) -> Iterator[None]:
    """Waits until no other process builds `target`, and holds others back meanwhile.

    Without a lock two processes build the same file, each for itself: some file systems have none.
    """
    path = target.with_suffix(".lock")
    with path.open("w") as lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # who waits for it finds the library


def _private_folder(name: str, why: Exception) -> Path:
    """Makes a folder that is removed when this process ends."""
    counters["private_builds"] += 1
    log.warning("%s is built for this process alone: %s", name, why)
    folder = Path(tempfile.mkdtemp(prefix="baton-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def open_library(
    path: Path,
    signatures: Mapping[str, tuple[Any, Sequence[Any]]],
    kind: type[LibraryT] = ctypes.CDLL,  # type: ignore[assignment]
) -> LibraryT:
    """Loads the library in `path` and declares its functions: by name, result and argument
    types.

    Calls into a `ctypes.PyDLL` keep the interpreter's lock.
    """
    library = kind(str(path))
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


def find_compiler() -> str:
    """Finds the C++ compiler: $CXX, else g++, else clang++. Raises BuildError."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        raise BuildError(f"no C++ kernels exist for {platform.machine()} processors")
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise BuildError("no C++ compiler: neither $CXX, g++ nor clang++ was found")


def cache_folder() -> Path:
    """The folder where libraries are kept."""
    return cache_top() / "baton" / "native"


def cache_top() -> Path:
    """The folder of the user's caches: $XDG_CACHE_HOME, else ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").resolve()


def _build(command: list[str], target: Path) -> None:
    """Compiles to a file beside `target` and renames it, so that workers may race."""
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            _compile(command, made)
            made.chmod(0o500)
            made.replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"building {target.name} failed: {error}") from error


def _compile(command: list[str], to: Path) -> None:
    """Raises BuildError, OSError, TimeoutExpired."""
    done = subprocess.run(
        [*command, "-o", str(to)],
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise BuildError(f"{command[0]} failed: {_first_error(done.stderr)}")


def _digest(sources: Sources, compiler: str) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for source in sorted(sources.folder.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    try:
        version = subprocess.run(
            [compiler, "--version"], capture_output=True, timeout=BUILD_TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{compiler} does not run: {error}") from error
    digest.update(version + " ".join(sources.flags).encode() + _processor().encode())
    return digest.hexdigest()


def _processor() -> str:
    """The processor's features, as Linux lists them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    found = [line for line in lines if line.startswith("flags")]
    return found[0] if found else platform.processor()


def _first_error(text: str) -> str:
    lines = text.strip().splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")
