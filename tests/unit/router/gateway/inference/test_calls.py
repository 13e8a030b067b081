"""Requests of the protocol become completion bodies; unsupported fields are refused."""

import msgspec
import pytest

from router.gateway.answering import ID_HEADER, TIMEOUT_HEADER
from router.gateway.inference.calls import OUTPUTS, read_call
from router.gateway.inference.tensors import parameter
from router.gateway.versions import VERSION_HEADER
from router.inbox.api_errors import ApiError
from tests.kits.router.inference import add_input, request_of


def body_of(request):
    return msgspec.json.decode(read_call(request).data)


def with_parameters(request, **values):
    for name, value in values.items():
        request.parameters[name].CopyFrom(parameter(value))
    return request


def test_a_text_with_sampling_is_the_body_of_a_completion():
    request = request_of("yo", sampling_parameters={"temperature": 0.5, "stop": ["a"]})
    wanted = {"prompt": "yo", "temperature": 0.5, "stop": ["a"], "stream": False, "model": "tiny"}
    assert body_of(request) == wanted


def test_numbers_may_be_texts_but_texts_stay():
    sampling = {"max_tokens": "7", "ignore_eos": "True", "stop": "3", "temperature": "warm"}
    body = body_of(request_of("yo", sampling_parameters=sampling))
    assert (body["max_tokens"], body["ignore_eos"]) == (7, True)
    assert (body["stop"], body["temperature"]) == ("3", "warm")


def test_fields_may_be_parameters_of_the_request():
    body = body_of(with_parameters(request_of("yo"), max_tokens=3, ignore_eos=True, user="me"))
    assert (body["max_tokens"], body["ignore_eos"], body["user"]) == (3, True, "me")


def test_token_ids_are_a_prompt_too():
    request = request_of("yo")
    del request.inputs[:]
    add_input(request, "input_ids", [5, 6])
    assert body_of(request)["prompt"] == [5, 6]


def test_several_texts_are_a_batch():
    request = request_of("yo")
    request.inputs[0].contents.bytes_contents.append(b"you")
    request.inputs[0].shape[:] = [2]
    assert body_of(request)["prompt"] == ["yo", "you"]


def test_id_version_and_timeout_become_headers():
    request = with_parameters(request_of("yo", id="mine"), timeout=1_500_000)
    request.model_version = "v2"
    headers = read_call(request).headers
    assert headers[ID_HEADER] == "mine"
    assert headers[VERSION_HEADER] == "v2"
    assert float(headers[TIMEOUT_HEADER]) == 1.5


def test_a_whole_answer_begins_with_the_prompt_unless_it_is_excluded():
    assert read_call(request_of("yo")).form.has_prompt
    assert not read_call(request_of("yo", exclude_input_in_output=True)).form.has_prompt
    assert not read_call(request_of("yo", stream=True)).form.has_prompt


def test_outputs_are_those_named_or_else_switched_on():
    assert read_call(request_of("yo")).form.outputs == {"text_output"}
    switched = request_of("yo", return_finish_reason=True, return_logprobs=False)
    assert read_call(switched).form.outputs == {"text_output", "finish_reason"}
    named = request_of("yo", return_finish_reason=True)
    named.outputs.add(name="num_output_tokens")
    assert read_call(named).form.outputs == {"num_output_tokens"}


@pytest.mark.parametrize("name", ["logprobs", "cumulative_logprob"])
def test_scores_are_computed_for_the_outputs_that_need_them(name):
    assert body_of(request_of("yo", **{f"return_{name}": True}))["logprobs"] == 0
    sampling = {"logprobs": 3}
    request = request_of("yo", sampling_parameters=sampling, **{f"return_{name}": True})
    assert body_of(request)["logprobs"] == 3


def test_every_output_but_the_text_has_a_switch():
    for name in OUTPUTS:
        if name != "text_output":
            request = request_of("yo", **{f"return_{name}": True})
            assert name in read_call(request).form.outputs


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (request_of("yo", image="x"), "image: there is no such input"),
        (request_of("yo", input_ids=[1]), "give either text_input or input_ids"),
        (request_of("yo", sampling_parameters="{"), "sampling_parameters: is not JSON"),
        (request_of("yo", sampling_parameters="[]"), "sampling_parameters: is no JSON object"),
        (request_of("yo", sampling_parameters={"prompt": "x"}), "prompt: is not allowed here"),
        (request_of("yo", sampling_parameters={"echo": True}), "exclude_input_in_output"),
        (request_of("yo", sampling_parameters={"prompt_logprobs": 1}), "no output shows them"),
        (request_of("yo", stream="yes"), "stream: has the type BYTES"),
        (request_of("yo", stream=True, exclude_input_in_output=False), "must be true in a stream"),
        (with_parameters(request_of("yo"), timeout="soon"), "timeout: is 'soon'"),
        (with_parameters(request_of("yo"), timeout=0), "timeout: is 0"),
        (
            with_parameters(request_of("yo", sampling_parameters={"n": 2}), n=2),
            "n: is in sampling_parameters and in parameters",
        ),
    ],
)
def test_what_cannot_be_honoured_is_named(request_, message):
    with pytest.raises(ApiError, match=message):
        read_call(request_)


def test_bytes_that_are_no_text_are_refused():
    request = request_of("yo")
    request.inputs[0].contents.bytes_contents[0] = b"a\xff"
    with pytest.raises(ApiError, match="text_input: is not UTF-8"):
        read_call(request)


def test_unknown_outputs_are_refused():
    request = request_of("yo")
    request.outputs.add(name="embedding")
    with pytest.raises(ApiError, match="embedding: there is no such output"):
        read_call(request)
