"""The bodies of OpenAI's chat completions and completions, with the range of each field.

Pure: fields in, a checked body or an error out. `router.gateway.requests.field_table` says which
fields are honoured, refused and passed over, and where they come from. `router.text.structured`
reads the fields about schemas, grammars and tools.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

import msgspec
from msgspec import Meta

from engine.config import MAX_PRIORITY
from router.gateway.requests.field_table import (
    CHAT,
    COMPLETIONS,
    RefusedField,
    known_by,
    refused_by,
)
from router.gateway.requests.messages import ChatMessage, template_message
from router.inbox.api_errors import ApiError, invalid_value
from router.text.embeddings import EmbeddingForm
from router.text.forms.calling import Calling
from router.text.forms.chosen import AnswerParsing
from router.text.structured import FIELDS as STRUCTURE_FIELDS
from router.text.templates import DEFAULT_OPTIONS, ChatTemplate, TemplateOptions, shown_end
from router.text.tokenizer import TextModel

MAX_STOP_STRINGS = 16
MAX_STOP_LEN = 512  # characters
MAX_STOP_TOKEN_IDS = 128
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_LENGTH_PENALTY = 10.0
MAX_BEAM_TOKENS = 4096  # of an answer: each is a round trip to the workers
MAX_TOP_LOGPROBS = 20
MAX_MESSAGES = 4096  # each costs a turn of the chat template
MAX_USER_LEN = 512  # characters
MAX_CACHE_SALT_LEN = 256
MAX_BOUND_MS = 3_600_000
MAX_ALLOWED_IDS = 16_384
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LEN = 256  # characters
MAX_VARIABLES = 64  # of a chat template
MAX_DOCUMENTS = 1024
MAX_EFFORT_LEN = 32
DEFAULT_COMPLETION_TOKENS = 16
PROMPT_END_TOKENS = 16  # show whether the answer begins inside its reasoning
NO_EFFORT = "none"
MAX_SHOWN_LEN = 60  # characters of a client's value in an error message
UINT64_MASK = 2**64 - 1

BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_LEN)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LEN)]
Count = Annotated[int, Meta(ge=1)]
TopCount = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
LengthPenalty = Annotated[float, Meta(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)]
Bias = Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]
BoundMs = Annotated[float, Meta(gt=0, le=MAX_BOUND_MS)]

Refused = dict[str, tuple[object, ...]]  # values that ask for nothing, by field


class StreamOptions(msgspec.Struct):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(msgspec.Struct, kw_only=True):
    """The fields that both endpoints share. In all fields, null means absent."""

    endpoint: ClassVar[str]  # its name in the table of fields
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
    n: Count | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=MAX_BIASES)] | None = None
    prompt_logprobs: TopCount | None = None
    # The choices are the best results of a beam search with `n` or `best_of` hypotheses.
    use_beam_search: bool | None = None
    length_penalty: LengthPenalty | None = None
    allowed_token_ids: Annotated[list[int], Meta(max_length=MAX_ALLOWED_IDS)] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    user: Annotated[str, Meta(max_length=MAX_USER_LEN)] | None = None
    # Only requests with equal salts share cached prefixes, within the limits of their keys.
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_CACHE_SALT_LEN)] | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    slo_ttft_ms: BoundMs | None = None  # from when the request came in
    slo_tpot_ms: BoundMs | None = None

    def encode(
        self,
        text: TextModel,
        context_len: int,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        may_exceed: bool = False,
    ) -> list[int]:
        """The prompt's token ids. Raises InvalidRequest.

        A prompt that `may_exceed` the context is only counted.
        """
        raise NotImplementedError

    def check_model(self, text: TextModel) -> None:
        """Raises ApiError if a model does not answer such bodies."""
        if text.embedding is not None:
            message = "this model gives embeddings (POST /v1/embeddings), and no text"
            raise ApiError(message, param="model", code="model_not_supported", status=404)

    def embedding_form(self, text: TextModel) -> EmbeddingForm | None:
        """The form of embeddings, if they are asked for. Raises ApiError."""
        return None

    def most_candidates(self, of_operator: int) -> int:
        """The most candidates of all prompts together, of which the operator allows so many."""
        return of_operator

    @property
    def num_prompts(self) -> int:
        """The number of prompts. Raises ApiError."""
        return 1

    def singles(self) -> "Sequence[Body]":
        """One body for each prompt. They differ in the prompt only."""
        return (self,)

    @property
    def is_cut(self) -> bool:
        """True if the prompt is cut to a length."""
        return self.truncate_prompt_tokens is not None

    def cut(self, token_ids: list[int], context_len: int) -> list[int]:
        """The prompt's tokens, without those that `truncate_prompt_tokens` leaves out."""
        most = self.truncate_prompt_tokens
        if most is None:
            return token_ids
        if most > context_len:
            message = f"truncate_prompt_tokens is {most}; the model's context has {context_len}"
            raise invalid_value(message, "truncate_prompt_tokens")
        if most < 0:
            most = max(context_len - (self.wanted_tokens or 1), 1)
        if self.truncation_side == "right":
            return token_ids[:most]
        return token_ids[-most:]

    @property
    def wanted_tokens(self) -> int | None:
        """The longest answer that the client asked for, in tokens; None if it did not say."""
        return self.max_tokens

    @property
    def default_tokens(self) -> int | None:
        """The longest answer if the client named none; None: what the operator says."""
        return MAX_BEAM_TOKENS if self.use_beam_search else None

    @property
    def num_top_logprobs(self) -> int | None:
        """The number of likeliest tokens to report per token; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def num_scored_prompt(self) -> int | None:
        """The number of likeliest tokens to report per token of the prompt, or None."""
        return self.prompt_logprobs

    @property
    def times_of_prompt(self) -> int:
        """How often an answer repeats the log-probabilities that `prompt_logprobs` asks for."""
        return 1

    def echoed(self, token_ids: Sequence[int], text: TextModel) -> str | None:
        """The prompt's text if each choice begins with it."""
        return None

    @property
    def echoes_scores(self) -> bool:
        """True if what each choice begins with has log-probabilities."""
        return False

    def reader(
        self, text: TextModel, calling: Calling | None, token_ids: Sequence[int]
    ) -> AnswerParsing | None:
        """What parses answers to this prompt; None if they are text."""
        return None

    @property
    def shows_reasoning(self) -> bool:
        """False if the answer's reasoning is left out."""
        return True

    @property
    def is_only_prompt(self) -> bool:
        """True if no answer is wanted: only the prompt and its log-probabilities."""
        return False

    @property
    def scores_all_tokens(self) -> bool:
        """True if each token has log-probabilities, else only those of the text shown."""
        return bool(self.return_token_ids)

    @property
    def usage_in_stream(self) -> bool:
        """True if a stream ends with its usage."""
        options = self.stream_options
        if options is None:
            return False
        asked, continuous = options.include_usage, options.continuous_usage_stats
        return bool(continuous if asked is None else asked)

    @property
    def usage_in_every_chunk(self) -> bool:
        """True if each chunk of a stream has the usage so far."""
        options = self.stream_options
        return options is not None and self.usage_in_stream and bool(options.continuous_usage_stats)

    @property
    def num_choices(self) -> int:
        """The number of answers shown."""
        return self.n or 1

    @property
    def num_candidates(self) -> int:
        """The number of answers generated, of which the best are shown."""
        return self.num_choices

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple; the field may be one string, several or none."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatBody(Body, kw_only=True):
    """POST /v1/chat/completions."""

    endpoint = CHAT
    prompt_field = "messages"

    messages: list[ChatMessage] = []
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
    parallel_tool_calls: bool | None = None  # `router.text.structured` follows it

    def encode(
        self,
        text: TextModel,
        context_len: int,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        may_exceed: bool = False,
    ) -> list[int]:
        """The token ids of messages and tools, rendered by the chat template."""
        if not self.messages:
            raise invalid_value("messages must not be empty", "messages")
        if len(self.messages) > MAX_MESSAGES:
            message = f"there are {len(self.messages)} messages; at most {MAX_MESSAGES} are allowed"
            raise invalid_value(message, "messages")
        messages = [template_message(i, m) for i, m in enumerate(self.messages)]
        options = DEFAULT_OPTIONS
        if self._has_options:
            options = self._options(text.templates.choose(with_tools=bool(tools)))
        token_ids = text.encode_chat(
            messages,
            context_len,
            tools or None,
            options,
            add_special_tokens=bool(self.add_special_tokens),
            may_exceed=may_exceed or self.is_cut,
        )
        return self.cut(token_ids, context_len)

    def reader(
        self, text: TextModel, calling: Calling | None, token_ids: Sequence[int]
    ) -> AnswerParsing | None:
        """What parses answers to this prompt; None if they are text."""
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

    @property
    def shows_reasoning(self) -> bool:
        """False if the answer's reasoning is left out."""
        return self.include_reasoning is not False

    @property
    def _has_options(self) -> bool:
        return (
            self.add_generation_prompt is not None
            or self.continue_final_message is not None
            or self.chat_template_kwargs is not None
            or self.documents is not None
            or self.reasoning_effort is not None
        )

    def _options(self, template: ChatTemplate) -> TemplateOptions:
        """What the client chooses of the rendering. Raises InvalidRequest."""
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
        """The final message's text, if it is the assistant's and the answer begins with it.

        With `continue_final_message` that is only the part that the prompt ends with.
        """
        final = self.messages[-1]
        if not self.echo or final.role != "assistant":
            return None
        content = str(template_message(len(self.messages) - 1, final)["content"])
        if not self.continue_final_message:
            return content
        return shown_end(text.decode_all(list(token_ids)), content)

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

    endpoint = COMPLETIONS
    prompt_field = "prompt"

    prompt: str | list[str | int | list[int]] | None = None
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    suffix: str | None = None
    best_of: Count | None = None
    echo: bool | None = None
    logprobs: bool | TopCount | None = None

    def encode(
        self,
        text: TextModel,
        context_len: int,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        may_exceed: bool = False,
    ) -> list[int]:
        """The token ids of the prompt, which is text or token ids. Not for a batch."""
        (prompt,) = prompts_of(self.prompt)
        if not prompt:
            raise invalid_value("prompt must not be empty", "prompt")
        if isinstance(prompt, str):
            token_ids = text.encode_text(
                prompt,
                context_len,
                add_special_tokens=self.add_special_tokens is not False,
                may_exceed=may_exceed or self.is_cut,
            )
        else:
            check_in_vocabulary(prompt, text.vocab_size, "prompt")
            token_ids = prompt
        if self.suffix:
            token_ids = text.encode_between(token_ids, self.suffix, context_len)
        return self.cut(token_ids, context_len)

    def echoed(self, token_ids: Sequence[int], text: TextModel) -> str | None:
        """The prompt's text if each choice begins with it."""
        if not self.echo:
            return None
        (prompt,) = prompts_of(self.prompt)
        if isinstance(prompt, str) and self.truncate_prompt_tokens is None:
            return prompt
        return text.decode_text(token_ids)

    @property
    def num_prompts(self) -> int:
        """The number of prompts. Raises ApiError."""
        return len(prompts_of(self.prompt))

    def singles(self) -> "Sequence[Body]":
        """One body for each prompt of a batch."""
        prompts = prompts_of(self.prompt)
        if len(prompts) == 1:
            return (self,)
        return [msgspec.structs.replace(self, prompt=prompt) for prompt in prompts]

    @property
    def wanted_tokens(self) -> int | None:
        """`max_tokens`, but at least one: workers always sample a token of a prompt."""
        return 1 if self.is_only_prompt else self.max_tokens

    @property
    def default_tokens(self) -> int | None:
        """OpenAI's longest answer of a completion that names none."""
        return DEFAULT_COMPLETION_TOKENS

    @property
    def echoes_scores(self) -> bool:
        """True if there is an echo and log-probabilities are asked for."""
        return bool(self.echo) and self.num_top_logprobs is not None

    @property
    def is_only_prompt(self) -> bool:
        """True if no answer is wanted: only the prompt and its log-probabilities."""
        return self.max_tokens == 0

    @property
    def scores_all_tokens(self) -> bool:
        """Always true, as with vLLM: evaluations count on a last token that ended the answer."""
        return True

    @property
    def num_top_logprobs(self) -> int | None:
        """`logprobs`; some clients say `false` for none."""
        return None if self.logprobs is False else self.logprobs

    @property
    def num_scored_prompt(self) -> int | None:
        """The larger of `prompt_logprobs` and, with `echo`, of `logprobs`."""
        wanted = (self.prompt_logprobs, self.num_top_logprobs if self.echoes_scores else None)
        return max((count for count in wanted if count is not None), default=None)

    @property
    def times_of_prompt(self) -> int:
        """Once in each choice, as with vLLM."""
        return self.num_choices

    @property
    def num_candidates(self) -> int:
        """`best_of`, which is `n` if not given."""
        return self.best_of or self.num_choices


