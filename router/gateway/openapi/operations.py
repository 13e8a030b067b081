"""The operations of the API, with inputs and outputs.

A test compares the operations with the routes.
"""

from typing import Any, NamedTuple

from msgspec import Struct

from engine.messages import MAX_KEEP_S
from router.gateway.answering import (
    ID_HEADER,
    MAX_ID_LEN,
    MAX_TIMEOUT_S,
    MIN_TIMEOUT_S,
    TIMEOUT_HEADER,
)
from router.gateway.answers.writing import DECISION_HEADER, TIMELINE_HEADER
from router.gateway.batches.pages import MAX_PAGE, BatchBody
from router.gateway.batches.records import BatchList, DeletedFile, FileList, ShownBatch, ShownFile
from router.gateway.hints.claims import (
    KEEP_HEADER,
    MIN_KEEP_S,
    SESSION_HEADER,
    SESSION_PATTERN,
)
from router.gateway.hints.pages import SESSION_PARAM, ShownPin
from router.gateway.pages.models import ModelList, ShownModel
from router.gateway.pages.status import Health, Readiness, ServerLoad, ServerVersion, TargetGroup
from router.gateway.pages.tokens import DetokenizeBody, Detokenized, Tokenized
from router.gateway.requests.chat import ChatAnswer, ChatBody, ChatStreamChunk
from router.gateway.requests.completion import (
    CompletionAnswer,
    CompletionBody,
    CompletionStreamChunk,
)
from router.gateway.requests.embedding import EmbeddingBody, EmbeddingList
from router.gateway.responses.body import ResponseBody
from router.gateway.responses.draft import ResponseAnswer, ResponseEvent
from router.gateway.responses.pages import DeletedResponse, InputTokens, ItemList
from router.gateway.versions import AFFINITY_HEADER, VERSION_HEADER

Json = dict[str, Any]

TOKENIZE_BODY = "TokenizeBody"  # made of fields of the bodies of requests
PIN_BODY = "PinBody"
UPLOAD_FORM = "UploadForm"
JSON, TEXT, HTML = "application/json", "text/plain", "text/html"
ANY = "application/octet-stream"

_EDGE = (400, 408, 431, 500, 503)  # error statuses that any request may get
_READS = (*_EDGE, 404, 413, 415, 429)  # error statuses of requests with a body
_ANSWERS = (*_READS, 504)


class Operation(NamedTuple):
    """One method of one path. `errors` are statuses whose body is an `ErrorReply`.

    `events` is the type of a stream's events, if the operation can stream.
    """

    call: str  # method and path, such as `GET /v1/models`
    tag: str
    summary: str
    answer: type[Struct] | str | None  # type or media type of the answer; None: status 204, no body
    body: type[Struct] | str | None = None
    events: type[Struct] | None = None
    parameters: tuple[Json, ...] = ()
    errors: tuple[int, ...] = _EDGE
    other_answers: tuple[tuple[int, type[Struct]], ...] = ()
    description: str = ""
    is_list: bool = False  # True: the answer is a list of items of type `answer`

    @property
    def method(self) -> str:
        """The HTTP method, in lower case."""
        return self.call.partition(" ")[0]

    @property
    def path(self) -> str:
        """The path, in which names of parameters are in braces."""
        return self.call.partition(" ")[2]


def _header(name: str, description: str, schema: Json) -> Json:
    return {"name": name, "in": "header", "description": description, "schema": schema}


def _query(name: str, description: str, schema: Json) -> Json:
    return {"name": name, "in": "query", "description": description, "schema": schema}


def _path(name: str, description: str) -> Json:
    schema = {"type": "string", "minLength": 1}
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": description,
        "schema": schema,
    }


_TEXT: Json = {"type": "string"}
_VERSION = (
    _header(VERSION_HEADER, "forces a version of the model", _TEXT),
    _header(AFFINITY_HEADER, "requests with equal text go to the same version", _TEXT),
)
_OF_ANSWERS = (
    _header(
        ID_HEADER,
        "names the call; the answer has it in its head",
        {"type": "string", "pattern": f"^[ -~]{{1,{MAX_ID_LEN}}}$"},
    ),
    _header(
        TIMEOUT_HEADER,
        "seconds after which an incomplete answer ends with an error",
        {"type": "number", "minimum": MIN_TIMEOUT_S, "maximum": MAX_TIMEOUT_S},
    ),
    *_VERSION,
    _header(TIMELINE_HEADER, "`1` adds where the time of the request went", _TEXT),
    _header(DECISION_HEADER, "`1` adds where the request runs, and why", _TEXT),
    _header(
        SESSION_HEADER,
        "names the session that the request is of, to stores of KV blocks",
        {"type": "string", "pattern": SESSION_PATTERN},
    ),
    _header(
        KEEP_HEADER,
        "seconds within which the session's next request is expected",
        {"type": "number", "minimum": MIN_KEEP_S, "maximum": MAX_KEEP_S},
    ),
)
_RESPONSE_ID = _path("response_id", "of a response that was kept")
_FLAG: Json = {"type": "string", "enum": ["true", "false"]}

