"""The shapes of answers, for the description only: answers themselves are encoded by hand.

A test compares them with answers. Fields whose default is UNSET are absent unless asked for.
"""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from router.gateway.batches.records import BatchStatus, LineFault

Finish = Literal["stop", "length", "tool_calls"]


class PromptDetails(Struct):
    """Of the prompt's tokens."""

    cached_tokens: int


class CompletionDetails(Struct):
    """Of the tokens that speculation proposed."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class TokenUsage(Struct):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | UnsetType | None = UNSET
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class CalledFunction(Struct):
    """A call's function; the arguments are JSON in a string."""

    name: str
    arguments: str


class ShownCall(Struct):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ScoredToken(Struct):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class RankedToken(ScoredToken):
    """A token of the answer, with the likeliest ones in its place."""

    top_logprobs: list[ScoredToken]


class ChatScores(Struct):
    """Log-probabilities of a chat's answer."""

    content: list[RankedToken] | None
    refusal: None


class CompletionScores(Struct):
    """Log-probabilities of a completion, in parallel lists."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptCandidate(Struct):
    """A token in a place of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptScore = list[dict[str, PromptCandidate] | None]


class AnswerMessage(Struct):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ShownCall] | UnsetType = UNSET


class _AnyChoice(Struct, kw_only=True):
    index: int
    finish_reason: Finish | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET


class ChatChoice(_AnyChoice, kw_only=True):
    """One of the answers to a chat."""

    message: AnswerMessage
    logprobs: ChatScores | None


class CompletionChoice(_AnyChoice, kw_only=True):
    """One of the answers to a prompt, whole or a part of it."""

    text: str
    logprobs: CompletionScores | None
    prompt_logprobs: PromptScore | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET


class DeltaFunction(Struct):
    """A part of a call's function."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class CallPart(Struct):
    """A part of a call. The first has its id and name, the others more of its arguments."""

    index: int
    function: DeltaFunction
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class MessageDelta(Struct):
    """A part of the assistant's message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[CallPart] | UnsetType = UNSET


class ChatChunkChoice(_AnyChoice, kw_only=True):
    """A part of one of the answers to a chat."""

    delta: MessageDelta
    logprobs: ChatScores | UnsetType | None = UNSET


class _AnyAnswer(Struct, kw_only=True):
    id: str
    created: int  # Unix time, in seconds
    model: str
    system_fingerprint: str | None
    baton_timeline: dict[str, Any] | UnsetType | None = UNSET


class ChatAnswer(_AnyAnswer, kw_only=True):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: TokenUsage
    prompt_logprobs: PromptScore | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET


class ChatStreamChunk(_AnyAnswer, kw_only=True):
    """An event in a stream of /v1/chat/completions."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: TokenUsage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET


class CompletionAnswer(_AnyAnswer, kw_only=True):
    """The answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: TokenUsage


class CompletionStreamChunk(_AnyAnswer, kw_only=True):
    """An event in a stream of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: TokenUsage | UnsetType | None = UNSET


class ShownEmbedding(Struct, kw_only=True):
    """The embedding of one input: numbers, or base64 of fp32 numbers."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(_AnyAnswer, kw_only=True):
    """The answer of /v1/embeddings."""

    object: Literal["list"]
    data: list[ShownEmbedding]
    usage: TokenUsage


class ResponseAnswer(Struct, kw_only=True):
    """A response, as in OpenAI's API; fields of its request are repeated."""

    id: str
    object: Literal["response"]
    created_at: int | float
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    usage: dict[str, Any] | None


class ResponseEvent(Struct, kw_only=True):
    """An event in the stream of a response; its `type` says which other fields it has."""

    type: str
    sequence_number: int


class DeletedResponse(Struct):
    """A response that was deleted."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputTokens(Struct):
    """The number of tokens of a prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class ItemList(Struct):
    """Items of a response's input."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ShownFile(Struct):
    """A file. `bytes` is its length, times are Unix time in seconds."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]
    status_details: None


class FileList(Struct):
    """Files."""

    object: Literal["list"]
    data: list[ShownFile]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Struct):
    """A file that was deleted."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchCounts(Struct):
    """Requests of a batch."""

    total: int
    completed: int
    failed: int


class BatchFaults(Struct):
    """What is wrong with a batch's input."""

    object: Literal["list"]
    data: list[LineFault]


class ShownBatch(Struct):
    """A batch. Times are Unix time, in seconds."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchFaults | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    metadata: dict[str, str] | None


class BatchList(Struct):
    """Batches."""

    object: Literal["list"]
    data: list[ShownBatch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ModelPermission(Struct):
    """Constant: clients of vLLM expect it."""

    id: str
    object: Literal["model_permission"]
    created: int
    allow_create_engine: bool
    allow_sampling: bool
    allow_logprobs: bool
    allow_search_indices: bool
    allow_view: bool
    allow_fine_tuning: bool
    organization: str
    group: str | None
    is_blocking: bool


class ShownModel(Struct):
    """A model. `max_model_len` is in tokens, of prompt and answer together."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    permission: list[ModelPermission]


class ModelList(Struct):
    """All models."""

    object: Literal["list"]
    data: list[ShownModel]


class Health(Struct):
    """The process is alive."""

    status: Literal["ok"]


class Readiness(Struct):
    """Whether requests can be served, and if not, why; and what is broken beside."""

    status: Literal["ready", "not ready"]
    reason: str | UnsetType = UNSET
    troubles: list[str] | UnsetType = UNSET


class ServerLoad(Struct):
    """Requests of this process; `queued_s` are the predicted seconds to compute waiting prompts."""

    server_load: int
    queued_requests: int
    queued_s: float


class TargetGroup(Struct):
    """Addresses to scrape, with labels for all of them."""

    targets: list[str]
    labels: dict[str, str]


class ServerVersion(Struct):
    """The version of Baton."""

    version: str


class ErrorDetails(Struct):
    """What is wrong: `param` names the field or header, `code` is for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Struct):
    """Every error has this shape, also the last event of a stream that fails."""

    error: ErrorDetails
