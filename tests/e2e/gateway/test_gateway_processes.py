"""Several gateway processes on one port, with a worker that computes nothing."""

import asyncio
import http.client
import json
import os
import select
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.base.defaults import BUNDLED_MODEL
from deploy.base.spec import GatewayReady, GatewaySpec
from deploy.local.deployment import Deployment
from deploy.services import gateway as gateway_service
from deploy.services.gateway import GatewayService
from engine.clock import MonotonicClock
from engine.config import Config, GatewayConfig, PoolsConfig, RouterConfig
from engine.control import Intent, Members, Version
from engine.errors import ConfigError
from engine.net.grpc_library import grpc
from router.access.file import change_keys
from router.access.keys import with_key, without_key
from tests.kits.router.access import record
from tests.kits.services.cluster import NURSERY
from tests.kits.services.null_workers import NullWorkers
from tests.kits.services.served import HTTP, matching, metrics, poll_until

NUM_REQUESTS = 18
MAX_STREAMS = 2  # limit for each API key, in tests with keys
PACE_S = 0.02  # seconds between two tokens, where streams must outlast other requests


def deployment(port: int = 0, keys_file: Path | None = None) -> Deployment:
    keys = None if keys_file is None else str(keys_file)
    most = None if keys is None else MAX_STREAMS
    gateway = GatewayConfig(port=port, grpc_port=0, processes=2, keys_file=keys, max_streams=most)
    config = Config(gateway=gateway, pools=PoolsConfig(mixed=1))
    launcher = NullWorkers(NURSERY) if keys is None else NullWorkers(NURSERY, PACE_S)
    return Deployment(launcher, model=BUNDLED_MODEL, config=config)


@pytest.fixture
def serving(tmp_path, monkeypatch) -> Iterator[Deployment]:
    monkeypatch.setenv("BATON_RUN_DIR", str(tmp_path / "run"))
    running = deployment()
    running.open()
    yield running
    directory = running._shared.path
    assert directory.is_dir()
    running.close()
    assert not directory.exists()
    for gateway in running.gateways:
        assert not Path(f"/proc/{gateway.pid}").exists()


def ask(url: str, num_requests: int = NUM_REQUESTS) -> None:
    """Sends requests on separate connections, so that the kernel spreads them over the
    processes."""
    for _ in range(num_requests):
        body = {"prompt": "a", "max_tokens": 3, "ignore_eos": True}
        answer = HTTP.post(f"{url}/v1/completions", json=body, timeout=30)
        assert answer.json()["usage"]["completion_tokens"] == 3


def ask_by_grpc(gateway: GatewayReady, num_requests: int = NUM_REQUESTS) -> None:
    """Requests the health over gRPC, each time on a new connection."""
    own = [("grpc.use_local_subchannel_pool", 1)]
    for _ in range(num_requests):
        with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}", own) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=10
            )
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def finished(url: str) -> dict[str, float]:
    """Returns the number of finished requests of each gateway process."""
    found = matching(r'baton_requests_total\{.*"finished"', metrics(url))
    return {name.split('process="')[1][0]: count for name, count in found.items()}


def kill(gateway: GatewayReady) -> None:
    """Kills a gateway, and returns when its sockets are closed.

    The process descriptor becomes readable when the last thread has exited. /proc shows only the
    first thread, which may exit earlier.
    """
    pidfd = os.pidfd_open(gateway.pid)
    try:
        os.kill(gateway.pid, signal.SIGKILL)
        assert select.select([pidfd], [], [], 30)[0], "it is dead"
    finally:
        os.close(pidfd)


def restarted(running: Deployment, name: str, deadline_s: float = 60) -> list[str]:
    """Waits until a process has restarted. Returns its history since its first start.

    The entry about the lost session is left out: it may precede or follow the process's exit.
    """
    machine = running.controller.machine

    def history() -> list[str]:
        lines = [str(step) for step in list(machine.history) if step.subject == name][1:]
        return [line for line in lines if "cannot be reached" not in line]

    poll_until(lambda: f"{name} was started again" in history(), "it is back", deadline_s)
    return history()


