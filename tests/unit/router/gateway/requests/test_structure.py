"""Structured output and tools: the router's request, and tool calls parsed from the text."""

import asyncio
import json

import pytest
from msgspec.structs import replace
from tokenizers import AddedToken, Tokenizer

from engine.messages import GrammarKind, Logprobs
from tests.kits.router.gateway import (
    LENGTH,
    TOKENIZER,
    Connection,
    FakeRouter,
    Never,
    answer,
    chat,
    complete,
    make_app,
    post,
    text_model,
    tokens,
)

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TOOLS = {"tools": [WEATHER]}
# A template that lists the tools, and the arguments of earlier calls.
TEMPLATE = (
    "{% if tools %}{% for t in tools %}[{{ t.function.name }}]{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.arguments | tojson }}){% endfor %}"
    "{% endfor %}"
)


def grammar_asked_for(ask, fields):
    router = FakeRouter()
    assert ask(router, fields).status == 200
    return router.requests[0].sampling.grammar


# ---------------------------------------------------------------- grammars


@pytest.mark.parametrize("ask", [chat, complete])
@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_SCHEMA),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            GrammarKind.JSON_SCHEMA,
        ),
        ({"structured_outputs": {"regex": "a+"}}, GrammarKind.REGEX),
        ({"guided_choice": ["a", "b"]}, GrammarKind.LARK),
    ],
)
def test_the_grammar_goes_with_the_request(ask, fields, kind):
    assert grammar_asked_for(ask, fields).kind is kind


ODD = {"type": "object", "properties": {"mail": {"type": "string", "pattern": "^(?!x)"}}}
PLACE = "parameters.properties.mail.pattern"


def odd_tool(**more):
    return {"type": "function", "function": {"name": "mail", "parameters": ODD, **more}}


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("stream", [True, False])
def test_an_odd_tool_is_served_and_named_in_a_header(choice, stream):
    router = FakeRouter()
    fields = {"tools": [WEATHER, odd_tool()], "tool_choice": choice, "stream": stream, "odd": 1}
    reply = chat(router, fields)
    assert reply.status == 200
    named = set(reply.headers["x-baton-ignored"].split(", "))
    assert named == {"odd", f"tools[1].function.{PLACE}"}
    source = router.requests[0].sampling.grammar.source
    assert ('arguments_0: %json {"type"' in source) is (choice == "required")
    assert "(?!x)" not in source


def test_every_choice_has_the_grammar():
    router = FakeRouter()
    complete(router, {"guided_regex": "a+", "n": 3})
    assert len({r.sampling.grammar for r in router.requests}) == 1
    assert router.requests[0].sampling.grammar is not None


# ---------------------------------------------------------------- tools


def test_the_template_is_shown_the_tools_and_the_arguments_of_earlier_calls():
    earlier = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "X"}'}}
    broken = {"type": "function", "function": {"name": "weather", "arguments": '{"ci'}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [earlier, broken]},
    ]
    router = FakeRouter()
    app = make_app(router, template=TEMPLATE, context_len=500)
    assert post(app, "/v1/chat/completions", {"messages": messages, **TOOLS}).status == 200
    prompt = TOKENIZER.decode(list(router.requests[0].token_ids))
    assert prompt == '[weather]q({"city": "X"})("{\\"ci")'


def test_a_tool_call_is_parsed_from_a_whole_answer():
    body = chat(FakeRouter(answer(f"Let me see. {CALL}")), TOOLS).json()
    [choice] = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see. "
    [call] = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_")
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}


def test_an_answer_of_nothing_but_calls_has_no_content():
    fields = TOOLS | {"tool_choice": "required"}
    [choice] = chat(FakeRouter(answer(CALL + CALL)), fields).json()["choices"]
    assert choice["message"]["content"] is None
    first, second = choice["message"]["tool_calls"]
    assert first["id"] != second["id"]


def test_an_answer_without_calls_is_text_as_ever():
    [choice] = chat(FakeRouter(answer("no < need")), TOOLS).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": "no < need", "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_a_tool_call_cut_short_is_sent_as_far_as_it_came():
    cut = [tokens(CALL[:50], outcome=LENGTH)]
    [choice] = chat(FakeRouter(cut), TOOLS).json()["choices"]
    assert choice["finish_reason"] == "length"
    [call] = choice["message"]["tool_calls"]
    assert CALL[:50].endswith(call["function"]["arguments"])


def test_without_tools_the_form_of_a_call_is_only_text():
    assert chat(FakeRouter(answer(CALL))).json()["choices"][0]["message"]["content"] == CALL


def test_a_stream_tells_a_call_by_its_name_and_then_by_its_arguments():
    script = answer(f"Hm{CALL}{CALL}")
    *chunks, marker = chat(FakeRouter(script), TOOLS | {"stream": True}).events()
    assert marker == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Hm"
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert sorted({call["index"] for call in calls}) == [0, 1]
    assert [sorted(call) for call in calls[:2]] == [
        ["function", "id", "index", "type"],
        ["function", "index"],
    ]
    assert calls[0]["function"] == {"name": "weather", "arguments": ""}
    pieces = [call["function"]["arguments"] for call in calls if call["index"] == 0]
    assert len(pieces) > 1
    assert json.loads("".join(pieces)) == {"city": "Rome"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_each_choice_has_calls_of_its_own():
    router = FakeRouter(answer(CALL), answer("no"))
    first, second = chat(router, TOOLS | {"n": 2}).json()["choices"]
    assert (first["finish_reason"], second["finish_reason"]) == ("tool_calls", "stop")
    assert "tool_calls" not in second["message"]


def test_the_tokens_of_a_call_keep_their_log_probabilities():
    script = [replace(u, logprobs=(Logprobs(-1.0, 1),) * len(u.token_ids)) for u in answer(CALL)]
    for stream in (False, True):
        reply = chat(FakeRouter(script), TOOLS | {"logprobs": True, "stream": stream})
        choices = (
            [c for e in reply.events()[:-1] for c in e["choices"]]
            if stream
            else reply.json()["choices"]
        )
        items = [t for c in choices if c["logprobs"] for t in c["logprobs"]["content"]]
        assert "".join(item["token"] for item in items) == CALL


def test_marks_that_are_special_tokens_are_shown_to_the_parser_only():
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    marks = [AddedToken(m, special=True) for m in ("<tool_call>", "</tool_call>")]
    tokenizer.add_special_tokens(marks)
    text = type(text_model())(tokenizer)
    assert text.added_token_id("<tool_call>") == 260
    assert text.added_token_id("tool") is None
    shown = text.detokenizer([], ("<tool_call>", "</tool_call>"))
    hidden = text.detokenizer([])
    ids = [260, ord("a"), 256, 261]
    assert "".join(shown.push(i) for i in ids) == "<tool_call>a</tool_call>"
    assert "".join(hidden.push(i) for i in ids) == "a"


async def test_a_client_may_leave_while_its_grammar_is_checked():
    router = FakeRouter([Never()])

    connection = Connection(make_app(router), "POST", "/v1/completions", {})
    connection.put_body(b'{"prompt": "yo", "guided_regex": "a+"}')
    call = asyncio.create_task(connection.run())
    await router.waiting.wait()
    connection.leave()
    await call
    assert len(router.cancelled) == 1
