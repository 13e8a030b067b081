"""Every bad input gets OpenAI's error shape, the right status, and the name of the wrong field."""

import asyncio
import re

import pytest

from router.gateway import endpoint
from router.machine.requests import UNFIT, Cancelled, Failed, Rejected, Update
from tests.kits.router.access import key_file
from tests.kits.router.bodies import (
    BAD_MESSAGES,
    BAD_PROMPTS,
    TOO_LONG,
    UNSUPPORTED,
    VALUE,
)
from tests.kits.router.gateway import (
    CONTEXT_LEN,
    TIMELINE,
    Connection,
    FakeRouter,
    chat,
    complete,
    get,
    make_app,
    post,
    tokens,
)
from tests.kits.tree.compat import like

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

# fields of both endpoints; the error's `param` is the field unless the case names another
BAD_VALUES = {
    "model": [3],
    "max_tokens": [0, -1, "5", 1.5, True],
    "min_tokens": [-1, CONTEXT_LEN + 1],
    "temperature": [-0.1, 2.1, "hot"],
    "top_p": [0, 1.01],
    "top_k": [-2, 0.5],
    "min_p": [-0.5, 1.5],
    "seed": [2**63, 1.5],
    "stop": ["", ["a"] * 17, "x" * 513, 5],
    "stop_token_ids": [[260], [-1], list(range(129))],
    "stream": ["yes"],
    "stream_options": [{"include_usage": True}],
    "ignore_eos": [1],
    "n": [0, 17, "1", True],
    "prompt_logprobs": [-1, 21, True],
    "priority": [-1, 1001, 0.5],
    "slo_ttft_ms": [0, -5, 3_600_001, "soon"],
    "slo_tpot_ms": [0, True],
    "user": [7, "u" * 513],
    "logprobs": ["yes"],
    "logit_bias": [
        {"1": 101},
        {"1": "up"},
        {"260": 1},
        {"-1": 1},
        {"a": 1},
        {"²": 1},
        {"1": 1, "01": 2},
        {"9" * 5000: 1},
        {f"{i:06}": 1 for i in range(1025)},
        [1],
    ],
    "presence_penalty": [2.1],
    "frequency_penalty": [-2.1],
    "repetition_penalty": [0, 2.1],
    "response_format": [{"type": "poem"}, {"type": "json_schema"}],
    "structured_outputs": [{"regex": "("}, {}],
    "guided_json": [{"type": "nothing"}],
    "guided_regex": ["("],
    "guided_choice": [[]],
    "guided_grammar": ["start: ("],
}
# field, value, HTTP status, error code
BAD_FIELDS = [
    *[(field, value, 400, VALUE) for field, values in BAD_VALUES.items() for value in values],
    ("model", "gpt-9", 404, "model_not_found"),
    ("max_tokens", CONTEXT_LEN, 400, TOO_LONG),
    ("max_tokens", 10**30, 400, TOO_LONG),
    ("suffix", "x", 400, UNSUPPORTED),
    ("functions", [{}], 400, UNSUPPORTED),
]

BAD_CHAT_FIELDS = [
    ({"best_of": 2}, "best_of", UNSUPPORTED),
    ({"suffix": "x"}, "suffix", UNSUPPORTED),
    ({"logprobs": 0}, "logprobs", VALUE),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", VALUE),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", VALUE),
    ({"top_logprobs": 3}, "top_logprobs", VALUE),
    ({"logprobs": False, "top_logprobs": 3}, "top_logprobs", VALUE),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", UNSUPPORTED),
    ({"tools": [{"type": "function"}]}, "tools[0].function", VALUE),
    ({"tools": [{"type": "function"}], "tool_choice": "must"}, "tools[0].function", VALUE),
    ({"tool_choice": "required"}, "tool_choice", VALUE),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", VALUE),
    ({"guided_regex": "a", "min_tokens": 3}, "min_tokens", VALUE),
]

BAD_COMPLETION_FIELDS = [
    ({"logprobs": True}, "logprobs", VALUE),
    ({"logprobs": 21}, "logprobs", VALUE),
    ({"logprobs": -1}, "logprobs", VALUE),
    ({"top_logprobs": 3}, "top_logprobs", UNSUPPORTED),
    ({"best_of": 17}, "best_of", VALUE),
    ({"n": 3, "best_of": 2}, "best_of", VALUE),
    ({"best_of": 2, "stream": True}, "best_of", UNSUPPORTED),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", UNSUPPORTED),
    ({"logprobs": -1}, "logprobs", VALUE),
    ({"prompt_logprobs": -1}, "prompt_logprobs", VALUE),
    ({"max_tokens": 0}, "max_tokens", VALUE),
    ({"tools": [{"type": "function"}]}, "tools", UNSUPPORTED),
    ({"tool_choice": "required"}, "tool_choice", UNSUPPORTED),
]

