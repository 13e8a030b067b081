"""Each field of a request is honoured, refused by name, or ignored with a warning."""

import msgspec
import pytest

from engine.grammar.tokens import TokenRules, rules_of
from router.gateway.requests import field_table
from router.gateway.requests.body import MAX_BEAM_TOKENS, Body, shortened
from router.gateway.requests.chat import ChatBody, ChatMessage
from router.gateway.requests.completion import CompletionBody
from router.gateway.requests.embedding import EmbeddingBody
from router.gateway.requests.field_table import (
    HARMLESS,
    HONOURED,
    PLACES,
    REFUSED,
    refused_by,
)
from router.gateway.requests.json_fields import SHORT_BODY_BYTES
from router.gateway.requests.parameters import limits_of, sampling_of, token_grammar
from router.text.checkpoint_files import SamplingDefaults
from router.text.structured import FIELDS as STRUCTURE_FIELDS
from router.text.structured import Structure
from router.text.tokenizer import LONGEST_CUT, TextModel
from tests.kits.router.embeddings import ask, served
from tests.kits.router.gateway import (
    CONTEXT_LEN,
    EOS,
    TOKENIZER,
    FakeRouter,
    chat,
    complete,
    make_app,
    post,
    text_model,
    tokens,
)
from tests.kits.tree.compat import like
from tests.kits.tree.documents import ROOT

ENDPOINTS = {ChatBody: "chat", CompletionBody: "completions", EmbeddingBody: "embeddings"}


def embed(_, fields):
    return ask(served(), **{"input": "a", **fields})


def asked(endpoint, fields):
    router = FakeRouter()
    reply = endpoint(router, fields)
    assert reply.status == 200, reply.json()
    return router.requests[0]


# ---------------------------------------------------------------- table of fields


def test_the_document_shows_the_table():
    text = (ROOT / "docs/users/api.md").read_text()
    assert field_table.fill_in(text) == text, (
        "run `python -m router.gateway.requests.field_table docs/users/api.md`"
    )


def test_a_document_without_marks_is_refused():
    with pytest.raises(ValueError, match="no marks"):
        field_table.fill_in("<!-- fields --> only")


@pytest.mark.parametrize("body_type", ENDPOINTS)
def test_the_table_has_the_fields_of_the_bodies(body_type):
    fields = {*body_type.__struct_fields__, *STRUCTURE_FIELDS, "parallel_tool_calls"}
    if body_type is CompletionBody:
        fields -= {"tools", "tool_choice", "parallel_tool_calls"}
    endpoint = ENDPOINTS[body_type]
    if body_type is EmbeddingBody:  # the body inherits fields of answers, which are all refused
        fields -= refused_by(endpoint).keys()
    assert {f.name for f in HONOURED if f.endpoint in PLACES[endpoint]} == fields


def test_no_field_has_two_fates():
    for endpoint in ENDPOINTS.values():
        honoured = [f.name for f in HONOURED if f.endpoint in PLACES[endpoint]]
        refused = [f.name for f in REFUSED if f.endpoint in PLACES[endpoint]]
        names = [*honoured, *refused, *(f.name for f in HARMLESS)]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("field", REFUSED, ids=lambda field: f"{field.endpoint}-{field.name}")
def test_a_refused_field_is_named_with_its_value_and_harmless_values_pass(field):
    endpoints = {
        "chat": [chat],
        "completions": [complete],
        "both": [chat, complete],
        "embeddings": [embed],
    }
    for endpoint in endpoints[field.endpoint]:
        reply = endpoint(FakeRouter(), {field.name: "a value"})
        error = reply.json()["error"]
        assert (reply.status, error["code"]) == (400, "unsupported_parameter")
        assert error["param"] == field.name
        assert '"a value"' in error["message"]
        for value in (None, *field.harmless):
            assert endpoint(FakeRouter(), {field.name: value}).status == 200


