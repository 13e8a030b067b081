"""Lines of batch input files: how they are split and parsed, and the errors of wrong lines."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.gateway.batches.lines import (
    InputLine,
    answered_line,
    is_retried,
    parse_line,
    retry_after_s,
    split_lines,
    unanswered_line,
)
from router.gateway.batches.records import LineFault
from tests.kits.router.batches import line_of

LOST = {"request_failed"}


def parsed(line: object) -> InputLine | LineFault:
    return parse_line(msgspec.json.encode(line), "/v1/completions", 1000)


@given(st.lists(st.binary(max_size=8).map(lambda b: b.replace(b"\n", b"")), max_size=8), st.data())
def test_lines_are_the_same_in_any_slices(lines: list[bytes], data: st.DataObject) -> None:
    text = b"".join(line + b"\n" for line in lines)
    found: list[bytes] = []
    start = 0
    while start < len(text):
        end = data.draw(st.integers(start + 1, len(text)))
        some, num_bytes = split_lines(text[start:end], is_last=end == len(text))
        found += some
        start += num_bytes
        if not num_bytes:
            some, num_bytes = split_lines(text[start:], is_last=True)
            found += some
            break
    assert found == lines


def test_the_last_line_needs_no_line_break() -> None:
    assert split_lines(b"a\nb", is_last=True) == ([b"a", b"b"], 3)
    assert split_lines(b"a\nb", is_last=False) == ([b"a"], 2)
    assert split_lines(b"", is_last=True) == ([], 0)


def test_a_line_gives_its_body_as_it_came() -> None:
    line = parsed(line_of("a", logit_bias={"1": 2}))
    assert isinstance(line, InputLine)
    assert line.custom_id == "a"
    assert msgspec.json.decode(line.body)["logit_bias"] == {"1": 2}


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"method": "GET"}, "invalid_method", "method"),
        ({"url": "/v1/chat/completions"}, "mismatched_endpoint", "url"),
        ({"custom_id": ""}, "invalid_custom_id", "custom_id"),
        ({"custom_id": "x" * 513}, "invalid_custom_id", "custom_id"),
        ({"custom_id": 7}, "invalid_request", None),
        ({"body": []}, "invalid_request", None),
        ({"body": {"stream": True}}, "unsupported_parameter", "body.stream"),
        ({"body": {"prompt": "x" * 1000}}, "line_too_long", None),
    ],
)
def test_a_wrong_line_is_refused_with_its_reason(change: dict, code: str, param: str) -> None:
    fault = parsed(line_of("a") | change)
    assert isinstance(fault, LineFault)
    assert (fault.code, fault.param) == (code, param)


@pytest.mark.parametrize("name", ["custom_id", "method", "url", "body"])
def test_a_missing_field_is_named(name: str) -> None:
    line = line_of("a")
    del line[name]
    fault = parsed(line)
    assert isinstance(fault, LineFault)
    assert fault.code == "missing_required_parameter"
    assert name in fault.message


@given(st.binary(max_size=64))
def test_any_bytes_are_a_line_or_a_fault(data: bytes) -> None:
    assert isinstance(parse_line(data, "/v1/completions", 1000), InputLine | LineFault)


def test_output_lines_have_openais_form() -> None:
    line = answered_line("batch_req_1", "a", 200, "cmpl-1", b'{"id":"x"}')
    assert line.endswith(b"\n")
    assert msgspec.json.decode(line) == {
        "id": "batch_req_1",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "cmpl-1", "body": {"id": "x"}},
        "error": None,
    }
    line = unanswered_line("batch_req_1", "a", "batch_expired", "late")
    assert msgspec.json.decode(line)["error"] == {"code": "batch_expired", "message": "late"}


def test_the_wait_grows_and_is_at_least_what_the_answer_asks() -> None:
    assert [retry_after_s(tries, None) for tries in (1, 2, 3, 99)] == [1.0, 2.0, 4.0, 60.0]
    assert retry_after_s(1, "30") == 30.0
    assert retry_after_s(99, "30") == 60.0
    assert retry_after_s(1, "soon") == 1.0


def test_only_answers_that_say_so_are_tried_again() -> None:
    assert is_retried(429, 9, 5, LOST, "rate_limit_exceeded")
    assert is_retried(503, 9, 5, LOST, "not_ready")
    assert not is_retried(200, 1, 5, LOST, "")
    assert not is_retried(400, 1, 5, LOST, "invalid_value")
    assert [is_retried(503, tries, 5, LOST, "request_failed") for tries in (4, 5)] == [True, False]
