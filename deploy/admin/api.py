"""The operator's HTTP API. The controller's process serves it; each request needs the admin key."""

import asyncio
import copy
import hmac
import importlib.metadata
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deploy.admin.audit import address_of, record_order
from deploy.admin.differences import Declared
from deploy.admin.logs import answer_logs
from deploy.admin.schema import (
    DecisionInfo,
    Declaration,
    DifferencesAnswer,
    DropAnswer,
    DropBody,
    ErrorAnswer,
    ErrorBody,
    FinishBody,
    FlipBody,
    GatewayInfo,
    ListedRequest,
    PlannerAnswer,
    PlannerBody,
    PlannerInfo,
    PoolsAnswer,
    PoolsBody,
    PreviewAnswer,
    RequestsAnswer,
    RollbackBody,
    StepInfo,
    StoresAnswer,
    UpdateBody,
    VersionInfo,
    VersionsAnswer,
    WeightsBody,
    WorkerInfo,
    WorkersAnswer,
    openapi,
)
from deploy.admin.stores import chosen_stores, drop, stores_of
from deploy.admin.updates import order_of, pools_of
from deploy.base.run_dir import AdminAccess, announce, run_directory
from deploy.base.thread import LoopService
from deploy.controller.news import ready_of, version_fields, worker_fields
from deploy.controller.shell import PoolController
from deploy.model_source import pinned
from deploy.pools.effects import (
    PoolEffect,
    SetWorkerRole,
    StartWorker,
    StopWorker,
)
from deploy.pools.machine import PoolMachine
from deploy.pools.orders import (
    Abort,
    AddVersion,
    Drain,
    Finish,
    Flip,
    Order,
    OrderRefused,
    Rollback,
    SetPlanner,
    SetPools,
    SetWeights,
    Stop,
)
from deploy.pools.planning import PlannerDecision
from deploy.pools.versions.orders import known
from deploy.pools.workers.record import PoolWorker
from engine.clock import Clock
from engine.config import AdminConfig, is_loopback
from engine.control import GatewayReport, HistoryStep, Pools, Version
from engine.errors import ConfigError
from engine.messages import LoadReport, WorkerId
from router.edge.limits import Book, EdgeLimits
from router.edge.listener import Listener
from router.gateway.metrics.families import CompleteFamilies

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 2**10
MAX_STEPS = 200  # most steps of the history in one answer
CLOSE_TIMEOUT_S = 5.0
LIMITS = EdgeLimits(
    max_connections=256, max_connections_per_address=256, max_bodies_bytes=16 * 2**20
)

_NO_LOAD = LoadReport(0, 0, 0, 0, 0, 0, 0, 0)
_SILENT = GatewayReport("it does not report", 0, 0, 0, 0, 0.0)
_STARTING = msgspec.structs.replace(_SILENT, missing=None)  # its state already says that it starts

Flag = Annotated[int, msgspec.Meta(ge=0, le=1)]
T = TypeVar("T")


