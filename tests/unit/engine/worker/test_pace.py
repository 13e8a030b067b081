"""Chunks of prompts that keep the token gaps of decoding sequences within bounds."""

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.messages import StepReport
from engine.worker.pace import EAGER, EVERY, FIRST_TOKENS, KEPT, LEAST_TOKENS, StepPace

FIXED_S, TOKEN_S, SQUARE_S, ROW_S, CONTEXT_S = 4e-3, 5e-4, 1e-8, 1e-3, 1e-6


class DecodeRow(NamedTuple):
    """The fields of a row that the pace reads."""

    end: int
    tpot_s: float | None = None


def seconds(rows=(), chunks=()):
    """Returns the duration of a step; a chunk is (start, end) in its prompt."""
    tokens = sum(end - start for start, end in chunks)
    squares = sum(end * end - start * start for start, end in chunks)
    decode_s = ROW_S * len(rows) + CONTEXT_S * sum(row.end for row in rows)
    return FIXED_S + TOKEN_S * tokens + SQUARE_S * squares + decode_s


def report(rows=(), chunks=()):
    return StepReport(
        seconds(rows, chunks),
        sum(end - start for start, end in chunks),
        sum(end * end - start * start for start, end in chunks),
        len(rows),
        sum(row.end for row in rows),
    )


def learned(stretch=4.0):
    pace = StepPace(stretch)
    for i in range(40):
        rows = [DecodeRow(100 + 37 * i)] * (1 + i % 5)
        pace.learn(report(rows))
        pace.learn(report(rows, [(64 * i, 64 * i + 16 + 13 * (i % 9))]))
    return pace


def chunks_of_a_step(pace, rows, starts):
    pace.start(rows)
    chunks = []
    for start in starts:
        num = pace.most_tokens(start)
        assert num is not None
        if num:
            pace.add(start, num)
            chunks.append((start, start + num))
    return chunks


rows_of = st.lists(
    st.builds(DecodeRow, st.integers(1, 4000), st.none() | st.floats(0.02, 0.2)),
    min_size=1,
    max_size=16,
)


@given(rows_of, st.lists(st.integers(0, 4000), min_size=1, max_size=4), st.floats(1.2, 8.0))
def test_a_step_keeps_the_bounds_and_the_stretch(rows, starts, stretch):
    limit_s = min([row.tpot_s for row in rows if row.tpot_s is not None], default=9.0)
    if any(row.tpot_s is None for row in rows):
        limit_s = min(limit_s, stretch * seconds(rows))
    chunks = chunks_of_a_step(learned(stretch), rows, starts)
    if chunks and chunks[0][1] - chunks[0][0] > LEAST_TOKENS:
        assert 0.85 * KEPT * limit_s <= seconds(rows, chunks) <= 1.02 * limit_s
    else:  # without room, one prompt still gets a chunk
        least = [(starts[0], starts[0] + LEAST_TOKENS + 1)]
        assert seconds(rows, least) >= 0.9 * KEPT * limit_s
        assert chunks[0] == (starts[0], starts[0] + LEAST_TOKENS)


def test_nothing_limits_a_prompt_if_nothing_decodes():
    pace = learned()
    pace.start([])
    assert pace.most_tokens(0) is None


def test_before_any_step_was_timed_chunks_are_short():
    pace = StepPace(4.0)
    assert chunks_of_a_step(pace, [DecodeRow(10)], [0, 5]) == [(0, FIRST_TOKENS)]


def test_some_steps_are_learned_from_forever():
    pace = StepPace(4.0)
    told = [pace.wants(decodes_only=True) for _ in range(EAGER + 10 * EVERY)]
    assert sum(told) == EAGER + 10
    assert pace.wants(decodes_only=False)


@pytest.mark.parametrize("seq_bound_s", [None, 0.02])
def test_a_bound_of_one_sequence_holds_for_the_step(seq_bound_s):
    rows = [DecodeRow(100), DecodeRow(100, seq_bound_s)]
    [(_, num)] = chunks_of_a_step(learned(), rows, [0])
    assert num == pytest.approx(32 if seq_bound_s is None else 24, abs=2)


def test_what_steps_with_and_without_prompts_share_is_counted_once():
    """A decode step takes at least 10 ms, a prompt step 2 ms, and a mixed step 10 ms."""
    pace = StepPace(4.0)
    for i in range(40):
        pace.learn(StepReport(10e-3 + 1e-3 * (1 + i % 4), 0, 0, 1 + i % 4, 100))
        num = 100 + 60 * (i % 7)
        pace.learn(StepReport(2e-3 + 1e-4 * num, num, num * num, 0, 0))
    [(_, num)] = chunks_of_a_step(pace, [DecodeRow(100, 0.03)], [0])
    assert num == pytest.approx((KEPT * 30e-3 - 11e-3) / 1e-4, rel=0.05)
