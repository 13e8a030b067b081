"""The answers of the operator's API about the present state, and its orders for stores.

Each answer is a function of the controller. Times are reported as ages at `now_s`.
"""

import asyncio
import copy
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Annotated

import msgspec

from deploy.admin.operations import AdminCall, operation
from deploy.admin.schema import (
    DecisionInfo,
    DropBody,
    GatewayInfo,
    ListedRequest,
    LogsAnswer,
    PlannerAnswer,
    PlannerInfo,
    PoolsAnswer,
    PreviewAnswer,
    RequestsAnswer,
    StepInfo,
    StoreInfo,
    StoresAnswer,
    StoreTier,
    VersionInfo,
    VersionsAnswer,
    WorkerInfo,
    WorkersAnswer,
)
from deploy.base.spec import BlockEventsAnswer
from deploy.controller.controller import PoolController
from deploy.controller.reports import ready_of, version_fields, worker_fields
from deploy.logs.lines import CONTROLLER
from deploy.logs.reading import (
    DEFAULT_LINES,
    MAX_LINES,
    LogPieces,
    LogsQuery,
    cursor_of,
    merged,
    positions_of,
)
from deploy.pools.events import PoolEffect, SetWorkerRole, StartWorker, StopWorker
from deploy.pools.machine import PoolMachine
from deploy.pools.orders import Order, OrderRefused, SetPlanner
from deploy.pools.stores import StoreState
from deploy.pools.versions.orders import known
from deploy.pools.workers.record import PoolWorker
from engine.control import DropBlocks, GatewayReport, HistoryStep, StoreReport
from engine.errors import ConfigError
from engine.messages import LoadReport

MAX_STEPS = 200  # maximum number of history steps in one answer
MAX_NAME_CHARS = 200
MAX_LISTED = 20

NumLines = Annotated[int, msgspec.Meta(ge=0, le=MAX_LINES)]

_NO_LOAD = LoadReport(0, 0, 0, 0, 0, 0, 0, 0)
_SILENT = GatewayReport("it does not report", 0, 0, 0, 0, 0.0)
_STARTING = msgspec.structs.replace(_SILENT, missing=None)  # its state says that it is starting
_NO_REPORT = StoreReport(0, [], 0, 0, 0, 0, {}, [])
_SINCE = {
    "name": "since",
    "in": "query",
    "description": "only steps of the history after this number",
    "schema": {"type": "integer", "minimum": 0},
}
_LOGS = [
    {
        "name": "service",
        "in": "query",
        "description": "a worker, a gateway or `controller`; all, if it is left out",
        "schema": {"type": "string"},
    },
    {
        "name": "lines",
        "in": "query",
        "description": "how many of the last ones",
        "schema": {"type": "integer", "minimum": 0, "maximum": MAX_LINES, "default": DEFAULT_LINES},
    },
    {
        "name": "after",
        "in": "query",
        "description": "of the answer before: all lines that have come since",
        "schema": {"type": "string"},
    },
]


# ---------------------------------------------------------------- pools


def pools_answer(controller: PoolController, now_s: float, *, since: int = 0) -> PoolsAnswer:
    """Returns the pools, with the history steps whose number is greater than `since`."""
    machine = controller.machine
    steps = [step for step in machine.history if step.number > since][-MAX_STEPS:]
    return PoolsAnswer(
        wanted=machine.intent.pools,
        versions=_versions(machine),
        taking_over=_taking_over(machine),
        settled=machine.is_settled,
        version=machine.members.version,
        max_workers=machine.limits.max_workers,
        workers=_workers(controller, now_s),
        gateways=list(_gateways(controller)),
        planner=_planner(controller),
        troubles=machine.troubles(),
        counters=controller.counters,
        steps=[_step(each, now_s) for each in steps],
    )


@operation("GET", "/v1/pools", "The pools, and what happened to them", _SINCE)
def _pools_page(call: AdminCall) -> PoolsAnswer:
    return pools_answer(call.controller, call.now_s, since=call.number("since", int, 0))


@operation("GET", "/v1/workers", "All workers")
def _workers_page(call: AdminCall) -> WorkersAnswer:
    return WorkersAnswer(_workers(call.controller, call.now_s))


@operation("GET", "/v1/requests", "Requests in service")
async def _requests_page(call: AdminCall) -> RequestsAnswer:
    number, found = await call.controller.sessions.requests()
    found.sort(key=lambda each: -each[1].age_s)
    return RequestsAnswer(number, [ListedRequest(*each) for each in found])


