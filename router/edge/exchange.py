"""One request of a connection and its response, as an ASGI application sees them.

The scope contains two objects beyond ASGI, which other servers lack.

- `Exchange`: returns a body that has arrived already, without waiting, and calls a callback when
  the client disconnects. With `receive` alone, a task would have to wait for the disconnection.
- `BodyPipe`: writes parts of a body straight to the transport.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Iterable
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Scope

from engine.clock import unix_time_s

log = logging.getLogger(__name__)

EXCHANGE, PIPE = "baton.exchange", "baton.pipe"  # scope keys
NO_SOCKET = -1  # stands for a missing socket
_NOT_IN_NAMES = re.compile(b'[\x00-\x1f\x7f()<>@,;:\\[\\]={} \t\\\\"]')
_NOT_IN_VALUES = re.compile(b"[\x00-\x08\x0a-\x1f\x7f]")
_LAST = b"connection: close\r\n"


class BodyPipe(asyncio.Protocol):
    """The sending side of a connection. Each part is one chunk of the chunked coding.

    A writer sends parts of a response body through it, in order and without waiting, instead of
    calling `send`. This is allowed between `http.response.start`, with a head without a length, and
    the last `http.response.body`. Call `flush` before sending anything in another way. Waiting for
    `send` needs a task, which runs later. That costs more than all other work for a token.
    """

    transport: asyncio.Transport

    def __init__(self, outbox: "Outbox") -> None:
        self.is_ready = False  # True if the client is connected and reads fast enough
        self.is_paused = False  # reading is paused until the application takes a body
        self.descriptor = NO_SOCKET  # the socket's descriptor; NO_SOCKET with TLS
        self._outbox = outbox
        self._loop = asyncio.get_running_loop()
        self._is_writable = asyncio.Event()
        self._is_writable.set()

    def write(self, data: bytes) -> None:
        """Sends a non-empty part at the end of the loop's iteration."""
        outbox = self._outbox
        if not outbox.parts:
            self._loop.call_soon(outbox.send)
        outbox.parts.append((self.transport, b"%x\r\n%b\r\n" % (len(data), data)))

    def socket(self) -> int:
        """Returns the socket descriptor to which coded parts may be sent now, or NO_SOCKET.

        Use the descriptor before any other event is handled. Call `flush` before sending to it.
        """
        transport = self.transport
        if transport.is_closing() or transport.get_write_buffer_size():
            return NO_SOCKET
        return self.descriptor

    def write_coded(self, data: bytes) -> None:
        """Sends parts that have the chunked coding already, at once. Call `flush` before."""
        self._outbox.parts.append((self.transport, data))
        self._outbox.send()

    def flush(self) -> None:
        """Sends all waiting parts now, including those of other connections."""
        if self._outbox.parts:
            self._outbox.send()

    def cut(self) -> None:
        """Closes the connection at once."""
        self.transport.abort()

    def pause_writing(self) -> None:
        """Records that the client reads too slowly to receive more."""
        self.is_ready = False
        self._is_writable.clear()

    def resume_writing(self) -> None:
        """Records that the client can receive more."""
        self.is_ready = not self.transport.is_closing()
        self._is_writable.set()

    async def drain(self) -> None:
        """Waits until the client has read enough to receive more."""
        await self._is_writable.wait()

    def pause_reading(self) -> None:
        """Stops reading input until the application takes a body."""
        if not self.is_paused:
            self.is_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Resumes reading, if reading was paused for the application."""
        if self.is_paused:
            self.is_paused = False
            self.transport.resume_reading()

    def answered(self, exchange: "Exchange") -> None:
        """Ends the oldest exchange, because its response is complete."""
        raise NotImplementedError


class Exchange:
    """A request whose head has arrived, and its response.

    The head of the response is sent together with the next part, if this part is written in the
    same iteration of the loop: each separate write would wake the client. The head also says
    whether the response is the connection's last.
    """

    def __init__(
        self, wire: BodyPipe, scope: Scope, *, keep_alive: bool, expects_continue: bool
    ) -> None:
        self.scope = scope
        self.keep_alive = keep_alive
        # True if the application takes the body in parts as it arrives. Then each part has a
        # deadline, instead of the whole body. Parts that were taken do not count as body bytes in
        # memory.
        self.streams_body = False
        self.body = bytearray()  # received bytes that the application has not taken yet
        self.more_body = True
        self.arrived = asyncio.Event()  # set when more of the body arrives, or its end
        self.has_started = self.is_complete = False  # the state of the response
        self.on_gone: Callable[[], None] | None = None  # called when the client disconnects
        self.is_gone = False
        self._wire = wire
        self._expects_continue = expects_continue
        self._held = b""  # the head, until it is sent
        self._is_chunked = False
        self._num_left: int | None = None  # unsent bytes of the body; None: no length given

    # ------------------------------------------------------------ the application's side

    async def run(self, app: ASGIApp) -> None:
        """Runs the application for this request."""
        try:
            await app(self.scope, self.receive, self.send)
        except Exception:
            log.exception("the application failed")
        except asyncio.CancelledError:
            self._wire.transport.close()
            raise
        else:
            if self.is_complete or self.is_gone:
                return
            log.error("the application returned before its response was complete")
        if self.has_started:
            self._wire.transport.close()
            return
        headers = [(b"content-length", b"0"), (b"connection", b"close")]
        await self.send({"type": "http.response.start", "status": 500, "headers": headers})
        await self.send({"type": "http.response.body"})

    async def receive(self) -> Message:
        """Returns the next part of the body, or a message that the client has disconnected."""
        if self._expects_continue:
            self._expects_continue = False
            if not self._wire.transport.is_closing():
                self._wire.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not (self.is_gone or self.is_complete):
            self._wire.resume_reading()
            await self.arrived.wait()
            self.arrived.clear()
        if self.is_gone or self.is_complete:
            return {"type": "http.disconnect"}
        data, self.body = bytes(self.body), bytearray()
        return {"type": "http.request", "body": data, "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        """Sends the head of the response, or a part of its body."""
        if not (self._wire.is_ready or self.is_gone):
            await self._wire.drain()
        if self.is_gone:
            return
        if not self.has_started:
            assert message["type"] == "http.response.start"
            self._start_response(message["status"], message.get("headers", ()))
            return
        assert message["type"] == "http.response.body"
        assert not self.is_complete
        body, more_body = message.get("body", b""), message.get("more_body", False)
        if self._is_chunked:
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            if not more_body:
                body += b"0\r\n\r\n"
        elif self.scope["method"] == "HEAD":
            body = b""
        elif self._num_left is not None:
            self._num_left -= len(body)
            if self._num_left < 0 or (self._num_left and not more_body):
                raise RuntimeError("the length of a response's body differs from its head")
        if body or not more_body:
            self._send_held(body)
        if not more_body:
            self.is_complete = True
            self.arrived.set()
            del self.scope[EXCHANGE]  # the scope refers to this object
            self._wire.answered(self)

    def take_body(self) -> bytes | None:
        """Returns the request's body if it is complete and unread, else None."""
        if self.more_body or self.is_gone or self._expects_continue:
            return None
        data, self.body = bytes(self.body), bytearray()
        self.arrived.clear()
        if self._wire.is_paused:
            self._wire.resume_reading()
        return data

    def leave(self) -> None:
        """Records that the client has disconnected."""
        self.is_gone = True
        self.scope.pop(EXCHANGE, None)
        self.arrived.set()
        if self.on_gone is not None:
            self.on_gone()

    def _start_response(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Keeps the head until there is more to send, or until the loop's iteration is over."""
        if self.more_body:  # the unread rest of the body would be parsed as the next request
            self.keep_alive = False
        lines, has_length, is_last = [_status_line(status), _date(unix_time_s())], False, False
        for given, value in headers:
            name = given.lower()
            if _NOT_IN_NAMES.search(name) or _NOT_IN_VALUES.search(value):
                raise RuntimeError(f"a header cannot be sent: {name!r}")
            if name == b"content-length":
                has_length, self._num_left = True, int(value)
            elif name == b"connection" and value.lower() == b"close":
                is_last = True
            lines.append(b"%b: %b\r\n" % (name, value))
        self.keep_alive = self.keep_alive and not is_last
        if not (self.keep_alive or is_last):
            lines.append(_LAST)
        if not (has_length or self.scope["method"] == "HEAD" or status in (204, 304)):
            self._is_chunked = self.scope["http_version"] == "1.1"
            if self._is_chunked:
                lines.append(b"transfer-encoding: chunked\r\n")
        elif not has_length:
            self._num_left = 0
        lines.append(b"\r\n")
        self._held = b"".join(lines)
        self.has_started, self._expects_continue = True, False
        asyncio.get_running_loop().call_soon(self._send_held, b"")

    def _send_held(self, data: bytes) -> None:
        """Sends more of the response, and first its head if that was not sent yet."""
        held, self._held = self._held, b""
        transport = self._wire.transport
        if (held or data) and not transport.is_closing():
            transport.write(held + data)


@lru_cache(64)
def _status_line(status: int) -> bytes:
    return f"HTTP/1.1 {status} {_phrase(status)}\r\n".encode()


def _phrase(status: int) -> str:
    return HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else ""


@lru_cache(1)
def _date(now_s: int) -> bytes:
    return f"date: {formatdate(now_s, usegmt=True)}\r\n".encode()


class Outbox:
    """The parts of bodies written in one iteration of the loop, sent together at its end.

    A step of a worker produces a token for each stream. If each token were sent at once, it would
    wake its client, which would take CPU time from the work for the next token.
    """

    def __init__(self) -> None:
        self.parts: list[tuple[asyncio.Transport, bytes]] = []

    def send(self) -> None:
        """Sends all parts, except to clients that have disconnected."""
        parts, self.parts = self.parts, []
        for transport, data in parts:
            if not transport.is_closing():
                try:
                    transport.write(data)
                except Exception:  # an error of one client must not affect others
                    log.exception("sending a part of a body failed: its connection is cut")
                    transport.abort()
