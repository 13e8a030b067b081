"""Frames over gRPC: one bidirectional stream per gateway and worker, nothing else.

gRPC brings flow control; `engine.messages` says what the frames mean. A session begins when each
end has proved to the other that it holds the deployment's secret (`engine.net.challenge`). Before
that, a server reads no message at all, so gRPC's window bounds what an untrusted client can send. A
connection on which no session begins is closed after `UNTRUSTED_S`.

The end of a session shows that the other side is gone. A peer that is stopped or cut off ends
nothing. So each end sends an empty frame, a *beat*, if it has sent nothing else for `BEAT_EVERY_S`.
It ends a session in which nothing has come for too long (`PeerSilent`). Beats come from the event
loop, since that is what serves the other end: gRPC's own threads would answer pings while the loop
hangs. gRPC's keep-alive finds the remaining case, connections on which no session has begun.

`engine.net.grpc_library` loads gRPC.
"""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from engine.errors import BatonError, Untrusted
from engine.messages import MAX_FRAME_BYTES
from engine.net.challenge import NOISE_BYTES, Challenger, Claimant
from engine.net.grpc_library import grpc
from engine.net.seldom import Seldom
from engine.net.silence import Silence
from engine.net.trust import KEY_BYTES, Secret

log = logging.getLogger(__name__)


SERVICE = "baton.Worker"
METHOD = "Session"
CHALLENGE_METHOD = "Challenge"
BEAT_EVERY_S = 0.5
SILENCE_S = 5.0  # by default, a peer that sends nothing for this long counts as dead
KEEPALIVE_S = 5
KEEPALIVE_TIMEOUT_S = 5
UNTRUSTED_S = 5  # a connection without a session is closed after this time
MAX_CONNECTIONS = 1024  # to one server
MAX_CALLS = 1024  # to one server: sessions, and calls that are about to be refused
MAX_CALLS_PER_CONNECTION = 4  # a session, and the challenge before it
MAX_METADATA_BYTES = 4096
LOG_EVERY_S = 10.0  # between two logged refusals; those in between are counted
_BEAT = b""
_CHALLENGE = "baton-challenge-bin"
_CLAIM = "baton-claim-bin"
_PROOF = "baton-proof-bin"

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
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
]
_SERVER_OPTIONS = [
    *_OPTIONS,
    ("grpc.max_concurrent_streams", MAX_CALLS_PER_CONNECTION),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", UNTRUSTED_S * 1000),
    ("grpc.max_connection_idle_ms", UNTRUSTED_S * 1000),
]

Send = Callable[[bytes], Coroutine[Any, Any, None]]
Session = Callable[[AsyncIterator[bytes], Send], Coroutine[Any, Any, None]]


class Outbox:
    """Sends frames in order without making the caller wait: each as soon as the one before is sent.

    A frame that need not wait is on its way when `post` returns. A task would send it only after
    all else that the loop has to do by then.
    """

    def __init__(self, send: Send) -> None:
        """`send` may raise ConnectionError; then no further frame is sent."""
        self._send = send
        self._waiting: deque[bytes] = deque()
        self._sending: Coroutine[Any, Any, None] | None = None
        self.broken: str | None = None  # the reason why no frame can be sent any more

    def post(self, frame: bytes) -> None:
        """Sends a frame. Raises ConnectionError if sending has already failed."""
        if self.broken is not None:
            raise ConnectionError(self.broken)
        self._waiting.append(frame)
        if self._sending is None:
            self._go_on()

    def close(self) -> None:
        """Stops sending."""
        self._waiting.clear()
        if self._sending is not None:
            self._sending.close()
            self._sending = None
        self.broken = self.broken or "closed"

    def _go_on(self, _: "asyncio.Future[Any] | None" = None) -> None:
        """Sends waiting frames until one has to wait."""
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
                # A task does this with the future that its coroutine waits for.
                future._asyncio_future_blocking = False
                future.add_done_callback(self._go_on)
                return


