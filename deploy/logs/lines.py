"""Logging with bounds, so that clients cannot flood the log or forge lines.

The *kind* of a record consists of its logger, its level and its message without arguments. At most
`MOST_OF_A_KIND` records of a kind are written in a period. After the period, one line counts the
omitted records and shows the last of them. A record is one line: control characters are escaped,
and long texts are cut. Lines of a traceback are indented, so that they do not look like records.

A line names its process: the worker, the gateway or the controller. The line of a request ends with
the request's id (`engine.log_context`). In JSON a line is one object with the fields `time`,
`level`, `process`, `pid`, `logger` and `message`. The fields `request`, `exception` and others are
present only if they have a value.

Three loggers have no limit on the number of lines: requests (`ACCESS`), the audit log of orders
(`AUDIT`), and news of the pools (`NEWS`).

A process with a log folder also writes its lines to this folder (`deploy.logs.ring`), for `baton
logs`.
"""

import contextvars
import io
import json
import logging
import logging.handlers
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path
from select import PIPE_BUF
from typing import NamedTuple

import msgspec

from deploy.logs.ring import LogRing, open_log_folder
from engine.clock import Clock
from engine.config import LogFormat, LogsConfig
from engine.errors import ConfigError
from engine.log_context import ACCESS, AUDIT, NEWS, REQUEST

log = logging.getLogger(__name__)

CONTROLLER = "controller"  # name of the controller's process in its log lines
MOST_OF_A_KIND = 10
PERIOD_S = 10.0
AUDIT_MODE = 0o600  # private, because the audit log names people and models
MAX_KINDS = 256  # kinds beyond this number share one count
MAX_MESSAGE_CHARS = 2000
MAX_TRACEBACK_CHARS = 20_000

Kind = tuple[str, int, str]
OTHERS: Kind = ("", 0, "of other kinds")

# Characters that end a line, move a cursor, or cannot be encoded.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(slots=True)
class _Period:
    begin_s: float
    num_written: int = 0
    num_left_out: int = 0
    last: str = ""  # the message of the last omitted record


class LogBound:
    """Decides which log records are written. Pure."""

    def __init__(self) -> None:
        self._periods: dict[Kind, _Period] = {}

    def admits(self, kind: Kind, message: str, now_s: float) -> bool:
        """Counts a record. Returns true if the record should be written."""
        if kind not in self._periods and len(self._periods) >= MAX_KINDS:
            kind = OTHERS
        period = self._periods.setdefault(kind, _Period(now_s))
        if period.num_written < MOST_OF_A_KIND:
            period.num_written += 1
            return True
        period.num_left_out += 1
        period.last = message[:MAX_MESSAGE_CHARS]
        return False

    def ended(self, now_s: float) -> list["LeftOut"]:
        """Ends the periods that have expired.

        Returns the number of omitted records of each kind that has any.
        """
        over = [kind for kind, p in self._periods.items() if now_s - p.begin_s >= PERIOD_S]
        return self._take(over)

    def rest(self) -> list["LeftOut"]:
        """Ends all periods. Returns counts like `ended`."""
        return self._take(list(self._periods))

    def _take(self, kinds: list[Kind]) -> list["LeftOut"]:
        taken = [(kind, self._periods.pop(kind)) for kind in kinds]
        return [LeftOut(kind, p.num_left_out, p.last) for kind, p in taken if p.num_left_out]


class LeftOut(NamedTuple):
    """The number of records of a kind that were not written."""

    kind: Kind
    number: int
    last: str  # the message of the last omitted record


class LogSource(msgspec.Struct, frozen=True):
    """A process that logs: the process's name in its lines, and how the lines are written."""

    name: str
    logs: LogsConfig = LogsConfig()
    folder: Path | None = None  # folder that keeps the latest lines, if any
    tells_news: bool = False  # True if news of the pools is written to standard error


class BoundedHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes records to standard error, within bounds. Writes the same records to `ring`."""

    def __init__(self, clock: Clock, formatter: logging.Formatter | None = None) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(formatter or OneLineFormatter())
        self.ring: LogRing | None = None
        self._clock = clock
        self._bound = LogBound()

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record, or only counts the record."""
        try:
            now_s = self._clock.now_s()
            self._tell(self._bound.ended(now_s))
            is_admitted = self._bound.admits(_kind_of(record), record.getMessage(), now_s)
        except Exception:  # like `StreamHandler`: logging must not raise in its caller
            self.handleError(record)
            return
        if is_admitted:
            self._write(record)

    def close(self) -> None:
        """Writes the counts of omitted records."""
        self.acquire()
        try:
            self._tell(self._bound.rest())
        finally:
            self.release()
        super().close()

    def _tell(self, left_out: list[LeftOut]) -> None:
        for kind, number, last in left_out:
            text = "%d more records were left out, the last: %s"
            if kind is OTHERS:
                text = text.replace("records", "records of other kinds")
            record = logging.LogRecord(kind[0], kind[1], "", 0, text, (number, last), None)
            contextvars.Context().run(self._write, record)

    def _write(self, record: logging.LogRecord) -> None:
        try:
            for piece in pieces_of(f"{self.format(record)}\n"):
                self.stream.write(piece)
                self.flush()
        except RecursionError:
            raise
        except Exception:
            self.handleError(record)
        if self.ring is not None:
            self.ring.handle(record)


class RecordFile(logging.handlers.WatchedFileHandler):
    """Appends lines to a file that may be rotated.

    If a line cannot be written, for example on a full disk, the log reports that, and the caller
    gets no error. The number of such reports is bounded like the number of other records.
    """

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        """A new file gets `mode`, restricted by the process's umask.

        An existing file keeps its mode.
        """
        self._file_mode = mode
        super().__init__(path, encoding="utf-8")

    def _open(self) -> TextIOWrapper:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        file = os.open(self.baseFilename, flags, self._file_mode)
        return TextIOWrapper(open(file, "ab"), encoding=self.encoding)

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line. After a failure, logs the reason."""
        try:
            super().emit(record)
        except OSError:  # the file cannot be reopened
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Logs the exception that is being handled."""
        log.error("a line of %s cannot be written: %s", self.baseFilename, sys.exc_info()[1])


class OneLineFormatter(logging.Formatter):
    """Formats a record as one line: escapes and shortens its text, and adds the process's name if
    it has one.
    """

    def __init__(self, process: str = "") -> None:
        name = f" {process}".replace("%", "%%") if process else ""
        super().__init__(f"%(asctime)s{name} %(levelname).1s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Returns the line of a record."""
        text = _cut(escaped(record.message), MAX_MESSAGE_CHARS)
        request = REQUEST.get()
        record.message = f"{text} [request {escaped(request)}]" if request else text
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        """Returns the lines of a traceback, indented."""
        text = _cut(super().formatException(ei), MAX_TRACEBACK_CHARS)  # type: ignore[arg-type]
        return "\n".join(f"    {escaped(line)}" for line in text.split("\n"))


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object of ASCII characters."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line of a record."""
        at = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, object] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": os.getpid(),
            "logger": record.name,
            "message": _cut(record.getMessage(), MAX_MESSAGE_CHARS),
        }
        if request := REQUEST.get():
            line["request"] = request
        if record.exc_info:
            text = super().formatException(record.exc_info)
            line["exception"] = _cut(text, MAX_TRACEBACK_CHARS)
        fields: Mapping[str, object] = getattr(record, "fields", {})
        return json.dumps({**fields, **line})


def pieces_of(text: str) -> Iterator[str]:
    """Yields a text in pieces of whole lines. A piece is small enough for an atomic write to a
    pipe, unless one line is longer.

    So a killed process, or a process with a full pipe, leaves no partial line.
    """
    piece, num_bytes = "", 0
    for line in text.splitlines(keepends=True):
        more_bytes = len(line.encode(errors="backslashreplace"))
        if piece and num_bytes + more_bytes > PIPE_BUF:
            yield piece
            piece, num_bytes = "", 0
        piece, num_bytes = piece + line, num_bytes + more_bytes
    if piece:
        yield piece