class AdminService(LoopService[str]):
    """A controller and its API, from open to close."""

    def __init__(self, controller: PoolController, *, config: AdminConfig, clock: Clock) -> None:
        self._controller = controller
        self._config = config
        self._clock = clock
        self._listener: Listener | None = None
        self._file: Path | None = None

    async def open(self) -> str:
        """Opens the controller, then listens. Returns the URL. Raises ConfigError."""
        config = self._config
        assert config.key is not None
        try:
            sock = socket.create_server((config.host, config.port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {config.host}:{config.port}: {error.strerror}"
            ) from error
        host, port = sock.getsockname()[:2]
        self._controller.admin_url = f"http://{host}:{port}"
        try:
            await self._controller.open()
            if not is_loopback(config.host):
                log.warning(
                    "the operator's API listens on %s without TLS: its key can be read", host
                )
            url = self._controller.admin_url
            access = AdminAccess(
                url, config.key, os.getpid(), self._controller.url, config.name or ""
            )
            self._file = announce(run_directory(os.environ), access)
        except BaseException:
            sock.close()
            raise
        app = admin_app(self._controller, key=config.key, clock=self._clock)
        self._listener = Listener(app, Book(LIMITS))
        self._listener.open(sock)
        return url

    async def close(self) -> None:
        """Stops answering, and closes the controller."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        if self._listener is not None:
            await self._listener.close(CLOSE_TIMEOUT_S, lambda: None)
        await self._controller.close()


def admin_app(controller: PoolController, *, key: str, clock: Clock) -> Starlette:
    """Returns the application, for any ASGI server on the controller's loop."""
    pages = _Pages(controller, clock)
    routes: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
        ("GET", "/v1/pools", pages.pools),
        ("POST", "/v1/pools", pages.set_pools),
        ("GET", "/v1/workers", pages.workers),
        ("GET", "/v1/requests", pages.requests),
        ("POST", "/v1/workers/{worker_id}/flip", pages.flip),
        ("POST", "/v1/workers/{worker_id}/drain", pages.drain),
        ("POST", "/v1/workers/{worker_id}/stop", pages.stop),
        ("GET", "/v1/logs", pages.logs),
        ("GET", "/v1/block-events", pages.block_events),
        ("GET", "/v1/stores", pages.stores),
        ("POST", "/v1/stores/drop", pages.drop_stores),
        ("GET", "/v1/planner", pages.planner),
        ("GET", "/v1/versions", pages.versions),
        ("POST", "/v1/versions", pages.add_version),
        ("POST", "/v1/config", pages.declare),
        ("POST", "/v1/config/differences", pages.differences),
        ("POST", "/v1/weights", pages.set_weights),
        ("POST", "/v1/rollback", pages.rollback),
        ("POST", "/v1/versions/{name}/finish", pages.finish),
        ("POST", "/v1/versions/{name}/abort", pages.abort),
        ("POST", "/v1/planner", pages.set_planner),
        ("GET", "/metrics", pages.metrics),
        ("GET", "/openapi.json", pages.openapi),
    ]

    def guarded(
        endpoint: Callable[[Request], Awaitable[Response]],
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode("latin-1"), f"Bearer {key}".encode()):
                log.warning(
                    "%s %s from %s is refused: its admin key is missing or wrong",
                    request.method,
                    request.url.path,
                    address_of(request),
                )
                return _error(401, "unauthorized", "this needs the admin key")
            response = await answered(request)
            if request.method != "POST" or hasattr(request.state, "is_preview"):
                return response
            refusal = "" if response.status_code < 400 else bytes(response.body).decode()
            order = getattr(request.state, "order", None)
            record_order(request, order, response.status_code, refusal)
            return response

        async def answered(request: Request) -> Response:
            try:
                return await endpoint(request)
            except OrderRefused as refusal:
                return _error(refusal.status, "refused", str(refusal))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                return _error(400, "invalid_request", str(error))

        return answer

    return Starlette(
        routes=[Route(path, guarded(page), methods=[method]) for method, path, page in routes],
        exception_handlers={HTTPException: _http_error},
    )


