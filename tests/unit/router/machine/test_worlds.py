"""Two gateways: each learns the other's claims from the workers' load reports."""

from dataclasses import dataclass, field

import pytest

from engine.config import RouterConfig
from engine.demand import DecodeCost
from engine.messages import (
    PROTOCOL_VERSION,
    Decode,
    Generate,
    Limits,
    LoadReport,
    Prefill,
    PrefillDone,
    PrefillStarted,
    RequestId,
    Role,
    Sampling,
    Welcome,
)
from engine.worker.costs import PrefillCost, PullCost, WorkerCosts
from router.cluster.estimates import Estimates
from router.cluster.view import NOTHING
from router.machine.events import Arrived, FromWorker, SendTo, WorkerJoined
from router.machine.machine import RouterMachine
from router.machine.requests import Request
from tests.kits.router.machine import LAYOUT, LEASE, First

ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED}
COSTS = WorkerCosts(PrefillCost(0.0, 0.01), DecodeCost(0.01, 0.001, 0.0), PullCost(0.0, 0.0, 1e12))


@dataclass
class Worker:
    """A worker that keeps the messages that it receives, and reports its load."""

    prompts: dict[str, int] = field(default_factory=dict)
    decodes: dict[str, int] = field(default_factory=dict)

    def report(self) -> LoadReport:
        blocks = sum(LAYOUT.num_blocks_for(n) for n in self.decodes.values())
        return LoadReport(
            *([0] * 8),
            prompt_tokens=sum(self.prompts.values()),
            decode_seqs=len(self.decodes),
            decode_blocks=blocks,
            context_tokens=sum(self.decodes.values()),
        )


class Gateways:
    """Two machines that know the same workers."""

    def __init__(self, *names: str, num_blocks: int = 100, **config) -> None:
        self.now_s = 1.0
        self.workers = {name: Worker() for name in names}
        self.machines = [
            RouterMachine(RouterConfig(**config), estimates=Estimates(COSTS), rng=First())
            for _ in range(2)
        ]
        for name in names:
            info = Welcome(
                PROTOCOL_VERSION, name, "inc", ROLES[name[0]], "fp", LAYOUT, num_blocks, 4
            )
            for gateway in range(2):
                self.handle(gateway, WorkerJoined(info))

    def handle(self, gateway: int, event) -> None:
        machine = self.machines[gateway]
        for effect in machine.handle(event, self.now_s):
            match effect:
                case SendTo(name, Prefill() | Generate() as message):
                    self.workers[name].prompts[message.seq_id] = len(message.token_ids)
                case SendTo(name, Decode(seq_id, token_ids)):
                    self.workers[name].decodes[seq_id] = len(token_ids)
        machine.validate()

    def ask(self, gateway: int, name: str, num_tokens: int = 40) -> None:
        prompt = tuple(range(num_tokens))
        limits = Limits(num_tokens + 8)
        request = Request(RequestId(name), prompt, Sampling(), limits, self.now_s)
        self.handle(gateway, Arrived(request))

    def compute(self, gateway: int, worker: str, seq_id: str) -> None:
        """Completes a prompt, so that its sequence decodes."""
        self.handle(gateway, FromWorker(worker, PrefillStarted(seq_id, 0, LEASE)))
        del self.workers[worker].prompts[seq_id]
        self.handle(gateway, FromWorker(worker, PrefillDone(seq_id, 9, None)))

    def report(self) -> None:
        for name, worker in self.workers.items():
            for gateway in range(2):
                self.handle(gateway, FromWorker(name, worker.report()))

    def placed(self, gateway: int, name: str) -> tuple[str, str]:
        attempt = self.machines[gateway].state.flights[RequestId(name)].attempt
        return attempt.prefill, attempt.decode

    def foreign(self, gateway: int, worker: str):
        return self.machines[gateway].view.workers[worker].foreign


def test_reported_prompts_of_one_gateway_count_for_the_other():
    both = Gateways("p0", "p1", "d0")
    both.ask(0, "mine")
    both.report()
    assert both.foreign(1, "p0").prompt_tokens == 40
    assert both.foreign(0, "p0") == NOTHING
    both.ask(1, "theirs")
    assert both.placed(0, "mine")[0] == "p0"
    assert both.placed(1, "theirs")[0] == "p1"


def test_reported_sequences_of_one_gateway_count_for_the_other():
    both = Gateways("p0", "d0", "d1")
    both.ask(0, "mine")
    both.compute(0, "p0", "mine.0")
    both.report()
    assert (both.foreign(1, "d0").seqs, both.foreign(1, "d0").context_tokens) == (1, 40)
    assert both.foreign(0, "d0") == NOTHING
    both.ask(1, "theirs")
    assert (both.placed(0, "mine")[1], both.placed(1, "theirs")[1]) == ("d0", "d1")


def test_gateways_together_never_overcommit():
    both = Gateways("p0", "d0", num_blocks=20)  # an answer needs twelve blocks
    both.ask(0, "mine")
    both.compute(0, "p0", "mine.0")
    both.report()
    both.ask(1, "theirs")
    assert both.machines[1].queue_len == 1
    both.workers["d0"].decodes.clear()  # the sequence has ended
    both.report()
    assert both.machines[1].queue_len == 0


def test_claims_on_their_way_are_not_foreign():
    both = Gateways("p0", "d0")
    both.ask(0, "mine")
    # as if the worker had sent the report before the prompt arrived
    both.workers["p0"].prompts.clear()
    both.report()
    assert both.foreign(0, "p0") == NOTHING
    assert both.machines[0].view.workers["p0"].promised_tokens == 40


@pytest.mark.parametrize("num_asked", [1, 2, 3])
def test_gateways_see_the_same_total(num_asked):
    both = Gateways("m0")
    for number in range(num_asked):
        both.ask(number % 2, f"r{number}", num_tokens=4)
    both.report()
    views = [machine.view.workers["m0"] for machine in both.machines]
    assert {view.reserved_prompt_tokens + view.foreign.prompt_tokens for view in views} == {
        4 * num_asked
    }


def test_reported_work_of_others_decreases_with_time():
    both = Gateways("p0", "d0")
    both.ask(0, "mine")  # 0.4 s of prefill
    both.report()
    both.ask(1, "theirs")
    assert both.machines[1].queue_len == 1
    wake_s = both.machines[1].next_wake_s()
    assert wake_s == pytest.approx(1.35)  # the time when 0.05 s of work are left
    both.now_s = wake_s
    both.report()  # the report says that the prompt is still running
    assert both.machines[1].queue_len == 1
    del both.workers["p0"].prompts["mine.0"]
    both.report()
    assert both.machines[1].queue_len == 0
