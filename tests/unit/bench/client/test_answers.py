import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.client.answers import Answer, AnswerReader, Endpoint, Failure, request_body

FEW = settings(max_examples=20)  # a unit test may take 50 ms


def event(**chunk):
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def text(content):
    return event(choices=[{"index": 0, "text": content, "finish_reason": None}])


def delta(**fields):
    return event(choices=[{"index": 0, "delta": fields}], usage=None)


END = event(choices=[{"text": "", "finish_reason": "length"}])
DONE = b"data: [DONE]\n\n"


def usage(completion_tokens, prompt_tokens=9):
    return event(
        choices=[],
        usage={"completion_tokens": completion_tokens, "prompt_tokens": prompt_tokens},
    )


def read(*pieces, sent_s=10.0):
    """Feeds the pieces one second apart, the first one a second after sending."""
    reader = AnswerReader(sent_s)
    for second, piece in enumerate(pieces, start=1):
        reader.feed(piece, sent_s + second)
    return reader.finish()


def test_latencies_are_taken_between_content_chunks_and_tokens_from_usage():
    answer = read(text("a"), text("bc"), text("d"), END, usage(4), DONE)
    assert isinstance(answer, Answer)
    assert (answer.ttft_s, answer.e2e_s, answer.gaps_s) == (1.0, 3.0, [1.0, 1.0])
    assert answer.tpot_s == pytest.approx(2 / 3)
    assert (answer.num_prompt_tokens, answer.num_output_tokens) == (9, 4)


def test_role_and_empty_chunks_of_a_chat_are_not_content():
    answer = read(
        delta(role="assistant", content=""), delta(reasoning_content="hm"), delta(content="a"), DONE
    )
    assert answer.chunk_times_s == (12.0, 13.0)


@FEW
@given(st.integers(2, 50), st.lists(st.floats(0, 10), min_size=1, max_size=20))
def test_e2e_is_ttft_and_a_tpot_for_each_token_after_the_first(num_tokens, gaps_s):
    times_s = [1.0]
    for gap_s in gaps_s:
        times_s.append(times_s[-1] + gap_s)
    answer = Answer(0.0, tuple(times_s), num_tokens, None, None, {})
    assert answer.e2e_s == pytest.approx(answer.ttft_s + (num_tokens - 1) * answer.tpot_s)


def test_a_timeline_keeps_the_stages_that_were_reached():
    timeline = {"queue_s": 0.5, "kv_wait": 0.25, "first_step_s": None, "attempts": 1, "worker": "p"}
    answer = read(text("a"), event(choices=[], baton_timeline=timeline), DONE)
    assert answer.timeline_s == {"queue": 0.5, "kv_wait": 0.25}


@pytest.mark.parametrize("end", [DONE, b"data: [DONE]\n", b"data: [DONE]", END])
def test_a_done_mark_or_a_finish_reason_makes_an_answer_complete(end):
    assert isinstance(read(text("a"), end), Answer)


@FEW
@given(st.integers(0, len(text("a") + text("b")) - 1))
def test_a_stream_cut_anywhere_before_its_end_is_truncated(cut):
    failure = read((text("a") + text("b"))[:cut])
    assert isinstance(failure, Failure)
    assert failure.kind == "truncated"


@pytest.mark.parametrize(
    "bad", [event(error={"message": "oh no"}), b"event: error\ndata: {}\n\n", b"data: oh no\n\n"]
)
def test_an_error_inside_the_stream_is_a_failure_even_if_the_stream_goes_on(bad):
    failure = read(text("a"), bad, text("b"), DONE)
    assert isinstance(failure, Failure)
    assert failure.kind == "stream_error"


def test_a_complete_answer_without_content_is_a_failure():
    assert read(END, usage(5), DONE) == Failure("empty", "the answer has no content")


def test_a_completions_body_asks_for_a_stream_of_exact_length_with_usage():
    body = json.loads(
        request_body(Endpoint.COMPLETIONS, [1, 2], model="m", output_len=3, temperature=0.0)
    )
    assert body == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 3,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
