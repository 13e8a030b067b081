"""Answers queries for log lines: checks a query, and merges the answers of the nodes."""

import asyncio
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated

import msgspec

from deploy.admin.schema import LogsAnswer
from deploy.controller.shell import PoolController
from deploy.logs.lines import CONTROLLER
from deploy.logs.reading import (
    DEFAULT_LINES,
    MAX_LINES,
    LogPieces,
    LogsQuery,
    cursor_of,
    merged,
    places_of,
)
from deploy.pools.orders import OrderRefused
from engine.errors import ConfigError

MAX_NAME_CHARS = 200
MAX_LISTED = 20

NumLines = Annotated[int, msgspec.Meta(ge=0, le=MAX_LINES)]


async def answer_logs(controller: PoolController, asked: Mapping[str, str]) -> LogsAnswer:
    """Returns the lines for a URL's query. Raises OrderRefused and MsgspecError."""
    number = msgspec.convert(asked.get("lines", str(DEFAULT_LINES)), NumLines, strict=False)
    service = asked.get("service") or None
    try:
        places = places_of(asked["after"]) if "after" in asked else None
    except ConfigError as error:
        raise OrderRefused(str(error), status=400) from error
    read = await controller.logs(LogsQuery(service, number, places))
    if service is not None and not read.pieces:
        _check_known(service, controller, read)
    most = number if places is None else None
    lines = await asyncio.to_thread(merged, read.pieces.values(), most)
    ends = {key: piece.end for key, piece in read.pieces.items()}
    return LogsAnswer(
        lines=lines,
        after=cursor_of({**(places or {}), **ends}),
        has_more=any(piece.has_more for piece in read.pieces.values()),
        overwritten=sorted({each.service for each in read.pieces.values() if each.is_overwritten}),
        silent=read.silent,
    )


def _check_known(service: str, controller: PoolController, read: LogPieces) -> None:
    """Raises OrderRefused, with similar names, if there is no such service."""
    machine = controller.machine
    services = {*map(str, machine.workers), *machine.gateways, *machine.stores, CONTROLLER}
    known = sorted({*read.known, *services})
    if service in known:
        return
    shown = service if len(service) <= MAX_NAME_CHARS else f"{service[:MAX_NAME_CHARS]}…"
    near = get_close_matches(shown, known)
    more = f", and {len(known) - MAX_LISTED} more" if len(known) > MAX_LISTED else ""
    hint = (
        f"did you mean {' or '.join(near)}?" if near else f"{', '.join(known[:MAX_LISTED])}{more}"
    )
    raise OrderRefused(f"there is no service {shown!r}: {hint}", status=404)
