"""Builds the C++ library once per machine and caches it: `python -m engine.native.build`.

The library is compiled for the processor of this machine. Its name in the cache contains a digest
of the sources, the compiler, the flags and the processor's features. So a home folder that several
kinds of machines share has one library for each kind.

If several processes need the library at the same time, one of them builds it, and the others wait.
The compilation uses all cores.

A library that another user may have written is never loaded (`engine.ownership`). If the cache
cannot be trusted, the library is built again in a private folder, for this process alone.
"""

import atexit
import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from engine.errors import BuildError, UntrustedFile
from engine.layout import KVFormat
from engine.ownership import make_folder, require_trusted

log = logging.getLogger(__name__)

FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    # The sources state which products are fused, so all compilers give the same bits.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-pthread",
)
BUILD_TIMEOUT_S = 300.0
counters = {"private_builds": 0}  # number of libraries built for this process alone


FORMATS = {  # the number of each format in C++
    KVFormat.FP32: 0,
    KVFormat.BF16: 1,
    KVFormat.FP8_E4M3: 2,
    KVFormat.INT8: 3,
    KVFormat.INT4: 4,
}
SOURCES = Path(__file__).parent / "src"


@dataclass(frozen=True, slots=True)
class Unit:
    """A source file that is compiled separately, together with the headers of its folder."""

    name: str
    path: str  # relative to `SOURCES`
    flags: tuple[str, ...] = ()

    def command(self, compiler: str) -> list[str]:
        """Returns the command that compiles the unit. Each unit has a namespace of its own, because
        units define types with equal names.
        """
        namespace = f"-Dbaton=in_{self.name}"
        return [compiler, *FLAGS, *self.flags, namespace, "-c", str(SOURCES / self.path)]


# Loops that matter for speed use explicit vector instructions. Automatic vectorisation would only
# slow the compiler down.
_KERNEL_FLAGS = ("-fno-tree-loop-vectorize",)


def kernel_units(*flags: str) -> tuple[Unit, ...]:
    """Returns the units that compute a model. Units that take longest to compile come first."""
    flags = (*_KERNEL_FLAGS, *flags)
    attention = (
        Unit(
            f"attention_{number}",
            "kernels/attention.cpp",
            (*flags, f"-DBATON_KV_FORMAT={number}", f"-Dbaton_attention=baton_attention_{number}"),
        )
        for number in FORMATS.values()
    )
    return Unit("kernels", "kernels/baton.cpp", flags), *attention


UNITS = (
    *kernel_units(),
    Unit("router", "router/router.cpp"),
    Unit("transfer", "transfer/transfer.cpp"),
    Unit("disk", "transfer/disk.cpp"),
    Unit("text", "text/text.cpp"),
    Unit("peaks", "peaks/peaks.cpp"),
    Unit("ngrams", "ngrams/ngrams.cpp"),
)


def built_library(units: Sequence[Unit] = UNITS) -> Path:
    """Returns the path of the library. Builds the library if it is not in the cache. Raises
    BuildError.
    """
    compiler = find_compiler()
    name = _name(units, compiler)
    commands = [unit.command(compiler) for unit in units]
    try:
        return _cached(commands, name)
    except UntrustedFile as error:
        target = _private_folder(name, error) / name
    except OSError as error:
        raise BuildError(f"building {name} failed: {error}") from error
    _build(commands, target)
    return target


def is_built() -> bool:
    """True if the library is in the cache, trusted or not. Raises BuildError."""
    return (cache_folder() / _name(UNITS, find_compiler())).exists()


def compiler_cache(name: str) -> Path:
    """Returns a folder in which another compiler can cache its results. Other users cannot write to
    this folder.
    """
    top = cache_top()
    folder = top / "baton" / name
    try:
        make_folder(folder, top=top, mode=0o700)
    except (UntrustedFile, OSError) as error:
        return _private_folder(name, error)
    return folder


