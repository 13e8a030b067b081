"""Sessions of gateways with a worker or a store.

Frames are sent in the call that posts them. A gateway that reads too slowly is cut off. A gateway
has one session at a time; its end is reported before its next session can begin.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from engine.errors import ProtocolError
from engine.messages import (
    PROTOCOL_VERSION,
    GatewayId,
    Hello,
    Refused,
    ToWorker,
    Welcome,
    decode_to_worker,
    encode_frame,
)
from engine.net.sessions import Line, SessionServer
from engine.net.trust import Secret

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0
MAX_UNSENT_BYTES = 16 * 2**20  # to one gateway, which is cut off if it has more


class GatewayListener(Protocol):
    """Handles the messages of one session."""

    def take(self, message: ToWorker) -> None:
        """Takes a message. A second `Hello` has no meaning and is never passed on."""
        ...

    def close(self) -> None:
        """Called at the session's end. The listener must emit no event after that."""
        ...


class GatewaySessions:
    """The server and its open sessions. Every method is called on the event loop."""

    def __init__(
        self,
        secret: Secret,
        host: str,
        *,
        welcome: Callable[[], Welcome | Refused],
        listen: Callable[[GatewayId], GatewayListener],
        on_lost: Callable[[GatewayId], None],
        port: int = 0,
    ) -> None:
        """`welcome` returns the answer to a gateway's hello. `port` 0: the system chooses."""
        self._welcome = welcome
        self._listen = listen
        self._on_lost = on_lost
        self._lines: dict[GatewayId, Line] = {}  # for each session until its end is reported
        self.refused: Counter[str] = Counter()  # sessions, by reason
        self._server = SessionServer(
            self._session, secret, host, on_refused=self._count_refused, port=port
        )

    async def open(self) -> str:
        """Starts to listen; returns the address."""
        return await self._server.open()

    async def close(self) -> None:
        """Ends all sessions."""
        await self._server.close()

    def post_all(self, frame: bytes) -> None:
        """Sends a frame to every gateway."""
        for gateway_id in list(self._lines):
            self.post(gateway_id, frame)

    def post(self, gateway_id: GatewayId, frame: bytes) -> None:
        """Sends a frame to a gateway. Cuts it off if it reads too slowly."""
        line = self._lines.get(gateway_id)
        if line is None:
            return  # it left: its sequences are being cancelled
        if line.num_unsent_bytes > MAX_UNSENT_BYTES:
            log.warning("gateway %s reads too slowly and is cut off", gateway_id)
            line.fail(ConnectionError("it reads too slowly"))
            return
        with suppress(ConnectionError):  # its session is ending
            line.post(frame)

    def _count_refused(self, reason: str) -> None:
        self.refused[f"refused_sessions:{reason}"] += 1

    async def _session(self, line: Line) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                messages = decode_to_worker(await anext(line))
        except (ProtocolError, StopAsyncIteration, TimeoutError) as error:
            log.warning("a gateway was refused: %s", error)
            return
        gateway_id = self._known(messages)
        welcome = gateway_id if isinstance(gateway_id, Refused) else self._welcome()
        line.post(encode_frame([welcome]))  # role changes follow it in order
        if isinstance(gateway_id, Refused) or isinstance(welcome, Refused):
            log.warning("a gateway was refused: %s", welcome)
            return
        self._lines[gateway_id] = line
        listener = self._listen(gateway_id)
        try:
            await _read_all(gateway_id, listener, line)
        finally:
            listener.close()
            self._on_lost(gateway_id)  # must precede the next session of this gateway
            del self._lines[gateway_id]
            log.info("gateway %s is gone", gateway_id)

    def _known(self, messages: Sequence[ToWorker]) -> GatewayId | Refused:
        """Returns the id of the gateway that says hello, or the reason to refuse it."""
        match messages:
            case [Hello(version=version)] if version != PROTOCOL_VERSION:
                return Refused(
                    f"protocol version differs: ours {PROTOCOL_VERSION}, yours {version}"
                )
            case [Hello(gateway_id=gateway_id)] if gateway_id in self._lines:
                return Refused("a session of this gateway is open")
            case [Hello(gateway_id=gateway_id)]:
                return gateway_id
            case _:
                return Refused("the first frame must be one Hello")


async def _read_all(gateway_id: GatewayId, listener: GatewayListener, line: Line) -> None:
    async for frame in line:
        try:
            messages = decode_to_worker(frame)
        except ProtocolError as error:
            log.warning("cut off gateway %s: %s", gateway_id, error)
            return
        for message in messages:
            if not isinstance(message, Hello):
                listener.take(message)
