"""The protocol of the controller's sessions. There is one session with each worker, gateway and
store.

A link redials until its task is cancelled, so the session is restored after a network failure. The
controller is always the client, so peers need not know the controller's address.
"""

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Callable
from itertools import count
from typing import Any, Generic, Protocol, TypeVar

from deploy.pools.events import (
    Connected,
    Disconnected,
    GatewaySeen,
    GatewaySilent,
    LoadSeen,
    PoolEvent,
    RoleSeen,
)
from engine.clock import Clock
from engine.control import (
    CONTROL_VERSION,
    ControllerHello,
    ControllerRefused,
    GatewayReport,
    GatewayWelcome,
    ListRequests,
    Members,
    RequestList,
    StoreReport,
    StoreWelcome,
    ToGateway,
    decode_from_gateway,
    encode_control,
)
from engine.errors import ProtocolError
from engine.messages import (
    PROTOCOL_VERSION,
    GatewayId,
    Hello,
    LoadReport,
    Refused,
    Role,
    RoleChanged,
    SetRole,
    Welcome,
    WorkerId,
    decode_to_gateway,
    encode_frame,
)
from engine.net.sessions import SessionClient
from engine.net.trust import Secret

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 2.0
RETRY_EVERY_S = 1.0
REPORT_STALE_S = 5.0  # gateways report once a second
SILENCE_S = 5.0  # a worker or store that is silent for this long counts as lost
GATEWAY_SILENCE_S = 2.0  # shorter, because clients wait, and a lost gateway moves no sequence
FIRST_REPORT_S = 3.0  # longest time from a gateway's or store's start to its first report

Report = TypeVar("Report", GatewayReport, StoreReport)


class _Session(Protocol):
    """One session's protocol with one kind of peer."""

    silence_s: float = SILENCE_S

    async def shake_hands(self, client: SessionClient) -> None:
        """Exchanges the first messages of the session. Raises ProtocolError, ConnectionError."""
        ...

    @abstractmethod
    def take(self, frame: bytes) -> None:
        """Handles a frame that the peer sent. Raises ProtocolError."""
        ...

    @abstractmethod
    def lost(self, reason: str) -> None:
        """Handles the end of the session."""
        ...


async def talk(address: str, secret: Secret, session: _Session) -> None:
    """Dials a peer and runs one session.

    Returns when the session ends or the peer cannot be reached.
    """
    client = SessionClient(address, secret, silence_s=session.silence_s)
    try:
        await client.open()
        await _run(client, session)
    except (ConnectionError, TimeoutError, ProtocolError) as error:
        log.info("%s: %s; trying again", address, str(error) or type(error).__name__)
    finally:
        await client.close()


async def _run(client: SessionClient, session: _Session) -> None:
    async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
        await session.shake_hands(client)
    reason = "the session ended"
    try:
        while (frame := await client.receive()) is not None:
            session.take(frame)
    except (ConnectionError, ProtocolError) as error:
        reason = str(error)
        raise
    finally:
        session.lost(reason)


class WorkerLink(_Session):
    """Turns a worker's messages into events for the pool machine."""

    def __init__(
        self,
        worker_id: WorkerId,
        address: str,
        *,
        controller_id: GatewayId,
        on_event: Callable[[PoolEvent], None],
    ) -> None:
        self._worker_id = worker_id
        self._address = address
        self._controller_id = controller_id
        self._on_event = on_event
        self._client: SessionClient | None = None
        self.info: Welcome | None = None  # the worker's answer in the latest handshake

    def set_role(self, role: Role) -> None:
        """Sends the worker a role.

        Without a session, nothing is sent: the machine repeats the role in the next session.
        """
        if self._client is not None:
            try:
                self._client.post(encode_frame([SetRole(role)]))
            except ConnectionError as error:
                log.info("%s did not get its role: %s", self._worker_id, error)

    async def shake_hands(self, client: SessionClient) -> None:
        """Checks that the worker that answers is the expected one."""
        await client.send(encode_frame([Hello(PROTOCOL_VERSION, self._controller_id)]))
        frame = await client.receive()
        match decode_to_gateway(frame) if frame is not None else []:
            case [Welcome() as info] if info.worker_id == self._worker_id:
                self._client, self.info = client, info
                kv_format, kernels = info.layout.kv_format, info.kernels
                self._on_event(
                    Connected(info.worker_id, self._address, info.role, kv_format, kernels)
                )
            case [Refused(reason)]:
                raise ProtocolError(f"refused the controller: {reason}")
            case other:
                raise ProtocolError(f"answered with {[type(each).__name__ for each in other]}")

    def take(self, frame: bytes) -> None:
        """Handles the worker's reports of its load and its role."""
        for message in decode_to_gateway(frame):
            match message:
                case LoadReport():
                    self._on_event(LoadSeen(self._worker_id, self._address, message))
                case RoleChanged(role):
                    self._on_event(RoleSeen(self._worker_id, self._address, role))

    def lost(self, reason: str) -> None:
        """Reports the end of the session."""
        self._client = None
        self._on_event(Disconnected(self._worker_id, self._address, reason))


