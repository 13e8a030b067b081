"""Sessions of gateways with a worker or a store.

Each session has an outbox that one task sends. A gateway that reads too slowly is cut off. A
gateway has one session at a time; its end is reported before its next session can begin.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
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
from engine.net.rpc import Send, SessionServer
from engine.net.trust import Secret

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0
MAX_UNSENT_FRAMES = 4096  # of one gateway, which is cut off if it has more


class GatewayListener(Protocol):
    """Takes the messages of one session."""

    def take(self, message: ToWorker) -> None:
        """Takes a message. A second `Hello` has no meaning and is never passed on."""
        ...

    def close(self) -> None:
        """Ends with the session; nothing of it may follow."""
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
        """`welcome` is what a gateway gets now. `port` 0: the system chooses."""
        self._welcome = welcome
        self._listen = listen
        self._on_lost = on_lost
        # Outbox of each session until its end is reported; None: it is cut off.
        self._outboxes: dict[GatewayId, asyncio.Queue[bytes | None] | None] = {}
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
        for gateway_id in list(self._outboxes):
            self.post(gateway_id, frame)

    def post(self, gateway_id: GatewayId, frame: bytes) -> None:
        """Sends a frame to a gateway. Cuts it off if it reads too slowly."""
        outbox = self._outboxes.get(gateway_id)
        if outbox is None:
            return  # it left or is cut off: its sequences are being cancelled
        try:
            outbox.put_nowait(frame)
        except asyncio.QueueFull:
            log.warning("gateway %s reads too slowly and is cut off", gateway_id)
            self._outboxes[gateway_id] = None
            while not outbox.empty():
                outbox.get_nowait()
            outbox.put_nowait(None)

    def _count_refused(self, reason: str) -> None:
        self.refused[f"refused_sessions:{reason}"] += 1

    async def _session(self, frames: AsyncIterator[bytes], send: Send) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                messages = decode_to_worker(await anext(frames))
        except (ProtocolError, StopAsyncIteration, TimeoutError) as error:
            log.warning("a gateway was refused: %s", error)
            return
        gateway_id = self._known(messages)
        if isinstance(gateway_id, Refused):
            await _refuse(gateway_id, send)
            return
        welcome = self._welcome()
        if isinstance(welcome, Refused):
            await _refuse(welcome, send)
            return
        outbox: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_UNSENT_FRAMES)
        outbox.put_nowait(encode_frame([welcome]))  # role changes follow it in order
        self._outboxes[gateway_id] = outbox
        sender = asyncio.create_task(_send_all(outbox, send))
        listener = self._listen(gateway_id)
        reader = asyncio.create_task(_read_all(gateway_id, listener, frames))
        try:
            await asyncio.wait([sender, reader], return_when=asyncio.FIRST_COMPLETED)
        finally:
            sender.cancel()
            reader.cancel()
            await asyncio.gather(sender, reader, return_exceptions=True)
            listener.close()
            self._on_lost(gateway_id)  # must precede the next session of this gateway
            del self._outboxes[gateway_id]
            log.info("gateway %s is gone", gateway_id)

    def _known(self, messages: Sequence[ToWorker]) -> GatewayId | Refused:
        """Returns who says hello, or why it may not begin a session."""
        match messages:
            case [Hello(version=version)] if version != PROTOCOL_VERSION:
                return Refused(
                    f"protocol version differs: ours {PROTOCOL_VERSION}, yours {version}"
                )
            case [Hello(gateway_id=gateway_id)] if gateway_id in self._outboxes:
                return Refused("a session of this gateway is open")
            case [Hello(gateway_id=gateway_id)]:
                return gateway_id
            case _:
                return Refused("the first frame must be one Hello")


async def _refuse(refused: Refused, send: Send) -> None:
    log.warning("a gateway was refused: %s", refused.reason)
    await send(encode_frame([refused]))


async def _read_all(
    gateway_id: GatewayId, listener: GatewayListener, frames: AsyncIterator[bytes]
) -> None:
    async for frame in frames:
        try:
            messages = decode_to_worker(frame)
        except ProtocolError as error:
            log.warning("cut off gateway %s: %s", gateway_id, error)
            return
        for message in messages:
            if not isinstance(message, Hello):
                listener.take(message)


async def _send_all(outbox: "asyncio.Queue[bytes | None]", send: Send) -> None:
    while (frame := await outbox.get()) is not None:
        await send(frame)
