"""Streams, other requests beside them, and the gaps in a run's window."""

import asyncio
from itertools import count

import pytest

from bench.client.answers import Failure
from bench.client.load import RequestsFailed
from bench.lab.streams import (
    BesideRun,
    StreamsApart,
    answered_per_s,
    ascii_tokenizer,
    run_beside,
    run_beside_arrivals,
)
from engine.clock import MonotonicClock
from tests.kits.answers import answer_at


def test_only_gaps_count_in_which_all_streams_decode():
    # the stream is alone in the first gap and in the last two
    early = answer_at([0, 5, 6, 7, 8, 9])
    late = answer_at([4, 5.5, 6.5, 7.5])  # the first gap is the hand-over
    run = BesideRun("idle", (early, late))
    assert run.together().window_s == (5.5, 7.5)
    assert run.gaps_s == [1, 1, 1]


def test_streams_that_never_ran_together_have_no_window():
    with pytest.raises(StreamsApart):
        BesideRun("idle", (answer_at([0, 1, 2]), answer_at([3, 4, 5]))).together()


def test_every_token_has_a_text_of_its_own():
    tokenizer = ascii_tokenizer(512)
    texts = [tokenizer.decode([i]) for i in range(512)]
    assert texts[:3] == ["", "", ""]  # special tokens
    assert all(1 <= len(text) <= 2 and text.isascii() for text in texts[3:])
    assert len(set(texts[3:])) == 509


class FakeServer:
    """Ends streams after `num_prompts` prompts. Answers prompts at once, or with an error."""

    def __init__(self, num_prompts=0, fails=()):
        self.num_prompts = num_prompts
        self.fails = fails
        self.prompts = []
        self.under_way = self.most_under_way = 0
        self.enough = asyncio.Event()
        if not num_prompts:
            self.enough.set()

    async def send(self, body):
        if body in self.fails:
            return Failure("http_500", body.decode())
        if body.startswith(b"stream"):
            await self.enough.wait()
            return answer_at([1, 2, 3])
        self.prompts.append(body)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        for _ in range(3):  # passes of the event loop in which other requests can be sent
            await asyncio.get_running_loop().run_in_executor(None, int)
        self.under_way -= 1
        if len(self.prompts) >= self.num_prompts:
            self.enough.set()
        return answer_at([1])


def beside(server, *, num_loaders, streams=(b"stream 1", b"stream 2")):
    load = (b"prompt %d" % i for i in count())
    return asyncio.run(run_beside(server.send, streams, load, num_loaders=num_loaders))


def test_a_loader_sends_each_prompt_when_the_one_before_is_answered_until_all_streams_end():
    server = FakeServer(num_prompts=5)
    answers, others = beside(server, num_loaders=1)
    assert len(answers) == 2
    assert server.most_under_way == 1
    assert server.prompts[:5] == [b"prompt %d" % i for i in range(5)]
    assert len(others) == len(server.prompts) <= 6


def test_a_failed_prompt_is_reported_and_the_load_continues():
    _, others = beside(FakeServer(num_prompts=3, fails=(b"prompt 1",)), num_loaders=1)
    assert Failure("http_500", "prompt 1") in others
    assert len(others) >= 4


def test_answers_count_by_their_share_in_the_window():
    inside, across, outside = (
        answer_at(times_s).chunk_times_s
        for times_s in ((1.0, 1.5, 2.0, 2.9), (2.0, 2.5, 3.0, 3.5), (3.0, 3.1, 3.2, 3.3))
    )
    assert answered_per_s([inside, across, outside], 1.0, 3.0) == pytest.approx(1.5 / 2)


# ---------------------------------------------------------------- arriving prompts


def arriving(send, arrivals, streams=(b"stream",)):
    prompts = (b"prompt %d" % i for i in count())
    clock = MonotonicClock()
    return asyncio.run(
        run_beside_arrivals(send, streams, prompts, iter(arrivals), now_s=clock.now_s)
    )


def test_prompts_arrive_without_waiting_for_each_other_until_streams_end():
    """The streams end while three prompts are still unanswered."""
    open_prompts, enough = [], asyncio.Event()

    async def send(body):
        if body == b"stream":
            await enough.wait()
            return answer_at([1, 2, 3])
        open_prompts.append(body)
        if len(open_prompts) == 3:
            enough.set()
        await enough.wait()
        return answer_at([1])

    answers, others = arriving(send, [0.0, 0.0, 0.0, 3600.0])
    assert (len(answers), len(others)) == (1, 3)
    assert open_prompts == [b"prompt 0", b"prompt 1", b"prompt 2"]


def test_failed_stream_leaves_no_figures_and_failed_prompt_is_kept():
    async def fails(body):
        return Failure("http_500", body.decode())

    with pytest.raises(RequestsFailed, match="1 of 1 streams failed"):
        arriving(fails, [])

    async def send(body):
        return answer_at([1, 2, 3]) if body == b"stream" else Failure("http_429", "later")

    _, others = arriving(send, [0.0])
    # the stream may have ended before the failure
    assert others in ([], [Failure("http_429", "later")])