@pytest.mark.parametrize("field", HARMLESS, ids=lambda field: field.name)
def test_a_harmless_field_passes_with_any_value(field):
    for value in (None, False, "x", {"a": [1]}, 7):
        reply = chat(FakeRouter(), {field.name: value})
        assert reply.status == 200
        assert "x-baton-ignored" not in reply.headers


def test_a_field_of_the_other_endpoint_is_refused():
    for endpoint, name in ((chat, "prompt"), (complete, "messages")):
        reply = endpoint(FakeRouter(), {name: "x"})
        assert (reply.status, reply.json()["error"]["param"]) == (400, name)


# ---------------------------------------------------------------- unknown names


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_names_are_told_in_a_header(stream):
    reply = chat(FakeRouter(), {"stream": stream, "colour": 1, "x\r\ny,z": 2})
    assert reply.headers["x-baton-ignored"] == "colour, x??y?z"


def test_at_most_sixteen_names_are_told_each_cut():
    reply = complete(FakeRouter(), {f"{i}" + "n" * 100: None for i in range(50)})
    names = reply.headers["x-baton-ignored"].split(", ")
    assert len(names) == 16
    assert all(len(name) == 64 for name in names)


def test_the_first_unknown_name_of_a_long_body_is_reported():
    padding = "x" * SHORT_BODY_BYTES
    body = {"prompt": "yo", "first`one": 1, "second": padding}
    reply = post(make_app(FakeRouter()), "/v1/completions", body)
    assert reply.headers["x-baton-ignored"] == "first?one"
    body = {"prompt": "yo", "metadata": padding}
    reply = post(make_app(FakeRouter()), "/v1/completions", body)
    assert (reply.status, "x-baton-ignored" in reply.headers) == (200, False)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("temperature", 3.5, "it is 3.5"),
        ("stop", ["a", 5], "it is 5"),
        ("top_k", "many", 'it is "many"'),
        ("seed", 2**70, f"it is {2**70}"),
        ("user", "u" * 600, "it is " + '"' + "u" * 59 + "…"),
        ("stream_options", {"include_usage": 3}, "it is 3"),
    ],
)
def test_an_error_names_the_field_and_the_value(field, value, shown):
    error = complete(FakeRouter(), {field: value, "stream": True}).json()["error"]
    assert error["param"].startswith(field)
    assert shown in error["message"]


def test_values_are_shown_short():
    for value in ("x" * 10**6, ["x" * 100] * 50, {"a": "x" * 10**6}, [1] * 10**6):
        assert len(shortened(value)) <= 61


@like(
    "sglang",
    "openai_server/validation/test_request_length_validation.py",
    "test_input_length_longer_than_context_length",
    "test_input_length_longer_than_maximum_allowed_length",
    "test_max_tokens_validation",
)
@pytest.mark.parametrize("asked_for", [{"prompt": "x" * CONTEXT_LEN}, {"max_tokens": 63}])
def test_an_overflow_is_reported_in_words_that_clients_know(asked_for):
    error = complete(FakeRouter(), asked_for).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert f"maximum context length is {CONTEXT_LEN} tokens" in error["message"]


# ---------------------------------------------------------------- fields of prompts


def prompt_of(fields):
    return bytes(i for i in asked(chat, fields).token_ids if i < 256).decode()


def test_a_prompt_is_cut_on_either_side():
    ids = list(range(10))
    cases = {
        (4, None): ids[-4:],
        (4, "left"): ids[-4:],
        (4, "right"): ids[:4],
        (40, "left"): ids,
    }
    for (most, side), kept in cases.items():
        fields = {"prompt": ids, "truncate_prompt_tokens": most, "truncation_side": side}
        assert list(asked(complete, fields).token_ids) == kept


