"""Structural tags: an answer made of constant texts, JSON and free text, as one grammar.

Pure. A format is one of these; any other format is refused by name:

    {"type": "const_string", "value": "…"}
    {"type": "json_schema", "json_schema": {…}}
    {"type": "any_text"}                              the last part, or the content of a tag
    {"type": "sequence", "elements": [format, …]}
    {"type": "or", "elements": [format, …]}
    {"type": "tag", "begin": "…", "content": format, "end": "…"}
    {"type": "tags_with_separator", "tags": [tag, …], "separator": "…"}
    {"type": "triggered_tags", "triggers": ["…", …], "tags": [tag, …]}

The last two may have `at_least_one` and `stop_after_first`. Triggered tags occur in free text. When
the free text contains a trigger, one of the tags that begin with this trigger must follow.
Triggered tags must be the last part.

Source: xgrammar, structural tags.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from engine.errors import InvalidRequest
from router.text.forms.calling import literal

MAX_PARTS = 1000
_OF_TAG = frozenset({"type", "begin", "content", "end"})
_OF_TAGS = frozenset({"type", "tags", "at_least_one", "stop_after_first"})
_NAMES: Mapping[str, frozenset[str]] = {  # the allowed fields of a format, by its type
    "const_string": frozenset({"type", "value"}),
    "json_schema": frozenset({"type", "json_schema"}),
    "any_text": frozenset({"type"}),
    "sequence": frozenset({"type", "elements"}),
    "or": frozenset({"type", "elements"}),
    "tag": _OF_TAG,
    "tags_with_separator": _OF_TAGS | {"separator"},
    "triggered_tags": _OF_TAGS | {"triggers"},
}
_OF_STRUCTURE = frozenset({"begin", "schema", "end"})


def newer_form(value: Mapping[str, Any], param: str) -> dict[str, Any]:
    """Converts an older structural tag, with `structures` and `triggers`, to a format."""
    structures = value.get("structures")
    if not isinstance(structures, list):
        raise InvalidRequest(f"{param}.structures must be a list", param=f"{param}.structures")
    tags: list[dict[str, Any]] = []
    for i, each in enumerate(structures):
        where = f"{param}.structures[{i}]"
        tag = _tag(each, where)
        _check_names(each, _OF_STRUCTURE, where)
        content = {"type": "json_schema", "json_schema": tag.pop("schema", None)}
        tags.append({**tag, "content": content})
    return {"type": "triggered_tags", "triggers": value.get("triggers"), "tags": tags}


def grammar_of_tag(form: object, param: str) -> str:
    """Returns the grammar in Lark. Raises InvalidRequest with the name of the invalid part."""
    rules: list[str] = []
    start = _expression(form, param, rules, is_last=True)
    return "\n".join([f"start: {start}", *rules])


def _expression(form: object, param: str, rules: list[str], *, is_last: bool) -> str:
    """Returns an expression for a format. Adds the rules that it needs to `rules`."""
    if len(rules) >= MAX_PARTS:
        raise InvalidRequest(f"{param}: more than {MAX_PARTS} parts", param=param)
    if not isinstance(form, dict):
        raise InvalidRequest(f"{param} must be an object", param=param)
    _check_names(form, _NAMES.get(str(form.get("type")), frozenset(form)), param)
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
        case {"type": "tags_with_separator", "tags": list(tags), "separator": str(separator)} if (
            tags
        ):
            return _separated(tags, separator, form, param, rules)
        case {"type": "triggered_tags", "triggers": list(triggers), "tags": list(tags)} if is_last:
            return _triggered(triggers, tags, form, param, rules)
    kind = form.get("type")
    raise InvalidRequest(f"{param}.type {kind!r} is not supported so", param=f"{param}.type")


def _separated(
    tags: list[object], separator: str, form: Mapping[str, object], param: str, rules: list[str]
) -> str:
    """Returns an expression for tags with the text `separator` between them."""
    parts = [
        _expression(_tag(each, f"{param}.tags[{i}]"), f"{param}.tags[{i}]", rules, is_last=False)
        for i, each in enumerate(tags)
    ]
    one = _rule(rules, " | ".join(parts))
    between = f"{literal(separator)} " if separator else ""
    some = one if _flag(form, "stop_after_first", param) else f"{one} ({between}{one})*"
    return f"({some})" if _flag(form, "at_least_one", param) else f"({some})?"


def _triggered(
    triggers: list[object],
    tags: list[object],
    form: Mapping[str, object],
    param: str,
    rules: list[str],
) -> str:
    """Returns an expression for free text with tags that begin with a trigger."""
    ways: dict[str, list[str]] = {}
    for i, trigger in enumerate(triggers):
        if not isinstance(trigger, str) or not trigger:
            where = f"{param}.triggers[{i}]"
            raise InvalidRequest(f"{where} must be a text", param=where)
        ways[trigger] = []
    for i, each in enumerate(tags):
        where = f"{param}.tags[{i}]"
        tag = _tag(each, where)
        begin = tag["begin"]
        found = [trigger for trigger in ways if begin.startswith(trigger)]
        if len(found) != 1:
            message = f"{where}.begin begins with {len(found)} triggers; it must be one"
            raise InvalidRequest(message, param=f"{where}.begin")
        rest = {**tag, "begin": begin.removeprefix(found[0])}
        ways[found[0]].append(_expression(rest, where, rules, is_last=False))
    leads = [
        f"{_lead(trigger, rules)} ({' | '.join(rests)})" for trigger, rests in ways.items() if rests
    ]
    if not leads:
        raise InvalidRequest(f"{param}.tags must not be empty", param=f"{param}.tags")
    one = _rule(rules, " | ".join(leads))
    text = _terminal(rules, "/(?s:.*)/")
    needs_one = _flag(form, "at_least_one", param)
    if _flag(form, "stop_after_first", param):
        return one if needs_one else f"({text} | {one})"
    return f"({one} ({one})* {text}?)" if needs_one else f"(({one})* {text}?)"


def _tag(form: object, param: str) -> dict[str, Any]:
    """Returns a tag of a list, whose `type` may be missing. Raises InvalidRequest."""
    if not isinstance(form, dict) or not isinstance(form.get("begin"), str):
        raise InvalidRequest(f"{param} must be a tag", param=param)
    return {"type": "tag", **form}


def _check_names(form: Mapping[str, object], known: frozenset[str], param: str) -> None:
    """Raises InvalidRequest with the name of the first unknown field."""
    unknown = next((name for name in form if name not in known), None)
    if unknown is not None:
        where = f"{param}.{unknown}"
        raise InvalidRequest(f"{where} is not supported", param=where)


def _flag(form: Mapping[str, object], name: str, param: str) -> bool:
    value = form.get(name, False)
    if not isinstance(value, bool):
        raise InvalidRequest(f"{param}.{name} must be true or false", param=f"{param}.{name}")
    return value


def _lead(end: str, rules: list[str]) -> str:
    """Returns a rule for any text up to and including the first `end`."""
    escaped = re.escape(end).replace("/", "\\/").replace("\\\n", "\\n")
    return _rule(rules, f"/(?s:.*){escaped}/", attributes="[lazy]")


def _content(content: object, end: str, param: str, rules: list[str]) -> str:
    """Returns an expression for a tag's content and end. Free text stops at the first end."""
    if isinstance(content, Mapping) and content.get("type") == "any_text":
        _check_names(content, _NAMES["any_text"], f"{param}.content")
        return _lead(end, rules)
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
