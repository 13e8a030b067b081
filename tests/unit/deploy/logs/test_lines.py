"""Contents of a log line: the process and the request, as text and as JSON."""

import asyncio
import json
import logging

import pytest

from deploy.logs.lines import LogSource, configure_logging, controller_logs, formatter_of
from engine.clock import MonotonicClock
from engine.config import LogFormat, LogsConfig, config_of
from engine.errors import ConfigError
from engine.log_context import ACCESS, AUDIT, REQUEST

JSON = LogsConfig(format=LogFormat.JSON)


@pytest.fixture(autouse=True)
def _as_before():
    """Restores the root logger's handlers after the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()  # otherwise a configuration would close these handlers
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for handler in [*ACCESS.handlers, *AUDIT.handlers]:
        handler.close()
    for logger in (ACCESS, AUDIT):
        logger.handlers.clear()


def record(message, *args, **fields):
    made = logging.LogRecord("here", logging.WARNING, "", 0, message, args, None)
    made.fields = fields
    return made


def test_text_names_the_process():
    line = formatter_of(LogSource("worker-1")).format(record("took %d s", 3))
    assert line.endswith(" worker-1 W here: took 3 s")


def test_json_has_all_fields():
    line = formatter_of(LogSource("worker-1", JSON)).format(record("took %d s", 3, status=200))
    told = json.loads(line)
    assert told.pop("time").endswith("Z")
    assert told.pop("pid") > 0
    assert told == {
        "level": "warning",
        "process": "worker-1",
        "logger": "here",
        "message": "took 3 s",
        "status": 200,
    }


@pytest.mark.parametrize("text", ['a\n"b"', "\ud800", "\u2028\x1b[2J"])
def test_hostile_text_stays_one_ascii_line(text):
    line = formatter_of(LogSource("worker-1", JSON)).format(record("%s", text))
    assert "\n" not in line
    assert line.isascii()
    assert json.loads(line)["message"] == text


def test_fields_do_not_replace_those_of_the_line():
    line = formatter_of(LogSource("worker-1", JSON)).format(record("it", process="forged"))
    assert json.loads(line)["process"] == "worker-1"


def test_a_traceback_is_a_field():
    made = record("it failed")
    try:
        raise ValueError("why")
    except ValueError as error:
        made.exc_info = (ValueError, error, error.__traceback__)
    told = json.loads(formatter_of(LogSource("gateway", JSON)).format(made))
    assert "ValueError: why" in told["exception"]


def test_lines_of_a_task_and_its_children_have_its_request():
    text, as_json = formatter_of(LogSource("gateway")), formatter_of(LogSource("gateway", JSON))

    async def line(formatter):
        return formatter.format(record("it"))

    async def work():
        REQUEST.set("chatcmpl-1 mine")
        return [await asyncio.create_task(line(each)) for each in (text, as_json)]

    async def both():
        worked = await asyncio.create_task(work())
        return worked, await line(text)

    (told, told_json), outside = asyncio.run(both())
    assert told.endswith("it [request chatcmpl-1 mine]")
    assert json.loads(told_json)["request"] == "chatcmpl-1 mine"
    assert outside.endswith("it")


def test_lines_of_requests_and_orders_go_to_files_without_bound(tmp_path, capsys):
    access, audit = tmp_path / "access", tmp_path / "audit"
    logs = LogsConfig(access=str(access), audit=str(audit))
    configure_logging(LogSource("gateway", logs), MonotonicClock())
    for number in range(100):
        ACCESS.info("request %d", number, extra={"fields": {"status": 200}})
        AUDIT.info("order %d", number, extra={"fields": {"who": "admin"}})
    assert access.read_text().splitlines()[-1].endswith("I baton.access: request 99")
    assert audit.stat().st_mode & 0o777 == 0o600
    assert [json.loads(line)["who"] for line in audit.read_text().splitlines()] == ["admin"] * 100
    told = capsys.readouterr().err
    assert "order 9" in told
    assert "request 9" not in told


def test_without_a_wish_no_request_is_logged(capsys):
    configure_logging(LogSource("gateway"), MonotonicClock())
    ACCESS.info("request")
    AUDIT.info("order")
    told = capsys.readouterr().err
    assert "request" not in told
    assert "order" in told


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    logs = LogsConfig(access=str(tmp_path / "no" / "file"))
    with pytest.raises(ConfigError, match=r"logs.access: .*: No such file"):
        configure_logging(LogSource("gateway", logs), MonotonicClock())


def test_a_controller_logs_no_requests():
    assert controller_logs(LogsConfig(access="-")).logs.access is None


def test_settings_have_a_section():
    tree = {"logs": {"level": "info", "format": "json", "access": "-"}}
    logs = config_of(tree, source="test").logs
    assert (logs.level, logs.format, logs.access) == ("info", "json", "-")


def test_lines_that_cannot_be_written_are_reported_in_the_log(tmp_path, capsys):
    folder = tmp_path / "logs"
    folder.mkdir()
    configure_logging(
        LogSource("gateway", LogsConfig(access=str(folder / "access"))), MonotonicClock()
    )
    ACCESS.info("request 1")
    (folder / "access").unlink()
    folder.rmdir()  # makes writes fail, like a full disk
    ACCESS.info("request 2")
    (told,) = capsys.readouterr().err.splitlines()
    assert "access cannot be written" in told
    folder.mkdir()
    ACCESS.info("request 3")
    assert "request 3" in (folder / "access").read_text()