_FILE_ID = _path("file_id", "of a file that was kept")
_BATCH_ID = _path("batch_id", "of a batch")
_ORDER = _query("order", "by time; the newest come first", {"enum": ["asc", "desc"]})
_AFTER = _query("after", "the id of the item before the first one shown", _TEXT)
_OF_FILES = (*_EDGE, 404, 501)


def _limit(most: int) -> Json:
    return _query("limit", "items shown", {"type": "integer", "minimum": 1, "maximum": most})


_STREAMS = (
    "With `stream: true` the answer is a list of server-sent events, each `data: ` and JSON, "
    "and at the end `data: [DONE]`. If the answer fails after its begin, the last event is an "
    "error, and `[DONE]` is missing."
)

OPERATIONS = (
    Operation(
        "post /v1/chat/completions",
        "Answers",
        "Answer messages",
        ChatAnswer,
        ChatBody,
        ChatStreamChunk,
        _OF_ANSWERS,
        _ANSWERS,
        description=_STREAMS,
    ),
    Operation(
        "post /v1/completions",
        "Answers",
        "Continue a text or token ids, or several",
        CompletionAnswer,
        CompletionBody,
        CompletionStreamChunk,
        _OF_ANSWERS,
        _ANSWERS,
        description=_STREAMS,
    ),
    Operation(
        "post /v1/embeddings",
        "Answers",
        "Turn texts or token ids into embeddings",
        EmbeddingList,
        EmbeddingBody,
        parameters=_OF_ANSWERS,
        errors=_ANSWERS,
        description="Of models of embeddings, which answer nothing else; of others it is a 404.",
    ),
    Operation(
        "post /invocations",
        "Answers",
        "Answer a chat, continue a text or embed one, by the body, as SageMaker asks",
        CompletionAnswer,
        CompletionBody,
        CompletionStreamChunk,
        _OF_ANSWERS,
        _ANSWERS,
        description=(
            "With `messages` it is `/v1/chat/completions`, with `input` `/v1/embeddings`, "
            "else `/v1/completions`."
        ),
    ),
    Operation(
        "post /v1/responses",
        "Responses",
        "Make a response",
        ResponseAnswer,
        ResponseBody,
        ResponseEvent,
        _OF_ANSWERS,
        _ANSWERS,
        description=(
            "Fields that are not of this API are taken as a chat completion's. "
            "With `stream: true` the answer is a list of server-sent events with OpenAI's names."
        ),
    ),
    Operation(
        "post /v1/responses/input_tokens",
        "Responses",
        "Count the tokens of a response's prompt",
        InputTokens,
        ResponseBody,
        parameters=_VERSION,
        errors=_READS,
    ),
    Operation(
        "get /v1/responses/{response_id}",
        "Responses",
        "Read a response, or follow its events",
        ResponseAnswer,
        events=ResponseEvent,
        parameters=(
            _RESPONSE_ID,
            _query("stream", "events of a response made with `background` and `stream`", _FLAG),
            _query(
                "starting_after",
                "only events after this number; needs `stream`",
                {"type": "integer", "minimum": 0, "maximum": 2**31},
            ),
        ),
        errors=(*_EDGE, 404),
    ),
    Operation(
        "delete /v1/responses/{response_id}",
        "Responses",
        "Delete a response",
        DeletedResponse,
        parameters=(_RESPONSE_ID,),
        errors=(*_EDGE, 404),
    ),
    Operation(
        "post /v1/responses/{response_id}/cancel",
        "Responses",
        "Cancel a response that is made in the background",
        ResponseAnswer,
        parameters=(_RESPONSE_ID,),
        errors=(*_EDGE, 404, 415),
    ),
    Operation(
        "get /v1/responses/{response_id}/input_items",
        "Responses",
        "List the input of a response",
        ItemList,
        parameters=(_RESPONSE_ID, _limit(100), _ORDER, _AFTER),
        errors=(*_EDGE, 404),
    ),
    Operation(
        "post /v1/files",
        "Batches",
        "Upload the requests of a batch",
        ShownFile,
        UPLOAD_FORM,
        errors=(*_EDGE, 413, 415, 501),
    ),
    Operation(
        "get /v1/files",
        "Batches",
        "List files",
        FileList,
        parameters=(
            _query("purpose", "only files of this purpose", _TEXT),
            _limit(MAX_PAGE["files"]),
            _ORDER,
            _AFTER,
        ),
        errors=_OF_FILES,
    ),
    Operation(
        "get /v1/files/{file_id}",
        "Batches",
        "A file, without its content",
        ShownFile,
        parameters=(_FILE_ID,),
        errors=_OF_FILES,
    ),
    Operation(
        "delete /v1/files/{file_id}",
        "Batches",
        "Delete a file",
        DeletedFile,
        parameters=(_FILE_ID,),
        errors=_OF_FILES,
    ),
    Operation(
        "get /v1/files/{file_id}/content",
        "Batches",
        "The content of a file",
        ANY,
        parameters=(_FILE_ID,),
        errors=_OF_FILES,
    ),
    Operation(
        "post /v1/batches",
        "Batches",
        "Run the requests of a file when the pools are idle",
        ShownBatch,
        BatchBody,
        errors=(*_OF_FILES, 413, 415, 429),
    ),
    Operation(
        "get /v1/batches",
        "Batches",
        "List batches",
        BatchList,
        parameters=(_limit(MAX_PAGE["batches"]), _ORDER, _AFTER),
        errors=_OF_FILES,
    ),
    Operation(
        "get /v1/batches/{batch_id}",
        "Batches",
        "A batch",
        ShownBatch,
        parameters=(_BATCH_ID,),
        errors=_OF_FILES,
    ),
    Operation(
        "post /v1/batches/{batch_id}/cancel",
        "Batches",
        "Cancel a batch",
        ShownBatch,
        parameters=(_BATCH_ID,),
        errors=(*_OF_FILES, 409, 415),
    ),
    Operation(
        "post /tokenize",
        "Tokens",
        "Tokens of a text or of messages",
        Tokenized,
        TOKENIZE_BODY,
        parameters=_VERSION,
        errors=_READS,
        description="Counts what the same body would take as a request.",
    ),
    Operation(
        "post /detokenize",
        "Tokens",
        "The text of tokens",
        Detokenized,
        DetokenizeBody,
        parameters=_VERSION,
        errors=_READS,
    ),
    Operation(
        f"delete /v1/sessions/{{{SESSION_PARAM}}}",
        "Sessions",
        "End a session: stores of KV blocks need not keep it",
        None,
        parameters=(_path(SESSION_PARAM, "as in the header of its requests"),),
        description="Of any session, known or not. Without a store it does nothing.",
    ),
    Operation(
        "post /v1/pins",
        "Sessions",
        "Pin the blocks of a prompt in stores of KV blocks",
        ShownPin,
        PIN_BODY,
        parameters=_VERSION,
        errors=(*_READS, 501),
        description="Stores keep pinned blocks within the share of `store.pinned_share` of a key.",
    ),
    Operation(
        "delete /v1/pins",
        "Sessions",
        "Unpin the blocks of a prompt",
        None,
        PIN_BODY,
        parameters=_VERSION,
        errors=(*_READS, 501),
        description="The body is the one that pinned them.",
    ),
    Operation("get /v1/models", "Models", "All models", ModelList),
    Operation(
        "get /v1/models/{model_id}",
        "Models",
        "A model",
        ShownModel,
        parameters=(_path("model_id", "a name, which may hold slashes"),),
        errors=(*_EDGE, 404),
    ),
    Operation("get /health", "State", "Whether the process is alive", Health),
    Operation(
        "get /ready",
        "State",
        "Whether requests can be served",
        Readiness,
        errors=tuple(set(_EDGE) - {503}),
        other_answers=((503, Readiness),),
    ),
    Operation(
        "get /ping",
        "State",
        "The same, as SageMaker asks",
        Readiness,
        errors=tuple(set(_EDGE) - {503}),
        other_answers=((503, Readiness),),
    ),
    Operation(
        "post /ping",
        "State",
        "The same, as SageMaker asks",
        Readiness,
        errors=(*(set(_EDGE) - {503}), 415),
        other_answers=((503, Readiness),),
    ),
    Operation("get /load", "State", "Requests of this gateway process", ServerLoad),
    Operation("get /metrics", "State", "Metrics in Prometheus' format", TEXT),
    Operation(
        "get /metrics/targets",
        "State",
        "Targets for Prometheus' discovery",
        TargetGroup,
        is_list=True,
    ),
    Operation("get /version", "State", "The version of Baton", ServerVersion),
    Operation("get /openapi.json", "Description", "This document", JSON),
    Operation("get /docs", "Description", "This document as a page", HTML),
)
