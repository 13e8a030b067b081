"""Structural tags: an answer made of constant texts, JSON and free text, as one grammar.

Pure. A format is one of these; others are refused by name:

    {"type": "const_string", "value": "…"}
    {"type": "json_schema", "json_schema": {…}}
    {"type": "any_text"}                              the last part, or the content of a tag
    {"type": "sequence", "elements": [format, …]}
    {"type": "or", "elements": [format, …]}
    {"type": "tag", "begin": "…", "content": format, "end": "…"}

Source: xgrammar, structural tags.
"""

import json
import re
from collections.abc import Mapping

from engine.errors import InvalidRequest
from router.text.forms.calling import literal

MAX_PARTS = 1000


def grammar_of_tag(form: object, param: str) -> str:
    """The grammar in Lark. Raises InvalidRequest, which names the part."""
    rules: list[str] = []
    start = _expression(form, param, rules, is_last=True)
    return "\n".join([f"start: {start}", *rules])


def _expression(form: object, param: str, rules: list[str], *, is_last: bool) -> str:
    """An expression for a format, whose rules are added to `rules`."""
    if len(rules) >= MAX_PARTS:
        raise InvalidRequest(f"{param}: more than {MAX_PARTS} parts", param=param)
    if not isinstance(form, dict):
        raise InvalidRequest(f"{param} must be an object", param=param)
    match form:
        case {"type": "const_string", "value": str(value)}:
            return literal(value) if value else '""'
        case {"type": "json_schema", "json_schema": dict() | bool() as schema}:
            return _rule(rules, f"%json {json.dumps(schema, ensure_ascii=False)}")
        case {"type": "any_text"}:
            if not is_last:
                message = f"{param}: any_text must be the last part, or the content of a tag"
                raise InvalidRequest(message, param=param)
            return _terminal(rules, "/(?s:.*)/")
        case {"type": "sequence", "elements": list(elements)} if elements:
            last = len(elements) - 1
            parts = [
                _expression(each, f"{param}.elements[{i}]", rules, is_last=is_last and i == last)
                for i, each in enumerate(elements)
            ]
            return f"({' '.join(parts)})"
        case {"type": "or", "elements": list(elements)} if elements:
            parts = [
                _expression(each, f"{param}.elements[{i}]", rules, is_last=is_last)
                for i, each in enumerate(elements)
            ]
            return f"({' | '.join(parts)})"
        case {"type": "tag", "begin": str(begin), "content": content, "end": str(end)} if end:
            return f"({literal(begin)} {_content(content, end, param, rules)})"
    kind = form.get("type")
    raise InvalidRequest(f"{param}.type {kind!r} is not supported so", param=f"{param}.type")


def _content(content: object, end: str, param: str, rules: list[str]) -> str:
    """The content of a tag up to its end; free text ends at the first end mark."""
    if isinstance(content, Mapping) and content.get("type") == "any_text":
        escaped = re.escape(end).replace("/", "\\/").replace("\\\n", "\\n")
        return _rule(rules, f"/(?s:.*){escaped}/", attributes="[lazy]")
    where = f"{param}.content"
    return f"{_expression(content, where, rules, is_last=False)} {literal(end)}"


def _rule(rules: list[str], body: str, attributes: str = "") -> str:
    name = f"part_{len(rules)}"
    rules.append(f"{name}{attributes}: {body}")
    return name


def _terminal(rules: list[str], body: str) -> str:
    name = f"PART_{len(rules)}"
    rules.append(f"{name}: {body}")
    return name
