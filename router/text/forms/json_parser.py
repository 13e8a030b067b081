"""Parses calls whose arguments are JSON, after a head that names the function.

Several forms share this parser. A form has regular expressions for the head before the arguments
and for the tail after them. Arguments are passed on as they come. If a model writes the name after
the arguments, these wait for the name.
"""

import random
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

from router.text.forms.calling import Calling
from router.text.forms.deltas import CallParser, Content, Delta, JsonEnd, first_mark


class JsonCallParser(CallParser):
    """Parses one answer in a form with JSON arguments."""

    def __init__(
        self, form: "JsonCallForm", rng: random.Random, functions: Collection[str] = ()
    ) -> None:
        super().__init__(rng)
        self._form = form
        self._begin = form.begin_of(functions)
        self._is_begin = True  # only blanks have come so far
        self._end: JsonEnd | None = None  # set while arguments come
        self._tail = False  # the tail of a call comes next
        self._unnamed: list[str] | None = None  # arguments that wait for their function's name

    def _content(self) -> list[Delta]:
        form = self._form
        if self._is_begin and self._begin is not None:
            is_call = self._begin.is_call(self._pending)
            if is_call is None:
                return []  # may become a call without a mark
            if is_call:
                self._in_calls, self._pending = True, self._pending.lstrip()
                return []
        self._is_begin = self._is_begin and not self._pending.strip()
        if not form.opening:
            text, self._pending = self._pending, ""
            return [Content(text)]
        text, found, rest = first_mark(self._pending, (form.opening,))
        self._in_calls = found is not None
        self._pending = (found or "") + rest
        return [Content(text)]

    def _step(self) -> list[Delta] | None:
        if self._end is not None:
            return self._value(self._end)
        if self._unnamed is not None:
            return self._name(self._unnamed)
        if self._tail:
            self._tail = self._next(self._form.tail) is None
            return None if self._tail else []
        unnamed = self._form.unnamed_head
        if unnamed is not None and unnamed.match(self._pending):
            self._next(unnamed)
            self._end, self._unnamed = JsonEnd(), []
            return []
        if (found := self._next(self._form.head)) is None:
            return None
        self._end = JsonEnd()
        return [self._begun(found[1])]

    def _value(self, end: JsonEnd) -> list[Delta] | None:
        if end.is_new:
            self._pending = self._pending.lstrip()
        if not self._pending:
            return None
        length = end.find(self._pending)
        text = self._pending[:length]
        self._pending = self._pending[len(text) :]
        if self._unnamed is not None:
            self._unnamed.append(text)
        if length is not None:
            self._end, self._tail = None, self._unnamed is None
        return [] if self._unnamed is not None else [self._arguments(text)]

    def _name(self, unnamed: Sequence[str]) -> list[Delta] | None:
        """Parses the name after the arguments, and the end of the call."""
        assert self._form.named_tail is not None
        if (found := self._next(self._form.named_tail)) is None:
            return None
        self._unnamed = None
        return [self._begun(found[1]), self._arguments("".join(unnamed))]


@dataclass(frozen=True, slots=True)
class CallBegin:
    """Distinguishes calls without a mark from other text by their beginning."""

    pattern: re.Pattern[str]
    compact: Sequence[str]  # all possible beginnings, without blanks

    def is_call(self, text: str) -> bool | None:
        """True if an answer with this beginning is a call, None if it may become a call."""
        if self.pattern.match(text):
            return True
        compact = "".join(text.split())
        return None if any(each.startswith(compact) for each in self.compact) else False


@dataclass(frozen=True)
class JsonCallForm:
    """The properties of a form for the parser. A call without a mark may only begin an answer."""

    name: ClassVar[str]
    head: ClassVar[re.Pattern[str]]
    tail: ClassVar[re.Pattern[str]]
    unnamed_head: ClassVar[re.Pattern[str] | None] = None
    named_tail: ClassVar[re.Pattern[str] | None] = None
    opening: ClassVar[str] = ""
    marks: ClassVar[Sequence[str]] = ()

    def begin_of(self, functions: Collection[str]) -> CallBegin | None:
        """The beginning of calls without a mark; None if calls always have a mark."""
        return None

    def parser(self, calling: Calling, rng: random.Random) -> JsonCallParser:
        """Returns a parser of one answer."""
        return JsonCallParser(self, rng, calling.functions)
