"""The forms of calls with JSON arguments after a head that names the function."""

import json
import random
import re
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from router.text.forms.calling import (
    ANY_TEXT,
    NAME,
    AnswerRules,
    CallGrammar,
    Calling,
    TokenOf,
    any_call,
    arguments,
    literal,
    mark,
    start,
    text_before,
    unlike_calls,
)
from router.text.forms.deltas import CallBegin, CallParser, Content, Delta, JsonEnd, first_mark
from router.text.forms.lenient import BLANKS, RULES

MAX_WAYS = 16  # maximum number of functions tried in parallel if arguments precede the name
_DEFINITIONS = ("$defs", "definitions")
_OTHER_REFERENCE = re.compile(r'"\$ref": "(?!#/(\$defs|definitions)/)')
_TEXT = r"TEXT: /(?s:.*)/"


def _head(before: str, key: str) -> re.Pattern[str]:
    """Returns a pattern for the beginning of a call's object, up to the arguments."""
    return re.compile(rf'{before}\{{\s*"name"\s*:\s*"({NAME})"\s*,\s*"{key}"\s*:\s*')


def _unnamed_head(before: str, key: str) -> re.Pattern[str]:
    return re.compile(rf'{before}\{{\s*"{key}"\s*:\s*')


def _named_tail(after: str) -> re.Pattern[str]:
    return re.compile(rf'\s*,\s*"name"\s*:\s*"({NAME})"\s*\}}{after}')


class JsonCallForm:
    """A form with JSON arguments, after a mark and a head that names the function.

    If a model writes the name after the arguments, `unnamed_head` and `named_tail` match. If `key`
    is set, a call is an object with a name, and with arguments under this key.
    """

    name: ClassVar[str]
    opening: ClassVar[str]
    marks: ClassVar[Sequence[str]]
    head: ClassVar[re.Pattern[str]]
    tail: ClassVar[re.Pattern[str]]
    unnamed_head: ClassVar[re.Pattern[str] | None] = None
    named_tail: ClassVar[re.Pattern[str] | None] = None
    key: ClassVar[str | None] = None

    def begin_of(self, functions: Collection[str]) -> CallBegin | None:
        """Returns the beginnings of calls without a mark; None if calls always have a mark."""
        return None

    def grammar(
        self, calling: Calling, token_of: TokenOf, answer: AnswerRules = ANY_TEXT
    ) -> CallGrammar:
        """Returns the grammar of text, then calls. No text follows the calls."""
        marks = [mark(each, token_of) for each in self.marks]
        before, rules = text_before(self.opening, token_of)
        calls, more = self._calls(calling, marks)
        first = start(calls, calling, answer, begin=marks[0], before=before)
        return _grammar(first, [*rules, *answer.rules, *more], calling, self.key)

    def _calls(self, calling: Calling, marks: Sequence[str]) -> tuple[str, list[str]]:
        """Returns an expression for the calls after the first mark, and the rules that it needs."""
        raise NotImplementedError

    def parser(self, calling: Calling, rng: random.Random) -> "JsonCallParser":
        """Returns a parser of one answer."""
        return JsonCallParser(self, rng, calling.functions)


class Hermes(JsonCallForm):
    """`<tool_call>` {"name": "f", "arguments": {…}} `</tool_call>`.

    Source: NousResearch, Hermes function calling; Qwen2.5 and Qwen3 write the same.
    """

    name = "hermes"
    key = "arguments"
    opening = "<tool_call>"
    marks = ("<tool_call>", "</tool_call>")
    _before, _after = r"\s*<tool_call>\s*", r"\s*</tool_call>"
    head, unnamed_head = _head(_before, "arguments"), _unnamed_head(_before, "arguments")
    tail, named_tail = re.compile(r"\s*\}" + _after), _named_tail(_after)

    def _calls(self, calling: Calling, marks: Sequence[str]) -> tuple[str, list[str]]:
        begin, end = marks
        more = "" if calling.at_most_one else f" (edge {begin} body)*"
        return f"body{more}", [f"body: edge ({any_call(calling)}) edge {end}"]


