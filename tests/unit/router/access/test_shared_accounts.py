"""Accounts shared by several gateway processes: limits are exact over all processes."""

import fcntl
import os
from contextlib import ExitStack, contextmanager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.access import shared_accounts
from router.access.limits import UNLIMITED, KeyAccounts, KeyLimits, KeyUse, LimitExceeded
from router.access.shared_accounts import SharedAccounts

NUM_PROCESSES = 3


@pytest.fixture(autouse=True)
def _few_slots(monkeypatch):
    monkeypatch.setattr(shared_accounts, "NUM_SLOTS", 64)


@contextmanager
def opened(folder, number: int):
    shared = SharedAccounts(folder / "accounts", number, NUM_PROCESSES)
    shared.open()
    try:
        yield KeyAccounts(UNLIMITED, shared=shared)
    finally:
        shared.close()


@pytest.fixture
def processes(tmp_path):
    with ExitStack() as stack:
        yield [stack.enter_context(opened(tmp_path, n)) for n in range(NUM_PROCESSES)]


def test_streams_over_all_processes_stay_within_the_limit(processes):
    one, other, third = processes
    limits = KeyLimits(max_streams=2)
    first = one.start("a", limits, 0.0)
    other.start("a", limits, 0.0)
    for each in processes:
        with pytest.raises(LimitExceeded, match="2 requests in flight"):
            each.start("a", limits, 0.0)
    third.start("b", limits, 0.0)  # another key has its own account
    first.release(1.0)
    third.start("a", limits, 1.0)
    with pytest.raises(LimitExceeded):
        one.start("a", limits, 1.0)


def test_each_prompt_of_a_batch_counts_over_all_processes(processes):
    one, other, _ = processes
    limits = KeyLimits(max_streams=4)
    one.start("a", limits, 0.0).hold_prompts(3, 0.0)
    use = other.start("a", limits, 0.0)
    with pytest.raises(LimitExceeded, match="each prompt counts as one"):
        use.hold_prompts(2, 0.0)


def test_requests_and_tokens_are_taken_from_one_bucket(processes):
    one, other, _ = processes
    limits = KeyLimits(requests_per_s=2.0, tokens_per_min=600)
    use = one.start("a", limits, 10.0)
    use.hold_tokens(400, 10.0)
    late = other.start("a", limits, 10.0)
    with pytest.raises(LimitExceeded, match="tokens a minute"):
        late.hold_tokens(400, 10.0)
    with pytest.raises(LimitExceeded, match="requests a second"):
        one.start("a", limits, 10.0)
    use.num_used = 100
    use.release(10.0)
    late.hold_tokens(400, 10.0)
    assert late.headers(10.0)["x-ratelimit-remaining-tokens"] == "100"
    assert one.start("a", limits, 11.0).headers(11.0)["x-ratelimit-remaining-tokens"] == "110"


def test_a_process_that_starts_again_forgets_what_its_predecessor_had_in_flight(tmp_path):
    limits = KeyLimits(max_streams=2)
    with opened(tmp_path, 0) as one:
        one.start("a", limits, 0.0)
        with opened(tmp_path, 1) as other:
            other.start("a", limits, 0.0)
            with pytest.raises(LimitExceeded):
                one.start("a", limits, 0.0)
        with opened(tmp_path, 1) as again:
            again.start("a", limits, 0.0)
            with pytest.raises(LimitExceeded):
                again.start("a", limits, 0.0)


def test_limits_that_change_begin_anew_once_for_all_processes(processes):
    one, other, _ = processes
    one.start("a", KeyLimits(requests_per_s=1.0), 0.0)
    more = KeyLimits(requests_per_s=3.0)
    for each in (one, other, one):
        each.start("a", more, 0.0)
    with pytest.raises(LimitExceeded):
        other.start("a", more, 0.0)


def test_a_lock_that_another_process_keeps_stops_no_request(processes, tmp_path, monkeypatch):
    monkeypatch.setattr(shared_accounts, "MAX_LOCK_TRIES", 3)
    stopped = os.open(tmp_path / "accounts", os.O_RDWR)
    fcntl.flock(stopped, fcntl.LOCK_EX)
    try:
        processes[0].start("a", KeyLimits(max_streams=1), 0.0)
        with pytest.raises(LimitExceeded):
            processes[1].start("a", KeyLimits(max_streams=1), 0.0)
    finally:
        os.close(stopped)


def test_more_keys_than_slots_forget_idle_ones_and_keep_busy_ones(processes):
    one, other, _ = processes
    limits = KeyLimits(max_streams=1)
    one.start("busy", limits, 0.0)
    for number in range(1000):
        one.start(f"key-{number}", limits, float(number)).release(float(number))
    with pytest.raises(LimitExceeded):
        other.start("busy", limits, 1000.0)


steps = st.lists(
    st.tuples(st.integers(0, NUM_PROCESSES - 1), st.sampled_from("ab"), st.booleans()), max_size=40
)


@settings(max_examples=30)
@given(steps)
def test_no_order_lets_more_through_than_one_process_would(tmp_path_factory, steps):
    limits, folder = KeyLimits(max_streams=2), tmp_path_factory.mktemp("shared")
    alone = KeyAccounts(UNLIMITED)
    with ExitStack() as stack:
        processes = [stack.enter_context(opened(folder, n)) for n in range(NUM_PROCESSES)]
        running: list[tuple[KeyUse, KeyUse]] = []
        for now_s, (number, key, ends) in enumerate(steps):
            if ends and running:
                for use in running.pop(0):
                    use.release(now_s)
                continue
            expected = None
            with suppress(LimitExceeded):
                expected = alone.start(key, limits, now_s)
            if expected is None:
                with pytest.raises(LimitExceeded):
                    processes[number].start(key, limits, now_s)
            else:
                running.append((expected, processes[number].start(key, limits, now_s)))
