"""The operations of the operator's API, and its OpenAPI description.

Pages register themselves by decorators.
"""

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar, get_type_hints

import msgspec
from starlette.requests import Request

from deploy.admin.schema import DropAnswer, ErrorAnswer, PoolsAnswer, PreviewAnswer
from deploy.controller.controller import PoolController
from engine.config import WorkerConfig

Page = TypeVar("Page", bound=Callable[..., Any])
Flag = Annotated[int, msgspec.Meta(ge=0, le=1)]

PREVIEW = {
    "name": "preview",
    "in": "query",
    "description": "1: change nothing, and answer 200 with what would change",
    "schema": {"type": "integer", "minimum": 0, "maximum": 1},
}
_REF = "#/components/schemas/{name}"
# Answer to an order: answer to its preview.
_PREVIEWS = {PoolsAnswer: PreviewAnswer, DropAnswer: DropAnswer}
_ERRORS = {
    "400": "not a valid request",
    "401": "no key, or a wrong one",
    "404": "no such worker, version, store or log",
    "409": "an order that cannot be carried out, with the reason",
}


class AdminCall(NamedTuple):
    """A call of the API, and the time at which the call arrived."""

    controller: PoolController
    request: Request
    now_s: float

    @property
    def name(self) -> str:
        """The name of a worker or a version in the path of the URL."""
        return str(next(iter(self.request.path_params.values())))

    def number(self, name: str, kind: Any, default: int) -> int:
        """Returns the number that a parameter of the URL's query has. Raises MsgspecError."""
        text = self.request.query_params.get(name, str(default))
        found: int = msgspec.convert(text, kind, strict=False)
        return found

    def asks_preview(self) -> bool:
        """True if the call must not change anything. Such a call is not in the audit log."""
        if is_preview := bool(self.number("preview", Flag, 0)):
            self.request.state.is_preview = True
        return is_preview


class AdminOperation(NamedTuple):
    """One HTTP method of a path: the page that answers the method, and its description.

    A page is called with the call, and with the decoded body if there is one. A page returns an
    answer or orders.
    """

    method: str
    path: str
    summary: str
    page: Callable[..., Any]
    answer: Any
    body: Any = None
    parameters: Sequence[dict[str, Any]] = ()  # query parameters; names in the path are separate


OPERATIONS: list[AdminOperation] = []


def operation(
    method: str, path: str, summary: str, *parameters: dict[str, Any], answer: Any = None
) -> Callable[[Page], Page]:
    """Declares a page. Its annotations name the types of its body and, by default, its answer."""

    def declare(page: Page) -> Page:
        types = get_type_hints(page)
        shown = answer or types["return"]
        found = AdminOperation(method, path, summary, page, shown, types.get("body"), parameters)
        OPERATIONS.append(found)
        return page

    return declare


def orders(path: str, summary: str) -> Callable[[Page], Page]:
    """Declares a page that returns an order, or a list of orders."""
    return operation("POST", path, summary, answer=PoolsAnswer)


def openapi(version: str) -> dict[str, Any]:
    """Returns the description of the API in OpenAPI 3.1."""
    types: list[Any] = [each for op in OPERATIONS for each in (op.body, op.answer) if each]
    named = [*types, PreviewAnswer, ErrorAnswer]
    _, components = msgspec.json.schema_components(named, ref_template=_REF)
    components |= _with_settings(components.pop("UpdateBody"))
    paths: dict[str, dict[str, Any]] = {}
    for each in OPERATIONS:
        paths.setdefault(each.path, {})[each.method.lower()] = _described(each)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton: operator's API", "version": version},
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _with_settings(update: dict[str, Any]) -> dict[str, Any]:
    """Adds the settings of `worker` to the description, without defaults: omitted settings stay
    unchanged.
    """
    _, parts = msgspec.json.schema_components([WorkerConfig], ref_template=_REF)
    properties = parts.pop("WorkerConfig")["properties"]
    for setting in properties.values():
        setting.pop("default", None)
    given = {"type": "object", "properties": properties, "additionalProperties": False}
    update["properties"]["worker"] = {"anyOf": [given, {"type": "null"}], "default": None}
    return {"UpdateBody": update, **parts}


def _described(op: AdminOperation) -> dict[str, Any]:
    preview = _PREVIEWS.get(op.answer) if op.method == "POST" else None
    status, what = ("200", "the present state") if preview is None else ("202", "ordered")
    found: dict[str, Any] = {
        "summary": op.summary,
        "responses": {
            status: _content(op.answer, what),
            **{code: _content(ErrorAnswer, text) for code, text in _ERRORS.items()},
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", op.path)
    ]
    parameters += op.parameters
    if preview is not None:
        found["responses"]["200"] = _content(preview, "preview")
        parameters.append(PREVIEW)
    if parameters:
        found["parameters"] = parameters
    if op.body is not None:
        found["requestBody"] = {"required": True, "content": _schema(op.body)}
    return found


def _content(answer: type, description: str) -> dict[str, Any]:
    return {"description": description, "content": _schema(answer)}


def _schema(kind: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(name=kind.__name__)}}}
