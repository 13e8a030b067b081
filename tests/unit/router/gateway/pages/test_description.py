"""/openapi.json and /docs: they describe every route, and real answers match them."""

import re
from copy import deepcopy
from html.parser import HTMLParser
from importlib.resources import files

import jsonschema
import msgspec
import pytest
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from engine.config import DashboardMode
from engine.messages import Logprobs
from router.gateway.openapi.bodies import EXAMPLES
from router.gateway.openapi.document import document
from router.gateway.openapi.errors import ERRORS
from router.machine.requests import Update
from tests.kits.router.access import key_file
from tests.kits.router.gateway import EOS, STOP, FakeRouter, answer, get, make_app, post
from tests.kits.tree.documents import ROOT

OPENAPI = document("1", needs_key=False)
MESSAGES = [{"role": "user", "content": "yo"}]
SCORES = Logprobs(-0.5, 1, (104, 105), (-0.5, -1.5))


def routes_of(app):
    """Returns the method and path of each route, in the document's notation."""
    for route in app._app._others.routes:  # the other applications behind the front
        path = re.sub(r":\w+}", "}", route.path)
        for method in route.methods - {"HEAD"}:
            yield method.lower(), path


def test_the_document_has_every_route_and_no_other():
    described = {(method, path) for path, each in OPENAPI["paths"].items() for method in each}
    assert described == set(routes_of(make_app(FakeRouter())))


def test_every_reference_leads_to_a_schema():
    text = msgspec.json.encode(OPENAPI).decode()
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', text))
    assert names <= set(OPENAPI["components"]["schemas"])


