"""The tokens of a step have the same effects whether they arrive together or one by one."""

from engine.messages import FinishReason, PrefillDone, PrefillStarted, Tokens
from router.machine.events import Stepped
from tests.kits.router.machine import Driver


def begun() -> Driver:
    """Returns a driver with three answers: below the predicted length, beyond it, and near the
    end."""
    driver = Driver("m0")
    for name in ("a", "b", "c"):
        driver.ask(name, max_tokens=40)
        driver.say("m0", PrefillStarted(f"{name}.0", 0, None))
        driver.say("m0", PrefillDone(f"{name}.0", 9, None))
    return driver


def test_tokens_of_a_step_together_or_one_by_one_give_equal_effects():
    together, alone = begun(), begun()
    for step in range(30):
        tokens = [
            Tokens("a.0", [step], num_drafted=step % 2),
            Tokens("gone.0", [1]),
            Tokens("b.0", [step, step + 1]),
            Tokens("c.0", [7], FinishReason.STOP if step == 9 else None),
        ]
        one_by_one = [effect for message in tokens for effect in alone.say("m0", message)]
        assert together.handle(Stepped("m0", tokens)) == one_by_one
    assert together.machine.view.workers == alone.machine.view.workers
    assert together.machine.counters == alone.machine.counters
