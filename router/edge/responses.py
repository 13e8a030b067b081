"""Complete responses: JSON over ASGI, and errors in OpenAI's form. Refuses wrong body types.

Bodies of the API are JSON, bodies of uploads are forms. Browsers send forms and plain text to any
server without a preflight request. So the check of the type also prevents pages of other sites from
using a gateway without keys.

Sources: RFC 9110, 8.3 and 15.5.16; RFC 6839, 3.1, for types such as `application/vnd.api+json`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

import msgspec
from starlette.types import Scope, Send

from engine.errors import InvalidRequest
from router.edge.limits import Overdue
from router.inbox.api_errors import ApiError, ErrorReply, error_body
from router.inbox.fair_queue import Turn
from router.inbox.json_parts import PART_BYTES

JSON = b"application/json"
EVENT_STREAM = b"text/event-stream; charset=utf-8"

UPLOAD_PATHS = frozenset({"/v1/files"})
_MAX_SHOWN = 100  # characters of a client's text in an error

CRLF = "\r\n"
_encode = msgspec.json.Encoder().encode


_KIND_OF_STATUS = {503: "server_error", 429: "rate_limit_error"}


async def send_invalid(
    send: Send, error: InvalidRequest, more_headers: Mapping[str, str] | None = None
) -> None:
    """Sends the error of a refused request. Headers of the error replace equal `more_headers`."""
    body, headers = refusal_of(error)
    await send_json(send, error.status, body, {**(more_headers or {}), **headers})


def refusal_of(error: InvalidRequest) -> tuple[ErrorReply, dict[str, str]]:
    """Returns body and headers of an error. Status 503 is a server error, others client errors."""
    code: str | None = getattr(error, "code", None)
    kind = _KIND_OF_STATUS.get(error.status, "invalid_request_error")
    body = error_body(error.message, kind=kind, param=error.param, code=code)
    headers: dict[str, str] = {}
    # If a body was read in part, the connection cannot be used for another request.
    if error.status in (408, 413):
        headers["connection"] = "close"
    if error.status == 503:
        headers["retry-after"] = "1"
    if isinstance(error, ApiError):
        headers |= error.headers
    return body, headers


async def send_json(
    send: Send, status: int, body: object, headers: Mapping[str, str] | None = None
) -> None:
    """Sends a complete JSON response."""
    await send_data(send, status, _encode(body), headers)


async def send_data(
    send: Send, status: int, data: bytes, headers: Mapping[str, str] | None
) -> None:
    """Sends a complete response with a JSON body that was encoded before."""
    await send_head(send, status, JSON, {"content-length": str(len(data)), **(headers or {})})
    await send({"type": "http.response.body", "body": data, "more_body": False})


async def send_parts(
    send: Send, parts: Iterator[bytes], headers: Mapping[str, str], turn: Turn
) -> None:
    """Sends a complete JSON response in parts.

    Before each part, it waits until the client has read the part before, and until it is the
    tenant's turn on the loop. A short response has its length in the head. `parts` come from
    `json_parts`.
    """
    first = next(parts)
    if len(first) < PART_BYTES:
        await send_data(send, 200, first, headers)
        return
    await send_head(send, 200, JSON, headers)
    for part in chain((first,), parts):
        await send({"type": "http.response.body", "body": part, "more_body": True})
        await turn()
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def send_head(
    send: Send, status: int, content_type: bytes, headers: Mapping[str, str]
) -> None:
    """Sends the head of a response whose body follows."""
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    encoded.append((b"content-type", content_type))
    await send({"type": "http.response.start", "status": status, "headers": encoded})


def check_content(scope: Scope) -> None:
    """Raises ApiError, status 415, if a request's body has another content type."""
    kind, has_body = b"", False
    for name, value in scope["headers"]:
        if name == b"content-type":
            if value == b"application/json":
                kind = value
                continue
            kind = value.partition(b";")[0].strip().lower()
        elif name == b"content-length":
            has_body |= value != b"0"
        elif name == b"transfer-encoding":
            has_body = True
        elif name == b"content-encoding" and value.strip().lower() != b"identity":
            raise _refused(f"content-encoding {_shown(value)} is not supported", "content-encoding")
    if not has_body:
        return
    if scope["path"] in UPLOAD_PATHS:
        if kind != b"multipart/form-data":
            raise _wrong_type(kind, "multipart/form-data")
    elif kind != b"application/json" and not _is_json(kind):
        raise _wrong_type(kind, "application/json")


def _is_json(kind: bytes) -> bool:
    return kind.startswith(b"application/") and kind.endswith(b"+json")


def _wrong_type(kind: bytes, wanted: str) -> ApiError:
    said = f"the content-type is {_shown(kind)}" if kind else "there is no content-type"
    message = f"{said}; send the header `content-type: {wanted}`"
    return _refused(message, "content-type")


def _refused(message: str, header: str) -> ApiError:
    return ApiError(message, param=header, code="unsupported_media_type", status=415)


def _shown(value: bytes) -> str:
    return repr(value.decode("latin-1")[:_MAX_SHOWN])


@dataclass(frozen=True, slots=True)
class EdgeRefusal:
    """The error response to input that cannot be accepted."""

    status: int
    phrase: str
    code: str
    message: str

    def response(self) -> bytes:
        """Returns the complete response, after which the connection is closed."""
        is_ours = self.status == 503
        kind = "server_error" if is_ours else "invalid_request_error"
        body = _encode(error_body(self.message, kind=kind, code=self.code))
        head = (
            f"HTTP/1.1 {self.status} {self.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n{'retry-after: 1' + CRLF if is_ours else ''}"
            "connection: close\r\n\r\n"
        )
        return head.encode() + body


NOT_HTTP = EdgeRefusal(400, "Bad Request", "bad_request", "this is not an HTTP/1.1 request")
LONG_HEAD = EdgeRefusal(
    431, "Request Header Fields Too Large", "head_too_large", "the head of the request is too long"
)
SLOW_HEAD = EdgeRefusal(408, "Request Timeout", "request_timeout", Overdue.HEAD)
SLOW_BODY = EdgeRefusal(408, "Request Timeout", "request_timeout", Overdue.BODY)
TOO_MANY = EdgeRefusal(
    400, "Bad Request", "too_many_requests", "too many requests wait on this connection"
)
SMALL_PARTS = EdgeRefusal(
    400, "Bad Request", "bad_request", "the body comes in too many small parts"
)
TWICE = EdgeRefusal(
    400, "Bad Request", "bad_request", "the header host or authorization is given twice"
)
NO_ROOM = EdgeRefusal(503, "Service Unavailable", "overloaded", "no room for more request bodies")
