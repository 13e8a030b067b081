"""Frames between two ends on loopback, whole, in order and only as fast as they are taken."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from engine import rpc
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


def test_a_session_that_ends_is_no_error():
    async def farewell(_: AsyncIterator[bytes], send: Send) -> None:
        await send(b"bye")

    async def test(client: SessionClient, _: str) -> None:
        assert await client.receive() == b"bye"
        assert await client.receive() is None
        assert await client.receive() is None

    with_session(farewell, test)


def test_posted_frames_are_sent_in_order_and_nobody_waits_for_them():
    async def test(client: SessionClient, _: str) -> None:
        for number in range(100):
            client.post(str(number).encode())
        for number in range(100):
            assert await client.receive() == str(number).encode()

    with_session(echo, test)


def test_what_is_posted_to_nobody_is_an_error_soon():
    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
        client = SessionClient(address)
        await client.open()
        client.post(b"is anybody there?")
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(ConnectionError):
                await client.receive()
        await client.close()

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
            with pytest.raises(ConnectionError):
                await client.receive()
        await client.close()

    asyncio.run(run())
