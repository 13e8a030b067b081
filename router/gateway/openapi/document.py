"""The OpenAPI document. Pure: the document depends only on the code, and on the use of API keys."""

from typing import Any

from router.access.guard import DEBUG_PATHS, OPEN_PATHS
from router.gateway.answering import ID_HEADER
from router.gateway.answers.writing import IGNORED_HEADER
from router.gateway.openapi.bodies import EXAMPLES, REF, body_components, components_of
from router.gateway.openapi.errors import reasons_of
from router.gateway.openapi.operations import JSON, OPERATIONS, UPLOAD_FORM, Operation
from router.inbox.api_errors import ErrorReply

Json = dict[str, Any]

EVENTS, FORM = "text/event-stream", "multipart/form-data"
DESCRIPTION = (
    "OpenAI's API, with vLLM's additional fields and a few of Baton's own. In all fields of "
    "bodies, null means absent. `HEAD` is answered where `GET` is, and `OPTIONS` with the methods "
    "of a path. With keys, the header `authorization: Bearer KEY` names the client."
)

_RETRY: Json = {
    "retry-after": {"description": "seconds to wait", "schema": {"type": "integer", "minimum": 1}}
}
_LIMITS: Json = {
    f"x-ratelimit-{what}-{of}": {"description": description, "schema": {"type": "string"}}
    for what, description in (
        ("limit", "of the key, if it has one"),
        ("remaining", "what is left of it"),
        ("reset", "time until it is whole again"),
    )
    for of in ("requests", "tokens")
}
_OF_CALLS: Json = {
    ID_HEADER: {"description": "the id of the call", "schema": {"type": "string"}},
    IGNORED_HEADER: {
        "description": "names of fields that are not known",
        "schema": {"type": "string"},
    },
}


def document(version: str, *, needs_key: bool) -> Json:
    """Returns the document, in the form of OpenAPI 3.1."""
    paths: dict[str, Json] = {}
    for each in OPERATIONS:
        paths.setdefault(each.path, {})[each.method] = _operation(each, needs_key=needs_key)
    found: Json = {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version, "description": DESCRIPTION},
        "servers": [{"url": "/"}],
        "tags": [{"name": name} for name in dict.fromkeys(each.tag for each in OPERATIONS)],
        "paths": paths,
        "components": {"schemas": dict(sorted(_schemas().items()))},
    }
    if needs_key:
        found["security"] = [{"key": []}]
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return found


def _schemas() -> dict[str, Json]:
    types: list[type] = [ErrorReply]
    for each in OPERATIONS:
        others = (kind for _, kind in each.other_answers)
        for kind in (each.answer, each.body, each.events, *others):
            if isinstance(kind, type):
                types.append(kind)
    return components_of(dict.fromkeys(types)) | body_components()


def _operation(each: Operation, *, needs_key: bool) -> Json:
    errors = set(each.errors)
    is_open = each.path in OPEN_PATHS
    if needs_key and not is_open:
        errors.add(401)
        if each.path in DEBUG_PATHS:
            errors.add(403)
    found: Json = {
        "tags": [each.tag],
        "summary": each.summary,
        "operationId": f"{each.method}{each.path.translate(_WORDS)}",
        "responses": {
            "204" if each.answer is None else "200": _answer(each),
            **{str(status): _reply(kind) for status, kind in each.other_answers},
            **{str(status): _error(status) for status in sorted(errors)},
        },
    }
    if each.description:
        found["description"] = each.description
    if each.parameters:
        found["parameters"] = list(each.parameters)
    if each.body is not None:
        media_type = FORM if each.body == UPLOAD_FORM else JSON
        content = _content(each.body, media_type)
        if examples := EXAMPLES.get(each.call):
            shown = {name: {"value": value} for name, value in examples.items()}
            content[media_type]["examples"] = shown
        found["requestBody"] = {"required": True, "content": content}
    if needs_key and is_open:
        found["security"] = []
    return found


_WORDS = str.maketrans({"/": "_", "{": None, "}": None, ".": "_"})


def _answer(each: Operation) -> Json:
    found: Json
    if each.answer is None:
        found = {"description": each.summary}
        return found | ({"headers": _LIMITS} if each.body is not None else {})
    if isinstance(each.answer, str):
        schema: Json = {"type": "object"} if each.answer == JSON else {"type": "string"}
        return {"description": each.summary, "content": {each.answer: {"schema": schema}}}
    found = _reply(each.answer, each.summary)
    if each.is_list:
        content = found["content"][JSON]
        content["schema"] = {"type": "array", "items": content["schema"]}
    if each.events is not None:
        found["content"][EVENTS] = {
            "schema": _event(each.events),
            "x-event-schema": {"$ref": REF.format(name=each.events.__name__)},
        }
    if each.method == "post" and each.body is not None:
        found["headers"] = _LIMITS | (_OF_CALLS if each.events is not None else {})
    return found


def _event(kind: type) -> Json:
    """Returns the schema of a server-sent event, in the form of OpenAPI 3.2.

    The event's data is a text with JSON.
    """
    data = [_json_text(kind.__name__), _json_text(ErrorReply.__name__), {"const": "[DONE]"}]
    return {
        "description": f"Each event holds a `{kind.__name__}`.",
        "type": "object",
        "required": ["data"],
        "properties": {"event": {"type": "string"}, "data": {"anyOf": data}},
    }


def _json_text(name: str) -> Json:
    schema = {"$ref": REF.format(name=name)}
    return {"type": "string", "contentMediaType": JSON, "contentSchema": schema}


def _reply(kind: type, description: str | None = None) -> Json:
    return {"description": description or (kind.__doc__ or "").strip(), "content": _content(kind)}


def _error(status: int) -> Json:
    found: Json = {"description": reasons_of(status), "content": _content(ErrorReply)}
    if status in (429, 503):
        found["headers"] = _RETRY
    return found


def _content(kind: type | str, media_type: str = JSON) -> Json:
    name = kind if isinstance(kind, str) else kind.__name__
    return {media_type: {"schema": {"$ref": REF.format(name=name)}}}
