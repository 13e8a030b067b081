"""Decodes JSON values of clients after a check of their size, and seconds in headers."""

from collections.abc import Mapping
from typing import Any

import msgspec

from router.inbox.api_errors import ApiError, invalid_value

MAX_VALUE_BYTES = 2**20
MAX_SHOWN_LEN = 40  # maximum length of a client's text in an error
MAX_CONTAINERS = 65_536  # maximum number of `[` and `{`, also inside strings


def decode_value(data: bytes, param: str, kind: Any = Any) -> Any:
    """Decodes a field's value. Raises ApiError if it is large, ValueError if it is not JSON."""
    if len(data) > MAX_VALUE_BYTES:
        raise invalid_value(f"{param} is longer than {MAX_VALUE_BYTES} bytes", param)
    check_containers(data, param)
    return msgspec.json.decode(data, type=kind)


def check_containers(data: bytes, param: str) -> None:
    """Raises ApiError if a text has more arrays and objects than may be decoded."""
    if data.count(b"[") + data.count(b"{") > MAX_CONTAINERS:
        message = f"{param} holds more than {MAX_CONTAINERS} arrays and objects"
        raise invalid_value(message, param)


def not_json(error: Exception) -> ApiError:
    """Returns the error for a body that cannot be parsed."""
    return ApiError(f"the body is not valid JSON: {error}", code="invalid_json")


def no_object() -> ApiError:
    """Returns the error for a body that is JSON but not an object."""
    return ApiError("the body must be a JSON object", code="invalid_json")


def seconds_in(
    headers: Mapping[str, str], name: str, least_s: float, most_s: float
) -> float | None:
    """Returns the number of seconds in a header; None without this header. Raises ApiError."""
    text = headers.get(name)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not least_s <= seconds <= most_s:
        message = (
            f"{name} is {text[:MAX_SHOWN_LEN]!r}; expected seconds from {least_s:g}, "
            f"at most {most_s:g}"
        )
        raise invalid_value(message, name)
    return seconds
