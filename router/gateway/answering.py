"""Answers calls of any transport: checks a call, submits it to the router, writes the answer.

HTTP endpoints, gRPC and batch jobs receive calls and send answers in different ways. This module
has the steps between, which are the same for all of them. The life of one call:

1. The body becomes one or more `Request`s: checked, templated and tokenised, in a thread if long. A
   grammar is compiled in a separate process, which decides whether workers can follow it.
2. The router's updates become text, and text becomes pieces for the writer. Each choice is a
   request of its own to the router, and updates of the choices arrive in any order. If one choice
   fails, the whole answer fails.
3. The request is cancelled at a stop string, at the call's timeout, or when the caller is
   cancelled. The router then sends the cancellation to the request's workers.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from operator import attrgetter
from typing import Any

from msgspec.structs import replace

from engine.clock import Clock, unix_time_s
from engine.errors import InvalidRequest
from engine.grammar.child import Vocabulary
from engine.log_context import REQUEST, request_ids
from engine.messages import RequestId
from engine.net.seldom import Seldom
from router.access.limits import UNLIMITED, KeyAccounts, KeyUse, Tenant
from router.gateway.answers.batching import TextBatch
from router.gateway.answers.choice import AnswerChoice, AnswerPiece, PromptScores, choice_of
from router.gateway.answers.following import Following
from router.gateway.answers.searching import Searches
from router.gateway.answers.writing import (
    TIMED_OUT,
    AnswerWriter,
    Dialect,
    Ending,
    Heading,
)
from router.gateway.dashboard.recent import RecentRequests
from router.gateway.hints.claims import KEEP_HEADER, SESSION_HEADER, claim_of
from router.gateway.metrics.meters import INVALID, ChoiceMeter, GatewayMetrics, RequestMeter
from router.gateway.requests.body import Body
from router.gateway.requests.calls import (
    ApiCall,
    CheckedCall,
    GatewaySettings,
    add_suggestions,
    parse,
    with_structure,
)
from router.gateway.requests.grammar_checker import Asker, GrammarCheck, check_structure
from router.gateway.requests.json_fields import MAX_IGNORED, suggestions
from router.gateway.storage import Storage
from router.gateway.tracing.trace import Tracing, context_of
from router.gateway.versions import (
    NotReady,
    ServedVersion,
    Versions,
)
from router.inbox.api_errors import invalid_value
from router.inbox.fair_queue import LoopQueue, Turn
from router.inbox.json_values import seconds_in
from router.inbox.parse_pools import ParsePools
from router.machine.requests import Failed
from router.port import RequestPort
from router.text.tokenizer import TextModel

log = logging.getLogger(__name__)

IGNORED_EVERY_S = 60.0  # seconds between log lines about ignored fields
LONG_BODY_BYTES = 4096  # a thread checks longer bodies: encoding takes 1 ms, a thread 0.1 ms
MANY_ITEMS = 256  # a thread checks bodies with more commas, which may have many prompts
NUM_IN_TURN = 16  # choices handled before other tasks may run; each takes 0.1 ms
ID_HEADER = "x-request-id"
TIMEOUT_HEADER = "x-request-timeout"
MAX_ID_LEN = 128  # maximum characters of a client's own request id
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.001, 86_400.0

_num_tokens = attrgetter("num_tokens")

OpenWriter = Callable[[Heading], AnswerWriter]  # returns the writer of a checked call's answer


@dataclass(frozen=True, slots=True)
class GatewayParts:
    """The parts of a gateway that all kinds of calls share."""

    versions: Versions
    settings: GatewaySettings
    clock: Clock
    rng: random.Random
    metrics: GatewayMetrics
    grammars: GrammarCheck
    accounts: KeyAccounts
    parse_pools: ParsePools
    loop_queue: LoopQueue
    storage: Storage
    recent: RecentRequests
    tracing: Tracing | None = None
    batch: TextBatch | None = None  # None: Python converts tokens to text


class AnswerService:
    """Answers the calls of one dialect."""

    def __init__(
        self,
        parts: GatewayParts,
        dialect: Dialect,
        body_type: type[Body],
        port_of: Callable[[ServedVersion], RequestPort] = attrgetter("port"),
    ) -> None:
        """`port_of` returns the port to which requests for a version are submitted.

        The default is the port of the version's router.
        """
        self._parts = parts
        self._port_of = port_of
        self._dialect = dialect
        self._body_type = body_type
        self._with_ignored = Seldom(IGNORED_EVERY_S)

    def call(self, data: bytes, tenant: Tenant, headers: Mapping[str, str]) -> ApiCall:
        """Returns a new call with this JSON body. Header names are in lower case.

        Raises ApiError for an invalid header.
        """
        rng, client_id = self._parts.rng, headers.get(ID_HEADER)
        timeout_s = session = None
        if client_id is not None:
            _check_id(client_id)
        if TIMEOUT_HEADER in headers:
            timeout_s = seconds_in(headers, TIMEOUT_HEADER, MIN_TIMEOUT_S, MAX_TIMEOUT_S)
        if SESSION_HEADER in headers or KEEP_HEADER in headers:
            session = claim_of(headers, tenant, self._parts.settings.secret)
        request_id = RequestId(f"{self._dialect.id_prefix}{rng.getrandbits(128):032x}")
        return ApiCall(
            data,
            request_id,
            rng.getrandbits(64),
            self._parts.clock.now_s(),
            tenant,
            headers,
            client_id,
            client_id or request_id,
            timeout_s,
            session,
        )

    async def answer(self, call: ApiCall, open: OpenWriter, meter: RequestMeter) -> None:
        """Answers a call. Returns when the client has received the end of the answer.

        Raises InvalidRequest if the call fails a check, before `open` is called.
        """
        parts, tenant, received_s = self._parts, call.tenant, call.received_s
        use: KeyUse | None = None
        logged = REQUEST.set(request_ids(call.request_id, call.client_id))
        meter.request_id, meter.shown_id, meter.key = call.request_id, call.shown_id, tenant.name
        if parts.tracing is not None:
            kind, context = self._dialect.id_prefix.rstrip("-_"), context_of(call.headers)
            meter.trace = parts.tracing.begin(kind, call.request_id, received_s, context)
        try:
            try:
                if parts.accounts.has_defaults or tenant.limits != UNLIMITED:
                    use = parts.accounts.start(tenant.name, tenant.limits, received_s)
                checked = await self._checked(call)
                if use is not None:
                    use.hold_prompts(len(checked.echoes), received_s)
                    use.hold_tokens(checked.most_tokens, received_s)
            except InvalidRequest:
                meter.outcome = INVALID
                raise
            version = checked.served.name
            meter.accept(received_s, checked.prompt_len, version, key=tenant.name)
            parts.versions.num_running[version] += 1
            try:
                await self._serve(checked, open, meter, use)
            finally:
                parts.versions.num_running[version] -= 1
        finally:
            if use is not None:
                use.release(parts.clock.now_s())
            if meter.trace is not None:
                meter.finish_trace()
            REQUEST.reset(logged)

    async def _serve(
        self, call: CheckedCall, open: OpenWriter, meter: RequestMeter, use: KeyUse | None
    ) -> None:
        port, clock, choices = self._port_of(call.served), self._parts.clock, list[AnswerChoice]()
        searches = Searches(port, clock, call) if call.body.use_beam_search else None
        uncounted = iter(choices)
        outcome, last_s = None, 0.0
        turn = partial(self._parts.loop_queue.wait, call.asked.tenant.queue)
        try:
            await self._open_choices(call, choices, meter, turn)
            traced = {} if meter.trace is None else meter.trace.headers
            heading = Heading(self._dialect, call, unix_time_s(), choices, use, traced, turn)
            writer = open(heading)
            if searches is None:
                following = Following(port, clock, writer, turn).run(choices, self._parts.batch)
            else:
                following = searches.follow(choices, writer, turn)
            if call.asked.timeout_s is not None:
                following = self._in_time(call, call.asked.timeout_s, following)
            last = await following
            outcome, last_s = last.outcome, choices[last.choice].last_s
            assert outcome is not None
            if last.finish is not None or not last.is_empty:
                writer.write(last)
            await writer.end(Ending(outcome, call, choices))
            for number, choice in enumerate(uncounted, start=1):
                self._count(call, choice)
                if not number % NUM_IN_TURN:
                    await turn()
        finally:  # counted after the last piece was sent
            for choice in uncounted:
                self._count(call, choice)
            if outcome is not None:
                meter.finish(outcome, last_s)
            meter.num_sent_tokens = sum(map(_num_tokens, choices))
            if use is not None:
                num_tokens = searches.num_tokens if searches else meter.num_sent_tokens
                use.num_used = call.prompt_len + num_tokens

    async def _open_choices(
        self, call: CheckedCall, choices: list[AnswerChoice], meter: RequestMeter, turn: Turn
    ) -> None:
        """Creates the choices of an answer and adds them to `choices`.

        One answer may have 2000 choices.
        """
        parts, in_cpp = self._parts, self._parts.batch is not None and bool(call.body.stream)
        for index, request in enumerate(call.requests):
            if not index % call.num_candidates:
                prompt = PromptScores()
            choice = choice_of(
                index,
                call,
                prompt,
                ChoiceMeter(meter, len(request.token_ids)),
                rng=parts.rng,
                in_cpp=in_cpp,
            )
            choices.append(choice)
            parts.recent.running[request.request_id] = choice
            if not len(choices) % NUM_IN_TURN:
                await turn()

    def _count(self, call: CheckedCall, choice: AnswerChoice) -> None:
        """Records a choice that has ended, and reports to the stores which blocks the choice
        used.
        """
        choice.measure()
        self._parts.recent.record(choice)
        if call.notes is None or not choice.noted_ids:
            return  # the call has no session, or the prompt may not have been computed
        # Only the first choice of each prompt has kept its token ids for this report.
        index = choice.index // call.num_candidates
        used = call.notes.use(index, choice.request.token_ids, choice.noted_ids)
        if used is not None:
            call.served.port.tell_stores(used)

    async def _in_time(
        self, call: CheckedCall, timeout_s: float, following: Coroutine[Any, Any, AnswerPiece]
    ) -> AnswerPiece:
        """Awaits `following` and returns the last piece of the answer.

        After the call's timeout, returns a piece that reports the failure instead.
        """
        left_s = call.first.received_s + timeout_s - self._parts.clock.now_s()
        try:
            async with asyncio.timeout(left_s) as timeout:
                return await following
        except TimeoutError:
            if not timeout.expired():
                raise
            message = f"the answer was not complete within {timeout_s:g} s ({TIMEOUT_HEADER})"
            outcome = Failed(message, code=TIMED_OUT)
            return AnswerPiece(choice=0, text="", num_tokens=0, outcome=outcome)

    async def _checked(self, call: ApiCall) -> CheckedCall:
        """Checks a call. Waits while no worker of the call's version is known."""
        versions, clock = self._parts.versions, self._parts.clock
        held_s = min(self._parts.settings.router.queue_timeout_s, call.timeout_s or inf)
        while True:
            table = versions.table
            try:
                checked = await self._parsed(call)
            except NotReady:
                left_s = call.received_s + held_s - clock.now_s()
                if not await versions.hold(table, left_s):
                    raise
            else:
                if versions.table is table or versions.takes(checked.served):
                    return checked  # otherwise the version has started to leave

    async def _parsed(self, call: ApiCall) -> CheckedCall:
        parts = self._parts
        if len(call.data) < LONG_BODY_BYTES and call.data.count(b",") < MANY_ITEMS:
            checked = parse(call, self._body_type, parts.versions, parts.settings)
        else:
            parsed = partial(parse, call, self._body_type, parts.versions, parts.settings)
            checked = await parts.parse_pools.run(call.tenant.queue, len(call.data), parsed)
        if checked.structure.grammar is not None:
            vocabulary = _vocabulary_of(checked.served.text)
            asker = Asker(call.tenant.queue, checked.first.salt)
            grammars, asked = parts.grammars, checked.structure
            try:
                structure = await check_structure(grammars, asked, vocabulary, asker)
            except InvalidRequest as error:
                add_suggestions(error, call, checked.ignored, self._body_type)
                raise
            if structure is not asked:
                checked = with_structure(checked, structure)
        names = call.own_ignored(checked.ignored) if call.own_ignored else checked.ignored
        if not names:
            return checked
        self._record_ignored(call, names)
        return replace(checked, ignored=tuple(names[:MAX_IGNORED]))

    def _record_ignored(self, call: ApiCall, names: Sequence[str]) -> None:
        """Logs the ignored fields of a request, at most once in `IGNORED_EVERY_S`."""
        num_calls = self._with_ignored.due(self._parts.clock.now_s())
        if num_calls is None:
            return
        hint = suggestions(names, self._body_type, call.own_fields)
        shown = ", ".join(names[:MAX_IGNORED])
        log.warning("fields of %d requests have no effect, now: %s%s", num_calls, shown, hint)


def _vocabulary_of(text: TextModel) -> Vocabulary | None:
    if text.file is None:
        return None
    return Vocabulary(str(text.file), text.vocab_size, text.eos_token_ids)


def _check_id(text: str) -> None:
    """Raises ApiError if the client's own request id cannot be sent back unchanged in a header."""
    if not (0 < len(text) <= MAX_ID_LEN and text.isascii() and text.isprintable()):
        message = f"{ID_HEADER} must be 1 to {MAX_ID_LEN} printable ASCII characters"
        raise invalid_value(message, ID_HEADER)