def test_two_processes_share_the_port_and_a_dead_one_is_restarted(serving):
    first, second = serving.gateways
    assert (first.url, first.grpc_port) == (second.url, second.grpc_port)
    assert first.pid != second.pid
    url = first.url
    assert HTTP.get(f"{url}/ready").status_code == 200
    ask(url)
    counts = finished(url)
    assert sum(counts.values()) == NUM_REQUESTS
    assert set(counts) == {"0", "1"}
    assert all(counts.values())
    page = metrics(url)
    assert page["baton_gateway_processes"] == 2
    assert page['vllm:num_requests_waiting{model_name="target"}'] == 0
    assert sum(matching(r"vllm:prompt_tokens_total\{", page).values()) >= NUM_REQUESTS

    with pytest.raises(ConfigError, match=r"cannot listen on .*: Address already in use"):
        deployment(port=int(url.rsplit(":", 1)[1])).open()

    kill(second)
    assert metrics(url)["baton_gateway_processes"] == 1
    ask(url)
    assert sum(finished(url).values()) == counts["0"] + NUM_REQUESTS

    # At the first start the port was free. At the restart, the second process still holds the port.
    ended = "ended with status -9: it is started again in 1 s"
    assert restarted(serving, "gateway-1") == [f"gateway-1 {ended}", "gateway-1 was started again"]
    kill(first)
    assert restarted(serving, "gateway-0") == [f"gateway-0 {ended}", "gateway-0 was started again"]
    assert {gateway.url for gateway in serving.gateways} == {url}
    before = finished(url)  # a process that restarted early has answered some of these requests
    ask(url)
    counts = finished(url)
    assert set(counts) == {"0", "1"}
    assert sum(counts.values()) == sum(before.values()) + NUM_REQUESTS

    def both_answer() -> bool:
        """Returns True if both processes have answered since both have restarted."""
        found = finished(url)
        if all(found[process] > before.get(process, 0) for process in "01"):
            return True
        ask(url)
        return False

    poll_until(both_answer, lambda: f"{before}, then {finished(url)}")


@contextmanager
def streams(url: str, number: int) -> Iterator[list[http.client.HTTPResponse]]:
    """Starts streams of about one second, each on a new connection."""
    host, port = url.removeprefix("http://").split(":")
    body = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "stream": True}
    with ExitStack() as stack:
        begun = []
        for _ in range(number):
            connection = http.client.HTTPConnection(host, int(port), timeout=30)
            stack.callback(connection.close)
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
            )
            begun.append(stack.enter_context(connection.getresponse()))
        yield begun


def test_a_stopped_process_delays_no_new_client_and_its_streams_go_on(serving):
    stopped = serving.gateways[1]
    with streams(stopped.url, 8) as begun:
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            ask(stopped.url)
            ask_by_grpc(stopped)
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
        for stream in begun:
            assert stream.read().splitlines()[-2:] == [b"data: [DONE]", b""]
    assert [gateway.pid for gateway in serving.gateways][1] == stopped.pid


@pytest.mark.long  # takes fifteen seconds
def test_no_stream_is_lost_with_a_process_that_is_stopped_for_fourteen_seconds(serving):
    stopped, clock = serving.gateways[1], MonotonicClock()
    with streams(stopped.url, 40) as begun:
        end_s = clock.now_s() + 14
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            while clock.now_s() < end_s:
                ask(stopped.url)
                ask_by_grpc(stopped)
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
        assert [stream.read()[-8:] for stream in begun] == [b"[DONE]\n\n"] * 40
    assert [gateway.pid for gateway in serving.gateways][1] == stopped.pid
    assert "requests lost with gateways" not in serving.controller.counters


