"""What clients may ask: the OpenAI chat and completion bodies, and what each field must be.

Pure: bytes in, a checked body or an error out. What Baton cannot do is refused by name instead of
being ignored, since an answer without the asked-for penalty or schema is a wrong answer; fields
that nobody knows are ignored, since clients send their own. It does not know the router or HTTP.

Sources: OpenAI API reference, chat completions and completions; for `top_k`, `min_p`, `min_tokens`,
`ignore_eos` and `stop_token_ids`, vLLM's OpenAI-compatible server.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from engine.errors import InvalidRequest
from engine.messages import Limits, Sampling
from router.tokenizer import TextModel

MAX_STOP_STRINGS = 16
MAX_STOP_LEN = 512  # characters
MAX_STOP_TOKEN_IDS = 128
UINT64_MASK = 2**64 - 1

StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LEN)]
Count = Annotated[int, Meta(ge=1)]

# The values of each refused field that ask for nothing. Compared with their types: for completions,
# `"logprobs": 0` asks for log probabilities and `false` does not.
_REFUSED: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "logit_bias": ({},),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
}
_NOT_YET = ("n", "best_of")


class ApiError(InvalidRequest):
    """An InvalidRequest with OpenAI's machine-readable `code`."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message, param=param, status=status)
        self.code = code


class StreamOptions(msgspec.Struct):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ContentPart(msgspec.Struct):
    """A part of a message; only text is supported."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct):
    """One message. Tool calls of earlier turns are handed to the chat template as they are."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class Body(msgspec.Struct, kw_only=True):
    """Fields that both endpoints share; null means absent everywhere."""

    prompt_field: ClassVar[str]

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None

    def encode(self, text: TextModel) -> list[int]:
        """The prompt's token ids. Raises InvalidRequest."""
        raise NotImplementedError

    @property
    def wanted_tokens(self) -> int | None:
        """The longest answer that the client asked for, if it said."""
        return self.max_tokens

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, which may be one string, several or none."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatBody(Body, kw_only=True):
    """POST /v1/chat/completions."""

    prompt_field = "messages"

    messages: list[ChatMessage] = []
    max_completion_tokens: Count | None = None

    def encode(self, text: TextModel) -> list[int]:
        """The messages through the chat template."""
        if not self.messages:
            raise _invalid("messages must not be empty", "messages")
        return text.encode_chat([_template_message(i, m) for i, m in enumerate(self.messages)])

    @property
    def wanted_tokens(self) -> int | None:
        """`max_completion_tokens`, or its older name."""
        return self.max_completion_tokens or self.max_tokens


class CompletionBody(Body, kw_only=True):
    """POST /v1/completions."""

    prompt_field = "prompt"

    prompt: str | list[str | int | list[int]] | None = None

    def encode(self, text: TextModel) -> list[int]:
        """The prompt, which may be text or token ids."""
        prompt = _single_prompt(self.prompt)
        if not prompt:
            raise _invalid("prompt must not be empty", "prompt")
        if isinstance(prompt, str):
            return text.encode_text(prompt)
        _check_in_vocabulary(prompt, text.vocab_size, "prompt")
        return prompt


BodyT = TypeVar("BodyT", bound=Body)


def decode_body(data: bytes, body_type: type[BodyT]) -> BodyT:
    """The body of a request, its fields checked one by one. Raises ApiError."""
    try:
        fields = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise ApiError("the body must be a JSON object", code="invalid_json")
    _refuse_unsupported(fields)
    try:
        body = msgspec.convert(fields, body_type)
    except msgspec.ValidationError as error:
        raise _from_validation(error) from error
    _check_stream_options(body)
    return body


def sampling_of(body: Body, *, vocab_size: int, random_seed: int) -> Sampling:
    """How tokens are chosen; `random_seed` serves where the client gave none."""
    seed = random_seed if body.seed is None else body.seed
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=min(max(body.top_k or 0, 0), vocab_size),
        min_p=body.min_p or 0.0,
        seed=seed & UINT64_MASK,
    )


