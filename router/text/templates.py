"""Chat templates: the checkpoint's own Jinja source turns messages into one prompt.

The template runs in a sandbox, with the names that templates for transformers expect:
`raise_exception`, `strftime_now`, `tojson`, the special tokens, and the `generation` tag. That tag
marks text for training and has no effect here.

Template names, the choice of a prompt's template, and the continuation of a final message are as in
transformers (`PreTrainedTokenizerBase.get_chat_template`, `utils/chat_template_utils.py`).

A client sends the arguments of earlier tool calls as the model wrote them: JSON in a text, which
may be empty, cut short, or not an object. Most templates expect a mapping, which they write as JSON
or item by item. Other templates insert the text unchanged. A template does not declare which form
it expects, so each form is tried.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import takewhile
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import CheckpointError, InvalidRequest
from router.inbox.json_values import decode_value

Message = Mapping[str, Any]  # a message as chat templates expect it

DEFAULT, TOOL_USE = "default", "tool_use"  # names of templates
# Variables that a client can set only by fields of the request.
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
THINKING = "message.thinking"  # occurs in the source of gpt-oss's template
# Marks the end of a continued message. If a template strips texts, the mark loses its blank.
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
# Exceptions that a template may raise for messages that it does not support.
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
    """The client's options for rendering. `variables` are read by the template."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


DEFAULT_OPTIONS = TemplateOptions()


class ChatTemplate:
    """A compiled template. `special_tokens` are variables such as `bos_token`.

    `names` are the variables that the template reads, so that unknown fields can be refused.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            environment = _environment()
            self._template = environment.from_string(source)
            self._template.globals = dict(self._template.globals)  # avoids a chain of maps
            self.names = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except TemplateError as error:
            raise CheckpointError(f"the chat template does not compile: {error}") from error
        self._reads_thinking = THINKING in source
        self._own_names = {*RESERVED, *self._special_tokens, *environment.globals}

    def check_variables(self, names: Iterable[str]) -> None:
        """Raises InvalidRequest if a client's variable would replace a variable of the server."""
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
        """Returns the prompt, up to the assistant's answer or into it. Raises InvalidRequest.

        Arguments of earlier calls are passed in the first form that the template accepts.
        """
        if self._reads_thinking:
            messages = [_with_thinking(message) for message in messages]
        continues = options.continue_final_message
        content = str(messages[-1].get("content", "")) if continues else ""
        if continues:
            messages = [*messages[:-1], {**messages[-1], "content": content + _TAG}]
        forms: Iterable[Sequence[Message]] = (messages,)
        for message in messages:
            if message.get("tool_calls"):
                forms = argument_forms(messages)
        faults: list[str] = []
        for form in forms:
            try:
                text = self._template.render(
                    **{**options.variables, **self._special_tokens},
                    messages=form,
                    tools=tools,
                    add_generation_prompt=options.add_generation_prompt,
                )
                return _without_end(text, content) if continues else text
            except _TEMPLATE_FAULTS as error:
                faults.append(str(error))
        reason = f"the chat template refused the messages: {faults[0]}"
        raise InvalidRequest(reason, param="messages")


class ChatTemplates:
    """The templates of a checkpoint by name, and the choice among them.

    For a request with tools, the template `tool_use` is used if it exists, otherwise `default`.
    Templates with other names are never used, so they are not compiled.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Raises CheckpointError if a template does not compile."""
        self._names = sorted(sources)
        used = {name: sources[name] for name in (DEFAULT, TOOL_USE) if name in sources}
        self.source = "\n".join(used.values())  # sources of all templates that may be used
        self._templates = {
            name: ChatTemplate(source, special_tokens) for name, source in used.items()
        }

    @property
    def has_default(self) -> bool:
        """True if there is a template for messages without tools."""
        return DEFAULT in self._templates

    def choose(self, *, with_tools: bool) -> ChatTemplate:
        """Returns the template for a prompt with or without tools. Raises InvalidRequest."""
        name = TOOL_USE if with_tools and TOOL_USE in self._templates else DEFAULT
        if name not in self._templates:
            shown = ", ".join(self._names)
            message = f"this model has no chat template named {name}, only: {shown}"
            raise InvalidRequest(message, param="messages")
        return self._templates[name]


def _with_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the message with its reasoning under the name that gpt-oss's template reads.

    If a message has tool calls, that template accepts either reasoning or a text, and writes both
    in the same way.
    """
    reasoning = message.get("reasoning_content")
    if not reasoning or (message.get("tool_calls") and message.get("content")):
        return message
    return {**message, "thinking": reasoning}


def _without_end(text: str, content: str) -> str:
    """Returns the rendered text up to the mark after the final message.

    If the template has stripped the message, the mark has lost its blank; then blanks at the end
    are stripped here too. Raises InvalidRequest if the template does not write the message.
    """
    tag = _TAG.strip()
    at = text.rfind(tag)
    if at < 0 or content.strip() not in text:
        message = "the chat template does not show the final message as it is"
        raise InvalidRequest(message, param="continue_final_message")
    return text[:at] if text.startswith(_TAG, at) else text[:at].rstrip()


def shown_end(prompt: str, content: str) -> str:
    """Returns the end of the prompt that is also the end of an open message.

    Blanks at the end of the message may be missing, as templates may strip them.
    """
    return max(_common_end(prompt, content), _common_end(prompt, content.rstrip()), key=len)


def _common_end(first: str, second: str) -> str:
    pairs = zip(reversed(first), reversed(second), strict=False)
    num_chars = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return second[len(second) - num_chars :]


class _Generation(Extension):
    """A Jinja extension: `{% generation %} … {% endgeneration %}` renders its contents."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Returns the statements inside the tags."""
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
    """Returns JSON without Jinja's HTML escapes, as models were trained without them."""
    return json.dumps(value, **{"ensure_ascii": False, **options})


Call = Mapping[str, Any]
Form = Callable[[Any], Any]  # converts the arguments of a call


def argument_forms(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Yields the messages with the arguments of calls decoded, then as mappings, then as texts.

    A text that is not JSON is kept in the first form, and becomes an empty mapping in the second.
    Raises ApiError for arguments that are too large.
    """
    for form in (_decoded, _mapping, _text):
        yield [_with_arguments(message, form) for message in messages]


def _with_arguments(message: Message, form: Form) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_call(call, form) for call in calls]}


def _call(call: Call, form: Form) -> Call:
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    return {**call, "function": {**function, "arguments": form(function.get("arguments"))}}


def _decoded(arguments: Any) -> Any:
    """Returns the value of a JSON text; {} for an empty text. Other texts are kept."""
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    try:
        return decode_value(arguments.encode(), "messages")
    except (ValueError, RecursionError):
        return arguments


def _mapping(arguments: Any) -> dict[str, Any]:
    decoded = _decoded(arguments)
    return decoded if isinstance(decoded, dict) else {}


def _text(arguments: Any) -> str:
    if isinstance(arguments, str) and arguments.strip():
        return arguments
    return json.dumps(_decoded(arguments), ensure_ascii=False)
