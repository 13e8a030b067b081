"""Sessions between processes of a deployment: frames over TCP, in both directions.

`engine.messages` and `engine.control` define the content of frames, `engine.net.framing` their form
in the stream. A session begins after each end has proved to the other end that it has the
deployment's secret (`engine.net.challenge`). Before that, a server reads no frame and stores no
byte beyond a claim. If no session begins on a connection, the server closes it after `UNTRUSTED_S`.

Both directions have flow control. An end that has `MAX_UNREAD_BYTES` of unhandled frames stops
reading from its socket. Meanwhile `Line.send` waits at the other end. `Line.post` never waits.

If a session ends, the other process has exited. But if a peer is stopped or cut off from the
network, its session does not end. So each end sends a beat if it has sent nothing else for
`BEAT_EVERY_S`. An end that has received nothing for too long ends the session (`PeerSilent`). The
event loop sends the beats, because the same loop serves the other end. The kernel, in contrast,
would answer TCP's probes even while the loop hangs.

Why not gRPC: on two cores, a round trip of 200 bytes takes 25 µs here, and took 123 µs with gRPC's
library.
"""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Self, cast

from engine.errors import BatonError, ProtocolError, Untrusted
from engine.net.challenge import (
    CHALLENGE_BYTES,
    CLAIM_BYTES,
    NOISE_BYTES,
    Challenger,
    Claimant,
)
from engine.net.framing import BEAT, FAREWELL, HEAD_BYTES, FrameReader, head_of
from engine.net.seldom import Seldom
from engine.net.silence import Silence
from engine.net.trust import KEY_BYTES, Secret

log = logging.getLogger(__name__)

GREETING = b"baton/1\n"  # the server's first bytes, before its challenge
ACCEPTED = b"\x00"  # precedes the server's proof; a refusal has its length at this place
MAX_REASON_BYTES = 255
BEAT_EVERY_S = 0.5
SILENCE_S = 5.0  # default: a peer that sends nothing for this long is considered dead
UNTRUSTED_S = 5  # a connection without a session is closed after this number of seconds
FAREWELL_S = 5.0  # longest time in which the last frames of a session are sent
MAX_CONNECTIONS = 1024  # most connections to one server
MAX_UNREAD_BYTES = 2**20  # an end with this size of unhandled frames stops reading
OVERHEAD_BYTES = 64  # bytes that each unread frame counts beside its size
# Most frames of one loop iteration that are sent together. Making a request's frame takes 0.2 ms.
MAX_BEHIND = 8
COPY_BYTES = 16_384  # most bytes of a frame that is copied behind its head, for a single write
LOG_EVERY_S = 10.0  # least time between two logged refusals; other refusals are only counted
BACKLOG = 256


