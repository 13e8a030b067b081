"""Only time in which this process was listening counts as silence of the peer."""

from hypothesis import given
from hypothesis import strategies as st

from engine.net.silence import MAX_BETWEEN_LOOKS_S, Silence


def test_silence_lasts_from_the_last_sign_of_life():
    silence = Silence(10.0)
    assert [silence.check(10.0 + 0.5 * i) for i in range(1, 4)] == [0.5, 1.0, 1.5]
    silence.broken()
    assert silence.check(12.0) == 0.0
    assert silence.check(12.5) == 0.5


def test_own_pause_is_not_peer_silence():
    silence = Silence(0.0)
    assert silence.check(0.5) == 0.5
    assert silence.check(60.5) == 0.5 + MAX_BETWEEN_LOOKS_S


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=30))
def test_silence_never_exceeds_real_time_and_grows_by_bounded_steps(looks):
    now_s = last_s = heard_s = 0.0
    silence = Silence(now_s)
    for passed_s, heard in looks:
        now_s += passed_s
        if heard:
            silence.broken()
            heard_s = now_s
        seconds = silence.check(now_s)
        assert seconds <= now_s - heard_s + 1e-9
        assert seconds <= last_s + MAX_BETWEEN_LOOKS_S
        last_s = seconds
