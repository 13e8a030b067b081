"""A session listener gives nothing to clients without the secret; such clients cost no memory."""

import asyncio
import contextlib
import multiprocessing
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import Untrusted
from engine.net import sessions
from engine.net.challenge import CHALLENGE_BYTES, CLAIM_BYTES, Claimant
from engine.net.sessions import ACCEPTED, GREETING, SessionClient, SessionServer
from engine.net.trust import KEY_BYTES, Secret
from tests.kits.sessions import DEADLINE_S, SECRET, check_echo, echo

MIB = 2**20


@contextlib.asynccontextmanager
async def open_server() -> AsyncIterator[tuple[str, list[str]]]:
    """Opens a server.

    Yields the address and the reasons of refused sessions. The server must serve to the end.
    """
    refused: list[str] = []
    server = SessionServer(echo, SECRET, on_refused=refused.append)
    address = await server.open()
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield address, refused
            await is_served(address)
    finally:
        await server.close()


async def is_served(address: str) -> None:
    """Asserts that a client with the secret gets an answer."""
    client = SessionClient(address, SECRET)
    await client.open()
    await check_echo(client)
    await client.close()


async def is_let_in(address: str) -> bool:
    """Returns True if the server has a free place: it sends the first bytes and does not
    disconnect."""
    reader, writer = await asyncio.open_connection(*sessions.place_of(address))
    try:
        return await reader.read(1) != b""
    except ConnectionError:
        return False
    finally:
        writer.close()


@contextlib.asynccontextmanager
async def dialled(
    address: str,
) -> AsyncIterator[tuple[bytes, asyncio.StreamReader, asyncio.StreamWriter]]:
    """Opens a bare connection, and yields it with the server's challenge."""
    reader, writer = await asyncio.open_connection(*sessions.place_of(address))
    try:
        greeting = await reader.readexactly(len(GREETING) + CHALLENGE_BYTES)
        assert greeting.startswith(GREETING)
        yield greeting[len(GREETING) :], reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def outcome(address: str, claim: bytes) -> bytes:
    """Returns all bytes that a server answers to a claim until it closes the connection."""
    async with dialled(address) as (_, reader, writer):
        writer.write(claim)
        said = await reader.read()
        assert said[0] == len(said) - 1
        return said[1:]


@pytest.mark.parametrize("token", ["guess", "sécret", "密"])
def test_a_client_with_another_secret_is_refused(token, caplog):
    async def run() -> None:
        async with open_server() as (address, refused):
            client = SessionClient(address, Secret(token))
            with pytest.raises(Untrusted, match="wrong secret"):
                await client.open()
            await client.close()
            assert refused == ["wrong secret or address"]

    asyncio.run(run())
    assert [r.getMessage() for r in caplog.records if r.exc_info] == []


@pytest.mark.parametrize("claim", [bytes(CLAIM_BYTES), b"token" * CLAIM_BYTES])
async def test_a_session_with_a_made_up_claim_is_refused(claim):
    async with open_server() as (address, refused):
        assert (await outcome(address, claim)).decode() == refused[0]
        assert refused == ["malformed claim" if len(claim) > CLAIM_BYTES else refused[0]]


async def test_an_overheard_claim_cannot_be_replayed():
    async with open_server() as (address, _):
        async with dialled(address) as (challenge, reader, writer):
            claim = Claimant(SECRET, address, noise=bytes(16)).claim(challenge)
            writer.write(claim)
            assert (await reader.readexactly(1 + KEY_BYTES)).startswith(ACCEPTED)
        assert await outcome(address, claim) == b"repeated claim"


async def test_bytes_behind_a_claim_are_not_taken_before_the_proof():
    async with open_server() as (address, refused), dialled(address) as (challenge, reader, writer):
        writer.write(Claimant(SECRET, address, noise=bytes(16)).claim(challenge) + b"frame")
        await reader.read()
        assert refused == ["malformed claim"]


async def test_refusals_are_logged_at_a_bounded_rate(caplog):
    async with open_server() as (address, refused):
        for _ in range(50):
            await outcome(address, bytes(CLAIM_BYTES))
        assert len(refused) == 50
    assert caplog.text.count("refused") == 1


async def test_connections_beyond_the_limit_are_ended_at_once(monkeypatch):
    monkeypatch.setattr(sessions, "MAX_CONNECTIONS", 2)
    async with open_server() as (address, refused):
        async with dialled(address), dialled(address):
            reader, writer = await asyncio.open_connection(*sessions.place_of(address))
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
        assert refused == ["too many connections"]
        # until the server has noticed that both clients disconnected
        async with asyncio.timeout(DEADLINE_S):
            while not await is_let_in(address):
                pass


