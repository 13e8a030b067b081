"""Frames between two ends on loopback, whole, in order and only as fast as they are taken."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import pytest

from engine import rpc
from engine.messages import MAX_FRAME_BYTES
from engine.rpc import Send, SessionClient, SessionServer

DEADLINE_S = 20.0


async def echo(frames: AsyncIterator[bytes], send: Send) -> None:
    async for frame in frames:
        await send(frame)


def with_session(
    session: rpc.Session, test: Callable[[SessionClient, str], Awaitable[None]]
) -> None:
    async def run() -> None:
        server = SessionServer(session)
        address = await server.open()
        client = SessionClient(address)
        await client.open()
        async with asyncio.timeout(DEADLINE_S):
            await test(client, address)
        await client.close()
        await server.close()

    asyncio.run(run())


def test_frames_of_all_sizes_come_back_whole_and_in_order():
    sizes = [1, 3, 4, 5, 70_000, 2, 3_000_000, 1]
    frames = [bytes([i]) * size for i, size in enumerate(sizes)]

    async def test(client: SessionClient, _: str) -> None:
        async def send_all() -> None:
            for frame in frames:
                await client.send(frame)

        sending = asyncio.create_task(send_all())
        for frame in frames:
            assert await client.receive() == frame
        await sending

    with_session(echo, test)


def test_frames_may_come_byte_by_byte():
    async def test(_: SessionClient, address: str) -> None:
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        sent = b"\0\0\0\2ab" + b"\0\0\0\0" + b"\0\0\0\1c"
        for i in range(len(sent)):
            writer.write(sent[i : i + 1])
            await writer.drain()
        assert await reader.readexactly(11) == b"\0\0\0\2ab\0\0\0\1c"
        writer.close()
        await writer.wait_closed()

    with_session(echo, test)


def test_a_side_that_takes_no_frames_makes_the_other_wait():
    taking = asyncio.Event()
    num_taken = 0

    async def session(frames: AsyncIterator[bytes], _: Send) -> None:
        nonlocal num_taken
        await taking.wait()
        async for _frame in frames:
            num_taken += 1

    async def test(client: SessionClient, _: str) -> None:
        num_sent = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                while num_sent < 64:
                    await client.send(bytes(2**20))
                    num_sent += 1
        assert num_sent < 64
        taking.set()
        while num_taken < num_sent:
            await client.send(b"x")

    with_session(session, test)


def test_a_frame_longer_than_allowed_ends_the_session_before_it_is_held():
    async def test(_: SessionClient, address: str) -> None:
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()

    with_session(echo, test)


def test_a_silent_side_is_taken_for_gone_and_a_quiet_one_is_not(monkeypatch):
    monkeypatch.setattr(rpc, "KEEPALIVE_S", 0.1)
    monkeypatch.setattr(rpc, "KEEPALIVE_TIMEOUT_S", 0.2)

    async def test(client: SessionClient, _: str) -> None:
        loop = asyncio.get_running_loop()
        # It listens, and never says a word.
        listener = socket.create_server(("127.0.0.1", 0))
        silent = SessionClient(f"127.0.0.1:{listener.getsockname()[1]}")
        await silent.open()
        begin_s = loop.time()
        with pytest.raises(ConnectionError, match="silent for"):
            await silent.receive()
        assert loop.time() - begin_s >= 0.2
        listener.close()
        await client.send(b"still there")  # after more than the time that silence may take
        assert await client.receive() == b"still there"

    with_session(echo, test)


def test_a_session_that_ends_is_no_error_and_one_that_breaks_within_a_frame_is():
    async def farewell(_: AsyncIterator[bytes], send: Send) -> None:
        await send(b"bye")

    async def test(client: SessionClient, _: str) -> None:
        assert await client.receive() == b"bye"
        assert await client.receive() is None
        assert await client.receive() is None

    with_session(farewell, test)

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\0\0\0\5abc")
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(cut, "127.0.0.1", 0)
        client = SessionClient(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await client.open()
        with pytest.raises(ConnectionError, match="within a frame"):
            await client.receive()
        await client.close()
        server.close()

    asyncio.run(run())


def test_closing_a_server_ends_its_sessions():
    async def run() -> None:
        server = SessionServer(echo)
        client = SessionClient(await server.open())
        await client.open()
        await client.send(b"a")
        assert await client.receive() == b"a"
        await server.close()
        async with asyncio.timeout(DEADLINE_S):
            assert await client.receive() is None
        await client.close()

    asyncio.run(run())
