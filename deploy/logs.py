"""Logging that clients cannot flood, forge or stretch.

The *kind* of a record is its logger, its level and its message without arguments. At most
`MOST_OF_A_KIND` records of a kind are written in a period. The next record, or the end, counts the
others. A record is one line: control characters are escaped, and long texts are cut. Lines of a
traceback are indented, so that none looks like a record.
"""

import logging
import re
import sys
from dataclasses import dataclass

from engine.clock import Clock

MOST_OF_A_KIND = 10
PERIOD_S = 10.0
MAX_KINDS = 256  # further kinds share one
MAX_MESSAGE_CHARS = 2000
MAX_TRACEBACK_CHARS = 20_000
LINE = "%(asctime)s %(levelname).1s %(name)s: %(message)s"

Kind = tuple[str, int, str]
OTHERS: Kind = ("", 0, "of other kinds")

# Characters that end a line, move a cursor, or cannot be encoded.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(slots=True)
class _Period:
    begin_s: float
    num_written: int = 0
    num_left_out: int = 0


class LogBound:
    """Decides which records are written. Pure."""

    def __init__(self) -> None:
        self._periods: dict[Kind, _Period] = {}

    def admits(self, kind: Kind, now_s: float) -> bool:
        """Counts a record. Returns true if it is to be written."""
        if kind not in self._periods and len(self._periods) >= MAX_KINDS:
            kind = OTHERS
        period = self._periods.setdefault(kind, _Period(now_s))
        if period.num_written < MOST_OF_A_KIND:
            period.num_written += 1
            return True
        period.num_left_out += 1
        return False

    def ended(self, now_s: float) -> list[tuple[Kind, int]]:
        """Ends periods that are over. Returns how many records were left out, by kind."""
        over = [kind for kind, p in self._periods.items() if now_s - p.begin_s >= PERIOD_S]
        return self._take(over)

    def rest(self) -> list[tuple[Kind, int]]:
        """Ends all periods, with the same result."""
        return self._take(list(self._periods))

    def _take(self, kinds: list[Kind]) -> list[tuple[Kind, int]]:
        taken = [(kind, self._periods.pop(kind).num_left_out) for kind in kinds]
        return [(kind, number) for kind, number in taken if number]


class BoundedHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes records to standard error, within bounds."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(OneLineFormatter(LINE))
        self._clock = clock
        self._bound = LogBound()

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record, or counts it."""
        try:
            now_s = self._clock.now_s()
            self._tell(self._bound.ended(now_s))
            is_admitted = self._bound.admits(_kind_of(record), now_s)
        except Exception:  # as in `StreamHandler`: a log line must not break its caller
            self.handleError(record)
            return
        if is_admitted:
            super().emit(record)

    def close(self) -> None:
        """Writes how many records were left out."""
        self.acquire()
        try:
            self._tell(self._bound.rest())
        finally:
            self.release()
        super().close()

    def _tell(self, left_out: list[tuple[Kind, int]]) -> None:
        for (name, level, message), number in left_out:
            text = "%d more records were left out: %s"
            args = (number, message)
            super().emit(logging.LogRecord(name, level, "", 0, text, args, None))


class OneLineFormatter(logging.Formatter):
    """Escapes and cuts the text of records."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Returns the line of a record."""
        record.message = _cut(escaped(record.message), MAX_MESSAGE_CHARS)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        """Returns the lines of a traceback, indented."""
        text = _cut(super().formatException(ei), MAX_TRACEBACK_CHARS)  # type: ignore[arg-type]
        return "\n".join(f"    {escaped(line)}" for line in text.split("\n"))


def escaped(text: str) -> str:
    """Escapes the characters that a terminal or a line reader would act upon."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def configure_logging(level: str, clock: Clock) -> None:
    """Makes all loggers write one line a record to standard error."""
    logging.basicConfig(level=level.upper(), handlers=[BoundedHandler(clock)], force=True)


def _kind_of(record: logging.LogRecord) -> Kind:
    return record.name, record.levelno, str(record.msg)[:MAX_MESSAGE_CHARS]


def _cut(text: str, most: int) -> str:
    """Keeps the beginning and the end."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} […{len(text) - most} characters…] {text[-half:]}"
