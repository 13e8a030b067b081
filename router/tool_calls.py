"""Calls of tools in an answer: from text in the form of `router.structured` to what clients read.

Pure and incremental. Text before the first mark is content, sent as it comes, less what may be the
beginning of the mark. A call is told in two parts, its name when that is known and its arguments
when they are complete; where the answer is cut short, the arguments so far are sent at the end.
"""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from router.structured import CALL_BEGIN, CALL_END

_HEAD = re.compile(rf'\s*{CALL_BEGIN}\s*\{{"name": "([a-zA-Z0-9_.-]+)", "arguments": ')
_TAIL = re.compile(r"\}\s*" + re.escape(CALL_END) + r"\s*")
_decoder = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Content:
    """More text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The call at `index` is of this tool."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of the call at `index`."""

    index: int
    text: str


Delta = Content | CallBegun | CallArguments


class ToolCallParser:
    """One answer on its way. Ids are drawn from `rng`."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._pending = ""  # not told yet
        self._in_calls = False
        self._has_name = False  # of the call that `_pending` is in
        self.num_calls = 0  # begun

    def feed(self, text: str) -> list[Delta]:
        """What more of the answer tells."""
        self._pending += text
        deltas = [] if self._in_calls else self._content()
        if self._in_calls:
            deltas += self._calls(text)
        return deltas

    def finish(self) -> list[Delta]:
        """What the end of the answer tells: what was held back."""
        rest, self._pending = self._pending, ""
        if not self._in_calls:
            return [Content(rest)] if rest else []
        if self._has_name:
            arguments = rest[: _end_of_value(rest)]
            return [CallArguments(self.num_calls - 1, arguments)] if arguments else []
        return [Content(rest.strip())] if rest.strip() else []

    def _content(self) -> list[Delta]:
        text, mark, rest = self._pending.partition(CALL_BEGIN)
        if mark:
            self._in_calls, self._pending = True, mark + rest
        else:
            held = _length_of_partial_mark(text)
            text, self._pending = text[: len(text) - held], text[len(text) - held :]
        return [Content(text)] if text else []

    def _calls(self, fed: str) -> Iterator[Delta]:
        while True:
            if not self._has_name:
                head = _HEAD.match(self._pending)
                if head is None:
                    return
                self._has_name = True
                self._pending = self._pending[head.end() :]
                self.num_calls += 1
                id = f"call_{self._rng.getrandbits(96):024x}"
                yield CallBegun(self.num_calls - 1, id, head[1])
                fed = self._pending
            if ">" not in fed:  # no mark ends here: do not look at long arguments again and again
                return
            end = _end_of_value(self._pending)
            tail = None if end is None else _TAIL.match(self._pending, end)
            if end is None or tail is None:
                return
            yield CallArguments(self.num_calls - 1, self._pending[:end])
            fed = self._pending = self._pending[tail.end() :]
            self._has_name = False


def _length_of_partial_mark(text: str) -> int:
    """How much of the end of `text` may be the beginning of a mark."""
    lengths = range(min(len(text), len(CALL_BEGIN) - 1), 0, -1)
    return next((n for n in lengths if CALL_BEGIN.startswith(text[-n:])), 0)


def _end_of_value(text: str) -> int | None:
    """Where the JSON value ends that `text` begins with; None while it has no end."""
    try:
        return _decoder.raw_decode(text)[1]
    except (ValueError, RecursionError):
        return None
