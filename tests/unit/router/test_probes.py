"""Probes of a version find answers that fail, differ, or lack probabilities."""

import asyncio

import pytest

from engine.clock import MonotonicClock
from engine.messages import FinishReason, Logprobs
from router import probes
from router.machine.requests import Failed, Finished, Request, Update
from router.port import Sink
from tests.kits.router.gateway import TEMPLATE, text_model

DONE = Finished(FinishReason.LENGTH)
GOOD = Update((5, 6), DONE, logprobs=(Logprobs(-0.5, 1), Logprobs(-0.1, 1)))


class Port:
    """Returns these updates in order, and then the last one repeatedly."""

    def __init__(self, *answers: Update) -> None:
        self.answers = list(answers)
        self.asked: list[Request] = []

    def submit(self, request: Request, sink: Sink) -> "Port":
        self.asked.append(request)
        sink.update(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])
        return self

    def cancel(self) -> None:
        """Does nothing: each request has finished already, or never finishes."""


def probe(port: object, context_len: int = 4096) -> str:
    text = text_model(TEMPLATE)
    return asyncio.run(probes.fault_of_version(port, text, context_len, MonotonicClock()))


def test_good_version_answers_a_short_request_twice_and_a_long_one():
    port = Port(GOOD)
    assert probe(port) == ""
    short, again, long = port.asked
    assert short.token_ids == again.token_ids
    assert len(long.token_ids) == probes.LONG_LEN
    other = Port(GOOD)
    assert probe(other) == ""
    assert len({each.request_id for each in port.asked + other.asked}) == 6
    assert short.sampling.temperature == 0


def test_requests_fit_a_small_context():
    port = Port(GOOD)
    assert probe(port, 16) == ""
    assert all(each.limits.max_len <= 16 for each in port.asked)
    assert all(len(each.token_ids) < 16 for each in port.asked)


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ([Update((), Failed("no block"))], "the short request ended with .*no block"),
        ([Update((), DONE)], "got no token"),
        ([Update((5,), DONE, logprobs=(Logprobs(float("nan"), 1),))], "no numbers"),
        ([GOOD, Update((5, 7), DONE)], r"answered by \[5, 6\], and again by \[5, 7\]"),
    ],
)
def test_what_is_wrong_is_reported(answers, says):
    import re

    assert re.search(says, probe(Port(*answers)))


def test_version_that_does_not_answer_is_told_in_time(monkeypatch):
    monkeypatch.setattr(probes, "WITHIN_S", 0.05)
    assert "not answered in 0.05 s" in probe(Port(Update((5,))))
