"""An endpoint that answers a prompt: chat completions or completions.

Decides what an HTTP request becomes and how its answer is sent. The router decides where and when
it runs. The life of one call:

1. The body is read, within bounds of size and time. From now on a watcher waits for the client to
   leave. When the client leaves, everything that runs for the call is cancelled and awaited.
2. The body becomes one `Request` or more: checked, templated, tokenised, in a thread if it is long.
   A grammar is compiled in a process of its own, which decides whether workers can follow it.
3. The router's updates become text, and text becomes a response. The response's head waits for the
   first token. Several choices are several requests to the router, with updates in any order.
   If one of them fails, the answer fails.
4. The router's iterator is closed at the end, at a stop string, or when the client has left. That
   cancels the request on the workers.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from engine.clock import Clock, unix_time_s
from engine.errors import InvalidRequest
from engine.grammar.child import Vocabulary
from engine.messages import RequestId
from router.access.guard import tenant_of
from router.access.limits import KeyAccounts, KeyUse
from router.edge.extension import Caller, caller_of, pipe_of
from router.edge.responses import send_invalid
from router.gateway.answers.choice import AnswerChoice
from router.gateway.answers.dialects import Dialect
from router.gateway.answers.following import follow
from router.gateway.answers.stream import StreamedAnswer
from router.gateway.answers.whole import WholeAnswer
from router.gateway.answers.writing import DECISION_HEADER, AnswerWriter, Heading, ending_of
from router.gateway.metrics.meters import GatewayMetrics, RequestMeter
from router.gateway.requests.calls import (
    ApiCall,
    CheckedCall,
    ClientLeft,
    GatewaySettings,
    check_size,
    parse,
    read_body,
)
from router.gateway.requests.grammar_checker import Asker, GrammarCheck, check_structure
from router.gateway.requests.openai_schema import Body
from router.gateway.versions import AFFINITY_HEADER, VERSION_HEADER, Versions
from router.inbox.lanes import Lanes
from router.text.tokenizer import TextModel
from router.text.tool_calls import ToolCallParser

LONG_BODY_BYTES = 4096  # takes about a millisecond to encode; a thread costs a tenth of that
TIMELINE_HEADER = "x-baton-timeline"


@dataclass(frozen=True, slots=True)
class GatewayParts:
    """The parts of a gateway that both answer endpoints use."""

    versions: Versions
    settings: GatewaySettings
    clock: Clock
    rng: random.Random
    metrics: GatewayMetrics
    grammars: GrammarCheck
    accounts: KeyAccounts
    lanes: Lanes


class AnswerEndpoint:
    """One endpoint, as an ASGI application."""

    def __init__(self, parts: GatewayParts, dialect: Dialect, body_type: type[Body]) -> None:
        self._parts = parts
        self._dialect = dialect
        self._body_type = body_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        settings = self._parts.settings
        with self._parts.metrics.request() as meter:
            caller = caller_of(scope)
            try:
                body = None if caller is None else caller.take_body()
                if body is None:
                    body = await read_body(receive, settings)
                check_size(len(body), settings)
            except InvalidRequest as error:
                meter.refuse()
                await send_invalid(send, error)
                return
            except ClientLeft:
                return
            if caller is not None:
                with _UntilCallerLeaves(caller):
                    await self._answer(body, scope, meter, send)
                return
            async with _until_client_leaves(receive):
                await self._answer(body, scope, meter, send)

    async def _answer(self, data: bytes, scope: Scope, meter: RequestMeter, send: Send) -> None:
        parts, tenant = self._parts, tenant_of(scope)
        received_s = parts.clock.now_s()
        use: KeyUse | None = None
        try:
            try:
                use = parts.accounts.begin(tenant.name, tenant.limits, received_s)
                call = await self._checked(data, received_s, scope)
                while not parts.versions.takes(call.served):  # the version began to leave meanwhile
                    call = await self._checked(data, received_s, scope)
                use.hold_tokens(call.most_tokens, received_s)
            except InvalidRequest as error:
                meter.refuse()
                await send_invalid(send, error)
                return
            meter.accept(received_s, call.prompt_len, call.served.name)
            with parts.versions.serving(call.served):
                await self._serve(call, scope, meter, send, use)
        finally:
            if use is not None:
                use.end(parts.clock.now_s())

    async def _serve(
        self, call: CheckedCall, scope: Scope, meter: RequestMeter, send: Send, use: KeyUse
    ) -> None:
        parts = self._parts
        choices = [
            AnswerChoice(
                index,
                call,
                parser=ToolCallParser(parts.rng) if call.structure.calls else None,
                meter=meter.choice(),
            )
            for index in range(len(call.requests))
        ]
        writer = self._writer(call, choices[0], scope, send, use)
        try:
            last = await follow(call.served.port, parts.clock, choices, writer)
            outcome = last.outcome
            assert outcome is not None
            meter.end(outcome, choices[last.choice].last_s)
            if not last.is_empty or last.finish is not None:
                await writer.write(last)
            await writer.end(ending_of(choices, outcome, call.num_shown))
        finally:
            use.num_used = call.prompt_len + sum(choice.num_tokens for choice in choices)

    async def _checked(self, data: bytes, received_s: float, scope: Scope) -> CheckedCall:
        parts = self._parts
        rng = parts.rng
        tenant, headers = tenant_of(scope), Headers(scope=scope)
        call = ApiCall(
            data,
            RequestId(f"{self._dialect.id_prefix}{rng.getrandbits(128):032x}"),
            rng.getrandbits(64),
            received_s,
            tenant=tenant,
            version=headers.get(VERSION_HEADER),
            affinity=headers.get(AFFINITY_HEADER),
            # Both reveal the load of other tenants.
            timeline=tenant.may_debug and headers.get(TIMELINE_HEADER) == "1",
            decision=tenant.may_debug and headers.get(DECISION_HEADER) == "1",
        )
        parsed = partial(parse, call, self._body_type, parts.versions, parts.settings)
        if len(data) < LONG_BODY_BYTES:
            checked = parsed()
        else:
            checked = await parts.lanes.run(tenant.name, len(data), parsed)
        if checked.structure.grammar is not None:
            vocabulary = _vocabulary_of(checked.served.text)
            asker = Asker(tenant.name, checked.first.salt)
            await check_structure(parts.grammars, checked.structure, vocabulary, asker)
        return checked

    def _writer(
        self, call: CheckedCall, first: AnswerChoice, scope: Scope, send: Send, use: KeyUse
    ) -> AnswerWriter:
        heading = Heading(
            dialect=self._dialect,
            call=call,
            created=unix_time_s(),
            decision=lambda: first.decision,
            limit_headers=lambda: use.headers(call.first.received_s),
        )
        if call.stream:
            return StreamedAnswer(heading, send, pipe_of(scope))
        return WholeAnswer(heading, send)


def _vocabulary_of(text: TextModel) -> Vocabulary | None:
    if text.file is None:
        return None
    return Vocabulary(str(text.file), text.vocab_size, text.eos_token_ids)


@asynccontextmanager
async def _until_client_leaves(receive: Receive) -> AsyncIterator[None]:
    """Cancels what runs inside, and waits for it, as soon as the client has left."""
    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(_wait_until_gone(receive))
            yield
            watcher.cancel()
    except* ClientLeft:
        pass


class _UntilCallerLeaves:
    """Cancels what runs inside, on a server that calls back when the client has left."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._has_left = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        if not self._caller.watch(self._leave):
            self._leave()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> bool:
        self._caller.watch(None)
        if self._has_left:
            self._task.uncancel()
        return self._has_left and isinstance(error, asyncio.CancelledError)

    def _leave(self) -> None:
        self._has_left = True
        self._task.cancel()


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientLeft
