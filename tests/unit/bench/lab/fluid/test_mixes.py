"""The mixes of `bench fluid`, and the options of the study."""

import pytest

from bench.lab.fluid.figures import mixes_of, parts_of, starts_s
from bench.lab.fluid.study import FluidStudy
from engine.errors import ConfigError

MIXES = mixes_of("1024/16,64/256,turning")


def test_mixes_are_named_after_their_tokens():
    steady, _, turning = MIXES
    assert (steady.name, steady.phases) == ("1024+16", ((1024, 16),))
    assert steady.lengths_at(1e3, 2.0) == (1024, 16)
    assert turning.phases == ((1024, 16), (64, 256))


def test_turning_mix_alternates_in_the_ramp_too():
    turning = MIXES[-1]
    times_s = (-2.1, -1, 0, 1.9, 2, 3.9, 4)
    reads = [turning.lengths_at(elapsed_s, 2.0)[0] == 1024 for elapsed_s in times_s]
    assert reads == [True, False, True, True, False, False, True]


def test_clients_begin_one_after_the_other():
    assert starts_s(4, 2.0) == [0.0, 0.5, 1.0, 1.5]
    assert starts_s(4, 0.0) == [0.0] * 4


def test_each_phase_of_a_mix_has_a_whole_window():
    assert [mix.window_s(10.0) for mix in MIXES] == [10.0, 10.0, 20.0]


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


def test_a_quick_study_plays_two_steady_mixes_once():
    brief = FluidStudy(mixes="1024/16,256/64,64/256,turning").quick()
    assert (brief.mixes, brief.parts, brief.repeat) == ("1024/16,64/256", "mixes", 1)
    assert (brief.window_s, brief.ramp_s) == (3.0, 1.5)
    assert not brief.has("bound")


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