async def test_a_client_sends_nothing_to_a_server_without_the_secret():
    received: list[bytes] = []
    ended = asyncio.Event()

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING + bytes(CHALLENGE_BYTES))
        await reader.readexactly(CLAIM_BYTES)
        writer.write(ACCEPTED + bytes(KEY_BYTES))
        with contextlib.suppress(ConnectionError):
            received.append(await reader.read())
        writer.close()
        ended.set()

    server = await asyncio.start_server(impostor, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = SessionClient(f"127.0.0.1:{port}", SECRET)
    with pytest.raises(Untrusted, match="does not hold the secret"):
        await client.open()
    await client.close()
    await ended.wait()
    server.close()
    assert b"".join(received) == b""


@pytest.mark.parametrize("said", [b"HTTP/1.1 200 OK\r\n\r\n", b"\0" * 100, b"b"])
async def test_a_client_tells_nothing_to_another_kind_of_server(said, monkeypatch):
    monkeypatch.setattr(sessions, "UNTRUSTED_S", 0.2)
    heard: list[bytes] = []
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        with contextlib.suppress(ConnectionError):
            heard.append(await reader.read())
        writer.close()
        ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = SessionClient(f"127.0.0.1:{port}", SECRET)
    with pytest.raises((Untrusted, ConnectionError)):
        await client.open()
    await client.close()
    await ended.wait()
    server.close()
    assert b"".join(heard) == b""


async def test_a_server_that_answers_nothing_is_a_connection_error_soon(monkeypatch):
    monkeypatch.setattr(sessions, "UNTRUSTED_S", 0.2)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = SessionClient(f"127.0.0.1:{silent.getsockname()[1]}", SECRET)
        with pytest.raises(ConnectionError, match="no session began"):
            await client.open()
        await client.close()


async def test_the_secret_and_keys_never_cross_a_connection():
    async with open_server() as (address, _), dialled(address) as (challenge, reader, writer):
        claim = Claimant(SECRET, address, noise=bytes(16)).claim(challenge)
        writer.write(claim)
        said = challenge + claim + await reader.readexactly(1 + KEY_BYTES)
        assert SECRET._root not in said
        for purpose in ("proof of a session's client", "proof of a session's server"):
            assert SECRET.key(purpose) not in said


def test_clients_that_leave_at_any_moment_leave_no_traceback(caplog):
    async def leave(address: str, num_bytes: int) -> None:
        async with dialled(address) as (challenge, _, writer):
            claim = Claimant(SECRET, address, noise=bytes(16)).claim(challenge)
            writer.write((claim + b"\x05\x00\x00\x00hello")[:num_bytes])
            if num_bytes % 2:
                writer.transport.abort()

    async def run() -> None:
        async with open_server() as (address, _):
            for num_bytes in range(0, CLAIM_BYTES + 10, 3):
                await leave(address, num_bytes)

    asyncio.run(run())
    assert [r.getMessage() for r in caplog.records if r.exc_info] == []


# ---------------------------------------------------------------- memory costs


def _serve(addresses: Any) -> None:
    async def run() -> None:
        server = SessionServer(echo, SECRET)
        addresses.put(await server.open())
        await asyncio.Event().wait()

    asyncio.run(run())


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, int]]:
    """Starts a server in a new process. Yields its address and its process id."""
    context = multiprocessing.get_context("spawn")
    addresses = context.Queue()
    process = context.Process(target=_serve, args=(addresses,), daemon=True)
    process.start()
    try:
        assert process.pid is not None
        yield addresses.get(timeout=DEADLINE_S), process.pid
    finally:
        process.kill()
        process.join()


def memory_mib(pid: int, field: str = "VmHWM") -> float:
    """Returns a process's peak memory in MiB, or its present memory (VmRSS)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(field)]
    return int(line.split()[1]) / 1024


async def test_bytes_before_the_secret_is_proved_cost_no_memory(server):
    """Each of eight clients sends 60 MiB."""
    address, pid = server

    async def throw() -> None:
        async with dialled(address) as (_, _, writer):
            with contextlib.suppress(ConnectionError):
                writer.write(bytes(60 * MIB))
                await writer.drain()

    async with asyncio.timeout(DEADLINE_S):
        await is_served(address)
        before_mib = memory_mib(pid)
        await asyncio.gather(*(throw() for _ in range(8)))
        assert memory_mib(pid) - before_mib < 16
        await is_served(address)


def test_connections_on_which_no_session_begins_are_closed(server):
    address, _ = server
    host, port = address.rsplit(":", 1)
    with contextlib.ExitStack() as stack:
        connections = []
        for said in (b"", bytes(CLAIM_BYTES - 1), os.urandom(100)):
            connection = stack.enter_context(socket.create_connection((host, int(port))))
            connection.settimeout(sessions.UNTRUSTED_S + 5)
            connection.sendall(said)
            connections.append(connection)
        for connection in connections:  # all connections have waited in parallel
            with contextlib.suppress(ConnectionError):
                while connection.recv(4096):
                    pass
