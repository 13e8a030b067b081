"""Logging that clients cannot flood, forge or blow up.

The *kind* of a record is its logger, its level and its message without arguments. At most
`MOST_OF_A_KIND` records of a kind are written in a period. After the period, one line counts the
omitted records and shows the last of them. A record is one line: control characters are escaped,
and long texts are cut. Lines of a traceback are indented, so that they do not look like records.

A line names its process: the worker, the gateway or the controller. If the line belongs to a
request, it ends with the request's id (`engine.log_context`). In JSON a line is one object with the
fields `time`, `level`, `process`, `pid`, `logger` and `message`. `request`, `exception` and further
fields are present if the line has them.

The number of lines is not bounded for requests (`ACCESS`), for the file of orders (`AUDIT`), and
for news of the pools (`NEWS`).

A process with a log folder keeps its lines there too (`deploy.logs.ring`), for `baton logs`.
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

CONTROLLER = "controller"  # the controller process's name in lines
MOST_OF_A_KIND = 10
PERIOD_S = 10.0
AUDIT_MODE = 0o600  # private, since the file of orders names people and models
MAX_KINDS = 256  # further kinds share one count
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
    """Decides which records are written. Pure."""

    def __init__(self) -> None:
        self._periods: dict[Kind, _Period] = {}

    def admits(self, kind: Kind, message: str, now_s: float) -> bool:
        """Counts a record. Returns true if the record is to be written."""
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
        """Ends expired periods. Returns a count for each kind with omitted records."""
        over = [kind for kind, p in self._periods.items() if now_s - p.begin_s >= PERIOD_S]
        return self._take(over)

    def rest(self) -> list["LeftOut"]:
        """Ends all periods. Returns the same counts as `ended`."""
        return self._take(list(self._periods))

    def _take(self, kinds: list[Kind]) -> list["LeftOut"]:
        taken = [(kind, self._periods.pop(kind)) for kind in kinds]
        return [LeftOut(kind, p.num_left_out, p.last) for kind, p in taken if p.num_left_out]


class LeftOut(NamedTuple):
    """Records of a kind that were not written."""

    kind: Kind
    number: int
    last: str  # the message of the last omitted record


class LogSource(msgspec.Struct, frozen=True):
    """A process that logs: its name in its lines, and how it writes them."""

    name: str
    logs: LogsConfig = LogsConfig()
    folder: Path | None = None  # the folder that keeps its latest lines, if any
    tells_news: bool = False  # True if news of the pools are written to standard error


class BoundedHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes records to standard error, within bounds. `ring` keeps the same records."""

    def __init__(self, clock: Clock, formatter: logging.Formatter | None = None) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(formatter or OneLineFormatter())
        self.ring: LogRing | None = None
        self._clock = clock
        self._bound = LogBound()

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record, or counts it."""
        try:
            now_s = self._clock.now_s()
            self._tell(self._bound.ended(now_s))
            is_admitted = self._bound.admits(_kind_of(record), record.getMessage(), now_s)
        except Exception:  # as in `StreamHandler`: logging must not break its caller
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
        """A new file gets `mode`, less the process's umask; an existing file keeps its mode."""
        self._file_mode = mode
        super().__init__(path, encoding="utf-8")

    def _open(self) -> TextIOWrapper:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        file = os.open(self.baseFilename, flags, self._file_mode)
        return TextIOWrapper(open(file, "ab"), encoding=self.encoding)

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line, or logs the reason of a failure."""
        try:
            super().emit(record)
        except OSError:  # the file cannot be reopened
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Logs the exception that is being handled."""
        log.error("a line of %s cannot be written: %s", self.baseFilename, sys.exc_info()[1])


class OneLineFormatter(logging.Formatter):
    """Escapes and cuts the text of records. Each line names the process, if it has a name."""

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
    """Yields a text in pieces of whole lines, if possible small enough for atomic writes to a pipe.

    So a process that is killed, or whose pipe is full, leaves no partial line.
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

    Lines of requests and orders also go to the configured files. Raises ConfigError if one of these
    files cannot be opened.
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
    """Also keeps this process's lines in the source's folder. Returns a function that stops this.

    A process whose logging is not configured keeps only its news. Without a usable folder nothing
    is kept; that is logged.
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
    """Returns the source of a controller, which serves no requests."""
    return LogSource(CONTROLLER, msgspec.structs.replace(logs, access=None), tells_news=tells_news)


class NewsStream(io.TextIOBase):
    """A stream for a console: each printed line becomes a line of the log."""

    def __init__(self) -> None:
        self._begun = ""

    def write(self, text: str) -> int:
        """Logs the complete lines, and buffers the rest."""
        *lines, self._begun = f"{self._begun}{text}".split("\n")
        for line in filter(None, map(str.strip, lines)):
            NEWS.info("%s", line)
        return len(text)


def formatter_of(source: LogSource) -> logging.Formatter:
    """Returns the formatter of a process's records."""
    if source.logs.format is LogFormat.JSON:
        return JsonFormatter(source.name)
    return OneLineFormatter(source.name)


def _give(logger: logging.Logger, handlers: list[logging.Handler]) -> None:
    """Replaces the handlers of a logger. Without own handlers the logger is disabled for INFO."""
    for old in logger.handlers[:]:
        logger.removeHandler(old)
        old.close()
    for handler in handlers:
        logger.addHandler(handler)
    logger.setLevel(logging.INFO if handlers else logging.CRITICAL)


def _open_file(setting: str, file: str, mode: int = 0o666) -> logging.Handler:
    """Opens a file to append to. It is reopened after a rotation. Raises ConfigError."""
    try:
        return RecordFile(Path(file).expanduser(), mode)
    except OSError as error:
        raise ConfigError(f"{setting}: {file}: {error.strerror}") from error


def _kind_of(record: logging.LogRecord) -> Kind:
    return record.name, record.levelno, str(record.msg)[:MAX_MESSAGE_CHARS]


def _cut(text: str, most: int) -> str:
    """Returns the beginning and the end of a text that is too long."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} […{len(text) - most} characters…] {text[-half:]}"
