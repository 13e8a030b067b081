"""Turns pieces of an answer into the output items of a response, and into their events.

Pure and incremental. Items follow each other: an item is closed before the next one is opened. The
events of a message are, in this order: `response.output_item.added`, `response.content_part.added`,
a `response.output_text.delta` for each piece, `response.output_text.done`,
`response.content_part.done`, `response.output_item.done`. Reasoning has the same events with
`response.reasoning_text`. A call has deltas of its arguments or input instead of parts.

Source: OpenAI API reference, streaming events of responses.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from router.gateway.answers.choice import AnswerPiece, CallDelta
from router.gateway.responses.items import (
    Item,
    NewId,
    Status,
    new_call,
    new_custom_call,
    new_message,
    new_reasoning,
    text_part,
)
from router.gateway.responses.tools.custom_input import CustomInput
from router.gateway.responses.tools.offer import ToolOrigin
from router.text.forms.deltas import CallBegun
from router.text.logprobs import Entry

Event = dict[str, Any]
Scores = Callable[[Sequence[Entry]], list[object]]  # returns JSON values


class OutputItems:
    """The output of one response, as it grows."""

    def __init__(
        self, new_id: NewId, scores: Scores, origins: Mapping[str, ToolOrigin] | None = None
    ) -> None:
        """`scores` encodes log-probabilities; `origins` has the client's names of tools."""
        self.items: list[Item] = []
        self._new_id = new_id
        self._scores = scores
        self._origins = origins or {}
        self._custom: CustomInput | None = None  # the open item's input
        self._is_open = False  # whether the last item is open
        self._texts: list[str] = []  # texts of the open item
        self._logprobs: list[object] = []  # log-probabilities of the open item

    def take(self, piece: AnswerPiece) -> list[Event]:
        """Adds a piece of the answer."""
        events: list[Event] = []
        if piece.reasoning:
            events += self.take_reasoning(piece.reasoning)
        if piece.text or piece.entries:
            events += self._text(piece.text, self._scores(piece.entries) if piece.entries else [])
        for delta in piece.calls:
            events += self._call(delta)
        return events

    def take_reasoning(self, text: str) -> list[Event]:
        """Adds text of the model's reasoning, which precedes the answer's text."""
        events = [] if self._is_in("reasoning") else self._open_reasoning()
        self._texts.append(text)
        event = self._at("response.reasoning_text.delta")
        return [*events, {**event, "content_index": 0, "delta": text}]

    def close(self, status: Status) -> list[Event]:
        """Ends the last item. An answer without any text gets an empty message."""
        events = [] if self.items or status != "completed" else self._open_message()
        return events + self._close(status)

    def _text(self, text: str, logprobs: list[object]) -> list[Event]:
        events = [] if self._is_in("message") else self._open_message()
        self._texts.append(text)
        self._logprobs += logprobs
        event = {
            **self._at("response.output_text.delta"),
            "content_index": 0,
            "delta": text,
            "logprobs": logprobs,
        }
        return [*events, event]

    def _call(self, delta: CallDelta) -> list[Event]:
        if isinstance(delta, CallBegun):
            return self._open_call(delta)
        if self._custom is not None:
            return self._input(self._custom.feed(delta.text))
        self._texts.append(delta.text)
        return [{**self._at("response.function_call_arguments.delta"), "delta": delta.text}]

    def _open_call(self, begun: CallBegun) -> list[Event]:
        events = self._close("completed")
        name, namespace, is_custom = self._origins.get(begun.name, (begun.name, None, False))
        if is_custom:
            self._custom = CustomInput()
            item = new_custom_call(self._new_id("ctc_"), begun.id, name, namespace)
        else:
            item = new_call(self._new_id("fc_"), begun.id, name, namespace)
        return events + self._open(item)

    def _input(self, text: str) -> list[Event]:
        if not text:
            return []
        self._texts.append(text)
        return [{**self._at("response.custom_tool_call_input.delta"), "delta": text}]

    def _is_in(self, kind: str) -> bool:
        return self._is_open and self.items[-1]["type"] == kind

    def _open_message(self) -> list[Event]:
        events = self._close("completed") + self._open(new_message(self._new_id("msg_")))
        return [*events, self._part("response.content_part.added", text_part("", []))]

    def _open_reasoning(self) -> list[Event]:
        events = self._close("completed") + self._open(new_reasoning(self._new_id("rs_")))
        part = {"type": "reasoning_text", "text": ""}
        return [*events, self._part("response.content_part.added", part)]

    def _open(self, item: Item) -> list[Event]:
        self.items.append(item)
        self._is_open = True
        return [self._item_event("response.output_item.added")]

    def _close(self, status: Status) -> list[Event]:
        """Completes the open item, if any."""
        if not self._is_open:
            return []
        events = self._input(self._custom.finish()) if self._custom is not None else []
        item, text = self.items[-1], "".join(self._texts)
        item["status"] = status
        if item["type"] == "custom_tool_call":
            item["input"] = text
            events.append({**self._at("response.custom_tool_call_input.done"), "input": text})
        elif item["type"] == "function_call":
            item["arguments"] = text
            done = {"name": item["name"], "arguments": text}
            events.append({**self._at("response.function_call_arguments.done"), **done})
        elif item["type"] == "reasoning":
            part = {"type": "reasoning_text", "text": text}
            item["content"].append(part)
            done = {**self._at("response.reasoning_text.done"), "content_index": 0, "text": text}
            events += [done, self._part("response.content_part.done", part)]
        else:
            part = text_part(text, self._logprobs)
            item["content"].append(part)
            done = {**self._at("response.output_text.done"), "content_index": 0, "text": text}
            done["logprobs"] = self._logprobs
            events += [done, self._part("response.content_part.done", part)]
        events.append(self._item_event("response.output_item.done"))
        self._is_open, self._texts, self._logprobs, self._custom = False, [], [], None
        return events

    def _at(self, kind: str) -> Event:
        return {
            "type": kind,
            "item_id": self.items[-1]["id"],
            "output_index": len(self.items) - 1,
        }

    def _part(self, kind: str, part: dict[str, Any]) -> Event:
        return {**self._at(kind), "content_index": 0, "part": part}

    def _item_event(self, kind: str) -> Event:
        # A copy: events may be encoded after the item has grown.
        item = dict(self.items[-1])
        for name in ("content", "summary"):
            if name in item:
                item[name] = list(item[name])
        return {"type": kind, "output_index": len(self.items) - 1, "item": item}
