"""JSON of any shape from clients, bounded before it becomes objects."""

from typing import Any

import msgspec

from router.inbox.api_errors import ApiError, invalid_value

MAX_VALUE_BYTES = 2**20
MAX_CONTAINERS = 65_536  # arrays and objects; those that a text spells count too


def decode_value(data: bytes, param: str, kind: Any = Any) -> Any:
    """What a value of a field says. Raises ApiError for a large one, ValueError for no JSON."""
    if len(data) > MAX_VALUE_BYTES:
        raise invalid_value(f"{param} is longer than {MAX_VALUE_BYTES} bytes", param)
    check_containers(data, param)
    return msgspec.json.decode(data, type=kind)


def check_containers(data: bytes, param: str) -> None:
    """Raises ApiError for more arrays and objects than can be decoded at once."""
    if data.count(b"[") + data.count(b"{") > MAX_CONTAINERS:
        message = f"{param} holds more than {MAX_CONTAINERS} arrays and objects"
        raise invalid_value(message, param)


def not_json(error: Exception) -> ApiError:
    """What was sent cannot be parsed."""
    return ApiError(f"the body is not valid JSON: {error}", code="invalid_json")


def no_object() -> ApiError:
    """What was sent is JSON, but has no fields."""
    return ApiError("the body must be a JSON object", code="invalid_json")
