"""The rows of each view of `baton top`, and the orders that an operator types in it. Pure.

Rows come from the answers of the admin API. Orders have the words of the command line:

pools prefill=1 decode=2     planner off|dry-run|on       finish VERSION
flip WORKER ROLE             weight VERSION=WEIGHT ...    abort VERSION
drain WORKER                 rollback [VERSION]           stop WORKER
"""

import shlex
from collections.abc import Iterator, Sequence
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
)
from engine.control import SERVING_ROLES, with_role
from engine.errors import ConfigError

MAX_EVENTS = 500


class View(StrEnum):
    """The views that the table can show."""

    POOLS = "pools"
    WORKERS = "workers"
    REQUESTS = "requests"
    VERSIONS = "versions"
    EVENTS = "events"
    STORES = "stores"


COLUMNS: dict[View, tuple[str, ...]] = {
    View.POOLS: ("role", "wanted", "serving", "on the way"),
    View.WORKERS: (
        *("worker", "version", "role", "state", "for", "runs", "waits", "KV free", "fails", "pid"),
    ),
    View.REQUESTS: (
        *("request", "state", "age", "prompt", "answer", "prefill", "decode", "tries", "version"),
        "gateway",
    ),
    View.VERSIONS: ("version", "state", "weight", "workers", "requests", "model"),
    View.EVENTS: ("ago", "what", "happened", "why"),
    View.STORES: (
        *("store", "version", "state", "tier", "blocks", "full", "hits", "new", "leases", "fault"),
    ),
}


class TopRow(msgspec.Struct, frozen=True):
    """One row of the table: its key, its cells, and all its fields."""

    key: str
    cells: tuple[str, ...]
    detail: Any = None


class TopSeen(msgspec.Struct, frozen=True):
    """The latest answers of a deployment."""

    pools: PoolsAnswer
    requests: RequestsAnswer
    planner: PlannerAnswer
    stores: Sequence[StoreInfo] = ()


def rows_of(view: View, seen: TopSeen, pattern: str = "") -> list[TopRow]:
    """Returns the rows of a view that contain the pattern in any cell, in any case."""
    rows = {
        View.POOLS: _pools,
        View.WORKERS: _workers,
        View.REQUESTS: _requests,
        View.VERSIONS: _versions,
        View.EVENTS: _events,
        View.STORES: _stores,
    }[view](seen)
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


def _pools(seen: TopSeen) -> Iterator[TopRow]:
    pools = seen.pools
    for role in SERVING_ROLES:
        own = [w for w in pools.workers if w.target is role]
        serving = sum(w.state == "serving" and w.is_connected for w in own)
        wanted = sum(version.wanted.of(role) for version in pools.versions)
        cells = (role.value, str(wanted), str(serving), str(len(own) - serving))
        detail = {"role": role.value, "workers": ", ".join(w.worker_id for w in own)}
        yield TopRow(role.value, cells, detail)


def _workers(seen: TopSeen) -> Iterator[TopRow]:
    for w in seen.pools.workers:
        free = f"{w.free_blocks / w.num_blocks:.0%}" if w.num_blocks else ""
        cells = (
            *(w.worker_id, w.version, w.role or "", w.state, _age(w.state_s)),
            *(str(w.running_seqs), str(w.waiting_seqs), free, str(w.failures), str(w.pid or "")),
        )
        yield TopRow(w.worker_id, cells, w)


def _requests(seen: TopSeen) -> Iterator[TopRow]:
    for each in seen.requests.requests:
        r = each.request
        cells = (
            *(str(r.request_id), r.state, _age(r.age_s), str(r.prompt_len), str(r.answer_len)),
            *(r.prefill or "", r.decode or "", str(r.num_attempts), r.version, each.gateway),
        )
        yield TopRow(f"{each.gateway}/{r.request_id}", cells, each)


def _versions(seen: TopSeen) -> Iterator[TopRow]:
    for v in seen.pools.versions:
        workers = ", ".join(
            f"{v.serving.of(role)}/{v.wanted.of(role)} {role}"
            for role in SERVING_ROLES
            if v.serving.of(role) or v.wanted.of(role)
        )
        shown = "asleep" if v.is_asleep else v.missing or "serving"
        state = "leaving" if v.is_leaving else shown
        cells = (v.name, state, str(v.weight), workers, str(v.num_requests), v.model_name)
        yield TopRow(v.name, cells, v)


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
    """A row for each tier, or one for a store that reports none."""
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
    """Returns the order that a key begins for the selected row; empty if there is none."""
    name = "" if row is None else row.cells[0]
    orders: Sequence[tuple[View, str, str]] = (
        (View.WORKERS, "f", f"flip {name} {_other_role(row)}"),
        (View.WORKERS, "d", f"drain {name}"),
        (View.WORKERS, "x", f"stop {name}"),
        (View.VERSIONS, "w", f"weight {name}="),
        (View.VERSIONS, "F", f"finish {name}"),
        (View.VERSIONS, "a", f"abort {name}"),
    )
    return next((text for of, k, text in orders if row and (of, k) == (view, key)), "")


def _other_role(row: TopRow | None) -> str:
    role = row.cells[2] if row is not None and len(row.cells) > 2 else ""
    return "decode" if role == "prefill" else "prefill"


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


# ---------------------------------------------------------------- orders


class TypedOrder(msgspec.Struct, frozen=True):
    """A call of the admin API. `text` is what the operator typed."""

    text: str
    path: str
    body: Any = None


def typed_order(text: str) -> TypedOrder:
    """Reads an order. Raises ConfigError that says how it is written."""
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
    """Reads NAME=NUMBER; None if a word is something else."""
    pairs = [word.partition("=") for word in words]
    if not all(name and equals and number.isdecimal() for name, equals, number in pairs):
        return None
    return {name: int(number) for name, _, number in pairs}
