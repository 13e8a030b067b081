"""Signals before, during and after a start."""

import signal

import pytest

from deploy.local.leaving import SIGNALS, StopAsked, StopSignals, exit_status


@pytest.fixture
def signals():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    made = StopSignals()
    made.install()
    yield made
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_before_the_start_raises_at_its_begin(signals, number):
    signal.raise_signal(number)
    with pytest.raises(StopAsked) as asked:
        signals.interrupt()
    assert asked.value.number == number
    signal.raise_signal(number)  # the signal arrives while the start is being undone
    assert signals.wait(0) == number


def test_the_first_signal_during_the_start_raises_and_the_next_waits(signals):
    signals.interrupt()
    with pytest.raises(StopAsked):
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    assert signals.wait(0) == signal.SIGINT


def test_a_signal_after_the_start_waits(signals):
    signals.interrupt()
    signals.keep()
    assert signals.wait(0) is None
    signal.raise_signal(signal.SIGINT)
    assert signals.wait(0) == signal.SIGINT


def test_exit_status():
    assert exit_status(signal.SIGTERM) == 143
