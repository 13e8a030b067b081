"""Makes the rows of tables about a deployment, and parses the orders typed in `baton top`. Pure.

Rows are made from answers of the admin API. Commands print the same rows. Orders have the notation
of the command line:

pools prefill=1 decode=2     planner off|dry-run|on       finish VERSION
flip WORKER ROLE             weight VERSION=WEIGHT ...    abort VERSION
drain WORKER                 rollback [VERSION]           stop WORKER
"""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Any
from urllib.parse import quote

import msgspec

from deploy.admin.schema import (
    DecisionInfo,
    PlannerAnswer,
    PoolsAnswer,
    RequestsAnswer,
    StepInfo,
    StoreInfo,
    VersionInfo,
    WorkerInfo,
)
from engine.control import SERVING_ROLES, with_role
from engine.errors import ConfigError
from engine.messages import Role

MAX_EVENTS = 500


class View(StrEnum):
    """The views that the table can show."""

    POOLS = "pools"
    WORKERS = "workers"
    REQUESTS = "requests"
    VERSIONS = "versions"
    EVENTS = "events"
    STORES = "stores"


# The columns of each view: columns of texts, then columns of numbers.
COLUMNS: dict[View, tuple[tuple[str, ...], tuple[str, ...]]] = {
    View.POOLS: (("role",), ("wanted", "serving", "on the way")),
    View.WORKERS: (
        ("worker", "version", "role", "state"),
        ("for", "runs", "waits", "KV free", "fails", "pid"),
    ),
    View.REQUESTS: (
        ("request", "state", "prefill", "decode", "version", "gateway"),
        ("age", "prompt", "answer", "tries"),
    ),
    View.VERSIONS: (
        ("version", "state", "fingerprint", "model", "workers"),
        ("weight", "requests"),
    ),
    View.EVENTS: (("ago", "what", "happened", "why"), ()),
    View.STORES: (
        ("store", "version", "state", "tier"),
        ("blocks", "full", "hits", "new", "leases", "fault"),
    ),
}


class TopRow(msgspec.Struct, frozen=True):
    """One row of a table: its key, its cells, all its fields, and its style on a terminal."""

    key: str
    cells: tuple[str, ...]
    detail: Any = None
    style: str = ""


class TopSeen(msgspec.Struct, frozen=True):
    """The latest answers of a deployment's admin API."""

    pools: PoolsAnswer
    requests: RequestsAnswer
    planner: PlannerAnswer
    stores: Sequence[StoreInfo] = ()


def rows_of(view: View, seen: TopSeen, pattern: str = "") -> list[TopRow]:
    """Returns the rows of a view in which a cell contains the pattern. Case does not matter."""
    rows: Iterable[TopRow]
    match view:
        case View.POOLS:
            rows = pool_rows(seen.pools)
        case View.WORKERS:
            rows = worker_rows(seen.pools.workers)
        case View.REQUESTS:
            rows = request_rows(seen.requests)
        case View.VERSIONS:
            rows = version_rows(seen.pools.versions)
        case View.EVENTS:
            rows = _events(seen)
        case View.STORES:
            rows = _stores(seen)
    wanted = pattern.casefold()
    return [row for row in rows if any(wanted in cell.casefold() for cell in row.cells)]


def headline(seen: TopSeen) -> str:
    """Returns the state of the deployment in one line."""
    pools = seen.pools
    parts = [
        pools.state,
        f"{len(pools.workers)} of at most {pools.max_workers} workers",
        f"{seen.requests.num_requests} requests",
        f"planner {pools.planner.mode}",
    ]
    if pools.taking_over is not None:
        parts.append(f"{pools.taking_over} takes over")
    return "; ".join([*parts, *pools.troubles])


def detail_text(row: TopRow) -> str:
    """Returns all fields of a row, one field per line."""
    fields = msgspec.to_builtins(row.detail)
    return "\n".join(_lines(fields, ""))


def _lines(value: Any, indent: str) -> Iterator[str]:
    for name, each in value.items():
        if isinstance(each, dict) and each:
            yield f"{indent}{name}"
            yield from _lines(each, indent + "  ")
        else:
            yield f"{indent}{name:<18} {each}"


def pool_rows(pools: PoolsAnswer) -> Iterator[TopRow]:
    """Yields a row for each role."""
    for role in SERVING_ROLES:
        own = [w for w in pools.workers if w.target is role]
        serving = sum(w.state == "serving" and w.is_connected for w in own)
        wanted = sum(version.wanted.of(role) for version in pools.versions)
        cells = (role.value, str(wanted), str(serving), str(len(own) - serving))
        detail = {"role": role.value, "workers": ", ".join(w.worker_id for w in own)}
        yield TopRow(role.value, cells, detail)


def worker_rows(workers: Iterable[WorkerInfo]) -> Iterator[TopRow]:
    """Yields a row for each worker."""
    for w in workers:
        free = f"{w.free_blocks / w.num_blocks:.0%}" if w.num_blocks and w.role else ""
        role = w.role or "?"
        if w.target not in (None, w.role):
            role += f" → {w.target}"
        cells = (
            *(w.worker_id, w.version, role, w.state, _age(w.state_s)),
            *(str(w.running_seqs), str(w.waiting_seqs), free, str(w.failures), str(w.pid or "")),
        )
        yield TopRow(w.worker_id, cells, w)


def request_rows(answer: RequestsAnswer) -> Iterator[TopRow]:
    """Yields a row for each request that is being served."""
    for each in answer.requests:
        r = each.request
        cells = (
            *(str(r.request_id), r.state, r.prefill or "", r.decode or "", r.version, each.gateway),
            *(_age(r.age_s), str(r.prompt_len), str(r.answer_len), str(r.num_attempts)),
        )
        yield TopRow(f"{each.gateway}/{r.request_id}", cells, each)


