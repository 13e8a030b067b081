"""The checker of `bench chaos` detects every way in which a stream can go wrong."""

from dataclasses import replace

import pytest

from bench.chaos.checker import (
    Injected,
    RequestEnd,
    affected,
    disorder,
    judge,
    longest_stall,
    reply_of,
)
from bench.chaos.plan import LONG_SILENCE_S, FaultKind
from bench.chaos.streams import ReceivedPiece, ReceivedStream, ReceivedUsage

USAGE = ReceivedUsage(prompt_tokens=7, completion_tokens=4)


def stream(*pieces: ReceivedPiece, **changes) -> ReceivedStream:
    whole = ReceivedStream(sent_s=0.0, ended_s=9.0, pieces=pieces, usages=(USAGE,), num_done=1)
    return replace(whole, **changes)


def said(text: str, at_s: float = 1.0, choice: int = 0, **more) -> ReceivedPiece:
    return ReceivedPiece(at_s, choice, text, **more)


def end(at_s: float = 2.0, choice: int = 0, finish: str = "length") -> ReceivedPiece:
    return ReceivedPiece(at_s, choice, finish=finish)


GOOD = stream(said("a"), said("b"), end())
EXPECTED = reply_of(GOOD, 1)
SLOW_DEATH = Injected(FaultKind.GATEWAY, "gateway-0", begun_s=3.0, ended_s=5.0)
DEATH = Injected(FaultKind.GATEWAY, "gateway-0", begun_s=3.0, ended_s=3.0)


def broken(*pieces: ReceivedPiece) -> ReceivedStream:
    changes = {"usages": (), "num_done": 0, "failure": "reset", "is_broken": True}
    return stream(*pieces, ended_s=3.1, **changes)


def test_the_same_answer_in_other_pieces_is_the_same():
    assert judge(EXPECTED, [stream(said("ab", at_s=5), end(6))], []).end is RequestEnd.SAME


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (stream(said("ab"), end(), failure="status 503"), "status 503"),
        (stream(said("ab")), "1 of 1 choices did not finish"),
        (stream(), "1 of 1 choices did not finish"),
        (stream(said("ab"), end(), end()), "choice 0 finished again"),
        (stream(said("a"), end(), said("b")), "choice 0 went on after its end"),
        (stream(said("ab"), end(), said("", choice=1)), "there is no choice 1"),
        (stream(said("ab"), end(), usages=()), "usage came 0 times"),
        (stream(said("ab"), end(), usages=(USAGE, USAGE)), "usage came 2 times"),
        (stream(said("ab"), end(), num_done=0), "the end was marked 0 times"),
        (stream(said("ab"), end(), num_done=2), "the end was marked 2 times"),
        (stream(said("ab"), end(), num_after_done=1), "the end was marked 1 times"),
    ],
)
def test_a_stream_that_is_no_whole_answer_is_lost(found, reason):
    assert disorder(found, 1) == reason
    verdict = judge(EXPECTED, [found], [])
    assert (verdict.end, verdict.reason) == (RequestEnd.LOST, reason)


def test_each_choice_has_to_finish():
    found = stream(said("a"), said("b", choice=1), end(choice=1))
    assert disorder(found, 2) == "1 of 2 choices did not finish"
    assert disorder(stream(*found.pieces, end()), 2) is None


@pytest.mark.parametrize(
    "found",
    [
        stream(said("a"), end()),
        stream(said("abb"), end()),
        stream(said("ba"), end()),
        stream(said("ab"), end(finish="stop")),
        stream(said("ab", logprobs=(("ab", -0.5),)), end()),
        stream(said("ab"), end(), usages=(ReceivedUsage(7, 5),)),
        stream(said("ab"), end(), usages=(ReceivedUsage(8, 4),)),
    ],
)
def test_an_answer_that_says_anything_else_is_changed(found):
    assert judge(EXPECTED, [found], []).end is RequestEnd.CHANGED


def test_other_log_probabilities_are_another_answer():
    one = stream(said("ab", logprobs=(("a", -0.5), ("b", -1.0))), end())
    other = stream(said("ab", logprobs=(("a", -0.5), ("b", -1.5))), end())
    assert judge(reply_of(one, 1), [one], []).end is RequestEnd.SAME
    assert judge(reply_of(one, 1), [other], []).end is RequestEnd.CHANGED


def test_reconnecting_after_a_gateway_death_loses_nothing():
    assert judge(EXPECTED, [broken(said("a")), GOOD], [DEATH]).end is RequestEnd.SAME


def test_a_connection_that_breaks_though_no_gateway_died_is_a_lost_request():
    assert judge(EXPECTED, [broken(said("a")), GOOD], []).end is RequestEnd.LOST
    late = replace(DEATH, begun_s=3.2)
    assert judge(EXPECTED, [broken(said("a")), GOOD], [late]).end is RequestEnd.LOST


