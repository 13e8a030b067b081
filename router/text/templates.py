"""Chat templates: the checkpoint's own Jinja source turns messages into one prompt.

The template runs in a sandbox, with the names that templates for transformers expect:
`raise_exception`, `strftime_now`, `tojson`, the special tokens, and the `generation` tag. That tag
marks text for training and has no effect here.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import CheckpointError, InvalidRequest

# Variables that a client cannot set in another way than by their fields.
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
THINKING = "message.thinking"  # in the source of a template of gpt-oss
# Exceptions that a template may raise for unexpected messages.
_TEMPLATE_FAULTS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
)


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """What a client may choose of a rendering; `variables` are the template's own."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


DEFAULT_OPTIONS = TemplateOptions()


class ChatTemplate:
    """A compiled template; `special_tokens` are variables such as `bos_token`.

    `names` are the variables that it reads, so that fields that it does not know can be refused.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            environment = _environment()
            self._template = environment.from_string(source)
            self._template.globals = dict(self._template.globals)  # no chain of maps
            self.names = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except TemplateError as error:
            raise CheckpointError(f"the chat template does not compile: {error}") from error
        self._reads_thinking = THINKING in source
        self._own_names = {*RESERVED, *self._special_tokens, *environment.globals}

    def check_variables(self, names: Iterable[str]) -> None:
        """Raises InvalidRequest if a client's variable would hide one of the server's."""
        taken = sorted(self._own_names.intersection(names))
        if taken:
            param = f"chat_template_kwargs.{taken[0]}"
            raise InvalidRequest(f"{param} is not the client's to set", param=param)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: TemplateOptions = DEFAULT_OPTIONS,
    ) -> str:
        """Renders the prompt, up to the assistant's answer or into it. Raises InvalidRequest."""
        if self._reads_thinking:
            messages = [_with_thinking(message) for message in messages]
        try:
            text = self._template.render(
                **{**options.variables, **self._special_tokens},
                messages=messages,
                tools=tools,
                add_generation_prompt=options.add_generation_prompt,
            )
        except _TEMPLATE_FAULTS as error:
            message = f"the chat template refused the messages: {error}"
            raise InvalidRequest(message, param="messages") from error
        return _without_end(text, messages[-1]) if options.continue_final_message else text


def _with_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its reasoning under the name that gpt-oss's template reads.

    Beside tool calls that template takes either reasoning or a text, which it writes alike.
    """
    reasoning = message.get("reasoning_content")
    if not reasoning or (message.get("tool_calls") and message.get("content")):
        return message
    return {**message, "thinking": reasoning}


def _without_end(text: str, final: Mapping[str, Any]) -> str:
    """The rendered text without what the template puts behind the final message.

    Raises InvalidRequest if the template changes the message's text.
    """
    content = str(final.get("content") or "").strip()
    begin = text.rfind(content)
    if not content or begin < 0:
        message = "the chat template does not show the final message as it is"
        raise InvalidRequest(message, param="continue_final_message")
    return text[: begin + len(content)]


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
