"""Makes a grammar a part of another one: an answer beside tool calls, or behind a mark.

Pure. Schemas and expressions become one rule. A grammar in Lark or EBNF brings its own rules, which
get names that no other part has.
"""

import json
import re

from llguidance import regex_to_lark

from engine.grammar.ebnf import is_ebnf, lark_of
from engine.grammar.guides import LARK_TOKEN
from engine.messages import Grammar, GrammarKind
from router.text.forms.calling import AnswerRules

_DEFINED = re.compile(r"^[ \t]*[?!]?([\w-]+)(?=[ \t]*(?:\[[^\]\n]*\][ \t]*)?:)", re.MULTILINE)
_SCHEMA = "%json"


def answer_rules(grammar: Grammar) -> AnswerRules:
    """The grammar as an expression and its rules. Raises GrammarError for bad EBNF or JSON."""
    source = grammar.source
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return AnswerRules("answer", (f"answer: {_SCHEMA} {_checked(source)}",))
        case GrammarKind.REGEX:
            return AnswerRules("answer", (f"answer: /{regex_to_lark(source, use_ascii='')}/",))
    lark = lark_of(source) if is_ebnf(source) else source
    names = {name: _own(name) for name in _DEFINED.findall(lark)}
    return AnswerRules(_own("start"), (_renamed(lark, names),))


def _checked(source: str) -> str:
    """The text of a schema, so that nothing but JSON stands in its place."""
    try:
        return json.dumps(json.loads(source), ensure_ascii=False)
    except (ValueError, RecursionError):
        return "false"  # is refused, as the schema itself is


def _own(name: str) -> str:
    return ("OWN_" if name.lstrip("_")[:1].isupper() else "own_") + name


def _renamed(lark: str, names: dict[str, str]) -> str:
    """The grammar with renamed rules; texts, expressions and schemas stay unchanged."""
    parts, depth = list[str](), 0
    for found in LARK_TOKEN.finditer(lark):
        token = found[0]
        depth = max(depth + (token == "{") - (token == "}"), 0)
        parts.append(names.get(token, token) if depth == 0 else token)
    return "".join(parts)