class _Pages:
    """The endpoints. The answer to an order is the present state of the pools."""

    def __init__(self, controller: PoolController, clock: Clock) -> None:
        self._controller = controller
        self._clock = clock

    async def pools(self, request: Request) -> Response:
        since = request.query_params.get("since", "0")
        return self._answer(200, since=msgspec.convert(since, int, strict=False))

    async def workers(self, _: Request) -> Response:
        return _json(200, WorkersAnswer(self._workers()))

    async def requests(self, _: Request) -> Response:
        number, found = await self._controller.sessions.requests()
        found.sort(key=lambda each: -each[1].age_s)
        return _json(200, RequestsAnswer(number, [ListedRequest(*each) for each in found]))

    async def logs(self, request: Request) -> Response:
        return _json(200, await answer_logs(self._controller, request.query_params))

    async def block_events(self, _: Request) -> Response:
        return _json(200, self._controller.sessions.block_events())

    async def stores(self, _: Request) -> Response:
        return _json(200, StoresAnswer(stores_of(self._controller)))

    async def drop_stores(self, request: Request) -> Response:
        order = chosen_stores(self._controller, await _body(request, DropBody))
        answer = DropAnswer(list(order.names))
        if _asks_preview(request):
            return _json(200, answer)
        request.state.order = order
        drop(self._controller, order)
        return _json(202, answer)

    async def set_pools(self, request: Request) -> Response:
        body = await _body(request, PoolsBody)
        given = msgspec.structs.asdict(body)
        name = given.pop("version")
        intent = self._controller.machine.intent
        version = intent.current if name is None else known(intent, name)
        changes = {role: n for role, n in given.items() if n is not None}
        pools = msgspec.structs.replace(version.pools, **changes)
        return self._order(request, SetPools(pools, version=name))

    async def versions(self, _: Request) -> Response:
        rollout = self._controller.machine.intent.rollout
        return _json(200, VersionsAnswer(self._versions(), None if rollout is None else rollout.to))

    async def add_version(self, request: Request) -> Response:
        return self._order(request, await self._update(await _body(request, UpdateBody)))

    async def differences(self, request: Request) -> Response:
        request.state.is_preview = True
        return _json(200, DifferencesAnswer(tuple((await self._declared(request)).differences)))

    async def declare(self, request: Request) -> Response:
        """Applies a declaration completely, or not at all."""
        declared = await self._declared(request)
        orders = [
            await self._update(each) if isinstance(each, UpdateBody) else each
            for each in declared.orders()
        ]
        return self._order(request, *orders)

    async def _update(self, body: UpdateBody) -> AddVersion:
        controller = self._controller
        try:
            return await asyncio.to_thread(
                order_of, body, controller.machine.intent, controller.device_of
            )
        except ConfigError as error:
            raise OrderRefused(str(error), status=400) from error

    async def _declared(self, request: Request) -> Declared:
        body = await _body(request, Declaration)
        controller = self._controller
        try:
            if body.model is not None:
                model = await asyncio.to_thread(pinned, body.model)
                body = msgspec.structs.replace(body, model=model)
            return Declared(body, controller.config, controller.machine.intent)
        except ConfigError as error:
            raise OrderRefused(str(error), status=400) from error

    async def set_weights(self, request: Request) -> Response:
        return self._order(request, SetWeights((await _body(request, WeightsBody)).weights))

    async def finish(self, request: Request) -> Response:
        body = await _body(request, FinishBody)
        pools = None if body.pools is None else pools_of(body.pools, Pools())
        return self._order(request, Finish(request.path_params["name"], pools))

    async def rollback(self, request: Request) -> Response:
        return self._order(request, Rollback((await _body(request, RollbackBody)).name))

    async def abort(self, request: Request) -> Response:
        return self._order(request, Abort(request.path_params["name"]))

    async def flip(self, request: Request) -> Response:
        role = (await _body(request, FlipBody)).role
        return self._order(request, Flip(_worker_id(request), role))

    async def drain(self, request: Request) -> Response:
        return self._order(request, Drain(_worker_id(request)))

    async def stop(self, request: Request) -> Response:
        return self._order(request, Stop(_worker_id(request)))

    async def planner(self, _: Request) -> Response:
        controller, now_s = self._controller, self._clock.now_s()
        found = [_decision(one, now_s) for one in controller.planning.decisions]
        return _json(200, PlannerAnswer(self._planner(), controller.machine.intent.pools, found))

    async def set_planner(self, request: Request) -> Response:
        return self._order(request, SetPlanner((await _body(request, PlannerBody)).mode))

    async def metrics(self, _: Request) -> Response:
        """Returns the controller's metrics for Prometheus. Gateways export these metrics too."""
        page = generate_latest(CompleteFamilies(self._controller.metrics()))
        return Response(page, headers={"content-type": CONTENT_TYPE_LATEST})

    async def openapi(self, _: Request) -> Response:
        return _json(200, openapi(importlib.metadata.version("baton-serve")))

    def _order(self, request: Request, *orders: Order) -> Response:
        """Carries out orders. The answer has the steps that follow from the orders.

        With `preview=1` a copy of the machine gets the orders, and the answer lists their effects.
        """
        if _asks_preview(request):
            return self._preview(orders)
        request.state.order = orders[0] if len(orders) == 1 else orders
        if len(orders) > 1:  # if one order is refused, none is carried out
            self._preview(orders)
        history = self._controller.machine.history
        before = history[-1].number if history else 0
        for order in orders:
            self._controller.order(order)
        return self._answer(202, since=before)

    def _preview(self, orders: Sequence[Order]) -> Response:
        """Returns the effects that orders would have. Raises OrderRefused if one is invalid."""
        controller, now_s = self._controller, self._clock.now_s()
        machine = copy.deepcopy(controller.machine)
        effects: list[PoolEffect] = []
        for order in orders:
            if isinstance(order, SetPlanner):
                controller.planning.check(order.mode)
            effects += machine.handle(order, now_s)
        steps = [each for each in effects if isinstance(each, HistoryStep)]
        answer = PreviewAnswer(
            before=self._versions(),
            after=[self._version(version, machine) for version in machine.intent.versions],
            planner=machine.intent.planner,
            effects=[line for each in effects if (line := _effect(each))],
            steps=[_step(s, now_s) for s in steps],
        )
        return _json(200, answer)

    def _answer(self, status: int, *, since: int) -> Response:
        controller, now_s = self._controller, self._clock.now_s()
        machine = controller.machine
        steps = [step for step in machine.history if step.number > since][-MAX_STEPS:]
        return _json(
            status,
            PoolsAnswer(
                wanted=machine.intent.pools,
                versions=self._versions(),
                taking_over=None if machine.intent.rollout is None else machine.intent.rollout.to,
                settled=machine.is_settled,
                version=machine.members.version,
                max_workers=machine.limits.max_workers,
                workers=self._workers(),
                gateways=self._gateways(),
                planner=self._planner(),
                troubles=machine.troubles(),
                counters=controller.counters,
                steps=[_step(s, now_s) for s in steps],
            ),
        )

    def _planner(self) -> PlannerInfo:
        controller = self._controller
        return PlannerInfo(controller.machine.intent.planner, controller.planning.reasons)

    def _versions(self) -> list[VersionInfo]:
        machine = self._controller.machine
        return [self._version(version, machine) for version in machine.intent.versions]

    def _version(self, version: Version, machine: PoolMachine) -> VersionInfo:
        said = machine.reports_of(version.name)
        return VersionInfo(
            **version_fields(machine, version),
            model=version.model,
            fingerprint=next((each.fingerprint for each in said if each.fingerprint), ""),
            num_requests=sum(each.num_requests for each in said),
            missing=next((each.missing for each in said if each.missing is not None), None),
            worker=msgspec.to_builtins(version.worker),
        )

    def _workers(self) -> list[WorkerInfo]:
        workers = self._controller.machine.workers.values()
        return [self._worker(worker) for worker in sorted(workers, key=PoolWorker.order)]

    def _worker(self, worker: PoolWorker) -> WorkerInfo:
        load = worker.load or _NO_LOAD
        ready = ready_of(worker, self._controller.workers)
        return WorkerInfo(
            **worker_fields(self._controller.machine, worker, ready),
            state_s=self._clock.now_s() - worker.since_s,
            pid=None if ready is None else ready.pid,
            address=worker.address,
            waiting_seqs=load.waiting_seqs,
            running_seqs=load.running_seqs,
            open_leases=load.open_leases,
            free_blocks=load.free_blocks + load.cached_blocks,
            facts=None if ready is None else ready.facts,
        )

    def _gateways(self) -> list[GatewayInfo]:
        found = []
        for name, state in self._controller.machine.gateways.items():
            ready = self._controller.gateways.get(name)
            link = self._controller.sessions.gateway_links.get(name)
            heard = None if link is None else link.report
            report = heard or (_SILENT if link is not None and link.is_late else _STARTING)
            found.append(
                GatewayInfo(
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
            )
        return found


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


def _decision(decision: PlannerDecision, now_s: float) -> DecisionInfo:
    told = asdict(decision)
    return DecisionInfo(age_s=now_s - told.pop("at_s"), summary=str(decision), **told)


def _step(step: HistoryStep, now_s: float) -> StepInfo:
    return StepInfo(step.number, now_s - step.at_s, step.subject, step.what, step.why, step.role)


def _asks_preview(request: Request) -> bool:
    """True if the call must not change anything. Such a call is not in the audit log."""
    preview = msgspec.convert(request.query_params.get("preview", "0"), Flag, strict=False)
    if preview:
        request.state.is_preview = True
    return bool(preview)


def _worker_id(request: Request) -> WorkerId:
    return WorkerId(request.path_params["worker_id"])


async def _body(request: Request, kind: type[T]) -> T:
    """Decodes a body of bounded size. Raises MsgspecError, HTTPException."""
    pieces = bytearray()
    async for piece in request.stream():
        pieces += piece
        if len(pieces) > MAX_BODY_BYTES:
            raise HTTPException(413, "the body is too large")
    return msgspec.json.decode(bytes(pieces), type=kind)


def _json(status: int, answer: object) -> Response:
    return Response(msgspec.json.encode(answer), status, media_type="application/json")


def _error(status: int, kind: str, message: str) -> Response:
    answer = _json(status, ErrorAnswer(ErrorBody(kind, message)))
    if status == 401:
        answer.headers["WWW-Authenticate"] = "Bearer"
    return answer


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, "http", error.detail)
