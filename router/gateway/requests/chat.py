"""POST /v1/chat/completions: its body, the checks of its fields, and its answers."""

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from router.gateway.requests.body import (
    Body,
    CompleteAnswer,
    Count,
    PromptScore,
    ShownChoice,
    StreamChunk,
    TopCount,
    unsupported,
)
from router.gateway.requests.field_table import CHAT
from router.inbox.api_errors import ApiError, invalid_value
from router.text.forms.calling import Calling
from router.text.forms.chosen import AnswerParsing
from router.text.templates import DEFAULT_OPTIONS, ChatTemplate, TemplateOptions, shown_end
from router.text.tokenizer import TextModel

MAX_MESSAGES = 4096  # maximum messages: the chat template loops over messages
MAX_VARIABLES = 64  # maximum variables passed to a chat template
MAX_DOCUMENTS = 1024
MAX_EFFORT_LEN = 32
PROMPT_END_TOKENS = 16  # tokens that show if the answer begins inside reasoning
NO_EFFORT = "none"
MAX_ROLE_LEN = 64
# By type of a text part: the field that has the text. Types of responses are included.
TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
# "system", "developer", "user", "assistant" and "tool"; a chat template may have other roles.
Speaker = Annotated[str, Meta(min_length=1, max_length=MAX_ROLE_LEN)]


class ContentPart(msgspec.Struct):
    """A part of a message or of an item; only text is supported."""

    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(msgspec.Struct):
    """One message. The chat template interprets tool calls of earlier turns."""

    role: Speaker
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's newer name
    refusal: str | None = None  # text of the assistant that replaces `content`


class ChatBody(Body, kw_only=True):
    """POST /v1/chat/completions."""

    endpoint = CHAT
    prompt_field = "messages"

    messages: list[ChatMessage] = msgspec.field(default_factory=list)
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopCount | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=MAX_VARIABLES)] | None = None
    documents: Annotated[list[dict[str, Any]], Meta(max_length=MAX_DOCUMENTS)] | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    reasoning_effort: Annotated[str, Meta(max_length=MAX_EFFORT_LEN)] | None = None
    parallel_tool_calls: bool | None = None  # read by `router.text.structured`

    def __post_init__(self) -> None:
        """Computes the attributes that checks and answers read."""
        super().__post_init__()
        self.wanted_tokens = self.max_completion_tokens or self.max_tokens
        self.num_top_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        self.shows_reasoning = self.include_reasoning is not False
        self.echoes_prompt = bool(self.echo)

    def check(self) -> None:
        """Checks fields that depend on each other. Raises ApiError."""
        if self.top_logprobs and not self.logprobs:
            raise invalid_value("top_logprobs needs logprobs", "top_logprobs")
        super().check()

    def encode(
        self,
        text: TextModel,
        context_len: int,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        may_exceed: bool = False,
    ) -> list[int]:
        """Returns the token ids of messages and tools, rendered by the chat template."""
        if not self.messages:
            raise invalid_value("messages must not be empty", "messages")
        if len(self.messages) > MAX_MESSAGES:
            message = f"there are {len(self.messages)} messages; at most {MAX_MESSAGES} are allowed"
            raise invalid_value(message, "messages")
        messages = [template_message(i, m) for i, m in enumerate(self.messages)]
        options = DEFAULT_OPTIONS
        if not (
            self.add_generation_prompt is None
            and self.continue_final_message is None
            and self.chat_template_kwargs is None
            and self.documents is None
            and self.reasoning_effort is None
        ):
            options = self._options(text.templates.choose(with_tools=bool(tools)))
        token_ids = text.encode_chat(
            messages,
            context_len,
            tools or None,
            options,
            add_special_tokens=bool(self.add_special_tokens),
            may_exceed=may_exceed or self.truncate_prompt_tokens is not None,
        )
        is_whole = self.truncate_prompt_tokens is None
        return token_ids if is_whole else self.cut(token_ids, context_len)

    def reader(
        self, text: TextModel, calling: Calling | None, token_ids: Sequence[int]
    ) -> AnswerParsing | None:
        """Returns the parser of answers to this prompt; None if answers are not parsed."""
        forms = text.forms
        splits = self.separate_reasoning is not False
        thinking = forms.thinking if splits else None
        if calling is None and thinking is None and not forms.is_harmony:
            return None
        is_thinking = None
        if thinking is not None:
            end = text.decode_all(list(token_ids[-PROMPT_END_TOKENS:]))
            is_thinking = thinking.is_thinking(end)
        return AnswerParsing(forms, calling, is_thinking, splits_reasoning=splits)

    def _options(self, template: ChatTemplate) -> TemplateOptions:
        """Returns the client's options for rendering the chat template. Raises InvalidRequest."""
        continues = bool(self.continue_final_message)
        if continues and self.add_generation_prompt:
            message = "continue_final_message cannot be combined with add_generation_prompt"
            raise invalid_value(message, "continue_final_message")
        if continues and self.messages[-1].content is None:
            message = "continue_final_message needs a final message with content"
            raise invalid_value(message, "continue_final_message")
        variables = dict(self.chat_template_kwargs or {})
        template.check_variables(variables)
        if self.documents:
            if "documents" not in template.names:
                raise unsupported("documents", "by this model's chat template")
            variables["documents"] = self.documents
        if self.reasoning_effort is not None:
            variables = _effort(self.reasoning_effort, template.names) | variables
        return TemplateOptions(
            add_generation_prompt=not continues and self.add_generation_prompt is not False,
            continue_final_message=continues,
            variables=variables,
        )

    def echoed(self, token_ids: Sequence[int], text: TextModel) -> str | None:
        """Returns the text of the assistant's final message, if the answer must begin with it.

        With `continue_final_message`, returns only the part of the text that the prompt ends with.
        """
        final = self.messages[-1]
        if not self.echo or final.role != "assistant":
            return None
        content = str(template_message(len(self.messages) - 1, final)["content"])
        if not self.continue_final_message:
            return content
        return shown_end(text.decode_all(list(token_ids)), content)