BodyT = TypeVar("BodyT", bound=Body)


def _effort(effort: str, names: Collection[str]) -> dict[str, Any]:
    """The template's variables for an effort of reasoning. Raises ApiError if it knows none."""
    if "reasoning_effort" in names:
        return {"reasoning_effort": effort}
    switch = next((name for name in ("enable_thinking", "thinking") if name in names), None)
    if switch is not None:
        return {switch: effort != NO_EFFORT}
    if effort == NO_EFFORT:
        return {}
    message = f"reasoning_effort is not supported by this model's chat template; it is {effort!r}"
    raise ApiError(message, param="reasoning_effort", code="unsupported_parameter")


@cache
def known_fields(body_type: type[Body]) -> frozenset[str]:
    """All fields that have a meaning, including refused ones."""
    return known_by(body_type.endpoint) | set(STRUCTURE_FIELDS)


@cache
def _refused_fields(body_type: type[Body]) -> Mapping[str, RefusedField]:
    return refused_by(body_type.endpoint)


def body_of(fields: dict[str, Any], body_type: type[BodyT]) -> BodyT:
    """Converts fields to a body and checks each. Raises ApiError."""
    _refuse_unsupported(fields, _refused_fields(body_type))
    _refuse_all_logprobs(fields)
    try:
        body = msgspec.convert(fields, body_type)
    except msgspec.ValidationError as error:
        raise from_validation(error, value=fields) from error
    _check_stream_options(body)
    _check_logprobs(body)
    _check_beam_search(body)
    if body.truncate_prompt_tokens == 0:
        message = "truncate_prompt_tokens is 0; at least 1, or -1 for the context, is allowed"
        raise invalid_value(message, "truncate_prompt_tokens")
    if isinstance(body, CompletionBody):
        _check_completion(body)
    return body