class _ReportingLink(_Session, Generic[Report]):
    """A link to a gateway or a store, which reports once a second and follows the members."""

    greeting: type[GatewayWelcome | StoreWelcome]  # the peer's answer to `ControllerHello`

    def __init__(self, name: str, clock: Clock) -> None:
        self._name = name
        self._clock = clock
        self._client: SessionClient | None = None
        self.report: Report | None = None  # the latest report in this session
        self._reported_s = 0.0
        self._due_s = clock.now_s() + FIRST_REPORT_S  # time by which the next report must arrive

    @property
    def is_open(self) -> bool:
        """True if there is a session."""
        return self._client is not None

    @property
    def is_late(self) -> bool:
        """True if a report is overdue."""
        return self.fresh_report is None and self._clock.now_s() >= self._due_s

    @property
    def fresh_report(self) -> Report | None:
        """Returns the latest report. None if the report is too old, or if there is no session."""
        is_old = self._clock.now_s() - self._reported_s > REPORT_STALE_S
        return None if is_old else self.report

    def send(self, message: ToGateway) -> bool:
        """Sends a message.

        Returns False if there is no session; the next session sends the members again.
        """
        if self._client is None:
            return False
        try:
            self._client.post(encode_control([message]))
        except ConnectionError as error:
            log.info("%s did not get a message: %s", self._name, error)
            return False
        return True

    async def shake_hands(self, client: SessionClient) -> None:
        """Sends a hello, and receives the members that the peer knows."""
        await client.send(encode_control([ControllerHello(CONTROL_VERSION)]))
        frame = await client.receive()
        match decode_from_gateway(frame) if frame is not None else []:
            case [welcome] if (
                isinstance(welcome, self.greeting) and welcome.version == CONTROL_VERSION
            ):
                self._client = client
                self.welcomed(welcome)
            case [ControllerRefused(reason)]:
                raise ProtocolError(f"refused the controller: {reason}")
            case other:
                raise ProtocolError(f"answered with {other!r}"[:200])

    @abstractmethod
    def welcomed(self, welcome: Any) -> None:
        """Handles the peer's answer in the handshake."""
        ...

    def lost(self, reason: str) -> None:
        """Drops the report.

        If the peer has died, the launcher or the store's keeper restarts it.
        """
        log.info("the session with %s is over: %s", self._name, reason)
        self._client = None
        self.report = None
        self._due_s = self._clock.now_s()

    def keep(self, report: Report) -> None:
        """Keeps the peer's report as the latest one."""
        self.report, self._reported_s = report, self._clock.now_s()


class StoreLink(_ReportingLink[StoreReport]):
    """Sends members and orders to a store, and keeps the store's latest report."""

    greeting = StoreWelcome

    def __init__(self, name: str, *, clock: Clock, members: Callable[[], Members | None]) -> None:
        """`members` is a function that returns the present members."""
        super().__init__(name, clock)
        self._members = members
        self.retired = asyncio.Event()  # set once the store has reported that it is retired

    def welcomed(self, welcome: Any) -> None:
        """Sends the present members if the store knows only older members."""
        members = self._members()
        if members is not None and members.version > welcome.members_version:
            self.send(members)

    def take(self, frame: bytes) -> None:
        """Handles a report."""
        for message in decode_from_gateway(frame):
            if isinstance(message, StoreReport):
                self.keep(message)
                if message.is_retired:
                    self.retired.set()


class GatewayLink(_ReportingLink[GatewayReport]):
    """Sends members to a gateway, and keeps the gateway's latest report."""

    greeting = GatewayWelcome
    silence_s = GATEWAY_SILENCE_S

    def __init__(
        self,
        name: str,
        *,
        clock: Clock,
        on_welcome: Callable[[], None],
        on_event: Callable[[PoolEvent], None],
    ) -> None:
        """`on_welcome` is called after each handshake."""
        super().__init__(name, clock)
        self._on_welcome = on_welcome
        self._on_event = on_event
        self._questions = count()
        self._answers: dict[int, asyncio.Future[RequestList]] = {}
        self.heard: GatewayWelcome | None = None  # the gateway's answer in the latest handshake

    async def requests(self) -> RequestList | None:
        """Queries the requests that the gateway serves.

        Returns None if the gateway does not answer in time.
        """
        question = next(self._questions)
        self._answers[question] = answer = asyncio.get_running_loop().create_future()
        try:
            self.send(ListRequests(question))
            return await asyncio.wait_for(answer, ANSWER_TIMEOUT_S)
        except TimeoutError:
            return None
        finally:
            del self._answers[question]

    def welcomed(self, welcome: Any) -> None:
        """Keeps the gateway's answer, which has the members that the gateway knows."""
        self.heard = welcome
        self._on_welcome()

    def welcome(self, members: Members) -> None:
        """Sends the present members if the gateway knows only older members."""
        if members.version and self.heard is not None:
            known = self.heard.members
            if known is None or known.version < members.version:
                self.send(members)

    def take(self, frame: bytes) -> None:
        """Handles a report, or the answer to `requests`."""
        for message in decode_from_gateway(frame):
            match message:
                case GatewayReport():
                    self.keep(message)
                    self._on_event(GatewaySeen(self._name, message))
                case RequestList(question):
                    answer = self._answers.get(question)
                    if answer is not None and not answer.done():
                        answer.set_result(message)

    def lost(self, reason: str) -> None:
        """Drops the report. The members are sent again after the next handshake."""
        super().lost(reason)
        self._on_event(GatewaySeen(self._name, None))
        self._on_event(GatewaySilent(self._name, reason))
