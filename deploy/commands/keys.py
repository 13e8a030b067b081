"""`baton keys add`, `list` and `revoke`: edit the file of API keys that gateways watch."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from deploy.commands.options import AsJson, KeyName, KeysFile
from deploy.commands.views import Output
from engine.errors import ConfigError
from router.access.file import change_keys, read_keys
from router.access.keys import KeyRecord, hash_of, new_key, with_key, without_key
from router.access.limits import KeyLimits

DEFAULT_FILE = Path("~/.baton/keys.json")
# Shown characters of a key's hash: enough to distinguish keys, useless to an attacker.
SHOWN_HASH = 8
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}

keys_app = typer.Typer(
    help="API keys. Gateways apply changes within a second, without a restart.",
    no_args_is_help=True,
)


@keys_app.command("add")
def add_command(  # noqa: PLR0913 - a command's options
    name: KeyName,
    group: Annotated[
        str | None, typer.Option(help="keys of one group share cached prefixes")
    ] = None,
    expires: Annotated[
        str | None, typer.Option(help="lifetime such as 30d, 12h or 2w (default: unlimited)")
    ] = None,
    requests_per_s: Annotated[float | None, typer.Option(help="limit of requests")] = None,
    tokens_per_min: Annotated[int | None, typer.Option(help="limit of tokens")] = None,
    max_streams: Annotated[int | None, typer.Option(help="limit of open answers")] = None,
    debug: Annotated[  # noqa: FBT002
        bool, typer.Option("--debug", help="allow decisions, timelines and /metrics")
    ] = False,
    file: KeysFile = DEFAULT_FILE,
) -> None:
    """Makes a key and prints it. It cannot be shown again."""
    key, now = new_key(), datetime.now(UTC).replace(microsecond=0)
    limits = {
        "requests_per_s": requests_per_s,
        "tokens_per_min": tokens_per_min,
        "max_streams": max_streams,
    }
    fields = {
        "name": name,
        "hash": hash_of(key.encode()),
        "created": now,
        "expires": None if expires is None else now + parse_duration(expires),
        "group": group,
        "limits": limits,
        "debug": debug,
    }
    try:
        record = msgspec.convert(fields, KeyRecord)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the key is not valid: {error}") from error
    change_keys(file.expanduser(), lambda records: with_key(records, record))
    typer.echo(key)


@keys_app.command("list")
def list_command(file: KeysFile = DEFAULT_FILE, *, as_json: AsJson = False) -> None:
    """Shows all keys, without the secrets."""
    output, now = Output(as_json=as_json), datetime.now(UTC)
    output.show(
        lambda: read_keys(file.expanduser()), lambda keys: table_of_keys(keys, now), watch=False
    )


@keys_app.command("revoke")
def revoke_command(name: KeyName, file: KeysFile = DEFAULT_FILE) -> None:
    """Removes a key. Requests with it are refused from now on."""
    change_keys(file.expanduser(), lambda records: without_key(records, name))


def table_of_keys(records: tuple[KeyRecord, ...], now: datetime) -> Table:
    """Returns a table with a row for each key."""
    table = Table("name", "hash", "created", "expires", "group", "limits", "debug", box=SIMPLE_HEAD)
    for column in table.columns[1:4]:
        column.no_wrap = True
    for record in records:
        table.add_row(
            record.name,
            f"{record.hash[:SHOWN_HASH]}…",
            f"{record.created:%Y-%m-%d}",
            _expiry(record, now),
            record.group or "",
            ", ".join(_amounts(record.limits)),
            "yes" if record.debug else "",
        )
    return table


def parse_duration(text: str) -> timedelta:
    """Parses a duration such as `30d`. Raises ConfigError."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})([smhdw])", text)
    if match is None:
        raise ConfigError(f"{text!r} is no duration: use a form like 30d, 12h or 2w")
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


def _amounts(limits: KeyLimits) -> Iterator[str]:
    if limits.requests_per_s is not None:
        yield f"{limits.requests_per_s:g} requests/s"
    if limits.tokens_per_min is not None:
        yield f"{limits.tokens_per_min:,} tokens/min"
    if limits.max_streams is not None:
        yield f"{limits.max_streams} streams"


def _expiry(record: KeyRecord, now: datetime) -> str:
    if record.expires is None:
        return "never"
    if record.expires <= now:
        return f"[red]{record.expires:%Y-%m-%d %H:%M}[/red]"
    return f"{record.expires:%Y-%m-%d %H:%M}"
