"""Long bodies use little memory, whatever they contain, and decode like short bodies."""

import json
import tracemalloc

import pytest

from bench.hostile.corpus import BOMBS, CHAT
from router.gateway.requests.body import Body, body_of
from router.gateway.requests.chat import MAX_MESSAGES, ChatBody
from router.gateway.requests.completion import CompletionBody
from router.gateway.requests.json_fields import SHORT_BODY_BYTES, decode_fields
from router.inbox.api_errors import ApiError
from router.inbox.json_values import MAX_CONTAINERS
from tests.kits.router.bodies import BAD_MESSAGES, BAD_PROMPTS
from tests.kits.router.gateway import FakeRouter, complete, make_app, post

PADDING = {"padding": "x" * SHORT_BODY_BYTES}
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
NUM_BYTES = 2**20
# bytes of memory per byte of body; full decoding needed 27 for arrays in an unknown field
MOST_PER_BYTE = 12


# the texts in this body are decoded
@pytest.mark.parametrize("name", sorted(BOMBS.keys() - {"texts as stops"}))
def test_no_body_becomes_many_objects(name):
    path, make = BOMBS[name]
    body_type, data = ChatBody if path == CHAT else CompletionBody, make(NUM_BYTES)
    tracemalloc.start()
    try:
        outcome(data, body_type)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < MOST_PER_BYTE * NUM_BYTES


def outcome(data: bytes, body_type: type[Body]) -> Body | tuple[str, str | None, str | None]:
    """Returns the decoded body, or the error that refuses it."""
    try:
        return body_of(decode_fields(data, body_type), body_type)
    except ApiError as error:
        return error.message, error.param, error.code


def outcomes(fields: dict[str, object], body_type: type[Body]) -> list[object]:
    short, long = (json.dumps(f).encode() for f in (fields, {**fields, **PADDING}))
    assert len(short) <= SHORT_BODY_BYTES < len(long)
    return [outcome(data, body_type) for data in (short, long)]


@pytest.mark.parametrize("prompt", [p for p, _, _ in BAD_PROMPTS])
def test_a_long_body_is_refused_for_its_prompt(prompt):
    reply = complete(FakeRouter(), {"prompt": prompt, **PADDING})
    assert reply.status == 400
    assert reply.json()["error"]["param"].startswith("prompt")


@pytest.mark.parametrize("messages", [m for m, _, _ in BAD_MESSAGES])
def test_a_long_body_is_refused_for_its_messages_as_a_short_one_is(messages):
    short, long = outcomes({"messages": messages}, ChatBody)
    assert long == short


ASKED = {"model": "m", "max_tokens": 3, "stop": ["a"], "logit_bias": {"5": 1}, "user": "u"}
MESSAGES = [
    {"role": "system", "content": "one, two"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "n"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "[1]", "tool_call_id": "c", "other": [[]]},
]


@pytest.mark.parametrize("prompt", ["one, two", [1, 2], [[1, 2]], ["one, [two]"], [[]], []])
def test_a_long_prompt_body_decodes_like_a_short_one(prompt):
    short, long = outcomes({"prompt": prompt, **ASKED}, CompletionBody)
    assert isinstance(short, CompletionBody)
    assert long == short


def test_a_long_messages_body_decodes_like_a_short_one():
    short, long = outcomes({"messages": MESSAGES, **ASKED}, ChatBody)
    assert isinstance(short, ChatBody)
    assert long == short


def test_fields_of_grammars_and_refused_fields_are_kept():
    fields = {"response_format": {"type": "json_object"}, "suffix": "x", "tools": []}
    assert decode_fields(json.dumps({**fields, **PADDING}).encode(), CompletionBody) == fields


@pytest.mark.parametrize("body", [b"[%s]", b"{%s", b'{"x": "%s', b"%s", b'{"prompt": %s}'])
def test_a_long_body_that_is_no_json_object_is_refused(body):
    _, _, code = outcome(body % (b"1," * SHORT_BODY_BYTES), CompletionBody)
    assert code == "invalid_json"


def test_there_is_a_most_of_messages():
    many = [{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1)
    error = post(make_app(FakeRouter()), "/v1/chat/completions", {"messages": many})
    assert error.status == 400
    assert "at most 4096" in error.json()["error"]["message"]


def test_arguments_of_calls_are_bounded_too():
    arguments = "[" + "[]," * MAX_CONTAINERS + "[]]"
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    escaped = json.dumps([{"role": "assistant", "tool_calls": [call]}]).replace("[]", "\\u005b]")
    body = b'{"messages": %s}' % escaped.encode()
    error = post(make_app(FakeRouter()), "/v1/chat/completions", body)
    assert error.status == 400
    assert "arrays and objects" in error.json()["error"]["message"]
