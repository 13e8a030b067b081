"""Responses through the app, with OpenAI's own client."""

import asyncio
import itertools

import msgspec
import pytest
from openai import BadRequestError, NotFoundError, RateLimitError
from pydantic import BaseModel

from engine.messages import Logprobs
from router.machine.requests import Failed, Rejected, Update
from tests.kits.router.gateway import (
    EOS,
    LENGTH,
    STOP,
    TIMELINE,
    Connection,
    FakeRouter,
    Never,
    answer,
    fetch,
    get,
    make_app,
    post,
    samples,
    tokens,
)
from tests.kits.router.responses import CONTEXT_LEN, with_client
from tests.kits.tree.compat import like

PATH = "/v1/responses"
TOOL = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role if m.role != 'tool' else 'user' }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.a }}"
    "{% endfor %}{% endfor %}<|assistant|>"
)

BASIC = "entrypoints/openai/responses/test_basic.py"
SIMPLE = "entrypoints/openai/responses/test_simple.py"
STATEFUL = "entrypoints/openai/responses/test_stateful.py"
CALLS = "entrypoints/openai/responses/test_function_call.py"
SGLANG = "openai_server/basic/test_openai_server.py"
SGLANG_CALLS = "openai_server/function_call/test_responses_function_calling.py"


def app_of(router, **settings):
    return make_app(router, context_len=CONTEXT_LEN, **settings)


def prompt_of(router, index=-1):
    """Returns the text of a prompt, with one line for each speaker mark."""
    ids = router.requests[index].token_ids
    return "".join(chr(i) if i < 256 else "\n" for i in ids)


@like("vllm", BASIC, "test_instructions", "test_chat")
@like("vllm", SIMPLE, "test_basic")
@like(
    "sglang",
    SGLANG,
    "TestOpenAIServerv1Responses.test_response",
    "TestOpenAIServerv1Responses.test_response_completion",
)
def test_a_response_has_everything_that_openais_have():
    router = FakeRouter()

    async def use(client):
        return await client.responses.create(
            model="tiny", input="yo", instructions="be", metadata={"k": "v"}, max_output_tokens=9
        )

    made = with_client(app_of(router), use)
    assert made.id.startswith("resp_")
    assert (made.object, made.status, made.output_text) == ("response", "completed", "hi")
    assert (made.model, made.metadata, made.instructions) == ("tiny", {"k": "v"}, "be")
    assert (made.error, made.incomplete_details) == (None, None)
    [message] = made.output
    assert message.id.startswith("msg_")
    assert (message.role, message.status) == ("assistant", "completed")
    assert message.content[0].annotations == []
    assert made.usage.input_tokens == len(router.requests[0].token_ids)
    assert made.usage.input_tokens_details.cached_tokens == TIMELINE.num_cached_tokens
    assert (made.usage.output_tokens, made.usage.total_tokens) == (3, 3 + made.usage.input_tokens)
    assert prompt_of(router) == "\nbe\nyo\n"


@like("vllm", SIMPLE, "test_max_tokens")
def test_an_answer_that_is_cut_is_incomplete():
    router = FakeRouter([tokens("ab", outcome=LENGTH, timeline=TIMELINE)])

    async def use(client):
        return await client.responses.create(input="yo", max_output_tokens=2)

    made = with_client(app_of(router), use)
    assert made.status == "incomplete"
    assert made.incomplete_details.reason == "max_output_tokens"
    assert made.output[0].status == "incomplete"


def test_an_empty_answer_is_an_empty_message():
    async def use(client):
        return await client.responses.create(input="yo")

    made = with_client(app_of(FakeRouter(answer(""))), use)
    assert made.output_text == ""
    assert made.output[0].type == "message"


@like("vllm", BASIC, "test_streaming")
@like("vllm", SIMPLE, "test_streaming_types")
@like(
    "sglang",
    SGLANG,
    "TestOpenAIServerv1Responses.test_response_stream",
    "TestOpenAIServerv1Responses.test_response_completion_stream",
)
def test_a_stream_has_openais_events_in_their_order():
    async def use(client):
        stream = await client.responses.create(input="yo", stream=True)
        return [event async for event in stream]

    events = with_client(app_of(FakeRouter()), use)
    assert [event.type.removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.delta for event in events if event.type.endswith("delta")] == ["h", "i"]
    assert events[6].text == "hi"
    assert events[-1].response.output_text == "hi"
    assert events[-1].response.usage.output_tokens == 3


