"""The request machine when a decode worker joins beside a full one: sequences may move."""

from collections.abc import Mapping
from typing import Any

import pytest

from engine.config import RouterConfig
from engine.demand import DecodeCost
from engine.messages import (
    PULL_FAILED,
    Cancel,
    Decode,
    FinishReason,
    GivenBack,
    HandedOver,
    HandOver,
    KvReady,
    LeaseRef,
    Limits,
    LoadReport,
    OfferPrefix,
    PrefillDone,
    PrefillStarted,
    PrefixOffered,
    RequestId,
    Role,
    RoleChanged,
    Sampling,
    Tokens,
    TransferAddress,
)
from engine.worker.costs import PrefillCost, PullCost, WorkerCosts
from router.cluster.estimates import Estimates
from router.machine.events import Arrived, Tick, WorkerLost
from router.machine.machine import RouterMachine
from router.machine.moves.stages import MoveStage
from router.machine.requests import Request
from tests.kits.router.machine import Driver, First, sent

COSTS = WorkerCosts(
    PrefillCost(0.001, 1e-5), DecodeCost(0.001, 0.1, 0.0), PullCost(0.0, 1e-3, 1e12)
)
LOAD = LoadReport(50, 0, 1, 1, 1, 0, 3, 0)
LEASE = LeaseRef("moved", TransferAddress("d0", "inc", "tcp://d0"), 2)
COPIED = LeaseRef("copied", TransferAddress("d0", "inc", "tcp://d0"), 1)


class Balanced(Driver):
    """A machine with known costs. Three answers run on d0, the only decode worker."""

    def __init__(self, asked: Mapping[str, Any] = {}, **config) -> None:
        super().__init__()
        config = RouterConfig(**config)
        self.machine = RouterMachine(config, rng=First(), estimates=Estimates(COSTS))
        for name in ("p0", "d0"):
            self.join(name)
        for name in "abc":
            self.ask(name, max_tokens=60, **asked)
            self.hand_over(f"{name}.0")
            self.say("d0", Tokens(f"{name}.0", [8, 7]))

    def report(self, worker: str = "d0", after_s: float = 1.0):
        return self.say(worker, LOAD, after_s)

    def stages(self) -> set[MoveStage]:
        return {stage for stage in MoveStage if self.machine.state.moves.at(stage)}

    def counted(self, *key: str) -> int:
        return self.machine.counters[key]


@pytest.fixture
def copying() -> Balanced:
    """The first of three answers is to be copied to d1, which has just joined."""
    driver = Balanced()
    driver.join("d1")
    effects = driver.report()
    assert [(worker, m.seq_id) for worker, m in sent(effects, OfferPrefix)] == [("d0", "a.1.copy")]
    return driver


@pytest.fixture
def leaving(copying) -> Balanced:
    """The copy has arrived at d1, and d0 has an order to stop the sequence."""
    copying.say("d0", PrefixOffered("a.1.copy", COPIED))
    effects = copying.say("d1", KvReady("a.1.copy", 1, 0, "shm", 0.01))
    assert sent(effects, HandOver) == [("d0", HandOver("a.0", "a.1"))]
    return copying


def test_a_worker_that_joins_takes_a_sequence_and_its_timeline_says_why(leaving):
    effects = leaving.say("d0", HandedOver("a.0", LEASE))
    assert [worker for worker, _ in sent(effects, Decode)] == ["d1"]
    leaving.say("d1", KvReady("a.1", 2, 0, "shm"))
    end = leaving.say("d1", Tokens("a.1", [4], FinishReason.STOP))[-1]
    assert (end.timeline.moves, end.timeline.moved_why, end.timeline.attempts) == (1, "balanced", 1)
    assert leaving.counted("moved", "balanced") == leaving.counted("balance", "begun") == 1


def test_what_a_sequence_takes_along_stays_cached_where_it_was(copying):
    effects = copying.say("d0", PrefixOffered("a.1.copy", COPIED))
    effects += copying.say("d1", KvReady("a.1.copy", 1, 0, "shm", 0.01))
    effects += copying.say("d0", HandedOver("a.0", LEASE))
    assert [decode.evict_first for _, decode in sent(effects, Decode)] == [True, True]