@operation("GET", "/v1/block-events", "Keys and addresses of block events")
def _block_events_page(call: AdminCall) -> BlockEventsAnswer:
    return call.controller.sessions.block_events()


def preview_answer(
    controller: PoolController, orders: Sequence[Order], now_s: float
) -> PreviewAnswer:
    """Returns the effects that orders would have. Raises OrderRefused if one is invalid.

    The orders are given to a copy of the pool machine.
    """
    machine = copy.deepcopy(controller.machine)
    effects: list[PoolEffect] = []
    for order in orders:
        if isinstance(order, SetPlanner):
            controller.planning.check(order.mode)
        effects += machine.handle(order, now_s)
    return PreviewAnswer(
        before=_versions(controller.machine),
        after=_versions(machine),
        planner=machine.intent.planner,
        effects=[line for each in effects if (line := _effect(each))],
        steps=[_step(each, now_s) for each in effects if isinstance(each, HistoryStep)],
    )


@operation("GET", "/v1/versions", "Versions of the model")
def _versions_page(call: AdminCall) -> VersionsAnswer:
    machine = call.controller.machine
    return VersionsAnswer(_versions(machine), _taking_over(machine))


@operation("GET", "/v1/planner", "The planner and its decisions")
def _planner_page(call: AdminCall) -> PlannerAnswer:
    controller, decisions = call.controller, []
    for decision in controller.planning.decisions:
        fields = asdict(decision)
        age_s = call.now_s - fields.pop("at_s")
        decisions.append(DecisionInfo(age_s=age_s, summary=str(decision), **fields))
    return PlannerAnswer(_planner(controller), controller.machine.intent.pools, decisions)


def _workers(controller: PoolController, now_s: float) -> list[WorkerInfo]:
    machine, found = controller.machine, []
    for worker in sorted(machine.workers.values(), key=PoolWorker.order):
        load, ready = worker.load or _NO_LOAD, ready_of(worker, controller.workers)
        found.append(
            WorkerInfo(
                **worker_fields(machine, worker, ready),
                state_s=now_s - worker.since_s,
                pid=None if ready is None else ready.pid,
                address=worker.address,
                waiting_seqs=load.waiting_seqs,
                running_seqs=load.running_seqs,
                open_leases=load.open_leases,
                free_blocks=load.free_blocks + load.cached_blocks,
                facts=None if ready is None else ready.facts,
            )
        )
    return found


def _planner(controller: PoolController) -> PlannerInfo:
    return PlannerInfo(controller.machine.intent.planner, controller.planning.reasons)


def _taking_over(machine: PoolMachine) -> str | None:
    rollout = machine.intent.rollout
    return None if rollout is None else rollout.to


def _versions(machine: PoolMachine) -> list[VersionInfo]:
    found = []
    for version in machine.intent.versions:
        said = machine.reports_of(version.name)
        found.append(
            VersionInfo(
                **version_fields(machine, version),
                model=version.model,
                fingerprint=next((each.fingerprint for each in said if each.fingerprint), ""),
                num_requests=sum(each.num_requests for each in said),
                missing=next((each.missing for each in said if each.missing is not None), None),
                worker=msgspec.to_builtins(version.worker),
            )
        )
    return found


def _gateways(controller: PoolController) -> Iterator[GatewayInfo]:
    for name, state in controller.machine.gateways.items():
        ready, link = controller.gateways.get(name), controller.sessions.gateway_links.get(name)
        heard = None if link is None else link.report
        report = heard or (_SILENT if link is not None and link.is_late else _STARTING)
        yield GatewayInfo(
            name=name,
            url="" if ready is None else ready.url,
            pid=None if ready is None else ready.pid,
            state=state,
            is_connected=heard is not None,
            missing=report.missing,
            members_version=report.members_version,
            num_requests=report.num_requests,
            num_waiting=report.num_waiting,
        )


def _step(step: HistoryStep, now_s: float) -> StepInfo:
    return StepInfo(step.number, now_s - step.at_s, step.subject, step.what, step.why, step.role)


def _effect(effect: PoolEffect) -> str | None:
    """Returns an effect as a line of text; None for effects that a preview does not show."""
    match effect:
        case StartWorker(worker_id, role, _, version):
            return f"start {worker_id} as {role.value} of {version.name}"
        case StopWorker(worker_id, by_force):
            return f"stop {worker_id} by force" if by_force else f"stop {worker_id}"
        case SetWorkerRole(worker_id, role):
            return f"tell {worker_id} to become {role.value}"
    return None


