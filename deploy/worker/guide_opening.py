"""Opens the grammar guides of one gateway's sequences beside its session.

Opening a guide means a compile and a replay of the answer so far: up to a second of a thread.
Neither the step loop nor the session's reader waits for it; messages of other sequences pass. The
messages of one sequence stay in order: they wait here behind the one that brings its grammar.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor

from engine.errors import GrammarError
from engine.grammar.guide import Guides, OpenedGuide
from engine.messages import (
    Decode,
    GatewayId,
    Generate,
    Prefetch,
    Prefill,
    SeqId,
    SetRole,
    StoreHint,
)
from engine.worker.events import FromGateway, OfGateway

MAX_OPENING = 1024  # sequences of one gateway whose guides are being opened


class GuideOpening:
    """Turns messages of one session into events. `take` runs on one event loop.

    `put` gets every message as an event, with its guide if it has one. `on_crash` gets bugs.
    """

    def __init__(
        self,
        gateway_id: GatewayId,
        guides: Guides,
        *,
        executor: Executor,
        put: Callable[[FromGateway], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._gateway_id = gateway_id
        self._guides = guides
        self._executor = executor
        self._put = put
        self._on_crash = on_crash
        self._behind: dict[
            SeqId, list[OfGateway]
        ] = {}  # messages waiting behind each guide that is being opened
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, message: OfGateway) -> None:
        """Passes the message on, now or once its sequence's guide is open."""
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
        """Forgets waiting messages: the session is over, and no event of it may follow."""
        for task in self._tasks:
            task.cancel()
        self._behind.clear()

    async def _open(self, message: Prefill | Generate | Decode) -> None:
        loop = asyncio.get_running_loop()
        guide = await loop.run_in_executor(self._executor, _opened, self._guides, message)
        self._put(FromGateway(self._gateway_id, message, guide))
        for later in self._behind.pop(message.seq_id):
            self.take(later)

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