BAD_BODIES = [
    b"",
    b"{",
    b'{"prompt": "yo"} x',
    b'{"prompt": "\xff"}',
    b"\xff",
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "\\ud800 yo"}',
    b'{"prompt": "yo", "temperature": NaN}',
    b'{"prompt": "yo", "temperature": Infinity}',
    b'{"prompt": "yo", "temperature": 1e999}',
    b"[" * 100_000,
    b"[]",
    b'"yo"',
    b"null",
]


def assert_error(reply, status, code, param=None):
    error = reply.json()["error"]
    assert reply.status == status
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)


@like("vllm", "entrypoints/openai/chat_completion/test_chat.py", "test_long_seed")
@like(
    "vllm",
    "entrypoints/openai/chat_completion/test_chat_logit_bias_validation.py",
    "test_chat_logit_bias_invalid",
    "test_chat_logit_bias_non_integer_key",
    "test_chat_logit_bias_non_numeric_value",
    "test_chat_logit_bias_multiple_non_integer_keys",
)
@like(
    "vllm",
    "entrypoints/openai/chat_completion/test_chat_stop_token_ids_validation.py",
    "test_chat_stop_token_ids_out_of_vocab",
    "test_chat_stop_token_ids_negative",
)
@pytest.mark.parametrize("ask", [chat, complete])
@pytest.mark.parametrize(("field", "value", "status", "code"), BAD_FIELDS)
def test_a_bad_field_is_named(ask, field, value, status, code):
    router = FakeRouter()
    reply = ask(router, {field: value})
    assert_error(reply, status, code, reply.json()["error"]["param"])
    assert re.split(r"[.\[]", reply.json()["error"]["param"])[0] == field
    assert router.requests == []


@like("vllm", "entrypoints/openai/chat_completion/test_chat.py", "test_too_many_chat_logprobs")
@like(
    "vllm", "entrypoints/openai/completion/test_completion.py", "test_too_many_completion_logprobs"
)
@pytest.mark.parametrize(
    ("ask", "fields", "param", "code"),
    [(chat, *case) for case in BAD_CHAT_FIELDS]
    + [(complete, *case) for case in BAD_COMPLETION_FIELDS],
)
def test_fields_that_do_not_go_together_or_belong_elsewhere_are_named(ask, fields, param, code):
    router = FakeRouter()
    assert_error(ask(router, fields), 400, code, param)
    assert router.requests == []


@like("vllm", "entrypoints/openai/completion/test_prompt_validation.py", "test_empty_prompt")
@like(
    "vllm",
    "entrypoints/openai/completion/test_empty_prompt_list.py",
    "test_empty_prompt_list_rejected",
)
@pytest.mark.parametrize(("prompt", "param", "code"), BAD_PROMPTS)
def test_a_bad_prompt_is_refused(prompt, param, code):
    assert_error(complete(FakeRouter(), {"prompt": prompt}), 400, code, param)


@pytest.mark.parametrize(("messages", "param", "code"), BAD_MESSAGES)
def test_bad_messages_are_refused(messages, param, code):
    assert_error(chat(FakeRouter(), {"messages": messages}), 400, code, param)


@pytest.mark.parametrize("body", BAD_BODIES)
def test_a_body_that_is_no_json_object_is_refused(body):
    assert_error(post(make_app(FakeRouter()), COMPLETIONS, body), 400, "invalid_json")


@like(
    "vllm", "entrypoints/openai/completion/test_prompt_validation.py", "test_out_of_vocab_token_ids"
)
@pytest.mark.parametrize("token_id", [260, -1, 2**63])
def test_a_token_id_that_the_model_does_not_know_is_named(token_id):
    reply = complete(FakeRouter(), {"prompt": [1, token_id, 2]})
    assert f"the token id {token_id};" in reply.json()["error"]["message"]


def test_missing_prompt_and_messages_are_named():
    app = make_app(FakeRouter())
    assert_error(post(app, COMPLETIONS, {}), 400, VALUE, "prompt")
    assert_error(post(app, CHAT, {}), 400, VALUE, "messages")


def test_the_context_error_names_the_numbers():
    message = complete(FakeRouter(), {"prompt": "x" * 10, "max_tokens": 60}).json()["error"]
    assert all(number in message["message"] for number in ("10", "60", str(CONTEXT_LEN)))