def test_events_are_named_for_browsers():
    reply = post(app_of(FakeRouter()), PATH, {"input": "yo", "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    blocks = reply.body.decode().split("\n\n")
    assert blocks.pop() == ""
    for block in blocks:
        name, data = block.split("\n")
        assert name.removeprefix("event: ") == msgspec.json.decode(data[6:])["type"]


@like("vllm", SIMPLE, "test_streaming_output_consistency")
def test_the_clients_helper_puts_a_stream_together():
    async def use(client):
        async with client.responses.stream(model="tiny", input="yo") as stream:
            async for _ in stream:
                pass
            return await stream.get_final_response()

    assert with_client(app_of(FakeRouter()), use).output_text == "hi"


def test_a_stream_that_breaks_ends_as_failed():
    router = FakeRouter([tokens("a"), Update(outcome=Failed("a worker died"))])

    async def use(client):
        stream = await client.responses.create(input="yo", stream=True)
        events = [event async for event in stream]
        return events, await client.responses.retrieve(events[0].response.id)

    events, kept = with_client(app_of(router), use)
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "a worker died"
    assert (kept.status, kept.output_text) == ("failed", "a")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_refused_before_its_first_token_has_a_status(stream):
    router = FakeRouter([Update(outcome=Rejected("full", 2.0))])

    async def use(client):
        with pytest.raises(RateLimitError):
            await client.responses.create(input="yo", stream=stream)

    with_client(app_of(router), use)


@like("vllm", BASIC, "test_logprobs")
@like("vllm", SIMPLE, "test_streaming_logprobs")
def test_log_probabilities_come_with_the_text():
    scores = Logprobs(-0.5, 1, (ord("h"), ord("j")), (-0.5, -2.0))
    script = [
        Update(token_ids=(ord("h"),), logprobs=(scores,)),
        Update(token_ids=(EOS,), logprobs=(scores,), outcome=STOP, timeline=TIMELINE),
    ]
    router = FakeRouter(script)

    async def use(client):
        include = ["message.output_text.logprobs"]
        return await client.responses.create(input="yo", include=include, top_logprobs=2)

    made = with_client(app_of(router), use)
    [scored] = made.output[0].content[0].logprobs
    assert (scored.token, scored.logprob) == ("h", -0.5)
    assert [top.token for top in scored.top_logprobs] == ["h", "j"]
    assert router.requests[0].sampling.logprobs == 2


class Point(BaseModel):
    x: int


@like(
    "vllm",
    "entrypoints/openai/responses/test_structured_output.py",
    "test_structured_output",
    "test_structured_output_with_parse",
)
def test_a_parsed_answer_is_an_object():
    router = FakeRouter(answer('{"x": 3}'))

    async def use(client):
        return await client.responses.parse(model="tiny", input="yo", text_format=Point)

    made = with_client(app_of(router), use)
    assert made.output_parsed == Point(x=3)
    assert router.requests[0].sampling.grammar is not None


@like("vllm", CALLS, "test_function_tool_use")
@like(
    "sglang",
    SGLANG_CALLS,
    "test_function_tool_schema_validation",
    "test_function_tool_non_streaming",
    "test_multiple_function_tools",
)
def test_a_function_is_called_and_its_output_is_taken():
    router = FakeRouter(answer("so " + CALL), answer("one"))

    async def use(client):
        first = await client.responses.create(
            model="tiny", input="add", tools=[TOOL], parallel_tool_calls=False
        )
        call = first.output[1]
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "1"}
        second = await client.responses.create(
            model="tiny", input=[output], previous_response_id=first.id, tools=[TOOL]
        )
        return first, call, second

    first, call, second = with_client(app_of(router, template=TEMPLATE), use)
    assert [item.type for item in first.output] == ["message", "function_call"]
    assert (call.name, call.arguments, call.status) == ("add", '{"a": 1}', "completed")
    assert second.output_text == "one"
    assert prompt_of(router) == "\nadd\nso add1\n1\n"


@like("vllm", CALLS, "test_max_tokens_with_tool_choice_required")
def test_a_call_that_is_cut_is_incomplete():
    router = FakeRouter([tokens(CALL[:40], outcome=LENGTH, timeline=TIMELINE)])

    async def use(client):
        return await client.responses.create(input="x", tools=[TOOL], tool_choice="required")

    made = with_client(app_of(router), use)
    assert (made.status, made.output_text) == ("incomplete", "")


@like("sglang", SGLANG_CALLS, "test_tool_choice_none")
def test_without_a_choice_of_tools_there_are_no_calls():
    async def use(client):
        return await client.responses.create(input="x", tools=[TOOL], tool_choice="none")

    made = with_client(app_of(FakeRouter(answer(CALL))), use)
    assert [item.type for item in made.output] == ["message"]


@like(
    "vllm",
    CALLS,
    "test_named_tool_use",
    "test_function_calling_with_streaming_expected_arguments",
    "test_function_calling_with_streaming_types",
)
@like("sglang", SGLANG_CALLS, "test_function_tool_streaming", "test_function_tool_with_strict_mode")
def test_the_events_of_a_call():
    async def use(client):
        stream = await client.responses.create(
            model="tiny", input="add", tools=[TOOL], tool_choice="required", stream=True
        )
        return [event async for event in stream]

    events = with_client(app_of(FakeRouter(answer(CALL))), use)
    names = [event.type.removeprefix("response.") for event in events]
    assert list(dict.fromkeys(names)) == [
        "created",
        "in_progress",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    arguments = "".join(e.delta for e in events if e.type.endswith("arguments.delta"))
    assert arguments == '{"a": 1}' == events[-3].arguments
    assert events[-1].response.output[0].arguments == arguments


CUSTOM = {"type": "custom", "name": "add", "description": "d"}
SPACE = {"type": "namespace", "name": "n", "description": "d", "tools": [CUSTOM]}
CUSTOM_CALL = '<tool_call>\n{"name": "n__add", "arguments": {"input": "a\\nb"}}\n</tool_call>'
CUSTOM_TEMPLATE = TEMPLATE.replace("arguments.a", "arguments.input")


@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        ({"instrutions": "x", "temperature": 9}, "instructions"),
        ({"instrutions": "x", "top_k": -9}, "instructions"),
        ({"max_output_tokns": 5, "tool_choice": "required"}, "max_output_tokens"),
        ({"max_tokns": 5, "tool_choice": "required"}, "max_output_tokens"),
    ],
)
def test_an_error_asks_whether_a_misspelt_field_was_meant(fields, meant):
    (wrong, *_) = fields
    message = post(app_of(FakeRouter()), PATH, {"input": "x", **fields}).json()["error"]["message"]
    assert message.endswith(f"({wrong} is not a field: did you mean {meant}?)")


