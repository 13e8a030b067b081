"""If a grammar allows no further token, its answer ends and all its memory is freed."""

from engine.messages import GivenBack, Grammar, GrammarKind, LeaseId, Role, Sampling, SeqId
from engine.worker.events import Emit, RevokeLease
from tests.kits.fakes.model import FakeGuide
from tests.kits.worker_core import Rig, decode, first, prefill, pull_done

GUIDED = Sampling(grammar=Grammar(GrammarKind.REGEX, "3"))
FAULT = "it costs too much"
GIVEN_UP = GivenBack(SeqId("a"), f"grammar: {FAULT}", hopeless=True)


class Guides:
    """Records the guides that it created."""

    def __init__(self) -> None:
        self.opened: list[FakeGuide] = []

    def open(self, grammar, answer, salt=b""):
        self.opened.append(FakeGuide(int(grammar.source), answer))
        return self.opened[-1]


def messages(effects) -> list[object]:
    return [effect.message for effect in effects if isinstance(effect, Emit)]


def test_a_prompt_without_an_allowed_first_token_ends_with_its_lease():
    guides = Guides()
    rig = Rig(Role.PREFILL, guides=guides)
    rig.take(prefill("a", 6, sampling=GUIDED))
    guides.opened[0].fault = FAULT
    effects = rig.step(0)
    assert messages(effects)[-1] == GIVEN_UP
    assert RevokeLease(LeaseId("a")) in effects
    assert rig.prefill.num_running == 0
    rig.core.validate()


def test_a_stuck_answer_ends_without_the_void_token():
    guides = Guides()
    rig = Rig(Role.DECODE, guides=guides)
    rig.take(decode("a", 6, sampling=GUIDED))
    rig.step()
    rig.take(pull_done("a"))
    [guide] = guides.opened
    rig.take(first("a", guide.allowed()[0]))
    guide.fault = FAULT
    assert messages(rig.step(0))[-1] == GIVEN_UP
    assert rig.decode.num_running == 0
    counts = rig.pool.counts()
    assert counts.free + counts.cached == counts.total
    rig.core.validate()
