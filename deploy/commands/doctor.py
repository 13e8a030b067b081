"""`baton doctor`: lists the parts of this machine that Baton would use, and why it would not use
others.

Each probe reads the system and returns findings. No probe imports torch, Ray or NIXL, or changes
anything. A worker may still find other faults, for example a driver of the wrong version.
"""

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from deploy.base.defaults import pools_of
from deploy.base.gpus import FoundGpus, find_gpus, num_that_fit
from deploy.commands.configuration import ConfigFile, configured
from deploy.commands.options import AsJson
from deploy.commands.views import Output, table_of
from deploy.worker.memory import HEAD_ROOM_BYTES, LEAST_BYTES, available_bytes
from engine.config import Config, DeviceKind
from engine.devices.settings import choose_device, gpus_of_worker, resolve
from engine.errors import BatonError
from engine.native.build import cache_folder, find_compiler, is_built

FEATURES = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
SPARE_FILES = 512  # descriptors that a gateway needs in addition to its connections
LEAST_DISK_BYTES = 2**30
GIB = 2**30
SHMEM_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


class Verdict(StrEnum):
    """What a finding means for a deployment."""

    USED = "used"
    UNUSED = "unused"  # missing or not needed; Baton serves without it
    WRONG = "wrong"  # a deployment with this configuration would not start, or would fail


class Finding(msgspec.Struct, frozen=True):
    """The result of one check."""

    name: str
    verdict: Verdict
    found: str
    why: str = ""  # the reason why the part is not used, or advice


def judged(name: str, found: str, why: str, *, holds: bool, if_not: Verdict) -> Finding:
    """Returns a finding: the part is used if the condition holds.

    Otherwise `why` gives the reason.
    """
    return Finding(name, Verdict.USED, found) if holds else Finding(name, if_not, found, why)


def doctor(config: ConfigFile = None, *, as_json: AsJson = False) -> None:
    """Looks at this machine: found, will be used, why not. Status 1 if something is wrong."""
    findings = diagnose(configured(config))
    Output(as_json=as_json).show(lambda: findings, findings_table, watch=False)
    if any(each.verdict is Verdict.WRONG for each in findings):
        raise typer.Exit(1)


def diagnose(config: Config) -> list[Finding]:
    """Returns the findings of all probes. An OSError of a probe becomes a finding too."""
    found: list[Finding] = []
    for probe in PROBES:
        try:
            found += probe(config)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            name = probe.__name__.strip("_")
            found.append(Finding(name, Verdict.UNUSED, "unknown", f"cannot be read: {error}"))
    return found


def findings_table(findings: list[Finding]) -> Table:
    """Returns a table with a row for each finding."""
    table = table_of(
        "this machine", ("what", "verdict", "found", "why"), (), wraps=("found", "why")
    )
    styles = {Verdict.USED: "green", Verdict.UNUSED: "dim", Verdict.WRONG: "red"}
    for each in findings:
        verdict = f"[{styles[each.verdict]}]{each.verdict}[/]"
        table.add_row(each.name, verdict, escape(each.found), escape(each.why))
    return table


def processor(cpuinfo: str, cores: int) -> Finding:
    """Judges the processor from the text of /proc/cpuinfo."""
    lines = [line for line in cpuinfo.splitlines() if line.startswith("flags")]
    flags = set(lines[0].split()) if lines else set()
    has = [name for name in FEATURES if name in flags]
    found = f"{cores} cores, {platform.machine()}: {', '.join(has) or 'no vector features'}"
    holds = {"avx2", "fma"} <= flags
    why = "the C++ kernels need avx2 and fma"
    return judged("processor", found, why, holds=holds, if_not=Verdict.UNUSED)


def memory(available: int, num_workers: int) -> Finding:
    """Judges the number of bytes that may still be allocated."""
    least = num_workers * (HEAD_ROOM_BYTES + LEAST_BYTES)
    found = f"{available / GIB:.1f} GiB available for {num_workers} workers"
    why = f"they take {least / GIB:.1f} GiB without the weights: fewer workers, or more memory"
    return judged("memory", found, why, holds=available >= least, if_not=Verdict.WRONG)


