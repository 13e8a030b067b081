"""Turns the tools of a request into one grammar, with what an answer may be instead of a call.

A tool with `strict: true` is held to its schema, whatever `tool_choice` says. So is any tool that
must be called, if its schema can be followed. All other arguments come in any order and spelling,
and are held to what can be held of their schemas. What is not is named, for a header of the answer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from urllib.parse import quote

from engine.errors import InvalidRequest
from engine.messages import Grammar, GrammarKind
from router.text.forms.calling import (
    ANY_TEXT,
    AnswerRules,
    CallForm,
    CallGrammar,
    Calling,
    arguments,
)

MAX_NAMED = 16  # places of one request that a header names
MAX_PLACE_LEN = 120

Json = Any


class GrammarPart(NamedTuple):
    """A field and its grammar. Of a `function`, less may be held than the field asks."""

    param: str
    grammar: Grammar
    function: str | None = None


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """The tools of a request, those that may be called, and the form of calls."""

    tools: Sequence[Mapping[str, Json]]
    calling: Calling
    strict: frozenset[str]
    form: CallForm
    token_of: Callable[[str], int | None]
    answer: AnswerRules = ANY_TEXT

    def grammar(self) -> CallGrammar:
        """The grammar of calls and answers. Raises InvalidRequest."""
        answer = ANY_TEXT if self.calling.at_least_one else self.answer
        return self.form.grammar(self.calling, self.token_of, answer)

    def sayable(self) -> "ToolOffer":
        """The same, holding no more than the form can say of tools that are not strict."""
        spare = self.calling.held - self.strict
        try:
            self.grammar()
        except InvalidRequest:
            return self.loosened(sorted(spare)) if spare else self
        return self

    def parts(self, source_of: Callable[[Json], str]) -> tuple[GrammarPart, ...]:
        """The grammar of each function's arguments; `source_of` writes a schema."""
        places = self._places()
        parts = list[GrammarPart]()
        for name, schema in self.calling.functions.items():
            if name in self.calling.held:
                grammar = Grammar(GrammarKind.JSON_SCHEMA, source_of(schema))
            else:
                alone = replace(self.calling, functions={name: schema})
                rules = ["start: arguments_0", *arguments(alone).rules]
                grammar = Grammar(GrammarKind.LARK, "\n".join(rules))
            function = None if name in self.strict else name
            parts.append(GrammarPart(places[name], grammar, function))
        return tuple(parts)

    def named(self, unheld: Sequence[tuple[str, str]]) -> tuple[str, ...]:
        """The places that are not held, as a header may carry them."""
        places = self._places()
        found = [each for name, at in unheld for each in named_places(places[name], [at])]
        return tuple(found[:MAX_NAMED])

    def loosened(self, names: Sequence[str]) -> "ToolOffer":
        """The same, holding less of these functions' arguments: what can be said, then nothing."""
        calling = self.calling
        free = calling.free | (frozenset(names) - calling.held)
        return replace(
            self, calling=replace(calling, held=calling.held - frozenset(names), free=free)
        )

    def _places(self) -> dict[str, str]:
        return {
            tool["function"]["name"]: f"tools[{i}].function.parameters"
            for i, tool in enumerate(self.tools)
        }


def named_places(param: str, places: Sequence[str]) -> tuple[str, ...]:
    """Places of a schema, as a header may carry them."""
    found = (param + quote(place, safe=".[]$_-", errors="replace") for place in places)
    return tuple(dict.fromkeys(place[:MAX_PLACE_LEN] for place in found))[:MAX_NAMED]
