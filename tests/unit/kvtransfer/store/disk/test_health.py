"""A disk is not used after several failures in a row, for longer and longer pauses."""

from kvtransfer.store.disk.engine import DiskHealth


def switched_off():
    health = DiskHealth(3, pause_s=1.0, most_pause_s=5.0)
    assert [health.failed("EIO", 10.0) for _ in range(3)] == [False, False, True]
    return health


def test_failures_that_are_not_in_a_row_change_nothing():
    health = DiskHealth(2)
    for _ in range(5):
        assert not health.failed("EIO", 0.0)
        health.succeeded()
    assert health.off_reason is None
    assert health.admits(0.0)


def test_after_several_failures_in_a_row_nothing_is_admitted():
    health = switched_off()
    assert health.off_reason == "EIO"
    assert not health.admits(10.9)


def test_after_the_pause_there_is_one_trial():
    health = switched_off()
    assert [health.admits(11.0), health.admits(11.0), health.admits(99.0)] == [True, False, False]


def test_a_trial_that_succeeds_ends_the_pause():
    health = switched_off()
    assert health.admits(11.0)
    health.succeeded()
    assert health.off_reason is None
    assert health.admits(11.0)


def test_pauses_double_up_to_the_longest():
    health, now_s = switched_off(), 11.0
    for pause_s in (2.0, 4.0, 5.0, 5.0):
        assert health.admits(now_s)
        assert not health.failed("ENOSPC", now_s)
        assert not health.admits(now_s + pause_s - 0.1)
        now_s += pause_s
    assert health.off_reason == "ENOSPC"


def test_failures_of_requests_that_were_under_way_do_not_lengthen_the_pause():
    health = switched_off()
    for _ in range(10):
        assert not health.failed("EIO", 10.5)
    assert health.admits(11.0)


def test_after_a_success_the_pause_is_short_again():
    health = switched_off()
    assert health.admits(11.0)
    health.failed("EIO", 11.0)
    health.succeeded()
    for _ in range(3):
        health.failed("EIO", 20.0)
    assert not health.admits(20.9)
    assert health.admits(21.0)