class PeerSilent(BatonError, ConnectionError):
    """Nothing has come from the peer for `seconds`, which is too long."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"silent for {seconds:.1f} s")
        self.seconds = seconds


class _Line:
    """One end of a session: sends one frame at a time, sends beats, and notices silence."""

    def __init__(self, write: Send, silence_s: float) -> None:
        self._write = write
        self._silence_s = silence_s
        self._lock = asyncio.Lock()  # gRPC takes one frame at a time
        self._beats = Outbox(self.send)
        self._has_sent = False  # since the last beat was due
        self._silence: Silence | None = None  # None until something has come
        self.listens = True  # False while an earlier frame is being handled

    async def send(self, frame: bytes) -> None:
        """Sends a frame after those before it."""
        async with self._lock:
            self._has_sent = True
            await self._write(frame)

    def heard(self) -> None:
        """Notes that a frame came. The line does not listen for the next until `listens` is set."""
        if self._silence is None:
            self._silence = Silence(asyncio.get_running_loop().time())
        self._silence.broken()
        self.listens = False

    async def listen(self, frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yields the frames that come, without the beats."""
        async for frame in frames:
            self.heard()
            if frame != _BEAT:
                yield frame
            self.listens = True

    async def keep(self) -> PeerSilent:
        """Sends beats until the other end is silent for too long, or until it is cancelled."""
        loop = asyncio.get_running_loop()
        never = loop.create_future()
        while True:
            await asyncio.wait([never], timeout=BEAT_EVERY_S)
            if not (self._has_sent or self._lock.locked()):
                with suppress(ConnectionError):  # the reader of this session gets the error too
                    self._beats.post(_BEAT)
            self._has_sent = False
            if self._silence is not None and self._is_silent(self._silence, loop.time()):
                return PeerSilent(self._silence.seconds)

    def _is_silent(self, silence: Silence, now_s: float) -> bool:
        if not self.listens:
            silence.broken()
        return silence.look(now_s) > self._silence_s

    def close(self) -> None:
        """Stops the beats."""
        self._beats.close()


