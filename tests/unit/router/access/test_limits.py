"""Limits of API keys, as a function of events and time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.access.limits import UNLIMITED, KeyAccounts, KeyLimits, LimitExceeded

KEYS = st.sampled_from("abc")
LIMITS = st.builds(
    KeyLimits,
    st.none() | st.floats(0.1, 5),
    st.none() | st.integers(1, 1000),
    st.none() | st.integers(1, 3),
)


@pytest.mark.parametrize("name", ["requests_per_s", "tokens_per_min", "max_streams"])
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_a_limit_must_be_positive(name, value):
    with pytest.raises(ValueError, match=name):
        KeyLimits(**{name: value})


def test_a_key_without_a_limit_gets_the_default_one():
    defaults = KeyLimits(1.0, 10, 3)
    assert UNLIMITED.or_else(defaults) == defaults
    assert KeyLimits(None, 20, None).or_else(defaults) == KeyLimits(1.0, 20, 3)


def test_without_limits_nothing_is_remembered():
    accounts = KeyAccounts(UNLIMITED)
    stream = accounts.start("a", UNLIMITED, 0.0)
    stream.hold_tokens(10**9, 0.0)
    assert stream.headers(0.0) == {}
    stream.release(1.0)
    assert len(accounts) == 0


def test_requests_come_back_at_their_rate():
    accounts, limits = KeyAccounts(UNLIMITED), KeyLimits(requests_per_s=2.0)
    streams = [accounts.start("a", limits, 10.0) for _ in range(2)]
    with pytest.raises(LimitExceeded, match="2 requests a second") as caught:
        accounts.start("a", limits, 10.25)
    assert caught.value.status == 429
    assert caught.value.headers == {
        "retry-after": "1",
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "0.750s",
    }
    accounts.start("b", limits, 10.25)
    accounts.start("a", limits, 10.5)
    assert streams[0].headers(11.5)["x-ratelimit-remaining-requests"] == "2"


def test_less_than_one_request_a_second_can_be_had():
    accounts, limits = KeyAccounts(UNLIMITED), KeyLimits(requests_per_s=0.1)
    accounts.start("a", limits, 0.0)
    with pytest.raises(LimitExceeded) as caught:
        accounts.start("a", limits, 1.0)
    assert caught.value.headers["retry-after"] == "9"
    accounts.start("a", limits, 10.0)


def test_requests_in_flight_are_counted_to_their_end():
    accounts, limits = KeyAccounts(UNLIMITED), KeyLimits(max_streams=1)
    stream = accounts.start("a", limits, 0.0)
    with pytest.raises(LimitExceeded, match="1 requests in flight"):
        accounts.start("a", limits, 100.0)
    stream.release(100.0)
    accounts.start("a", limits, 100.0)


def test_tokens_that_an_answer_did_not_use_are_given_back():
    accounts, limits = KeyAccounts(UNLIMITED), KeyLimits(tokens_per_min=600)
    first, second = (accounts.start("a", limits, 0.0) for _ in range(2))
    first.hold_tokens(500, 0.0)
    with pytest.raises(LimitExceeded, match="600 tokens a minute") as caught:
        second.hold_tokens(200, 0.0)
    assert caught.value.headers["retry-after"] == "10"  # 100 more tokens at 10 tokens a second
    assert caught.value.headers["x-ratelimit-remaining-tokens"] == "100"
    first.num_used = 300
    first.release(0.0)
    second.hold_tokens(200, 0.0)
    assert second.headers(0.0)["x-ratelimit-remaining-tokens"] == "100"


def test_a_request_that_may_use_more_than_a_minutes_tokens_takes_all_of_them():
    accounts, limits = KeyAccounts(UNLIMITED), KeyLimits(tokens_per_min=60)
    stream = accounts.start("a", limits, 0.0)
    stream.hold_tokens(10_000, 0.0)
    with pytest.raises(LimitExceeded):
        accounts.start("a", limits, 30.0).hold_tokens(10_000, 30.0)
    accounts.start("a", limits, 60.0).hold_tokens(10_000, 60.0)


def test_new_limits_of_a_key_apply_at_once_and_streams_are_kept():
    accounts = KeyAccounts(UNLIMITED)
    accounts.start("a", KeyLimits(max_streams=5), 0.0)
    with pytest.raises(LimitExceeded):
        accounts.start("a", KeyLimits(max_streams=1), 0.0)


def test_the_number_of_accounts_is_bounded():
    accounts, limits = KeyAccounts(KeyLimits(max_streams=1), max_accounts=10), UNLIMITED
    busy = accounts.start("busy", limits, 0.0)
    for number in range(100):
        accounts.start(f"k{number}", limits, 0.0).release(0.0)
    assert len(accounts) == 10
    with pytest.raises(LimitExceeded):  # the first key's account was not removed
        accounts.start("busy", limits, 0.0)
    busy.release(1.0)


@given(
    st.lists(st.tuples(KEYS, st.floats(0, 20), st.integers(1, 2000), st.booleans()), max_size=60),
    LIMITS,
)
def test_no_key_gets_more_than_its_limits(asked, limits):
    accounts, now_s = KeyAccounts(limits), 0.0
    live, taken = {}, {}
    for key, gap_s, num_tokens, ends_one in asked:
        now_s += gap_s
        streams = live.setdefault(key, [])
        if ends_one and streams:
            streams.pop(0).release(now_s)
        try:
            stream = accounts.start(key, UNLIMITED, now_s)
        except LimitExceeded:
            pass
        else:
            streams.append(stream)
            taken[key] = taken.get(key, 0) + 1
            try:
                stream.hold_tokens(num_tokens, now_s)
            except LimitExceeded:
                streams.remove(stream)
                stream.release(now_s)
        accounts.validate()
        if limits.max_streams is not None:
            assert len(streams) <= limits.max_streams
    if limits.requests_per_s is not None:
        most = max(limits.requests_per_s, 1.0) + limits.requests_per_s * now_s + 1e-6
        assert all(number <= most for number in taken.values())


def test_a_batch_takes_its_prompts_from_the_requests_of_a_second():
    accounts, limits = KeyAccounts(UNLIMITED), KeyLimits(requests_per_s=4.0)
    use = accounts.start("a", limits, 0.0)
    use.hold_prompts(3, 0.0)
    use.release(0.0)
    other = accounts.start("a", limits, 0.0)
    with pytest.raises(LimitExceeded) as refused:
        other.hold_prompts(3, 0.0)
    assert refused.value.headers["x-ratelimit-remaining-requests"] == "0"
    other.release(0.0)
    accounts.validate()
    larger = accounts.start("a", limits, 10.0)  # costs more than the bucket, which is full again
    larger.hold_prompts(9, 10.0)
