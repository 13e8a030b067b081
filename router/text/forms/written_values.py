"""Forms whose arguments are not JSON; parsers turn them into JSON, value by value."""

import ast
import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import InvalidRequest
from router.text.forms.calling import (
    NAME,
    Calling,
    TokenOf,
    any_call,
    literal,
    mark,
    text_before,
)
from router.text.forms.deltas import (
    CallArguments,
    Content,
    Delta,
    first_mark,
    merged,
    new_call,
)

MAX_HEAD_LEN = 1024  # characters between values
_KEY = r"[^>\s]+"
_HELD_KEYWORDS = ("format", "contentEncoding", "contentMediaType", "allOf", "anyOf", "oneOf", "not")


def properties_of(schema: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The arguments of a function by name, required ones first found among all.

    Raises InvalidRequest for what such forms cannot hold to.
    """
    found = schema.get("properties", {})
    unknown = set(schema.get("required", ())) - set(found)
    if unknown or schema.get("patternProperties"):
        message = f"tools: {name}: this model's calls need each argument among the properties"
        raise InvalidRequest(message, param="tools")
    return dict(found)


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A property's schema, behind references within the document."""
    for _ in range(8):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        found: Any = root
        for part in reference[2:].split("/"):
            found = found.get(part) if isinstance(found, dict) else None
        schema = found
    return schema if isinstance(schema, dict) else {}


def _as_json(schema: Any, root: Mapping[str, Any]) -> str:
    """A property's schema in Lark, with the definitions that it may refer to."""
    whole = dict(schema) if isinstance(schema, dict) else {}
    whole |= {name: root[name] for name in ("$defs", "definitions") if name in root}
    return "%json " + json.dumps(whole, ensure_ascii=False)


def _is_text(schema: Mapping[str, Any]) -> bool:
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if values:
        return all(isinstance(value, str) for value in values)
    return schema.get("type") == "string"


# ---------------------------------------------------------------- Qwen3-Coder


class QwenCoder:
    """Calls in XML, with values as they are: text without quotes, other values as JSON.

    <tool_call>
    <function=f>
    <parameter=a>
    value
    </parameter>
    </function>
    </tool_call>

    Source: the chat template of Qwen3-Coder.
    """

    name = "qwen3_coder"
    marks = ("<tool_call>", "</tool_call>")

    def grammar(self, calling: Calling, token_of: TokenOf) -> str:
        """Text, then calls, whose arguments come in the order of the schema."""
        begin, end = (mark(each, token_of) for each in self.marks)
        before, rules = text_before(self.marks[0], token_of)
        body = f'"\\n" ({any_call(calling)}) "\\n" {end}'
        more = "" if calling.at_most_one else f' ("\\n"? {begin} {body})*'
        lines = [
            f"start: {begin if calling.at_least_one else f'TEXT | {before}'} {body}{more}",
            r"TEXT: /(?s:.*)/",
            *rules,
        ]
        for i, (name, schema) in enumerate(calling.functions.items()):
            parts = []
            required = schema.get("required", ())
            for j, (key, one) in enumerate(properties_of(schema, name).items()):
                parts.append(f"argument_{i}_{j}" + ("" if key in required else "?"))
                lines += _written(f"{i}_{j}", key, one, schema)
            call = " ".join([literal(f"<function={name}>\n"), *parts, literal("</function>")])
            lines.append(f"call_{i}: {call}")
        return "\n".join(lines)

    def parser(self, calling: Calling, rng: random.Random) -> "QwenCoderParser":
        """Returns a parser of one answer."""
        return QwenCoderParser(calling, rng)


def _written(place: str, key: str, schema: Any, root: Mapping[str, Any]) -> list[str]:
    """The rules of one argument. A text ends at the first end mark. Raises InvalidRequest."""
    begin, end = f"<parameter={key}>\n", "\n</parameter>\n"
    known = _resolved(schema, root)
    if not _is_text(known):
        value = f"{literal(begin)} value_{place} {literal(end)}"
        return [f"argument_{place}: {value}", f"value_{place}: {_as_json(schema, root)}"]
    held = next((word for word in (*_HELD_KEYWORDS, "pattern") if word in known), None)
    if held is not None:
        message = f"tools: {key}: this model's calls cannot be held to {held!r} of a text"
        raise InvalidRequest(message, param="tools")
    choices = known.get("enum") or ([known["const"]] if "const" in known else None)
    if choices is not None:
        value = " | ".join(literal(choice) for choice in choices)
        return [f"argument_{place}: {literal(begin)} ({value}) {literal(end)}"]
    if "minLength" in known or "maxLength" in known:
        least, most = known.get("minLength", 0), known.get("maxLength", "")
        text = f"TEXT_{place}: /[^\\n<]{{{least},{most}}}/"  # so short a text is one line
        return [f"argument_{place}: {literal(begin)} TEXT_{place} {literal(end)}", text]
    return [
        f"argument_{place}: {literal(begin)} text_{place}",
        f"text_{place}[lazy]: /(?s:.*)\\n<\\/parameter>\\n/",
    ]


_XML_HEAD = re.compile(rf"\s*(?:</tool_call>)?\s*<tool_call>\s*<function=({NAME})>\n")
_XML_NEXT = re.compile(rf"\s*(?:<parameter=({_KEY})>\n|(</function>))")
_XML_END = "\n</parameter>"


class QwenCoderParser:
    """Parses one answer of that form."""

    def __init__(self, calling: Calling, rng: random.Random) -> None:
        self._functions = calling.functions
        self._rng = rng
        self._pending = ""
        self._in_calls = False
        self._schema: Mapping[str, Any] | None = None  # of the call that comes now
        self._num_values = 0  # of this call
        self._text: bool | None = None  # the value that comes now is a text; None: no value does
        self.num_calls = 0
        self.is_reasoning = False

    def feed(self, text: str) -> list[Delta]:
        """Takes more text of the answer and returns what it makes certain."""
        self._pending += text
        deltas: list[Delta] = []
        if not self._in_calls:
            shown, found, rest = first_mark(self._pending, ("<tool_call>",))
            self._in_calls, self._pending = found is not None, (found or "") + rest
            deltas.append(Content(shown))
        while self._in_calls and (more := self._step()) is not None:
            deltas += more
        return merged(deltas)

    def finish(self, *, is_cut: bool = False) -> list[Delta]:
        """Returns the text that might have begun a mark, unless a call was cut."""
        rest, self._pending = self._pending, ""
        return [] if self._in_calls or is_cut else merged([Content(rest)])

    def _step(self) -> list[Delta] | None:
        if self._text is not None:
            return self._value(is_text=self._text)
        pattern = _XML_HEAD if self._schema is None else _XML_NEXT
        found = pattern.match(self._pending)
        if found is None:
            if len(self._pending) > MAX_HEAD_LEN:
                self._pending = ""  # no model's grammar allows this
            return None
        self._pending = self._pending[found.end() :]
        if self._schema is None:
            self._schema, self._num_values = self._functions.get(found[1], {}), 0
            self.num_calls += 1
            return [new_call(self._rng, self.num_calls - 1, found[1])]
        if found[2] is not None:
            text = "}" if self._num_values else "{}"
            self._schema = None
            return [self._arguments(text)]
        key = found[1]
        known = _resolved(self._schema.get("properties", {}).get(key), self._schema)
        self._text = _is_text(known) or not known
        head = ("{" if self._num_values == 0 else ", ") + json.dumps(key) + ": "
        self._num_values += 1
        return [self._arguments(head + ('"' if self._text else ""))]

    def _value(self, *, is_text: bool) -> list[Delta] | None:
        """A text is passed on as it comes, any other value once it is whole."""
        shown, found, rest = first_mark(self._pending, (_XML_END,))
        if found is None and (not is_text or not shown):
            return None
        self._pending = rest
        if found is not None:
            self._text = None
        if not is_text:
            return [self._arguments(_json_of(shown))]
        return [self._arguments(_escaped(shown) + ('"' if found is not None else ""))]

    def _arguments(self, text: str) -> CallArguments:
        return CallArguments(self.num_calls - 1, text)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_of(text: str) -> str:
    """A value as JSON; what is none stays a text."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text.strip()


# ---------------------------------------------------------------- pythonic


class Pythonic:
    """[f(a=1, b="x"), g()]

    Source: Meta, Llama 3.2 and 4 prompt formats; the same in several small models.
    """

    name = "pythonic"
    marks: Sequence[str] = ()

    def grammar(self, calling: Calling, token_of: TokenOf) -> str:
        """A list of calls, or text that does not begin like one."""
        more = "" if calling.at_most_one else f' (", " ({any_call(calling)}))*'
        calls = f'"[" ({any_call(calling)}){more} "]"'
        lines = [
            f"start: {calls if calling.at_least_one else f'ANSWER | {calls}'}",
            r"ANSWER: /([^\s\[](?s:.*))?/",
        ]
        for i, (name, schema) in enumerate(calling.functions.items()):
            required, optional = list[str](), list[str]()
            for j, (key, one) in enumerate(properties_of(schema, name).items()):
                is_required = key in schema.get("required", ())
                (required if is_required else optional).append(f"argument_{i}_{j}")
                lines += _python_value(f"{i}_{j}", key, one, schema)
            parts = _in_order(required, optional)
            lines.append(f"call_{i}: {literal(name + '(')} {parts} {literal(')')}")
        return "\n".join(lines)

    def parser(self, calling: Calling, rng: random.Random) -> "PythonicParser":
        """Returns a parser of one answer."""
        return PythonicParser(rng)


def _in_order(required: Sequence[str], optional: Sequence[str]) -> str:
    """Arguments with commas between them: all required ones, then any of the others."""
    comma = literal(", ")
    if required:
        more = "".join(f" ({comma} {each})?" for each in optional)
        return f" {comma} ".join(required) + more
    begins = [
        each + "".join(f" ({comma} {later})?" for later in optional[i + 1 :])
        for i, each in enumerate(optional)
    ]
    return f"({' | '.join(begins)})?" if begins else ""


def _python_value(place: str, key: str, schema: Any, root: Mapping[str, Any]) -> list[str]:
    known = _resolved(schema, root)
    names = {"boolean": '"True" | "False"', "null": '"None"'}
    value = names.get(str(known.get("type"))) or _as_json(schema, root)
    return [f"argument_{place}: {literal(key + '=')} value_{place}", f"value_{place}: {value}"]


_PY_HEAD = re.compile(rf"\s*[\[,]\s*({NAME})\(")
_PY_NEXT = re.compile(r"\s*,?\s*(?:([A-Za-z_][\w.-]*)\s*=\s*|(\)))")


class PythonicParser:
    """Parses one answer of that form."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._pending = ""
        self._is_begin = True  # nothing but blanks has come
        self._in_calls = False
        self._in_call = False
        self._num_values = 0
        self._end: _PythonEnd | None = None  # of the value that comes now
        self._value = ""
        self.num_calls = 0
        self.is_reasoning = False

    def feed(self, text: str) -> list[Delta]:
        """Takes more text of the answer and returns what it makes certain."""
        self._pending += text
        if self._is_begin and (begin := self._pending.lstrip()):
            self._is_begin, self._in_calls = False, begin[0] == "["
        if self._is_begin:
            return []
        if not self._in_calls:
            shown, self._pending = self._pending, ""
            return merged([Content(shown)])
        deltas: list[Delta] = []
        while (more := self._step()) is not None:
            deltas += more
        return merged(deltas)

    def finish(self, *, is_cut: bool = False) -> list[Delta]:
        """Returns the text that might have begun a mark, unless a call was cut."""
        rest, self._pending = self._pending, ""
        return [] if self._in_calls or is_cut else merged([Content(rest)])

    def _step(self) -> list[Delta] | None:
        if self._end is not None:
            return self._argument(self._end)
        found = (_PY_NEXT if self._in_call else _PY_HEAD).match(self._pending)
        if found is None:
            if len(self._pending) > MAX_HEAD_LEN:
                self._pending = ""  # no model's grammar allows this
            return None
        self._pending = self._pending[found.end() :]
        if not self._in_call:
            self._in_call, self._num_values = True, 0
            self.num_calls += 1
            return [new_call(self._rng, self.num_calls - 1, found[1])]
        if found[2] is not None:
            self._in_call = False
            return [CallArguments(self.num_calls - 1, "}" if self._num_values else "{}")]
        head = ("{" if self._num_values == 0 else ", ") + json.dumps(found[1]) + ": "
        self._num_values += 1
        self._end, self._value = _PythonEnd(), ""
        return [CallArguments(self.num_calls - 1, head)]

    def _argument(self, end: "_PythonEnd") -> list[Delta] | None:
        length = end.find(self._pending)
        self._value += self._pending[:length]
        self._pending = "" if length is None else self._pending[length:]
        if length is None:
            return None
        self._end = None
        return [CallArguments(self.num_calls - 1, _json_of_python(self._value))]


class _PythonEnd:
    """Finds the comma or parenthesis behind a value that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    def find(self, text: str) -> int | None:
        for at, char in enumerate(text):
            if self._quote:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == self._quote:
                    self._quote = ""
            elif char in "\"'":
                self._quote = char
            elif char in "([{":
                self._depth += 1
            elif self._depth == 0 and char in ",)":
                return at
            elif char in ")]}":
                self._depth -= 1
        return None


def _json_of_python(text: str) -> str:
    """A value as JSON; what is neither JSON nor a Python literal stays a text."""
    for read in (json.loads, ast.literal_eval):
        try:
            return json.dumps(read(text.strip()), ensure_ascii=False)
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
    return json.dumps(text, ensure_ascii=False)
