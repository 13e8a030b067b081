"""The gateway's connection with the controller: members to serve with, and reports to send.

The controller connects to the gateway. While there is no controller, the last members are used.
Only members with a higher number are accepted, so a late message of an earlier controller is
ignored.
"""

import asyncio
import logging
import secrets

from engine.clock import Clock
from engine.config import PlannerMode
from engine.control import (
    CONTROL_VERSION,
    ClusterReport,
    ControllerHello,
    ControllerRefused,
    ControllerReport,
    GatewayReport,
    GatewayWelcome,
    ListRequests,
    Members,
    RequestInfo,
    RequestList,
    RequestState,
    ToController,
    ToGateway,
    decode_from_controller,
    encode_control,
)
from engine.demand import Observation
from engine.errors import ProtocolError
from engine.messages import GatewayId
from engine.net.sessions import Line, SessionServer
from engine.net.trust import Secret
from router.gateway.metrics.pools import PoolBoard
from router.machine.flight import Flight
from router.service import Router
from router.version_routers import VersionRouters

log = logging.getLogger(__name__)

REPORT_EVERY_S = 1.0
HANDSHAKE_TIMEOUT_S = 10.0
MAX_UNSENT_MESSAGES = 256  # limit at which a controller that reads too slowly is disconnected


class ControlServer:
    """Receives members from controllers and sends them reports."""

    def __init__(
        self,
        routers: VersionRouters,
        *,
        secret: Secret,
        clock: Clock,
        members: Members | None = None,
        board: PoolBoard | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        """`members` are the gateway's first members. `board` also gets all later members."""
        self._routers = routers
        self.gateway_id = GatewayId(f"gateway-{secrets.token_hex(6)}")
        self._clock = clock
        self._observed: dict[str, Router] = {}  # routers whose demand is observed, by line
        self._server = SessionServer(self._session, secret, host, on_refused=self._count_refused)
        self._board = board or PoolBoard(routers.versions, clock)
        self.members = self._board.members = members

    async def open(self) -> str:
        """Starts to listen and returns the address."""
        return await self._server.open()

    async def close(self) -> None:
        """Ends the sessions with controllers."""
        await self._server.close()

    def _count_refused(self, reason: str) -> None:
        self._routers.versions.count("refused controller", reason)

    async def _session(self, line: Line) -> None:
        if not await self._shake_hands(line):
            return
        outbox: asyncio.Queue[ToController] = asyncio.Queue(MAX_UNSENT_MESSAGES)
        sender = asyncio.create_task(self._send_all(outbox, line))
        reader = asyncio.create_task(self._read_all(line, outbox))
        try:
            await asyncio.wait([sender, reader], return_when=asyncio.FIRST_COMPLETED)
        finally:
            sender.cancel()
            reader.cancel()
            for ended in await asyncio.gather(sender, reader, return_exceptions=True):
                if isinstance(ended, Exception):
                    log.warning("the session with the controller broke: %r", ended)
            log.info("the controller is gone")

    async def _shake_hands(self, line: Line) -> bool:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                messages = decode_from_controller(await anext(line))
        except (ProtocolError, StopAsyncIteration, TimeoutError) as error:
            log.warning("refused a controller: %s", error)
            return False
        match messages:
            case [ControllerHello(version=version)] if version != CONTROL_VERSION:
                reason = f"control version differs: ours {CONTROL_VERSION}, yours {version}"
            case [ControllerHello()]:
                welcome = GatewayWelcome(CONTROL_VERSION, self.gateway_id, self.members)
                await line.send(encode_control([welcome]))
                return True
            case _:
                reason = "the first frame must be one ControllerHello"
        log.warning("refused a controller: %s", reason)
        await line.send(encode_control([ControllerRefused(reason)]))
        return False

    async def _read_all(self, line: Line, outbox: "asyncio.Queue[ToController]") -> None:
        async for frame in line:
            try:
                messages = decode_from_controller(frame)
            except ProtocolError as error:
                log.warning("cut off the controller: %s", error)
                return
            for message in messages:
                answer = self._take(message)
                if answer is None:
                    continue
                try:
                    outbox.put_nowait(answer)
                except asyncio.QueueFull:
                    log.warning("the controller reads too slowly and is cut off")
                    return

    def _take(self, message: ToGateway) -> ToController | None:
        match message:
            case Members():
                self._follow(message)
                return self._report()
            case ControllerReport():
                self._board.take(message)
            case ListRequests(question, limit):
                return self._list(question, limit)
            case ClusterReport():
                self._board.cluster = message
        return None

    def _follow(self, members: Members) -> None:
        if self.members is not None and members.version <= self.members.version:
            log.warning(
                "members of version %d came after version %d", members.version, self.members.version
            )
            return
        self._routers.follow(members)
        self.members = self._board.members = members

    async def _send_all(self, outbox: "asyncio.Queue[ToController]", line: Line) -> None:
        """Sends answers when they are ready, and a report every second."""
        due_s = self._clock.now_s() + REPORT_EVERY_S
        while True:
            message = await _next_of(outbox, due_s - self._clock.now_s())
            if message is None:
                message, due_s = self._report(), self._clock.now_s() + REPORT_EVERY_S
            await line.send(encode_control([message]))

    def _report(self) -> GatewayReport:
        status = self._routers.versions
        return GatewayReport(
            missing=status.readiness(),
            members_version=0 if self.members is None else self.members.version,
            num_workers=len(status.workers()),
            num_requests=sum(r.machine.num_flights for r in self._routers.routers().values()),
            num_waiting=status.queue_len(),
            queued_s=status.queued_s(),
            versions=self._routers.reports(),
            seen=self._seen(),
        )

    def _seen(self) -> dict[str, Observation]:
        """Returns the demand for each line's current version; empty while no planner is active."""
        intent = None if self.members is None else self.members.intent
        found: dict[str, Observation] = {}
        before, self._observed = self._observed, {}
        if intent is not None and intent.planner is not PlannerMode.OFF:
            routers, now_s = self._routers.routers(), self._clock.now_s()
            for line in dict.fromkeys(version.line for version in intent.versions):
                router = routers.get(intent.of_line(line)[0].name)
                if router is None:
                    continue
                self._observed[line] = router
                if (latest := router.machine.demand.latest(now_s)) is not None:
                    found[line] = latest
        for line, router in before.items():
            if self._observed.get(line) is not router:
                router.machine.demand.rest()
        return found

    def _list(self, question: int, limit: int) -> RequestList:
        flights = [
            (version, flight)
            for version, router in self._routers.routers().items()
            for flight in router.machine.state.flights.values()
        ]
        flights.sort(key=lambda each: each[1].stamps.arrived_s)
        now_s = self._clock.now_s()
        oldest = [_info(version, flight, now_s) for version, flight in flights[: max(limit, 0)]]
        return RequestList(question, len(flights), oldest)


async def _next_of(outbox: "asyncio.Queue[ToController]", within_s: float) -> ToController | None:
    """Returns the next message; None if none comes within `within_s`."""
    if within_s <= 0:
        return None
    try:
        async with asyncio.timeout(within_s):
            return await outbox.get()
    except TimeoutError:
        return None


def _info(version: str, flight: Flight, now_s: float) -> RequestInfo:
    attempt = flight.attempt
    return RequestInfo(
        request_id=flight.request.request_id,
        state=_state(flight),
        age_s=now_s - flight.stamps.arrived_s,
        prompt_len=len(flight.request.token_ids),
        answer_len=len(flight.tokens),
        prefill=None if attempt is None else attempt.prefill,
        decode=None if attempt is None else attempt.decode,
        num_attempts=flight.num_attempts,
        version=version,
    )


def _state(flight: Flight) -> RequestState:
    attempt = flight.attempt
    if attempt is None:
        return RequestState.WAITING
    if attempt.prefilled_s is None:
        return RequestState.PREFILLING
    return RequestState.DECODING if attempt.kv_ready_s is not None else RequestState.PULLING
