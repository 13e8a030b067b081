"""On one machine everything listens on loopback only, and Ray rejects calls without its token.

The test reads the sockets from the kernel, because the settings of a process prove nothing.
"""

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.admin.client import AdminClient, find_deployment
from engine.net.grpc_library import grpc
from tests.kits.services.served import HTTP, Served, command_line, marked_pids, serve
from tests.kits.services.sockets import Listener, beyond_loopback, listeners, tree

pytestmark = pytest.mark.ray

KEY = "admin-key-that-no-child-needs"
RAY_PARTS = (
    "gcs_server",
    "raylet/raylet",
    "DashboardAgent",
    "RuntimeEnvAgent",
    "ray::ServiceActor",
)
CALLS = {  # one method of each Ray service, by the program that serves it
    "/ray.rpc.JobInfoGcsService/GetAllJobInfo": "gcs_server",
    "/ray.rpc.NodeManagerService/RequestWorkerLease": "raylet/raylet",
    "/ray.rpc.ObjectManagerService/Pull": "raylet/raylet",
    "/ray.rpc.CoreWorkerService/PushTask": "ray::ServiceActor",
}
FIELDS = {"time", "level", "process", "pid", "logger", "message"}
LOGGED_WITHIN_S = 30.0  # maximum seconds until Ray forwards a log line
RUN_SOMETHING = """
import ray
ray.init(address={address!r}, logging_level="ERROR", log_to_driver=False)
print(ray.get(ray.remote(num_cpus=0)(lambda: "ran").remote(), timeout=20))
"""


@pytest.fixture(scope="module")
def on_ray() -> Iterator[Served]:
    logs = ("--log-format", "json", "--log-level", "info")
    with serve("--launcher", "ray", *logs, BATON_ADMIN__KEY=KEY) as running:
        yield running


def pids(served: Served) -> set[int]:
    """Returns a deployment's pids. Ray's agents drop the mark, so they are found as children."""
    return tree(served.process.pid) | set(marked_pids(served.mark))


def refusals(served: Served, method: str) -> list[grpc.StatusCode]:
    """Calls a method without a token on each gRPC server that has the method; returns the
    answers."""
    answers = (_answer(each, method) for each in listeners(pids(served)))
    return [code for code in answers if code not in _HAS_NO_SUCH]


_HAS_NO_SUCH = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAVAILABLE)


def _answer(listener: Listener, method: str) -> grpc.StatusCode:
    with grpc.insecure_channel(f"127.0.0.1:{listener.port}") as channel:
        try:
            channel.unary_unary(method)(b"", timeout=10)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def test_all_lines_on_ray_are_json_and_name_their_process(on_ray):
    expected, printed = {"controller", "gateway", "worker-0", "worker-1"}, on_ray.printed
    while not expected <= (found := processes(printed)).keys():
        ready, _, _ = select.select([on_ray.process.stderr], [], [], LOGGED_WITHIN_S)
        assert ready, f"Ray did not pass on a line of each: {found}"
        printed += os.read(on_ray.process.stderr.fileno(), 4096).decode()
    assert len(set(found.values())) == len(found)
    assert all(line.keys() >= FIELDS for line in json_lines(printed))
    port = on_ray.url.rpartition(":")[2]
    with AdminClient(*find_deployment(None, KEY, os.environ, port)) as admin:
        kept = admin.logs(None)
    assert expected <= {line["process"] for line in kept.lines}


def processes(printed: str) -> dict[str, int]:
    return {line["process"]: line["pid"] for line in json_lines(printed)}


def json_lines(printed: str) -> list[dict[str, Any]]:
    """Returns the complete JSON lines."""
    return [json.loads(line) for line in printed.splitlines(keepends=True) if line[-1] == "\n"]


def test_everything_on_ray_listens_on_loopback_only(on_ray):
    lines = " ".join(map(command_line, pids(on_ray)))
    assert all(part in lines for part in RAY_PARTS), lines
    assert beyond_loopback(on_ray, pids(on_ray)) == []