def test_a_prompt_is_cut_to_what_the_context_allows():
    fields = {"prompt": "x" * 500, "truncate_prompt_tokens": -1, "max_tokens": 10}
    assert len(asked(complete, fields).token_ids) == CONTEXT_LEN - 10
    messages = [{"role": "user", "content": "x" * 500}]
    request = asked(chat, {"messages": messages, "truncate_prompt_tokens": 8, "max_tokens": 1})
    assert len(request.token_ids) == 8


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("most", [-1, 8])
def test_a_text_to_be_cut_may_not_have_any_length(most, side):
    fields = {"truncate_prompt_tokens": most, "truncation_side": side}
    long = "x" * (LONGEST_CUT + 1)
    for asks, prompt in (
        (complete, {"prompt": long}),
        (chat, {"messages": [{"role": "user", "content": long}]}),
    ):
        reply = asks(FakeRouter(), {**fields, **prompt})
        assert reply.status == 400
        assert f"at most {LONGEST_CUT} are" in reply.json()["error"]["message"]


def test_an_echo_is_the_prompt_as_it_was_cut():
    fields = {"prompt": "abcdef", "truncate_prompt_tokens": 2, "echo": True}
    assert complete(FakeRouter(), fields).json()["choices"][0]["text"] == "efhi"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 5, "suffix": "x"}, "truncate_prompt_tokens"),
        ({"echo": True, "suffix": "x"}, "echo"),
        ({"suffix": "x"}, "suffix"),  # the test tokenizer has no tokens for suffixes
    ],
)
def test_a_prompt_that_cannot_be_made_is_refused(fields, param):
    reply = complete(FakeRouter(), fields)
    assert (reply.status, reply.json()["error"]["param"]) == (400, param)


def test_the_final_message_is_continued_and_may_come_first():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "so I"}]
    fields = {"messages": messages, "continue_final_message": True}
    assert prompt_of(fields).endswith("so I")
    for echo, content in ((False, "hi"), (True, "so Ihi")):
        reply = chat(FakeRouter(), {**fields, "echo": echo})
        assert reply.json()["choices"][0]["message"]["content"] == content
        events = chat(FakeRouter(), {**fields, "echo": echo, "stream": True}).events()
        deltas = [event["choices"][0]["delta"] for event in events[:-1]]
        assert "".join(delta.get("content", "") for delta in deltas) == content


@pytest.mark.parametrize(
    ("send", "fields", "field"),
    [
        (complete, {"temprature": 0.1, "max_tokens": 0}, "temperature"),
        (complete, {"max_tokns": 5, "prompt": ""}, "max_tokens"),
        (complete, {"maxTokens": 5, "top_p": 7}, "max_tokens"),
        (chat, {"mesages": [], "messages": []}, "messages"),
        (chat, {"reasoning_efort": "low", "n": 99}, "reasoning_effort"),
        (chat, {"max_tokns": 5, "guided_regex": "("}, "max_tokens"),
        (embed, {"dimension": 2, "dimensions": 999}, "dimensions"),
    ],
)
def test_an_error_asks_whether_a_misspelt_field_was_meant(send, fields, field):
    (wrong, *_) = fields
    reply = send(FakeRouter(), fields)
    assert reply.status == 400
    message = reply.json()["error"]["message"]
    assert message.endswith(f"({wrong} is not a field: did you mean {field}?)")


def test_an_error_asks_nothing_of_fields_that_are_like_no_other():
    message = complete(FakeRouter(), {"colour": 1, "prompt": ""}).json()["error"]["message"]
    assert "did you mean" not in message


def test_the_log_names_fields_without_effect_once_in_a_while(caplog):
    router = FakeRouter()
    app = make_app(router)
    for _ in range(3):
        post(app, "/v1/completions", {"prompt": "a", "max_tokns": 5, "colour": 1})
    [line] = [r.getMessage() for r in caplog.records if "have no effect" in r.getMessage()]
    assert line.endswith("max_tokns, colour (max_tokns is not a field: did you mean max_tokens?)")


