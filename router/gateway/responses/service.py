"""Makes responses: converts a body to a chat completion, and the answer to a response.

The life of one response:

1. Its body is checked, and the conversation before it is read from the store.
2. The body and the conversation become a chat completion, which is answered like any chat
   completion. Field names in its errors are replaced by this API's field names.
3. The answer becomes items and events for a waiting client. A background response is written into
   the store, from which clients read the response.

A response is stored before its end is sent, so that the client can refer to the response at once.
If the response cannot be stored, the client still gets the answer, with `store: false`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
from prometheus_client.core import GaugeMetricFamily, Metric
from starlette.types import Send

from engine.clock import unix_time_s
from engine.errors import InvalidRequest
from router.access.limits import Tenant
from router.edge.exchange import BodyPipe
from router.edge.responses import send_parts
from router.gateway.answering import LONG_BODY_BYTES, AnswerService, GatewayParts
from router.gateway.answers.choice import AnswerPiece
from router.gateway.answers.stream import EventWriter
from router.gateway.answers.writing import CHAT, AnswerWriter, Ending, Heading, send_failure
from router.gateway.metrics.meters import RequestMeter
from router.gateway.pages.tokens import tokenized
from router.gateway.requests.calls import ApiCall
from router.gateway.requests.chat import ChatBody
from router.gateway.responses.body import ResponseBody, decode_response_body
from router.gateway.responses.conversation import (
    ChatForm,
    chat_form,
    messages_of,
    repeated_fields,
)
from router.gateway.responses.draft import Event, ResponseDraft, encode_events, event_parts
from router.gateway.responses.items import (
    Item,
    LocatedItem,
    items_of,
    references_in,
)
from router.gateway.responses.runs import BackgroundRun, BackgroundRuns
from router.gateway.responses.store import Context, ResponseSaver, ResponseStore
from router.gateway.versions import AFFINITY_HEADER, VERSION_HEADER, ServedVersion
from router.inbox.json_parts import PART_BYTES, json_parts
from router.machine.requests import Finished
from router.port import RequestPort

RESPONSE = replace(CHAT, id_prefix="resp_", object_name="response")


class Prepared(NamedTuple):
    """A response that can be started: its body, its chat completion and its input items."""

    body: ResponseBody
    form: ChatForm
    input: list[Item]  # input items, without the earlier conversation


class Accepted(NamedTuple):
    """The first reply to the call of a background response."""

    id: str
    body: dict[str, Any]
    headers: dict[str, str]
    is_streamed: bool


class WholeResponse(AnswerWriter):
    """Sends a whole response when it is complete."""

    def __init__(
        self, heading: Heading, draft: ResponseDraft, saver: ResponseSaver, send: Send
    ) -> None:
        self._heading = heading
        self._draft = draft
        self._saver = saver
        self._send = send

    def write(self, piece: AnswerPiece) -> None:
        """Adds the piece to the draft of the response."""
        self._draft.append(piece)

    async def end(self, ending: Ending) -> None:
        """Stores and sends the response, or sends the error if the answer failed."""
        if not isinstance(ending.outcome, Finished):
            await send_failure(self._send, ending.outcome)
            return
        self._draft.finish(ending, unix_time_s())
        await self._saver.save(self._draft)
        parts = json_parts(self._draft.body())
        await send_parts(self._send, parts, self._heading.headers, self._heading.turn)


class StreamedResponse(EventWriter):
    """Sends a response as server-sent events."""

    def __init__(
        self,
        heading: Heading,
        draft: ResponseDraft,
        saver: ResponseSaver,
        send: Send,
        pipe: BodyPipe | None,
    ) -> None:
        super().__init__(heading, send, pipe)
        self._draft = draft
        self._saver = saver
        self._has_begun = False

    def write(self, piece: AnswerPiece) -> None:
        """Sends the events of a piece now, or keeps the events for `flush`."""
        events = [*self._begun(), *self._draft.append(piece)]
        if self.is_full:
            self.unsent += events
        elif events:
            assert self.pipe is not None
            self.pipe.write(encode_events(events))

    async def flush(self) -> None:
        """Sends all pending events."""
        events, self.unsent = self.unsent, []
        await self.send(encode_events(events))

    async def end(self, ending: Ending) -> None:
        """Stores the response and sends the last events, or sends the error if nothing was sent."""
        if self.unsent:
            await self.flush()
        if not self._has_begun and not isinstance(ending.outcome, Finished):
            await send_failure(self._send, ending.outcome)
            return
        events = [*self._begun(), *self._draft.finish(ending, unix_time_s())]
        await self._saver.save(self._draft)
        events += self._draft.last()
        for part in chain.from_iterable(map(event_parts, events)):
            await self.send(part)
            if len(part) >= PART_BYTES:
                await self.heading.turn()
        await self.send(b"", is_last=True)

    def _begun(self) -> list[Event]:
        """Returns the first events of the response at the first call; later an empty list."""
        if self._has_begun:
            return []
        self._has_begun = True
        return self._draft.start()


class ResponseService:
    """Makes responses, for waiting clients or in the background."""

    def __init__(
        self,
        parts: GatewayParts,
        port_of: Callable[[ServedVersion], RequestPort] = attrgetter("port"),
    ) -> None:
        """`port_of` returns the port to which requests for a version are submitted.

        The default is the port of the version's router.
        """
        self.store = ResponseStore(parts.storage, parts.settings.gateway)
        self._parts = parts
        self._answers = AnswerService(parts, RESPONSE, ChatBody, port_of)
        self.runs = BackgroundRuns(self._answers, self.store, parts.metrics)
        text = "Responses: faults of the store, and what was not kept because of them"
        parts.metrics.watch_counts("baton_responses", text, "event", self.store.counters)
        parts.metrics.watch(self._families)

    def _families(self) -> Iterator[Metric]:
        text = "Responses that run in the background"
        yield GaugeMetricFamily("baton_background_responses", text, len(self.runs))

    async def prepare(self, data: bytes, tenant: Tenant) -> Prepared:
        """Checks a body, and reads the earlier conversation from the store. Raises ApiError."""
        decoding = partial(decode_response_body, data)
        pools, turn = self._parts.parse_pools, tenant.queue
        is_long = len(data) >= LONG_BODY_BYTES
        body, extras = await pools.run(turn, len(data), decoding) if is_long else decoding()
        named = references_in(body.input or "")
        max_bytes = self.store.config.max_body_bytes
        context = await self.store.context(
            body.previous_response_id, named, tenant.owner, max_bytes
        )
        converting = partial(self._prepared, body, extras, context)
        if is_long or context.items:
            return await pools.run(turn, len(data), converting)
        return converting()

    async def count(self, data: bytes, tenant: Tenant, headers: Mapping[str, str]) -> int:
        """Returns the number of prompt tokens of a body. Raises InvalidRequest."""
        prepared = await self.prepare(data, tenant)
        choose = partial(self._chosen, headers)
        counting = partial(tokenized, prepared.form.data, choose)
        num_bytes = len(prepared.form.data)
        try:
            if num_bytes < LONG_BODY_BYTES:
                return counting().count
            return (await self._parts.parse_pools.run(tenant.queue, num_bytes, counting)).count
        except InvalidRequest as error:
            raise prepared.form.translated(error) from None

    def call(self, prepared: Prepared, tenant: Tenant, headers: Mapping[str, str]) -> ApiCall:
        """Returns the chat completion call that makes the response. Raises ApiError."""
        call = self._answers.call(prepared.form.data, tenant, headers)
        own, form = ResponseBody.__struct_fields__, prepared.form
        return msgspec.structs.replace(call, own_fields=own, own_ignored=form.all_ignored)

    async def answer(
        self,
        prepared: Prepared,
        call: ApiCall,
        meter: RequestMeter,
        send: Send,
        pipe: BodyPipe | None,
    ) -> None:
        """Makes a response for a waiting client. Raises InvalidRequest."""
        saver = ResponseSaver(self.store, call.tenant.owner, prepared.input)
        draft = partial(self._draft, call, prepared)

        def writer(heading: Heading) -> AnswerWriter:
            if prepared.body.stream:
                return StreamedResponse(heading, draft(heading), saver, send, pipe)
            return WholeResponse(heading, draft(heading), saver, send)

        try:
            await self._answers.answer(call, writer, meter)
        except InvalidRequest as error:
            raise prepared.form.translated(error) from None

    async def start(self, prepared: Prepared, call: ApiCall, meter: RequestMeter) -> Accepted:
        """Starts a response in the background. Raises InvalidRequest."""
        saver = ResponseSaver(self.store, call.tenant.owner, prepared.input)
        has_events = bool(prepared.body.stream)
        draft = partial(self._draft, call, prepared)
        run = BackgroundRun(call.request_id, saver, draft, has_events=has_events)
        try:
            body = await self.runs.start(call, run, meter)
        except InvalidRequest as error:
            raise prepared.form.translated(error) from None
        return Accepted(run.id, body, run.headers, is_streamed=has_events)

    def _draft(self, call: ApiCall, prepared: Prepared, heading: Heading) -> ResponseDraft:
        return ResponseDraft(
            call.request_id,
            heading.created,
            repeated_fields(prepared.body),
            heading.call,
            self._new_id,
            prepared.form.origins,
        )

    def _prepared(self, body: ResponseBody, extras: dict[str, Any], context: Context) -> Prepared:
        own = items_of(body.input or "", context.named, self._new_id)
        before = [LocatedItem(item, "previous_response_id") for item in context.items]
        messages = messages_of(body.instructions, [*before, *own])
        form = chat_form(body, extras, messages)
        return Prepared(body, form, [located.item for located in own])

    def _chosen(self, headers: Mapping[str, str], model: str | None) -> ServedVersion:
        affinity, version = headers.get(AFFINITY_HEADER, ""), headers.get(VERSION_HEADER)
        return self._parts.versions.choose(key=affinity, model=model, version=version)

    def _new_id(self, prefix: str) -> str:
        return f"{prefix}{self._parts.rng.getrandbits(128):032x}"
