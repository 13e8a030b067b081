"""Tallies of versions: counts, the longest sequence lately, few versions."""

from router.gateway.versions import LONGEST_FOR_S, MAX_VERSIONS, Tallies


def test_ends_are_counted_by_version():
    tallies = Tallies()
    for failed, late in ((False, False), (True, False), (False, True)):
        tallies.record("v1", failed=failed, late=late, num_tokens=9, now_s=1.0)
    tally = tallies.of("v1")
    assert (tally.ended, tally.failed, tally.late) == (3, 1, 1)
    assert tallies.of("v2").ended == 0


def test_the_longest_sequence_is_forgotten_after_a_while():
    tallies = Tallies()
    tallies.record("v1", failed=False, late=False, num_tokens=900, now_s=10.0)
    tallies.record("v1", failed=False, late=False, num_tokens=20, now_s=LONGEST_FOR_S + 10.0)
    tally = tallies.of("v1")
    assert tally.longest_len(LONGEST_FOR_S + 20.0) == 900
    assert tally.longest_len(2 * LONGEST_FOR_S + 20.0) == 20
    assert tally.longest_len(9 * LONGEST_FOR_S) == 0


def test_versions_that_ended_nothing_for_long_are_forgotten():
    tallies = Tallies()
    for number in range(MAX_VERSIONS + 1):
        tallies.record(f"v{number}", failed=False, late=False, num_tokens=1, now_s=0.0)
    assert tallies.of("v0").ended == 0
    assert tallies.of("v1").ended == 1
