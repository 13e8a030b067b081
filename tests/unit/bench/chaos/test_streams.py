"""`bench chaos` records everything in a stream, even data that the server should not have sent."""

import json

from bench.chaos.streams import ReceivedPiece, ReceivedUsage, StreamReader


def chunk(**fields) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(index: int, text: str, finish: str | None = None, **more) -> bytes:
    return chunk(choices=[{"index": index, "text": text, "finish_reason": finish, **more}])


DONE = b"data: [DONE]\n\n"


def read(*parts: bytes):
    reader = StreamReader(sent_s=1.0)
    for i, part in enumerate(parts):
        reader.feed(part, 2.0 + i)
    return reader.finish(9.0)


def test_pieces_have_the_time_at_which_they_came():
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    found = read(
        text(0, "a") + text(1, "x"),
        text(0, "b", "stop"),
        chunk(choices=[], usage=usage),
        chunk(choices=[], baton_timeline={"attempts": 3, "queue_s": 0.1}),
        DONE,
    )
    assert found.pieces == (
        ReceivedPiece(2.0, 0, "a"),
        ReceivedPiece(2.0, 1, "x"),
        ReceivedPiece(3.0, 0, "b", "stop"),
    )
    assert found.usages == (ReceivedUsage(3, 2),)
    assert (found.num_done, found.num_after_done, found.num_attempts) == (1, 0, 3)
    assert (found.sent_s, found.ended_s) == (1.0, 9.0)
    assert found.failure is None


def test_log_probabilities_are_kept_by_token():
    scored = {"tokens": ["a", "b"], "token_logprobs": [-0.5, None], "text_offset": [0, 1]}
    (piece,) = read(text(0, "ab", logprobs=scored)).pieces
    assert piece.logprobs == (("a", -0.5), ("b", None))


def test_errors_in_a_stream_are_failures():
    assert "no worker" in read(text(0, "a"), chunk(error={"message": "no worker"})).failure
    assert read(b"data: {nonsense\n\n").failure is not None


def test_a_broken_connection_is_distinguished_from_a_refusal():
    reader = StreamReader(sent_s=1.0)
    reader.feed(text(0, "a"), 2.0)
    lost = reader.fail("reset by peer", 3.0)
    assert (lost.is_broken, lost.failure, len(lost.pieces)) == (True, "reset by peer", 1)
    refused = StreamReader(sent_s=1.0).refuse("status 503", 3.0)
    assert (refused.is_broken, refused.failure) == (False, "status 503")