def limits_of(
    body: Body,
    *,
    prompt_len: int,
    context_len: int,
    default_max_tokens: int | None,
    stop_token_ids: Sequence[int],
) -> Limits:
    """When the answer ends; `stop_token_ids` end it besides the client's own. Raises ApiError."""
    max_tokens = _max_tokens(body, default_max_tokens, prompt_len, context_len)
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        message = f"min_tokens is {min_tokens}, more than the {max_tokens} tokens allowed"
        raise _invalid(message, "min_tokens")
    return Limits(
        max_len=prompt_len + max_tokens,
        min_len=prompt_len + min_tokens,
        stop_token_ids=tuple(dict.fromkeys([*stop_token_ids, *(body.stop_token_ids or ())])),
    )


def check_stop_token_ids(body: Body, vocab_size: int) -> None:
    """Raises ApiError for an id that no token has."""
    _check_in_vocabulary(body.stop_token_ids or (), vocab_size, "stop_token_ids")


def _max_tokens(body: Body, default: int | None, prompt_len: int, context_len: int) -> int:
    wanted, room = body.wanted_tokens, context_len - prompt_len
    limit = f"the model's context is {context_len} tokens"
    if room < 1:
        message = f"{limit}, and the prompt has {prompt_len}: no room for an answer"
        raise ApiError(message, param=body.prompt_field, code="context_length_exceeded")
    if wanted is None:
        return room if default is None else min(default, room)
    if wanted > room:
        message = f"{limit}, and {prompt_len} in the prompt plus {wanted} in the answer are more"
        raise ApiError(message, param="max_tokens", code="context_length_exceeded")
    return wanted


def _refuse_unsupported(fields: dict[str, Any]) -> None:
    for name, harmless in _REFUSED.items():
        value = fields.get(name)
        if value is None or any(type(value) is type(ok) and value == ok for ok in harmless):
            continue
        message = f"{name} > 1 is not supported yet" if name in _NOT_YET else _unsupported(name)
        raise ApiError(message, param=name, code="unsupported_parameter")


def _check_stream_options(body: Body) -> None:
    options = body.stream_options
    if options is None:
        return
    if not body.stream:
        raise _invalid("stream_options is allowed only with stream", "stream_options")


def _single_prompt(prompt: str | list[str | int | list[int]] | None) -> str | list[int] | None:
    """`prompt` is text, token ids, or a list of one of these."""
    if prompt is None or isinstance(prompt, str):
        return prompt
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return ids
    if len(prompt) > 1:
        message = "a batch of prompts is not supported yet"
        raise ApiError(message, param="prompt", code="unsupported_parameter")
    only = prompt[0]
    assert not isinstance(only, int)
    return only


def _template_message(index: int, message: ChatMessage) -> dict[str, Any]:
    """The message as chat templates know it; absent fields are left out."""
    role = "system" if message.role == "developer" else message.role
    fields = {
        "role": role,
        "content": _content(message, f"messages[{index}].content"),
        "name": message.name,
        "tool_calls": message.tool_calls,
        "tool_call_id": message.tool_call_id,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _content(message: ChatMessage, param: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role != "assistant":
            raise _invalid("content is missing", param)
        return ""
    return "\n".join(_part_text(part, param) for part in content)


def _part_text(part: ContentPart, param: str) -> str:
    if part.type != "text":
        message = f"content of type {part.type!r} is not supported"
        raise ApiError(message, param=param, code="unsupported_content")
    if part.text is None:
        raise _invalid("a part of type 'text' needs a text", param)
    return part.text


def _check_in_vocabulary(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        message = f"{param} holds a token id outside the vocabulary of {vocab_size} tokens"
        raise _invalid(message, param)


def _from_validation(error: msgspec.ValidationError) -> ApiError:
    """msgspec says for example: Expected `int` >= 1 - at `$.max_tokens`."""
    text, _, path = str(error).partition(" - at `$")
    param = path.rstrip("`").lstrip(".") or None
    text = re.sub("^E", "e", text)
    return _invalid(text if param is None else f"{param}: {text}", param)


def _invalid(message: str, param: str | None) -> ApiError:
    return ApiError(message, param=param, code="invalid_value")


def _unsupported(name: str) -> str:
    return f"{name} is not supported"
