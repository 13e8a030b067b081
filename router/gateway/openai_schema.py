"""What clients may ask: the OpenAI chat and completion bodies, and what each field must be.

Pure: bytes in, a checked body or an error out. What Baton cannot do is refused by name instead of
being ignored, since an answer without the asked-for penalty or schema is a wrong answer; fields
that nobody knows are ignored, since clients send their own. It does not know the router or HTTP;
what the fields about schemas, grammars and tools ask for is `router.text.structured`'s business.

Sources: OpenAI API reference, chat completions and completions; for `top_k`, `min_p`, `min_tokens`,
`ignore_eos`, `stop_token_ids`, `repetition_penalty`, `prompt_logprobs`, `priority` and
`cache_salt`, vLLM's OpenAI-compatible server; `slo_ttft_ms` and `slo_tpot_ms` are what llm-d's
endpoint picker takes as headers, as fields here: so they are checked, and refused, as all others
are.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from engine.config import MAX_PRIORITY
from engine.errors import InvalidRequest
from engine.messages import Grammar, Limits, Sampling
from router.inbox.api_errors import ApiError, context_exceeded, invalid_value, no_room
from router.inbox.json_values import decode_value
from router.text.structured import FIELDS as STRUCTURE_FIELDS
from router.text.structured import Structure, check_combination, structure_of
from router.text.tokenizer import TextModel

MAX_STOP_STRINGS = 16
MAX_STOP_LEN = 512  # characters
MAX_STOP_TOKEN_IDS = 128
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_ID_DIGITS = 10
MAX_TOP_LOGPROBS = 20
MAX_MESSAGES = 4096  # each costs a turn of the chat template
MAX_USER_LEN = 512  # characters
MAX_CACHE_SALT_LEN = 256
MAX_BOUND_MS = 3_600_000
UINT64_MASK = 2**64 - 1

Speaker = Literal["system", "developer", "user", "assistant", "tool"]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LEN)]
Count = Annotated[int, Meta(ge=1)]
TopCount = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]
BoundMs = Annotated[float, Meta(gt=0, le=MAX_BOUND_MS)]

# The values of each refused field that ask for nothing. Compared with their types: `1` is not
# `true`.
Refused = dict[str, tuple[object, ...]]
_REFUSED: Refused = {
    "suffix": ("",),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
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


class StreamOptions(msgspec.Struct):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ContentPart(msgspec.Struct):
    """A part of a message; only text is supported."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct):
    """One message. Of the tool calls of earlier turns, only the template knows what to expect."""

    role: Speaker
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class Body(msgspec.Struct, kw_only=True):
    """Fields that both endpoints share; null means absent everywhere."""

    prompt_field: ClassVar[str]
    refused: ClassVar[Refused]  # what only the other endpoint can do

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
    n: Count | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=MAX_BIASES)] | None = None
    prompt_logprobs: TopCount | None = None
    user: Annotated[str, Meta(max_length=MAX_USER_LEN)] | None = None
    # Requests share cached prefixes only with those of the same salt, within what their keys share.
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_CACHE_SALT_LEN)] | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    slo_ttft_ms: BoundMs | None = None  # from when the request came in
    slo_tpot_ms: BoundMs | None = None

    def encode(
        self, text: TextModel, context_len: int, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """The prompt's token ids. Raises InvalidRequest."""
        raise NotImplementedError

    @property
    def wanted_tokens(self) -> int | None:
        """The longest answer that the client asked for, if it said."""
        return self.max_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        """How many of the likeliest tokens are reported with each one; None: nothing is."""
        raise NotImplementedError

    @property
    def num_choices(self) -> int:
        """Answers that are shown."""
        return self.n or 1

    @property
    def num_candidates(self) -> int:
        """Answers that are generated: the best are shown."""
        return self.num_choices

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, which may be one string, several or none."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatBody(Body, kw_only=True):
    """POST /v1/chat/completions."""

    prompt_field = "messages"
    refused: ClassVar[Refused] = {"best_of": (1,), "echo": (False,)}

    messages: list[ChatMessage] = []
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopCount | None = None

    def encode(
        self, text: TextModel, context_len: int, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """The messages, and the tools that may be called, through the chat template."""
        if not self.messages:
            raise invalid_value("messages must not be empty", "messages")
        if len(self.messages) > MAX_MESSAGES:
            message = f"there are {len(self.messages)} messages; at most {MAX_MESSAGES} are allowed"
            raise invalid_value(message, "messages")
        messages = [_template_message(i, m) for i, m in enumerate(self.messages)]
        return text.encode_chat(messages, context_len, tools or None)

    @property
    def wanted_tokens(self) -> int | None:
        """`max_completion_tokens`, or its older name."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        """`top_logprobs`, if `logprobs` are asked for."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(Body, kw_only=True):
    """POST /v1/completions."""

    prompt_field = "prompt"
    refused: ClassVar[Refused] = {
        "top_logprobs": (0,),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
    }

    prompt: str | list[str | int | list[int]] | None = None
    best_of: Count | None = None
    echo: bool | None = None
    logprobs: bool | TopCount | None = None

    def encode(
        self, text: TextModel, context_len: int, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """The prompt, which may be text or token ids. There are no tools here."""
        prompt = _single_prompt(self.prompt)
        if not prompt:
            raise invalid_value("prompt must not be empty", "prompt")
        if isinstance(prompt, str):
            return text.encode_text(prompt, context_len)
        _check_in_vocabulary(prompt, text.vocab_size, "prompt")
        return prompt

    def prompt_text(self, token_ids: Sequence[int], text: TextModel) -> str:
        """What `echo` puts before the answer."""
        prompt = _single_prompt(self.prompt)
        return prompt if isinstance(prompt, str) else text.decode_text(token_ids)

    @property
    def num_top_logprobs(self) -> int | None:
        """`logprobs`; some clients say `false` for none."""
        return None if self.logprobs is False else self.logprobs

    @property
    def num_candidates(self) -> int:
        """`best_of`, which is `n` if not given."""
        return self.best_of or self.num_choices


BodyT = TypeVar("BodyT", bound=Body)


def known_fields(body_type: type[Body]) -> tuple[str, ...]:
    """Every field that means something, also if it is refused."""
    names = (*body_type.__struct_fields__, *_REFUSED, *body_type.refused, *STRUCTURE_FIELDS)
    return tuple(dict.fromkeys(names))


def body_of(fields: dict[str, Any], body_type: type[BodyT]) -> BodyT:
    """The body with these fields, which are checked one by one. Raises ApiError."""
    _refuse_unsupported(fields, _REFUSED | body_type.refused)
    try:
        body = msgspec.convert(fields, body_type)
    except msgspec.ValidationError as error:
        raise from_validation(error) from error
    _check_stream_options(body)
    _check_logprobs(body)
    if isinstance(body, CompletionBody):
        _check_completion(body)
    return body


def checked_structure(fields: dict[str, Any], token_of: Callable[[str], int | None]) -> Structure:
    """What the answer shall look like, as far as fields tell. Raises ApiError.

    `router.gateway.grammar_checker` tells whether its grammar can be followed.
    """
    try:
        structure = structure_of(fields, token_of=token_of)
        check_combination(structure, fields)
    except InvalidRequest as error:
        raise invalid_value(error.message, error.param) from error
    return structure


def sampling_of(
    body: Body, *, vocab_size: int, random_seed: int, grammar: Grammar | None = None
) -> Sampling:
    """How tokens are chosen; `random_seed` serves where the client gave none."""
    seed = random_seed if body.seed is None else body.seed
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=min(max(body.top_k or 0, 0), vocab_size),
        min_p=body.min_p or 0.0,
        seed=seed & UINT64_MASK,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
        grammar=grammar,
        logprobs=_scored(body),
    )


def nth_seed(sampling: Sampling, index: int) -> Sampling:
    """How the tokens of one choice of several are chosen: the first one's as if it were alone."""
    return msgspec.structs.replace(sampling, seed=(sampling.seed + index) & UINT64_MASK)


def prompt_logprobs_of(body: Body) -> int | None:
    """How many of the likeliest tokens are wanted for each token of the prompt; None: nothing."""
    wanted = [body.prompt_logprobs]
    if isinstance(body, CompletionBody) and body.echo:
        wanted.append(body.num_top_logprobs)
    return max((count for count in wanted if count is not None), default=None)


def check_num_choices(body: Body, max_choices: int) -> None:
    """Raises ApiError if more answers are asked for than the operator allows."""
    for name, count in (("n", body.num_choices), ("best_of", body.num_candidates)):
        if count > max_choices:
            raise invalid_value(f"{name} is {count}; at most {max_choices} are allowed", name)


def priority_of(body: Body, min_priority: int) -> int:
    """Lower is served earlier; who says nothing gets 0, or the lowest that the operator allows.
    Raises ApiError if it is lower than that.
    """
    priority = max(0, min_priority) if body.priority is None else body.priority
    if priority < min_priority:
        raise invalid_value(
            f"priority is {priority}; at least {min_priority} is allowed", "priority"
        )
    return priority


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
        raise invalid_value(message, "min_tokens")
    return Limits(
        max_len=prompt_len + max_tokens,
        min_len=prompt_len + min_tokens,
        stop_token_ids=tuple(dict.fromkeys([*stop_token_ids, *(body.stop_token_ids or ())])),
        prompt_len=prompt_len,
    )


def check_stop_token_ids(body: Body, vocab_size: int) -> None:
    """Raises ApiError for an id that no token has."""
    _check_in_vocabulary(body.stop_token_ids or (), vocab_size, "stop_token_ids")


def _max_tokens(body: Body, default: int | None, prompt_len: int, context_len: int) -> int:
    wanted, room = body.wanted_tokens, context_len - prompt_len
    if room < 1:
        raise no_room(context_len, prompt_len, body.prompt_field)
    if wanted is None:
        return room if default is None else min(default, room)
    if wanted > room:
        message = (
            f"requests may have {context_len} tokens, "
            f"and {prompt_len} in the prompt plus {wanted} in the answer are more"
        )
        raise context_exceeded(message, "max_tokens")
    return wanted


def _scored(body: Body) -> int | None:
    """Candidates are compared by their log-probabilities, whether these are shown or not."""
    if body.num_candidates > body.num_choices:
        return body.num_top_logprobs or 0
    return body.num_top_logprobs


def _logit_bias(biases: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    token_ids = [_token_id(key) for key in biases]
    _check_in_vocabulary(token_ids, vocab_size, "logit_bias")
    if len(set(token_ids)) < len(token_ids):
        raise invalid_value("logit_bias names a token id twice", "logit_bias")
    return tuple(zip(token_ids, biases.values(), strict=True))


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS):
        raise invalid_value(f"logit_bias: {key[:40]!r} is no token id", "logit_bias")
    return int(key)


def _refuse_unsupported(fields: dict[str, Any], refused: Refused) -> None:
    for name, harmless in refused.items():
        value = fields.get(name)
        if value is None or any(type(value) is type(ok) and value == ok for ok in harmless):
            continue
        raise unsupported(name)


def _check_stream_options(body: Body) -> None:
    options = body.stream_options
    if options is None:
        return
    if not body.stream:
        raise invalid_value("stream_options is allowed only with stream", "stream_options")


def _check_logprobs(body: Body) -> None:
    if isinstance(body, ChatBody) and body.top_logprobs and not body.logprobs:
        raise invalid_value("top_logprobs needs logprobs", "top_logprobs")
    if body.stream and body.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "in a stream")


def _check_completion(body: CompletionBody) -> None:
    if body.logprobs is True:
        raise invalid_value("logprobs: expected an integer", "logprobs")
    if body.num_candidates < body.num_choices:
        raise invalid_value(f"best_of is {body.best_of}, less than n", "best_of")
    if body.stream and body.num_candidates > body.num_choices:
        raise unsupported("best_of", "in a stream")
    if body.stream and body.echo and body.num_top_logprobs is not None:
        raise unsupported("echo", "with logprobs in a stream")


def _single_prompt(prompt: str | list[str | int | list[int]] | None) -> str | list[int] | None:
    """`prompt` is text, token ids, or a list of one of these."""
    if prompt is None or isinstance(prompt, str):
        return prompt
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return ids
    if len(prompt) > 1:
        raise unsupported("prompt", "as a batch of prompts")
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
        "tool_calls": _template_calls(message.tool_calls),
        "tool_call_id": message.tool_call_id,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _template_calls(calls: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Clients write the arguments as JSON in a string, templates expect what it says."""
    return None if calls is None else [_template_call(call) for call in calls]


def _template_call(call: dict[str, Any]) -> dict[str, Any]:
    match call:
        case {"function": {"arguments": str(arguments)} as function}:
            try:
                decoded = decode_value(arguments.encode(), "messages")
            except (ValueError, RecursionError):
                return call  # text that an answer was cut short in
            return {**call, "function": {**function, "arguments": decoded}}
    return call


def _content(message: ChatMessage, param: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role != "assistant":
            raise invalid_value("content is missing", param)
        return ""
    return "\n".join(_part_text(part, param) for part in content)


def _part_text(part: ContentPart, param: str) -> str:
    if part.type != "text":
        message = f"content of type {part.type!r} is not supported"
        raise ApiError(message, param=param, code="unsupported_content")
    if part.text is None:
        raise invalid_value("a part of type 'text' needs a text", param)
    return part.text


def _check_in_vocabulary(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        unknown = next(i for i in token_ids if not 0 <= i < vocab_size)
        name = unknown if abs(unknown) <= UINT64_MASK else "beyond 64 bits"
        message = f"{param} holds the token id {name}; the model's vocabulary has {vocab_size}"
        raise invalid_value(message, param)


def from_validation(error: msgspec.ValidationError, field: str = "") -> ApiError:
    """msgspec says for example: Expected `int` >= 1 - at `$.max_tokens`.

    `field` is the one that was decoded by itself.
    """
    text, _, path = str(error).partition(" - at `$")
    param = (field + path.rstrip("`")).lstrip(".") or None
    text = re.sub("^E", "e", text)
    return invalid_value(text if param is None else f"{param}: {text}", param)


def unsupported(name: str, circumstance: str = "") -> ApiError:
    """What Baton cannot do."""
    message = f"{name} is not supported {circumstance}".rstrip()
    return ApiError(message, param=name, code="unsupported_parameter")