@pytest.mark.parametrize(
    ("body", "of_model", "num_tokens"),
    [
        (CompletionBody(), None, 16),
        (CompletionBody(), 20, 20),
        (CompletionBody(max_tokens=3), 20, 3),
        (CompletionBody(use_beam_search=True), 5000, MAX_BEAM_TOKENS),
        (ChatBody(), None, 9000),
        (ChatBody(), 20, 20),
        (ChatBody(), 10_000, 9000),
        (ChatBody(max_completion_tokens=3), 20, 3),
    ],
)
def test_the_models_own_length_counts_if_the_client_says_none(body, of_model, num_tokens):
    limits = limits_of(
        body,
        prompt_len=1,
        context_len=9001,
        model_max_tokens=of_model,
        stop_token_ids=(),
    )
    assert limits.max_len == 1 + num_tokens


def test_a_refusal_of_the_assistant_is_a_text_of_the_history():
    said = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    for message in (said, {"role": "assistant", "refusal": "no"}):
        assert prompt_of({"messages": [message]}) == "no"
    both = [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "no"}]
    assert prompt_of({"messages": [{"role": "assistant", "content": both}]}) == "a\nno"
    long = [{"role": "user", "content": "x" * 40} for _ in range(2000)]
    body = {
        "messages": [*long, {"role": "assistant", "refusal": "no"}],
        "truncate_prompt_tokens": 3,
    }
    assert prompt_of(body) == "no"


@pytest.mark.parametrize("final", ["def f(x):\n    ", " so", "", "  "])
def test_the_blanks_of_a_final_message_are_kept_and_shown(final):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": final}]
    fields = {"messages": messages, "continue_final_message": True, "echo": True}
    assert prompt_of(fields) == f"a{final}"  # the prompt has no special tokens
    reply = chat(FakeRouter(), fields).json()
    assert reply["choices"][0]["message"]["content"] == f"{final}hi"


def test_a_final_message_without_content_is_not_continued():
    messages = [{"role": "assistant", "content": None}]
    reply = chat(FakeRouter(), {"messages": messages, "continue_final_message": True})
    assert (reply.status, reply.json()["error"]["param"]) == (400, "continue_final_message")


OF_ITEMS = (
    "{% for m in messages %}{{ m.content + '.' }}{% for c in m.tool_calls or [] %}"
    "{% for k, v in c.function.arguments|items %}{{ k }}={{ v }}{% endfor %}{% endfor %}"
    "{% endfor %}"
)


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
@pytest.mark.parametrize(
    ("arguments", "written"),
    [('{"a": 1}', "a=1"), *((each, "") for each in ("", None, '{"a": ', "[1]", [1], 5, "5"))],
)
def test_a_history_may_hold_any_arguments(arguments, content, written, long):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    fields = {"messages": [{"role": "assistant", "tool_calls": [call], **content}]}
    if long:  # fields of long bodies are decoded one by one
        fields["metadata"] = {"x": "x" * SHORT_BODY_BYTES}
    router = FakeRouter()
    reply = post(make_app(router, template=OF_ITEMS), "/v1/chat/completions", fields)
    assert reply.status == 200
    assert bytes(router.requests[0].token_ids).decode() == f".{written}"


def test_an_empty_list_of_calls_counts_as_absent():
    template = "{% for m in messages %}{{ m.tool_calls is defined }}{% endfor %}"
    messages = [{"role": "assistant", "content": "a", "tool_calls": []}]
    model = text_model(template)
    made = ChatBody(messages=[msgspec.convert(m, ChatMessage) for m in messages])
    assert bytes(made.encode(model, 100)) == b"False"


def test_a_begin_of_the_answer_can_be_left_out():
    with_begin, without = asked(chat, {}), asked(chat, {"add_generation_prompt": False})
    # The test template always opens an answer; real templates read the variable.
    assert with_begin.token_ids == without.token_ids
    both = {"add_generation_prompt": True, "continue_final_message": True}
    assert chat(FakeRouter(), both).status == 400


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "raise_exception"])
def test_variables_of_the_server_are_not_the_clients(name):
    error = chat(FakeRouter(), {"chat_template_kwargs": {name: 1}}).json()["error"]
    assert error["param"] == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
    ],
)
def test_what_the_template_does_not_know_is_refused(fields, param):
    error = chat(FakeRouter(), fields).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", param)


