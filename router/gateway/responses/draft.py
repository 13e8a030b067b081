"""A response in progress: its status, its output items and its events, numbered in order. Pure.

Only one item is open at a time: an item is closed before the next item is opened. The events of a
message are, in this order: `response.output_item.added`, `response.content_part.added`, a
`response.output_text.delta` for each piece, `response.output_text.done`,
`response.content_part.done`, `response.output_item.done`. The events of reasoning are the same,
with `response.reasoning_text`. A call has deltas of its arguments or input, and no events of parts.

Source: OpenAI API reference, streaming events of responses.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import msgspec

from router.gateway.answers.choice import AnswerPiece, CallDelta
from router.gateway.answers.writing import TIMED_OUT, TIMELINE_HEADER, Ending
from router.gateway.requests.calls import CheckedCall
from router.gateway.responses.items import (
    Item,
    NewId,
    Status,
    new_call,
    new_message,
    new_reasoning,
    text_part,
)
from router.gateway.responses.tools import CustomInput, ToolOrigin
from router.inbox.json_parts import json_parts
from router.machine.requests import Cancelled, Finished, Outcome, Rejected
from router.text.forms.deltas import CallBegun
from router.text.logprobs import ChatLogprobs, Entry

Event = dict[str, Any]
Scores = Callable[[Sequence[Entry]], list[object]]  # makes JSON values of entries
# By type of item: the name of its text in events, and the field that has its whole text.
_TEXTS = {
    "message": ("output_text", "text"),
    "reasoning": ("reasoning_text", "text"),
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}
_END = b"\n\n"  # end of a server-sent event

_encode = msgspec.json.Encoder().encode


class OutputItems:
    """The output items of one response, to which pieces of the answer are appended."""

    def __init__(
        self, new_id: NewId, scores: Scores, origins: Mapping[str, ToolOrigin] | None = None
    ) -> None:
        """`scores` encodes log-probabilities; `origins` has the client's names of tools by the
        model's names.
        """
        self.items: list[Item] = []
        self._new_id = new_id
        self._scores = scores
        self._origins = origins or {}
        self._custom: CustomInput | None = None  # input of the open item, if it calls a custom tool
        self._is_open = False  # True if the last item is open
        self._texts: list[str] = []  # texts of the open item
        self._logprobs: list[object] = []  # log-probabilities of the open item

    def append(self, piece: AnswerPiece) -> list[Event]:
        """Adds a piece of the answer. Returns the events of the piece."""
        events: list[Event] = []
        if piece.reasoning:
            if not self._is_in("reasoning"):
                part = {"type": "reasoning_text", "text": ""}
                events += self._open(new_reasoning(self._new_id("rs_")), part)
            events.append(self._delta(piece.reasoning))
        if piece.text or piece.entries:
            if not self._is_in("message"):
                events += self._open(new_message(self._new_id("msg_")), text_part("", []))
            logprobs = self._scores(piece.entries) if piece.entries else []
            self._logprobs += logprobs
            events.append({**self._delta(piece.text), "logprobs": logprobs})
        for delta in piece.calls:
            events += self._call(delta)
        return events

    def close(self, status: Status) -> list[Event]:
        """Closes the last item, and returns the events.

        A complete answer without items gets an empty message.
        """
        events: list[Event] = []
        if not self.items and status == "completed":
            events = self._open(new_message(self._new_id("msg_")), text_part("", []))
        return events + self._close(status)

    def _is_in(self, kind: str) -> bool:
        return self._is_open and self.items[-1]["type"] == kind

    def _call(self, delta: CallDelta) -> list[Event]:
        if not isinstance(delta, CallBegun):
            text = delta.text if self._custom is None else self._custom.feed(delta.text)
            return [self._delta(text)] if text or self._custom is None else []
        name, namespace, is_custom = self._origins.get(delta.name, (delta.name, None, False))
        new_id = self._new_id("ctc_" if is_custom else "fc_")
        item = new_call(new_id, delta.id, name, namespace, is_custom=is_custom)
        events = self._open(item)
        self._custom = CustomInput() if is_custom else None
        return events

    def _open(self, item: Item, part: dict[str, Any] | None = None) -> list[Event]:
        """Closes the last item and opens a new item, with a first content part if `part` is
        given.
        """
        events = self._close("completed")
        self.items.append(item)
        self._is_open = True
        events.append(self._item_event("added"))
        if part is not None:
            events.append(self._text_event("content_part.added", part=part))
        return events

    def _close(self, status: Status) -> list[Event]:
        """Closes the open item, if any, and returns the events."""
        if not self._is_open:
            return []
        events: list[Event] = []
        if self._custom is not None and (rest := self._custom.finish()):
            events.append(self._delta(rest))
        item, text = self.items[-1], "".join(self._texts)
        item["status"] = status
        name, field = _TEXTS[item["type"]]
        done: dict[str, Any] = {field: text}
        if item["type"] == "function_call":
            done = {"name": item["name"], **done}
        if item["type"] == "message":
            done["logprobs"] = self._logprobs
        events.append(self._text_event(f"{name}.done", **done))
        if "content" in item:
            is_text = item["type"] == "message"
            part = text_part(text, self._logprobs) if is_text else {"type": name, "text": text}
            item["content"].append(part)
            events.append(self._text_event("content_part.done", part=part))
        else:
            item[field] = text
        events.append(self._item_event("done"))
        self._is_open, self._texts, self._logprobs, self._custom = False, [], [], None
        return events

    def _delta(self, text: str) -> Event:
        self._texts.append(text)
        name, _ = _TEXTS[self.items[-1]["type"]]
        return self._text_event(f"{name}.delta", delta=text)

    def _text_event(self, kind: str, **fields: object) -> Event:
        """Returns an event about the text or the only content part of the open item."""
        item = self.items[-1]
        place = {"content_index": 0} if "content" in item else {}
        at = {"item_id": item["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{kind}", **at, **place, **fields}

    def _item_event(self, kind: str) -> Event:
        # The event has a copy of the item, because events may be encoded after the item has grown.
        item = dict(self.items[-1])
        for name in ("content", "summary"):
            if name in item:
                item[name] = list(item[name])
        kind = f"response.output_item.{kind}"
        return {"type": kind, "output_index": len(self.items) - 1, "item": item}


class ResponseAnswer(msgspec.Struct, kw_only=True):
    """The fields of each response; its request's fields are repeated in it."""

    id: str
    object: Literal["response"]
    created_at: int | float
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    usage: dict[str, Any] | None


