"""The table of returns is compared with numbers computed by hand."""

import math
from itertools import pairwise
from random import Random

import pytest

from kvtransfer.store.eviction.returns import (
    LEAST_EVENTS,
    NUM_BUCKETS,
    WIDTHS,
    ReturnTable,
    bucket_of,
    worths,
)


def test_buckets_are_half_octaves_that_cover_all_ages():
    assert [bucket_of(age) for age in (-1.0, 0.0, 0.25, 0.75, 1.75)] == [0, 0, 2, 4, 6]
    assert bucket_of(1e12) == NUM_BUCKETS - 1
    assert math.isclose(sum(WIDTHS[:4]), 0.75)


def test_worth_is_that_of_the_best_time_to_stop():
    hazards = [0.0] * NUM_BUCKETS
    hazards[10] = 0.5  # half of the blocks return in this bucket, and no others before or after
    found = worths(hazards)
    wait = sum(WIDTHS[:10]) + WIDTHS[10] * 0.75
    assert math.isclose(found[0], 0.5 / wait)
    assert math.isclose(found[10], 0.5 / (WIDTHS[10] * 0.75))
    assert found[11] == 0.0
    assert all(before < after for before, after in pairwise(found[:11]))


def test_before_it_learns_old_blocks_are_worth_less_than_new_ones():
    table = ReturnTable([2], [1.0, 1.0])
    ages = [0.0, 1.0, 10.0, 100.0, 1000.0]
    found = [table.worth(0, age) for age in ages]
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize(("likely", "seldom"), [(0, 1), (1, 0)])
def test_a_class_that_returns_more_often_is_worth_more(likely, seldom):
    table = ReturnTable([2], [1.0, 1.0])
    rng = Random(7)
    for number in range(2 * LEAST_EVENTS):
        which = number % 2
        used_s = float(number)
        table.wait(which, used_s)
        comes = rng.random() < (0.8 if which == likely else 0.1)
        (table.returned if comes else table.given_up)(which, used_s, used_s + 20.0)
    assert table.worth(likely, 0.0) > 3 * table.worth(seldom, 0.0)
    assert table.worth(likely, 200.0) < table.worth(likely, 0.0)
    assert table.num_waiting == 0


def test_blocks_that_still_wait_count_against_returns_at_ages_that_they_reached():
    few, many = ReturnTable([1], [1.0]), ReturnTable([1], [1.0])
    many.wait(0, 0.0, num_blocks=10_000)
    for table in (few, many):
        for number in range(2 * LEAST_EVENTS):
            table.wait(0, 1000.0 + number)
            table.returned(0, 1000.0 + number, 1010.0 + number)
    assert many.worth(0, 0.0) < few.worth(0, 0.0) / 5


def test_ages_of_a_class_are_in_its_own_unit():
    table = ReturnTable([2], [1.0, 100.0])
    assert math.isclose(table.worth(1, 500.0), table.worth(0, 5.0) / 100)
