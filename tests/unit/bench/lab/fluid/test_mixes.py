"""The mixes of `bench fluid`, and the options of the study."""

import pytest

from bench.lab.fluid.figures import mixes_of, parts_of
from bench.lab.fluid.study import FluidStudy
from engine.errors import ConfigError

MIXES = mixes_of("1024/16,64/256,turning")


def test_turning_mix_alternates_in_the_ramp_too():
    turning = MIXES[-1]
    times_s = (-2.1, -1, 0, 1.9, 2, 3.9, 4)
    reads = [turning.lengths_at(elapsed_s, 2.0)[0] == 1024 for elapsed_s in times_s]
    assert reads == [True, False, True, True, False, False, True]


def test_turning_mix_is_that_of_the_two_extremes():
    [*_, turning] = mixes_of("256/64,64/256,1024/16,turning")
    assert turning.phases == ((1024, 16), (64, 256))


@pytest.mark.parametrize("text", ["", "turning", "1024/16,turning", "1024", "0/16", "a/b"])
def test_impossible_mixes_are_refused(text):
    with pytest.raises(ConfigError, match="--mixes"):
        mixes_of(text)


def test_parts_are_read_from_a_list():
    known = ("mixes", "bound")
    assert [*parts_of("bound", known)] == ["bound"]
    assert [*parts_of("mixes,bound", known)] == [*parts_of(None, known)] == [*known]
    for text in ("", "all", "goodput"):
        with pytest.raises(ConfigError, match="--parts"):
            parts_of(text, known)


@pytest.mark.parametrize(
    "rest",
    [
        {"mixes": "4000/100"},
        {"stream_output": 4096},
        {"prompt_input": 4096},
        {"shape": "huge"},
        {"parts": "goodput"},
        {"parts": "bound", "simulated": True},
    ],
)
def test_options_that_do_not_fit_are_refused(rest):
    with pytest.raises(ConfigError):
        FluidStudy(**{"shape": "tiny", **rest})