def test_a_worker_that_flips_to_decode_takes_a_sequence_too():
    driver = Balanced()
    driver.join("p1")
    assert not sent(driver.report(), OfferPrefix)
    driver.say("p1", RoleChanged(Role.DECODE))
    assert sent(driver.report(), OfferPrefix)


def test_nothing_more_moves_once_both_are_equally_busy(leaving):
    leaving.say("d0", HandedOver("a.0", LEASE))
    leaving.say("d1", KvReady("a.1", 2, 0, "shm"))
    for _ in range(20):
        assert not sent(leaving.report(), OfferPrefix)
        assert not sent(leaving.report("d1"), OfferPrefix)


def test_without_the_setting_all_stay():
    driver = Balanced(balance=False)
    driver.join("d1")
    assert not sent(driver.report(), OfferPrefix)


def test_no_look_while_a_sequence_is_on_its_way(copying):
    copying.join("d2")
    assert not sent(copying.report(), OfferPrefix)


def test_a_target_that_dies_costs_the_sequence_nothing(copying):
    effects = copying.handle(WorkerLost("d1", "gone"))
    assert sent(effects, Cancel) == [("d0", Cancel("a.1.copy"))]
    assert copying.stages() == set()
    assert copying.counted("balance", "called off") == 1
    assert copying.say("d0", Tokens("a.0", [6]))


def test_a_late_copy_ends_the_move_and_the_sequence_rests(copying):
    copying.now_s += copying.machine.state.config.move_timeout_s
    copying.handle(Tick())
    assert copying.stages() == set()
    assert copying.counted("fallback", "copy late") == 1
    offers = sent(copying.report(), OfferPrefix)
    assert [message.seq_id for _, message in offers] == ["b.1.copy"]


def test_a_failed_copy_keeps_both_workers_apart(copying):
    copying.say("d0", PrefixOffered("a.1.copy", COPIED))
    copying.say("d1", GivenBack("a.1.copy", f"{PULL_FAILED}: no route"))
    assert copying.stages() == set()
    assert not sent(copying.report(), OfferPrefix)


def test_a_drained_source_turns_the_move_into_one_that_is_necessary(copying):
    copying.say("d0", RoleChanged(Role.DRAINED))
    assert copying.stages() == {MoveStage.COPYING}
    copying.say("d0", PrefixOffered("a.1.copy", COPIED))
    for seq_id in ("b.1", "c.1"):
        copying.say("d0", PrefixOffered(f"{seq_id}.copy", None))
    copying.say("d1", KvReady("a.1.copy", 1, 0, "shm", 0.01))
    copying.say("d0", HandedOver("a.0", LEASE), after_s=1.0)
    assert copying.counted("moved", "drained") == 1
    assert copying.counted("moved", "balanced") == 0


def test_a_late_copy_is_repeated_if_the_sequence_must_go_by_then(copying):
    copying.say("d0", RoleChanged(Role.PREFILL))
    copying.now_s += copying.machine.state.config.move_timeout_s
    effects = copying.handle(Tick())
    assert any(message.seq_id == "a.2.copy" for _, message in sent(effects, OfferPrefix))


def test_a_drain_of_another_worker_goes_first():
    driver = Balanced()
    driver.join("d1")
    driver.join("d2")
    driver.say("d0", RoleChanged(Role.DRAINED))
    assert driver.counted("balance", "begun") == 0
    driver.report()
    assert driver.counted("balance", "begun") == 0


# ---------------------------------------------------------------- idle prefill workers


class Fluid(Balanced):
    """A `Balanced` machine whose only prefill worker is fluid and has just computed a prompt."""

    def __init__(self, *, balance: bool = True, **asked) -> None:
        super().__init__(asked, balance=balance)
        self.join("p1", stretch=4.0)
        self.handle(WorkerLost("p0", "gone"))
        self.ask("last", max_tokens=1)
        self.say("p1", PrefillStarted("last.0", 0, None))
        self.say("p1", PrefillDone("last.0", 9, FinishReason.LENGTH))

    def copied(self, looks: int = 8) -> list[tuple[str, str]]:
        """Ticks whenever the machine is due, until a copy begins. Returns the copied sequences."""
        for _ in range(looks):
            self.now_s = self.machine.next_wake_s()
            if offers := sent(self.handle(Tick()), OfferPrefix):
                return [(worker, message.seq_id) for worker, message in offers]
        return []


