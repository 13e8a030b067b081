"""Forms whose arguments are JSON behind a head that names the function.

All of these share a parser, which a form describes by two regular expressions: of the head, up to
the arguments, and of what follows them. Arguments are passed on as they come.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from router.text.forms.calling import (
    NAME,
    Calling,
    TokenOf,
    any_call,
    arguments,
    literal,
    mark,
    text_before,
)
from router.text.forms.deltas import (
    CallArguments,
    Content,
    Delta,
    JsonEnd,
    first_mark,
    merged,
    new_call,
)

MAX_HEAD_LEN = 1024  # characters between calls; a grammar allows no more
_TEXT = [r"TEXT: /(?s:.*)/", r"BLANK: /[ \n]{0,2}/"]


class JsonCallParser:
    """Parses one answer of such a form."""

    def __init__(self, form: "JsonCallForm", rng: random.Random) -> None:
        self._form = form
        self._rng = rng
        self._pending = ""  # not reported yet
        self._is_begin = True  # nothing but blanks has come
        self._in_calls = False
        self._end: JsonEnd | None = None  # of the arguments that come now
        self._tail = False  # what follows them comes now
        self.num_calls = 0
        self.is_reasoning = False

    def feed(self, text: str) -> list[Delta]:
        """Takes more text of the answer and returns what it makes certain."""
        self._pending += text
        deltas: list[Delta] = [] if self._in_calls else self._content()
        while self._in_calls and (more := self._step()) is not None:
            deltas += more
        return merged(deltas)

    def finish(self, *, is_cut: bool = False) -> list[Delta]:
        """Returns the text that might have begun a mark, unless a call was cut."""
        rest, self._pending = self._pending, ""
        return [] if self._in_calls or is_cut else merged([Content(rest)])

    def _content(self) -> list[Delta]:
        form = self._form
        if self._is_begin and form.bare is not None:
            stripped = self._pending.lstrip()
            if form.bare.startswith(stripped) and stripped != form.bare:
                return []  # may become a call without a mark
            if stripped.startswith(form.bare):
                self._in_calls, self._pending = True, stripped
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
        """Takes the next part of a call; None if more text is needed."""
        if self._end is not None:
            return self._arguments(self._end)
        pattern = self._form.tail if self._tail else self._form.head
        found = pattern.match(self._pending)
        if found is None:
            if len(self._pending) > MAX_HEAD_LEN:
                self._pending = ""  # no model's grammar allows this
            return None
        self._pending = self._pending[found.end() :]
        if self._tail:
            self._tail = False
            return []
        self._end = JsonEnd()
        self.num_calls += 1
        return [new_call(self._rng, self.num_calls - 1, found[1])]

    def _arguments(self, end: JsonEnd) -> list[Delta] | None:
        if not self._pending:
            return None
        length = end.find(self._pending)
        text = self._pending[:length]
        self._pending = self._pending[len(text) :]
        if length is not None:
            self._end, self._tail = None, True
        return [CallArguments(self.num_calls - 1, text)]


@dataclass(frozen=True)
class JsonCallForm:
    """What the parser knows of a form. `bare` begins a call at the begin of an answer."""

    name: ClassVar[str]
    head: ClassVar[re.Pattern[str]]
    tail: ClassVar[re.Pattern[str]]
    opening: ClassVar[str] = ""
    bare: ClassVar[str | None] = None
    marks: ClassVar[Sequence[str]] = ()

    def parser(self, calling: Calling, rng: random.Random) -> JsonCallParser:
        """Returns a parser of one answer."""
        return JsonCallParser(self, rng)


class Hermes(JsonCallForm):
    """`<tool_call>` {"name": "f", "arguments": {…}} `</tool_call>`.

    Source: NousResearch, Hermes function calling; Qwen2.5 and Qwen3 write the same.
    """

    name = "hermes"
    opening = "<tool_call>"
    marks = ("<tool_call>", "</tool_call>")
    head = re.compile(rf'\s*<tool_call>\s*\{{"name": "({NAME})", "arguments": ')
    tail = re.compile(r"\}\s*</tool_call>")

    def grammar(self, calling: Calling, token_of: TokenOf) -> str:
        """Text, then calls, which nothing follows."""
        begin, end = (mark(each, token_of) for each in self.marks)
        before, rules = text_before(self.opening, token_of)
        more = "" if calling.at_most_one else f" (BLANK {begin} body)*"
        return _lines(
            f"{begin} body{more}" if calling.at_least_one else f"TEXT | {before} body{more}",
            [*rules, f"body: BLANK ({any_call(calling)}) BLANK {end}"],
            _objects(calling, "arguments"),
        )


class Llama(JsonCallForm):
    """{"name": "f", "parameters": {…}}, several parted by `; `, perhaps behind `<|python_tag|>`.

    Source: Meta, Llama 3.1 and 3.2 prompt formats, custom tools in JSON.
    """

    name = "llama3_json"
    opening = "<|python_tag|>"
    bare = '{"name": "'
    marks = ("<|python_tag|>",)
    head = re.compile(rf'\s*(?:<\|python_tag\|>)?\s*;?\s*\{{"name": "({NAME})", "parameters": ')
    tail = re.compile(r"\}")

    def grammar(self, calling: Calling, token_of: TokenOf) -> str:
        """Calls, or text that does not begin like one."""
        tag = mark(self.opening, token_of)
        more = "" if calling.at_most_one else f' ("; " ({any_call(calling)}))*'
        calls = f"{tag}? ({any_call(calling)}){more}"
        return _lines(
            calls if calling.at_least_one else f"ANSWER | {calls}",
            [r"ANSWER: /([^\s{<](?s:.*))?/"],
            _objects(calling, "parameters"),
        )


class Mistral(JsonCallForm):
    """`[TOOL_CALLS]` [{"name": "f", "arguments": {…}}, …].

    Source: mistral-common, instruct tokenizers v3 to v7.
    """

    name = "mistral"
    opening = "[TOOL_CALLS]"
    marks = ("[TOOL_CALLS]",)
    head = re.compile(rf'\s*(?:\[TOOL_CALLS\]\s*\[|,)\s*\{{"name": "({NAME})", "arguments": ')
    tail = re.compile(r"\}")

    def grammar(self, calling: Calling, token_of: TokenOf) -> str:
        """Text, then a list of calls."""
        before, rules = text_before(self.opening, token_of)
        more = "" if calling.at_most_one else f' ("," BLANK ({any_call(calling)}))*'
        calls = f'BLANK "[" ({any_call(calling)}){more} "]"'
        begin = mark(self.opening, token_of)
        return _lines(
            f"{begin} {calls}" if calling.at_least_one else f"TEXT | {before} {calls}",
            rules,
            _objects(calling, "arguments"),
        )


class MistralArgs(JsonCallForm):
    """`[TOOL_CALLS]` f `[ARGS]` {…}, repeated.

    Source: mistral-common, instruct tokenizer v11 and later.
    """

    name = "mistral_args"
    opening = "[TOOL_CALLS]"
    marks = ("[TOOL_CALLS]", "[ARGS]")
    head = re.compile(rf"\s*\[TOOL_CALLS\]({NAME})\[ARGS\]")
    tail = re.compile(r"")

    def grammar(self, calling: Calling, token_of: TokenOf) -> str:
        """Text, then calls."""
        begin, args = (mark(each, token_of) for each in self.marks)
        before, rules = text_before(self.opening, token_of)
        more = "" if calling.at_most_one else f" ({begin} ({any_call(calling)}))*"
        calls = f"({any_call(calling)}){more}"
        heads = [
            f"call_{i}: {literal(name)} {args} arguments_{i}"
            for i, name in enumerate(calling.functions)
        ]
        return _lines(
            f"{begin} {calls}" if calling.at_least_one else f"TEXT | {before} {calls}",
            rules,
            [*heads, *arguments(calling)],
        )


class DeepSeek(JsonCallForm):
    """`<｜tool▁call▁begin｜>` f `<｜tool▁sep｜>` {…} `<｜tool▁call▁end｜>`, between two marks.

    Source: the chat template of DeepSeek-V3.1.
    """

    name = "deepseek_v31"
    opening = "<｜tool▁calls▁begin｜>"
    marks = (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    )
    head = re.compile(
        rf"\s*(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>({NAME})<｜tool▁sep｜>"
    )
    tail = re.compile(r"\s*<｜tool▁call▁end｜>")
    before_name: ClassVar[str] = ""
    before_arguments: ClassVar[str] = ""
    after_arguments: ClassVar[str] = ""
    between: ClassVar[str] = ""

    def grammar(self, calling: Calling, token_of: TokenOf) -> str:
        """Text, then calls between their marks."""
        begin, call, part, end, last = (mark(each, token_of) for each in self.marks)
        before, rules = text_before(self.opening, token_of)
        join = literal(self.between) if self.between else ""
        more = "" if calling.at_most_one else f" ({join} ({any_call(calling)}))*"
        calls = f"({any_call(calling)}){more} {last}"
        heads = [
            " ".join(
                (
                    f"call_{i}: {call}",
                    *([literal(self.before_name), part] if self.before_name else ()),
                    literal(name + self.before_arguments),
                    *(() if self.before_name else (part,)),
                    f"arguments_{i}",
                    *([literal(self.after_arguments)] if self.after_arguments else ()),
                    end,
                )
            )
            for i, name in enumerate(calling.functions)
        ]
        return _lines(
            f"{begin} {calls}" if calling.at_least_one else f"TEXT | {before} {calls}",
            rules,
            [*heads, *arguments(calling)],
        )


class DeepSeekFenced(DeepSeek):
    """The same with `function` before the name, and arguments in a Markdown fence.

    Source: the chat templates of DeepSeek-V3 and DeepSeek-R1.
    """

    name = "deepseek_v3"
    head = re.compile(
        r"\s*(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        rf"({NAME})\n```json\n"
    )
    tail = re.compile(r"\n```<｜tool▁call▁end｜>")
    before_name = "function"
    before_arguments = "\n```json\n"
    after_arguments = "\n```"
    between = "\n"


def _objects(calling: Calling, key: str) -> list[str]:
    """Rules of calls that are a JSON object with two keys."""
    heads = [
        f"call_{i}: {literal(_head(name, key))} arguments_{i} {literal('}')}"
        for i, name in enumerate(calling.functions)
    ]
    return [*heads, *arguments(calling)]


def _head(name: str, key: str) -> str:
    return f'{{"name": "{name}", "{key}": '


def _lines(start: str, *rules: list[str]) -> str:
    return "\n".join([f"start: {start}", *_TEXT, *(line for group in rules for line in group)])
