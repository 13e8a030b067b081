"""Translates grammars in EBNF, in the form of llama.cpp and xgrammar, to Lark.

    root ::= "(" root ")" | [0-9]{1,3}   # a comment

Pure: returns a text, or raises GrammarError with the client's line number. A rule that does not
lead to a recursive rule becomes a terminal, which is one regular expression. The other rules are
parsed over terminals and literals, for which the compiler uses the longest match. So the
translation never allows more than the grammar, but may allow less if literals and classes overlap.

The time is linear in the length of the source. Repetitions and nested rules cost time only in the
compiler, which has bounds of its own.

Sources: llama.cpp, grammars/README.md (GBNF); xgrammar, EBNF grammars; llguidance, docs/syntax.md.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from engine.errors import GrammarError

ROOT = "root"
MAX_GROUPS = 25  # nested open groups; bounded because the compiler's parser is recursive
MAX_REPEATS = 10_000

_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
# The quantifiers are possessive, so one pass reads a source and never goes back.
_TOKEN = re.compile(
    r"""
    (?P<blank>[ \t\r]++|\#[^\n]*+)
    | (?P<newline>\n)
    | (?P<literal>"(?:\\.|[^"\\\n])*+")
    | (?P<chars>\[(?:\\.|[^\]\\\n])*+\])
    | (?P<define>::=)
    | (?P<name>[\w-]++)
    | (?P<lookahead>\(=)
    | (?P<open>\()
    | (?P<close>\))
    | (?P<or>\|)
    | (?P<any>\.)
    | (?P<repeat>[*+?]|\{\s*+[0-9]{1,9}+\s*+(?:,\s*+(?:[0-9]{1,9}+)?\s*+)?\})
    """,
    re.VERBOSE,
)
_CHARACTER = re.compile(
    r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\.|[^\\]", re.DOTALL
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_ITSELF = "\"'\\[]-^/|.*+?(){}"


def is_ebnf(source: str) -> bool:
    """True if the grammar is EBNF, not Lark. In Lark no line can begin with `name ::=`."""
    return _RULE.search(source) is not None


def lark_of(source: str) -> str:
    """Returns the grammar in Lark. Each rule keeps its line number. Raises GrammarError."""
    rules = _rules_of(list(_tokens(source)))
    terminals = _terminals(rules)
    numbers = {name: i for i, name in enumerate(rules)}

    def named(name: str) -> str:
        return f"RULE_{numbers[name]}" if name in terminals else f"rule_{numbers[name]}"

    lines = list[str]()
    for name, rule in rules.items():
        lines += [""] * (rule.line - 1 - len(lines))
        body = " ".join(_written(token, named) for token in _filled(rule.body))
        lines.append(f"{named(name)}: {body}")
    return "\n".join([*lines, f"start: {named(ROOT)}"])


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int


@dataclass(slots=True)
class _Rule:
    """A rule: the tokens right of `::=`, and the line of the rule's name."""

    line: int
    body: list[_Token]


def _tokens(source: str) -> Iterator[_Token]:
    at, line = 0, 1
    while at < len(source):
        found = _TOKEN.match(source, at)
        if found is None:
            raise _refusal(line, f"{source[at : at + 20]!r} is not EBNF")
        kind = str(found.lastgroup)
        if kind == "lookahead":
            raise _refusal(line, "lookahead is not supported")
        if kind not in ("blank", "newline"):
            yield _Token(kind, found[0], line)
        line += found[0].count("\n")
        at = found.end()


def _rules_of(tokens: Sequence[_Token]) -> dict[str, _Rule]:
    """Returns the rules by name. A name before `::=` begins a rule, so newlines have no meaning."""
    rules: dict[str, _Rule] = {}
    starts = [i - 1 for i, token in enumerate(tokens) if token.kind == "define"]
    if not starts or starts[0] != 0:
        raise _refusal(tokens[0].line if tokens else 1, "a rule must begin with 'name ::='")
    for begin, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
        name, body = tokens[begin], tokens[begin + 2 : end]
        if name.kind != "name":
            raise _refusal(name.line, "'::=' must follow the name of a rule")
        if name.text in rules:
            raise _refusal(name.line, f"the rule {name.text!r} is defined twice")
        _check_body(name, body)
        rules[name.text] = _Rule(name.line, list(body))
    if ROOT not in rules:
        raise GrammarError(f"the grammar has no rule {ROOT!r}")
    for rule in rules.values():
        for token in rule.body:
            if token.kind == "name" and token.text not in rules:
                raise _refusal(token.line, f"the rule {token.text!r} is not defined")
    return rules


def _check_body(name: _Token, body: Sequence[_Token]) -> None:
    """Raises GrammarError unless all groups are closed and each repetition follows an
    expression.
    """
    depth, before = 0, "or"
    for token in body:
        depth += (token.kind == "open") - (token.kind == "close")
        if depth < 0:
            raise _refusal(token.line, "')' closes no group")
        if depth > MAX_GROUPS:
            raise _refusal(token.line, f"more than {MAX_GROUPS} groups are open")
        if token.kind == "repeat":
            if before in ("or", "open", "repeat"):
                raise _refusal(token.line, f"{token.text!r} follows nothing to repeat")
            _check_counts(token)
        before = token.kind
    if depth:
        raise _refusal(name.line, f"a group in the rule {name.text!r} is not closed")
    if not body:
        raise _refusal(name.line, f"the rule {name.text!r} is empty")


def _check_counts(token: _Token) -> None:
    counts = [int(count) for count in re.findall(r"[0-9]+", token.text)]
    if any(count > MAX_REPEATS for count in counts):
        raise _refusal(token.line, f"{token.text!r} repeats more than {MAX_REPEATS} times")
    if len(counts) == 2 and counts[0] > counts[1]:
        raise _refusal(token.line, f"{token.text!r} ends before it begins")


def _terminals(rules: dict[str, _Rule]) -> frozenset[str]:
    """Returns the names of the rules that do not lead to a recursive rule."""
    needs = {n: {t.text for t in rule.body if t.kind == "name"} for n, rule in rules.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, parts in needs.items():
        for part in parts:
            users[part].append(name)
    ready = [name for name, parts in needs.items() if not parts]
    terminals: set[str] = set()
    while ready:
        name = ready.pop()
        terminals.add(name)
        for user in users[name]:
            needs[user].discard(name)
            if not needs[user]:
                ready.append(user)
    return frozenset(terminals)


def _filled(body: Sequence[_Token]) -> Iterator[_Token]:
    """Returns the tokens. Each empty alternative is replaced by an empty literal."""
    before = "or"
    for token in body:
        if before in ("or", "open") and token.kind in ("or", "close"):
            yield _Token("literal", '""', token.line)
        yield token
        before = token.kind
    if before == "or":
        yield _Token("literal", '""', body[-1].line)


def _written(token: _Token, named: Callable[[str], str]) -> str:
    match token.kind:
        case "name":
            return named(token.text)
        case "literal":
            text = "".join(_characters(token))
            return json.dumps(text, ensure_ascii=False).replace("%", "\\u0025")
        case "chars":
            return f"/{_class_of(token)}/"
        case "any":
            return "/(?s:.)/"
        case "repeat":
            return "".join(token.text.split())
    return token.text


def _characters(token: _Token) -> Iterator[str]:
    """Returns the characters between a token's quotes or brackets."""
    for found in _CHARACTER.finditer(token.text[1:-1]):
        yield _character(found[0], token.line)


def _character(text: str, line: int) -> str:
    if len(text) == 1:
        return text
    if len(text) > 2:
        code = int(text[2:], 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise _refusal(line, f"{text} is no character")
        return chr(code)
    if text[1] in _ITSELF:
        return text[1]
    if text[1] not in _ESCAPES:
        raise _refusal(line, f"the escape {text} is unknown")
    return _ESCAPES[text[1]]


def _class_of(token: _Token) -> str:
    """Returns a character class in Rust's syntax. Characters are written as codes, so that none
    needs an escape.
    """
    inner = token.text[1:-1]
    negated = inner.startswith("^")
    parts = [found[0] for found in _CHARACTER.finditer(inner[negated:])]
    if not parts:
        raise _refusal(token.line, "a character class is empty")
    written, at = "", 0
    while at < len(parts):
        first = last = _character(parts[at], token.line)
        at += 1
        if at + 1 < len(parts) and parts[at] == "-":
            last = _character(parts[at + 1], token.line)
            at += 2
        if first > last:
            raise _refusal(token.line, f"the range {first}-{last} is empty")
        written += rf"\x{{{ord(first):x}}}-\x{{{ord(last):x}}}"
    return f"[{'^' if negated else ''}{written}]"


def _refusal(line: int, why: str) -> GrammarError:
    return GrammarError(f"line {line}: {why}")
