"""Frames over gRPC: one bidirectional stream per gateway and worker, nothing else.

gRPC brings flow control and (later) TLS; what the frames mean is `engine.messages`. A session that
ends is the sign that the other side is gone. One that is stopped or cut off ends nothing: so each
end sends an empty frame, a *beat*, where it has had nothing else to say for `BEAT_EVERY_S`, and
ends a session in which nothing has come for longer than it is willing to wait (`PeerSilent`). Beats
come from the event loop, which is what serves the other end: where gRPC's own threads still answer
pings and the loop hangs, nobody is served. gRPC's keep-alive finds what is left, connections on
which no session has begun.

gRPC is asked to read its sockets in the thread that waits for what is read. By default a pool of
threads of its own does, which hands on what it has read: measured on two cores, a frame there and
one back take 170 µs instead of 280 µs, and a third less of the CPU.
"""

import asyncio
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import contextmanager, suppress
from typing import Any

from engine.messages import MAX_FRAME_BYTES
from engine.silence import Silence

log = logging.getLogger(__name__)


@contextmanager
def _experiments(choice: str) -> Generator[None]:
    """gRPC reads the variable when it is loaded; child processes are not to inherit it."""
    before = os.environ.get(_EXPERIMENTS)
    os.environ[_EXPERIMENTS] = choice if before is None else before
    try:
        yield
    finally:
        if before is None:
            del os.environ[_EXPERIMENTS]


_EXPERIMENTS = "GRPC_EXPERIMENTS"

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else it tells of every peer that leaves
with _experiments("-event_engine_client,-event_engine_listener"):
    import grpc
    import grpc.aio

SERVICE = "baton.Worker"
METHOD = "Session"
BEAT_EVERY_S = 0.5
SILENCE_S = 5.0  # by default a peer that says nothing for so long is taken for dead
KEEPALIVE_S = 5
KEEPALIVE_TIMEOUT_S = 5
_BEAT = b""

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

Send = Callable[[bytes], Coroutine[Any, Any, None]]
Session = Callable[[AsyncIterator[bytes], Send], Coroutine[Any, Any, None]]


class Outbox:
    """Sends frames in order, without anybody having to wait: each as soon as the one before is.

    A frame that need not wait is on its way when `post` returns. A task would send it when its turn
    comes, which is after all else that the loop has to do by then.
    """

    def __init__(self, send: Send) -> None:
        """`send` may raise ConnectionError: no other frame is sent then."""
        self._send = send
        self._waiting: deque[bytes] = deque()
        self._sending: Coroutine[Any, Any, None] | None = None
        self.broken: str | None = None  # why frames cannot be sent any more

    def post(self, frame: bytes) -> None:
        """Sends a frame. Raises ConnectionError where that is known to be impossible."""
        if self.broken is not None:
            raise ConnectionError(self.broken)
        self._waiting.append(frame)
        if self._sending is None:
            self._go_on()

    def close(self) -> None:
        """Sends no more."""
        self._waiting.clear()
        if self._sending is not None:
            self._sending.close()
            self._sending = None
        self.broken = self.broken or "closed"

    def _go_on(self, _: "asyncio.Future[Any] | None" = None) -> None:
        """As far as it goes without waiting."""
        while self.broken is None:
            if self._sending is None:
                if not self._waiting:
                    return
                self._sending = self._send(self._waiting.popleft())
            try:
                future = self._sending.send(None)
            except StopIteration:
                self._sending = None
            except ConnectionError as error:
                self._sending, self.broken = None, str(error)
            except BaseException as error:  # a bug, and what is sent after it would be out of order
                self._sending, self.broken = None, type(error).__name__
                raise
            else:
                # What a task does with the future that its coroutine waits for.
                future._asyncio_future_blocking = False
                future.add_done_callback(self._go_on)
                return


