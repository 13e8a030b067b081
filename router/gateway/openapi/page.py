"""Renders an OpenAPI document as one HTML page, in the style of the other pages.

The page needs no script and no other file. If there is a landing page, a script adds the navigation
bar and the chosen colours of the other pages.

The code supports only the part of JSON schema that Baton's document uses.
"""

import json
import re
from importlib.resources import files
from typing import Any

from jinja2 import Environment
from markupsafe import Markup, escape

Json = dict[str, Any]

_DRESSED = "router.gateway.dashboard"  # the package of the dashboard pages
_MAX_SHOWN = 12  # maximum number of enumeration values shown
_BOUNDS = (
    ("minimum", "≥ {}"),
    ("exclusiveMinimum", "> {}"),
    ("maximum", "≤ {}"),
    ("minLength", "at least {} characters"),
    ("maxLength", "at most {} characters"),
    ("minItems", "at least {} items"),
    ("maxItems", "at most {} items"),
    ("maxProperties", "at most {} entries"),
)


def page_of(document: Json, *, has_home: bool = False) -> str:
    """Returns the page, with a link to the landing page if there is one."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"prose": prose, "type": type_text, "json": json_text}
    source = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    operations = [
        {"method": method, "path": path, **operation}
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    tags = [
        (tag["name"], [each for each in operations if tag["name"] in each["tags"]])
        for tag in document["tags"]
    ]
    return environment.from_string(source).render(
        document=document,
        tags=tags,
        schemas=document["components"]["schemas"],
        has_home=has_home,
        dress=Markup(files(_DRESSED).joinpath("static/baton.css").read_text(encoding="utf-8")),
    )


def prose(text: str) -> Markup:
    """Converts a Markdown text with code in backticks to HTML."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))


def json_text(value: object) -> str:
    """Returns a value as indented JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False)


def type_text(schema: Json) -> Markup:
    """Returns a description in words of the values that a schema allows, with links to named
    types.
    """
    parts = [_kind(schema)]
    parts += [escape(words.format(schema[key])) for key, words in _BOUNDS if key in schema]
    if "pattern" in schema:
        parts.append(Markup("like <code>{}</code>").format(schema["pattern"]))
    return Markup(", ").join(part for part in parts if part)


def _kind(schema: Json) -> Markup:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return Markup('<a href="#{0}">{0}</a>').format(name)
    for key, word in (("anyOf", " or "), ("oneOf", " or "), ("allOf", " and ")):
        if key in schema:
            named = (type_text(each) for each in schema[key] if each != {"type": "null"})
            return Markup(escape(word)).join(text for text in named if text)
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        shown = [Markup("<code>{}</code>").format(json.dumps(v)) for v in values[:_MAX_SHOWN]]
        return Markup(", ").join([*shown, *([Markup("…")] if len(values) > _MAX_SHOWN else [])])
    kind = schema.get("type", "")
    if kind == "array":
        return Markup("list of ({})").format(type_text(schema.get("items", {})))
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return Markup("object of ({})").format(type_text(schema["additionalProperties"]))
    return escape(" or ".join(kind) if isinstance(kind, list) else kind)
