"""The request fields of all endpoints, with their ranges, and the common parts of all answers.

Pure: converts fields to a checked body or an error. `router.gateway.requests.field_table` lists the
honoured, refused and ignored fields, with their origins. `router.text.structured` reads the fields
for schemas, grammars and tools.
"""

import json
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from engine.config import MAX_PRIORITY
from router.gateway.requests.field_table import RefusedField, known_by, refused_by
from router.inbox.api_errors import ApiError, invalid_value
from router.machine.requests import Timeline
from router.text.embeddings import EmbeddingForm
from router.text.forms.calling import Calling
from router.text.forms.chosen import AnswerParsing
from router.text.structured import FIELDS as STRUCTURE_FIELDS
from router.text.tokenizer import TextModel

MAX_STOP_STRINGS = 16
MAX_STOP_LEN = 512  # maximum characters of a stop string
MAX_STOP_TOKEN_IDS = 128
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_LENGTH_PENALTY = 10.0
MAX_BEAM_TOKENS = 4096  # maximum answer tokens of a beam search: one step per token
MAX_TOP_LOGPROBS = 20
MAX_USER_LEN = 512  # maximum characters of `user`
MAX_CACHE_SALT_LEN = 256
MAX_BOUND_MS = 3_600_000
MAX_ALLOWED_IDS = 16_384
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LEN = 256  # maximum characters of a bad word
MAX_SHOWN_LEN = 60  # maximum characters of a client's value in an error message
UINT64_MASK = 2**64 - 1

BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_LEN)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LEN)]
Count = Annotated[int, Meta(ge=1)]
TopCount = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
LengthPenalty = Annotated[float, Meta(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)]
Bias = Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]
BoundMs = Annotated[float, Meta(gt=0, le=MAX_BOUND_MS)]

Refused = dict[str, tuple[object, ...]]  # by field: neutral values; others are refused