class Llama(JsonCallForm):
    """{"name": "f", "parameters": {…}}. Several are separated by `; `. `<|python_tag|>` may
    precede.

    Source: Meta, Llama 3.1 and 3.2 prompt formats, custom tools in JSON.
    """

    name = "llama3_json"
    key = "parameters"
    opening = "<|python_tag|>"
    marks = ("<|python_tag|>",)
    _before = r"\s*(?:<\|python_tag\|>)?\s*;?\s*"
    head, unnamed_head = _head(_before, "parameters"), _unnamed_head(_before, "parameters")
    tail, named_tail = re.compile(r"\s*\}"), _named_tail("")

    def begin_of(self, functions: Collection[str]) -> CallBegin:
        """Returns the beginnings of an object that names a function or begins with parameters."""
        names = "|".join(map(re.escape, functions))
        return CallBegin(
            re.compile(rf'\s*\{{\s*("name"\s*:\s*"({names})"|"parameters"\s*:)'),
            ['{"parameters":', *(f'{{"name":"{name}"' for name in functions)],
        )

    def grammar(
        self, calling: Calling, token_of: TokenOf, answer: AnswerRules = ANY_TEXT
    ) -> CallGrammar:
        """Returns the grammar of calls, or of text that does not begin like a call."""
        tag = mark(self.opening, token_of)
        more = "" if calling.at_most_one else f' (edge ";" edge ({any_call(calling)}))*'
        calls = f"{tag}? ({any_call(calling)}){more}"
        begins = self.begin_of(calling.functions).pattern.pattern
        if token_of(self.opening) is None:
            begins = rf"((?s:.*)<\|python_tag\|>|{begins})"
        text, rules = unlike_calls(begins, answer)
        first = f"start: {calls}" if calling.at_least_one else f"start: {text} | {calls}"
        if not answer.is_any_text:
            return _beside_json(first, answer.rules, calling)
        return _grammar(first, rules, calling, "parameters")


class Mistral(JsonCallForm):
    """`[TOOL_CALLS]` [{"name": "f", "arguments": {…}}, …].

    Source: mistral-common, instruct tokenizers v3 to v7.
    """

    name = "mistral"
    key = "arguments"
    opening = "[TOOL_CALLS]"
    marks = ("[TOOL_CALLS]",)
    _before = r"\s*(?:\[TOOL_CALLS\]\s*\[|,)\s*"
    head, unnamed_head = _head(_before, "arguments"), _unnamed_head(_before, "arguments")
    tail, named_tail = re.compile(r"\s*\}"), _named_tail("")

    def _calls(self, calling: Calling, marks: Sequence[str]) -> tuple[str, list[str]]:
        more = "" if calling.at_most_one else f' (edge "," edge ({any_call(calling)}))*'
        return f'edge "[" edge ({any_call(calling)}){more} edge "]"', []


class MistralArgs(JsonCallForm):
    """`[TOOL_CALLS]` f `[ARGS]` {…}, repeated.

    Source: mistral-common, instruct tokenizer v11 and later.
    """

    name = "mistral_args"
    opening = "[TOOL_CALLS]"
    marks = ("[TOOL_CALLS]", "[ARGS]")
    head = re.compile(rf"\s*\[TOOL_CALLS\]\s*({NAME})\s*\[ARGS\]\s*")
    tail = re.compile(r"")

    def _calls(self, calling: Calling, marks: Sequence[str]) -> tuple[str, list[str]]:
        begin, args = marks
        more = "" if calling.at_most_one else f" ({begin} ({any_call(calling)}))*"
        heads = [
            f"call_{i}: edge {literal(name)} edge {args} edge arguments_{i}"
            for i, name in enumerate(calling.functions)
        ]
        return f"({any_call(calling)}){more}", heads


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
        rf"\s*(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>({NAME})<｜tool▁sep｜>\s*"
    )
    tail = re.compile(r"\s*<｜tool▁call▁end｜>")
    before_name: ClassVar[str] = ""
    before_arguments: ClassVar[str] = ""
    after_arguments: ClassVar[str] = ""

    def _calls(self, calling: Calling, marks: Sequence[str]) -> tuple[str, list[str]]:
        _, call, part, end, last = marks
        more = "" if calling.at_most_one else f" (edge ({any_call(calling)}))*"
        heads = [
            " ".join(
                (
                    f"call_{i}: {call}",
                    *([literal(self.before_name), part] if self.before_name else ()),
                    literal(name + self.before_arguments),
                    *(() if self.before_name else (part,)),
                    f"edge arguments_{i}",
                    *([literal(self.after_arguments)] if self.after_arguments else ("edge",)),
                    end,
                )
            )
            for i, name in enumerate(calling.functions)
        ]
        return f"edge ({any_call(calling)}){more} edge {last}", heads


