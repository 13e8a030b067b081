"""A gRPC listener gives nothing to a client without the secret, at no cost."""

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
from engine.net import rpc
from engine.net.challenge import CHALLENGE_BYTES, CLAIM_BYTES, Claimant
from engine.net.grpc_library import grpc
from engine.net.rpc import SessionClient, SessionServer
from engine.net.trust import Secret
from tests.kits.sessions import DEADLINE_S, SECRET, check_echo, echo, with_grpc

MIB = 2**20


@contextlib.asynccontextmanager
async def open_server() -> AsyncIterator[tuple[str, list[str]]]:
    """A server's address, and the reasons why sessions did not begin. It must serve to the end."""
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
    """A client that holds the secret is answered."""
    client = SessionClient(address, SECRET)
    await client.open()
    await check_echo(client)
    await client.close()


@contextlib.asynccontextmanager
async def call(address: str, method: str, **options: Any) -> AsyncIterator[Any]:
    """A bare call, as any gRPC client makes it."""
    async with grpc.aio.insecure_channel(address) as channel:
        yield channel.stream_stream(f"/{rpc.SERVICE}/{method}")(**options)


async def outcome(address: str, claim: bytes | None) -> tuple[grpc.StatusCode, str]:
    """How a session ends that begins with that claim; nothing is read in it."""
    metadata = () if claim is None else ((rpc._CLAIM, claim),)
    async with call(address, rpc.METHOD, metadata=metadata) as session:
        with pytest.raises(grpc.RpcError):
            await session.read()
        return await session.code(), await session.details()


async def challenge(address: str) -> bytes:
    async with call(address, rpc.CHALLENGE_METHOD) as asking:
        return dict(await asking.trailing_metadata())[rpc._CHALLENGE]


def tracebacks(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Messages that were logged with a traceback.

    asyncio's own are left out: gRPC's poller calls the event loop of an earlier test, now closed.
    """
    return [r.getMessage() for r in caplog.records if r.exc_info and r.name != "asyncio"]


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
    assert tracebacks(caplog) == []


@pytest.mark.parametrize("claim", [None, b"", b"token", bytes(CLAIM_BYTES)])
@with_grpc
async def test_a_session_without_a_claim_or_with_a_made_up_one_is_refused(claim):
    async with open_server() as (address, refused):
        code, details = await outcome(address, claim)
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert details.startswith("untrusted: ")
        assert len(refused) == 1


@with_grpc
async def test_an_overheard_claim_cannot_be_replayed():
    async with open_server() as (address, _):
        claim = Claimant(SECRET, address, noise=bytes(16)).claim(await challenge(address))
        metadata = ((rpc._CLAIM, claim),)
        async with call(address, rpc.METHOD, metadata=metadata) as session:
            assert rpc._PROOF in dict(await session.initial_metadata())
        assert await outcome(address, claim) == (
            grpc.StatusCode.UNAUTHENTICATED,
            "untrusted: repeated claim",
        )


@with_grpc
async def test_refusals_are_logged_at_a_bounded_rate(caplog):
    async with open_server() as (address, refused):
        for _ in range(50):
            await outcome(address, b"guess")
        assert refused == ["malformed claim"] * 50
    assert caplog.text.count("refused") == 1


@with_grpc
async def test_a_client_sends_nothing_to_a_server_without_the_secret():
    received: list[bytes] = []

    class Impostor:
        async def challenge(self, _: Any, context: Any) -> None:
            context.set_trailing_metadata(((rpc._CHALLENGE, bytes(CHALLENGE_BYTES)),))

        async def session(self, frames: AsyncIterator[bytes], context: Any) -> None:
            await context.send_initial_metadata(((rpc._PROOF, bytes(32)),))
            async for frame in frames:
                received.append(frame)

    impostor, server = Impostor(), grpc.aio.server()
    handlers = {
        rpc.CHALLENGE_METHOD: grpc.stream_stream_rpc_method_handler(impostor.challenge),
        rpc.METHOD: grpc.stream_stream_rpc_method_handler(impostor.session),
    }
    generic = grpc.method_handlers_generic_handler(rpc.SERVICE, handlers)
    server.add_generic_rpc_handlers((generic,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = SessionClient(f"127.0.0.1:{port}", SECRET)
    with pytest.raises(Untrusted, match="does not hold the secret"):
        await client.open()
    await client.close()
    await server.stop(grace=0)
    assert received == []


@with_grpc
async def test_a_server_that_answers_nothing_is_a_connection_error_soon(monkeypatch):
    monkeypatch.setattr(rpc, "UNTRUSTED_S", 0.2)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = SessionClient(f"127.0.0.1:{silent.getsockname()[1]}", SECRET)
        with pytest.raises(ConnectionError, match="no session began"):
            await client.open()
        await client.close()


def test_clients_that_leave_at_any_moment_leave_no_traceback(caplog):
    async def leave(address: str, method: str, number: int) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            calling = channel.stream_stream(f"/{rpc.SERVICE}/{method}")()
            await asyncio.wait([asyncio.ensure_future(calling.code())], timeout=number / 10_000)

    async def run() -> None:
        async with open_server() as (address, _):
            for number in range(40):
                await leave(address, (rpc.METHOD, rpc.CHALLENGE_METHOD)[number % 2], number)

    asyncio.run(run())
    assert tracebacks(caplog) == []


# ---------------------------------------------------------------- costs


def _serve(addresses: Any) -> None:
    async def run() -> None:
        server = SessionServer(echo, SECRET)
        addresses.put(await server.open())
        await asyncio.Event().wait()

    asyncio.run(run())


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, int]]:
    """A server in a process of its own: its address and its process id."""
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
    """Returns a process's peak memory so far, or its present one (VmRSS)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(field)]
    return int(line.split()[1]) / 1024


@with_grpc
async def test_frames_of_60_mib_before_the_secret_is_proved_cost_no_memory(server):
    """Each of eight clients sends one: 480 MiB. Without the proof it was kept: 63 to 668 MiB."""
    address, pid = server

    async def throw(claim: bytes) -> None:
        async with call(address, rpc.METHOD, metadata=((rpc._CLAIM, claim),)) as session:
            with contextlib.suppress(grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
                await session.write(bytes(60 * MIB))
            assert await session.code() is not grpc.StatusCode.OK

    async with asyncio.timeout(DEADLINE_S):
        await is_served(address)
        before_mib = memory_mib(pid)
        await asyncio.gather(*(throw(b"guess") for _ in range(8)))
        assert memory_mib(pid) - before_mib < 16
        await is_served(address)


@with_grpc
async def test_metadata_of_a_megabyte_is_refused(server):
    address, pid = server

    before_mib = memory_mib(pid)
    for _ in range(4):
        async with call(address, rpc.METHOD, metadata=(("x", "a" * MIB),)) as session:
            assert await session.code() is not grpc.StatusCode.OK
    assert memory_mib(pid) - before_mib < 16
    await is_served(address)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)


def test_connections_on_which_no_session_begins_are_closed(server):
    address, _ = server
    host, port = address.rsplit(":", 1)
    with contextlib.ExitStack() as stack:
        connections = []
        for said in (b"", PREFACE, PREFACE[:10], os.urandom(100)):
            connection = stack.enter_context(socket.create_connection((host, int(port))))
            connection.settimeout(rpc.UNTRUSTED_S + 5)
            connection.sendall(said)
            connections.append(connection)
        for connection in connections:  # they have waited beside each other
            with contextlib.suppress(ConnectionError):
                while connection.recv(4096):
                    pass
