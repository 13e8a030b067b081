"""`baton doctor` lists what is installed, what is used, and what would fail."""

import errno
import json
import resource
from types import SimpleNamespace

import msgspec
import pytest
from typer.testing import CliRunner

from deploy.base.gpus import FoundGpus, HostGpu
from deploy.commands import doctor
from deploy.commands.doctor import (
    Finding,
    Verdict,
    descriptors,
    diagnose,
    gpus,
    huge_pages,
    lockable,
    memory,
    processor,
    store_disk,
    store_memory,
)
from deploy.commands.main import app
from engine.config import Config, DeviceKind, PoolsConfig, StoreConfig, WorkerConfig

GIB = 2**30
FREE_NOTHING = SimpleNamespace(free=0)


def invoke(*words, **environment):
    return CliRunner().invoke(app, ["doctor", *words], env={"COLUMNS": "300", **environment})


@pytest.mark.parametrize(
    ("flags", "verdict"), [("flags : avx2 fma amx_int8", Verdict.USED), ("", Verdict.UNUSED)]
)
def test_processors_need_two_features(flags, verdict):
    assert processor(f"model name: x\n{flags}\n", 4).verdict is verdict


def test_missing_memory_is_wrong():
    assert memory(8 * GIB, 2).verdict is Verdict.USED
    short = memory(1 * GIB, 2)
    assert short.verdict is Verdict.WRONG
    assert "1.5 GiB" in short.why


@pytest.mark.parametrize(
    ("hard", "verdict"),
    [(resource.RLIM_INFINITY, Verdict.USED), (9000, Verdict.USED), (4096, Verdict.UNUSED)],
)
def test_descriptors_are_compared_with_connections(hard, verdict):
    assert descriptors(1024, hard, 8192).verdict is verdict


def test_a_taken_port_is_wrong(monkeypatch):
    def refuse(address):
        raise OSError(errno.EADDRINUSE, "Address already in use")

    monkeypatch.setattr(doctor.socket, "create_server", refuse)
    done = invoke("--json", BATON_GATEWAY__PORT="8000")
    found = {each.name: each for each in msgspec.json.decode(done.output, type=list[Finding])}
    assert done.exit_code == 1
    assert found["gateway.port"].verdict is Verdict.WRONG
    assert found["admin.port"].verdict is Verdict.USED


def test_a_probe_that_fails_is_a_finding(monkeypatch):
    def probe(_):
        raise PermissionError("no")

    monkeypatch.setattr(doctor, "PROBES", (probe,))
    assert diagnose(Config()) == [Finding("probe", Verdict.UNUSED, "unknown", "cannot be read: no")]


@pytest.mark.parametrize(("verdict", "status"), [(Verdict.UNUSED, 0), (Verdict.WRONG, 1)])
def test_the_status_tells_whether_something_is_wrong(monkeypatch, verdict, status):
    monkeypatch.setattr(doctor, "PROBES", (lambda _: [Finding("thing", verdict, "x", "[why]")],))
    assert invoke().exit_code == status
    assert "[why]" in invoke().output
    assert json.loads(invoke("--json").output)[0]["verdict"] == verdict


def test_a_store_needs_a_directory_to_write_to(tmp_path):
    assert store_disk(tmp_path / "new" / "kv", 1).verdict is Verdict.USED
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    assert store_disk(tmp_path / "file", 1).verdict is Verdict.WRONG
    assert store_disk(tmp_path / "file" / "kv", 1).verdict is Verdict.WRONG
    full = store_disk(tmp_path, 2**60)
    assert full.verdict is Verdict.UNUSED
    assert "give less" in full.why


def test_blocks_that_are_there_count_as_space(tmp_path, monkeypatch):
    (tmp_path / "kv").write_bytes(b"x" * 8192)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: FREE_NOTHING)
    assert store_disk(tmp_path, 8192).verdict is Verdict.USED
    assert store_disk(tmp_path, 9000).verdict is Verdict.UNUSED


def test_memory_of_a_store_is_compared_with_what_is_available():
    assert store_memory(GIB, 2 * GIB).verdict is Verdict.USED
    assert store_memory(2 * GIB, GIB).verdict is Verdict.WRONG


@pytest.mark.parametrize(
    ("soft", "verdict"),
    [(resource.RLIM_INFINITY, Verdict.USED), (GIB, Verdict.USED), (8 * 2**20, Verdict.UNUSED)],
)
def test_lockable_memory_is_compared_with_that_of_the_store(soft, verdict):
    assert lockable(soft, GIB).verdict is verdict


@pytest.mark.parametrize(
    ("setting", "verdict"),
    [
        ("always [within_size] advise never deny force", Verdict.USED),
        ("always within_size advise [never] deny force", Verdict.UNUSED),
        ("", Verdict.UNUSED),
    ],
)
def test_huge_pages_are_a_hint(setting, verdict):
    assert huge_pages(setting).verdict is verdict


def test_without_a_store_its_needs_are_not_checked(monkeypatch):
    monkeypatch.setattr(doctor, "PROBES", (doctor._store,))
    [found] = diagnose(Config())
    assert (found.name, found.verdict) == ("store", Verdict.UNUSED)
    names = {each.name for each in diagnose(Config(store=StoreConfig(1, disk="/nowhere")))}
    assert {"store.memory_mib", "store.disk"} <= names


ON_GPUS = Config(worker=WorkerConfig(device=DeviceKind.CUDA))
ONE_GPU = FoundGpus((HostGpu("GPU-a", "H200"),))


def test_gpus_are_used_where_there_are_any():
    gpu, workers = gpus(Config(), ONE_GPU)
    assert (gpu.verdict, gpu.found) == (Verdict.USED, "GPU-a, H200")
    assert workers.found.startswith("cuda: weights bf16, KV bf16, steps of 8192 tokens, 256")


def test_a_missing_gpu_is_wrong_only_if_it_is_wanted():
    none, workers = gpus(Config(), FoundGpus((), "no nvidia-smi"))
    assert (none.verdict, none.why) == (Verdict.UNUSED, "no nvidia-smi")
    assert workers.found.startswith("cpu: weights auto, KV fp32, steps of 512 tokens, 64")
    assert next(gpus(ON_GPUS, FoundGpus((), "no nvidia-smi"))).verdict is Verdict.WRONG


def test_too_few_gpus_are_wrong():
    config = Config(pools=PoolsConfig(prefill=1, decode=1))
    *_, workers = gpus(config, ONE_GPU)
    assert workers.verdict is Verdict.WRONG
    assert workers.why == "2 workers of 1 GPU are wanted, there is room for 1"


def test_unused_gpus_are_told_apart():
    config = Config(worker=WorkerConfig(device=DeviceKind.CPU))
    assert next(gpus(config, ONE_GPU)).verdict is Verdict.UNUSED