@like("sglang", SGLANG_CALLS, "test_builtin_and_function_tools_mixed")
def test_a_custom_tool_of_a_namespace_is_called_and_its_output_is_taken():
    router = FakeRouter(answer("so " + CUSTOM_CALL), answer("one"))
    tools = [SPACE, {"type": "web_search"}]

    async def use(client):
        made = await client.responses.with_raw_response.create(
            model="tiny", input="add", tools=tools, tool_choice="auto"
        )
        first = made.parse()
        call = first.output[1]
        output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "1"}
        await client.responses.create(input=[output], previous_response_id=first.id, tools=tools)
        return made.headers["x-baton-ignored"], first.tools, call

    ignored, repeated, call = with_client(app_of(router, template=CUSTOM_TEMPLATE), use)
    assert ignored == "tools[1].web_search"
    assert [tool.type for tool in repeated] == ["namespace", "web_search"]
    assert (call.type, call.namespace, call.name) == ("custom_tool_call", "n", "add")
    assert call.input == "a\nb"
    assert prompt_of(router) == "\nadd\nso n__adda\nb\n1\n"


def test_what_a_tools_schema_asks_in_vain_is_named_by_the_clients_field():
    text = {"type": "string", "pattern": "^(?!x)y$"}
    schema = {"type": "object", "properties": {"a": text}}
    inner = {"type": "function", "name": "f", "parameters": schema}
    space = {"type": "namespace", "name": "n", "description": "d", "tools": [inner]}
    reply = post(app_of(FakeRouter()), PATH, {"input": "x", "tools": [{"type": "mcp"}, space]})
    assert reply.status == 200
    first, second = reply.headers["x-baton-ignored"].split(", ")
    assert first == "tools[0].mcp"
    assert second.startswith("tools[1].tools[0].parameters")


