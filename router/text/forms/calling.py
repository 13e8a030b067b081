"""The interface of call forms: the tools that a form receives, and the results that it returns.

A form is the way in which a family of models writes tool calls. It returns a grammar, which allows
only calls of the tools, and a parser of such answers. Forms whose calls begin with a mark allow any
text before the mark. In other forms, an answer that begins like a call of a tool is a call.

Arguments of a `held` tool follow its schema exactly, in the order and spelling of the compiler.
Arguments of other tools come in any order and spelling, and satisfy what `LenientSchema` enforces.
"""

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from router.text.forms.deltas import AnswerParser
from router.text.forms.lenient import RULES, LenientSchema

TokenOf = Callable[[str], int | None]  # returns the id of an added token with this text
NAME = r"[a-zA-Z0-9_.-]+"  # regular expression of a function's name
MAX_ARGUMENTS_LEN = 64 * 2**10  # maximum characters of all lenient rules; a grammar has a limit too
MAX_SCHEMAS_LEN = 128 * 2**10  # maximum characters of the schemas of these rules
_CONTROL = re.compile(r"[%\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Calling:
    """The tools that may be called, by name with the schema of their arguments, and how often."""

    functions: Mapping[str, Any]
    at_least_one: bool
    at_most_one: bool
    held: frozenset[str] = frozenset()  # tools whose arguments follow their schema exactly
    free: frozenset[str] = frozenset()  # tools whose arguments may be any object


class AnswerRules(NamedTuple):
    """The grammar of an answer without calls: an expression, and the rules that it needs."""

    expression: str = "TEXT"
    rules: tuple[str, ...] = ()

    @property
    def is_any_text(self) -> bool:
        """True if any text may be the answer."""
        return self.expression == "TEXT"


class CallGrammar(NamedTuple):
    """A grammar in llguidance's Lark, and the parts of schemas that it does not enforce.

    `unheld` has pairs of a function and a place in its schema.
    """

    source: str
    unheld: tuple[tuple[str, str], ...] = ()


ANY_TEXT = AnswerRules()


class CallForm(Protocol):
    """One way of writing calls of tools."""

    @property
    def name(self) -> str:
        """vLLM's name for this form's parser."""
        ...

    def grammar(
        self, calling: Calling, token_of: TokenOf, answer: AnswerRules = ANY_TEXT
    ) -> CallGrammar:
        """Returns the grammar of calls and answers. Raises InvalidRequest."""
        ...

    def parser(self, calling: Calling, rng: random.Random) -> AnswerParser:
        """Returns a parser of one answer. Ids of calls are drawn from `rng`."""
        ...

    @property
    def marks(self) -> Sequence[str]:
        """The added tokens that the parser needs in the text."""
        ...


def literal(text: str) -> str:
    """Returns a Lark string literal. '%' is escaped, as directives begin with it."""
    quoted = json.dumps(text, ensure_ascii=False)
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", quoted)


def mark(text: str, token_of: TokenOf) -> str:
    """Returns a mark in Lark: as a token if the mark is an added token, else as a literal."""
    token_id = token_of(text)
    return literal(text) if token_id is None else f"<[{token_id}]>"


def text_before(text: str, token_of: TokenOf) -> tuple[str, list[str]]:
    """Returns an expression for any text up to and including a mark, and the rules it needs."""
    token_id = token_of(text)
    if token_id is not None:
        return f"TEXT <[{token_id}]>", []
    escaped = re.escape(text).replace("/", "\\/")
    return "lazy_head", [f"lazy_head[lazy]: /(?s:.*){escaped}/"]


def start(calls: str, calling: Calling, answer: AnswerRules, *, begin: str, before: str) -> str:
    """Returns the rule `start` of a form whose calls follow the mark `begin`, after any text."""
    if calling.at_least_one:
        return f"start: {begin} {calls}"
    if answer.is_any_text:
        return f"start: TEXT | {before} {calls}"
    return f"start: {answer.expression} | {begin} {calls}"


def unlike_calls(begins: str, answer: AnswerRules) -> tuple[str, list[str]]:
    """Returns an expression for an answer without calls, and its rules.

    If the answer may be any text, it must not begin like a call.
    """
    if not answer.is_any_text:
        return answer.expression, []
    return "ANSWER", [f"ANSWER: TEXT & ~/{begins}(?s:.*)/"]


@dataclass(slots=True)
class Room:
    """The budget of all functions' arguments, in characters of schemas and of rules."""

    schemas: int = MAX_SCHEMAS_LEN
    rules: int = MAX_ARGUMENTS_LEN

    def holds(self, schema: Any) -> bool:
        """Subtracts one more schema from the budget. Returns False if the budget was too small."""
        self.schemas -= len(json.dumps(schema))
        return self.schemas >= 0

    def holds_rules(self, rules: Sequence[str]) -> bool:
        """Subtracts these rules from the budget. Returns False if the budget was too small."""
        self.rules -= sum(map(len, rules))
        return self.rules >= 0

    def for_schema(self, schema: Any, prefix: str) -> LenientSchema | None:
        """Returns the rules of a schema; None if the budget was too small."""
        if not self.holds(schema):
            return None
        lenient = LenientSchema(schema, prefix)
        return lenient if self.holds_rules(lenient.rules) else None


class ArgumentRules(NamedTuple):
    """The rules `arguments_I` of all functions, and the places that they do not enforce."""

    rules: list[str]
    unheld: tuple[tuple[str, str], ...]


def arguments(calling: Calling) -> ArgumentRules:
    """Returns the rules of functions whose arguments are written as one JSON object."""
    rules, unheld = list(RULES), list[tuple[str, str]]()
    room = Room()
    for i, (name, schema) in enumerate(calling.functions.items()):
        if name in calling.held:
            rules.append(f"arguments_{i}: %json {json.dumps(schema, ensure_ascii=False)}")
            continue
        lenient = None if name in calling.free else room.for_schema(schema, f"a{i}")
        if lenient is None:
            rules.append(f"arguments_{i}: any_object")
            unheld.append((name, ""))
            continue
        rules += [f"arguments_{i}: {lenient.start}", *lenient.rules]
        unheld += [(name, place) for place in lenient.unheld]
    return ArgumentRules(rules, tuple(unheld))


def any_call(calling: Calling) -> str:
    """Returns an expression for one call of any function: a choice of the rules `call_I`."""
    return " | ".join(f"call_{i}" for i in range(len(calling.functions)))