@pytest.mark.long  # takes forty seconds
def test_a_process_that_hangs_is_ended_and_started_again(serving):
    hung = serving.gateways[1]
    os.kill(hung.pid, signal.SIGSTOP)
    trouble = "gateway-1 does not answer. New requests go to the others."
    machine = serving.controller.machine
    poll_until(lambda: trouble in machine.troubles(), "the controller tells it")
    ask(hung.url)
    assert restarted(serving, "gateway-1")[-3:] == [
        "gateway-1 is stopped: no session for 30 s",
        "gateway-1 was stopped: it is started again in 1 s",
        "gateway-1 was started again",
    ]
    ask(hung.url)


def statuses(url: str, *headers: bytes) -> set[int]:
    """Returns the statuses of requests with these headers, on connections to both processes."""
    head = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n" + b"".join(
        headers
    )
    host, port = url.removeprefix("http://").split(":")
    found = set()
    for _ in range(NUM_REQUESTS):
        with socket.create_connection((host, int(port)), timeout=10) as sock:
            sock.sendall(head + b"\r\n")
            with sock.makefile("rb") as answer:
                found.add(int(answer.read().split()[1]))
    return found


def bearer(key: bytes) -> bytes:
    return b"authorization: Bearer " + key + b"\r\n"


def finished_streams(url: str, key: str, num_running: int = MAX_STREAMS) -> list[bool]:
    """Returns which short requests finish while long streams run; each has a new connection."""
    headers = {"authorization": f"Bearer {key}"}
    long = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    short = {"prompt": "a", "max_tokens": 1}
    with ExitStack() as streams:
        for _ in range(num_running):
            client = streams.enter_context(httpx.Client(timeout=30))
            asked = client.stream("POST", f"{url}/v1/completions", json=long, headers=headers)
            assert streams.enter_context(asked).status_code == 200
        answers = [
            HTTP.post(f"{url}/v1/completions", json=short, headers=headers, timeout=30)
            for _ in range(NUM_REQUESTS // 2)
        ]
    assert {answer.status_code for answer in answers} <= {200, 429}
    return [answer.status_code == 200 for answer in answers]


def test_all_processes_follow_the_keys_file_without_a_restart(tmp_path, monkeypatch):
    monkeypatch.setenv("BATON_RUN_DIR", str(tmp_path / "run"))
    path = tmp_path / "keys.json"
    change_keys(path, lambda records: with_key(records, record("first", "ann")))
    running = deployment(keys_file=path)
    running.open()
    try:
        url = running.gateways[0].url
        pids = [gateway.pid for gateway in running.gateways]
        assert statuses(url, bearer(b"first")) == {200}
        assert not any(finished_streams(url, "first")), "two streams use up the limit everywhere"
        poll_until(lambda: all(finished_streams(url, "first", 0)), "the streams ended")
        assert statuses(url) == statuses(url, bearer("clé-🔑".encode())) == {401}
        assert statuses(url, bearer(b"\xff\xfe")) == {401}
        change_keys(path, lambda records: with_key(records, record("second", "bob")))
        change_keys(path, lambda records: without_key(records, "ann"))
        poll_until(lambda: statuses(url, bearer(b"first")) == {401}, "the key is refused")
        # All earlier connections may have reached the same process.
        poll_until(lambda: statuses(url, bearer(b"second")) == {200}, "the key is known")
        path.unlink()
        poll_until(lambda: statuses(url, bearer(b"second")) == {401}, "no key is valid")
        assert [gateway.pid for gateway in running.gateways] == pids
    finally:
        running.close()


def test_a_gateway_that_does_not_open_gives_its_port_back(tmp_path, monkeypatch):
    bound = []

    def listen(*address: object) -> socket.socket:
        bound.append(real_listen(*address))
        return bound[0]

    real_listen = gateway_service.listen_on
    monkeypatch.setattr(gateway_service, "listen_on", listen)
    members = Members(1, (), Intent((Version(model=str(tmp_path)),)))
    spec = GatewaySpec(members, GatewayConfig(port=0), RouterConfig(), "token")
    with pytest.raises(ConfigError):
        asyncio.run(GatewayService(spec).open())
    assert bound[0].fileno() == -1