class PeerSilent(ConnectionError):
    """Nothing has come for too long; `seconds` of it."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"silent for {seconds:.1f} s")
        self.seconds = seconds


class _Line:
    """One end of a session: sends one frame at a time, beats, and notices silence."""

    def __init__(self, write: Send, silence_s: float) -> None:
        self._write = write
        self._silence_s = silence_s
        self._lock = asyncio.Lock()  # gRPC takes one frame at a time
        self._beats = Outbox(self.send)
        self._has_sent = False  # since the last beat was due
        self._silence: Silence | None = None  # None until something has come
        self.listens = True  # what comes is not read while something is made of what came before

    async def send(self, frame: bytes) -> None:
        """Sends a frame when those before it are sent."""
        async with self._lock:
            self._has_sent = True
            await self._write(frame)

    def heard(self) -> None:
        """Something came. The next is not listened for until `listens` is set."""
        if self._silence is None:
            self._silence = Silence(asyncio.get_running_loop().time())
        self._silence.broken()
        self.listens = False

    async def listen(self, frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """What comes, without the beats."""
        async for frame in frames:
            self.heard()
            if frame != _BEAT:
                yield frame
            self.listens = True

    async def keep(self) -> PeerSilent:
        """Beats until the other end is silent for too long; or until it is cancelled."""
        loop = asyncio.get_running_loop()
        never = loop.create_future()
        while True:
            await asyncio.wait([never], timeout=BEAT_EVERY_S)
            if not (self._has_sent or self._lock.locked()):
                with suppress(ConnectionError):  # whoever reads hears of it too
                    self._beats.post(_BEAT)
            self._has_sent = False
            if self._silence is not None and self._is_silent(self._silence, loop.time()):
                return PeerSilent(self._silence.seconds)

    def _is_silent(self, silence: Silence, now_s: float) -> bool:
        if not self.listens:
            silence.broken()
        return silence.look(now_s) > self._silence_s

    def close(self) -> None:
        """Beats no more."""
        self._beats.close()


class SessionServer:
    """Serves sessions on a port that the system chooses."""

    def __init__(
        self, session: Session, host: str = "127.0.0.1", *, silence_s: float = SILENCE_S
    ) -> None:
        """A session whose client is silent for longer than `silence_s` is cancelled."""
        self._session = session
        self._host = host
        self._silence_s = silence_s
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
        line = _Line(context.write, self._silence_s)
        session = asyncio.create_task(self._session(line.listen(frames), line.send))
        keeping = asyncio.create_task(line.keep())
        try:
            await asyncio.wait([session, keeping], return_when=asyncio.FIRST_COMPLETED)
            if session.done():
                await session  # which may have failed
            else:
                log.warning("a session is ended: its client is %s", keeping.result())
        finally:
            line.close()
            session.cancel()
            keeping.cancel()
            await asyncio.gather(session, keeping, return_exceptions=True)


class SessionClient:
    """A gateway's side of one session."""

    def __init__(self, address: str, *, silence_s: float = SILENCE_S) -> None:
        """A worker that is silent for longer than `silence_s` counts as lost."""
        self._address = address
        self._silence_s = silence_s
        self._ended: BaseException | None = None  # why there is no session any more

    async def open(self) -> None:
        """Prepares the stream; whether the worker answers shows at the first read."""
        self._channel = grpc.aio.insecure_channel(self._address, options=_OPTIONS)
        method = self._channel.stream_stream(f"/{SERVICE}/{METHOD}")
        self._call = method()
        self._line = _Line(self._write, self._silence_s)
        self._outbox = Outbox(self._line.send)
        self._keeping = asyncio.create_task(self._line.keep())
        self._keeping.add_done_callback(self._on_silence)

    def _on_silence(self, keeping: "asyncio.Task[PeerSilent]") -> None:
        """Or on a bug: nobody would notice silence any more."""
        if not keeping.cancelled():
            self._ended = keeping.exception() or keeping.result()
            self._call.cancel()  # which ends `receive`, and what is being sent

    async def send(self, frame: bytes) -> None:
        """Sends a frame; waits while the worker reads too slowly. Raises ConnectionError."""
        await self._line.send(frame)

    async def _write(self, frame: bytes) -> None:
        try:
            await self._call.write(frame)
        except asyncio.InvalidStateError as error:  # the session is over; its status says why
            raise ConnectionError(await self._call.details() or "session ended") from error
        except (grpc.RpcError, grpc.aio.UsageError) as error:
            raise ConnectionError(_reason(error)) from error
        except asyncio.CancelledError as error:
            raise self._cause_of(error) from None

    def post(self, frame: bytes) -> None:
        """Sends a frame without waiting for anything. Raises ConnectionError.

        Where that shows to be impossible only later, `receive` tells too. A frame that is sent
        while some that were posted wait may overtake these.
        """
        self._outbox.post(frame)

    async def receive(self) -> bytes | None:
        """The next frame, or None when the worker ended the session.

        Raises ConnectionError; PeerSilent where nothing came for too long.
        """
        line = self._line
        line.listens = True
        try:
            while (frame := await self._call.read()) == _BEAT:
                line.heard()
                line.listens = True
        except grpc.RpcError as error:
            raise ConnectionError(_reason(error)) from error
        except asyncio.CancelledError as error:
            raise self._cause_of(error) from None
        line.heard()
        return None if frame is grpc.aio.EOF else frame

    def _cause_of(self, error: asyncio.CancelledError) -> BaseException:
        """Who is cancelled is this task, or the call, or both."""
        task = asyncio.current_task()
        if self._ended is None or (task is not None and task.cancelling()):
            return error
        return self._ended

    async def close(self) -> None:
        """Ends the session."""
        self._keeping.cancel()
        self._line.close()
        self._outbox.close()
        self._call.cancel()
        await self._channel.close()


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return str(error.details() or error.code().name)
    return str(error) or type(error).__name__