class PeerSilent(BatonError, ConnectionError):
    """Raised after nothing has arrived from the peer for `seconds`, which is too long."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"silent for {seconds:.1f} s")
        self.seconds = seconds


class Line(asyncio.Protocol):
    """One end of an open session: sends and receives frames. Belongs to one event loop."""

    def __init__(self, transport: asyncio.Transport, silence_s: float) -> None:
        """The line takes over the transport. `on_end` is called once, if the session ends in
        another way than by `finish` and `close`.
        """
        self._transport = transport
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader()
        self._unread: deque[bytes] = deque()
        self._num_unread_bytes = 0
        self._reads = True
        self._waiter: asyncio.Future[None] | None = None  # set while `receive` waits for a frame
        self._drained: asyncio.Future[None] | None = (
            None  # set while the other end reads too slowly
        )
        self._has_sent = True  # data was sent since the last beat was due
        # Frames after the first frame of this loop iteration. None: no frame was posted in it.
        self._behind: list[bytes] | None = None
        self._num_behind_bytes = 0
        self._is_over = False
        # Why the session is over. None: the other end has sent a farewell.
        self._error: BaseException | None = None
        self._gone = self._loop.create_future()  # set when the connection is closed
        self.on_end: Callable[[], object] = lambda: None
        self._silence = Silence(self._loop.time())
        self._silence.broken()
        self._beat = self._loop.call_later(BEAT_EVERY_S, self._check)
        transport.set_protocol(self)

    # ------------------------------------------------------------ out

    def post(self, frame: bytes) -> None:
        """Sends a frame without waiting for anything. Raises ConnectionError.

        If sending fails later, `receive` raises too. See `num_unsent_bytes`. In one iteration of
        the loop, the first frame is sent at once, and later short frames in small groups. With one
        write for each frame, the other end would wake up for each. With one write for all frames,
        the other end would be idle until then.
        """
        if self._is_over:
            raise self._reason()
        try:
            head = head_of(frame)
        except ProtocolError as error:
            self.fail(ConnectionError(str(error)))
            raise self._reason() from error
        self._has_sent = True
        if len(frame) > COPY_BYTES:
            self._send_behind()
            self._transport.writelines((head, frame))
        elif self._behind is None:
            self._behind = []
            self._loop.call_soon(self._end_turn, context=Context())
            self._transport.write(head + frame)
        else:
            self._behind.append(head + frame)
            self._num_behind_bytes += HEAD_BYTES + len(frame)
            if len(self._behind) >= MAX_BEHIND or self._num_behind_bytes > COPY_BYTES:
                self._send_behind()

    def _send_behind(self) -> None:
        if self._behind:
            frames, self._behind, self._num_behind_bytes = self._behind, [], 0
            self._transport.write(b"".join(frames))

    def _end_turn(self) -> None:
        self._send_behind()
        self._behind = None

    async def send(self, frame: bytes) -> None:
        """Sends a frame. Waits while the other end reads too slowly. Raises ConnectionError."""
        while self._drained is not None:
            await asyncio.wait([self._drained])
        self.post(frame)

    @property
    def num_unsent_bytes(self) -> int:
        """Returns the number of sent bytes that the kernel has not accepted yet."""
        return self._num_behind_bytes + self._transport.get_write_buffer_size()

    # ------------------------------------------------------------ in

    async def receive(self) -> bytes | None:
        """Returns the next frame, or None if the other end has ended the session.

        Raises ConnectionError; PeerSilent if nothing has arrived for too long.
        """
        while not self._unread and not self._is_over:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._unread:
            return self._next()
        if self._error is not None:
            raise self._error
        return None

    def __aiter__(self) -> Self:
        """Iterates over received frames until the session ends."""
        return self

    async def __anext__(self) -> bytes:
        """Returns the next frame. Raises the same errors as `receive`."""
        frame = await self.receive()
        if frame is None:
            raise StopAsyncIteration
        return frame

    def _next(self) -> bytes:
        frame = self._unread.popleft()
        self._num_unread_bytes -= len(frame) + OVERHEAD_BYTES
        if not self._reads and self._num_unread_bytes < MAX_UNREAD_BYTES:
            self._reads = True
            self._transport.resume_reading()
        return frame

    # ------------------------------------------------------------ the end

    def finish(self) -> None:
        """Ends the session after all frames have been sent. The caller must then call `close`."""
        if not self._is_over:
            self._send_behind()
            self._transport.write(FAREWELL)
            self._transport.close()
            self._end(ConnectionError("closed"))

    def leave(self) -> None:
        """Ends the session. Sends a farewell, unless earlier bytes are still unsent.

        The caller must then call `close`.
        """
        self.on_end = lambda: None
        if not self._transport.get_write_buffer_size():
            self.finish()

    def fail(self, error: BaseException) -> None:
        """Ends the session at once, with this error as the reason. Unsent data is lost."""
        if not self._is_over:
            self._transport.abort()
            self._end(error)

    async def close(self) -> None:
        """Ends the session if it is still open, and waits until the connection is closed."""
        self.on_end = lambda: None
        self.fail(ConnectionError("closed"))
        try:
            await asyncio.wait([self._gone], timeout=FAREWELL_S)
        finally:
            self._transport.abort()

    @property
    def error(self) -> BaseException | None:
        """Returns why the session is over; None if it is open, or if the other end has sent a
        farewell.
        """
        return self._error

    def _end(self, error: BaseException | None) -> None:
        if self._is_over:
            return
        self._is_over, self._error = True, error
        self._behind, self._num_behind_bytes = None, 0
        self._beat.cancel()
        for future in (self._waiter, self._drained):
            if future is not None and not future.done():
                future.set_result(None)
        self._drained = None
        self.on_end()

    def _reason(self) -> ConnectionError:
        """Returns the error that calls of `post` and `send` now raise."""
        error = self._error
        return error if isinstance(error, ConnectionError) else ConnectionError("session ended")

    # ------------------------------------------------------------ beats

    def _check(self) -> None:
        """Sends a beat if a beat is due. Ends the session if the other end is silent."""
        self._beat = self._loop.call_later(BEAT_EVERY_S, self._check)
        try:
            if not (self._has_sent or self._drained is not None):
                self._transport.write(head_of(BEAT))
            self._has_sent = False
            if not self._reads:  # while this end reads nothing, the other end is not silent
                self._silence.broken()
            if self._silence.check(self._loop.time()) > self._silence_s:
                self.fail(PeerSilent(self._silence.seconds))
        except Exception as error:  # a bug; from now on silence would not be noticed
            self.fail(error)
            raise

    # ------------------------------------------------------------ as a protocol

    def data_received(self, data: bytes) -> None:
        """Handles received bytes."""
        self._silence.broken()
        try:
            frames = self._reader.feed(data)
        except ProtocolError as error:
            self.fail(ConnectionError(str(error)))
            return
        for frame in frames:
            if frame:
                self._unread.append(frame)
                self._num_unread_bytes += len(frame) + OVERHEAD_BYTES
        if self._reader.has_ended:
            self._transport.close()
            self._end(None)
            return
        if self._unread and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self._reads and self._num_unread_bytes >= MAX_UNREAD_BYTES:
            self._reads = False
            self._transport.pause_reading()

    def eof_received(self) -> None:
        """Closes the connection, because the other end has closed it."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Records that the connection is closed. Without a farewell, the connection has failed."""
        self._gone.set_result(None)
        self._end(ConnectionError(str(exc) if exc is not None else "the connection broke"))

    def pause_writing(self) -> None:
        """Records that the other end reads too slowly."""
        if not self._is_over:
            self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        """Records that the other end has caught up."""
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)