def escaped(text: str) -> str:
    """Escapes the characters that control a terminal or end a line."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def configure_logging(source: LogSource, clock: Clock) -> None:
    """Makes all loggers write one line per record to standard error and to the log folder.

    Lines of requests and orders are also written to the configured files. Raises ConfigError if one
    of these files cannot be opened.
    """
    logs = source.logs
    bounded = BoundedHandler(clock, formatter_of(source))
    logging.basicConfig(level=logs.level.upper(), handlers=[bounded], force=True)
    _give(NEWS, [logging.StreamHandler()] if source.tells_news else [])
    for handler in NEWS.handlers:
        handler.setFormatter(formatter_of(source))
    NEWS.propagate = False
    access: list[logging.Handler] = []
    if logs.access == "-":
        access = [logging.StreamHandler()]
    elif logs.access is not None:
        access = [_open_file("logs.access", logs.access)]
    for handler in access:
        handler.setFormatter(formatter_of(source))
    _give(ACCESS, access)
    ACCESS.propagate = False
    audit: list[logging.Handler] = []
    if logs.audit is not None:
        audit = [_open_file("logs.audit", logs.audit, AUDIT_MODE)]
        audit[0].setFormatter(JsonFormatter(source.name))
    _give(AUDIT, audit)
    AUDIT.setLevel(logging.INFO)
    if source.folder is not None:
        keep_lines(source)


def keep_lines(source: LogSource) -> Callable[[], None]:
    """From now on, also writes this process's lines to the source's folder. Returns a function that
    stops this.

    If the process's logging is not configured, only news of the pools is kept. If the folder cannot
    be used, nothing is kept, and a warning is logged.
    """
    assert source.folder is not None
    try:
        open_log_folder(source.folder)
    except ConfigError as error:
        log.warning("log lines are not kept for `baton logs`: %s", error)
        return lambda: None
    ring = LogRing(source.folder, source.name, JsonFormatter(source.name))
    bounded = [each for each in logging.root.handlers if isinstance(each, BoundedHandler)]
    for handler in bounded:
        handler.ring = ring
    complete = [NEWS, *([ACCESS] if source.logs.access == "-" else [])]
    NEWS.setLevel(logging.INFO)
    NEWS.propagate = False
    for logger in complete:
        logger.addHandler(ring)

    def end() -> None:
        for handler in bounded:
            handler.ring = None
        for logger in complete:
            logger.removeHandler(ring)
        ring.close()

    return end


def controller_logs(logs: LogsConfig, *, tells_news: bool = True) -> LogSource:
    """Returns the log source of a controller. A controller has no lines of requests."""
    return LogSource(CONTROLLER, msgspec.structs.replace(logs, access=None), tells_news=tells_news)


class NewsStream(io.TextIOBase):
    """An output stream for a console. Each printed line becomes a line of the log."""

    def __init__(self) -> None:
        self._begun = ""

    def write(self, text: str) -> int:
        """Logs the complete lines of the text, and buffers an incomplete last line."""
        *lines, self._begun = f"{self._begun}{text}".split("\n")
        for line in filter(None, map(str.strip, lines)):
            NEWS.info("%s", line)
        return len(text)


def formatter_of(source: LogSource) -> logging.Formatter:
    """Returns the formatter for a process's log records."""
    if source.logs.format is LogFormat.JSON:
        return JsonFormatter(source.name)
    return OneLineFormatter(source.name)


def _give(logger: logging.Logger, handlers: list[logging.Handler]) -> None:
    """Replaces the handlers of a logger.

    If `handlers` is empty, the logger writes no INFO records.
    """
    for old in logger.handlers[:]:
        logger.removeHandler(old)
        old.close()
    for handler in handlers:
        logger.addHandler(handler)
    logger.setLevel(logging.INFO if handlers else logging.CRITICAL)


def _open_file(setting: str, file: str, mode: int = 0o666) -> logging.Handler:
    """Opens a file for appending. After a rotation the file is reopened. Raises ConfigError."""
    try:
        return RecordFile(Path(file).expanduser(), mode)
    except OSError as error:
        raise ConfigError(f"{setting}: {file}: {error.strerror}") from error


def _kind_of(record: logging.LogRecord) -> Kind:
    return record.name, record.levelno, str(record.msg)[:MAX_MESSAGE_CHARS]


def _cut(text: str, most: int) -> str:
    """Shortens a text that is too long: keeps its beginning and its end."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} […{len(text) - most} characters…] {text[-half:]}"