def _refuse_unsupported(fields: dict[str, Any], refused: Mapping[str, RefusedField]) -> None:
    """Raises ApiError for a refused field. Types are compared too: `1` is not `true`."""
    for name in fields.keys() & refused.keys():
        value, field = fields[name], refused[name]
        if value is None or any(type(value) is type(ok) and value == ok for ok in field.harmless):
            continue
        message = f"{name} is not supported: {field.reason}; it is {shortened(value)}"
        raise ApiError(message, param=name, code="unsupported_parameter")


def _refuse_all_logprobs(fields: dict[str, Any]) -> None:
    """Raises ApiError for the number that means all tokens with vLLM."""
    for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
        if fields.get(name) == -1:
            message = f"{name}: -1 (all tokens) is not supported; at most {MAX_TOP_LOGPROBS}"
            raise invalid_value(message, name)


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


# What a beam search does not do, with the values that ask for nothing of it.
_NOT_IN_BEAM_SEARCH: Refused = {
    "stop": ([],),
    "temperature": (0.0, 1.0),  # it changes no order of hypotheses
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "min_tokens": (0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": ({},),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
}


def _check_beam_search(body: Body) -> None:
    if not body.use_beam_search:
        if body.length_penalty not in (None, 1.0):
            raise invalid_value("length_penalty needs use_beam_search", "length_penalty")
        return
    if body.stream:
        raise unsupported("use_beam_search", "in a stream")
    if (body.wanted_tokens or 0) > MAX_BEAM_TOKENS:
        message = f"max_tokens is {body.wanted_tokens}; at most {MAX_BEAM_TOKENS} with beam search"
        raise invalid_value(message, "max_tokens")
    for name, harmless in _NOT_IN_BEAM_SEARCH.items():
        value = getattr(body, name)
        if value is not None and value not in harmless:
            raise unsupported(name, "with use_beam_search")


def _check_completion(body: CompletionBody) -> None:
    if body.suffix and body.truncate_prompt_tokens is not None:
        raise unsupported("truncate_prompt_tokens", "with suffix")
    if body.suffix and body.echo:
        raise unsupported("echo", "with suffix")
    if body.logprobs is True:
        raise invalid_value("logprobs: expected an integer", "logprobs")
    if body.is_only_prompt and not body.echo:
        raise invalid_value("max_tokens: 0 is allowed only with echo", "max_tokens")
    if body.num_candidates < body.num_choices:
        raise invalid_value(f"best_of is {body.best_of}, less than n", "best_of")
    if body.stream and body.num_candidates > body.num_choices:
        raise unsupported("best_of", "in a stream")


def prompts_of(
    prompt: str | list[str | int | list[int]] | None, field: str = "prompt"
) -> list[str | list[int]]:
    """The prompts of a body's field, each text or token ids. Raises ApiError if they are mixed."""
    if prompt is None or isinstance(prompt, str):
        return [prompt or ""]
    kinds = set(map(type, prompt))  # a prompt may have a million ids
    if len(kinds) > 1:
        message = f"{field} must hold only texts, only token ids, or only lists of token ids"
        raise invalid_value(message, field)
    if kinds <= {int}:
        return [cast("list[int]", prompt)]
    return cast("list[str | list[int]]", prompt)


def check_in_vocabulary(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises ApiError for a token id that the model's vocabulary does not have."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        unknown = next(i for i in token_ids if not 0 <= i < vocab_size)
        name = unknown if abs(unknown) <= UINT64_MASK else "beyond 64 bits"
        message = f"{param} holds the token id {name}; the model's vocabulary has {vocab_size}"
        raise invalid_value(message, param)


def from_validation(
    error: msgspec.ValidationError, field: str = "", value: object = None
) -> ApiError:
    """Converts msgspec's error, such as: Expected `int` >= 1 - at `$.max_tokens`.

    `field` is the name of a field that was decoded separately, `value` what was converted.
    """
    text, _, path = str(error).partition(" - at `$")
    path = path.rstrip("`")
    param = (field + path).lstrip(".") or None
    text = re.sub("^E", "e", text)
    # Prompts are long, and long ones are decoded separately.
    found = None if path.startswith((".messages", ".prompt", ".input")) else _at(value, path)
    if found is not None:
        text = f"{text}; it is {shortened(found)}"
    return invalid_value(text if param is None else f"{param}: {text}", param)


def _at(value: Any, path: str) -> object:
    """The part of a value at msgspec's path, such as `.stop[3]`; None if it is not there."""
    for name, index in re.findall(r"\.([^.\[\]]+)|\[(\d+)\]", path):
        if name and isinstance(value, dict):
            value = value.get(name)
        elif index and isinstance(value, list) and int(index) < len(value):
            value = value[int(index)]
        else:
            return None
    return value


def shortened(value: object) -> str:
    """A client's value as JSON, for an error message."""
    if isinstance(value, str):
        value = value[: MAX_SHOWN_LEN + 1]
    elif isinstance(value, dict | list) and len(value) > MAX_SHOWN_LEN:
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value, ensure_ascii=False, default=lambda _: "…")
    return text if len(text) <= MAX_SHOWN_LEN else text[:MAX_SHOWN_LEN] + "…"


def unsupported(name: str, circumstance: str = "") -> ApiError:
    """The error for a field that Baton cannot honour."""
    message = f"{name} is not supported {circumstance}".rstrip()
    return ApiError(message, param=name, code="unsupported_parameter")