# ---------------------------------------------------------------- stores of KV


@dataclass(frozen=True, slots=True)
class DropStores:
    """An operator's order: these stores drop all blocks."""

    names: tuple[str, ...]


@operation("GET", "/v1/stores", "Stores of KV, and what they hold")
def _stores_page(call: AdminCall) -> StoresAnswer:
    names = sorted(call.controller.machine.stores)
    return StoresAnswer([_store(call.controller, name) for name in names])


def chosen_stores(controller: PoolController, body: DropBody) -> DropStores:
    """Returns the stores that the body selects.

    Raises OrderRefused: 400 if the body contradicts itself, 404 if there is no such version or
    store, 409 if one of the stores has no session. Then no blocks are dropped.
    """
    machine = controller.machine
    if body.version is not None and body.every_version:
        raise OrderRefused("give a version or every_version, not both", status=400)
    if not machine.stores:
        raise OrderRefused("there is no store: store.memory_mib is 0", status=404)
    names = sorted(machine.stores)
    if not body.every_version:
        intent = machine.intent
        version = intent.current if body.version is None else known(intent, body.version)
        names = [name for name in names if machine.stores[name].version.name == version.name]
        if not names:
            raise OrderRefused(f"{version.name} has no store", status=404)
    reports = controller.sessions.store_reports()
    away = [name for name in names if reports.get(name) is None]
    if away:
        verb = "has" if len(away) == 1 else "have"
        raise OrderRefused(f"{', '.join(away)} {verb} no session: nothing is dropped")
    return DropStores(tuple(names))


def drop(controller: PoolController, order: DropStores) -> None:
    """Sends the order to the stores. Raises OrderRefused if a store's session has just ended."""
    links = controller.sessions.store_links
    missed = [name for name in order.names if not links[name].send(DropBlocks())]
    if missed:
        raise OrderRefused(f"{', '.join(missed)} did not get the order; other stores dropped all")


def _store(controller: PoolController, name: str) -> StoreInfo:
    store, ready = controller.machine.stores[name], controller.stores.get(name)
    heard = controller.sessions.store_reports().get(name)
    report = heard or _NO_REPORT
    link, state = controller.sessions.store_links.get(name), store.state
    if heard is None and state is StoreState.SERVING and not (link is None or link.is_late):
        state = StoreState.STARTING  # the store's first report has not arrived yet
    return StoreInfo(
        name=name,
        version=store.version.name,
        node=store.node,
        state=state,
        is_connected=heard is not None,
        pid=None if ready is None else ready.pid,
        address=store.address or None,
        block_size=store.version.worker.block_size,
        block_bytes=report.block_bytes,
        tiers=[
            StoreTier(
                medium=tier.medium,
                num_blocks=tier.num_blocks,
                max_blocks=tier.max_blocks,
                num_bytes=tier.num_blocks * report.block_bytes,
                max_bytes=tier.max_blocks * report.block_bytes,
                offered_blocks=int(report.counters.get(f"offered_blocks:{tier.medium}", 0)),
                fault=tier.fault,
                shortage=tier.shortage,
            )
            for tier in report.tiers
        ],
        num_peers=report.num_peers,
        num_leases=report.num_leases,
        num_new=report.num_new,
        num_starts=report.num_starts,
        counters=report.counters,
        prefixes=report.prefixes,
        why=controller.machine.restarts.why(name),
    )


# ---------------------------------------------------------------- log lines


@operation("GET", "/v1/logs", "Log lines of services", *_LOGS)
async def _logs_page(call: AdminCall) -> LogsAnswer:
    controller, asked = call.controller, call.request.query_params
    number = call.number("lines", NumLines, DEFAULT_LINES)
    service = asked.get("service") or None
    try:
        places = positions_of(asked["after"]) if "after" in asked else None
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
    known_names = sorted({*read.known, *services})
    if service in known_names:
        return
    shown = service if len(service) <= MAX_NAME_CHARS else f"{service[:MAX_NAME_CHARS]}…"
    near, num_more = get_close_matches(shown, known_names), len(known_names) - MAX_LISTED
    more = f", and {num_more} more" if num_more > 0 else ""
    listed = f"{', '.join(known_names[:MAX_LISTED])}{more}"
    hint = f"did you mean {' or '.join(near)}?" if near else listed
    raise OrderRefused(f"there is no service {shown!r}: {hint}", status=404)
