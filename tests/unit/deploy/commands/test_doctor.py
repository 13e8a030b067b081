"""`baton doctor` tells what is there, what is used, and what would fail."""

import errno
import json
import resource

import msgspec
import pytest
from typer.testing import CliRunner

from deploy.commands import doctor
from deploy.commands.doctor import Finding, Verdict, descriptors, diagnose, memory, processor
from deploy.commands.main import app
from engine.config import Config

GIB = 2**30


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
