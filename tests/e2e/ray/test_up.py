"""`baton up`, `status` and `down` with ray up, ssh and Redis, on an isolated machine."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import deploy
from engine.clock import MonotonicClock
from tests.kits.services.island import Island, island, unavailable
from tests.kits.services.served import poll_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.torch,
    pytest.mark.ray,
    pytest.mark.timeout(400),
    pytest.mark.skipif(unavailable() is not None, reason=f"{unavailable()}"),
]

UP_TIMEOUT_S = 240.0
# seconds until the GCS counts as dead; a raylet without a GCS exits after 60 s by default
DEAD_S = 10.0
URL = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def machine(tmp_path_factory) -> Iterator[Island]:
    with island(tmp_path_factory.mktemp("island")) as running:
        yield running


@pytest.fixture(scope="module")
def config(machine) -> Path:
    """Writes a cluster file for one machine, and Baton's configuration for this machine."""
    import yaml

    source = Path(deploy.__file__).parent / "cluster" / "onprem.yaml"
    file = machine.folder / "onprem.yaml"
    file.write_text(yaml.safe_dump(on_this_machine(yaml.safe_load(source.read_text()), machine)))
    path = machine.folder / "baton.yaml"
    path.write_text(
        "cluster: onprem.yaml\n"
        "worker: {kv_mib: 64}\n"
        "pools: {prefill_resource: prefill_node, decode_resource: decode_node}\n"
        "gateway: {model_name: baton-bundled, processes: 2,"
        " keys_file: ~/.baton/keys.json}\n"
    )
    return path


def on_this_machine(cluster: dict[str, Any], machine: Island) -> dict[str, Any]:
    """Returns the shipped file with its placeholders filled in, no packages, and test sizes."""
    small = (
        "--head --node-ip-address=127.0.0.1 --num-cpus=2 --object-store-memory=83886080"
        """ --resources='{"prefill_node": 2, "decode_node": 2}'"""
    )
    return {
        **cluster,
        "cluster_name": f"baton-test-{os.getpid()}",
        "provider": {"type": "local", "head_ip": "127.0.0.1", "worker_ips": []},
        "auth": {"ssh_user": "root", "ssh_private_key": str(machine.key)},
        "min_workers": 0,
        "max_workers": 0,
        "setup_commands": [c for c in cluster["setup_commands"] if "pip install" not in c],
        "head_setup_commands": [c for c in cluster["head_setup_commands"] if "apt-get" not in c],
        "head_start_ray_commands": [
            command.replace("--head", small) for command in cluster["head_start_ray_commands"]
        ],
    }


@pytest.fixture(scope="module")
def up(machine, config) -> "subprocess.CompletedProcess[str]":
    return baton(machine, "up", config)


def baton(
    machine: Island, verb: str, config: Path, *, check: bool = True
) -> "subprocess.CompletedProcess[str]":
    command = ("-m", "deploy.commands.main", verb, "-c", str(config))
    return machine.python(*command, timeout_s=UP_TIMEOUT_S, check=check)


@pytest.fixture(scope="module")
def key(machine, up) -> str:
    """Makes an API key after the gateways started; the gateways read the new key by themselves."""
    return machine.python(
        "-m", "deploy.commands.main", "keys", "add", "tests", timeout_s=60
    ).stdout.strip()


def ask(machine: Island, key: str, max_tokens: int) -> list[str]:
    """Sends one request with curl, because only the island's processes reach its network."""
    body = {"model": "baton-bundled", "prompt": "def f(", "seed": 7, "max_tokens": max_tokens}
    done = machine.run(
        *("curl", "--silent", "--fail-with-body", "--max-time", "60", f"{URL}/v1/completions"),
        *("-H", "Content-Type: application/json", "-H", f"Authorization: Bearer {key}"),
        *("-d", json.dumps({**body, "ignore_eos": True})),
    )
    return [choice["text"] for choice in json.loads(done.stdout)["choices"]]


