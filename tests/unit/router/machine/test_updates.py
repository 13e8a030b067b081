"""Updates are joined and taken apart without a loss."""

from hypothesis import given
from hypothesis import strategies as st

from engine.messages import FinishReason, Logprobs
from router.machine.requests import Finished, Update, joined
from tests.kits.router.gateway import TIMELINE

SCORES = st.builds(Logprobs, st.floats(-9, 0), st.integers(1, 9))


@st.composite
def updates(draw):
    ids = tuple(draw(st.lists(st.integers(0, 9), max_size=20)))
    is_scored = draw(st.booleans())
    return Update(
        ids,
        outcome=draw(st.none() | st.just(Finished(FinishReason.STOP))),
        timeline=draw(st.none() | st.just(TIMELINE)),
        logprobs=tuple(draw(SCORES) for _ in ids) if is_scored else (),
        prompt_logprobs=tuple(draw(st.lists(SCORES, max_size=3))),
        embedding=draw(st.binary(max_size=4)),
    )


@given(updates(), st.integers(1, 8))
def test_the_parts_of_an_update_are_the_update(update, num_tokens):
    parts = list(update.parts(num_tokens))
    assert joined(parts) == update
    assert all(len(part.token_ids) <= num_tokens for part in parts)
    assert all(part.outcome is None for part in parts[:-1])


@given(st.lists(updates(), min_size=1, max_size=5))
def test_joined_updates_have_all_tokens_in_order_and_the_last_outcome(some):
    whole = joined(some)
    assert whole.token_ids == tuple(i for update in some for i in update.token_ids)
    assert whole.logprobs == tuple(each for update in some for each in update.logprobs)
    assert whole.outcome == some[-1].outcome