def test_connection_broken_long_after_a_gateway_death_is_a_lost_request():
    late = replace(broken(said("a")), ended_s=33.0)
    assert judge(EXPECTED, [late, GOOD], [DEATH]).end is RequestEnd.LOST
    assert judge(EXPECTED, [replace(late, ended_s=3.9), GOOD], [DEATH]).end is RequestEnd.SAME


@pytest.mark.parametrize(
    ("lasted_s", "sent_s", "broke_s", "end"),
    [
        (4.0, 2.0, 4.0, RequestEnd.LOST),  # the gateway continues after the connection broke
        (4.0, 2.0, 7.1, RequestEnd.LOST),
        (LONG_SILENCE_S, 2.0, 2.9, RequestEnd.LOST),
        (LONG_SILENCE_S, 2.0, 8.0, RequestEnd.LOST),
        (LONG_SILENCE_S, 2.0, 13.5, RequestEnd.SAME),
        (LONG_SILENCE_S, 5.0, 13.5, RequestEnd.SAME),  # sent while the gateway was stopped
        (LONG_SILENCE_S, 2.0, 30.0, RequestEnd.LOST),
    ],
)
def test_a_gateway_that_stands_still_breaks_connections_only_if_it_is_replaced(
    lasted_s, sent_s, broke_s, end
):
    stop = Injected(FaultKind.STOP_GATEWAY, "gateway-0", 3.0, 3.0 + lasted_s)
    asked = replace(broken(), sent_s=sent_s, ended_s=broke_s)
    assert judge(EXPECTED, [asked, GOOD], [stop]).end is end


def test_request_without_an_answer_is_lost():
    assert judge(EXPECTED, [broken(said("a")), broken()], [DEATH]).end is RequestEnd.LOST


def test_a_connection_to_a_process_that_is_not_gone_yet_may_break():
    late = replace(broken(said("a")), sent_s=4.5, ended_s=5.2)
    assert judge(EXPECTED, [late, GOOD], [SLOW_DEATH]).end is RequestEnd.SAME
    assert judge(EXPECTED, [late, GOOD], [DEATH]).end is RequestEnd.LOST
    assert (
        judge(EXPECTED, [replace(late, sent_s=5.6, ended_s=5.7), GOOD], [SLOW_DEATH]).end
        is RequestEnd.LOST
    )


@pytest.mark.parametrize(
    "piece", [said("b"), said("abc"), end(finish="stop"), said("a", logprobs=(("a", 0.0),))]
)
def test_what_came_before_a_connection_broke_counts(piece):
    verdict = judge(EXPECTED, [broken(piece), GOOD], [DEATH])
    assert verdict.end is RequestEnd.CHANGED
    assert verdict.reason.startswith("before its connection broke")


def test_the_longest_stall_is_between_two_chunks_and_has_the_fault_that_began_in_it():
    kill = Injected(FaultKind.KILL, "worker-1", 4.0, 4.0)
    stop = Injected(FaultKind.STOP, "worker-2", 1.0, 8.0)
    requests = [
        [stream(said("a", at_s=3.9), said("b", at_s=4.1), end(4.2))],
        [stream(said("a", at_s=3.0), said("b", at_s=6.0), end(6.1))],
        [stream(said("a", at_s=8.9), end(9.0))],  # the wait for the first token is no stall
    ]
    stall = longest_stall(requests, [stop, kill])
    assert (stall.seconds, stall.request, stall.fault) == (3.0, 1, kill)
    assert longest_stall(requests, [stop]).fault == stop
    assert longest_stall(requests, []).fault is None


def test_a_stall_goes_from_connection_to_connection():
    request = [broken(said("a", at_s=3.0)), stream(said("ab", at_s=7.5), end(7.6))]
    assert longest_stall([request], [DEATH]).seconds == 4.5


def test_requests_are_affected_that_fell_silent_or_were_placed_or_sent_again():
    kill = Injected(FaultKind.KILL, "worker-1", 4.0, 4.0)
    calm = [stream(said("a", at_s=3.9), said("b", at_s=4.1), end(4.2))]
    calm = [replace(calm[0], sent_s=3.8, ended_s=4.2)]
    silent = [stream(said("a", at_s=3.9), said("b", at_s=4.6), end(4.7))]
    waiting = [stream(said("ab", at_s=5.0), end(5.0), sent_s=3.0)]
    placed = [stream(*calm[0].pieces, num_attempts=2)]
    before = [replace(placed[0], ended_s=3.5, pieces=())]
    assert affected([calm, silent, waiting, placed, before], [kill]) == {FaultKind.KILL: 3}
    again = [broken(said("a", at_s=2.9)), stream(said("ab", at_s=3.2), end(3.3))]
    assert affected([calm, again], [DEATH, DEATH]) == {FaultKind.GATEWAY: 1}
