"""The form of calls as a list of Python calls. The parser converts each value to JSON."""

import ast
import json
import random
import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from engine.grammar.disjoint import names_in
from router.text.forms.calling import (
    ANY_TEXT,
    NAME,
    AnswerRules,
    CallGrammar,
    Calling,
    TokenOf,
    any_call,
    literal,
    unlike_calls,
)
from router.text.forms.deltas import CallBegin, CallParser, Content, Delta
from router.text.forms.lenient import BLANKS, RULES, LenientSchema
from router.text.forms.written_values import (
    OF_WHOLE,
    WrittenArguments,
    as_json,
    is_open,
    properties_of,
    resolved,
    with_definitions,
    written,
)

_PYTHON_RULES = [
    r"PYTHON_STRING: /'([^'\\\n]|\\.)*'/",
    "ANY_KEY: /[A-Za-z_][0-9A-Za-z_]*/",
    'python_value: anything | PYTHON_STRING | "None" | "True" | "False" | python_list',
    'python_list: "[" gap (python_value gap ("," gap python_value gap)*)? "]"',
]


class Pythonic:
    """[f(a=1, b="x"), g()]

    Source: Meta, Llama 3.2 and 4 prompt formats; the same in several small models.
    """

    name = "pythonic"
    marks: Sequence[str] = ()

    def begin_of(self, functions: Collection[str]) -> CallBegin:
        """Returns the beginnings of a list: the name of a function and a parenthesis."""
        names = "|".join(map(re.escape, functions))
        compact = [f"[{name}(" for name in functions]
        return CallBegin(re.compile(rf"\s*\[\s*({names})\s*\("), compact)

    def grammar(
        self, calling: Calling, token_of: TokenOf, answer: AnswerRules = ANY_TEXT
    ) -> CallGrammar:
        """Returns the grammar of a list of calls, or of text that does not begin like a call."""
        more = "" if calling.at_most_one else f' (edge "," edge ({any_call(calling)}))*'
        first_call = " | ".join(f"FIRST_{i} rest_{i}" for i in range(len(calling.functions)))
        calls = f'({first_call}){more} edge "]"'
        text, rules = unlike_calls(self.begin_of(calling.functions).pattern.pattern, answer)
        first = f"start: {calls}" if calling.at_least_one else f"start: {text} | {calls}"
        lines = [first, r"TEXT: /(?s:.*)/", *RULES, *_PYTHON_RULES, *rules, *answer.rules]
        unheld = list[tuple[str, str]]()
        free = 'ANY_KEY edge "=" edge python_value'
        all_found = written(calling, partial(_python_arguments, calling), free)
        for i, (name, found) in enumerate(all_found):
            unheld += [(name, place) for place in found.unheld]
            members = found.begin(f"members_{i}")
            # One lexeme, which ends where other text is excluded, as the longest lexeme wins.
            lines.append(rf"FIRST_{i}: /\[{BLANKS}?{re.escape(name)}{BLANKS}?\(/")
            lines.append(f'call_{i}: {literal(name)} edge "(" rest_{i}')
            lines.append(f'rest_{i}: edge {members} edge ")"')
            lines += found.members(f"members_{i}", between='edge "," edge')
        return CallGrammar("\n".join(dict.fromkeys(lines)), tuple(unheld))

    def parser(self, calling: Calling, rng: random.Random) -> "PythonicParser":
        """Returns a new parser, for one answer."""
        return PythonicParser(rng, self.begin_of(calling.functions))


def _python_arguments(calling: Calling, name: str, place: str) -> WrittenArguments:
    schema, is_held = calling.functions[name], name in calling.held
    keys, rules, unheld = dict[str, str](), list[str](), list[str]()
    for j, (key, one) in enumerate(properties_of(schema, name, is_held=is_held).items()):
        where = f"{place}_{j}"
        keys[key] = f"argument_{where}"
        if is_held:
            value = f"value_{where}"
            rules += _held_python(where, one, schema)
        else:
            found = LenientSchema(with_definitions(one, schema), f"x{where}", is_python=True)
            value = found.start
            rules += found.rules
            unheld += [f".properties.{key}{each}" for each in found.unheld]
        rules.append(f'argument_{where}: {literal(key)} edge "=" edge ({value})')
    unheld += [f".{word}" for word in OF_WHOLE if schema.get(word) and not is_held]
    other = None
    if is_open(schema) and not is_held:
        taken = " | ".join(map(literal, keys))
        rules.append(f"OTHER_{place}: ANY_KEY" + (f" & ~({taken})" if taken else ""))
        other = f'OTHER_{place} edge "=" edge python_value'
    return WrittenArguments(keys, rules, unheld, names_in(schema.get("required")), other)


def _held_python(place: str, schema: Any, root: Mapping[str, Any]) -> list[str]:
    names = {"boolean": '"True" | "False"', "null": '"None"'}
    value = names.get(str(resolved(schema, root).get("type"))) or as_json(schema, root)
    return [f"value_{place}: {value}"]


_PY_HEAD = re.compile(rf"\s*[\[,]\s*({NAME})\s*\(")
_PY_NEXT = re.compile(r"\s*,?\s*(?:([A-Za-z_][\w.-]*)\s*=\s*|(\)))")


class PythonicParser(CallParser):
    """Parses one answer in the form of `Pythonic`."""

    def __init__(self, rng: random.Random, begin: CallBegin) -> None:
        super().__init__(rng)
        self._begin = begin
        self._is_begin = True  # True while it is unknown whether calls come
        self._in_call = False
        self._num_values = 0
        self._end: _PythonEnd | None = None  # set while a value arrives
        self._value = ""

    def _content(self) -> list[Delta]:
        if self._is_begin:
            is_call = self._begin.is_call(self._pending)
            if is_call is None:
                return []
            self._is_begin, self._in_calls = False, is_call
        if self._in_calls:
            return []
        shown, self._pending = self._pending, ""
        return [Content(shown)]

    def _step(self) -> list[Delta] | None:
        if self._end is not None:
            return self._argument(self._end)
        if (found := self._next(_PY_NEXT if self._in_call else _PY_HEAD)) is None:
            return None
        if not self._in_call:
            self._in_call, self._num_values = True, 0
            return [self._begun(found[1])]
        if found[2] is not None:
            self._in_call = False
            return [self._arguments("}" if self._num_values else "{}")]
        head = ("{" if self._num_values == 0 else ", ") + json.dumps(found[1]) + ": "
        self._num_values += 1
        self._end, self._value = _PythonEnd(), ""
        return [self._arguments(head)]

    def _argument(self, end: "_PythonEnd") -> list[Delta] | None:
        length = end.find(self._pending)
        self._value += self._pending[:length]
        self._pending = "" if length is None else self._pending[length:]
        if length is None:
            return None
        self._end = None
        return [self._arguments(_json_of_python(self._value))]


class _PythonEnd:
    """Finds the comma or parenthesis after a value that arrives in pieces."""

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
    """Converts a value to JSON. If it is neither JSON nor a Python literal, it becomes a text."""
    for read in (json.loads, ast.literal_eval):
        try:
            return json.dumps(read(text.strip()), ensure_ascii=False)
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
    return json.dumps(text, ensure_ascii=False)
