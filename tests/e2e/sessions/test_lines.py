"""Frames of a session on loopback arrive whole and in order, with flow control."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import patch

import pytest

from engine.messages import MAX_FRAME_BYTES
from engine.net import sessions
from engine.net.framing import FAREWELL, head_of
from engine.net.sessions import (
    COPY_BYTES,
    MAX_BEHIND,
    MAX_UNREAD_BYTES,
    Line,
    PeerSilent,
    SessionClient,
    SessionServer,
)
from tests.kits.sessions import DEADLINE_S, SECRET, check_echo, echo


@contextlib.asynccontextmanager
async def session_with(
    session: sessions.Session = echo, **options: Any
) -> AsyncIterator[tuple[SessionClient, SessionServer]]:
    """Opens a session with a new server. Client and server have these options."""
    server = SessionServer(session, SECRET, **options)
    client = SessionClient(await server.open(), SECRET, **options)
    await client.open()
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield client, server
    finally:
        await client.close()
        await server.close()


async def test_frames_of_all_sizes_come_back_whole_and_in_order():
    sizes = [1, 3, 4, 5, 70_000, 2, 3_000_000, 1]
    frames = [bytes([i]) * size for i, size in enumerate(sizes)]
    async with session_with() as (client, _):

        async def send_all() -> None:
            for frame in frames:
                await client.send(frame)

        sending = asyncio.create_task(send_all())
        for frame in frames:
            assert await client.receive() == frame
        await sending


async def test_a_session_that_ends_is_no_error():
    async def farewell(line: Line) -> None:
        await anext(line)
        await line.send(b"bye")

    async with session_with(farewell) as (client, _):
        await client.send(b"hello")
        assert await client.receive() == b"bye"
        assert await client.receive() is None
        assert await client.receive() is None


async def test_a_client_that_leaves_says_so():
    errors: asyncio.Queue[BaseException | None] = asyncio.Queue()

    async def serve(line: Line) -> None:
        line.on_end = lambda: None
        try:
            assert await line.receive() is None
        finally:
            errors.put_nowait(line.error)

    async with session_with(serve) as (client, _):
        await client.close()
        assert await errors.get() is None


async def test_posted_frames_are_sent_in_order_without_waiting():
    async with session_with() as (client, _):
        for number in range(100):
            client.post(str(number).encode())
        for number in range(100):
            assert await client.receive() == str(number).encode()


class Pieces(asyncio.Transport):
    """A transport that keeps each written piece."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[bytes] = []

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Does nothing: no data is received."""

    def write(self, data: Any) -> None:
        self.pieces.append(data)

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        """Does nothing: there is no connection."""

    def abort(self) -> None:
        """Does nothing: there is no connection."""


def whole(frame: bytes) -> bytes:
    return head_of(frame) + frame


async def test_short_frames_of_a_turn_share_a_piece_behind_the_first():
    transport = Pieces()
    line = Line(transport, silence_s=60.0)
    long, short = bytes(2 * COPY_BYTES), bytes(COPY_BYTES // 2)
    line.post(b"a")
    line.post(b"b")
    line.post(b"c")
    assert transport.pieces == [whole(b"a")]
    assert line.num_unsent_bytes == len(whole(b"b") + whole(b"c"))
    await asyncio.sleep(0)
    assert transport.pieces == [whole(b"a"), whole(b"b") + whole(b"c")]
    assert line.num_unsent_bytes == 0
    transport.pieces.clear()
    for _ in range(MAX_BEHIND + 2):
        line.post(b"x")
    # at most MAX_BEHIND frames are buffered
    assert transport.pieces == [whole(b"x"), whole(b"x") * MAX_BEHIND]
    await asyncio.sleep(0)
    assert transport.pieces[2:] == [whole(b"x")]
    transport.pieces.clear()
    for frame in (b"d", b"e", long, b"f", short, short, b"g"):
        line.post(frame)
    line.finish()
    sent = b"".join(map(whole, (b"d", b"e", long, b"f", short, short, b"g")))
    assert b"".join(transport.pieces) == sent + FAREWELL
    # together large enough to be written as one piece
    assert whole(b"f") + whole(short) + whole(short) in transport.pieces
    num_pieces = len(transport.pieces)
    await asyncio.sleep(0)
    assert len(transport.pieces) == num_pieces


async def test_a_session_with_a_closed_port_fails_soon():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    client = SessionClient(address, SECRET)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(ConnectionError):
            await client.open()
    await client.close()


async def test_closing_a_server_ends_its_sessions():
    async with session_with() as (client, server):
        await check_echo(client)
        await server.close()
        with pytest.raises(ConnectionError):
            await client.receive()


# ---------------------------------------------------------------- silence


async def settled(seconds: float) -> None:
    """Waits for some seconds, so that the test can see that nothing happens."""
    await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=seconds)


@pytest.fixture
def _quick_beats(monkeypatch):
    monkeypatch.setattr(sessions, "BEAT_EVERY_S", 0.05)


@pytest.mark.usefixtures("_quick_beats")
async def test_idle_ends_keep_their_session():
    async with session_with(silence_s=0.5) as (client, _):
        await check_echo(client)
        await settled(0.7)  # no reader task runs
        answer = asyncio.create_task(client.receive())
        await settled(0.8)
        await client.send(b"b")
        assert await answer == b"b"


class Relay:
    """A TCP connection that can be stopped in the middle, like a cut cable."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self.flows = asyncio.Event()
        self.flows.set()

    async def open(self) -> str:
        self._ways: list[asyncio.Task[None]] = []
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, self._port)
        ways = [self._carry(reader, back), self._carry(there, writer)]
        self._ways += [asyncio.create_task(way) for way in ways]

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                await self.flows.wait()
                writer.write(data)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def close(self) -> None:
        """Waits until both ends have closed, and then closes the relay."""
        self._server.close()
        self.flows.set()
        await asyncio.wait(self._ways, timeout=DEADLINE_S)