def template_message(index: int, message: ChatMessage) -> dict[str, Any]:
    """Returns a message in the form of chat templates. Absent fields are left out."""
    content = message.content
    if not isinstance(content, str):
        content = _content(message, f"messages[{index}].content")
    fields = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content,
        "name": message.name,
        "tool_calls": message.tool_calls or None,  # some templates treat an empty list as a call
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content or message.reasoning,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _content(message: ChatMessage, param: str) -> str:
    content = message.refusal if message.content is None else message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role != "assistant":
            raise invalid_value("content is missing", param)
        return ""
    return "\n".join(_part_text(part, param) for part in content)


def _part_text(part: ContentPart, param: str) -> str:
    name = TEXT_PARTS.get(part.type)
    if name is None:
        message = f"content of type {part.type[:40]!r} is not supported"
        raise ApiError(message, param=param, code="unsupported_content")
    text: str | None = getattr(part, name)
    if text is None:
        raise invalid_value(f"a part of type {part.type!r} needs a {name}", param)
    return text


def _effort(effort: str, names: Collection[str]) -> dict[str, Any]:
    """Returns the template's variables for a reasoning effort.

    Raises ApiError without such variables.
    """
    if "reasoning_effort" in names:
        return {"reasoning_effort": effort}
    switch = next((name for name in ("enable_thinking", "thinking") if name in names), None)
    if switch is not None:
        return {switch: effort != NO_EFFORT}
    if effort == NO_EFFORT:
        return {}
    message = f"reasoning_effort is not supported by this model's chat template; it is {effort!r}"
    raise ApiError(message, param="reasoning_effort", code="unsupported_parameter")


class CalledFunction(msgspec.Struct):
    """A call's function; the arguments are JSON in a string."""

    name: str
    arguments: str


class ShownCall(msgspec.Struct, kw_only=True):
    """A call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ScoredToken(msgspec.Struct):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class RankedToken(ScoredToken):
    """A token of the answer, with the likeliest ones in its place."""

    top_logprobs: list[ScoredToken]


class ChatScores(msgspec.Struct):
    """Log-probabilities of a chat's answer."""

    content: list[RankedToken] | None
    refusal: None


class AnswerMessage(msgspec.Struct, kw_only=True):
    """The assistant's message. Reasoning has the names of DeepSeek and of vLLM."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ShownCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChoice(ShownChoice, kw_only=True):
    """One of the answers to a chat."""

    message: AnswerMessage
    logprobs: ChatScores | None


class DeltaFunction(msgspec.Struct):
    """A part of a call's function."""

    arguments: str
    name: str | UnsetType = UNSET


class CallPart(msgspec.Struct):
    """A part of a call. The first has its id and name, the others more of its arguments."""

    index: int
    function: DeltaFunction
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class MessageDelta(msgspec.Struct):
    """A part of the assistant's message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[CallPart] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChunkChoice(ShownChoice, kw_only=True):
    """A part of one of the answers to a chat."""

    delta: MessageDelta
    logprobs: ChatScores | UnsetType | None = UNSET


class ChatAnswer(CompleteAnswer, kw_only=True):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_logprobs: PromptScore | UnsetType | None = UNSET


class ChatStreamChunk(StreamChunk, kw_only=True):
    """An event in a stream of /v1/chat/completions."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | UnsetType | None = UNSET