def test_a_request_beyond_kv_capacity_is_refused_with_the_limit():
    router = FakeRouter()
    router.capacity = 32
    app = make_app(router)
    fits = {"prompt": "x" * 10, "max_tokens": 22}
    assert post(app, COMPLETIONS, fits).status == 200
    answer = post(app, COMPLETIONS, fits | {"max_tokens": 23})
    assert_error(answer, 400, TOO_LONG, "max_tokens")
    message = answer.json()["error"]["message"]
    assert all(number in message for number in ("10", "23", "32"))
    assert_error(post(app, COMPLETIONS, {"prompt": "x" * 32}), 400, TOO_LONG, "prompt")


def test_without_max_tokens_kv_capacity_bounds_the_answer():
    router = FakeRouter()
    router.capacity = 32
    app = make_app(router)
    assert post(app, COMPLETIONS, {"prompt": "x" * 30}).status == 200
    body = {"messages": [{"role": "user", "content": "yo"}]}
    assert post(app, CHAT, body).status == 200
    assert [request.limits.max_len for request in router.requests] == [32, 32]
    assert get(app, "/v1/models").json()["data"][0]["max_model_len"] == 32
    router.capacity = 10 * CONTEXT_LEN
    assert get(app, "/v1/models").json()["data"][0]["max_model_len"] == CONTEXT_LEN


def test_without_a_chat_template_only_chat_is_refused():
    app = make_app(FakeRouter(), template=None)
    chat_body = {"messages": [{"role": "user", "content": "yo"}]}
    assert_error(post(app, CHAT, chat_body), 400, None, "messages")
    assert post(app, COMPLETIONS, {"prompt": "yo"}).status == 200


def test_fields_that_ask_for_nothing_are_accepted():
    harmless = {
        "n": 1,
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logprobs": False,
        "top_logprobs": None,
        "response_format": {"type": "text"},
        "stream": True,
        "stream_options": {"include_usage": False, "continuous_usage_stats": False},
        "tools": [],
        "something_new": [1, 2],
        "stop": None,
        "seed": None,
    }
    assert chat(FakeRouter(), harmless).status == 200


# ---------------------------------------------------------------- transport of the body


@pytest.mark.parametrize("pieces", [[b"x" * 101], [b"x" * 50] * 3])
def test_a_body_over_the_limit_is_413(pieces):
    async def send_too_much():
        app = make_app(FakeRouter(), max_body_bytes=100)
        connection = Connection(app, "POST", COMPLETIONS, {})
        connection.put_body(*pieces, complete=False)
        return await connection.run()

    reply = asyncio.run(send_too_much())
    assert_error(reply, 413, "request_too_large")
    assert reply.headers["connection"] == "close"


def test_a_body_that_does_not_come_is_408(monkeypatch):
    monkeypatch.setattr(endpoint, "BODY_TIMEOUT_S", 0.005)

    async def send_half():
        app = make_app(FakeRouter())
        connection = Connection(app, "POST", COMPLETIONS, {})
        connection.put_body(b'{"prompt"', complete=False)
        return await connection.run()

    reply = asyncio.run(send_half())
    assert_error(reply, 408, "request_timeout")
    assert reply.headers["connection"] == "close"


def test_a_body_in_pieces_is_put_together():
    async def send_pieces():
        connection = Connection(make_app(FakeRouter()), "POST", COMPLETIONS, {})
        connection.put_body(b'{"pro', b'mpt": "\xc3', b'\xa9"}', b"")
        return await connection.run()

    assert asyncio.run(send_pieces()).json()["usage"]["prompt_tokens"] == 2


# ---------------------------------------------------------------- routes and keys


def test_an_unknown_route_is_404():
    reply = get(make_app(FakeRouter()), "/v1/nothing")
    assert_error(reply, 404, "not_found")
    assert "/v1/nothing" in reply.json()["error"]["message"]


def test_a_wrong_method_is_405():
    reply = get(make_app(FakeRouter()), CHAT)
    assert_error(reply, 405, "method_not_allowed")
    assert reply.headers["allow"] == "OPTIONS, POST"
    assert_error(post(make_app(FakeRouter()), "/health", {}), 405, "method_not_allowed")


@pytest.fixture
def key_pair(tmp_path):
    return key_file(tmp_path / "keys.json", "key-1", "key-2")


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer wrong",
        b"Basic key-2",
        b"Bearer k\xe9y",  # latin-1
        "Bearer kéy-🔑".encode(),
        b"Bearer \xff\xfe",
        b"\xc3\xa9 key-2",
        b"Bearer " + b"k" * 60_000,
        b"key-2",
    ],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", CHAT), ("GET", "/v1/models"), ("GET", "/v1/x"), ("GET", "/x"), ("GET", "//health")],
)
def test_without_a_known_key_the_api_is_401(key_pair, header, method, path):
    app = make_app(FakeRouter(), keys=key_pair)

    async def ask():
        connection = Connection(app, method, path, {})
        connection._scope["headers"] = [(b"authorization", header)] if header else []
        connection.put_body(b"{}")
        return await connection.run()

    assert_error(asyncio.run(ask()), 401, "invalid_api_key")


