"""The lines of a batch's input and output files. Each line is one JSON object. Pure."""

from collections.abc import Collection
from typing import Any

import msgspec

from router.gateway.batches.records import LineFault

MAX_CUSTOM_ID_LEN = 512  # maximum characters of a `custom_id`
RETRIED = frozenset({429, 503})  # HTTP statuses after which a request is tried again

_encode = msgspec.json.Encoder().encode


class InputLine(msgspec.Struct, frozen=True):
    """One request of a batch."""

    custom_id: str
    body: bytes


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    """The fields of a body that a batch checks itself. The endpoint checks all other fields."""

    stream: bool | None = None


def split_lines(data: bytes, *, is_last: bool) -> tuple[list[bytes], int]:
    """Returns the complete lines at the start of `data`, and their length in bytes.

    If `is_last` is set, the text after the last line break also counts as a line.
    """
    end = len(data) if is_last else data.rfind(b"\n") + 1
    lines = data[:end].split(b"\n")
    if lines and not lines[-1]:
        lines.pop()
    return lines, end


def parse_line(data: bytes, endpoint: str, max_bytes: int) -> InputLine | LineFault:
    """Returns the request of a non-blank line, or the fault of the line."""
    if len(data) > max_bytes:
        return LineFault("line_too_long", f"a line has more than {max_bytes} bytes")
    try:
        line = msgspec.json.decode(data, type=_Line)
        body = msgspec.json.decode(line.body, type=_Body)
    except (msgspec.ValidationError, UnicodeDecodeError) as error:
        code, message = "invalid_request", str(error)
        if "missing required field" in message:
            code = "missing_required_parameter"
        return LineFault(code, message[:500])
    except (msgspec.DecodeError, RecursionError) as error:
        return LineFault("invalid_json_line", f"this line is not a JSON object: {error}"[:500])
    if not 0 < len(line.custom_id) <= MAX_CUSTOM_ID_LEN:
        message = f"custom_id must have 1 to {MAX_CUSTOM_ID_LEN} characters"
        return LineFault("invalid_custom_id", message, "custom_id")
    if line.method != "POST":
        return LineFault("invalid_method", f"method is {line.method[:40]!r}, not 'POST'", "method")
    if line.url != endpoint:
        message = f"url is {line.url[:80]!r}, and the batch's endpoint is {endpoint!r}"
        return LineFault("mismatched_endpoint", message, "url")
    if body.stream:
        message = "requests of a batch cannot be streamed"
        return LineFault("unsupported_parameter", message, "body.stream")
    return InputLine(line.custom_id, bytes(line.body))


def duplicate(custom_id: str) -> LineFault:
    """Returns the fault of a line whose `custom_id` an earlier line has used."""
    message = f"custom_id {custom_id[:80]!r} is there twice"
    return LineFault("duplicate_custom_id", message, "custom_id")


def answered_line(line_id: str, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """Returns the output line of a request that got a response with any HTTP status."""
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    return _line(line_id, custom_id, response, None)


def unanswered_line(line_id: str, custom_id: str, code: str, message: str) -> bytes:
    """Returns the error line of a request without a response: the batch expired or was
    cancelled.
    """
    return _line(line_id, custom_id, None, {"code": code, "message": message})


def _line(
    line_id: str, custom_id: str, response: dict[str, Any] | None, error: dict[str, Any] | None
) -> bytes:
    fields = {"id": line_id, "custom_id": custom_id, "response": response, "error": error}
    return _encode(fields) + b"\n"


def retry_after_s(tries: int, asked: str | None) -> float:
    """Returns the seconds after which a refused request is tried again.

    The request has been tried `tries` times.

    `asked` is the header `retry-after` of the answer.
    """
    own_s = min(2.0 ** (tries - 1), 60.0)
    return max(own_s, float(asked)) if asked is not None and asked.isdigit() else own_s


def is_retried(status: int, tries: int, max_lost: int, lost: Collection[str], code: str) -> bool:
    """True if a request that got this answer is tried again.

    The codes in `lost` mean that workers ended or were lost while they computed the request. The
    request may have caused that, so it is tried at most `max_lost` times. After other refusals, the
    request is tried until the completion window ends.
    """
    return status in RETRIED and (code not in lost or tries < max_lost)
