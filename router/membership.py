"""A gateway's side of the controller of the pools: who the workers are, and what it serves.

The controller dials in, and may be another one than before, or none for a while: the last members
that were told stay in force. Only members of a higher version count, so that what an earlier
controller says late changes nothing.
"""

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator
from operator import attrgetter

from engine.clock import Clock
from engine.control import (
    CONTROL_VERSION,
    ControllerHello,
    ControllerRefused,
    GatewayReport,
    GatewayWelcome,
    ListRequests,
    Members,
    PlannerMode,
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
from engine.rpc import Send, SessionServer
from router.demand import Observer
from router.flight import Flight
from router.service import Router

log = logging.getLogger(__name__)

REPORT_EVERY_S = 1.0
HANDSHAKE_TIMEOUT_S = 10.0
MAX_UNSENT_MESSAGES = 256  # a controller that reads more slowly is cut off


class ControlServer:
    """Takes members from controllers and tells them what goes on."""

    def __init__(
        self, router: Router, *, token: str, clock: Clock, host: str = "127.0.0.1"
    ) -> None:
        self._router = router
        self._token = token
        self._clock = clock
        self._observer = Observer(router.machine.demand)
        self._server = SessionServer(self._session, host)
        self.members: Members | None = None

    async def open(self) -> str:
        """Starts to listen; the address."""
        return await self._server.open()

    async def close(self) -> None:
        """Ends the sessions."""
        await self._server.close()

    async def _session(self, frames: AsyncIterator[bytes], send: Send) -> None:
        if not await self._shake_hands(frames, send):
            return
        outbox: asyncio.Queue[ToController] = asyncio.Queue(MAX_UNSENT_MESSAGES)
        sender = asyncio.create_task(self._send_all(outbox, send))
        reader = asyncio.create_task(self._read_all(frames, outbox))
        try:
            await asyncio.wait([sender, reader], return_when=asyncio.FIRST_COMPLETED)
        finally:
            sender.cancel()
            reader.cancel()
            for ended in await asyncio.gather(sender, reader, return_exceptions=True):
                if isinstance(ended, Exception):
                    log.warning("the session with the controller broke: %r", ended)
            log.info("the controller is gone")

    async def _shake_hands(self, frames: AsyncIterator[bytes], send: Send) -> bool:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                messages = decode_from_controller(await anext(frames))
        except (ProtocolError, StopAsyncIteration, TimeoutError) as error:
            log.warning("refused a controller: %s", error)
            return False
        match messages:
            case [ControllerHello(version=version)] if version != CONTROL_VERSION:
                reason = f"control version differs: ours {CONTROL_VERSION}, yours {version}"
            case [ControllerHello(token=token)] if not hmac.compare_digest(
                token.encode(), self._token.encode()
            ):
                reason = "wrong internal token"
            case [ControllerHello()]:
                welcome = GatewayWelcome(CONTROL_VERSION, self._router.gateway_id, self.members)
                await send(encode_control([welcome]))
                return True
            case _:
                reason = "the first frame must be one ControllerHello"
        log.warning("refused a controller: %s", reason)
        await send(encode_control([ControllerRefused(reason)]))
        return False

    async def _read_all(
        self, frames: AsyncIterator[bytes], outbox: "asyncio.Queue[ToController]"
    ) -> None:
        async for frame in frames:
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
            case ListRequests(question, limit):
                return self._list(question, limit)
        return None

    def _follow(self, members: Members) -> None:
        if self.members is not None and members.version <= self.members.version:
            log.warning(
                "members of version %d came after version %d", members.version, self.members.version
            )
            return
        self._router.follow([member.address for member in members.workers])
        self.members = members

    async def _send_all(self, outbox: "asyncio.Queue[ToController]", send: Send) -> None:
        """Answers as they come, and a report once a second."""
        while True:
            try:
                async with asyncio.timeout(REPORT_EVERY_S):
                    message = await outbox.get()
            except TimeoutError:
                message = self._report()
            await send(encode_control([message]))

    def _report(self) -> GatewayReport:
        router = self._router
        return GatewayReport(
            missing=router.readiness(),
            members_version=0 if self.members is None else self.members.version,
            num_workers=len(router.workers()),
            num_requests=router.machine.num_flights,
            num_waiting=router.queue_len(),
            queued_s=router.queued_s(),
            seen=self._seen(),
        )

    def _seen(self) -> Observation | None:
        if self.members is None or self.members.intent.planner is PlannerMode.OFF:
            self._observer.rest()
            return None
        return self._observer.latest(self._clock.now_s())

    def _list(self, question: int, limit: int) -> RequestList:
        flights = self._router.machine.state.flights.values()
        oldest = sorted(flights, key=attrgetter("stamps.arrived_s"))[: max(limit, 0)]
        now_s = self._clock.now_s()
        return RequestList(question, len(flights), [_info(flight, now_s) for flight in oldest])


def _info(flight: Flight, now_s: float) -> RequestInfo:
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
    )


def _state(flight: Flight) -> RequestState:
    attempt = flight.attempt
    if attempt is None:
        return RequestState.WAITING
    if not attempt.prefilled:
        return RequestState.PREFILLING
    return RequestState.DECODING if attempt.kv_ready else RequestState.PULLING
