"""Errors of the API, with OpenAI's `code`, and their JSON form."""

import msgspec

from engine.errors import InvalidRequest


class ApiError(InvalidRequest):
    """An InvalidRequest that has OpenAI's machine-readable `code`."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message, param=param, status=status)
        self.code = code
        self.headers: dict[str, str] = {}  # headers of the response


def invalid_value(message: str, param: str | None) -> ApiError:
    """Returns the error for a field with an invalid value."""
    return ApiError(message, param=param, code="invalid_value")


def context_exceeded(message: str, param: str) -> ApiError:
    """Returns the error for a prompt, or a prompt and answer, longer than the model's context."""
    return ApiError(message, param=param, code="context_length_exceeded")


def no_room(context_len: int, prompt_len: int, param: str) -> ApiError:
    """Returns the error for a prompt that leaves no room for an answer."""
    message = (
        f"This model's maximum context length is {context_len} tokens. "
        f"However, the prompt has {prompt_len}, which leaves no room for an answer"
    )
    return context_exceeded(message, param)


class ErrorDetails(msgspec.Struct):
    """The description of an error: `param` names the field or header, `code` is for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(msgspec.Struct):
    """The form of every error, also of the last event of a stream that fails."""

    error: ErrorDetails


def error_body(
    message: str, *, kind: str, param: str | None = None, code: str | None = None
) -> ErrorReply:
    """Returns the body of an error response, in OpenAI's form."""
    return ErrorReply(ErrorDetails(message, kind, param, code))
