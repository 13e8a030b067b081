"""Log-probabilities in answers: their shapes; each entry stays with the text of its token."""

import math

import pytest

from engine.messages import Logprobs
from router.gateway.answers.whole import SHORT_ENTRIES
from router.machine.requests import Update
from tests.kits.router.gateway import (
    EOS,
    LENGTH,
    STOP,
    FakeRouter,
    Never,
    chat,
    complete,
    make_app,
    post,
    tokens,
)

EURO = "€".encode()


def lp(logprob: float, *top: tuple[str | int, float], rank: int = 1) -> Logprobs:
    """Returns the log-probabilities of a token and of the top tokens, named by letter or id."""
    ids = tuple(ord(t) if isinstance(t, str) else t for t, _ in top)
    return Logprobs(logprob, rank, ids, tuple(p for _, p in top))


def say(*scored: tuple[int | str, float], **rest) -> Update:
    """Returns an update of tokens with their log-probabilities."""
    ids = tuple(ord(t) if isinstance(t, str) else t for t, _ in scored)
    return Update(token_ids=ids, logprobs=tuple(lp(p) for _, p in scored), **rest)


def contents(events):
    """Returns the log-probability items of a chat's stream, by chunk."""
    choices = [c for e in events[:-1] for c in e["choices"] if c["logprobs"] is not None]
    return [[(t["token"], t["logprob"]) for t in c["logprobs"]["content"]] for c in choices]


def chat_items(reply):
    [choice] = reply.json()["choices"]
    return [(t["token"], t["logprob"]) for t in choice["logprobs"]["content"]]


# ---------------------------------------------------------------- shapes


def test_a_chat_answer_has_an_item_for_each_token_with_the_likeliest_beside():
    scores = (lp(-0.5, ("h", -0.5), ("x", -1.5)), lp(-9.0, ("y", -0.1), ("z", -2.0), rank=7))
    router = FakeRouter([tokens("hi", logprobs=scores, outcome=LENGTH)])
    [choice] = chat(router, {"logprobs": True, "top_logprobs": 2}).json()["choices"]
    assert router.requests[0].sampling.logprobs == 2
    assert choice["logprobs"] == {
        "refusal": None,
        "content": [
            {
                "token": "h",
                "logprob": -0.5,
                "bytes": [104],
                "top_logprobs": [
                    {"token": "h", "logprob": -0.5, "bytes": [104]},
                    {"token": "x", "logprob": -1.5, "bytes": [120]},
                ],
            },
            {
                "token": "i",
                "logprob": -9.0,
                "bytes": [105],
                "top_logprobs": [
                    {"token": "y", "logprob": -0.1, "bytes": [121]},
                    {"token": "z", "logprob": -2.0, "bytes": [122]},
                ],
            },
        ],
    }


def test_lists_of_a_completion_always_have_the_chosen_token():
    scores = (lp(-0.5, ("h", -0.5)), lp(-9.0, ("y", -0.1), rank=7))
    router = FakeRouter([tokens("hi", logprobs=scores, outcome=LENGTH)])
    [choice] = complete(router, {"logprobs": 1}).json()["choices"]
    assert choice["logprobs"] == {
        "tokens": ["h", "i"],
        "token_logprobs": [-0.5, -9.0],
        "top_logprobs": [{"h": -0.5}, {"y": -0.1, "i": -9.0}],
        "text_offset": [0, 1],
    }


def test_without_top_logprobs_only_chosen_tokens_are_listed():
    router = FakeRouter([say(("h", -0.5), outcome=LENGTH)])
    assert chat_items(chat(router, {"logprobs": True})) == [("h", -0.5)]
    assert router.requests[0].sampling.logprobs == 0


@pytest.mark.parametrize("fields", [{}, {"logprobs": False}, {"logprobs": None}])
@pytest.mark.parametrize("ask", [chat, complete])
def test_without_the_field_no_log_probabilities_are_sent(ask, fields):
    router = FakeRouter()
    assert ask(router, fields).json()["choices"][0]["logprobs"] is None
    assert router.requests[0].sampling.logprobs is None


def test_an_impossible_token_has_the_smallest_number_that_json_can_say():
    router = FakeRouter([say(("h", -math.inf), outcome=LENGTH)])
    assert chat_items(chat(router, {"logprobs": True})) == [("h", -9999.0)]


def test_the_bytes_of_half_a_character_are_exact():
    router = FakeRouter([say(*((byte, -1.0) for byte in EURO), outcome=LENGTH)])
    [choice] = chat(router, {"logprobs": True}).json()["choices"]
    items = choice["logprobs"]["content"]
    assert bytes(byte for item in items for byte in item["bytes"]) == EURO
    assert choice["message"]["content"] == "€"


def test_a_completion_spells_bytes_that_are_no_text_and_counts_characters():
    scored = [("a", -1.0), *((byte, -1.0) for byte in EURO), ("b", -1.0)]
    router = FakeRouter([say(*scored, outcome=LENGTH)])
    [choice] = complete(router, {"logprobs": 0}).json()["choices"]
    names = ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b"]
    assert choice["logprobs"]["tokens"] == names
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 2]
    assert choice["text"] == "a€b"


