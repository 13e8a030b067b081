"""`baton keys`: its output, and what it writes to the keys file."""

from datetime import UTC, datetime, timedelta
from io import StringIO

import pytest
from rich.console import Console
from typer.testing import CliRunner

from deploy.commands.keys import parse_duration, table_of_keys
from deploy.commands.main import app
from engine.errors import ConfigError
from router.access.file import read_keys
from router.access.keys import hash_of
from router.access.limits import KeyLimits


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "keys.json"


def keys(path, *arguments):
    environment = {"BATON_GATEWAY__KEYS_FILE": str(path)}
    return CliRunner().invoke(app, ["keys", *arguments], env=environment)


def test_add_prints_the_key_once_and_keeps_its_hash(path):
    done = keys(path, "add", "ann")
    assert done.exit_code == 0
    (record,) = read_keys(path)
    assert record.hash == hash_of(done.output.strip().encode())
    assert (record.expires, record.group, record.limits) == (None, None, KeyLimits())
    assert done.output.strip() not in path.read_text()
    assert path.parent.stat().st_mode & 0o077 == 0


def test_add_stores_group_expiry_limits_and_permission(path):
    options = ("--group", "team", "--expires", "30d", "--requests-per-s", "2.5", "--debug")
    amounts = ("--tokens-per-min", "1000", "--max-streams", "4")
    assert keys(path, "add", "ann", *options, *amounts).exit_code == 0
    (record,) = read_keys(path)
    assert record.expires - record.created == timedelta(days=30)
    assert (record.group, record.debug) == ("team", True)
    assert record.limits == KeyLimits(2.5, 1000, 4)


def test_list_shows_no_hash_in_full(path):
    for name in ("ann", "bob"):
        keys(path, "add", name, "--expires", "1s")
    records = read_keys(path)
    console = Console(width=200, record=True, file=StringIO())
    console.print(table_of_keys(records, datetime.now(UTC)))
    shown = console.export_text()
    for record in records:
        assert record.name in shown
        assert record.hash[:8] in shown
        assert record.hash[:16] not in shown
    assert keys(path, "list").exit_code == 0


def test_revoke_removes_a_key(path):
    for name in ("ann", "bob"):
        keys(path, "add", name)
    assert keys(path, "revoke", "ann").exit_code == 0
    assert [record.name for record in read_keys(path)] == ["bob"]
    assert isinstance(keys(path, "revoke", "ann").exception, ConfigError)


@pytest.mark.parametrize(
    "arguments",
    [
        ("add", "a b"),
        ("add", "ann", "--expires", "soon"),
        ("add", "ann", "--max-streams", "0"),
        ("add", "ann", "--group", "a/b"),
    ],
)
def test_an_invalid_option_makes_no_key(path, arguments):
    assert isinstance(keys(path, *arguments).exception, ConfigError)
    assert not path.exists()


@pytest.mark.parametrize("text", ["", "30", "d", "-1d", "0d", "1.5h", "1y", "1d\n", "9999999d"])
def test_an_invalid_duration_is_refused(text):
    with pytest.raises(ConfigError, match="no duration"):
        parse_duration(text)