def _cached(commands: Sequence[list[str]], name: str) -> Path:
    """Returns the path of the library in the cache; builds the library if necessary. Raises
    BuildError, UntrustedFile, OSError.
    """
    folder, top = cache_folder(), cache_top()
    make_folder(folder, top=top, mode=0o700)
    target = folder / name
    if not target.exists():
        with _sole_builder(target):
            if not target.exists():
                _build(commands, target)
    require_trusted(target, top=top)
    return target


@contextlib.contextmanager
def _sole_builder(target: Path) -> Iterator[None]:
    """Locks the building of `target`. Waits for other builders, and makes later builders wait.

    Some file systems have no locks. On these, two processes may build the same file, each for
    itself.
    """
    path = target.with_suffix(".lock")
    with path.open("w") as lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # processes that waited for the lock then find the library


def _private_folder(name: str, why: Exception) -> Path:
    """Makes a private folder, which is removed when this process exits."""
    counters["private_builds"] += 1
    log.warning("%s is built for this process alone: %s", name, why)
    folder = Path(tempfile.mkdtemp(prefix="baton-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def find_compiler() -> str:
    """Returns the path of the C++ compiler: $CXX, else g++, else clang++. Raises BuildError."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        raise BuildError(f"Baton's C++ needs an x86-64 processor, not {platform.machine()}")
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise BuildError("no C++ compiler: neither $CXX, g++ nor clang++ was found")


def cache_folder() -> Path:
    """Returns the folder in which libraries are cached."""
    return cache_top() / "baton" / "native"


def cache_top() -> Path:
    """Returns the folder of the user's caches: $XDG_CACHE_HOME, else ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").resolve()


def _build(commands: Sequence[list[str]], target: Path) -> None:
    """Compiles and links to a file beside `target`, then renames it. So several processes may build
    at the same time.
    """
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            objects = [str(made.with_suffix(f".{i}.o")) for i in range(len(commands))]
            _run([[*each, "-o", to] for each, to in zip(commands, objects, strict=True)])
            _run([[commands[0][0], "-shared", "-pthread", *objects, "-o", str(made)]])
            made.chmod(0o500)
            made.replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"building {target.name} failed: {error}") from error


def _run(commands: Sequence[list[str]]) -> None:
    """Runs compilers on all cores. Raises BuildError, OSError, TimeoutExpired.

    After an exception, no compiler is left running.
    """
    compilers: list[subprocess.Popen[str]] = []

    def run(command: list[str]) -> None:
        compiler = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        compilers.append(compiler)
        _, errors = compiler.communicate(timeout=BUILD_TIMEOUT_S)
        if compiler.returncode:
            raise BuildError(f"{command[0]} failed: {_first_error(errors)}")

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        try:
            for each in as_completed([threads.submit(run, command) for command in commands]):
                each.result()
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            for compiler in compilers:
                compiler.kill()
            raise


def _name(units: Sequence[Unit], compiler: str) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for source in sorted(path for path in SOURCES.rglob("*") if path.is_file()):
        digest.update(source.name.encode() + source.read_bytes())
    try:
        version = subprocess.run(
            [compiler, "--version"], capture_output=True, timeout=BUILD_TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{compiler} does not run: {error}") from error
    flags = [" ".join((unit.path, *unit.flags)) for unit in units]
    digest.update(version + repr((FLAGS, flags)).encode() + _processor().encode())
    return f"baton-{digest.hexdigest()}.so"


def _processor() -> str:
    """Returns the processor's features, from Linux's list."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    found = [line for line in lines if line.startswith("flags")]
    return found[0] if found else platform.processor()


def _first_error(text: str) -> str:
    lines = text.strip().splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")


def main() -> int:
    """Builds the library. If this fails, prints the reason and returns 1."""
    try:
        built_library()
    except BuildError as error:
        print(error, file=sys.stderr)  # noqa: T201 - it is the command's answer
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