def test_the_token_that_ends_an_answer_has_no_item():
    router = FakeRouter([say(("h", -0.5)), say((EOS, -0.1), outcome=STOP)])
    assert chat_items(chat(router, {"logprobs": True})) == [("h", -0.5)]


@pytest.mark.parametrize("stop", [None, "i"])
def test_every_token_of_a_completion_has_its_scores_even_if_it_is_not_shown(stop):
    router = FakeRouter([say(("h", -0.5), ("i", -0.7)), say((EOS, -0.1), outcome=STOP)])
    [choice] = complete(router, {"logprobs": 0, "stop": stop}).json()["choices"]
    assert choice["text"] == ("hi" if stop is None else "h")
    names = ["h", "i", "<|eos|>"] if stop is None else ["h", "i"]
    assert choice["logprobs"]["tokens"] == names


def test_scores_of_a_chat_go_with_its_token_ids():
    router = FakeRouter([say(("h", -0.5)), say((EOS, -0.1), outcome=STOP)])
    body = chat(router, {"logprobs": True, "return_token_ids": True}).json()
    [choice] = body["choices"]
    assert choice["token_ids"] == [ord("h"), EOS]
    assert [item["token"] for item in choice["logprobs"]["content"]] == ["h", "<|eos|>"]


@pytest.mark.parametrize("ask", [chat, complete])
def test_tokens_are_named_by_their_ids_when_asked_for(ask):
    scores = (lp(-0.5, ("x", -0.25)),)
    router = FakeRouter([tokens("h", logprobs=scores, outcome=LENGTH)])
    fields = {"return_tokens_as_token_ids": True, "logprobs": 1}
    if ask is chat:
        fields |= {"logprobs": True, "top_logprobs": 1}
    [choice] = ask(router, fields).json()["choices"]
    if ask is chat:
        [item] = choice["logprobs"]["content"]
        assert (item["token"], item["bytes"]) == ("token_id:104", [104])
        assert item["top_logprobs"][0]["token"] == "token_id:120"
    else:
        assert choice["logprobs"]["tokens"] == ["token_id:104"]
        assert choice["logprobs"]["top_logprobs"] == [{"token_id:120": -0.25, "token_id:104": -0.5}]


def test_a_stop_token_that_is_shown_has_its_scores():
    router = FakeRouter([say(("h", -0.5), ("!", -0.7), outcome=STOP)])
    fields = {"logprobs": True, "stop_token_ids": [ord("!")], "include_stop_str_in_output": True}
    reply = chat(router, fields)
    assert reply.json()["choices"][0]["message"]["content"] == "h!"
    assert chat_items(reply) == [("h", -0.5), ("!", -0.7)]


def test_special_tokens_that_end_nothing_have_their_name():
    router = FakeRouter([say((258, -0.5), outcome=LENGTH)])
    assert chat_items(chat(router, {"logprobs": True})) == [("<|user|>", -0.5)]


# ---------------------------------------------------------------- streams


def test_log_probabilities_of_a_stream_come_with_their_text():
    script = [say(("a", -1.0)), say(("b", -2.0), ("c", -3.0)), say((EOS, -1.0), outcome=STOP)]
    events = chat(FakeRouter(script), {"logprobs": True, "stream": True}).events()
    assert contents(events) == [[("a", -1.0)], [("b", -2.0), ("c", -3.0)]]


def test_log_probabilities_of_half_a_character_wait_for_its_end():
    script = [say((byte, -float(i))) for i, byte in enumerate(EURO)]
    script.append(say(("x", -9.0), outcome=LENGTH))
    events = chat(FakeRouter(script), {"logprobs": True, "stream": True}).events()
    assert [[p for _, p in chunk] for chunk in contents(events)] == [[0.0, -1.0, -2.0], [-9.0]]


def test_log_probabilities_are_held_back_with_their_text():
    script = [say(("a", -1.0)), say(("<", -2.0)), say(("b", -3.0), outcome=LENGTH)]
    fields = {"logprobs": True, "stream": True, "stop": "<end>"}
    events = chat(FakeRouter(script), fields).events()
    assert contents(events) == [[("a", -1.0)], [("<", -2.0), ("b", -3.0)]]


@pytest.mark.parametrize("stream", [False, True])
def test_entries_of_text_cut_by_a_stop_string_are_dropped(stream):
    script = [say(("a", -1.0)), say(("E", -2.0)), say(("N", -3.0), ("x", -4.0)), Never()]
    reply = chat(FakeRouter(script), {"logprobs": True, "stream": stream, "stop": "EN"})
    if stream:
        assert contents(reply.events()) == [[("a", -1.0)]]
    else:
        assert chat_items(reply) == [("a", -1.0)]


