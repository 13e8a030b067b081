"""A store's side of the controller's session: receives members and orders, and sends reports.

The controller opens the session, as with a gateway. Without a session, the last members stay in
force.
"""

import asyncio
import logging
from collections.abc import Callable

from engine.control import (
    CONTROL_VERSION,
    ControllerHello,
    ControllerRefused,
    DropBlocks,
    Members,
    RetireStore,
    StoreReport,
    StoreWelcome,
    ToController,
    decode_from_controller,
    encode_control,
)
from engine.errors import ProtocolError
from engine.messages import WorkerId
from engine.net.sessions import Line, SessionServer
from engine.net.trust import Secret

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0
REPORT_EVERY_S = 1.0


class StoreControl:
    """Receives members and orders from controllers, and sends reports to them."""

    def __init__(  # noqa: PLR0913 - wiring
        self,
        name: WorkerId,
        secret: Secret,
        host: str,
        *,
        on_members: Callable[[Members], None],
        on_drop: Callable[[], None],
        on_retire: Callable[[], None],
        report: Callable[[], StoreReport],
        port: int = 0,
    ) -> None:
        self._name = name
        self._on_members = on_members
        self._on_drop = on_drop
        self._on_retire = on_retire
        self._report = report
        self.members: Members | None = None
        self._server = SessionServer(self._session, secret, host, port=port)

    async def open(self) -> str:
        """Starts to listen for controllers. Returns the address."""
        return await self._server.open()

    async def close(self) -> None:
        """Ends the sessions."""
        await self._server.close()

    def follow(self, members: Members) -> None:
        """Applies these members, unless the store knows newer ones."""
        if self.members is None or members.version > self.members.version:
            self.members = members
            self._on_members(members)

    async def _session(self, line: Line) -> None:
        answer = await self._shake_hands(line)
        await line.send(encode_control([answer]))
        if isinstance(answer, ControllerRefused):
            log.warning("refused a controller: %s", answer.reason)
            return
        tasks = [
            asyncio.create_task(self._read_all(line)),
            asyncio.create_task(self._send_reports(line)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(ended, Exception):
                    log.warning("the session with the controller broke: %r", ended)

    async def _shake_hands(self, line: Line) -> StoreWelcome | ControllerRefused:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                messages = decode_from_controller(await anext(line))
        except (ProtocolError, StopAsyncIteration, TimeoutError) as error:
            return ControllerRefused(f"no handshake: {error}")
        match messages:
            case [ControllerHello(version=version)] if version == CONTROL_VERSION:
                known = 0 if self.members is None else self.members.version
                return StoreWelcome(CONTROL_VERSION, self._name, known)
            case [ControllerHello(version=version)]:
                return ControllerRefused(f"control version: ours {CONTROL_VERSION}, {version}")
            case _:
                return ControllerRefused("the first frame must be one ControllerHello")

    async def _read_all(self, line: Line) -> None:
        async for frame in line:
            for message in decode_from_controller(frame):
                match message:
                    case Members():
                        self.follow(message)
                    case DropBlocks():
                        log.warning("an operator drops all blocks")
                        self._on_drop()
                    case RetireStore():
                        self._on_retire()

    async def _send_reports(self, line: Line) -> None:
        never = asyncio.get_running_loop().create_future()
        while True:
            reports: list[ToController] = [self._report()]
            await line.send(encode_control(reports))
            await asyncio.wait([never], timeout=REPORT_EVERY_S)
