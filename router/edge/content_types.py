"""What requests may bring along: bodies of the API are JSON, those of uploads are forms.

Browsers send forms and plain text to any server without asking it first. So this check also keeps
pages of other sites from using a gateway that needs no key.

Sources: RFC 9110, 8.3 and 15.5.16; RFC 6839, 3.1, for types such as `application/vnd.api+json`.
"""

from starlette.types import Scope

from router.inbox.api_errors import ApiError

UPLOAD_PATHS = frozenset({"/v1/files"})
_MAX_SHOWN = 100  # characters of a client's text in an error


def check_content(scope: Scope) -> None:
    """Raises ApiError, status 415, if a request with a body says that it is of another type."""
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
