"""The options of `bench batches`, and its results for windows and files."""

import pytest

from bench.client.load import LoadRun, RequestOutcome
from bench.lab.batches.study import (
    WITH,
    WITHOUT,
    BatchesMeasured,
    BatchesStudy,
    Killed,
    Window,
    once_of,
    results,
    warnings,
)
from tests.kits.answers import answer_at

STUDY = BatchesStudy(requests=4, pairs=2, window_s=10.0, kills=1)
TEXTS = [("a", "x"), ("b", "y"), ("c", "z"), ("d", "w")]


def window(
    which: str, *ttfts_s: float, num_answered: int = 0, active_s: float = 0.0, pair: int = 0
) -> Window:
    outcomes = tuple(
        RequestOutcome(0.0, None, answer_at([ttft_s, ttft_s + 0.01])) for ttft_s in ttfts_s
    )
    return Window(which, pair, LoadRun(10.0, outcomes), num_answered, active_s)


def measured(*windows: Window, texts=TEXTS, **rest) -> BatchesMeasured:
    both = windows or (window(WITHOUT, 0.1), window(WITH, 0.1, num_answered=2, active_s=10.0))
    return BatchesMeasured(4, both, texts, 8.0, **rest)


def found_in(data: BatchesMeasured) -> dict[str, float]:
    return {result.name: result.value for result in results(data)}


def test_lines_of_a_file_differ_and_are_the_same_again():
    lines = STUDY.lines_of("file", 5, "m")
    assert lines == STUDY.lines_of("file", 5, "m")
    assert len({line["custom_id"] for line in lines}) == 5
    assert len({line["body"]["prompt"] for line in lines}) == 5
    assert STUDY.quick().kills == 1


def test_percentiles_are_over_all_windows_and_held_against_those_without():
    data = measured(
        window(WITH, 0.2, num_answered=5, active_s=10.0),
        window(WITH, 0.4, num_answered=15, active_s=5.0),
        window(WITHOUT, 0.1),
        window(WITHOUT, 0.1),
    )
    by_name = {result.name: result for result in results(data)}
    assert by_name["clients/ttft/p50"].value == pytest.approx(300)
    assert by_name["clients/ttft/p50"].peers[WITHOUT].ratio == pytest.approx(3)
    assert by_name["batches/beside_clients"].runs == (0.5, 1.5)
    assert by_name["batches/active"].runs == (100, 50)
    assert by_name["batches/pauses"].value == 2
    lines = warnings(data)
    assert any("clients/ttft/p99" in line for line in lines)
    assert any("over before their windows" in line for line in lines)


def test_a_result_that_comes_twice_or_not_at_all_is_missed():
    assert once_of([("a", "x"), ("a", "x"), ("b", "y")]) == {"b": "y"}
    data = measured(texts=[*TEXTS[:3], TEXTS[0]])
    assert found_in(data)["batches/answered_once"] == 2
    assert "batches/answered_once: 2 of 4" in warnings(data)
    assert not warnings(measured())


def test_a_killed_batch_is_compared_with_the_undisturbed_one():
    other = [*TEXTS[:3], ("d", "other")]
    data = measured(killed=Killed(4, TEXTS, other, num_before=2))
    found = found_in(data)
    assert found["killed/answered_once"] == 4
    assert found["killed/equal"] == 3
    assert found["killed/answered_before"] == 2
    assert "killed/equal: 3 of 4" in warnings(data)


def test_the_noise_is_that_of_windows_without_batches():
    def pair(number, ttft_s):
        return window(WITHOUT, ttft_s, pair=number), window(WITH, 9.0, num_answered=1, pair=number)

    data = measured(*pair(0, 0.1), *pair(1, 0.2))
    [noise] = [each for each in results(data) if each.name == "noise/ttft/p99"]
    assert noise.value == pytest.approx(100.0)
    assert noise.peers["other_half"].ratio == pytest.approx(0.5)
    assert not any(line.startswith("noise") for line in warnings(data))
    assert not any(name.startswith("noise") for name in found_in(measured()))
