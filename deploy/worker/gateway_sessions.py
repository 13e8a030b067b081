"""Sessions of gateways with a worker or a store, and the handling of their messages by a worker.

`post` sends a frame before it returns. A gateway that reads too slowly is cut off. A gateway has
one session at a time. The session's end is reported before the gateway's next session can start.

A `SessionInbox` turns a session's messages into events for the step thread. A message without a
grammar is passed on at once. For a message with a grammar, a guide is opened: the grammar is
compiled and the answer so far is replayed. This takes a thread up to a second. Neither the step
loop nor the session's reader waits for it. The messages of one sequence stay in order: while the
sequence's guide is being opened, its later messages wait here.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from typing import Protocol

from engine.errors import GrammarError, ProtocolError
from engine.grammar.guide import Guides, OpenedGuide
from engine.log_context import REQUEST, request_ids
from engine.messages import (
    PROTOCOL_VERSION,
    Decode,
    GatewayId,
    Generate,
    Hello,
    Prefetch,
    Prefill,
    Refused,
    Role,
    SeqId,
    SetRole,
    StoreHint,
    ToWorker,
    Welcome,
    decode_to_worker,
    encode_frame,
)
from engine.net.sessions import Line, SessionServer
from engine.net.trust import Secret
from engine.worker.events import FromGateway, OfGateway

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0
MAX_UNSENT_BYTES = 16 * 2**20  # maximum of unsent bytes to one gateway; with more, it is cut off
MAX_OPENING = 1024  # maximum number of guides being opened for one gateway
MAX_KEPT = 8192  # maximum number of sequences whose ids are kept


class GatewayListener(Protocol):
    """Handles the messages of one session."""

    def receive(self, message: ToWorker) -> None:
        """Handles a message. `Hello` messages are never passed on."""
        ...

    def close(self) -> None:
        """Called at the session's end. Afterwards the listener must emit no event."""
        ...


class GatewaySessions:
    """The server for gateways, and its open sessions. Every method is called on the event loop."""

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
        """`welcome` is a function that returns the answer to a gateway's hello.

        `port` 0: the system chooses a port.
        """
        self._welcome = welcome
        self._listen = listen
        self._on_lost = on_lost
        self._lines: dict[GatewayId, Line] = {}  # by gateway, until its session's end is reported
        self.refused: Counter[str] = Counter()  # number of refused sessions, by reason
        self._server = SessionServer(
            self._session, secret, host, on_refused=self._count_refused, port=port
        )

    async def open(self) -> str:
        """Starts to listen for gateways. Returns the address."""
        return await self._server.open()

    async def close(self) -> None:
        """Ends all sessions."""
        await self._server.close()

    def post_all(self, frame: bytes) -> None:
        """Sends a frame to every gateway."""
        for gateway_id in list(self._lines):
            self.post(gateway_id, frame)

    def post(self, gateway_id: GatewayId, frame: bytes) -> None:
        """Sends a frame to a gateway. Cuts the gateway off if it reads too slowly."""
        line = self._lines.get(gateway_id)
        if line is None:
            return  # the gateway has left: its sequences are being cancelled
        if line.num_unsent_bytes > MAX_UNSENT_BYTES:
            log.warning("gateway %s reads too slowly and is cut off", gateway_id)
            line.fail(ConnectionError("it reads too slowly"))
            return
        with suppress(ConnectionError):  # the gateway's session is ending
            line.post(frame)

    def _count_refused(self, reason: str) -> None:
        self.refused[f"refused_sessions:{reason}"] += 1

    async def _session(self, line: Line) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                messages = decode_to_worker(await line.receive() or b"")
        except (ProtocolError, TimeoutError) as error:
            log.warning("a gateway was refused: %s", error)
            return
        gateway_id = self._known(messages)
        welcome = gateway_id if isinstance(gateway_id, Refused) else self._welcome()
        line.post(encode_frame([welcome]))  # sent before any role change
        if isinstance(gateway_id, Refused) or isinstance(welcome, Refused):
            log.warning("a gateway was refused: %s", welcome)
            return
        self._lines[gateway_id] = line
        listener = self._listen(gateway_id)
        try:
            while (frame := await line.receive()) is not None:
                for message in decode_to_worker(frame):
                    if not isinstance(message, Hello):
                        listener.receive(message)
        except ProtocolError as error:
            log.warning("cut off gateway %s: %s", gateway_id, error)
        finally:
            listener.close()
            self._on_lost(gateway_id)  # must be reported before this gateway's next session
            del self._lines[gateway_id]
            log.info("gateway %s is gone", gateway_id)

    def _known(self, messages: Sequence[ToWorker]) -> GatewayId | Refused:
        """Returns the id of the gateway that sent the hello, or the reason to refuse it."""
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