@pytest.mark.parametrize("header", ["Bearer key-1", "bearer key-2"])
def test_any_of_the_keys_opens(key_pair, header):
    app = make_app(FakeRouter(), keys=key_pair)
    assert post(app, COMPLETIONS, {"prompt": "yo"}, authorization=header).status == 200


def test_probes_need_no_key(key_pair):
    app = make_app(FakeRouter(), keys=key_pair)
    assert [get(app, path).status for path in ("/health", "/ready", "/version")] == [200] * 3


@pytest.mark.parametrize(("may_debug", "status"), [(True, 200), (False, 403)])
def test_only_debug_keys_see_the_load_of_all_tenants(tmp_path, may_debug, status):
    keys = key_file(tmp_path / "keys.json", "key-1", debug=may_debug)
    app = make_app(FakeRouter(), keys=keys)
    assert get(app, "/metrics").status == 401
    assert get(app, "/metrics", authorization="Bearer key-1").status == status
    assert get(app, "/v1/models", authorization="Bearer key-1").status == 200


def test_refused_keys_are_counted(tmp_path):
    app = make_app(FakeRouter(), keys=key_file(tmp_path / "keys.json", "key-1", debug=True))
    assert get(app, "/v1/models").status == 401
    page = get(app, "/metrics", authorization="Bearer key-1").body
    assert b'baton_key_events_total{event="refused"} 1.0' in page


# ---------------------------------------------------------------- refusals by the router


def refused(outcome):
    return [Update(outcome=outcome, timeline=TIMELINE)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("seconds", "header"), [(0.0, "1"), (0.2, "1"), (2.1, "3"), (float("inf"), "3600")]
)
def test_a_rejected_request_is_429_with_retry_after(stream, seconds, header):
    reply = chat(FakeRouter(refused(Rejected("full", seconds))), {"stream": stream})
    assert (reply.status, reply.headers["retry-after"]) == (429, header)
    assert reply.json()["error"] == {
        "message": "full",
        "type": "rate_limit_error",
        "param": None,
        "code": "rate_limit_exceeded",
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("outcome", [Failed("worker lost"), Cancelled()])
def test_a_request_that_fails_before_its_first_token_is_503(stream, outcome):
    reply = chat(FakeRouter([Update(), *refused(outcome)]), {"stream": stream})
    assert (reply.status, reply.headers["retry-after"]) == (503, "1")
    assert reply.json()["error"]["type"] == "server_error"


def test_a_failure_after_tokens_is_503_where_nothing_was_sent():
    reply = chat(FakeRouter([tokens("a"), *refused(Failed("lost"))]))
    assert (reply.status, reply.json()["error"]["message"]) == (503, "lost")


def test_a_request_that_no_worker_can_compute_is_400_and_not_to_be_retried():
    reply = chat(FakeRouter([tokens("a"), *refused(Failed("grammar: too costly", UNFIT))]))
    assert (reply.status, "retry-after" in reply.headers) == (400, False)
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_a_failure_in_a_stream_ends_it_with_an_error_and_no_marker():
    reply = chat(FakeRouter([tokens("a"), *refused(Failed("lost"))]), {"stream": True})
    *chunks, last = reply.events()
    assert reply.status == 200
    assert last == {
        "error": {
            "message": "lost",
            "type": "server_error",
            "param": None,
            "code": "request_failed",
        }
    }
    assert chunks[-1]["choices"][0]["finish_reason"] is None


def test_a_cancelled_stream_just_ends():
    reply = chat(FakeRouter([tokens("a"), *refused(Cancelled())]), {"stream": True})
    assert [event["choices"][0]["finish_reason"] for event in reply.events()] == [None, None]


# ---------------------------------------------------------------- bugs of the product


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_before_the_head_is_500_in_json_and_is_raised_for_the_log(stream):
    router = FakeRouter([RuntimeError("bug")])

    async def ask():
        connection = Connection(make_app(router), "POST", COMPLETIONS, {})
        connection.put_body(b'{"prompt": "yo", "stream": %s}' % str(stream).lower().encode())
        with pytest.raises(ExceptionGroup, match="unhandled"):
            await connection.run()
        return connection.reply

    reply = asyncio.run(ask())
    assert (reply.status, reply.json()["error"]["code"]) == (500, "internal_error")
    assert router.live == 0