@pytest.mark.parametrize(
    ("upgrade", "status"), [("websocket", 426), ("WebSocket", 426), ("h2c", 405)]
)
def test_a_probe_for_a_websocket_is_told_that_there_is_none(upgrade, status):
    reply = get(app_of(FakeRouter()), PATH, upgrade=upgrade)
    assert (reply.status, reply.headers["allow"]) == (status, "OPTIONS, POST")
    assert ("upgrade" in reply.headers) == (status == 426)


@like("vllm", STATEFUL, "test_previous_response_id", "test_two_responses_with_same_prev_id")
def test_a_conversation_is_a_chain_whose_prompts_extend_each_other():
    router = FakeRouter()

    async def use(client):
        first = await client.responses.create(input="one")
        second = await client.responses.create(input="two", previous_response_id=first.id)
        await client.responses.create(input="three", previous_response_id=second.id)
        listed = await client.responses.input_items.list(second.id, order="asc")
        return first, listed.data

    first, listed = with_client(app_of(router), use)
    prompts = [request.token_ids for request in router.requests]
    assert prompt_of(router) == "\none\nhi\ntwo\nhi\nthree\n"
    for shorter, longer in itertools.pairwise(prompts):
        assert longer[: len(shorter)] == shorter
    assert [item.role for item in listed] == ["user", "assistant", "user"]
    assert listed[1].id == first.output[0].id


def test_instructions_are_those_of_the_turn():
    router = FakeRouter()

    async def use(client):
        first = await client.responses.create(input="one", instructions="old")
        await client.responses.create(
            input="two", instructions="new", previous_response_id=first.id
        )

    with_client(app_of(router), use)
    assert prompt_of(router) == "\nnew\none\nhi\ntwo\n"


@like("vllm", STATEFUL, "test_cancel_completed")
def test_a_response_is_read_and_deleted():
    async def use(client):
        made = await client.responses.create(input="yo")
        kept = await client.responses.retrieve(made.id)
        assert kept == made
        with pytest.raises(BadRequestError):
            await client.responses.cancel(made.id)
        await client.responses.delete(made.id)
        for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(NotFoundError):
                await call(made.id)
        with pytest.raises(NotFoundError):
            await client.responses.input_items.list(made.id)
        with pytest.raises(BadRequestError) as caught:
            await client.responses.create(input="more", previous_response_id=made.id)
        assert caught.value.param == "previous_response_id"
        assert caught.value.code == "previous_response_not_found"

    with_client(app_of(FakeRouter()), use)


@like("vllm", STATEFUL, "test_store")
def test_what_shall_not_be_stored_is_not():
    async def use(client):
        made = await client.responses.create(input="yo", store=False)
        assert made.store is False
        with pytest.raises(NotFoundError):
            await client.responses.retrieve(made.id)

    with_client(app_of(FakeRouter()), use)


def test_input_items_come_in_pages():
    async def use(client):
        items = [{"role": "user", "content": str(index)} for index in range(5)]
        made = await client.responses.create(input=items)
        newest = await client.responses.input_items.list(made.id, limit=2)
        assert [item.content[0].text for item in newest.data] == ["4", "3"]
        assert newest.has_more
        every = [item async for item in newest]
        assert [item.content[0].text for item in every] == ["4", "3", "2", "1", "0"]
        for wrong in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "msg_x"}):
            with pytest.raises(BadRequestError) as caught:
                await client.responses.input_items.list(made.id, **wrong)
            assert caught.value.param == next(iter(wrong))

    with_client(app_of(FakeRouter()), use)


