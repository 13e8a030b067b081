"""The seam of call forms: what a form must know of tools, and what it gives.

A form is the way in which a family of models writes tool calls. It gives a grammar, which allows
only valid calls with valid arguments, and a parser of such answers. Forms whose calls begin with a
mark allow any text before it. In others an answer that begins like a call is one.
"""

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from router.text.forms.deltas import AnswerParser

TokenOf = Callable[[str], int | None]  # the id of an added token with this text
NAME = r"[a-zA-Z0-9_.-]+"  # of a function, in regular expressions


@dataclass(frozen=True, slots=True)
class Calling:
    """The tools that may be called, and how often; schemas of arguments by name."""

    functions: Mapping[str, Any]
    at_least_one: bool
    at_most_one: bool


class CallForm(Protocol):
    """One way to write calls."""

    @property
    def name(self) -> str:
        """vLLM's name of its parser."""
        ...

    def grammar(self, calling: Calling, token_of: TokenOf) -> str:
        """The grammar of an answer, in llguidance's Lark. Raises InvalidRequest."""
        ...

    def parser(self, calling: Calling, rng: random.Random) -> AnswerParser:
        """Returns a parser of one answer. Ids of calls are drawn from `rng`."""
        ...

    @property
    def marks(self) -> Sequence[str]:
        """Added tokens that the parser must see."""
        ...


def literal(text: str) -> str:
    """A string literal of Lark, whose escapes are those of JSON; directives begin with '%'."""
    return json.dumps(text, ensure_ascii=False).replace("%", "\\u0025")


def mark(text: str, token_of: TokenOf) -> str:
    """A mark in Lark. One that is an added token must be written as a token."""
    token_id = token_of(text)
    return literal(text) if token_id is None else f"<[{token_id}]>"


def text_before(text: str, token_of: TokenOf) -> tuple[str, list[str]]:
    """An expression for any text up to a mark, the mark included, and the rules that it needs."""
    token_id = token_of(text)
    if token_id is not None:
        return f"TEXT <[{token_id}]>", []
    escaped = re.escape(text).replace("/", "\\/")
    return "lazy_head", [f"lazy_head[lazy]: /(?s:.*){escaped}/"]


def arguments(calling: Calling) -> list[str]:
    """A rule `arguments_I` for each function, by its schema."""
    return [
        f"arguments_{i}: %json {json.dumps(schema, ensure_ascii=False)}"
        for i, schema in enumerate(calling.functions.values())
    ]


def any_call(calling: Calling) -> str:
    """An expression for one call of any function, of the rules `call_I`."""
    return " | ".join(f"call_{i}" for i in range(len(calling.functions)))
