"""Ring files of log lines: bounded, kept over restarts, whole lines only, and readable."""

import json
import logging
import os
import stat

import pytest
from rich.console import Console

from deploy.logs.lines import JsonFormatter, LogSource, NewsStream, configure_logging, keep_lines
from deploy.logs.reading import (
    MAX_LINES,
    READ_BYTES,
    TORN,
    LogsQuery,
    RingPosition,
    cursor_of,
    merged,
    positions_of,
    read_pieces,
)
from deploy.logs.ring import MAX_LINE_BYTES, MAX_RINGS, LogRing, open_log_folder, rings
from engine.clock import MonotonicClock
from engine.config import LogFormat, LogsConfig
from engine.errors import ConfigError
from engine.log_context import ACCESS, AUDIT, NEWS


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "run" / "logs"
    open_log_folder(path)
    return path


@pytest.fixture
def ring(folder):
    """Makes rings, and closes them after the test."""
    made = []

    def make(name, **options):
        made.append(LogRing(folder, name, JsonFormatter(name), **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def say(ring, text, *, at=None, **options):
    record = logging.LogRecord("here", logging.WARNING, "", 0, "%s", (text,), None, **options)
    if at is not None:
        record.created = at
    ring.emit(record)


def ask(folder, service=None, lines=100, places=None):
    return read_pieces(folder, LogsQuery(service, lines, places))


def texts(read):
    return [line["message"] for line in merged(read.pieces.values())]


def ends(read):
    return {name: piece.end for name, piece in read.pieces.items()}


def test_lines_of_all_services_are_merged_by_time(folder, ring):
    first, second = ring("worker-1"), ring("gateway")
    say(first, "a", at=1.0)
    say(first, "c", at=3.0)
    say(second, "b", at=2.0)
    say(second, "d", at=4.0)
    read = ask(folder)
    assert texts(read) == ["a", "b", "c", "d"]
    assert [line["message"] for line in merged(read.pieces.values(), 2)] == ["c", "d"]
    assert texts(ask(folder, "gateway")) == ["b", "d"]
    # two lines from each ring; `merged` takes the last of all
    assert texts(ask(folder, lines=1)) == ["c", "d"]
    assert merged(ask(folder, lines=0).pieces.values(), 0) == []


def test_only_the_user_can_read(folder, ring):
    say(ring("worker-1"), "a")
    [[file]] = rings(folder).values()
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_others_can_change_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="no other user"):
        open_log_folder(tmp_path)


def test_a_flood_keeps_two_files(folder, ring):
    noisy = ring("worker-1", file_bytes=10_000)
    for number in range(1000):
        say(noisy, f"line {number}")
    [files] = rings(folder).values()
    assert len(files) == 2
    assert sum(file.path.stat().st_size for file in files) <= 20_000
    told = texts(ask(folder, lines=MAX_LINES))
    assert told[-1] == "line 999"
    # one full file plus part of the next; line lengths depend on the pid
    assert 50 < len(told) < 250
    assert told == [f"line {1000 - len(told) + i}" for i in range(len(told))]


def test_huge_hostile_lines_are_cut_and_whole(folder, ring):
    noisy = ring("worker-1")
    try:
        raise ValueError("\u2028" * 10**6)
    except ValueError as error:
        info = (ValueError, error, error.__traceback__)
    record = logging.LogRecord("here", logging.ERROR, "", 0, "\x1b" * 10**6, (), info)
    record.fields = {"path": "\U0001f600" * 10**6}
    noisy.emit(record)
    say(noisy, "next")
    piece = ask(folder).pieces["worker-1"]
    assert len(piece.text.splitlines()[0]) <= MAX_LINE_BYTES
    huge, after = merged([piece])
    assert huge["is_cut"] is True
    assert huge["exception"].startswith("Traceback")
    assert after["message"] == "next"


def test_the_next_process_of_a_name_follows_a_torn_line(folder, ring):
    say(ring("worker-1"), "before")
    [[file]] = rings(folder).values()
    with file.path.open("ab") as torn:
        torn.write(b'{"time": "2026-01-01T00:00:00.000Z", "mess')
    first = ask(folder)
    assert texts(first) == ["before"]  # the rest of the torn line may still be written
    say(ring("worker-1"), "after")
    assert texts(ask(folder)) == [
        "before",
        TORN + '{"time": "2026-01-01T00:00:00.000Z", "mess',
        "after",
    ]
    assert texts(ask(folder, places=ends(first)))[-1] == "after"


def test_following_gets_each_line_once_over_restarts_and_new_files(folder, ring):
    told, places, number = [], {}, 0
    for turn in range(20):
        writer = ring("worker-1", file_bytes=2000)  # simulates a restart
        for _ in range(turn % 7):
            say(writer, f"line {number}")
            number += 1
        read = ask(folder, places=places)
        assert not any(piece.is_overwritten for piece in read.pieces.values())
        told += texts(read)
        places |= ends(read)
    assert told == [f"line {i}" for i in range(number)]


def test_following_reports_overwritten_lines(folder, ring):
    writer = ring("worker-1", file_bytes=2000)
    say(writer, "first")
    places = ends(ask(folder))
    for number in range(100):
        say(writer, f"line {number}")
    [piece] = ask(folder, places=places).pieces.values()
    assert piece.is_overwritten
    [again] = ask(folder, places={"worker-1": piece.end}).pieces.values()
    assert (again.text, again.is_overwritten) == (b"", False)


def test_answers_are_bounded_and_the_rest_follows(folder, ring):
    writer = ring("worker-1", file_bytes=10**9)
    for number in range(6 * READ_BYTES // 5 // 20_000):
        say(writer, f"{number} " + "\u2028" * 1990)  # 12 kB per line
    for number in range(300):
        say(writer, f"more {number} " + "\u2028" * 1990)
    places, told = {}, []
    for _ in range(10):
        [piece] = ask(folder, places=places).pieces.values()
        assert len(piece.text) <= READ_BYTES
        told += merged([piece])
        places = {"worker-1": piece.end}
        if not piece.has_more:
            break
    assert told[-1]["message"].startswith("more 299")
    assert len(told) == 6 * READ_BYTES // 5 // 20_000 + 300
    [tail] = ask(folder, lines=MAX_LINES).pieces.values()
    assert len(tail.text) <= READ_BYTES


def test_two_processes_of_one_name_lose_no_line(folder, ring):
    one, other = (ring("gateway", file_bytes=3000) for _ in range(2))
    places, told = {}, []
    for number in range(100):
        say(one if number % 3 else other, f"line {number}")
        read = ask(folder, places=places)
        told += texts(read)
        places |= ends(read)
    assert sorted(told) == sorted(f"line {i}" for i in range(100))


def test_lost_lines_are_counted_and_told(folder, ring, monkeypatch):
    writer = ring("worker-1")
    say(writer, "before")

    def full(fd, data):
        raise OSError(28, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        for _ in range(3):
            say(writer, "lost")
    say(writer, "after")
    before, after, told = texts(ask(folder))
    assert (before, after) == ("before", "after")
    assert told.startswith("3 lines could not be kept")


def test_old_rings_make_room_for_new_ones(folder, ring):
    for number in range(MAX_RINGS + 3):
        say(ring(f"decode-{number}"), "a")
        [file] = rings(folder)[f"decode-{number}"]
        os.utime(file.path, (number, number))
    found = rings(folder)
    assert len(found) == MAX_RINGS
    assert "worker-1" not in found


@pytest.mark.parametrize("name", ["../../etc/x", "a/b", ".", "a.b.c", "%2e", "é\n"])
def test_any_name_stays_in_the_folder(folder, ring, name):
    say(ring(name), "a")
    assert list(rings(folder)) == [name]


def test_other_files_are_no_rings(folder):
    for name in ("x", "x.log", "x.y.log", ".1.log", "x.-1.log", "x.².log"):
        (folder / name).touch()
    assert rings(folder) == {}
    assert ask(folder / "none").pieces == {}


def test_cursors_are_checked():
    places = {"worker-1": RingPosition(3, 17)}
    assert positions_of(cursor_of(places)) == places
    many = {f"decode-{i}@0123456789abcdef": RingPosition(3, i * 7919) for i in range(2000)}
    assert len(cursor_of(many)) < 30_000  # the API accepts URLs up to 32 KiB
    negative = cursor_of(places | {"x": RingPosition(1, -1)})
    for wrong in ("", "x", "é", "AAAA", cursor_of(places)[:-9], negative):
        with pytest.raises(ConfigError, match="no cursor"):
            positions_of(wrong)


@pytest.fixture
def _as_before():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for logger in (ACCESS, AUDIT, NEWS):
        logger.handlers.clear()


@pytest.mark.usefixtures("_as_before")
def test_a_configured_process_keeps_its_log(folder, capsys):
    source = LogSource("gateway", LogsConfig(access="-"), folder)
    configure_logging(source, MonotonicClock())
    logging.getLogger("x").warning("a warning")
    logging.getLogger("x").info("below the level")
    ACCESS.info("a request", extra={"fields": {"status": 200}})
    NEWS.info("a worker died")
    read = ask(folder)
    assert texts(read) == ["a warning", "a request", "a worker died"]
    assert [line["process"] for line in merged(read.pieces.values())] == ["gateway"] * 3
    assert merged(read.pieces.values())[1]["status"] == 200
    assert "a worker died" not in capsys.readouterr().err


@pytest.mark.usefixtures("_as_before")
def test_news_are_lines_where_no_console_prints_them(capsys):
    configure_logging(LogSource("controller", tells_news=True), MonotonicClock())
    NEWS.info("a worker died")
    assert capsys.readouterr().err.endswith(" controller I baton.news: a worker died\n")


@pytest.mark.usefixtures("_as_before")
def test_what_a_console_prints_is_json_where_lines_are(capsys):
    logs = LogsConfig(format=LogFormat.JSON)
    configure_logging(LogSource("controller", logs, tells_news=True), MonotonicClock())
    console = Console(file=NewsStream(), width=200)
    with console.status("starting"):
        console.print("[green]✓[/green] serving [bold]x[/bold] at http://a\n\nstopped")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"] for line in lines] == ["✓ serving x at http://a", "stopped"]
    assert {line["process"] for line in lines} == {"controller"}


@pytest.mark.usefixtures("_as_before")
def test_keeping_lines_ends(folder):
    configure_logging(LogSource("controller"), MonotonicClock())
    end = keep_lines(LogSource("controller", folder=folder))
    logging.getLogger("x").warning("one")
    end()
    logging.getLogger("x").warning("two")
    NEWS.info("three")
    assert texts(ask(folder)) == ["one"]


@pytest.mark.usefixtures("_as_before")
def test_without_a_folder_the_process_goes_on(tmp_path, capsys):
    (tmp_path / "file").touch()
    source = LogSource("gateway", folder=tmp_path / "file" / "logs")
    configure_logging(source, MonotonicClock())
    logging.getLogger("x").warning("goes on")
    told, other = capsys.readouterr().err.splitlines()
    assert "log lines are not kept" in told
    assert other.endswith("goes on")


def test_text_of_lines_has_no_control_characters():
    from deploy.commands.events import log_line

    line = {"time": "t\x1b", "process": "[bold]x", "level": "error", "logger": "a"}
    line |= {"message": "b\nforged", "request": "\x1b[2J", "exception": "one\n\x1b[2Jtwo"}
    shown = log_line(json.loads(json.dumps(line)))
    assert "\x1b" not in shown
    assert shown.count("\n") == 2
    assert "[request" in shown.replace("\\", "")
