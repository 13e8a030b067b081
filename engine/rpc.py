"""Frames over gRPC: one bidirectional stream per gateway and worker, nothing else.

gRPC brings flow control, keep-alive and (later) TLS; what the frames mean is `engine.messages`. A
broken stream is the sign that the other side is gone: both ends send keep-alive pings, so a peer
that is stopped, cut off or gone without a word is noticed within `KEEPALIVE_S +
KEEPALIVE_TIMEOUT_S`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import grpc.aio

from engine.messages import MAX_FRAME_BYTES

SERVICE = "baton.Worker"
METHOD = "Session"
KEEPALIVE_S = 5
KEEPALIVE_TIMEOUT_S = 5

_OPTIONS = [
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_S * 500),
    ("grpc.so_reuseport", 0),
    ("grpc.enable_http_proxy", 0),
]

Send = Callable[[bytes], Awaitable[None]]
Session = Callable[[AsyncIterator[bytes], Send], Awaitable[None]]


class SessionServer:
    """Serves sessions on a port that the system chooses."""

    def __init__(self, session: Session, host: str = "127.0.0.1") -> None:
        self._session = session
        self._host = host
        self._server: grpc.aio.Server | None = None

    async def open(self) -> str:
        """Starts to listen; returns the address, host:port."""
        handler = grpc.stream_stream_rpc_method_handler(self._handle)
        generic = grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})
        self._server = grpc.aio.server(options=_OPTIONS)
        self._server.add_generic_rpc_handlers((generic,))
        port = self._server.add_insecure_port(f"{self._host}:0")
        await self._server.start()
        return f"{self._host}:{port}"

    async def close(self) -> None:
        """Ends all sessions."""
        if self._server is not None:
            await self._server.stop(grace=0)

    async def _handle(
        self, frames: AsyncIterator[bytes], context: "grpc.aio.ServicerContext[bytes, bytes]"
    ) -> None:
        await self._session(frames, context.write)


class SessionClient:
    """A gateway's side of one session."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._broken: str | None = None  # why frames cannot be sent any more

    async def open(self) -> None:
        """Prepares the stream; whether the worker answers shows at the first read."""
        self._channel = grpc.aio.insecure_channel(self._address, options=_OPTIONS)
        method = self._channel.stream_stream(f"/{SERVICE}/{METHOD}")
        self._call = method()
        self._sender = asyncio.create_task(self._send_posted())

    async def send(self, frame: bytes) -> None:
        """Sends a frame; waits while the worker reads too slowly. Raises ConnectionError."""
        try:
            await self._call.write(frame)
        except asyncio.InvalidStateError as error:  # the session is over; its status says why
            raise ConnectionError(await self._call.details() or "session ended") from error
        except (grpc.RpcError, grpc.aio.UsageError) as error:
            raise ConnectionError(_reason(error)) from error

    def post(self, frame: bytes) -> None:
        """Sends a frame without waiting for anything. Raises ConnectionError.

        Where that shows to be impossible only later, `receive` tells too. Not to be mixed with
        `send` while frames that were posted are on their way.
        """
        if self._broken is not None:
            raise ConnectionError(self._broken)
        self._outbox.put_nowait(frame)

    async def _send_posted(self) -> None:
        while self._broken is None:
            try:
                await self.send(await self._outbox.get())
            except ConnectionError as error:
                self._broken = str(error)

    async def receive(self) -> bytes | None:
        """The next frame, or None when the worker ended the session. Raises ConnectionError."""
        try:
            frame = await self._call.read()
        except grpc.RpcError as error:
            raise ConnectionError(_reason(error)) from error
        return None if frame is grpc.aio.EOF else frame

    async def close(self) -> None:
        """Ends the session."""
        self._sender.cancel()
        self._call.cancel()
        await self._channel.close()


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return str(error.details() or error.code().name)
    return str(error) or type(error).__name__
