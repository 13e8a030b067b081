"""Groups with a common prompt: the leader computes the prompt, and followers find it cached."""

import pytest

from engine.messages import (
    Cancel,
    Decode,
    FinishReason,
    Generate,
    GivenBack,
    KvReady,
    Limits,
    LoadReport,
    Logprobs,
    Prefill,
    PrefillDone,
    PrefillStarted,
    RequestId,
    Sampling,
    Tokens,
)
from router.machine.events import Arrived, ClientGone, Tick, WorkerLost
from router.machine.requests import Cancelled, Finished, Rejected, Request, Update
from tests.kits.router.machine import LEASE, Driver, ends, sent

PROMPT = (1, 2, 3, 4, 5)  # one full block of four tokens, and one token of the next block
KV = KvReady("r.0", 2, 0, "shm")


class Group(Driver):
    """A driver that submits several choices of one prompt: `r`, then `r-1`, `r-2` and so on."""

    def ask_all(self, num_choices: int, max_tokens: int = 8, **fields):
        limits = Limits(len(PROMPT) + max_tokens, prompt_len=len(PROMPT))
        leader = RequestId("r")
        effects = []
        for index in range(num_choices):
            request = Request(
                request_id=leader if index == 0 else RequestId(f"r-{index}"),
                token_ids=PROMPT,
                sampling=Sampling(seed=index),
                limits=limits,
                received_s=self.now_s,
                leader=None if index == 0 else leader,
                **(fields if index == 0 else {}),
            )
            effects += self.handle(Arrived(request))
        return effects

    def start_leader(self):
        """Computes the leader's prompt. The decode worker has not received the KV yet."""
        self.say("p0", PrefillStarted("r.0", 0, LEASE))
        return self.say("p0", PrefillDone("r.0", 9, None))


def seqs(effects, kind=Prefill):
    return [(worker, message.seq_id) for worker, message in sent(effects, kind)]


FOLLOWERS = [("p0", "r-1.0"), ("p0", "r-2.0")]


# ---------------------------------------------------------------- followers are held back


def test_only_the_first_of_a_group_is_placed():
    group = Group("p0", "d0")
    assert seqs(group.ask_all(3)) == [("p0", "r.0")]
    assert group.machine.queue_len == 2
    assert group.machine.num_flights == 3


def test_followers_are_placed_when_prompt_and_kv_are_complete():
    group = Group("p0", "d0")
    group.ask_all(3)
    assert not sent(group.start_leader(), Prefill)
    assert seqs(group.say("d0", KV)) == FOLLOWERS
    assert group.machine.queue_len == 0


def test_kv_that_arrived_before_the_first_token_makes_no_difference():
    group = Group("p0", "d0")
    group.ask_all(3)
    group.say("p0", PrefillStarted("r.0", 0, LEASE))
    assert not sent(group.say("d0", KV), Prefill)
    assert seqs(group.say("p0", PrefillDone("r.0", 9, None))) == FOLLOWERS


def test_followers_on_a_mixed_worker_are_placed_at_the_first_token():
    group = Group("m0")
    group.ask_all(2)
    group.say("m0", PrefillStarted("r.0", 0, None))
    assert seqs(group.say("m0", PrefillDone("r.0", 9, None)), Generate) == [("m0", "r-1.0")]


def test_followers_go_to_their_leaders_workers_even_if_others_are_idle():
    group = Group("p0", "p1", "d0", "d1")
    [(prefill, _)] = seqs(group.ask_all(3))
    group.say(prefill, PrefillStarted("r.0", 0, LEASE))
    group.say(prefill, PrefillDone("r.0", 9, None))
    [decode] = [i for i, w in group.machine.view.workers.items() if w.decodes]
    assert seqs(group.say(decode, KV)) == [(prefill, "r-1.0"), (prefill, "r-2.0")]
    assert len(group.machine.view.workers[decode].decodes) == 3
    lease = sent(group.say(prefill, PrefillStarted("r-1.0", 4, LEASE)), Decode)
    assert [worker for worker, _ in lease] == [decode]


def test_of_a_shared_prompt_only_the_last_block_counts_as_work():
    group = Group("p0", "d0", prefill_backlog_tokens=5)
    group.ask_all(6)
    group.start_leader()
    assert len(seqs(group.say("d0", KV))) == 3  # a worker runs at most four sequences
    assert group.machine.view.workers["p0"].reserved_tokens == 3


def test_followers_go_elsewhere_if_their_leaders_workers_are_full():
    group = Group("p0", "p1", "d0", "d1", num_blocks=7)  # one sequence needs four blocks
    group.ask_all(2)
    group.start_leader()
    [(_, seq_id)] = seqs(group.say("d0", KV))
    assert list(group.machine.view.workers["d1"].decodes) == [seq_id]


def test_held_requests_do_not_block_the_queue():
    group = Group("p0", "d0")
    group.ask_all(3)
    assert seqs(group.ask("next")) == [("p0", "next.0")]


