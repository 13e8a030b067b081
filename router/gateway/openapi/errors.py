"""The errors of the API by status and code.

A test compares the list with the table in the API guide.
"""

from typing import NamedTuple


class KnownError(NamedTuple):
    """A kind of error; several codes may have the same reason."""

    status: int
    codes: tuple[str, ...]
    reason: str


ERRORS = (
    KnownError(400, ("invalid_json",), "the body is not a JSON object"),
    KnownError(400, ("invalid_value",), "a field is out of range, or a grammar cannot be followed"),
    KnownError(400, ("unsupported_parameter",), "Baton cannot honour the field"),
    KnownError(400, ("unsupported_content",), "a message part is not text"),
    KnownError(400, ("context_length_exceeded",), "prompt and answer do not fit"),
    KnownError(
        400,
        ("bad_request", "too_many_requests"),
        "not HTTP/1.1; an ambiguous header; a body in tiny parts; too many pipelined requests",
    ),
    KnownError(400, ("item_not_found",), "an item that the input refers to is not kept"),
    KnownError(
        400,
        ("missing_required_parameter", "unknown_parameter", "invalid_form"),
        "a field of an upload is missing or unknown, or its form cannot be read",
    ),
    KnownError(400, ("file_quota_exceeded",), "there is no room for more files"),
    KnownError(401, ("invalid_api_key",), "no key, or an unknown or expired one"),
    KnownError(403, ("permission_denied",), "the key may not debug"),
    KnownError(
        403,
        ("host_not_allowed",),
        "the gateway needs no key, and `host` is not an allowed name",
    ),
    KnownError(
        404,
        (
            "not_found",
            "model_not_found",
            "version_not_found",
            "file_not_found",
            "batch_not_found",
        ),
        "unknown path, model, version, file or batch",
    ),
    KnownError(
        404,
        ("model_not_supported",),
        "the model gives embeddings and no text, or text and no embeddings",
    ),
    KnownError(405, ("method_not_allowed",), "wrong method"),
    KnownError(408, ("request_timeout",), "the head or the body took too long"),
    KnownError(409, ("invalid_value",), "a batch has ended and cannot be cancelled"),
    KnownError(413, ("request_too_large",), "the body is too long"),
    KnownError(
        415,
        ("unsupported_media_type",),
        "the body's `content-type` is missing or is not JSON, or the body is compressed",
    ),
    KnownError(426, ("upgrade_required",), "a probe for a WebSocket"),
    KnownError(
        429, ("rate_limit_exceeded",), "a limit of the key, or a full queue; see `retry-after`"
    ),
    KnownError(431, ("head_too_large",), "the head of the request is too long"),
    KnownError(500, ("internal_error",), "a bug in Baton; the log has the exception"),
    KnownError(
        501, ("not_supported",), "several gateway processes keep files only in `gateway.store`"
    ),
    KnownError(501, ("no_store",), "no store of KV blocks is connected: see `store.memory_mib`"),
    KnownError(
        503, ("not_ready",), "no worker of the version was known within `router.queue_timeout_s`"
    ),
    KnownError(
        503,
        ("overloaded", "grammar_busy"),
        "too many bodies or grammars wait to be parsed or compiled; try again",
    ),
    KnownError(503, ("store_failed",), "the file `gateway.store` cannot be used"),
    KnownError(503, ("server_shutdown",), "the server is stopping"),
    KnownError(503, ("request_failed",), "no worker could complete the request"),
    KnownError(504, ("request_timeout",), "the answer took longer than `x-request-timeout`"),
)


def reasons_of(status: int) -> str:
    """Returns all reasons of a status with their codes, in Markdown."""
    found = (each for each in ERRORS if each.status == status)
    return "; ".join(f"{', '.join(f'`{c}`' for c in e.codes)}: {e.reason}" for e in found)