@pytest.mark.parametrize("method", CALLS)
def test_ray_refuses_a_call_without_its_token(on_ray, method):
    refused = refusals(on_ray, method)
    programs = [command_line(pid) for pid in pids(on_ray)]
    assert len(refused) >= sum(CALLS[method] in line for line in programs) > 0
    assert set(refused) == {grpc.StatusCode.UNAUTHENTICATED}


@pytest.mark.parametrize("path", ["get_or_create_runtime_env", "delete_runtime_env_if_possible"])
def test_the_agent_that_makes_environments_refuses_a_request_without_the_token(on_ray, path):
    (agent,) = (pid for pid in pids(on_ray) if "RuntimeEnvAgent" in command_line(pid))
    (listener,) = listeners([agent])
    assert HTTP.post(f"http://127.0.0.1:{listener.port}/{path}", timeout=10).status_code == 401


def test_ray_runs_tasks_only_with_its_token(on_ray):
    gcs = gcs_of(on_ray)
    token = environment_of(gcs)["RAY_AUTH_TOKEN"]
    (listener,) = listeners([gcs])
    assert run_something(listener.port, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token) == "ran"
    for mode, wrong in (("disabled", ""), ("token", "0" * 64)):
        said = run_something(listener.port, RAY_AUTH_MODE=mode, RAY_AUTH_TOKEN=wrong)
        assert "InvalidAuthToken" in said or "UNAUTHENTICATED" in said, said


def run_something(port: int, **environment: str) -> str:
    """Runs a task on the Ray whose GCS listens at this address. Returns the result or the error."""
    # Without loopback mode, Ray would not search for the GCS at 127.0.0.1.
    mode = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_NUM_REDIS_GET_RETRIES": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RUN_SOMETHING.format(address=f"127.0.0.1:{port}")],
        env={**os.environ, **mode, **environment},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    return done.stdout.strip() if done.returncode == 0 else done.stderr


def test_ray_serves_and_its_folder_is_private(on_ray):
    response = HTTP.post(
        f"{on_ray.url}/v1/completions",
        json={"prompt": "def f(", "max_tokens": 8},
        headers={"X-Baton-Timeline": "1"},
        timeout=60,
    )
    assert response.status_code == 200
    assert response.json()["baton_timeline"]["decode_worker"] == "worker-1"
    folder = session_folder(on_ray).parent.parent
    assert (folder.stat().st_mode & 0o777, folder.stat().st_uid) == (0o700, os.getuid())


def test_the_token_is_in_no_log_and_on_no_command_line(on_ray):
    token = environment_of(gcs_of(on_ray))["RAY_AUTH_TOKEN"]
    assert len(token) == 64
    assert not [pid for pid in pids(on_ray) if token in command_line(pid)]
    logs = [path for path in session_folder(on_ray).rglob("*") if path.is_file()]
    assert any(path.name == "raylet.out" for path in logs)
    assert not [path for path in logs if token.encode() in path.read_bytes()]


def test_workers_on_ray_do_not_inherit_the_admin_key(on_ray):
    assert KEY in environment_of(on_ray.process.pid).values()
    inherited = [
        command_line(pid)
        for pid in pids(on_ray) - {on_ray.process.pid}
        if KEY in environment_of(pid).values()
    ]
    assert inherited == []


def gcs_of(served: Served) -> int:
    (gcs,) = (pid for pid in pids(served) if "gcs_server" in command_line(pid))
    return gcs


def session_folder(served: Served) -> Path:
    arguments = command_line(gcs_of(served)).split("\0")
    return Path(next(a.split("=", 1)[1] for a in arguments if a.startswith("--session-dir=")))


def environment_of(pid: int) -> dict[str, str]:
    """Returns the environment that a process had at its start."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)
