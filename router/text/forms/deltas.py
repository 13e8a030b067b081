"""The output of answer parsers, and the common interface of these parsers."""

import random
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_HEAD_LEN = 1024  # maximum characters of a head, and between values; no grammar allows more


@dataclass(frozen=True, slots=True)
class Content:
    """More text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More reasoning of the model, before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The start of the call at `index`, which calls this tool."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More text of the arguments of the call at `index`. The arguments are a JSON object."""

    index: int
    text: str


Delta = Content | Reasoning | CallBegun | CallArguments


class AnswerParser(Protocol):
    """Parses one answer as it arrives. The output does not depend on how the text is split."""

    @property
    def num_calls(self) -> int:
        """The number of calls that have begun."""
        ...

    @property
    def is_reasoning(self) -> bool:
        """True if the next text is reasoning."""
        ...

    def feed(self, text: str) -> list[Delta]:
        """Adds text of the answer. Returns the deltas that are now certain."""
        ...

    def finish(self, *, is_cut: bool = False) -> list[Delta]:
        """Returns the remaining text at the end of the answer.

        If the answer `is_cut`, an incomplete mark at its end is not shown.
        """
        ...


class CallParser:
    """Base of parsers of calls. Text is kept until it certainly belongs to a call, or to none."""

    def __init__(self, rng: random.Random) -> None:
        self.num_calls = 0
        self.is_reasoning = False
        self._rng = rng  # generates the ids of calls
        self._pending = ""  # text that was not returned as a delta yet
        self._in_calls = False

    def feed(self, text: str) -> list[Delta]:
        """Adds text of the answer. Returns the deltas that are now certain."""
        self._pending += text
        deltas = [] if self._in_calls else self._content()
        while self._in_calls and (more := self._step()) is not None:
            deltas += more
        return merged(deltas)

    def finish(self, *, is_cut: bool = False) -> list[Delta]:
        """Returns the remaining text at the end of the answer, which may be an incomplete mark.

        Returns nothing if the answer is cut, or ends inside the calls.
        """
        rest, self._pending = self._pending, ""
        return [] if self._in_calls or is_cut else merged([Content(rest)])

    def _content(self) -> list[Delta]:
        """Returns the text before the calls. Sets `_in_calls` when they begin."""
        return []

    @abstractmethod
    def _step(self) -> list[Delta] | None:
        """Parses the next part of a call; returns None if more text is needed."""

    def _next(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Removes a match from the start of the pending text; None if more text is needed."""
        found = pattern.match(self._pending)
        if found is not None:
            self._pending = self._pending[found.end() :]
        elif len(self._pending) > MAX_HEAD_LEN:
            self._pending = ""  # no grammar allows this text
        return found

    def _begun(self, name: str) -> Delta:
        """Starts a call with a new id."""
        self.num_calls += 1
        return CallBegun(self.num_calls - 1, f"call_{self._rng.getrandbits(96):024x}", name)

    def _arguments(self, text: str) -> Delta:
        return CallArguments(self.num_calls - 1, text)


def first_mark(text: str, marks: Sequence[str]) -> tuple[str, str | None, str]:
    """Splits a growing text at the first of the marks.

    Returns the text that is certainly before any mark, the mark or None, and the remaining text. If
    no mark was found, the remaining text is the longest suffix that may begin a mark.
    """
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    if found:
        at, mark = min(found, key=lambda each: (each[0], -len(each[1])))
        return text[:at], mark, text[at + len(mark) :]
    longest = max(map(len, marks), default=1) - 1
    for at in range(max(0, len(text) - longest), len(text)):
        if any(mark.startswith(text[at:]) for mark in marks):
            return text[:at], None, text[at:]
    return text, None, ""


def merged(deltas: Sequence[Delta]) -> list[Delta]:
    """Returns the deltas without empty ones."""
    return [delta for delta in deltas if isinstance(delta, CallBegun) or delta.text]


class JsonEnd:
    """Finds the end of a JSON value that arrives in pieces. Each piece is read once.

    A grammar makes the value valid, so only braces, brackets and quotes matter. The value ends with
    its closing brace, bracket or quote, so it must be an object, an array or a string.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    @property
    def is_new(self) -> bool:
        """True if no part of the value has arrived."""
        return self._depth == 0 and not self._in_string

    def find(self, text: str) -> int | None:
        """Returns the length of the value's part in this piece; None if the value continues."""
        for at, char in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._in_string = False
                    if self._depth == 0:
                        return at + 1
            elif char == '"':
                self._in_string = True
            elif char in "[{":
                self._depth += 1
            elif char in "]}":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return None


@dataclass(frozen=True, slots=True)
class CallBegin:
    """Recognises calls without a mark by their first characters."""

    pattern: re.Pattern[str]
    compact: Sequence[str]  # all possible beginnings of calls, without blanks

    def is_call(self, text: str) -> bool | None:
        """True if an answer with this beginning is a call, None if it may become a call."""
        if self.pattern.match(text):
            return True
        compact = "".join(text.split())
        return None if any(each.startswith(compact) for each in self.compact) else False