def test_an_item_can_be_named_by_its_id():
    router = FakeRouter()

    async def use(client):
        made = await client.responses.create(input="yo")
        reference = {"type": "item_reference", "id": made.output[0].id}
        user = {"role": "user", "content": "more"}
        await client.responses.create(input=[reference, user])

    with_client(app_of(router), use)
    assert prompt_of(router) == "\nhi\nmore\n"


@like("sglang", SGLANG, "TestOpenAIServerv1Responses.test_error")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": "x" * CONTEXT_LEN}, "input"),
        ({"max_output_tokens": CONTEXT_LEN}, "max_output_tokens"),
        ({"input": [{"role": "user", "content": []}], "temperature": 3}, "temperature"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": 5}}}, None),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"model": "other"}, "model"),
        ({"truncation": "auto"}, "truncation"),
    ],
)
def test_errors_name_the_clients_field(fields, param):
    app = app_of(FakeRouter())
    reply = post(app, PATH, {"input": "yo", **fields})
    assert reply.status in (400, 404)
    error = reply.json()["error"]
    assert error["param"] == (param or "text.format.schema")
    assert "messages" not in error["message"]
    assert "x-request-id" in reply.headers or reply.status == 400
    counts = samples(app)["baton_requests_total"]
    assert counts[(("outcome", "invalid"),)] == 1


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=maybe", "stream"),
        ("stream=true", "stream"),
        ("starting_after=1", "starting_after"),
        ("starting_after=-1&stream=true", "starting_after"),
        ("include=web_search_call.results", "include"),
        ("include_obfuscation=true", "include_obfuscation"),
    ],
)
def test_wrong_queries_are_refused(query, param):
    async def use(client):
        made = await client.responses.create(input="yo")
        answered = await client._client.get(f"http://localhost/v1/responses/{made.id}?{query}")
        assert answered.status_code == 400
        assert answered.json()["error"]["param"] == param

    with_client(app_of(FakeRouter()), use)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_response(stream):
    router = FakeRouter([tokens("a"), Never()])
    app = app_of(router)

    async def run():
        body = msgspec.json.encode({"input": "yo", "stream": stream})
        connection = Connection(app, "POST", PATH, {})
        connection.put_body(body)
        answering = asyncio.create_task(connection.run())
        await router.waiting.wait()
        connection.leave()
        await answering
        kept = await fetch(app, "GET", f"{PATH}/{router.requests[0].request_id}")
        assert kept.status == 404

    asyncio.run(run())
    assert router.live == 0
    assert samples(app)["baton_requests_total"][(("outcome", "cancelled"),)] == 1


def test_an_answer_that_cannot_be_kept_is_given_all_the_same():
    async def use(client):
        made = await client.responses.create(input="yo")
        assert (made.output_text, made.store) == ("hi", False)
        stream = await client.responses.create(input="yo", stream=True)
        last = [event async for event in stream][-1]
        assert (last.type, last.response.store) == ("response.completed", False)

    app = app_of(FakeRouter(), max_responses_bytes=10)
    with_client(app, use)
    assert samples(app)["baton_responses_total"][(("event", "not_kept"),)] == 2


def test_fields_without_a_meaning_are_reported():
    reply = post(app_of(FakeRouter()), PATH, {"input": "yo", "nonsense": 1})
    assert reply.status == 200
    assert reply.headers["x-baton-ignored"] == "nonsense"


def test_the_tokens_of_a_prompt_are_counted():
    router = FakeRouter()

    async def use(client):
        made = await client.responses.create(input="yo", instructions="be")
        asked = {"input": "more", "previous_response_id": made.id, "model": "tiny"}
        counted = await client.responses.input_tokens.count(**asked)
        answered = await client.responses.create(**asked)
        assert counted.input_tokens == answered.usage.input_tokens
        with pytest.raises(BadRequestError) as caught:
            await client.responses.input_tokens.count(input=[{"role": "x", "content": "y"}])
        assert caught.value.param == "input[0].role"

    with_client(app_of(router), use)


def test_a_page_has_only_its_own_methods():
    app = app_of(FakeRouter())
    for path, methods in (("input_tokens", "OPTIONS, POST"), ("x", "DELETE, GET, HEAD, OPTIONS")):
        refused = asyncio.run(fetch(app, "PUT", f"{PATH}/{path}"))
        assert refused.status == 405
        assert refused.headers["allow"] == methods
