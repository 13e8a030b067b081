"""Finds the GPUs of this machine, and assigns them to workers.

GPUs are found without CUDA, which must not be initialised in a process that forks workers.
`nvidia-smi` lists the GPUs. Without `nvidia-smi`, as in some containers, their device files are
counted. `CUDA_VISIBLE_DEVICES` limits the GPUs in the same way as in CUDA itself.

A worker gets whole GPUs, or a part of one GPU that it shares with workers of the same machine. The
worker sees no other GPUs. A later worker of the same name gets the same GPUs if they are free.
"""

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from engine.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
QUERY = "--query-gpu=uuid,name,memory.total,driver_version"
TOOL_TIMEOUT_S = 10.0
_DEVICE_FILE = re.compile(r"nvidia\d+")
_LEAST_PART = 1e-6  # smaller free parts of a GPU are rounding errors


class HostGpu(msgspec.Struct, frozen=True):
    """A GPU. `name` is its name in CUDA_VISIBLE_DEVICES; `about` describes it."""

    name: str
    about: str = ""


class FoundGpus(msgspec.Struct, frozen=True):
    """The GPUs that workers can use, or the reason why workers can use no GPU."""

    gpus: tuple[HostGpu, ...] = ()
    why_none: str = ""


def find_gpus(environment: Mapping[str, str]) -> FoundGpus:
    """Finds GPUs that the installed torch can use. Does not initialise CUDA."""
    found = _all_gpus()
    seen = tuple(visible(found.gpus, environment.get(VISIBLE)))
    if not seen:
        hidden = f"{VISIBLE} hides all {len(found.gpus)} GPUs" if found.gpus else found.why_none
        return FoundGpus((), hidden)
    if torch_cuda() is None:
        return FoundGpus((), "the installed torch was built without CUDA")
    return FoundGpus(seen)


def torch_cuda() -> str | None:
    """Returns the CUDA version of the installed torch, without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None
    found = re.search(r"^cuda\b[^=]*=\s*'([\d.]+)'", text, re.MULTILINE)
    return found[1] if found else None


def visible(gpus: Sequence[HostGpu], variable: str | None) -> Iterator[HostGpu]:
    """Yields the GPUs that CUDA shows, by the value of CUDA_VISIBLE_DEVICES.

    Names in the variable are kept as they are: a number has the same meaning for every process
    with the same environment. As in CUDA, the first name that means no GPU ends the list.
    """
    if variable is None:
        yield from gpus
        return
    taken: set[str] = set()
    for name in (part.strip() for part in variable.split(",")):
        if name.startswith("MIG-"):  # a part of a GPU (MIG), which `nvidia-smi` does not list here
            gpu = HostGpu(name)
        elif name.isdecimal():
            if int(name) >= len(gpus):
                return
            gpu = HostGpu(name, gpus[int(name)].about if len(gpus) == 1 else "")
        else:
            fit = [gpu for gpu in gpus if name and gpu.name.startswith(name)]
            if len(fit) != 1:
                return
            gpu = fit[0]
        if gpu.name in taken:
            return
        taken.add(gpu.name)
        yield gpu


def parse_smi(text: str) -> tuple[HostGpu, ...]:
    """Parses the output of `nvidia-smi` for QUERY."""
    lines = [line.split(",", 1) for line in text.splitlines() if line.startswith("GPU-")]
    return tuple(HostGpu(line[0].strip(), line[-1].strip()) for line in lines)


def _all_gpus() -> FoundGpus:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        files = [path for path in Path("/dev").glob("nvidia*") if _DEVICE_FILE.fullmatch(path.name)]
        gpus = tuple(HostGpu(str(i)) for i in range(len(files)))
        return FoundGpus(gpus, "" if gpus else "no nvidia-smi, and no device file of a GPU")
    try:
        done = subprocess.run(
            [tool, QUERY, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=TOOL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return FoundGpus((), f"nvidia-smi: {error}")
    gpus = parse_smi(done.stdout) if done.returncode == 0 else ()
    said = " ".join((done.stderr or done.stdout).split())[:200]
    return FoundGpus(gpus, "" if gpus else f"nvidia-smi: {said or 'it lists no GPU'}")


class GpuBooks:
    """Keeps the assignment of GPUs to workers. Not thread-safe."""

    def __init__(self, found: FoundGpus) -> None:
        self.found = found
        self._names = [gpu.name for gpu in found.gpus]
        self._free = dict.fromkeys(self._names, 1.0)
        # By worker: GPUs and share of each.
        self._taken: dict[str, tuple[Sequence[str], float]] = {}
        self._last: dict[str, Sequence[str]] = {}

    def assign(self, worker: str, num_gpus: float) -> tuple[str, ...]:
        """Assigns GPUs to a worker. Returns their names in CUDA_VISIBLE_DEVICES.

        Raises ConfigError if too few are free.
        """
        assert worker not in self._taken, f"{worker} has GPUs"
        part = min(num_gpus, 1.0)
        last = self._last.get(worker, ())
        fit = [name for name in self._names if self._free[name] > part - _LEAST_PART]
        # Prefer the GPUs of the previous worker of this name, then GPUs with the smallest free
        # part.
        fit.sort(key=lambda name: (name not in last, self._free[name]))
        num = max(1, round(num_gpus))
        if len(fit) < num:
            raise ConfigError(f"{worker} needs {num_gpus:g} GPU, and {self._there()}")
        taken = tuple(sorted(fit[:num], key=self._names.index))
        for name in taken:
            self._free[name] -= part
        self._taken[worker] = taken, part
        self._last[worker] = taken
        return taken

    def free(self, worker: str) -> None:
        """Frees the GPUs of a worker that has ended. Does nothing if the worker has no GPUs."""
        taken, part = self._taken.pop(worker, ((), 0.0))
        for name in taken:
            self._free[name] = min(1.0, self._free[name] + part)

    def room(self, num_gpus: float) -> int:
        """Returns the total number of workers that fit if each worker takes `num_gpus`."""
        return num_that_fit(len(self._names), num_gpus)

    def _there(self) -> str:
        if not self._names:
            return f"this machine has none: {self.found.why_none}"
        users = ", ".join(sorted(self._taken)) or "none"
        return f"this machine has {len(self._names)}; taken by: {users}"


def num_that_fit(num_gpus: int, each: float) -> int:
    """Returns the number of workers that fit on `num_gpus`. No worker gets parts of two GPUs."""
    if each >= 1:
        return int(num_gpus / each)
    return num_gpus * int(1 / each + _LEAST_PART)
