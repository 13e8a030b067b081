"""The call form of Qwen3-Coder: XML with unquoted texts. The parser converts each value to JSON."""

import json
import random
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from engine.errors import InvalidRequest
from engine.grammar.disjoint import names_in, type_of
from router.text.forms.calling import (
    ANY_TEXT,
    NAME,
    AnswerRules,
    CallGrammar,
    Calling,
    TokenOf,
    any_call,
    literal,
    mark,
    start,
    text_before,
)
from router.text.forms.deltas import CallParser, Content, Delta, first_mark
from router.text.forms.lenient import RULES, LenientSchema
from router.text.forms.written_values import (
    OF_WHOLE,
    WrittenArguments,
    as_json,
    is_open,
    kinds_of,
    properties_of,
    resolved,
    with_definitions,
    written,
)

_KEY = r"[^>\s]+"
MAX_TEXT_LEN = 1000  # maximum length of a text that is enforced
_XML_KEY = re.compile(_KEY)
_RULES = [rf"ANY_KEY: /<parameter={_KEY}>/", r"any_value[lazy]: /(?s:.*)<\/parameter>/"]
# Keywords that a grammar cannot enforce on a text without quotes.
_HELD_KEYWORDS = {"format", "pattern", "contentEncoding", "contentMediaType", "allOf", "not"}


