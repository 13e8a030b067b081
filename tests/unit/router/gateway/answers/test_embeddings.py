"""The gateway returns embeddings in the requested form, for models that have embeddings."""

import base64
import struct

import pytest

from engine.embedding import Embedding
from router.gateway.answers.following import MAX_OPEN
from router.gateway.requests.embedding import MAX_INPUTS
from router.machine.requests import Failed, Rejected, Update
from tests.kits.router.embeddings import NUMBERS, app_of, ask, embedded, served
from tests.kits.router.gateway import LENGTH, FakeRouter, make_app, post

MESSAGES = [{"role": "user", "content": "hi"}]


def test_an_input_becomes_the_numbers_of_its_last_token():
    router = FakeRouter([embedded(), Update(outcome=LENGTH)])
    answer = ask(app_of(router), input="abc", model="tiny").json()
    shown = [{"object": "embedding", "index": 0, "embedding": [3.0, 4.0, 12.0]}]
    usage = {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}
    assert (answer["object"], answer["model"], answer["data"]) == ("list", "tiny", shown)
    assert answer["usage"] == usage
    assert answer["id"].startswith("embd-")
    assert answer["created"] > 0
    [request] = router.requests
    assert request.token_ids == tuple(b"abc")
    assert request.limits.max_len == 4
    assert request.request_id.startswith("embd-")


@pytest.mark.parametrize(
    ("inputs", "prompts"),
    [
        ("a", [b"a"]),
        (["a", "bc"], [b"a", b"bc"]),
        ([97, 98], [b"ab"]),
        ([[97], [98, 99]], [b"a", b"bc"]),
    ],
)
def test_inputs_are_texts_or_token_ids_one_or_several(inputs, prompts):
    scripts = [[embedded((float(n),) * 3, outcome=LENGTH)] for n in range(len(prompts))]
    router = FakeRouter(*scripts)
    reply = ask(app_of(router), input=inputs)
    assert [bytes(request.token_ids) for request in router.requests] == prompts
    found = [each["embedding"][0] for each in reply.json()["data"]]
    assert found == [float(n) for n in range(len(prompts))]
    assert reply.json()["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_numbers_come_as_base64_if_asked():
    [shown] = ask(served(), input="a", encoding_format="base64").json()["data"]
    assert struct.unpack("<3f", base64.b64decode(shown["embedding"])) == NUMBERS


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"embed_dtype": "float16"}, "<3e"),
        ({"endianness": "big"}, ">3f"),
        ({"embed_dtype": "float16", "endianness": "big"}, ">3e"),
        ({"embed_dtype": "float32", "endianness": "native"}, "<3f"),
    ],
)
def test_the_bytes_are_as_asked(fields, form):
    [shown] = ask(served(), input="a", encoding_format="base64", **fields).json()["data"]
    assert struct.unpack(form, base64.b64decode(shown["embedding"])) == NUMBERS


def test_messages_are_embedded_as_the_template_writes_them():
    router = FakeRouter([embedded(outcome=LENGTH)])
    said = [*MESSAGES, {"role": "assistant", "content": "yo"}]
    ask(app_of(router), messages=MESSAGES)
    ask(app_of(router), messages=said, continue_final_message=True)
    user, assistant = 258, 259
    assert [request.token_ids for request in router.requests] == [
        (user, *b"hi", assistant),
        (user, *b"hi", assistant, *b"yo"),
    ]


@pytest.mark.parametrize("name", ["normalize", "use_activation"])
def test_numbers_have_length_one_if_the_model_or_the_client_says_so(name):
    unit = pytest.approx([3 / 13, 4 / 13, 12 / 13])
    of_model = Embedding(is_normalized=True, size=3)
    [shown] = ask(served(embedding=of_model), input="a").json()["data"]
    assert shown["embedding"] == unit
    [shown] = ask(served(embedding=of_model), input="a", **{name: False}).json()["data"]
    assert shown["embedding"] == list(NUMBERS)
    [shown] = ask(served(), input="a", **{name: True}).json()["data"]
    assert shown["embedding"] == unit


def test_a_part_is_normalised_by_itself():
    [shown] = ask(served(), input="a", dimensions=2, normalize=True).json()["data"]
    assert shown["embedding"] == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize("numbers", [(0.0, 0.0, 0.0), (3e38, 3e38, 3e38)])