# Fields that a beam search does not support, with their neutral values.
_NOT_IN_BEAM_SEARCH: Refused = {
    "stop": ([],),
    "temperature": (0.0, 1.0),  # do not change the order of hypotheses
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


class StreamOptions(msgspec.Struct):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(msgspec.Struct, kw_only=True, dict=True):
    """The fields that all endpoints share. In every field, null means absent."""

    endpoint: ClassVar[str]  # name of the endpoint in `field_table`
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
    # True: the choices are the best hypotheses of a beam search of width `n` or `best_of`.
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
    # Only requests with equal salts share cached prefixes, and only if their keys may share.
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_CACHE_SALT_LEN)] | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    slo_ttft_ms: BoundMs | None = None  # milliseconds from arrival to first token
    slo_tpot_ms: BoundMs | None = None

    def __post_init__(self) -> None:
        """Computes the attributes that checks and answers read. Subclasses change some of these."""
        self.num_choices = self.n or 1  # answers that are sent
        self.num_candidates = self.num_choices  # answers that are generated; the best are sent
        self.num_prompts = 1
        self.max_inputs = 0  # prompts that are always allowed, even above the operator's limit
        # The client's maximum of answer tokens, and the default maximum; None: the operator's
        # default.
        self.wanted_tokens = self.max_tokens
        self.default_tokens = MAX_BEAM_TOKENS if self.use_beam_search else None
        # The number of likeliest tokens reported per token; None: no log-probabilities.
        self.num_top_logprobs: int | None = None
        self.num_scored_prompt = self.prompt_logprobs
        self.times_of_prompt = 1  # times that an answer repeats the prompt's log-probabilities
        self.scores_all_tokens = bool(self.return_token_ids)  # False: only tokens in the text
        self.echoes_prompt = self.echoes_scores = False  # True: choices begin with the prompt
        self.is_only_prompt = False  # True if the client wants only the prompt and its scores
        self.shows_reasoning = True
        self.stop_strings = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        options = self.stream_options or StreamOptions()
        asked, continuous = options.include_usage, bool(options.continuous_usage_stats)
        self.usage_in_stream = continuous if asked is None else asked  # usage at the stream's end
        self.usage_in_every_chunk = self.usage_in_stream and continuous

    def check(self) -> None:
        """Checks fields that depend on each other. Raises ApiError."""
        if self.stream_options is not None and not self.stream:
            raise invalid_value("stream_options is allowed only with stream", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise unsupported("prompt_logprobs", "in a stream")
        if self.use_beam_search:
            self._check_beam_search()
        elif self.length_penalty not in (None, 1.0):
            raise invalid_value("length_penalty needs use_beam_search", "length_penalty")
        if self.truncate_prompt_tokens == 0:
            message = "truncate_prompt_tokens is 0; at least 1, or -1 for the context, is allowed"
            raise invalid_value(message, "truncate_prompt_tokens")

    def _check_beam_search(self) -> None:
        if self.stream:
            raise unsupported("use_beam_search", "in a stream")
        wanted = self.wanted_tokens
        if (wanted or 0) > MAX_BEAM_TOKENS:
            message = f"max_tokens is {wanted}; at most {MAX_BEAM_TOKENS} with beam search"
            raise invalid_value(message, "max_tokens")
        for name, harmless in _NOT_IN_BEAM_SEARCH.items():
            value = getattr(self, name)
            if value is not None and value not in harmless:
                raise unsupported(name, "with use_beam_search")

    @abstractmethod
    def encode(
        self,
        text: TextModel,
        context_len: int,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        may_exceed: bool = False,
    ) -> list[int]:
        """Returns the prompt's token ids. Raises InvalidRequest.

        If `may_exceed` is set, the prompt may be longer than the context.
        """

    def embedding_form(self, text: TextModel) -> EmbeddingForm | None:
        """Returns the form of embeddings if the body asks for embeddings; otherwise None.

        Raises ApiError if a model cannot answer this kind of body.
        """
        if text.embedding is not None:
            message = "this model gives embeddings (POST /v1/embeddings), and no text"
            raise ApiError(message, param="model", code="model_not_supported", status=404)
        return None

    def singles(self) -> "Sequence[Body]":
        """Returns one body for each prompt. The bodies differ only in the prompt."""
        return (self,)

    def cut(self, token_ids: list[int], context_len: int) -> list[int]:
        """Returns the prompt's tokens, cut to the length of `truncate_prompt_tokens`."""
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

    def echoed(self, token_ids: Sequence[int], text: TextModel) -> str | None:
        """Returns the text of the prompt with which each choice begins, if the body
        `echoes_prompt`.
        """
        return None

    def reader(
        self, text: TextModel, calling: Calling | None, token_ids: Sequence[int]
    ) -> AnswerParsing | None:
        """Returns the parser of answers to this prompt; None if answers are not parsed."""
        return None


BodyT = TypeVar("BodyT", bound=Body)


@cache
def known_fields(body_type: type[Body]) -> frozenset[str]:
    """Returns the names of all fields that have a meaning, including refused fields."""
    return known_by(body_type.endpoint) | set(STRUCTURE_FIELDS)


@cache
def _refused_fields(body_type: type[Body]) -> Mapping[str, RefusedField]:
    return refused_by(body_type.endpoint)


def body_of(fields: dict[str, Any], body_type: type[BodyT]) -> BodyT:
    """Converts fields to a body and checks every field. Raises ApiError."""
    refused = _refused_fields(body_type)
    for name in fields.keys() & refused.keys():
        value, field = fields[name], refused[name]
        if value is None or any(type(value) is type(ok) and value == ok for ok in field.harmless):
            continue  # types are compared because in Python `1 == True`
        message = f"{name} is not supported: {field.reason}; it is {shortened(value)}"
        raise ApiError(message, param=name, code="unsupported_parameter")
    for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
        if fields.get(name) == -1:  # means all tokens in vLLM
            message = f"{name}: -1 (all tokens) is not supported; at most {MAX_TOP_LOGPROBS}"
            raise invalid_value(message, name)
    try:
        body = msgspec.convert(fields, body_type)
    except msgspec.ValidationError as error:
        raise from_validation(error, value=fields) from error
    body.check()
    return body


def check_in_vocabulary(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises ApiError for a token id outside the model's vocabulary."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        unknown = next(i for i in token_ids if not 0 <= i < vocab_size)
        name = unknown if abs(unknown) <= UINT64_MASK else "beyond 64 bits"
        message = f"{param} holds the token id {name}; the model's vocabulary has {vocab_size}"
        raise invalid_value(message, param)


def from_validation(
    error: msgspec.ValidationError, field: str = "", value: object = None
) -> ApiError:
    """Converts an error of msgspec, such as: Expected `int` >= 1 - at `$.max_tokens`.

    `field` is the field that was decoded separately, if any. `value` is the value that was
    converted.
    """
    text, _, path = str(error).partition(" - at `$")
    path = path.rstrip("`")
    param = (field + path).lstrip(".") or None
    text = re.sub("^E", "e", text)
    # A message shows no prompt, because prompts are long or were decoded separately.
    found = None if path.startswith((".messages", ".prompt", ".input")) else _at(value, path)
    if found is not None:
        text = f"{text}; it is {shortened(found)}"
    return invalid_value(text if param is None else f"{param}: {text}", param)


def _at(value: Any, path: str) -> object:
    """Returns the part of a value at a path of msgspec, such as `.stop[3]`; None if it is
    absent.
    """
    for name, index in re.findall(r"\.([^.\[\]]+)|\[(\d+)\]", path):
        if name and isinstance(value, dict):
            value = value.get(name)
        elif index and isinstance(value, list) and int(index) < len(value):
            value = value[int(index)]
        else:
            return None
    return value


def shortened(value: object) -> str:
    """Returns a client's value as short JSON, for an error message."""
    if isinstance(value, str):
        value = value[: MAX_SHOWN_LEN + 1]
    elif isinstance(value, dict | list) and len(value) > MAX_SHOWN_LEN:
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value, ensure_ascii=False, default=lambda _: "…")
    return text if len(text) <= MAX_SHOWN_LEN else text[:MAX_SHOWN_LEN] + "…"


def unsupported(name: str, circumstance: str = "") -> ApiError:
    """Returns the error for a field that Baton cannot honour."""
    message = f"{name} is not supported {circumstance}".rstrip()
    return ApiError(message, param=name, code="unsupported_parameter")


class ShownAnswer(msgspec.Struct, kw_only=True):
    """The fields with which each answer, and each event of a stream, begins."""

    id: str
    object: str
    created: int  # Unix time, in seconds
    model: str
    system_fingerprint: str | None


class ShownChoice(msgspec.Struct, kw_only=True):
    """The fields of each choice, whole or a part of it."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET


class PromptCandidate(msgspec.Struct):
    """A candidate token at a position of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptScore = list[dict[str, PromptCandidate] | None]


class PromptDetails(msgspec.Struct):
    """Details of the prompt's tokens."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct):
    """Details of the answer's tokens: reasoning, and tokens that speculation proposed."""

    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET
    reasoning_tokens: int | UnsetType = UNSET


class TokenUsage(msgspec.Struct):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | UnsetType | None = UNSET
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class CompleteAnswer(ShownAnswer, kw_only=True):
    """A whole answer with choices."""

    choices: list[Any]
    usage: TokenUsage
    baton_timeline: Timeline | UnsetType | None = UNSET


class StreamChunk(ShownAnswer, kw_only=True):
    """An event in a stream of an answer."""

    choices: list[Any]
    usage: TokenUsage | UnsetType | None = UNSET
    baton_timeline: Timeline | UnsetType | None = UNSET