def test_released_followers_are_first_in_the_queue():
    group = Group("p0", "d0", prefill_backlog_tokens=5)
    group.ask_all(3)
    group.ask("next")
    group.start_leader()  # and "next" gets the only place of the worker
    group.say("d0", KV)
    group.say("p0", PrefillStarted("next.0", 0, LEASE))
    effects = group.say("p0", PrefillDone("next.0", 9, None))
    assert seqs(effects) == FOLLOWERS


def test_held_requests_count_as_waiting():
    group = Group("p0", "d0", max_queue=2)
    [outcome] = ends(group.ask_all(4))
    assert isinstance(outcome, Rejected)
    assert group.machine.num_flights == 3
    assert isinstance(ends(group.ask("next"))[0], Rejected)


def test_late_follower_of_a_computed_prompt_does_not_wait():
    group = Group("p0", "d0")
    group.ask_all(1)
    group.start_leader()
    group.say("d0", KV)
    late = Request(RequestId("r-1"), PROMPT, Sampling(), Limits(9), 0.0, leader=RequestId("r"))
    assert seqs(group.handle(Arrived(late))) == [("p0", "r-1.0")]


# ---------------------------------------------------------------- leaders that fail


LEADER_ENDS = {
    "the client leaves it": lambda g: g.handle(ClientGone(RequestId("r"))),
    "it is given back": lambda g: g.say("p0", GivenBack("r.0", "lease expired")),
    "its prefill worker is lost": lambda g: g.handle(WorkerLost("p0", "gone")),
    "its decode worker is lost": lambda g: g.handle(WorkerLost("d0", "gone")),
    "it ends with its first token": lambda g: g.say("p0", PrefillDone("r.0", 9, FinishReason.STOP)),
}


@pytest.mark.parametrize("end", LEADER_ENDS)
def test_leader_that_ends_early_releases_its_followers(end):
    group = Group("p0", "p1", "d0", "d1")
    group.ask_all(3)
    group.say("p0", PrefillStarted("r.0", 0, LEASE))
    placed = [seq_id for _, seq_id in seqs(LEADER_ENDS[end](group))]
    assert [seq_id for seq_id in placed if seq_id.startswith("r-")] == ["r-1.0", "r-2.0"]
    assert group.machine.queue_len == 0


def test_leader_without_messages_releases_its_followers_at_its_deadline():
    group = Group("p0", "d0", progress_timeout_s=9.0, queue_timeout_s=5.0)
    group.ask_all(2)
    group.now_s = group.machine.next_wake_s()
    assert group.now_s > 10.0 + 9.0  # not the deadline of the queue
    effects = group.handle(Tick())
    assert sorted(seq_id for _, seq_id in seqs(effects)) == ["r-1.0", "r.1"]


def test_followers_of_an_unplaced_leader_wait_at_most_twice_its_time():
    group = Group("p0", "d0", prefill_backlog_tokens=1, queue_timeout_s=5.0)
    group.ask("long")
    group.ask_all(2)
    outcomes = []
    for _ in range(2):
        group.now_s += 5.0
        outcomes += ends(group.handle(Tick()))
        group.say("p0", PrefillStarted("long.0", 0, LEASE))
    assert [type(outcome) for outcome in outcomes] == [Rejected, Rejected]
    assert group.machine.queue_len == 0


def test_held_request_is_cancelled_alone():
    group = Group("p0", "d0")
    group.ask_all(3)
    effects = group.handle(ClientGone(RequestId("r-1")))
    assert ends(effects) == [Cancelled()]
    assert not sent(effects, Cancel)
    group.start_leader()
    assert seqs(group.say("d0", KV)) == [("p0", "r-2.0")]


def test_placed_requests_of_a_group_are_independent():
    group = Group("p0", "d0", "d1")
    group.ask_all(2)
    group.start_leader()
    group.say("d0", KV)
    group.hand_over("r-1.0")
    assert ends(group.say("d0", Tokens("r.0", [7], FinishReason.STOP))) == [
        Finished(FinishReason.STOP)
    ]
    [(_, again)] = sent(group.handle(WorkerLost("d0", "gone")), Prefill)
    assert (again.seq_id, again.token_ids) == ("r-1.1", [*PROMPT, 9])
    assert again.sampling.seed == 1


# ---------------------------------------------------------------- reported token counts


def test_log_probabilities_are_delivered_with_their_tokens():
    group = Group("p0", "d0")
    [(_, message)] = sent(group.ask_all(1, prompt_logprobs=2), Prefill)
    assert message.prompt_logprobs == 2
    group.say("p0", PrefillStarted("r.0", 0, LEASE))
    scores = [Logprobs(-float(i), 1) for i in range(8)]
    done = PrefillDone("r.0", 9, None, logprobs=scores[0], prompt_logprobs=scores[4:])
    [first] = [e for e in group.say("p0", done) if isinstance(e, Update)]
    assert (first.logprobs, first.prompt_logprobs) == ((scores[0],), tuple(scores[4:]))
    [more] = group.say("d0", Tokens("r.0", [8, 7], logprobs=scores[1:3]))
    assert (more.token_ids, more.logprobs) == ((8, 7), tuple(scores[1:3]))
    assert more.prompt_logprobs == ()