def test_an_effort_of_none_asks_for_nothing():
    assert chat(FakeRouter(), {"reasoning_effort": "none"}).status == 200


def test_roles_of_ones_own_and_further_fields_of_messages_pass():
    message = {"role": "my-role", "content": "x", "colour": "red"}
    assert "my-role" in prompt_of({"messages": [message]})


# ---------------------------------------------------------------- fields of answers


def text_of(fields, *script):
    return complete(FakeRouter(list(script)), fields).json()["choices"][0]["text"]


def test_special_tokens_are_shown_if_asked_for():
    script = [tokens("a"), tokens("b").__class__(token_ids=(258,)), *FakeRouter().script]
    assert text_of({}, *script) == "ahi"
    assert text_of({"skip_special_tokens": False}, *script) == "a<|user|>hi"


@pytest.mark.parametrize("split", [False, True])
def test_the_stop_string_ends_the_answer_if_asked_for(split):
    script = [tokens(c) for c in "one. two."] if split else [tokens("one. two.")]
    script += FakeRouter().script
    fields = {"stop": [". "]}
    assert text_of(fields, *script) == "one"
    assert text_of({**fields, "include_stop_str_in_output": True}, *script) == "one. "


def test_the_stop_token_ends_the_answer_if_asked_for():
    last = FakeRouter().script[-1]
    script = [tokens("a"), msgspec.structs.replace(last, token_ids=(ord("!"),))]
    fields = {"stop_token_ids": [ord("!")]}
    assert text_of(fields, *script) == "a"
    assert text_of({**fields, "include_stop_str_in_output": True}, *script) == "a!"
    assert EOS not in [ord("!")]


def test_every_body_has_an_endpoint():
    assert all(isinstance(each.endpoint, str) for each in (ChatBody, CompletionBody))
    assert not hasattr(Body, "endpoint")


# ---------------------------------------------------------------- tokens


def rules_for(fields):
    grammar = asked(complete, fields).sampling.grammar
    return None if grammar is None else rules_of(grammar)


def test_allowed_tokens_and_bad_words_are_rules_of_the_workers():
    assert rules_for({"allowed_token_ids": [7, 5, 7]}) == TokenRules((5, 7))
    rules = rules_for({"bad_words": ["ab", " c"]})
    assert rules == TokenRules(None, tuple(sorted({(97, 98), (32, 97, 98), (32, 99)})))
    assert rules_for({"allowed_token_ids": [], "bad_words": []}) is None


def test_a_bad_word_that_the_model_cannot_write_needs_no_rule():
    # some models have fewer embeddings than their tokenizer has tokens
    small = TextModel(TOKENIZER, vocab_size=128)
    grammar = token_grammar(CompletionBody(bad_words=["é", "b"]), small, Structure())
    assert rules_of(grammar) == TokenRules(None, ((32, 98), (98,)))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": [260]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"allowed_token_ids": [97], "bad_words": ["a"]}, "bad_words"),
        ({"allowed_token_ids": [97], "guided_regex": "a"}, "allowed_token_ids"),
        ({"bad_words": ["a"], "use_beam_search": True, "temperature": 0}, "bad_words"),
    ],
)
def test_rules_that_cannot_be_followed_are_refused(fields, param):
    reply = complete(FakeRouter(), fields)
    assert (reply.status, reply.json()["error"]["param"]) == (400, param)


def test_the_models_sampling_counts_where_the_client_says_nothing():
    model = TextModel(TOKENIZER, defaults=SamplingDefaults(temperature=0.6, top_k=20))
    for body, expected in (
        (ChatBody(), (0.6, 20, 1.0)),
        (ChatBody(temperature=0.0, top_k=0, top_p=0.5), (0.0, 0, 0.5)),
    ):
        sampling = sampling_of(body, text=model, random_seed=1)
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == expected
