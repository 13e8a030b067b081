"""Listed objects are paired into segments, and only old incomplete segments are garbage."""

import pytest

from kvtransfer.store.objects.manifest import (
    GARBAGE_AGE_S,
    OWN_GARBAGE_AGE_S,
    ListedSegment,
    ObjectFacts,
    find_garbage,
    pair_objects,
    segment_name,
)

OWN, OTHER = "a" * 16, "b" * 16
NOW_S = 1_800_000_000.0


def test_both_objects_of_a_segment_are_paired():
    name = segment_name(1_700_000_000, OWN, 5)
    (one,) = pair_objects(
        [ObjectFacts(f"{name}.manifest", 30, 12.0), ObjectFacts(f"{name}.segment", 400, 11.0)]
    )
    assert one == ListedSegment(name, 400, 30, 12.0)
    assert one.num_bytes == 430
    assert not one.is_half


def test_without_a_time_of_modification_the_name_tells_the_time():
    name = segment_name(1_700_000_000, OWN, 5)
    (one,) = pair_objects([ObjectFacts(f"{name}.segment", 400, None)])
    assert one.written_s == 1_700_000_000


def test_the_oldest_segment_comes_first():
    young, old = segment_name(100, OWN, 0), segment_name(200, OTHER, 0)
    listed = pair_objects(
        [ObjectFacts(f"{young}.segment", 1, 9.0), ObjectFacts(f"{old}.segment", 1, 8.0)]
    )
    assert [one.name for one in listed] == [old, young]


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".segment",
        "readme.txt",
        "0-0-0.segment",
        f"{segment_name(0, OWN, 0)}.segment.tmp",
        f"{segment_name(0, OWN, 0)}x.manifest",
        f"{segment_name(0, OWN, 0).upper()}.segment",
        f"{segment_name(0, OWN, 0)}.segment\n",
    ],
)
def test_objects_with_other_names_are_left_alone(name):
    assert pair_objects([ObjectFacts(name, 1, None)]) == []


@pytest.mark.parametrize(
    ("manifest_bytes", "segment_bytes", "is_ours"),
    [
        (100, 640, True),
        (0, 640, False),
        (8193, 640, False),
        (100, 641, False),
        (100, 0, False),
        (None, 640, False),
        (100, None, False),
    ],
)
def test_sizes_are_bounded_before_anything_is_read(manifest_bytes, segment_bytes, is_ours):
    assert ListedSegment("n", segment_bytes, manifest_bytes, 0.0).has_our_size(640) is is_ours


@pytest.mark.parametrize(
    ("writer", "age_s", "is_garbage"),
    [
        (OWN, OWN_GARBAGE_AGE_S - 1, False),
        (OWN, OWN_GARBAGE_AGE_S + 1, True),
        (OTHER, OWN_GARBAGE_AGE_S + 1, False),
        (OTHER, GARBAGE_AGE_S - 1, False),
        (OTHER, GARBAGE_AGE_S + 1, True),
    ],
)
def test_a_half_segment_is_garbage_once_it_is_old(writer, age_s, is_garbage):
    name = segment_name(0, writer, 0)
    for half in ((640, None), (None, 100)):
        listed = [ListedSegment(name, *half, NOW_S - age_s)]
        assert list(find_garbage(listed, set(), OWN, NOW_S)) == [name] * is_garbage


def test_an_old_segment_is_garbage_only_if_its_manifest_is_bad():
    good, bad = segment_name(0, OTHER, 0), segment_name(0, OTHER, 1)
    listed = [ListedSegment(name, 640, 100, 0.0) for name in (good, bad)]
    assert list(find_garbage(listed, {bad}, OWN, NOW_S)) == [bad]