Session = Callable[[Line], Coroutine[Any, Any, None]]


class SessionServer:
    """Serves sessions to clients that have the secret."""

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
        """A session is cancelled when its client leaves, or is silent for longer than `silence_s`.

        `on_refused` is called with the reason when a session cannot begin; there are few different
        reasons. With `port` 0 the system chooses a port.
        """
        self._port = port
        self._session = session
        self._secret = secret
        self._host = host
        self._silence_s = silence_s
        self._server: asyncio.Server | None = None
        self._refusals = Seldom(LOG_EVERY_S)
        self._on_refused = on_refused
        self._strangers: set[_Stranger] = set()
        self._sessions: set[asyncio.Task[None]] = set()

    async def open(self) -> str:
        """Starts to listen. Returns the address, host:port. Raises OSError if the port is in
        use.
        """
        self._loop = asyncio.get_running_loop()
        self._server = await self._loop.create_server(
            lambda: _Stranger(self), self._host, self._port, backlog=BACKLOG
        )
        port = self._server.sockets[0].getsockname()[1]
        address = f"{self._host}:{port}"
        process_key = secrets.token_bytes(KEY_BYTES)
        self._challenger = Challenger(self._secret, address, process_key=process_key)
        return address

    async def close(self) -> None:
        """Ends all sessions."""
        if self._server is None:
            return
        self._server.close()
        for stranger in list(self._strangers):
            stranger.cut()
        for task in self._sessions:
            task.cancel()
        if self._sessions:
            await asyncio.wait(self._sessions)

    # ------------------------------------------------------------ connections

    def admits(self, stranger: "_Stranger") -> bool:
        """Counts an accepted connection. Returns False if there are too many connections."""
        if len(self._strangers) + len(self._sessions) >= MAX_CONNECTIONS:
            self.refuse("too many connections", "")
            return False
        self._strangers.add(stranger)
        return True

    def remove(self, stranger: "_Stranger") -> None:
        """Removes a connection that has ended, or on which a session has begun."""
        self._strangers.discard(stranger)

    def challenge(self) -> bytes:
        """Returns the challenge for a new connection."""
        return self._challenger.challenge(self._loop.time(), secrets.token_bytes(NOISE_BYTES))

    def redeem(self, claim: bytes) -> bytes:
        """Checks a claim and returns the server's proof. Raises Untrusted."""
        return self._challenger.redeem(claim, self._loop.time())

    def refuse(self, reason: str, peer: str) -> None:
        """Counts and logs a session that did not begin."""
        self._on_refused(reason)
        if (num := self._refusals.due(self._loop.time())) is not None:
            log.warning("refused %d sessions, the last from %s: %s", num, peer, reason)

    def begin(self, transport: asyncio.Transport) -> None:
        """Begins the session of a client that has proved that it has the secret."""
        line = Line(transport, self._silence_s)
        task = self._loop.create_task(self._run(line))
        line.on_end = task.cancel
        self._sessions.add(task)
        task.add_done_callback(self._sessions.discard)

    async def _run(self, line: Line) -> None:
        try:
            await self._session(line)
            line.on_end = lambda: None
            line.finish()
        except asyncio.CancelledError:
            if isinstance(line.error, PeerSilent):
                log.warning("a session is ended: its client is %s", line.error)
            raise
        except ConnectionError as error:
            log.info("a session is ended: %s", error)
        except Exception:
            log.exception("a session failed")
        finally:
            await line.close()