# ---------------------------------------------------------------- prompt log-probabilities


def prompt_scored(*scores: Logprobs) -> FakeRouter:
    return FakeRouter([say(("!", -1.0), outcome=LENGTH, prompt_logprobs=scores)])


YO = lp(-4.0, ("x", -0.5), ("p", -1.5), rank=9)


def test_log_probabilities_of_the_prompt_have_vllms_form():
    router = prompt_scored(YO)
    [choice] = complete(router, {"prompt_logprobs": 1}).json()["choices"]
    assert router.requests[0].prompt_logprobs == 1
    assert choice["prompt_logprobs"] == [
        None,
        {
            "111": {"logprob": -4.0, "rank": 9, "decoded_token": "o"},
            "120": {"logprob": -0.5, "rank": 1, "decoded_token": "x"},
        },
    ]


def test_a_chat_has_the_prompts_log_probabilities_once():
    body = chat(prompt_scored(YO, YO, YO), {"prompt_logprobs": 0, "n": 1}).json()
    assert body["prompt_logprobs"][0] is None
    assert [list(item) for item in body["prompt_logprobs"][1:]] == [["121"], ["111"], ["259"]]
    assert "prompt_logprobs" not in body["choices"][0]


def test_a_long_prompt_has_the_same_log_probabilities_as_a_short_one():
    num_tokens = 20 * SHORT_ENTRIES
    app = make_app(prompt_scored(*[YO] * (num_tokens - 1)), context_len=2 * num_tokens)
    fields = {"prompt": [5] * num_tokens, "prompt_logprobs": 2}
    [choice] = post(app, "/v1/completions", fields).json()["choices"]
    assert len(choice["prompt_logprobs"]) == num_tokens
    assert [list(item) for item in choice["prompt_logprobs"][1:]] == [["5", "120", "112"]] * (
        num_tokens - 1
    )


def test_a_prompt_of_one_token_has_nothing_to_tell():
    [choice] = complete(prompt_scored(), {"prompt": [5], "prompt_logprobs": 0}).json()["choices"]
    assert choice["prompt_logprobs"] == [None]


# ---------------------------------------------------------------- echo


@pytest.mark.parametrize(("prompt", "echoed"), [("yo", "yo"), ([258, 104, 105], "hi")])
def test_echo_puts_the_prompt_before_every_choice(prompt, echoed):
    fields = {"echo": True, "prompt": prompt, "n": 2}
    body = complete(FakeRouter(), fields).json()
    assert [c["text"] for c in body["choices"]] == [f"{echoed}hi"] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_the_message_that_a_chat_goes_on_from_has_no_scores(stream):
    messages = [{"role": "user", "content": "yo"}, {"role": "assistant", "content": "so"}]
    fields = {"messages": messages, "continue_final_message": True, "echo": True}
    fields |= {"logprobs": True, "n": 2, "stream": stream}
    reply = chat(FakeRouter([say(("h", -0.5), outcome=LENGTH)]), fields)
    assert reply.status == 200
    if stream:
        assert contents(reply.events()) == [[("h", -0.5)]] * 2
        return
    for choice in reply.json()["choices"]:
        assert choice["message"]["content"] == "soh"
        assert [item["token"] for item in choice["logprobs"]["content"]] == ["h"]


def test_an_echo_is_scored_like_the_answer_after_it():
    router = prompt_scored(YO)
    [choice] = complete(router, {"echo": True, "logprobs": 1}).json()["choices"]
    assert router.requests[0].prompt_logprobs == 1
    assert choice["text"] == "yo!"
    assert choice["logprobs"] == {
        "tokens": ["y", "o", "!"],
        "token_logprobs": [None, -4.0, -1.0],
        "top_logprobs": [None, {"x": -0.5, "o": -4.0}, {"!": -1.0}],
        "text_offset": [0, 1, 2],
    }
    assert choice["prompt_logprobs"] is None


def test_a_prompt_can_be_scored_without_an_answer():
    router = prompt_scored(YO)
    fields = {"echo": True, "logprobs": 1, "max_tokens": 0}
    body = complete(router, fields).json()
    [choice] = body["choices"]
    # workers sample one token, which the gateway drops
    assert router.requests[0].limits.max_len == 3
    assert (choice["text"], choice["finish_reason"]) == ("yo", "length")
    assert choice["logprobs"]["tokens"] == ["y", "o"]
    assert choice["logprobs"]["token_logprobs"] == [None, -4.0]
    assert body["usage"]["completion_tokens"] == 0


# ---------------------------------------------------------------- penalties and biases


def test_penalties_and_biases_are_taken_over():
    fields = {
        "presence_penalty": -2,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.3,
        "logit_bias": {"5": 100, "07": -2.5},
    }
    router = FakeRouter()
    assert complete(router, fields).status == 200
    sampling = router.requests[0].sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-2.0, 0.5)
    assert sampling.repetition_penalty == 1.3
    assert sampling.logit_bias == ((5, 100.0), (7, -2.5))