def descriptors(soft: int, hard: int, connections: int) -> Finding:
    """Judges the limits of open files. Gateways raise their soft limit to the hard limit."""
    found = f"{_limit(soft)} now, {_limit(hard)} at most"
    holds = hard == resource.RLIM_INFINITY or hard >= connections + SPARE_FILES
    why = f"fewer than gateway.max_connections = {connections} are accepted: raise `ulimit -Hn`"
    return judged("descriptors", found, why, holds=holds, if_not=Verdict.UNUSED)


def store_disk(folder: Path, wanted: int) -> Finding:
    """Judges the directory of a store's blocks, which may grow to `wanted` bytes."""
    name = "store.disk"
    top = next(path for path in (folder, *folder.parents) if path.exists())
    if not top.is_dir() or not os.access(top, os.W_OK | os.X_OK):
        return Finding(name, Verdict.WRONG, str(folder), f"{top} is no directory to write to")
    free = shutil.disk_usage(top).free
    there = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    found = f"{folder}: {free / GIB:.1f} GiB free, {there / GIB:.1f} GiB of blocks there"
    why = f"store.disk_gib = {wanted / GIB:g}: a full disk keeps fewer blocks; give less"
    return judged(name, found, why, holds=free + there >= wanted, if_not=Verdict.UNUSED)


def store_memory(wanted: int, available: int) -> Finding:
    """Judges the memory of a store, which is allocated when blocks are written."""
    found = f"{wanted / GIB:.1f} GiB wanted, {available / GIB:.1f} GiB available"
    why, holds = "less, or more memory", available >= wanted
    return judged("store.memory_mib", found, why, holds=holds, if_not=Verdict.WRONG)


def lockable(soft: int, wanted: int) -> Finding:
    """Judges the limit of locked memory. RDMA must lock the memory of a store."""
    found = f"{_limit(soft)} bytes, the store has {wanted}"
    holds = soft == resource.RLIM_INFINITY or soft >= wanted
    why = "over RDMA its memory cannot be registered: `ulimit -l unlimited`"
    return judged("store: lockable memory", found, why, holds=holds, if_not=Verdict.UNUSED)


def huge_pages(setting: str) -> Finding:
    """Judges the kernel's setting of huge pages for shared memory, where a store keeps blocks."""
    chosen = re.search(r"\[(\w+)\]", setting)
    found = chosen[1] if chosen else "unknown"
    holds = found in ("always", "within_size", "force")
    why = f"copies may be slower: echo within_size > {SHMEM_HUGE}"
    return judged("store: huge pages", found, why, holds=holds, if_not=Verdict.UNUSED)


def gpus(config: Config, found: FoundGpus) -> Iterator[Finding]:
    """Judges the GPUs, and reports the device of workers and their default settings."""
    device = choose_device(config.worker.device, config.pools, has_gpus=bool(found.gpus))
    is_used = device is DeviceKind.CUDA
    if not found.gpus:
        verdict = Verdict.WRONG if is_used else Verdict.UNUSED
        yield Finding("GPUs", verdict, "none", found.why_none)
    for gpu in found.gpus:
        why = "" if is_used else "worker.device or pools.num_gpus keeps workers on the CPU"
        about = ", ".join(filter(None, (gpu.name, gpu.about)))
        yield Finding("GPUs", Verdict.USED if is_used else Verdict.UNUSED, about, why)
    settings = resolve(config.worker, device)
    about = (
        f"{device}: weights {settings.weights}, KV {settings.kv_dtype}, steps of"
        f" {settings.max_batch_tokens} tokens, {settings.max_running} sequences"
    )
    each = gpus_of_worker(config.pools, device, settings.tp * settings.pp)
    room = num_that_fit(len(found.gpus), each) if each else None
    num_workers = pools_of(config.pools, room).total
    if room is None or num_workers <= room or not found.gpus:
        yield Finding("workers", Verdict.USED, about)
    else:
        why = f"{num_workers} workers of {each:g} GPU are wanted, there is room for {room}"
        yield Finding("workers", Verdict.WRONG, about, why)


def _store(config: Config) -> Iterator[Finding]:
    store = config.store
    if not store.is_on:
        yield Finding("store", Verdict.UNUSED, "none", "store.memory_mib = 0: no KV is kept")
        return
    wanted = store.memory_mib * 2**20
    yield store_memory(wanted, available_bytes())
    if store.disk is not None:
        yield store_disk(Path(store.disk).expanduser(), int(store.disk_gib * GIB))
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield lockable(soft, wanted)
    if SHMEM_HUGE.exists():
        yield huge_pages(SHMEM_HUGE.read_text())