def test_a_prefill_worker_without_prompts_takes_a_sequence_soon():
    fluid = Fluid()
    began_s = fluid.now_s
    assert fluid.copied() == [("d0", "a.1.copy")]
    # the idle time of p1 must cover 16 tokens of 0.11 s each
    assert 1.8 < fluid.now_s - began_s < 10
    assert fluid.counted("lend", "begun") == 1


def lent_sequence():
    """Returns a machine in which `a` has moved to the prefill worker p1."""
    fluid = Fluid()
    fluid.copied()
    fluid.say("d0", PrefixOffered("a.1.copy", COPIED))
    fluid.say("p1", KvReady("a.1.copy", 1, 0, "shm", 0.01))
    fluid.say("d0", HandedOver("a.0", LEASE))
    fluid.say("p1", KvReady("a.1", 2, 0, "shm"))
    fluid.say("p1", Tokens("a.1", [4]))
    return fluid


def test_what_it_took_is_lent_and_may_go_back_at_once():
    fluid = lent_sequence()
    flight = fluid.machine.state.flights["a"]
    assert flight.attempt.is_lent
    assert flight.rests_until_s <= fluid.now_s
    assert fluid.counted("moved", "lent") == 1


def test_a_prompt_sends_back_lent_sequences_if_prompts_take_much_of_the_time():
    fluid = lent_sequence()
    fluid.machine._placing._load.record(5.0, fluid.now_s, num_computed=1, num_cached=0)
    fluid.ask("next", max_tokens=1)
    effects = fluid.say("p1", PrefillStarted("next.0", 0, None))
    assert [worker for worker, _ in sent(effects, OfferPrefix)] == ["p1"]
    assert fluid.counted("give back", "begun") == 1


def test_prompts_that_were_placed_together_send_it_back_too():
    fluid = lent_sequence()
    fluid.machine._placing._load.record(5.0, fluid.now_s, num_computed=1, num_cached=0)
    fluid.say("d0", Tokens("c.0", [4], FinishReason.STOP))  # frees a place on d0
    one = Request(RequestId("one"), (1, 2, 3), Sampling(), Limits(max_len=9), fluid.now_s)
    fluid.handle(Arrived(one, more_come=True))
    fluid.ask("two")
    effects = fluid.say("p1", PrefillStarted("one.0", 0, LEASE))
    assert [worker for worker, _ in sent(effects, OfferPrefix)] == ["p1"]
    assert [worker for worker, _ in sent(effects, Decode)] == ["d0"]


def test_a_prompt_leaves_a_lent_sequence_where_it_gains_more():
    fluid = lent_sequence()
    fluid.ask("next", max_tokens=1)
    assert not sent(fluid.say("p1", PrefillStarted("next.0", 0, None)), OfferPrefix)
    assert fluid.counted("give back", "begun") == 0


def test_a_sequence_with_a_bound_on_its_pace_stays():
    assert Fluid(tpot_bound_s=5.0).copied() == []


def test_looks_become_rare_while_nothing_changes():
    fluid = Fluid(tpot_bound_s=5.0)
    began_s = fluid.now_s
    fluid.copied(looks=8)
    assert fluid.now_s - began_s > 10


def test_nothing_is_lent_while_a_prompt_is_computed():
    fluid = Fluid()
    fluid.ask("next", max_tokens=1)
    assert not sent(fluid.report("p1"), OfferPrefix)
    assert not sent(fluid.report("d0"), OfferPrefix)


def test_without_the_setting_nothing_is_lent():
    fluid = Fluid(balance=False)
    assert not sent(fluid.report("p1", after_s=9.0), OfferPrefix)
    assert fluid.machine._moving.balancing.due_s is None