class QwenCoder:
    """Calls in XML: texts without quotes, other values as JSON.

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

    def grammar(
        self, calling: Calling, token_of: TokenOf, answer: AnswerRules = ANY_TEXT
    ) -> CallGrammar:
        """Returns the grammar of text, then calls, with arguments in any order."""
        begin, end = (mark(each, token_of) for each in self.marks)
        before, rules = text_before(self.marks[0], token_of)
        body = f"edge ({any_call(calling)}) edge {end}"
        more = "" if calling.at_most_one else f" (edge {begin} {body})*"
        first = start(f"{body}{more}", calling, answer, begin=begin, before=before)
        lines = [first, r"TEXT: /(?s:.*)/", *RULES, *_RULES, *rules, *answer.rules]
        unheld = list[tuple[str, str]]()
        all_found = written(calling, partial(_xml_arguments, calling), "ANY_KEY any_value edge")
        for i, (name, found) in enumerate(all_found):
            unheld += [(name, place) for place in found.unheld]
            members = found.begin(f"members_{i}")
            head, end_of = literal(f"<function={name}>"), literal("</function>")
            lines.append(f"call_{i}: {head} edge {members} {end_of}")
            lines += found.members(f"members_{i}")
        return CallGrammar("\n".join(lines), tuple(unheld))

    def parser(self, calling: Calling, rng: random.Random) -> "QwenCoderParser":
        """Returns a new parser, for one answer."""
        return QwenCoderParser(calling, rng)


def _xml_arguments(calling: Calling, name: str, place: str) -> WrittenArguments:
    """Returns the rules of one function's arguments.

    Raises InvalidRequest if the tool is strict and an argument's schema cannot be enforced.
    """
    schema, is_held = calling.functions[name], name in calling.held
    keys, rules, unheld = dict[str, str](), list[str](), list[str]()
    for j, (key, one) in enumerate(properties_of(schema, name, is_held=is_held).items()):
        if not _XML_KEY.fullmatch(key):
            if is_held:
                raise InvalidRequest(f"tools: {name}: this model's calls cannot hold {key!r}")
            unheld.append(f".properties.{key}")
            continue
        value = _XmlValue(key, one, schema, f"{place}_{j}", is_held=is_held)
        keys[key] = f"argument_{place}_{j}"
        rules += [f"argument_{place}_{j}: {literal(f'<parameter={key}>')} {value.expression}"]
        rules += value.rules
        unheld += [f".properties.{key}{where}" for where in value.unheld]
    unheld += [f".{word}" for word in OF_WHOLE if schema.get(word) and not is_held]
    other = None
    if is_open(schema) and not is_held:
        taken = " | ".join(literal(f"<parameter={key}>") for key in keys)
        rules.append(f"OTHER_{place}: ANY_KEY" + (f" & ~({taken})" if taken else ""))
        other = f"OTHER_{place} any_value edge"
    return WrittenArguments(keys, rules, unheld, names_in(schema.get("required")), other)


class _XmlValue:
    """The rules of one value with its end mark: a text without quotes, or JSON for other types."""

    def __init__(
        self, key: str, schema: Any, root: Mapping[str, Any], place: str, *, is_held: bool
    ) -> None:
        self._schema, self._root, self._place, self._is_held = schema, root, place, is_held
        self.rules: list[str] = []
        self.unheld: list[str] = []
        self.expression = self._expression(key)

    def _expression(self, key: str) -> str:
        known, kinds = resolved(self._schema, self._root), kinds_of(self._schema, self._root)
        end = 'edge "</parameter>" edge'
        if "string" not in kinds:
            return f"edge ({self._json()}) {end}"
        held = sorted(_HELD_KEYWORDS & known.keys()) if kinds == {"string"} else []
        for word in held:
            self._refuse(key, word)
        choices = known.get("enum") or ([known["const"]] if "const" in known else None)
        if isinstance(choices, list):
            ways = {each if isinstance(each, str) else json.dumps(each) for each in choices}
            return f"/\\n/? ({' | '.join(map(literal, sorted(ways)))}) {end}"
        least, most = known.get("minLength") or 0, known.get("maxLength") or ""
        is_short = all(type(n) is int and 0 <= n <= MAX_TEXT_LEN for n in (least, most or 0))
        if kinds == {"string"} and (least or most) and not is_short:
            self._refuse(key, "maxLength" if most else "minLength")
        elif kinds == {"string"} and (least or most):  # a text with length bounds is one line
            self.rules.append(f"TEXT_{self._place}: /[^\\n<]{{{least},{most}}}/")
            return f"/\\n/? TEXT_{self._place} {end}"
        self.rules.append(f"text_{self._place}[lazy]: /(?s:.*)<\\/parameter>/")
        return f"text_{self._place} edge"

    def _refuse(self, key: str, word: str) -> None:
        """Records a keyword that is not enforced. Raises InvalidRequest if the tool is strict."""
        if self._is_held:
            message = f"tools: {key}: this model's calls cannot be held to {word!r} of a text"
            raise InvalidRequest(message, param="tools")
        self.unheld.append(f".{word}")

    def _json(self) -> str:
        if self._is_held:
            return self._rule(as_json(self._schema, self._root))
        found = LenientSchema(with_definitions(self._schema, self._root), f"x{self._place}")
        self.rules += found.rules
        self.unheld += found.unheld
        return found.start

    def _rule(self, body: str) -> str:
        self.rules.append(f"value_{self._place}: {body}")
        return f"value_{self._place}"


_XML_HEAD = re.compile(rf"\s*(?:</tool_call>)?\s*<tool_call>\s*<function=({NAME})>")
_XML_NEXT = re.compile(rf"\s*(?:<parameter=({_KEY})>|(</function>))")
_XML_ENDS = ("\n</parameter>", "</parameter>")


class QwenCoderParser(CallParser):
    """Parses one answer in the form of `QwenCoder`."""

    def __init__(self, calling: Calling, rng: random.Random) -> None:
        super().__init__(rng)
        self._functions = calling.functions
        self._schema: Mapping[str, Any] | None = None  # schema of the present call
        self._num_values = 0  # number of values of the present call so far
        self._kinds: frozenset[str] | None = None  # types of the present value; None: no value
        self._is_first = False  # True if no text of this value has arrived

    def _content(self) -> list[Delta]:
        shown, found, rest = first_mark(self._pending, ("<tool_call>",))
        self._in_calls, self._pending = found is not None, (found or "") + rest
        return [Content(shown)]

    def _step(self) -> list[Delta] | None:
        if self._kinds is not None:
            return self._value(self._kinds)
        if (found := self._next(_XML_HEAD if self._schema is None else _XML_NEXT)) is None:
            return None
        if self._schema is None:
            self._schema, self._num_values = self._functions.get(found[1], {}), 0
            return [self._begun(found[1])]
        if found[2] is not None:
            self._schema = None
            return [self._arguments("}" if self._num_values else "{}")]
        key = found[1]
        known = (self._schema.get("properties") or {}).get(key)
        self._kinds, self._is_first = kinds_of(known, self._schema), True
        head = ("{" if self._num_values == 0 else ", ") + json.dumps(key) + ": "
        self._num_values += 1
        return [self._arguments(head + ('"' if self._kinds == {"string"} else ""))]

    def _value(self, kinds: frozenset[str]) -> list[Delta] | None:
        """Returns a text as it arrives, and any other value when it is complete.

        A line break after the start mark is not a part of the value. The same holds before the end
        mark.
        """
        if self._is_first and self._pending:
            self._pending, self._is_first = self._pending.removeprefix("\n"), False
        shown, found, rest = first_mark(self._pending, _XML_ENDS)
        is_text = kinds == {"string"}
        if found is None and (not is_text or not shown):
            return None
        self._pending = rest
        if found is not None:
            self._kinds = None
        if not is_text:
            return [self._arguments(_json_of(shown, kinds))]
        return [self._arguments(_escaped(shown) + ('"' if found is not None else ""))]


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_of(text: str, kinds: frozenset[str]) -> str:
    """Converts a value to JSON.

    A value that is not JSON becomes a text. So does a value whose type is not among `kinds`, if
    these include texts.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if type_of(value) in kinds or "string" not in kinds:
        return text.strip()
    return json.dumps(text, ensure_ascii=False)
