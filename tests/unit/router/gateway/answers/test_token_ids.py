"""Token ids of prompts and answers, and the stop that ended an answer."""

import pytest

from engine.messages import Logprobs
from router.machine.requests import Update
from tests.kits.router.gateway import (
    EOS,
    STOP,
    FakeRouter,
    Never,
    answer,
    chat,
    complete,
    tokens,
)

IDS = {"return_token_ids": True}


def test_a_completion_has_the_ids_of_each_prompt_and_answer():
    router = FakeRouter(answer("a"), answer("b"))
    choices = complete(router, {**IDS, "prompt": ["yo", "x"]}).json()["choices"]
    assert [c["prompt_token_ids"] for c in choices] == [[121, 111], [120]]
    assert [c["token_ids"] for c in choices] == [[97, EOS], [98, EOS]]


def test_a_chat_has_the_ids_of_its_prompt_once():
    router = FakeRouter(answer("a"), answer("b"))
    body = chat(router, {**IDS, "n": 2}).json()
    assert body["prompt_token_ids"] == [258, 121, 111, 259]
    assert [c["token_ids"] for c in body["choices"]] == [[97, EOS], [98, EOS]]


@pytest.mark.parametrize("ask", [chat, complete])
def test_without_the_field_ids_are_null(ask):
    body = ask(FakeRouter()).json()
    [choice] = body["choices"]
    assert choice["token_ids"] is None
    place = body if ask is chat else choice
    assert (place["prompt_token_ids"], place["prompt_logprobs"]) == (None, None)


@pytest.mark.parametrize("ask", [chat, complete])
def test_without_the_field_streams_have_no_ids(ask):
    *chunks, _ = ask(FakeRouter(), {"stream": True}).events()
    assert not any("prompt_token_ids" in {**c, **c["choices"][0]} for c in chunks)
    assert not any("token_ids" in c["choices"][0] for c in chunks)


def test_only_the_first_chunk_of_a_stream_has_the_prompt():
    first, *chunks, _ = complete(FakeRouter(answer("hi")), {**IDS, "stream": True}).events()
    assert first["choices"][0]["prompt_token_ids"] == [121, 111]
    assert not any("prompt_token_ids" in chunk["choices"][0] for chunk in chunks)
    ids = [chunk["choices"][0]["token_ids"] for chunk in (first, *chunks)]
    assert ids == [[104], [105], [EOS]]


def test_every_chunk_has_the_scores_of_its_ids():
    script = [
        Update((104,), logprobs=(Logprobs(-1.0, 1),)),
        Update((EOS,), logprobs=(Logprobs(-2.0, 1),), outcome=STOP),
    ]
    fields = {**IDS, "stream": True, "logprobs": 0, "return_tokens_as_token_ids": True}
    *chunks, _ = complete(FakeRouter(script), fields).events()
    for chunk in chunks:
        [choice] = chunk["choices"]
        names = [f"token_id:{token_id}" for token_id in choice["token_ids"]]
        assert choice["logprobs"]["tokens"] == names


def test_the_first_chunk_of_a_chat_has_the_prompt():
    first, *chunks, _ = chat(FakeRouter(answer("hi")), {**IDS, "stream": True}).events()
    assert first["prompt_token_ids"] == [258, 121, 111, 259]
    assert not any("prompt_token_ids" in chunk for chunk in chunks)


def test_ids_of_held_text_come_at_once_and_those_behind_a_stop_string_never():
    script = [tokens("aE"), tokens("Nxx"), Never()]
    *chunks, _ = complete(FakeRouter(script), {**IDS, "stream": True, "stop": "EN"}).events()
    ids = [chunk["choices"][0]["token_ids"] for chunk in chunks]
    assert ids == [[97, 69], [78]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "fields", "reason"),
    [
        (answer("a"), {}, None),
        (answer("a"), {"stop_token_ids": [EOS]}, None),
        (answer("a"), {"stop_token_ids": [EOS], "ignore_eos": True}, EOS),
        ([tokens("ab", outcome=STOP)], {"stop_token_ids": [98, 99]}, 98),
        ([tokens("a"), Update(outcome=STOP)], {"stop_token_ids": [97]}, 97),
        ([tokens("aEND"), Never()], {"stop": ["x", "END"]}, "END"),
        ([tokens("aENDS"), Never()], {"stop": ["END", "ND", "S"]}, "END"),
    ],
)
@pytest.mark.parametrize("ask", [chat, complete])
def test_the_reason_of_a_stop_is_the_clients_own_string_or_token(
    ask, script, fields, reason, stream
):
    reply = ask(FakeRouter(script), {**fields, "stream": stream})
    [choice] = reply.events()[-2]["choices"] if stream else reply.json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)