def test_prompt_is_scored_again_only_if_not_delivered():
    group = Group("p0", "p1", "d0")
    group.ask_all(1, prompt_logprobs=0)
    [(_, again)] = sent(group.say("p0", GivenBack("r.0", "lease expired")), Prefill)
    assert again.prompt_logprobs == 0
    group.hand_over("r.1")
    [(_, again)] = sent(group.say("d0", GivenBack("r.1", "no room")), Prefill)
    assert again.prompt_logprobs is None


def test_drafted_and_accepted_tokens_are_summed_over_all_attempts():
    group = Group("p0", "d0")
    group.ask_all(1, max_tokens=20)
    group.hand_over("r.0")
    group.say("d0", Tokens("r.0", [1, 2], num_drafted=4, num_accepted=1))
    group.say("d0", GivenBack("r.0", "no room"))
    group.hand_over("r.1")
    [*_, end] = group.say("d0", Tokens("r.1", [3], FinishReason.STOP, num_drafted=2))
    assert (end.timeline.num_drafted_tokens, end.timeline.num_accepted_tokens) == (6, 1)


def test_second_token_with_others_ends_the_first_step():
    group = Group("p0", "d0")
    group.ask_all(1)
    group.hand_over("r.0")
    [deliver] = group.say("d0", Tokens("r.0", [1, 2, 3]), after_s=2)
    assert deliver.timeline.first_step_s == 2
    assert [e.timeline for e in group.say("d0", Tokens("r.0", [4]), after_s=1)] == [None]


# ---------------------------------------------------------------- preemption


def report(num_idle_blocks: int) -> LoadReport:
    return LoadReport(num_idle_blocks - 1, 1, 0, 0, 0, 0, 0, 0)


def preempted(*workers: str, **config) -> Group:
    """Returns a request that d0 has preempted, with one token and four blocks."""
    group = Group(*workers, **config)
    group.ask_all(1)
    group.hand_over("r.0")
    assert not sent(group.say("d0", GivenBack("r.0", "preempted")), Prefill)
    assert group.machine.queue_len == 1
    return group


def test_a_preempted_request_waits_until_its_worker_reports_room_for_all_of_it():
    group = preempted("p0", "d0")
    assert not sent(group.say("d0", report(3), after_s=0.1), Prefill)
    assert seqs(group.say("d0", report(4), after_s=0.1)) == [("p0", "r.1")]


def test_reports_before_the_preemption_do_not_count():
    group = Group("p0", "d0")
    group.ask_all(1)
    group.hand_over("r.0")
    group.say("d0", report(100))
    assert not sent(group.say("d0", GivenBack("r.0", "preempted")), Prefill)


def test_preempted_request_goes_to_another_worker_with_room():
    group = Group("p0", "d0", "d1")
    group.ask_all(1)
    group.hand_over("r.0")
    assert seqs(group.say("d0", GivenBack("r.0", "preempted"))) == [("p0", "r.1")]
    assert list(group.machine.view.workers["d1"].decodes) == ["r.1"]


def test_back_off_ends_and_grows_each_time():
    group = preempted("p0", "d0")
    waits_s = []
    for number in range(1, 6):
        wake_s = group.machine.next_wake_s()
        waits_s.append(wake_s - group.now_s)
        group.now_s = wake_s
        assert seqs(group.handle(Tick())) == [("p0", f"r.{number}")]
        group.hand_over(f"r.{number}")
        group.say("d0", GivenBack(f"r.{number}", "preempted"))
    assert waits_s == [1.0, 2.0, 4.0, 8.0, 8.0]


def test_preemption_after_a_token_is_no_failed_attempt():
    group = Group("p0", "d0", max_attempts=2)
    group.ask_all(1, max_tokens=50)
    for number in range(6):
        group.hand_over(f"r.{number}")
        assert not ends(group.say("d0", GivenBack(f"r.{number}", "preempted")))
        group.now_s += 8.0
        group.handle(Tick())
    [outcome] = ends(group.say("p0", GivenBack("r.6", "lease expired"))) or [None]
    assert outcome is None  # the first of two failures
    [outcome] = ends(group.say("p0", GivenBack("r.7", "lease expired")))
    assert "given up after 8 attempts" in outcome.message


def test_preemption_without_a_token_is_a_failed_attempt():
    group = Group("p0", "d0", max_attempts=1)
    group.ask_all(1)
    group.say("p0", PrefillStarted("r.0", 0, LEASE))
    [outcome] = ends(group.say("d0", GivenBack("r.0", "preempted")))
    assert "preempted" in outcome.message


def test_preempted_request_keeps_its_place_at_the_head():
    group = preempted("p0", "d0", num_blocks=6)
    assert not sent(group.ask("next"), Prefill)
    assert seqs(group.say("d0", report(6), after_s=0.1)) == [("p0", "r.1")]