class ResponseEvent(msgspec.Struct, kw_only=True):
    """An event in the stream of a response; its `type` says which other fields it has."""

    type: str
    sequence_number: int


class ResponseDraft:
    """One response that is being made, from its first to its last event."""

    def __init__(
        self,
        id: str,
        created: int,
        repeated: dict[str, Any],
        call: CheckedCall,
        new_id: NewId,
        origins: Mapping[str, ToolOrigin],
    ) -> None:
        """`repeated` are the fields that repeat the request. `created` is Unix time in seconds.

        `origins` are the client's names of tools, by the model's names.
        """
        sampling = call.first.sampling
        self.id = id
        self.created = created
        self.status = "in_progress"
        self._fields: dict[str, Any] = {
            "id": id,
            "object": "response",
            "created_at": created,
            "model": call.model,
            **repeated,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        self._end: dict[str, Any] = {
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "usage": None,
        }
        self._shows_timeline = call.asked.debugs(TIMELINE_HEADER)
        self._writer = ChatLogprobs(call.served.text.bytes_of, call.body.num_top_logprobs or 0)
        self._output = OutputItems(new_id, self._scores, origins)
        self._finish: str | None = None
        self._num_events = 0

    @property
    def items(self) -> list[dict[str, Any]]:
        """The output items so far."""
        return self._output.items

    def fields(self) -> dict[str, Any]:
        """Returns the fields of the response at present, without its output."""
        return {**self._fields, **self._end, "status": self.status}

    def body(self) -> dict[str, Any]:
        """Returns all fields of the response at present, with its output."""
        return {**self.fields(), "output": self.items}

    def remove(self) -> None:
        """Records that the response could not be stored."""
        self._fields["store"] = False

    def queue(self) -> list[Event]:
        """Sets the status "queued", and returns the events."""
        self.status = "queued"
        return self._numbered([self._snapshot("created"), self._snapshot("queued")])

    def start(self) -> list[Event]:
        """Sets the status "in_progress", and returns the events."""
        was_queued, self.status = self.status == "queued", "in_progress"
        first = [] if was_queued else [self._snapshot("created")]
        return self._numbered([*first, self._snapshot("in_progress")])

    def append(self, piece: AnswerPiece) -> list[Event]:
        """Adds a piece of the answer. Returns the events of the piece."""
        self._finish = piece.finish or self._finish
        return self._numbered(self._output.append(piece))

    def finish(self, ending: Ending, now: int) -> list[Event]:
        """Ends the response. Returns all further events except the last event.

        `now` is Unix time in seconds.
        """
        outcome = ending.outcome
        if isinstance(outcome, Finished):
            is_whole = self._finish != "length"
            self.status = "completed" if is_whole else "incomplete"
            if is_whole:
                self._end["completed_at"] = now
            else:
                self._end["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.status = "cancelled" if isinstance(outcome, Cancelled) else "failed"
            self._end["error"] = error_of(outcome)
        self._end["usage"] = usage_of_response(ending)
        if self._shows_timeline:
            self._end["baton_timeline"] = ending.timeline
        events = self._output.close("completed" if self.status == "completed" else "incomplete")
        return self._numbered(events)

    def fail(self, message: str) -> list[Event]:
        """Ends the response with an error of the server.

        Returns all further events except the last event.
        """
        self.status = "failed"
        self._end["error"] = {"code": "server_error", "message": message}
        return self._numbered(self._output.close("incomplete"))

    def last(self) -> list[Event]:
        """Returns the last event of the response, in a list."""
        return self._numbered([self._snapshot(self.status)])

    def _snapshot(self, name: str) -> Event:
        return {"type": f"response.{name}", "response": {**self.fields(), "output": [*self.items]}}

    def _numbered(self, events: list[Event]) -> list[Event]:
        for event in events:
            event["sequence_number"] = self._num_events
            self._num_events += 1
        return events

    def _scores(self, entries: Sequence[Entry]) -> list[object]:
        return [*self._writer.shape(entries)["content"]]


def encode_events(events: Sequence[Event]) -> bytes:
    """Encodes events as server-sent events."""
    return b"".join([_begin(event) + _encode(event) + _END for event in events])


def event_parts(event: Event) -> Iterator[bytes]:
    """Encodes an event as a server-sent event, in parts. The last events may be long."""
    yield from chain((_begin(event),), json_parts(event), (_END,))


def _begin(event: Event) -> bytes:
    kind: str = event["type"]
    return b"event: " + kind.encode() + b"\ndata: "


def error_of(outcome: Outcome) -> dict[str, Any] | None:
    """Returns the `error` of a response with this outcome. Codes are OpenAI's."""
    if isinstance(outcome, Rejected):
        return {"code": "rate_limit_exceeded", "message": outcome.message}
    if isinstance(outcome, Finished | Cancelled):
        return None
    code = "request_timeout" if outcome.code == TIMED_OUT else "server_error"
    return {"code": code, "message": outcome.message}


def usage_of_response(ending: Ending) -> dict[str, Any]:
    """Returns the token counts of an answer under this API's names."""
    return {
        "input_tokens": ending.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": ending.num_cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": ending.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": ending.num_reasoning_tokens},
        "total_tokens": ending.prompt_tokens + ending.completion_tokens,
    }
