"""Hostile clients of a gateway: endless or slow request heads, and too many connections."""

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from deploy.base.defaults import BUNDLED_MODEL
from deploy.local.deployment import Deployment
from engine.clock import MonotonicClock
from engine.config import Config, GatewayConfig, PoolsConfig
from router.access.file import change_keys
from router.access.keys import KeyRecord, hash_of, new_key
from tests.kits.services.cluster import NURSERY
from tests.kits.services.null_workers import NullWorkers
from tests.kits.services.served import HTTP

HEAD_TIMEOUT_S = 0.3
MAX_PER_ADDRESS = 20
BODY = {"prompt": "a", "max_tokens": 3, "ignore_eos": True}
KEY = new_key()
AUTHORIZED = {"authorization": f"Bearer {KEY}"}


def deployment(folder: Path, **gateway: object) -> Deployment:
    keys_file = folder / "keys.json"
    record = KeyRecord("test", hash_of(KEY.encode()), datetime.now(UTC))
    change_keys(keys_file, lambda _: (record,))
    config = Config(
        gateway=GatewayConfig(port=0, keys_file=str(keys_file), **gateway),
        pools=PoolsConfig(mixed=1),
    )
    return Deployment(NullWorkers(NURSERY), model=BUNDLED_MODEL, config=config)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory) -> Iterator[Deployment]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("edge")
        patch.setenv("BATON_RUN_DIR", str(folder / "run"))
        running = deployment(folder, head_timeout_s=HEAD_TIMEOUT_S)
        running.open()
        yield running
        running.close()


def address_of(running: Deployment) -> tuple[str, int]:
    url = httpx.URL(running.gateways[0].url)
    return url.host, url.port


def connect(running: Deployment) -> socket.socket:
    return socket.create_connection(address_of(running), timeout=10)


def rss_bytes(running: Deployment) -> int:
    status = Path(f"/proc/{running.gateways[0].pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024


def answers(running: Deployment) -> float:
    """Sends a normal request and returns the seconds until its answer."""
    clock = MonotonicClock()
    begin_s = clock.now_s()
    url = running.gateways[0].url
    response = HTTP.post(f"{url}/v1/completions", json=BODY, headers=AUTHORIZED, timeout=10)
    assert response.status_code == 200
    return clock.now_s() - begin_s


def received(sock: socket.socket) -> bytes:
    """Returns all bytes until the gateway closes the connection."""
    pieces = []
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


def status_and_code(response: bytes) -> tuple[int, str]:
    head, _, body = response.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def pour(sock: socket.socket, piece: bytes, num_bytes: int) -> int:
    """Sends `num_bytes`, or less if the peer stops reading. Returns the number of bytes sent."""
    sent = 0
    with contextlib.suppress(ConnectionError, TimeoutError):
        while sent < num_bytes:
            sock.sendall(piece)
            sent += len(piece)
    return sent


@pytest.mark.parametrize(
    "piece", [b"a: b\r\n" * 10_000, b"x" * 60_000], ids=["many fields", "one long field"]
)
def test_115_mib_of_headers_cost_no_memory(gateway, piece):
    answers(gateway)
    before = rss_bytes(gateway)
    with connect(gateway) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ny: ")
        pour(sock, piece, 115 * 2**20)
        assert status_and_code(received(sock)) == (431, "head_too_large")
    assert rss_bytes(gateway) - before < 10 * 2**20
    answers(gateway)


def test_trailers_and_chunk_extensions_without_end_cost_no_memory(gateway):
    before = rss_bytes(gateway)
    for tail in (b"0\r\nx: ", b"1;"):
        with connect(gateway) as sock:
            sock.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
                b"content-type: application/json\r\n"
                b"authorization: Bearer " + KEY.encode() + b"\r\n\r\n2\r\n{}\r\n" + tail
            )
            pour(sock, b"z" * 60_000, 64 * 2**20)
            received(sock)
    assert rss_bytes(gateway) - before < 10 * 2**20
    answers(gateway)


