"""Error responses of a connection to unacceptable input."""

from dataclasses import dataclass

import msgspec

from router.edge.limits import Overdue
from router.inbox.api_errors import error_body

CRLF = "\r\n"


@dataclass(frozen=True, slots=True)
class EdgeRefusal:
    """The error response to unacceptable input."""

    status: int
    phrase: str
    code: str
    message: str

    def response(self) -> bytes:
        """Returns a complete response; the connection is closed after it."""
        is_ours = self.status == 503
        kind = "server_error" if is_ours else "invalid_request_error"
        body = msgspec.json.encode(error_body(self.message, kind=kind, code=self.code))
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