def _processor(_: Config) -> Iterator[Finding]:
    text = Path("/proc/cpuinfo").read_text()
    yield processor(text, len(os.sched_getaffinity(0)))


def _compiler(_: Config) -> Iterator[Finding]:
    folder = cache_folder()
    try:
        yield Finding("compiler", Verdict.USED, find_compiler())
        built = "built" if is_built() else "to be built at the first start"
    except BatonError as error:
        yield Finding("compiler", Verdict.WRONG, "none", f"{error}: install g++ or clang++")
        return
    top = next(path for path in (folder, *folder.parents) if path.is_dir())
    found = f"{folder}: {built}"
    why, holds = f"{top} is not writable: each process builds its own", os.access(top, os.W_OK)
    yield judged("kernel cache", found, why, holds=holds, if_not=Verdict.UNUSED)


def _packages(config: Config) -> Iterator[Finding]:
    for names, extra, is_needed in (
        (("torch",), "worker", True),
        (("transformers",), "worker", True),
        (("ray",), "ray", False),
        (("nixl-cu12", "nixl-cu13"), "nixl", config.worker.kv_transport == "nixl"),
    ):
        versions = [f"{name} {version}" for name in names if (version := _version(name))]
        if versions:
            yield Finding(names[0].partition("-")[0], Verdict.USED, ", ".join(versions))
            continue
        verdict = Verdict.WRONG if is_needed else Verdict.UNUSED
        why = f"pip install 'baton-serve[{extra}]'"
        yield Finding(names[0].partition("-")[0], verdict, "not installed", why)


def _gpus(config: Config) -> Iterator[Finding]:
    yield from gpus(config, find_gpus(os.environ))


def _rdma(_: Config) -> Iterator[Finding]:
    folder = Path("/sys/class/infiniband")
    devices = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if not devices:
        why = "KV moves by shared memory, or by TCP between machines"
        yield Finding("RDMA", Verdict.UNUSED, "no device", why)
        return
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = f"{', '.join(devices)}; lockable memory {_limit(soft)}"
    why, holds = "KV may not fit: `ulimit -l unlimited`", soft == resource.RLIM_INFINITY
    yield judged("RDMA", found, why, holds=holds, if_not=Verdict.UNUSED)


def _ports(config: Config) -> Iterator[Finding]:
    gateway, admin = config.gateway, config.admin
    for name, host, port in (
        ("gateway.port", gateway.host, gateway.port),
        ("gateway.grpc_port", gateway.host, gateway.grpc_port),
        ("admin.port", admin.host, admin.port),
    ):
        if port is None:
            continue
        if port == 0:
            yield Finding(name, Verdict.USED, "the system chooses")
            continue
        try:
            socket.create_server((host, port)).close()
        except OSError as error:
            why = f"{error.strerror}: another server, or a deployment that runs, has it"
            yield Finding(name, Verdict.WRONG, f"{host}:{port}", why)
        else:
            yield Finding(name, Verdict.USED, f"{host}:{port}")


def _memory(config: Config) -> Iterator[Finding]:
    yield memory(available_bytes(), pools_of(config.pools).total)


def _disks(_: Config) -> Iterator[Finding]:
    for name, folder in (("shared memory", "/dev/shm"), ("temporary files", "/tmp")):
        free = shutil.disk_usage(folder).free
        found = f"{folder}: {free / GIB:.1f} GiB free"
        why, holds = "at least 1 GiB is needed", free >= LEAST_DISK_BYTES
        yield judged(name, found, why, holds=holds, if_not=Verdict.WRONG)


def _limits(config: Config) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield descriptors(soft, hard, config.gateway.max_connections)
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    yield Finding("processes", Verdict.USED, f"{_limit(soft)} now, {_limit(hard)} at most")


PROBES: tuple[Callable[[Config], Iterator[Finding]], ...] = (
    _processor,
    _compiler,
    _packages,
    _gpus,
    _rdma,
    _memory,
    _disks,
    _store,
    _ports,
    _limits,
)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