RUN = (
    sys.executable,
    "-c",
    "import ray; ray.init(address='auto', log_to_driver=False)\n"
    "print(ray.get(ray.remote(num_cpus=0)(lambda: 'ran').remote(), timeout=30))",
)


def environment_of_a_driver(token: str) -> tuple[str, ...]:
    return ("RAY_AUTH_MODE=token", f"RAY_AUTH_TOKEN={token}", "RAY_NUM_REDIS_GET_RETRIES=1")


def ray_token(machine: Island) -> str:
    return (machine.home / ".baton/ray_auth_token").read_text()


def send(machine: Island, number: signal.Signals, pid: int) -> None:
    machine.run("kill", f"-{number.value}", str(pid))


def of(machine: Island, program: str) -> dict[int, str]:
    return {pid: line for pid, line in machine.processes().items() if program in line}


def test_up_brings_up_cluster_and_baton_and_prints_urls(machine, up, key):
    assert f"serving at {URL}" in up.stderr
    assert "worker-0" in up.stderr
    assert "all as wanted" in up.stderr
    assert ask(machine, key, 8)


def test_keys_on_the_head_are_private(machine, key):
    for name in ("baton.yaml", "keys.json", "redis.key", "ray_auth_token"):
        assert (machine.home / ".baton" / name).stat().st_mode & 0o077 == 0
    assert (machine.home / ".baton").stat().st_mode & 0o777 == 0o700


def test_no_secret_is_on_a_command_line(machine, up):
    read = r"cat /proc/[0-9]*/cmdline | tr '\0' ' '"  # ps would truncate the command lines
    lines = machine.run("bash", "-c", read, check=False).stdout
    assert "--redis_address=127.0.0.1" in lines
    assert re.search(r"(redis.password|requirepass)[= ]\S", lines) is None
    assert ray_token(machine) not in lines


def test_redis_refuses_clients_without_the_key(machine, up):
    redis_cli = ("redis-cli", "-p", "6380", "--tls", "--insecure")
    refused = machine.run(*redis_cli, "keys", "*", check=False)
    assert refused.returncode != 0
    assert not refused.stdout
    folder = machine.home / ".baton"
    proof = ("--cert", f"{folder}/redis.crt", "--key", f"{folder}/redis.key")
    assert "baton" in machine.run(*redis_cli, *proof, "keys", "*").stdout.lower()


def test_ray_refuses_jobs_without_the_token(machine, up):
    refused = machine.run("env", *environment_of_a_driver("0" * 64), *RUN, check=False)
    assert refused.returncode != 0
    assert "InvalidAuthToken" in refused.stderr or "UNAUTHENTICATED" in refused.stderr
    token = ray_token(machine)
    assert "ran" in machine.run("env", *environment_of_a_driver(token), *RUN).stdout


def test_second_up_changes_nothing(machine, config, up):
    before = {**of(machine, "ray::_"), **of(machine, "gcs_server"), **of(machine, "raylet/raylet")}
    again = baton(machine, "up", config)
    assert f"serving at {URL}" in again.stderr
    after = {**of(machine, "ray::_"), **of(machine, "gcs_server"), **of(machine, "raylet/raylet")}
    assert before.keys() == after.keys()
    assert len(of(machine, "ray::ServiceActor")) == 4  # two workers and two gateways


def test_up_changes_what_runs_otherwise_and_names_what_needs_a_restart(machine, config, up):
    declared = config.with_name("declared.yaml")
    more = "update: {hold_s: 5}\npools: {spares: 0, price_per_hour: 2}\nrouter: {max_queue: 7}\n"
    text = "".join(line for line in config.read_text().splitlines(True) if "pools" not in line)
    declared.write_text(text + more)
    again = baton(machine, "up", declared, check=False)
    assert again.returncode == 3, again.stderr
    assert "update.hold_s" in again.stderr
    assert "needs a restart: router.max_queue" in again.stdout
    shown = machine.python(
        *("-m", "deploy.commands.main", "up", "--diff", "--json", "-c", str(declared)),
        timeout_s=UP_TIMEOUT_S,
        check=False,
    )
    assert [each["key"] for each in json.loads(shown.stdout)] == ["router.max_queue"]