def test_every_schema_is_a_schema():
    for schema in OPENAPI["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def closed(schema):
    """Returns the same schema, but without unnamed fields allowed."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(each) for key, each in schema.items()}
    if isinstance(found.get("properties"), dict) and "required" in found:
        found.setdefault("additionalProperties", False)
    return found


CLOSED = closed(deepcopy(OPENAPI["components"]["schemas"]))


def check(name, value):
    """Raises if the value does not fit a type of the document, or has an undescribed field."""
    root = {"components": {"schemas": CLOSED}}
    resource = DRAFT202012.create_resource(root)
    registry = Registry().with_resource("urn:openapi", resource)
    schema = {"$ref": f"urn:openapi#/components/schemas/{name}"}
    jsonschema.Draft202012Validator(schema, registry=registry).validate(value)


def test_a_field_that_is_not_described_is_noticed():
    with pytest.raises(jsonschema.ValidationError):
        check("Health", {"status": "ok", "more": 1})


def scored():
    return FakeRouter(
        [
            Update((104,), logprobs=(SCORES,), prompt_logprobs=(SCORES,)),
            Update((105, EOS), logprobs=(SCORES, SCORES), outcome=STOP),
        ]
    )


ASKED = [
    {},
    {"return_token_ids": True},
    {"logprobs": True, "top_logprobs": 2},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
]


@pytest.mark.parametrize("fields", ASKED[:3])
def test_a_chat_completion_has_the_fields_described(fields):
    app = make_app(scored() if "logprobs" in fields else FakeRouter())
    reply = post(
        app, "/v1/chat/completions", {"messages": MESSAGES, **fields}, x_baton_timeline="1"
    )
    assert reply.status == 200, reply.body
    check("ChatAnswer", reply.json())


@pytest.mark.parametrize("fields", ASKED)
def test_the_events_of_a_chat_have_the_fields_described(fields):
    app = make_app(scored() if "logprobs" in fields else FakeRouter())
    body = {"messages": MESSAGES, "stream": True, **fields}
    events = post(app, "/v1/chat/completions", body, x_baton_timeline="1").events()
    assert events.pop() == "[DONE]"
    for event in events:
        check("ChatStreamChunk", event)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}, {"return_token_ids": True}])
def test_a_completion_has_the_fields_described(fields, *, stream):
    app = make_app(scored() if "logprobs" in fields else FakeRouter())
    reply = post(app, "/v1/completions", {"prompt": "yo", "stream": stream, **fields})
    if not stream:
        check("CompletionAnswer", reply.json())
        return
    for event in reply.events()[:-1]:
        check("CompletionStreamChunk", event)


def test_a_call_of_a_tool_has_the_fields_described():
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "f"}}]
    for stream in (False, True):
        body = {"messages": MESSAGES, "tools": tools, "stream": stream, "max_tokens": 1}
        app = make_app(FakeRouter(answer(text)), context_len=4096)
        reply = post(app, "/v1/chat/completions", body)
        assert b"tool_calls" in reply.body
        if stream:
            for event in reply.events()[:-1]:
                check("ChatStreamChunk", event)
        else:
            check("ChatAnswer", reply.json())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (operation.removeprefix("post "), body)
        for operation, examples in EXAMPLES.items()
        for body in examples.values()
    ],
)
def test_the_examples_of_bodies_are_served(path, body):
    router = FakeRouter()
    router.store_block = 16
    reply = post(make_app(router, context_len=4096), path, body)
    # A text model has no embeddings: then the body is valid, but the model is refused.
    refused = {"/v1/embeddings": (404, "model")}.get(path)
    if refused is None:
        assert reply.status == 200
    else:
        assert (reply.status, reply.json()["error"]["param"]) == refused


def test_the_errors_of_the_document_are_those_of_the_code_and_of_the_guide():
    codes = {code for each in ERRORS for code in each.codes}
    source = "".join(p.read_text() for p in (ROOT / "router").rglob("*.py"))
    assert set(re.findall(r'\bcode="([a-z_]+)"', source)) <= codes
    guide = (ROOT / "docs/users/api.md").read_text()
    rows = re.findall(r"^\| (\d{3}) \| (`[^|]+`) \| (.+) \|$", guide, re.M)
    ours = [(str(e.status), ", ".join(f"`{c}`" for c in e.codes), e.reason) for e in ERRORS]
    assert rows == ours


def test_an_answer_without_a_body_has_none_in_the_description():
    for method, path in (("delete", "/v1/sessions/{session_id}"), ("delete", "/v1/pins")):
        responses = OPENAPI["paths"][path][method]["responses"]
        assert "200" not in responses
        assert "content" not in responses["204"]


def test_with_keys_the_description_is_open_and_says_what_needs_one(tmp_path):
    app = make_app(FakeRouter(), keys=key_file(tmp_path / "keys.json", "sesame"))
    described = get(app, "/openapi.json").json()
    assert get(app, "/docs").status == 200
    assert described["security"] == [{"key": []}]
    paths = described["paths"]
    assert "401" in paths["/v1/models"]["get"]["responses"]
    assert "403" in paths["/load"]["get"]["responses"]
    for path in ("/health", "/ready", "/ping", "/version", "/docs", "/openapi.json"):
        assert paths[path]["get"]["security"] == []
        assert "401" not in paths[path]["get"]["responses"]
    assert "security" not in OPENAPI


def test_the_page_needs_no_script_and_no_other_file():
    alone = get(make_app(FakeRouter(), dashboard=DashboardMode.OFF), "/docs")
    assert not re.search(r"<script|src=|@import|url\(|/assets", alone.body.decode())
    assert "script-src" not in alone.headers["content-security-policy"]
    reply = get(make_app(FakeRouter()), "/docs")
    page = reply.body.decode()
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert re.findall(r"src=\S+|@import|url\(", page) == ['src="/assets/shared/docs.js"></script>']
    assert "script-src 'self'" in reply.headers["content-security-policy"]


def test_the_page_has_the_dress_of_the_others_and_links_that_lead_somewhere():
    page = get(make_app(FakeRouter()), "/docs").body.decode()
    styles = files("router.gateway.dashboard").joinpath("static/baton.css").read_text()
    assert styles in page
    found = _Links()
    found.feed(page)
    assert {link for link in found.links if not link.startswith("#")} == {"./", "openapi.json"}
    assert {link[1:] for link in found.links if link.startswith("#")} <= found.ids
    for method, path in routes_of(make_app(FakeRouter())):
        assert f'<b class="{method}">{method.upper()}</b><span class="path">{path}</span>' in page


@pytest.mark.parametrize("mode", [DashboardMode.ON, DashboardMode.OFF])
def test_no_page_can_be_framed_or_taken_for_another_type(mode):
    app = make_app(FakeRouter(), dashboard=mode)
    kinds = set()
    for path in ("/", "/dashboard", "/play", "/docs", "/openapi.json"):
        reply = get(app, path)
        if reply.status == 200:
            assert reply.headers["x-content-type-options"] == "nosniff"
            kinds.add(kind := reply.headers["content-type"].partition(";")[0])
            if kind == "text/html":
                assert "frame-ancestors 'none'" in reply.headers["content-security-policy"]
    assert kinds == {"text/html", "application/json"}


class _Links(HTMLParser):
    """Collects the targets of links and the ids of elements."""

    def __init__(self):
        super().__init__()
        self.links, self.ids = set(), set()

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self.ids.add(named.get("id"))
        if tag == "a":
            self.links.add(named["href"])
