"""Clients cannot flood the log, forge lines or make lines longer than the bound."""

import io
import logging
from select import PIPE_BUF

import pytest

from deploy.logs.lines import (
    MAX_KINDS,
    MAX_MESSAGE_CHARS,
    MOST_OF_A_KIND,
    PERIOD_S,
    BoundedHandler,
    LogBound,
    OneLineFormatter,
    escaped,
    pieces_of,
)
from engine.log_context import REQUEST


class Clock:
    now = 0.0

    def now_s(self):
        return self.now


@pytest.fixture
def log():
    """A logger, its clock, and the written text."""
    clock, handler = Clock(), None
    handler = BoundedHandler(clock)
    handler.setStream(io.StringIO())
    logger = logging.Logger("here")
    logger.addHandler(handler)
    logger.clock, logger.handler = clock, handler
    logger.lines = lambda: handler.stream.getvalue().splitlines()
    return logger


def test_so_many_of_a_kind_are_written_and_then_how_many_were_not(log):
    for number in range(1000):
        log.warning("client %d did it", number)
    log.warning("something else")
    assert len(log.lines()) == MOST_OF_A_KIND + 1
    log.clock.now = PERIOD_S
    log.warning("client %d did it", 1000)
    *_, told, last = log.lines()
    assert told.endswith("W here: 990 more records were left out, the last: client 999 did it")
    assert last.endswith("client 1000 did it")


def test_dropped_lines_are_counted_at_the_end(log):
    for _ in range(MOST_OF_A_KIND + 7):
        log.error("again")
    log.handler.close()
    assert log.lines()[-1].endswith("E here: 7 more records were left out, the last: again")


def test_the_count_of_others_names_no_request_and_shows_no_raw_arguments(log):
    log.handler.setFormatter(OneLineFormatter("gateway"))
    token = REQUEST.set("cmpl-1")
    for _ in range(MOST_OF_A_KIND + 2):
        log.warning("client %s sent %d%%", "a", 7)
    REQUEST.set("cmpl-2")
    log.clock.now = PERIOD_S
    log.warning("something else")
    REQUEST.reset(token)
    *_, own, told, last = log.lines()
    assert own.endswith("client a sent 7% [request cmpl-1]")
    assert told.endswith("2 more records were left out, the last: client a sent 7%")
    assert last.endswith("something else [request cmpl-2]")


def test_the_line_for_kinds_beyond_the_limit_says_that_they_are_several(log):
    for number in range(MAX_KINDS + MOST_OF_A_KIND + 3):
        log.warning(f"made up {number}")  # noqa: G004 - the fault that this is about
    log.handler.close()
    last = MAX_KINDS + MOST_OF_A_KIND + 2
    told = f"3 more records of other kinds were left out, the last: made up {last}"
    assert log.lines()[-1].endswith(told)


def test_a_pipe_takes_each_piece_whole():
    lines = [f"{number} {'é' * number}\n" for number in range(500)]
    pieces = list(pieces_of("".join(lines)))
    assert "".join(pieces) == "".join(lines)
    assert all(piece.endswith("\n") and len(piece.encode()) <= PIPE_BUF for piece in pieces)
    assert len(pieces) < 100
    long = "x" * (PIPE_BUF + 1) + "\n"
    assert list(pieces_of(f"a\n{long}b\n")) == ["a\n", long, "b\n"]
    assert list(pieces_of("a\n\ud800")) == ["a\n\ud800"]


def test_errors_with_tracebacks_are_bounded_too(log):
    for _ in range(100):
        try:
            raise ValueError("x\n2026-01-01 00:00:00,000 C root: forged\x1b[2J")
        except ValueError:
            log.exception("failed")
    text = "\n".join(log.lines())
    assert text.count("Traceback") == MOST_OF_A_KIND
    assert "\x1b" not in text
    assert not any(line.startswith("2026-01-01 00:00:00,000 C") for line in log.lines())


def test_kinds_beyond_the_limit_count_as_one():
    bound = LogBound()
    admitted = sum(bound.admits(("x", 30, f"made up {n}"), "", 0.0) for n in range(10_000))
    assert admitted == MAX_KINDS + MOST_OF_A_KIND
    assert len(bound._periods) <= MAX_KINDS + 1


def test_a_record_is_one_line(log):
    log.warning("path %s", "a\nb\r\u2028c\x00" + "z" * 10_000)
    [line] = log.lines()
    assert r"path a\nb\r\u2028c\x00zzz" in line
    assert len(line) < MAX_MESSAGE_CHARS + 100


def test_a_record_that_cannot_be_formatted_raises_nothing(log, monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)
    log.warning("%d", "no number")
    log.warning("next")
    assert log.lines()[-1].endswith("next")


def test_plain_text_stays_as_it_is():
    assert escaped("Grüße, 世界 🙂") == "Grüße, 世界 🙂"
    assert escaped("\ud800") == r"\ud800"
