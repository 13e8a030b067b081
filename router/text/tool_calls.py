"""Parses tool calls in an answer, in the form that `router.text.structured` prescribes.

Pure and incremental. Text before the first mark is content and is sent as it comes, except an end
that may be the beginning of the mark. A call is reported in two parts: its name once known, and its
arguments once complete. If the answer is cut short, the arguments so far are sent at the end.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from router.text.structured import CALL_BEGIN, CALL_END

_HEAD = re.compile(rf'\s*{CALL_BEGIN}\s*\{{"name": "([a-zA-Z0-9_.-]+)", "arguments": ')
_TAIL = re.compile(r"\}\s*" + re.escape(CALL_END) + r"\s*")
_STRUCTURE = re.compile(r'["\\\[\]{}]')


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
    """Parses one answer as it arrives. Ids of calls are drawn from `rng`."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._pending = ""  # not reported yet
        self._in_calls = False
        self._has_name = False  # of the call that `_pending` is in
        self._arguments = _ValueEnd()  # of that call
        self.num_calls = 0  # begun

    def feed(self, text: str) -> list[Delta]:
        """Takes more text of the answer and returns what it completes."""
        self._pending += text
        deltas = [] if self._in_calls else self._content()
        if self._in_calls:
            deltas += self._calls()
        return deltas

    def finish(self) -> list[Delta]:
        """Returns what was held back, at the end of the answer."""
        rest, self._pending = self._pending, ""
        if not self._in_calls:
            return [Content(rest)] if rest else []
        if self._has_name:
            arguments = rest[: self._arguments.find(rest)]
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

    def _calls(self) -> Iterator[Delta]:
        while True:
            if not self._has_name:
                head = _HEAD.match(self._pending)
                if head is None:
                    return
                self._has_name, self._arguments = True, _ValueEnd()
                self._pending = self._pending[head.end() :]
                self.num_calls += 1
                id = f"call_{self._rng.getrandbits(96):024x}"
                yield CallBegun(self.num_calls - 1, id, head[1])
            end = self._arguments.find(self._pending)
            tail = None if end is None else _TAIL.match(self._pending, end)
            if end is None or tail is None:
                return
            yield CallArguments(self.num_calls - 1, self._pending[:end])
            self._pending = self._pending[tail.end() :]
            self._has_name = False


def _length_of_partial_mark(text: str) -> int:
    """The length of the longest end of `text` that may begin a mark."""
    lengths = range(min(len(text), len(CALL_BEGIN) - 1), 0, -1)
    return next((n for n in lengths if CALL_BEGIN.startswith(text[-n:])), 0)


class _ValueEnd:
    """Finds the end of the JSON value that a growing text begins with; reads each part once.

    The grammar of the call makes the text valid, so only braces and quotes matter.
    """

    def __init__(self) -> None:
        self._at = 0  # text before it was read
        self._depth = 0
        self._in_string = False
        self._end: int | None = None

    def find(self, text: str) -> int | None:
        """The length of the value; None while it has no end."""
        while self._end is None and (mark := _STRUCTURE.search(text, self._at)) is not None:
            if mark[0] == "\\" and mark.end() == len(text):
                return None  # the escaped character has not come
            self._at = mark.end()
            self._take(mark[0])
        if self._end is None:
            self._at = len(text)
        return self._end

    def _take(self, mark: str) -> None:
        if self._in_string:
            if mark == "\\":
                self._at += 1
            elif mark == '"':
                self._in_string = False
        elif mark == '"':
            self._in_string = True
        else:
            self._depth += 1 if mark in "[{" else -1
        if not self._in_string and self._depth <= 0:
            # The end of a number, true, false or null shows only in the closing brace around it.
            self._end = self._at + min(self._depth, 0)