def test_no_length_is_too_small_or_too_large(numbers):
    app = app_of(FakeRouter([embedded(numbers, outcome=LENGTH)]))
    reply = ask(app, input="a", normalize=True)
    [shown] = reply.json()["data"]
    assert sum(x * x for x in shown["embedding"]) == pytest.approx(1.0 if numbers[0] else 0.0)


def test_numbers_that_are_none_are_an_error():
    app = app_of(FakeRouter([embedded((1.0, float("nan"), 0.0), outcome=LENGTH)]))
    reply = ask(app, input="a")
    assert (reply.status, reply.json()["error"]["code"]) == (503, "request_failed")


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": ""}, "input", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({}, "input", "invalid_value"),
        ({"input": ["a", ""]}, "input[1]", "invalid_value"),
        ({"input": ["a", 1]}, "input", "invalid_value"),
        ({"input": [10**6]}, "input", "invalid_value"),
        ({"input": "a" * 65}, "input", "context_length_exceeded"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input", "invalid_value"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "invalid_value"),
        ({"input": "a", "dimensions": 0}, "dimensions", "invalid_value"),
        ({"input": "a", "dimensions": 4}, "dimensions", "invalid_value"),
        ({"input": "a", "stream": True}, "stream", "unsupported_parameter"),
        ({"input": "a", "temperature": 1.0}, "temperature", "unsupported_parameter"),
        ({"input": "a", "messages": MESSAGES}, "input", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"input": "a", "tools": [1]}, "tools", "unsupported_parameter"),
        ({"input": "a", "embed_dtype": "bfloat16"}, "embed_dtype", "invalid_value"),
        ({"input": "a", "endianness": "odd"}, "endianness", "invalid_value"),
        ({"input": "a", "truncate_prompt_tokens": 65}, "truncate_prompt_tokens", "invalid_value"),
    ],
)
def test_a_wrong_field_is_named(fields, param, code):
    reply = ask(served(), **fields)
    assert reply.status == 400
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (param, code)


def test_dimensions_need_a_model_that_was_trained_so():
    reply = ask(served(embedding=Embedding(is_normalized=True, size=3)), input="a", dimensions=2)
    assert "is_matryoshka" in reply.json()["error"]["message"]


def test_an_input_is_cut_if_asked():
    router = FakeRouter([embedded(outcome=LENGTH)])
    reply = ask(app_of(router), input="a" * 60 + "b" * 60, truncate_prompt_tokens=-1)
    assert reply.status == 200
    [request] = router.requests
    assert bytes(request.token_ids) == b"aaa" + b"b" * 60


def test_unknown_fields_are_reported():
    reply = ask(served(), input="a", whim=1)
    assert reply.headers["x-baton-ignored"] == "whim"


def test_many_inputs_wait_for_room():
    router = FakeRouter([embedded(outcome=LENGTH)])
    most = 0
    submit = router.submit

    def counted(*arguments):
        nonlocal most
        most = max(most, router.live)
        return submit(*arguments)

    router.submit = counted
    reply = ask(app_of(router), input=["a"] * MAX_INPUTS)
    assert len(reply.json()["data"]) == MAX_INPUTS
    assert most <= MAX_OPEN


@pytest.mark.parametrize(
    ("outcome", "status"), [(Rejected("full", 2.0), 429), (Failed("it died"), 503)]
)
def test_one_that_fails_fails_the_call(outcome, status):
    router = FakeRouter([embedded(outcome=LENGTH)], [Update(outcome=outcome)])
    assert ask(app_of(router), input=["a", "b"]).status == status


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_a_model_of_embeddings_gives_no_text(path):
    messages = [{"role": "user", "content": "hi"}]
    body = {"/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "a"}}
    reply = post(served(), path, body.get(path, {"messages": messages}))
    assert reply.status == 404
    assert "/v1/embeddings" in reply.json()["error"]["message"]


def test_a_model_of_text_gives_no_embeddings():
    reply = ask(make_app(FakeRouter()), input="a")
    error = reply.json()["error"]
    assert (reply.status, error["param"], error["code"]) == (404, "model", "model_not_supported")


def test_invocations_find_the_endpoint_by_the_body():
    for body in ({"input": "a"}, {"messages": MESSAGES}):
        assert post(served(), "/invocations", body).json()["object"] == "list"


def test_a_model_of_embeddings_counts_tokens():
    reply = post(served(), "/tokenize", {"prompt": "abc"})
    assert reply.json()["count"] == 3
