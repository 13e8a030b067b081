"""Turns the messages of one gateway's session into events for the step thread.

A message without a grammar passes at once. Opening a guide means a compile and a replay of the
answer so far: up to a second of a thread. Neither the step loop nor the session's reader waits for
it. The messages of one sequence stay in order: they wait here behind the message that brings the
sequence's grammar.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

from engine.errors import GrammarError
from engine.grammar.guide import Guides, OpenedGuide
from engine.log_context import REQUEST, request_ids
from engine.messages import (
    Decode,
    GatewayId,
    Generate,
    Hello,
    Prefetch,
    Prefill,
    Role,
    SeqId,
    SetRole,
    StoreHint,
    ToWorker,
)
from engine.worker.events import FromGateway, OfGateway

log = logging.getLogger(__name__)

MAX_OPENING = 1024  # sequences of one gateway whose guides are being opened
MAX_KEPT = 8192  # ids of the latest sequences


class RequestIds:
    """The ids of each sequence's request. One thread records them, any may log."""

    def __init__(self) -> None:
        self._client_ids: dict[SeqId, str] = {}  # for sequences that have one, oldest first

    def record(self, seq_id: SeqId, client_id: str) -> None:
        """Keeps the client's id of a request. If there are too many ids, the oldest are dropped."""
        if not client_id:
            return
        self._client_ids.pop(seq_id, None)
        self._client_ids[seq_id] = client_id
        if len(self._client_ids) > MAX_KEPT:
            del self._client_ids[next(iter(self._client_ids))]

    @contextmanager
    def logged(self, seq_id: SeqId) -> Iterator[None]:
        """Lines that are logged inside have the ids of the sequence's request."""
        own_id = seq_id.partition(".")[0]  # a router adds the number of its attempt
        token = REQUEST.set(request_ids(own_id, self._client_ids.get(seq_id)))
        try:
            yield
        finally:
            REQUEST.reset(token)


class SessionInbox:
    """Handles the messages of one session, on one event loop.

    `put` gets every message as an event, with its guide if it has one. `on_crash` gets bugs.
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
        """`request_ids` gets the ids of each sequence's request."""
        self._gateway_id = gateway_id
        self._guides = guides
        self._executor = executor
        self._put = put
        self._on_crash = on_crash
        self._request_ids = request_ids
        self._possible_roles = possible_roles
        # The messages that wait behind each guide that is being opened.
        self._behind: dict[SeqId, list[OfGateway]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, message: ToWorker) -> None:
        """Passes the message on, now or once its sequence's guide is open."""
        assert not isinstance(message, Hello)
        has_grammar = False
        if isinstance(message, Prefill | Generate | Decode):
            has_grammar = message.sampling.grammar is not None
            self._request_ids.record(message.seq_id, message.client_id)
            with self._request_ids.logged(message.seq_id):
                kind = type(message).__name__.lower()
                log.info("takes a sequence: %s, %d tokens", kind, len(message.token_ids))
        elif isinstance(message, SetRole) and message.role not in self._possible_roles:
            why_not = "workers of that role hold KV in another format"
            log.warning("this worker cannot become a %s worker: %s", message.role, why_not)
        if has_grammar or self._behind:
            self._take_in_order(message)
        else:
            self._put(FromGateway(self._gateway_id, message))

    def _take_in_order(self, message: OfGateway) -> None:
        """Opens the guide of a message, or lets the message wait behind its sequence's guide."""
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
        """Drops waiting messages: the session has ended, and no event of it may follow."""
        for task in self._tasks:
            task.cancel()
        self._behind.clear()

    async def _open(self, message: Prefill | Generate | Decode) -> None:
        loop = asyncio.get_running_loop()
        guide = await loop.run_in_executor(self._executor, _opened, self._guides, message)
        self._put(FromGateway(self._gateway_id, message, guide))
        for later in self._behind.pop(message.seq_id):
            self._take_in_order(later)

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
