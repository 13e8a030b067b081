"""Services that exit are restarted, after longer and longer pauses."""

from itertools import pairwise

import pytest

from deploy.pools.restarts import LAST_RESTART_S, QUICK_TRIES, Restarts

HOUR_S = 3600


class Tries:
    """A service that starts when a restart is due; checked once a second from second 0."""

    def __init__(self) -> None:
        self.restarts = Restarts()
        self.now_s = 0.0
        self.starts: list[float] = []

    def watch(self, seconds: int, *, dies_after_s: float | None, takes_s: float = 0.0) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            if self.restarts.is_due("gateway", self.now_s):
                self.starts.append(self.now_s)
                self.now_s += takes_s
                if dies_after_s is None:
                    self.restarts.failed("gateway", self.now_s)
                else:
                    self.restarts.started("gateway", self.now_s)
                    self.now_s += dies_after_s
                    self.restarts.failed("gateway", self.now_s)
            self.now_s += 1

    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.starts)]


def test_pause_between_restarts_grows_to_a_minute():
    tries = Tries()
    tries.watch(HOUR_S, dies_after_s=0.0)
    assert tries.gaps()[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert set(tries.gaps()[7:]) == {60}
    assert tries.restarts.is_looping("gateway")


def test_pause_begins_when_the_last_start_has_failed():
    tries = Tries()
    tries.watch(300, dies_after_s=None, takes_s=100.0)
    assert tries.gaps() == [101, 102]


def test_a_start_that_fails_soon_is_tried_again_soon():
    restarts = Restarts()
    now_s, waits = 0.0, []
    for _ in range(QUICK_TRIES + 1):
        restarts.begun("worker-1", now_s)
        waits.append(restarts.failed("worker-1", now_s + 0.7))
        now_s += 0.7 + waits[-1]
    assert waits[:5] == pytest.approx([1, 2, 4, 7, 7])
    assert waits[-2:] == pytest.approx([7, LAST_RESTART_S])


def test_a_service_that_dies_after_its_start_is_not_restarted_at_once():
    restarts = Restarts()
    waits = []
    for _ in range(5):
        restarts.begun("worker-1", 0.0)
        restarts.started("worker-1", 0.0)
        waits.append(restarts.failed("worker-1", 0.0))
    assert waits == [1, 2, 4, 8, 16]


def test_long_run_resets_the_pause():
    tries = Tries()
    tries.watch(30, dies_after_s=0.0)
    assert tries.restarts.failed("gateway", tries.now_s) == 32
    tries.restarts.started("gateway", 1000.0)
    assert tries.restarts.failed("gateway", 1059.0) == 60
    tries.restarts.started("gateway", 2000.0)
    assert tries.restarts.failed("gateway", 2060.0) == 1
    assert not tries.restarts.is_looping("gateway")


def test_all_ends_are_counted_until_a_service_is_forgotten():
    restarts = Restarts(steady_s=1.0)
    for at_s in (0.0, 100.0):
        restarts.failed("a", at_s)
        restarts.started("a", at_s)
    assert restarts.num_failed("a") == 1  # after a long run, a failure counts as the first
    assert restarts.num_ends("a") == 2
    restarts.remove("a")
    assert restarts.num_ends("a") == 0