class RequestIds:
    """The request ids of each sequence, for log lines.

    One thread records the ids; any thread may log.
    """

    def __init__(self) -> None:
        self._client_ids: dict[SeqId, str] = {}  # client's ids of requests, oldest first

    @contextmanager
    def logged(self, seq_id: SeqId, client_id: str = "") -> Iterator[None]:
        """Adds the ids of the sequence's request to all lines that are logged inside the block.

        Keeps `client_id`, if given, for later lines. If there are too many ids, the oldest are
        dropped.
        """
        if client_id:
            self._client_ids.pop(seq_id, None)
            self._client_ids[seq_id] = client_id
            if len(self._client_ids) > MAX_KEPT:
                del self._client_ids[next(iter(self._client_ids))]
        own_id = seq_id.partition(".")[0]  # the router appends the number of the attempt
        token = REQUEST.set(request_ids(own_id, self._client_ids.get(seq_id)))
        try:
            yield
        finally:
            REQUEST.reset(token)


class SessionInbox:
    """Handles the messages of one session, on one event loop.

    `put` is called with each message as an event, together with the message's guide, if any.
    `on_crash` is called with an unexpected error.
    """

    def __init__(  # noqa: PLR0913 - all that a session reaches
        self,
        gateway_id: GatewayId,
        guides: Guides,
        *,
        executor: Executor,
        put: Callable[[FromGateway], None],
        on_crash: Callable[[BaseException], None],
        request_ids: RequestIds,
        possible_roles: Collection[Role],
    ) -> None:
        """The ids of each sequence's request are added to `request_ids`."""
        self._gateway_id = gateway_id
        self._guides = guides
        self._executor = executor
        self._put = put
        self._on_crash = on_crash
        self._request_ids = request_ids
        self._possible_roles = possible_roles
        # For each guide that is being opened: the messages that wait for this guide.
        self._behind: dict[SeqId, list[OfGateway]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def receive(self, message: ToWorker) -> None:
        """Passes a message on: now, or once its sequence's guide is open."""
        assert not isinstance(message, Hello)
        has_grammar = False
        if isinstance(message, Prefill | Generate | Decode):
            has_grammar = message.sampling.grammar is not None
            with self._request_ids.logged(message.seq_id, message.client_id):
                kind = type(message).__name__.lower()
                log.info("takes a sequence: %s, %d tokens", kind, len(message.token_ids))
        elif isinstance(message, SetRole) and message.role not in self._possible_roles:
            why_not = "workers of that role hold KV in another format"
            log.warning("this worker cannot become a %s worker: %s", message.role, why_not)
        if has_grammar or self._behind:
            self._pass_in_order(message)
        else:
            self._put(FromGateway(self._gateway_id, message))

    def _pass_in_order(self, message: OfGateway) -> None:
        """Passes a message on at once, or starts to open its guide, or queues it behind its
        sequence's guide.
        """
        if (
            not isinstance(message, SetRole | Prefetch | StoreHint)
            and message.seq_id in self._behind
        ):
            self._behind[message.seq_id].append(message)
        elif not isinstance(message, Prefill | Generate | Decode) or not message.sampling.grammar:
            self._put(FromGateway(self._gateway_id, message))
        elif len(self._behind) >= MAX_OPENING:
            fault = GrammarError(f"more than {MAX_OPENING} grammars wait to be compiled")
            self._put(FromGateway(self._gateway_id, message, fault))
        else:
            self._behind[message.seq_id] = []
            task = asyncio.create_task(self._open(message))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def close(self) -> None:
        """Drops all waiting messages.

        The session has ended, so no further event of the session may be emitted.
        """
        for task in self._tasks:
            task.cancel()
        self._behind.clear()

    async def _open(self, message: Prefill | Generate | Decode) -> None:
        loop = asyncio.get_running_loop()
        guide = await loop.run_in_executor(self._executor, _opened, self._guides, message)
        self._put(FromGateway(self._gateway_id, message, guide))
        for later in self._behind.pop(message.seq_id):
            self._pass_in_order(later)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_crash(error)


def _opened(guides: Guides, message: Prefill | Generate | Decode) -> OpenedGuide:
    grammar = message.sampling.grammar
    assert grammar is not None
    try:
        return guides.open(grammar, message.token_ids[message.limits.prompt_len :], message.salt)
    except GrammarError as error:
        return error