class SessionServer:
    """Serves sessions to clients that hold the secret."""

    def __init__(
        self,
        session: Session,
        secret: Secret,
        host: str = "127.0.0.1",
        *,
        silence_s: float = SILENCE_S,
        on_refused: Callable[[str], None] = lambda reason: None,
        port: int = 0,
    ) -> None:
        """A session whose client is silent for longer than `silence_s` is cancelled.

        `on_refused` gets the reason, one of a few, why a session did not begin. With `port` 0 the
        system chooses one.
        """
        self._port = port
        self._session = session
        self._secret = secret
        self._host = host
        self._silence_s = silence_s
        self._server: grpc.aio.Server | None = None
        self._refusals = Seldom(LOG_EVERY_S)
        self._on_refused = on_refused

    async def open(self) -> str:
        """Starts to listen; returns the address, host:port. Raises OSError if the port is taken."""
        methods = {METHOD: self._handle, CHALLENGE_METHOD: self._answer_challenge}
        # All are streams: gRPC reads the message of any other call before a handler is asked.
        handlers = {
            name: grpc.stream_stream_rpc_method_handler(method) for name, method in methods.items()
        }
        generic = grpc.method_handlers_generic_handler(SERVICE, handlers)
        self._server = grpc.aio.server(options=_SERVER_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
        self._server.add_generic_rpc_handlers((generic,))
        try:
            port = self._server.add_insecure_port(f"{self._host}:{self._port}")
        except RuntimeError as error:  # what gRPC raises for any failure to bind
            raise OSError(f"cannot listen on port {self._port}: {error}") from error
        address = f"{self._host}:{port}"
        process_key = secrets.token_bytes(KEY_BYTES)
        self._challenger = Challenger(self._secret, address, process_key=process_key)
        await self._server.start()
        return address

    async def close(self) -> None:
        """Ends all sessions."""
        if self._server is not None:
            await self._server.stop(grace=0)

    async def _answer_challenge(
        self, _: AsyncIterator[bytes], context: "grpc.aio.ServicerContext[bytes, bytes]"
    ) -> None:
        noise = secrets.token_bytes(NOISE_BYTES)
        challenge = self._challenger.challenge(asyncio.get_running_loop().time(), noise)
        context.set_trailing_metadata(((_CHALLENGE, challenge),))

    async def _trusts(self, context: "grpc.aio.ServicerContext[bytes, bytes]") -> bool:
        """True if the client has proved itself. Sends it the server's proof, or the reason."""
        now_s = asyncio.get_running_loop().time()
        claim = dict(context.invocation_metadata() or ()).get(_CLAIM, b"")
        try:
            proof = self._challenger.redeem(claim, now_s)
        except Untrusted as error:
            self._on_refused(str(error))
            if (num := self._refusals.due(now_s)) is not None:
                log.warning("refused %d sessions, the last from %s: %s", num, context.peer(), error)
            context.set_code(grpc.StatusCode.UNAUTHENTICATED)
            context.set_details(f"untrusted: {error}")
            return False
        await context.send_initial_metadata(((_PROOF, proof),))
        return True

    async def _handle(
        self, frames: AsyncIterator[bytes], context: "grpc.aio.ServicerContext[bytes, bytes]"
    ) -> None:
        if not await self._trusts(context):
            return
        line = _Line(context.write, self._silence_s)
        session = asyncio.create_task(self._session(line.listen(frames), line.send))
        keeping = asyncio.create_task(line.keep())
        try:
            await asyncio.wait([session, keeping], return_when=asyncio.FIRST_COMPLETED)
            if session.done():
                await session  # raises if it failed
            else:
                log.warning("a session is ended: its client is %s", keeping.result())
        finally:
            line.close()
            session.cancel()
            keeping.cancel()
            await asyncio.gather(session, keeping, return_exceptions=True)


class SessionClient:
    """A gateway's side of one session."""

    def __init__(self, address: str, secret: Secret, *, silence_s: float = SILENCE_S) -> None:
        """A worker that is silent for longer than `silence_s` counts as lost."""
        self._address = address
        self._secret = secret
        self._silence_s = silence_s
        self._channel: grpc.aio.Channel | None = None  # set once a session has begun
        self._ended: BaseException | None = None  # the reason why the session ended

    async def open(self) -> None:
        """Begins a session with a server that holds the secret.

        Raises Untrusted, and ConnectionError, also if the server takes longer than UNTRUSTED_S.
        """
        channel = grpc.aio.insecure_channel(self._address, options=_OPTIONS)
        try:
            async with asyncio.timeout(UNTRUSTED_S):
                self._call = await self._trusted_call(channel)
        except BaseException as error:
            await channel.close()
            if isinstance(error, TimeoutError):
                raise ConnectionError(f"no session began in {UNTRUSTED_S} s") from None
            raise
        self._channel = channel
        self._line = _Line(self._write, self._silence_s)
        self._outbox = Outbox(self._line.send)
        self._keeping = asyncio.create_task(self._line.keep())
        self._keeping.add_done_callback(self._on_silence)

    async def _trusted_call(self, channel: "grpc.aio.Channel") -> Any:
        """Starts the call of a session in which each end has proved itself."""
        claimant = Claimant(self._secret, self._address, noise=secrets.token_bytes(NOISE_BYTES))
        asking = channel.stream_stream(f"/{SERVICE}/{CHALLENGE_METHOD}")()
        claim = claimant.claim(await _said(asking, asking.trailing_metadata(), _CHALLENGE))
        call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(metadata=((_CLAIM, claim),))
        try:
            claimant.check(await _said(call, call.initial_metadata(), _PROOF))
        except BaseException:
            call.cancel()
            raise
        return call

    def _on_silence(self, keeping: "asyncio.Task[PeerSilent]") -> None:
        """Cancels the call if the worker is silent, or on a bug, since silence would go unnoticed
        then.
        """
        if not keeping.cancelled():
            self._ended = keeping.exception() or keeping.result()
            self._call.cancel()  # ends `receive`, and running sends

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

        If sending fails later, `receive` raises too. A frame that is sent while posted ones wait
        may overtake them.
        """
        self._outbox.post(frame)

    async def receive(self) -> bytes | None:
        """Returns the next frame, or None when the worker ended the session.

        Raises ConnectionError; PeerSilent if nothing came for too long.
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
        """Finds out if this task was cancelled, or the call, or both."""
        task = asyncio.current_task()
        if self._ended is None or (task is not None and task.cancelling()):
            return error
        return self._ended

    async def close(self) -> None:
        """Ends the session, if it has begun."""
        if self._channel is None:
            return
        self._keeping.cancel()
        self._line.close()
        self._outbox.close()
        self._call.cancel()
        await self._channel.close()


async def _said(call: Any, metadata: Awaitable[Any], key: str) -> bytes:
    """Reads what a server sends under `key` in that part of the metadata of a call.

    Raises ConnectionError, and Untrusted if the server refuses us or sends nothing.
    """
    try:
        said = dict(await metadata or ()).get(key)
    except grpc.RpcError as error:
        raise ConnectionError(_reason(error)) from error
    if isinstance(said, bytes):
        return said
    code, details = await call.code(), await call.details()
    if code is grpc.StatusCode.UNAUTHENTICATED:
        raise Untrusted(str(details))
    if code is grpc.StatusCode.OK:
        raise Untrusted("the server proves nothing")
    raise ConnectionError(str(details or code.name))


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return str(error.details() or error.code().name)
    return str(error) or type(error).__name__