def test_requests_go_on_while_the_gcs_restarts_from_redis(machine, key):
    expected = ask(machine, key, 40)
    (gcs,), (keeper,) = of(machine, "gcs/gcs_server"), of(machine, "deploy.ray.gcs_keeper")
    actors = set(of(machine, "ray::_"))
    send(machine, signal.SIGSTOP, keeper)  # so that the keeper appears dead for a while
    send(machine, signal.SIGKILL, gcs)
    clock = MonotonicClock()
    end_s = clock.now_s() + DEAD_S
    while clock.now_s() < end_s:
        assert ask(machine, key, 40) == expected
    assert not of(machine, "gcs/gcs_server")
    send(machine, signal.SIGCONT, keeper)
    poll_until(lambda: of(machine, "gcs/gcs_server"), "the keeper has started another one")
    script = (
        "import ray; ray.init(address='auto', namespace='baton', log_to_driver=False)\n"
        "print(ray.get(ray.remote(num_cpus=0)(lambda: 'ran').remote()))\n"
        "print(*(n['Alive'] for n in ray.nodes()), ray.get_actor('controller') is not None)"
    )
    driver = ("env", *environment_of_a_driver(ray_token(machine)), sys.executable, "-c", script)
    assert machine.run(*driver).stdout.split() == ["ran", "True", "True"]
    assert set(of(machine, "ray::_")) >= actors
    assert ask(machine, key, 40) == expected


def test_status_shows_nodes_and_workers(machine, config, up):
    shown = baton(machine, "status", config).stderr
    assert "127.0.0.1" in shown
    assert "worker-1" in shown
    assert f"serving at {URL}" in shown


def test_pools_change_on_the_head_while_it_serves(machine, config, key):
    expected = ask(machine, key, 8)
    command = ("-m", "deploy.commands.main", "pools", "set", "decode=2")
    assert "done" in machine.python(*command, timeout_s=UP_TIMEOUT_S).stdout
    assert "worker-2" in baton(machine, "status", config).stderr
    assert ask(machine, key, 8) == expected


def test_next_controller_takes_over_from_a_killed_one(machine, config, key):
    services = of(machine, "ray::ServiceActor")
    (controller,) = of(machine, "ray::_ControllerActor")
    send(machine, signal.SIGKILL, controller)
    poll_until(
        lambda: of(machine, "ray::_ControllerActor").keys() - {controller}, "another one runs", 60
    )
    shown = baton(machine, "status", config).stderr
    assert "worker-2" in shown
    assert "all as wanted" in shown
    assert of(machine, "ray::ServiceActor").keys() == services.keys()
    assert ask(machine, key, 8)


def test_down_leaves_nothing_even_if_ray_down_fails(machine, config, up):
    profile = machine.home / ".bashrc"
    kept = profile.read_text()
    profile.write_text("")  # simulates a PATH without Ray
    try:
        down = baton(machine, "down", config, check=False)
    finally:
        profile.write_text(kept)
    assert down.returncode == 0, down.stderr
    assert "gave no answer" in down.stderr
    assert "nothing is left" in down.stderr
    assert not machine.processes()
    assert not list((machine.home / ".baton").glob("append*"))


def test_down_lists_processes_of_unknown_sessions(machine, config):
    name = "/somewhere/ray/core/src/ray/raylet/raylet"
    other = subprocess.Popen(machine.command("bash", "-c", f"exec -a {name} sleep 300"))
    try:
        poll_until(lambda: of(machine, name), "it runs")
        down = baton(machine, "down", config, check=False)
        assert down.returncode == 1
        assert f"{name} 300" in down.stderr
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
