"""A relay forwards bytes in both directions, complete and in order, and also the ends of
streams."""

import asyncio
from pathlib import Path

import pytest
import uvloop

from deploy.services.shared_port import listen_on
from router.edge.relay import Relay

MUCH = bytes(range(256)) * 40_000  # more than all buffers of the connection


async def _shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends first, then returns all bytes that it reads, and closes."""
    writer.write(b"hello")
    while piece := await reader.read(2**16):
        writer.write(piece)
        await writer.drain()
    writer.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_bytes_and_ends_pass(tmp_path: Path, run):
    async def passes() -> None:
        path = str(tmp_path / "inner")
        inner = await asyncio.start_unix_server(_shout, path)
        relay, sock = Relay(path, 8), listen_on("127.0.0.1", 0)
        await relay.open(sock.dup())
        for said in (b"", b"a", MUCH):
            reader, writer = await asyncio.open_connection(*sock.getsockname())
            writer.write(said)
            writer.write_eof()  # the end may arrive before the other side is connected
            assert await reader.read() == b"hello" + said
            writer.close()
        reader, writer = await asyncio.open_connection(*sock.getsockname())
        assert await reader.readexactly(5) == b"hello"
        relay.close()
        relay.cut()
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()
        inner.close()
        sock.close()

    run(asyncio.wait_for(passes(), 20))


def test_more_connections_than_allowed_are_closed_at_once(tmp_path: Path):
    async def closes() -> None:
        path = str(tmp_path / "inner")
        inner = await asyncio.start_unix_server(_shout, path)
        relay, sock = Relay(path, 1), listen_on("127.0.0.1", 0)
        await relay.open(sock.dup())
        first, kept = await asyncio.open_connection(*sock.getsockname())
        assert await first.readexactly(5) == b"hello"
        second, refused = await asyncio.open_connection(*sock.getsockname())
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await second.readexactly(1)
        kept.write(b"still here")
        assert await first.readexactly(10) == b"still here"
        for writer in (kept, refused):
            writer.close()
        relay.close()
        relay.cut()
        inner.close()
        sock.close()

    asyncio.run(asyncio.wait_for(closes(), 20))


def test_a_connection_that_cannot_be_passed_on_is_closed(tmp_path: Path):
    async def closes() -> None:
        relay, sock = Relay(str(tmp_path / "nobody"), 8), listen_on("127.0.0.1", 0)
        await relay.open(sock.dup())
        reader, writer = await asyncio.open_connection(*sock.getsockname())
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()
        relay.close()
        sock.close()

    asyncio.run(asyncio.wait_for(closes(), 20))