class DeepSeekFenced(DeepSeek):
    """The form of DeepSeek with `function` before the name, and arguments in a Markdown fence.

    Source: the chat templates of DeepSeek-V3 and DeepSeek-R1.
    """

    name = "deepseek_v3"
    head = re.compile(
        r"\s*(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        rf"({NAME})\n```json\n\s*"
    )
    tail = re.compile(r"\n```<｜tool▁call▁end｜>")
    before_name = "function"
    before_arguments = "\n```json\n"
    after_arguments = "\n```"


class JsonCallParser(CallParser):
    """Parses one answer in a form with JSON arguments after a head."""

    def __init__(
        self, form: JsonCallForm, rng: random.Random, functions: Collection[str] = ()
    ) -> None:
        super().__init__(rng)
        self._form = form
        self._begin = form.begin_of(functions)
        self._is_begin = True  # True while only blanks have arrived
        self._end: JsonEnd | None = None  # set while arguments arrive
        self._tail = False  # True if the tail of a call comes next
        self._unnamed: list[str] | None = None  # arguments before the function's name

    def _content(self) -> list[Delta]:
        form = self._form
        if self._is_begin and self._begin is not None:
            is_call = self._begin.is_call(self._pending)
            if is_call is None:
                return []  # the text may become a call without a mark
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
        """Parses the function's name after the arguments, and the end of the call."""
        assert self._form.named_tail is not None
        if (found := self._next(self._form.named_tail)) is None:
            return None
        self._unnamed = None
        return [self._begun(found[1]), self._arguments("".join(unnamed))]


def _grammar(
    first: str, rules: Sequence[str], calling: Calling, key: str | None = None
) -> CallGrammar:
    """Returns the grammar of a form. With `key`, calls are objects with a name and arguments."""
    objects = [] if key is None else _objects(calling, key)
    held = arguments(calling)
    lines = dict.fromkeys([first, _TEXT, *rules, *objects, *held.rules])
    return CallGrammar("\n".join(lines), held.unheld)


def _beside_json(first: str, rules: Sequence[str], calling: Calling) -> CallGrammar:
    """Returns the grammar of calls beside a JSON answer, which may begin like a call.

    Calls are written as `%json`, so that calls and the answer have the same lexemes.
    """
    lines, unheld = list[str](), list[tuple[str, str]]()
    for i, (name, schema) in enumerate(calling.functions.items()):
        definitions = {word: schema[word] for word in _DEFINITIONS if word in schema}
        call: dict[str, Any] = {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": schema},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        text = json.dumps({**call, **definitions}, ensure_ascii=False)
        is_moved = _OTHER_REFERENCE.search(text) is not None
        if name not in calling.held and (name in calling.free or is_moved):
            call["properties"]["parameters"] = {"type": "object"}
            text = json.dumps(call, ensure_ascii=False)
            unheld.append((name, ""))
        lines.append(f"call_{i}: %json {text}")
    return CallGrammar("\n".join([first, *RULES, *rules, *lines]), tuple(unheld))


def _objects(calling: Calling, key: str) -> list[str]:
    """Returns the rules of calls that are an object.

    If the arguments precede the name, arguments of all functions are tried in parallel.

    The beginning of an object is one lexeme. The longest lexeme wins, so text that may come instead
    of a call must not match as a longer lexeme than the brace. The lexeme ends where such text is
    excluded.

    A required call begins in a single spelling, as the model has no other choice there.
    """
    if calling.at_least_one:
        return [
            f"call_{i}: {literal(_written_head(name, key))} arguments_{i} {literal('}')}"
            for i, name in enumerate(calling.functions)
        ]
    names = [name for name in calling.functions if name not in calling.held]
    lines = [f"KEYED: /{_head_of(key)}/"]
    for i, name in enumerate(calling.functions):
        begin = f'/{_head_of("name")}{BLANKS}?"{re.escape(name)}"/'
        ways = [f'{begin} edge "," edge {_quoted(key)} edge ":" edge arguments_{i} edge "}}"']
        if name in names:
            value = f"arguments_{i}" if len(names) <= MAX_WAYS else "any_object"
            named = f'{_quoted("name")} edge ":" edge {_quoted(name)}'
            ways.append(f'KEYED edge {value} edge "," edge {named} edge "}}"')
        lines.append(f"call_{i}: " + "\n  | ".join(ways))
    return lines


def _written_head(name: str, key: str) -> str:
    return f'{{"name": "{name}", "{key}": '


def _head_of(key: str) -> str:
    return rf'\{{{BLANKS}?"{key}"{BLANKS}?:'


def _quoted(name: str) -> str:
    return literal(f'"{name}"')