class _Stranger(asyncio.Protocol):
    """A server's connection before a session has begun on it."""

    def __init__(self, server: SessionServer) -> None:
        self._server = server
        self._claim = b""
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the challenge to the client."""
        self._transport = cast("asyncio.Transport", transport)
        if not self._server.admits(self):
            self.cut()
            return
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(UNTRUSTED_S, self.cut)
        self._transport.write(GREETING + self._server.challenge())

    def data_received(self, data: bytes) -> None:
        """Reads the client's claim. Refuses the client if more bytes follow."""
        if self._transport.is_closing():
            return
        self._claim += data[: CLAIM_BYTES + 1]
        if len(self._claim) < CLAIM_BYTES:
            return
        try:
            proof = self._server.redeem(self._claim)
        except Untrusted as error:
            self._refuse(str(error))
            return
        self._leave()
        self._transport.write(ACCEPTED + proof)
        self._server.begin(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Removes the connection, because the client has left."""
        self._leave()

    def cut(self) -> None:
        """Closes the connection."""
        self._leave()
        self._transport.abort()

    def _refuse(self, reason: str) -> None:
        peer = self._transport.get_extra_info("peername")
        self._server.refuse(reason, str(peer))
        said = reason.encode()[:MAX_REASON_BYTES]
        self._transport.write(bytes([len(said)]) + said)
        self._transport.close()

    def _leave(self) -> None:
        self._server.remove(self)
        if self._deadline is not None:
            self._deadline.cancel()


class SessionClient:
    """The client's side of a session: connects to the server."""

    def __init__(self, address: str, secret: Secret, *, silence_s: float = SILENCE_S) -> None:
        """A server that is silent for longer than `silence_s` is considered lost."""
        self._address = address
        self._secret = secret
        self._silence_s = silence_s
        self._line: Line | None = None  # set once a session has begun

    async def open(self) -> None:
        """Connects to a server that has the secret, and begins a session.

        Raises Untrusted; ConnectionError, also if this takes longer than UNTRUSTED_S.
        """
        noise = secrets.token_bytes(NOISE_BYTES)
        dialling = _Dialling(Claimant(self._secret, self._address, noise=noise))
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(UNTRUSTED_S):
                try:
                    await loop.create_connection(lambda: dialling, *place_of(self._address))
                except OSError as error:
                    reason = error.strerror or error
                    raise ConnectionError(f"failed to connect: {reason}") from error
                await dialling.wait()
        except BaseException as error:
            dialling.cut()
            if isinstance(error, TimeoutError):
                raise ConnectionError(f"no session began in {UNTRUSTED_S} s") from None
            raise
        self._line = dialling.line(self._silence_s)

    @property
    def line(self) -> Line:
        """Returns this end of the session. Raises ConnectionError before a session has begun."""
        if self._line is None:
            raise ConnectionError("no session has begun")
        return self._line

    async def send(self, frame: bytes) -> None:
        """Sends a frame: see `Line.send`."""
        await self.line.send(frame)

    def post(self, frame: bytes) -> None:
        """Sends a frame without waiting: see `Line.post`."""
        self.line.post(frame)

    async def receive(self) -> bytes | None:
        """Returns the next frame: see `Line.receive`."""
        return await self.line.receive()

    async def close(self) -> None:
        """Ends the session with a farewell, if a session has begun. Unsent data is lost."""
        if self._line is not None:
            self._line.leave()
            await self._line.close()


class _Dialling(asyncio.Protocol):
    """A client's connection before a session has begun on it."""

    def __init__(self, claimant: Claimant) -> None:
        self._claimant = claimant
        self._transport: asyncio.Transport | None = None
        self._said = b""
        self._has_claimed = False
        self._begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait(self) -> None:
        """Waits until both ends have proved that they have the secret. Raises ConnectionError,
        Untrusted.
        """
        await self._begun

    def line(self, silence_s: float) -> Line:
        """Returns the line of the session that has begun. Raises ConnectionError if the connection
        has failed since.
        """
        assert self._transport is not None
        if self._transport.is_closing():
            raise ConnectionError("the server left")
        line = Line(self._transport, silence_s)
        if self._said:  # the server's first frames have arrived together with its proof
            line.data_received(self._said)
        self._transport.resume_reading()
        return line

    def cut(self) -> None:
        """Closes the connection."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Waits for the challenge."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Reads the challenge first, then the server's proof."""
        assert self._transport is not None
        self._said += data
        try:
            if not self._has_claimed:
                self._answer(self._transport)
            if self._has_claimed and not self._begun.done():
                self._check(self._transport)
        except Untrusted as error:
            self._fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Records that the server has closed the connection."""
        self._fail(ConnectionError(str(exc) if exc is not None else "the server left"))

    def _answer(self, transport: asyncio.Transport) -> None:
        num_expected = len(GREETING) + CHALLENGE_BYTES
        begin = self._said[: len(GREETING)]
        if begin != GREETING[: len(begin)]:
            raise Untrusted("the server is not one of Baton's")
        if len(self._said) >= num_expected:
            claim = self._claimant.claim(self._said[len(GREETING) : num_expected])
            self._said = self._said[num_expected:]
            self._has_claimed = True
            transport.write(claim)

    def _check(self, transport: asyncio.Transport) -> None:
        if not self._said:
            return
        reason_len = self._said[0]
        size = 1 + (reason_len or KEY_BYTES)
        if len(self._said) < size:
            return
        if reason_len:
            reason = self._said[1:size].decode(errors="replace")
            raise Untrusted(f"untrusted: {reason}")
        self._claimant.check(self._said[1:size])
        self._said = self._said[size:]
        transport.pause_reading()  # reading continues when there is a `Line`
        self._begun.set_result(None)

    def _fail(self, error: Exception) -> None:
        if not self._begun.done():
            self._begun.set_exception(error)
            self.cut()


def place_of(address: str) -> tuple[str, int]:
    """Splits an address into host and port. Raises ConnectionError."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise ConnectionError(f"{address!r} is no address")
    return host.strip("[]"), int(port)
