"""A response in progress: its status, output and events, numbered in order. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import msgspec

from router.gateway.answers.choice import AnswerPiece
from router.gateway.answers.writing import TIMED_OUT, TIMELINE_HEADER, Ending
from router.gateway.requests.calls import CheckedCall
from router.gateway.responses.items import NewId
from router.gateway.responses.output import Event, OutputItems
from router.gateway.responses.tools.offer import ToolOrigin
from router.inbox.json_parts import json_parts
from router.machine.requests import Cancelled, Finished, Outcome, Rejected
from router.text.logprobs import ChatLogprobs, Entry

_END = b"\n\n"  # ends a server-sent event

_encode = msgspec.json.Encoder().encode


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
    """One response, from its first to its last event."""

    def __init__(
        self,
        id: str,
        created: int,
        repeated: dict[str, Any],
        call: CheckedCall,
        new_id: NewId,
        origins: Mapping[str, ToolOrigin],
    ) -> None:
        """`repeated` are the fields of its request; `created` is Unix time in seconds.

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
        """Returns the output items so far."""
        return self._output.items

    def fields(self) -> dict[str, Any]:
        """Returns the present response, without its output."""
        return {**self._fields, **self._end, "status": self.status}

    def body(self) -> dict[str, Any]:
        """Returns the whole present response."""
        return {**self.fields(), "output": self.items}

    def remove(self) -> None:
        """Records that the response is not stored."""
        self._fields["store"] = False

    def queue(self) -> list[Event]:
        """Records that the answer has not begun yet."""
        self.status = "queued"
        return self._numbered([self._snapshot("created"), self._snapshot("queued")])

    def begin(self) -> list[Event]:
        """Records that the answer begins."""
        was_queued, self.status = self.status == "queued", "in_progress"
        first = [] if was_queued else [self._snapshot("created")]
        return self._numbered([*first, self._snapshot("in_progress")])

    def take(self, piece: AnswerPiece) -> list[Event]:
        """Adds a piece of the answer."""
        self._finish = piece.finish or self._finish
        return self._numbered(self._output.take(piece))

    def end(self, ending: Ending, now: int) -> list[Event]:
        """Ends the response except for its last event. `now` is Unix time in seconds."""
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
        """Ends the response with an error of our own, except for its last event."""
        self.status = "failed"
        self._end["error"] = {"code": "server_error", "message": message}
        return self._numbered(self._output.close("incomplete"))

    def last(self) -> list[Event]:
        """Returns the event after all others."""
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
    """Encodes an event as a server-sent event, in parts. Events at the end may be long."""
    yield from chain((_begin(event),), json_parts(event), (_END,))


def _begin(event: Event) -> bytes:
    kind: str = event["type"]
    return b"event: " + kind.encode() + b"\ndata: "


def error_of(outcome: Outcome) -> dict[str, Any] | None:
    """Returns the `error` of a response with this outcome. Its codes are OpenAI's."""
    if isinstance(outcome, Rejected):
        return {"code": "rate_limit_exceeded", "message": outcome.message}
    if isinstance(outcome, Finished | Cancelled):
        return None
    code = "request_timeout" if outcome.code == TIMED_OUT else "server_error"
    return {"code": code, "message": outcome.message}


def usage_of_response(ending: Ending) -> dict[str, Any]:
    """Returns token counts under this API's names."""
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