@contextlib.asynccontextmanager
async def cut_off(session: sessions.Session) -> AsyncIterator[SessionClient]:
    """Opens a session that has received one answer; then no data passes in either direction."""
    server = SessionServer(session, SECRET, silence_s=0.5)
    address = await server.open()
    relay = Relay(address)
    host, _, port = (await relay.open()).rpartition(":")
    client = SessionClient(address, SECRET, silence_s=0.5)
    with patch.object(sessions, "place_of", lambda _: (host, int(port))):
        await client.open()
    await check_echo(client)
    relay.flows.clear()
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield client
    finally:
        await client.close()
        await server.close()
        await relay.close()


@pytest.mark.usefixtures("_quick_beats")
async def test_both_ends_of_a_session_that_is_cut_off_end_it():
    ended = asyncio.Event()

    async def session(line: Line) -> None:
        try:
            await echo(line)
        finally:
            ended.set()

    async with cut_off(session) as client:
        with pytest.raises(PeerSilent, match="silent for") as caught:
            await client.receive()
        await ended.wait()
    assert 0.5 < caught.value.seconds < 3.0


@pytest.mark.usefixtures("_quick_beats")
def test_frames_in_flight_to_a_silent_peer_are_lost_without_errors():
    """Sends more than a connection buffers: one frame is half sent, and others wait behind it."""
    told: list[dict[str, Any]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        async with cut_off(echo) as client:
            for _ in range(3):
                client.post(bytes(8 * 2**20))
            waiting = asyncio.create_task(client.send(b"behind them"))
            with pytest.raises(PeerSilent):
                await client.receive()
            with pytest.raises(ConnectionError):
                await waiting
            with pytest.raises(ConnectionError):
                client.post(b"b")

    asyncio.run(run())
    assert told == []


@pytest.mark.usefixtures("_quick_beats")
def test_a_crashed_heartbeat_ends_the_session():
    told: list[dict[str, Any]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        async with session_with() as (client, _):
            client.line._silence = None  # type: ignore[assignment]
            with pytest.raises(AttributeError):
                await client.receive()

    asyncio.run(run())
    assert len(told) == 1


@pytest.mark.usefixtures("_quick_beats")
async def test_a_long_frame_on_its_way_is_a_sign_of_life():
    frame = bytes(MAX_FRAME_BYTES)
    async with session_with(silence_s=0.5) as (client, _):
        client.post(frame)
        assert await client.receive() == frame


async def test_a_frame_that_is_too_long_ends_the_session_of_its_sender():
    async with session_with() as (client, _):
        with pytest.raises(ConnectionError, match="too long"):
            client.post(bytes(MAX_FRAME_BYTES + 1))
        with pytest.raises(ConnectionError, match="too long"):
            await client.receive()


async def test_a_length_that_no_frame_may_have_ends_the_session():
    ended = asyncio.Event()

    async def session(line: Line) -> None:
        try:
            await echo(line)
        finally:
            ended.set()

    async with session_with(session) as (client, _):
        client.line._transport.write((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
        with pytest.raises(ConnectionError):
            await client.receive()
        await ended.wait()


async def test_an_end_that_handles_no_frames_stops_reading():
    line_of_server: asyncio.Future[Line] = asyncio.get_running_loop().create_future()
    handles = asyncio.Event()

    async def slow(line: Line) -> None:
        line_of_server.set_result(line)
        await handles.wait()
        await echo(line)

    async with session_with(slow) as (client, _):
        for _ in range(100):
            client.post(bytes(MAX_UNREAD_BYTES))
        line = await line_of_server
        sending = asyncio.create_task(client.send(b"behind them"))
        await settled(0.2)
        assert line._num_unread_bytes <= 2 * MAX_UNREAD_BYTES
        assert client.line.num_unsent_bytes > 0
        assert not sending.done()
        handles.set()
        for _ in range(100):
            assert await client.receive() == bytes(MAX_UNREAD_BYTES)
        assert await client.receive() == b"behind them"
        await sending


async def test_nothing_counts_behind_the_farewell():
    async def session(line: Line) -> None:
        line.post(b"last")
        line._transport.write(FAREWELL + b"\x01\x00\x00\x00x")
        await anext(line)

    async with session_with(session) as (client, _):
        assert await client.receive() == b"last"
        assert await client.receive() is None
        with pytest.raises(ConnectionError, match="session ended"):
            client.post(b"late")


@pytest.mark.usefixtures("_quick_beats")
async def test_own_pause_is_not_the_peers_silence(monkeypatch):
    monkeypatch.setattr("engine.net.silence.MAX_BETWEEN_LOOKS_S", 0.1)
    async with session_with(silence_s=0.5) as (client, _):
        await check_echo(client)
        threading.Event().wait(1.0)  # blocks client and server, because they share the event loop
        await check_echo(client)
