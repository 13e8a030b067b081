"""Chat templates: the checkpoint's own Jinja source turns messages into one prompt.

The template runs in a sandbox, with the names that templates for transformers expect:
`raise_exception`, `strftime_now`, `tojson`, the special tokens, and the `generation` tag. That tag
marks text for training and has no effect here.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import CheckpointError, InvalidRequest

# Exceptions that a template may raise for unexpected messages.
_TEMPLATE_FAULTS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
)


class ChatTemplate:
    """A compiled template; `special_tokens` are variables such as `bos_token`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
            self._template.globals = dict(self._template.globals)  # no chain of maps
        except TemplateError as error:
            raise CheckpointError(f"the chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Renders the prompt up to the assistant's answer. Raises InvalidRequest."""
        try:
            return self._template.render(
                **self._special_tokens, messages=messages, tools=tools, add_generation_prompt=True
            )
        except _TEMPLATE_FAULTS as error:
            message = f"the chat template refused the messages: {error}"
            raise InvalidRequest(message, param="messages") from error


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}` renders its contents."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(value: object, **options: Any) -> str:
    """Writes JSON without Jinja's HTML escapes, on which models were not trained."""
    return json.dumps(value, **{"ensure_ascii": False, **options})