def version_rows(versions: Iterable[VersionInfo]) -> Iterator[TopRow]:
    """Yields a row for each version: its state, model, present and wanted workers, and weight."""
    for v in versions:
        workers = ", ".join(
            f"{v.serving.of(role)}/{v.wanted.of(role)} {role}"
            for role in SERVING_ROLES
            if v.serving.of(role) or v.wanted.of(role)
        )
        serving = "serving" if v.serving.total else "starting"
        shown = "asleep" if v.is_asleep else v.missing or serving
        cells = (
            *(v.name, "leaving" if v.is_leaving else shown, v.fingerprint),
            *(f"{v.model_name} ({v.model})", workers, str(v.weight), str(v.num_requests)),
        )
        style = "red" if shown == v.missing else "bold" if v.is_current else ""
        yield TopRow(v.name, cells, v, style)


def _events(seen: TopSeen) -> Iterator[TopRow]:
    events: list[tuple[float, str, str, str, str, StepInfo | DecisionInfo]] = [
        (s.age_s, f"step {s.number}", with_role(s.subject, s.role), s.what, s.why, s)
        for s in seen.pools.steps
    ]
    events += [
        (d.age_s, f"decision {d.number}", "planner", d.summary, "; ".join(d.reasons), d)
        for d in seen.planner.decisions
    ]
    for age_s, key, *cells, detail in sorted(events, key=lambda each: each[0])[:MAX_EVENTS]:
        yield TopRow(key, (_age(age_s), *cells), detail)


def _stores(seen: TopSeen) -> Iterator[TopRow]:
    """Yields a row for each tier of each store. A store that reports no tier gets one row."""
    for s in seen.stores:
        own = (s.name, s.version, s.state if s.is_connected else f"{s.state}, silent")
        lag = (str(s.num_new), str(s.num_leases))
        for tier in s.tiers:
            full = f"{tier.num_blocks / tier.max_blocks:.0%}" if tier.max_blocks else ""
            counts = (str(tier.num_blocks), full, str(tier.offered_blocks))
            cells = (*own, tier.medium, *counts, *lag, tier.fault or tier.shortage or "")
            yield TopRow(f"{s.name} {tier.medium}", cells, s)
        if not s.tiers:
            yield TopRow(s.name, (*own, "", "", "", "", *lag, s.why), s)


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def order_for(key: str, view: View, row: TopRow | None) -> str:
    """Returns the text of the order that a key starts for the selected row.

    Empty if the key starts none.
    """
    if row is None:
        return ""
    name = row.cells[0]
    match view, key:
        case View.WORKERS, "f":
            return f"flip {name} {'decode' if row.detail.role is Role.PREFILL else 'prefill'}"
        case View.WORKERS, ("d" | "x"):
            return f"{'drain' if key == 'd' else 'stop'} {name}"
        case View.VERSIONS, "w":
            return f"weight {name}="
        case View.VERSIONS, ("F" | "a"):
            return f"{'finish' if key == 'F' else 'abort'} {name}"
    return ""


# ---------------------------------------------------------------- orders

USAGE = {
    "pools": "pools prefill=1 decode=2",
    "flip": "flip WORKER ROLE",
    "drain": "drain WORKER",
    "stop": "stop WORKER",
    "planner": "planner off|dry-run|on",
    "weight": "weight VERSION=WEIGHT ...",
    "finish": "finish VERSION",
    "abort": "abort VERSION",
    "rollback": "rollback [VERSION]",
}


class TypedOrder(msgspec.Struct, frozen=True):
    """An order as a call of the admin API. `text` is the text that the operator typed."""

    text: str
    path: str
    body: Any = None


def typed_order(text: str) -> TypedOrder:
    """Parses an order. Raises ConfigError with the order's notation."""
    try:
        name, *words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"type an order, as {USAGE['flip']}") from error
    if name not in USAGE:
        raise ConfigError(f"{name} is no order; there are: {', '.join(USAGE)}")
    call = _call(name, words)
    if call is None:
        raise ConfigError(f"write {USAGE[name]}")
    path, body = call
    return TypedOrder(" ".join([name, *words]), path, body)


def _call(name: str, words: Sequence[str]) -> tuple[str, Any] | None:
    match name, words:
        case "pools", [_, *_] if (counts := _numbers(words)) is not None:
            return "/v1/pools", counts
        case "weight", [_, *_] if (weights := _numbers(words)) is not None:
            return "/v1/weights", {"weights": weights}
        case "flip", [worker, role]:
            return f"/v1/workers/{quote(worker, safe='')}/flip", {"role": role}
        case "drain" | "stop", [worker]:
            return f"/v1/workers/{quote(worker, safe='')}/{name}", None
        case "planner", [mode]:
            return "/v1/planner", {"mode": mode}
        case "finish", [version]:
            return f"/v1/versions/{quote(version, safe='')}/finish", {}
        case "abort", [version]:
            return f"/v1/versions/{quote(version, safe='')}/abort", None
        case "rollback", []:
            return "/v1/rollback", {}
        case "rollback", [version]:
            return "/v1/rollback", {"name": version}
    return None


def _numbers(words: Sequence[str]) -> dict[str, int] | None:
    """Parses words of the form NAME=NUMBER. None if a word has another form."""
    pairs = [word.partition("=") for word in words]
    if not all(name and equals and number.isdecimal() for name, equals, number in pairs):
        return None
    return {name: int(number) for name, _, number in pairs}
