from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.serve.lengths import LengthSpread, fixed, lengths_of
from engine.errors import ConfigError

FEW = settings(max_examples=30)


@pytest.mark.parametrize(
    ("text", "spread"),
    [
        ("128", fixed(128)),
        ("uniform:4-9", LengthSpread(4, 9)),
        ("lognormal:128,0.8", LengthSpread(1, 10_000_000, 128, 0.8)),
        ("lognormal:128,0.8,16-2048", LengthSpread(16, 2048, 128, 0.8)),
    ],
)
def test_options_are_read_and_written_back(text, spread):
    assert lengths_of("--input-len", text) == spread
    assert lengths_of("--input-len", str(spread)) == spread


@pytest.mark.parametrize(
    "text",
    ["", "x", "0", "-3", "uniform:9-4", "uniform:4", "normal:3", "lognormal:5", "lognormal:5,nan"],
)
def test_a_wrong_length_names_its_option(text):
    with pytest.raises(ConfigError, match="--input-len"):
        lengths_of("--input-len", text)


@FEW
@given(st.integers(1, 500), st.integers(0, 500), st.floats(0.01, 10), st.integers())
def test_lengths_are_within_their_range(least, more, deviation, seed):
    for spread in (
        LengthSpread(least, least + more),
        LengthSpread(least, least + more, least + more // 2, deviation),
    ):
        drawn = [spread.draw(Random(seed + number)) for number in range(5)]
        assert all(least <= length <= least + more for length in drawn)


def test_a_log_normal_distribution_has_its_median():
    rng = Random(3)
    drawn = sorted(LengthSpread(1, 10_000, 200, 0.5).draw(rng) for _ in range(2001))
    assert drawn[1000] == pytest.approx(200, rel=0.06)
