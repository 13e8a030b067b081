"""What parsers make of an answer's text, and the parsers' common interface."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_HEAD_LEN = 1024  # characters of a head, and between values; no grammar allows more


@dataclass(frozen=True, slots=True)
class Content:
    """More text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The call at `index` is of this tool."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of the call at `index`, which are a JSON object."""

    index: int
    text: str


Delta = Content | Reasoning | CallBegun | CallArguments


class AnswerParser(Protocol):
    """Parses one answer as it arrives. What it returns depends on the text, not on its pieces."""

    @property
    def num_calls(self) -> int:
        """Calls begun."""
        ...

    @property
    def is_reasoning(self) -> bool:
        """True if the text that comes now belongs to the reasoning."""
        ...

    def feed(self, text: str) -> list[Delta]:
        """Takes more text of the answer and returns what it makes certain."""
        ...

    def finish(self, *, is_cut: bool = False) -> list[Delta]:
        """Returns what was held back, at the end of the answer.

        Of an answer that `is_cut`, the begin of a mark is not shown.
        """
        ...


def new_call(rng: random.Random, index: int, name: str) -> CallBegun:
    """The begin of a call, with an id of its own."""
    return CallBegun(index, f"call_{rng.getrandbits(96):024x}", name)


def first_mark(text: str, marks: Sequence[str]) -> tuple[str, str | None, str]:
    """Splits a growing text at the first of the marks.

    Returns the text that is certainly before any mark, the mark or None, and the rest. Without a
    mark, the rest is the longest end of the text that may begin one.
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
    """The same deltas without empty ones."""
    return [delta for delta in deltas if isinstance(delta, CallBegun) or delta.text]


class JsonEnd:
    """Finds the end of a JSON value that comes in pieces; reads each piece once.

    A grammar makes the value valid, so only braces, brackets and quotes matter. It ends with the
    brace, bracket or quote that closes it, and so must be an object, an array or a string.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    @property
    def is_new(self) -> bool:
        """True if nothing of the value has come."""
        return self._depth == 0 and not self._in_string

    def find(self, text: str) -> int | None:
        """The length of this piece's part of the value; None if the value goes on."""
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
