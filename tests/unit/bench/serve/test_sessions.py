from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from bench.client.answers import Endpoint
from bench.serve.lengths import (
    ArrivalShape,
    Conversation,
    LengthSpread,
    PromptLengths,
    SessionTurn,
    TalkShape,
    arranged,
    drawn_sessions,
    fixed,
    replayed,
)
from bench.simulator.traces import Trace, TraceRequest, prompt_tokens

FEW = settings(max_examples=20)
VOCAB = range(1000)


def drawn(num_requests=6, vocab=VOCAB, *, talk=None, lengths=None, seed=0):
    lengths = lengths or PromptLengths(fixed(20), fixed(4))
    return drawn_sessions(
        num_requests,
        lengths,
        talk or TalkShape(),
        vocab,
        shape=Random(seed),
        content=Random(seed + 1),
    )


@FEW
@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 4), st.integers(0, 99))
def test_sessions_have_exactly_the_requests_asked_for(num_requests, turns, steps, seed):
    talk = TalkShape(LengthSpread(1, turns), 0.5, LengthSpread(1, steps), 0.1)
    sessions = drawn(num_requests, talk=talk, seed=seed)
    assert sum(len(session.turns) for session in sessions) == num_requests
    assert all(1 <= len(session.turns) <= turns * steps for session in sessions)
    assert sessions == drawn(num_requests, talk=talk, seed=seed)


def test_groups_share_a_prefix_and_differ_after_it():
    lengths = PromptLengths(fixed(20), fixed(4), shared_prefix_len=12, num_prefixes=2)
    prompts = [session.turns[0].added for session in drawn(lengths=lengths)]
    assert all(len(prompt) == 20 for prompt in prompts)
    assert len({prompt[:12] for prompt in prompts}) == 2
    assert len({prompt[12] for prompt in prompts}) == 6


def test_steps_of_an_agent_bring_results_of_tools():
    talk = TalkShape(fixed(2), 5.0, fixed(3), 1.0, tool_len=fixed(7))
    [session] = drawn(6, talk=talk)
    assert [len(turn.added) for turn in session.turns] == [20, 7, 7, 20, 7, 7]
    assert all(len(turn.stand_in) == 4 for turn in session.turns)


@FEW
@given(st.floats(0.1, 50), st.integers(1, 30), st.integers(0, 9))
def test_due_times_rise_and_a_closed_loop_has_none(rate, num_requests, seed):
    sessions = drawn(num_requests)
    due_s = [one.due_s for one in arranged(sessions, ArrivalShape(rate), Random(seed))]
    assert due_s == sorted(due_s)
    assert due_s[0] == 0
    closed = arranged(sessions, ArrivalShape(rate, clients=2), Random(seed))
    assert {one.due_s for one in closed} == {None}


REQUESTS = (
    TraceRequest(0.0, 10, 3, (1, 2, 3)),
    TraceRequest(0.5, 9, 2, (1, 2, 9)),
    TraceRequest(0.7, 5, 1),
)


def test_a_replay_keeps_times_lengths_and_shared_prefixes():
    first, second, alone = replayed(Trace("t", 4, REQUESTS), VOCAB, 0)
    a, b = first.turns[0].added, second.turns[0].added
    assert [s.due_s for s in (first, second, alone)] == [0.0, 0.5, 0.7]
    assert (len(a), len(b), len(alone.turns[0].added)) == (10, 9, 5)
    assert a[:8] == b[:8]
    assert a[8] != b[8]
    assert [len(prompt_tokens(r, 4)) for r in REQUESTS[:2]] == [len(a), len(b)]


def test_chat_sends_earlier_turns_and_the_answers_of_the_server():
    talk = Conversation(Endpoint.CHAT)
    assert talk.prompt(SessionTurn(("a", "b"), 1)) == [{"role": "user", "content": "a b"}]
    talk.answered(SessionTurn(("a", "b"), 1), "yes")
    assert [m["content"] for m in talk.prompt(SessionTurn(("c",), 1))] == ["a b", "yes", "c"]


def test_completions_send_all_as_one_text():
    talk = Conversation(Endpoint.COMPLETIONS)
    talk.prompt(SessionTurn(("a",), 1))
    talk.answered(SessionTurn(("a",), 1), "yes")
    assert talk.prompt(SessionTurn(("c",), 1)) == "a\nyes\nc"


def test_token_ids_have_ids_in_place_of_answers():
    talk, turn = Conversation(Endpoint.COMPLETIONS), SessionTurn((1, 2), 2, 0.0, (8, 9))
    assert talk.prompt(turn) == [1, 2]
    talk.answered(turn, "unused")
    assert talk.prompt(SessionTurn((3,), 1)) == [1, 2, 8, 9, 3]