def test_a_body_without_a_key_is_refused_unread(gateway):
    before = rss_bytes(gateway)
    with connect(gateway) as sock:
        length = 8 * 2**20
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n"
        sock.sendall(head.encode())
        pour(sock, b"[" * 65536, length)
        assert status_and_code(received(sock)) == (401, "invalid_api_key")
    assert rss_bytes(gateway) - before < 4 * 2**20


def test_thousands_of_pipelined_requests_are_cut_off(gateway):
    with connect(gateway) as sock:
        body = json.dumps({**BODY, "max_tokens": 1000, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        head += f"content-type: application/json\r\nauthorization: Bearer {KEY}\r\n\r\n"
        first = head.encode() + body
        sock.sendall(first)
        assert sock.recv(64).startswith(b"HTTP/1.1 200")
        pour(sock, b"GET /health HTTP/1.1\r\n\r\n" * 1000, 2**20)
        assert b"[DONE]" not in received(sock)
    answers(gateway)


def test_a_protocol_upgrade_is_ignored(gateway):
    with connect(gateway) as sock:
        sock.sendall(
            b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
            b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\nsec-websocket-version: 13\r\n\r\n"
        )
        assert received(sock).startswith(b"HTTP/1.1 200")


async def drip(host: str, port: int, num_connections: int) -> list[float]:
    """Sends request heads in small pieces on all connections; returns the time when each was
    closed."""
    clock = MonotonicClock()

    async def one(number: int) -> float:
        try:
            reader, writer = await asyncio.open_connection(host, port)
        except ConnectionError:
            return clock.now_s()
        ended = asyncio.create_task(reader.read())
        with contextlib.suppress(ConnectionError):
            if number % 3:  # every third connection sends nothing
                writer.write(b"GET /health HTTP/1.1\r\n")
            while not ended.done():
                if number % 3:
                    writer.write(b"a: b\r\n")
                    await writer.drain()
                await asyncio.wait([ended], timeout=0.05)
        await asyncio.gather(ended, return_exceptions=True)
        writer.close()
        return clock.now_s()

    return await asyncio.gather(*(one(number) for number in range(num_connections)))


def test_slow_heads_are_closed_in_time_and_others_are_answered(gateway):
    async def scene() -> None:
        clock = MonotonicClock()
        begin_s = clock.now_s()
        dripping = asyncio.create_task(drip(*address_of(gateway), 100))
        took_s = await asyncio.to_thread(answers, gateway)
        ends_s = await dripping
        assert took_s < 2
        assert max(ends_s) - begin_s < 5

    asyncio.run(scene())


@pytest.mark.long  # needs many file descriptors and some seconds
def test_two_thousand_slow_heads_are_closed_in_time(gateway, tmp_path, monkeypatch):
    monkeypatch.setenv("BATON_RUN_DIR", str(tmp_path / "run"))
    running = deployment(tmp_path, head_timeout_s=3.0)
    running.open()
    try:

        async def scene() -> None:
            clock = MonotonicClock()
            begin_s = clock.now_s()
            dripping = asyncio.create_task(drip(*address_of(running), 2000))
            worst_s = 0.0
            while not dripping.done():
                worst_s = max(worst_s, await asyncio.to_thread(answers, running))
                await asyncio.wait([dripping], timeout=0.2)
            assert max(await dripping) - begin_s < 15
            assert worst_s < 2

        asyncio.run(scene())
    finally:
        running.close()


def test_connections_of_one_address_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setenv("BATON_RUN_DIR", str(tmp_path / "run"))
    running = deployment(tmp_path, max_connections_per_address=MAX_PER_ADDRESS)
    running.open()
    try:
        with contextlib.ExitStack() as stack:
            socks = [stack.enter_context(connect(running)) for _ in range(MAX_PER_ADDRESS)]
            refused = stack.enter_context(connect(running))
            assert status_and_code(received(refused)) == (503, "overloaded")
            for sock in socks:
                sock.shutdown(socket.SHUT_WR)
                assert received(sock) == b""  # this client sent no request
        assert answers(running) > 0  # the closed connections are no longer counted
    finally:
        running.close()
