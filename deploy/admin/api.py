"""The operator's HTTP API. The controller's process serves it; each request needs the admin key.

The answer to an order is the present state of the pools. Pages that only report, without an order,
are in `deploy.admin.answers`.

Each order with the right admin key adds a line to the audit log, even if the order is refused. A
line has the time, the client's address, the order and its result. Previews change nothing, so they
add no line. Orders with a wrong key are warnings in the ordinary log. That log is bounded, so a
client without the key cannot fill the disk.
"""

import asyncio
import hmac
import importlib.metadata
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from inspect import isawaitable
from pathlib import Path
from typing import TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deploy.admin.answers import chosen_stores, drop, pools_answer, preview_answer
from deploy.admin.declared import Declared, counted, order_of
from deploy.admin.operations import (
    OPERATIONS,
    AdminCall,
    AdminOperation,
    openapi,
    operation,
    orders,
)
from deploy.admin.schema import (
    Declaration,
    DifferencesAnswer,
    DropAnswer,
    DropBody,
    ErrorAnswer,
    ErrorBody,
    FinishBody,
    FlipBody,
    PlannerBody,
    PoolsBody,
    RollbackBody,
    UpdateBody,
    WeightsBody,
)
from deploy.base.run_dir import AdminAccess, announce, run_directory
from deploy.base.thread import LoopService
from deploy.controller.controller import PoolController
from deploy.model_source import pinned
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
from deploy.pools.versions.orders import known
from engine.clock import Clock
from engine.config import AdminConfig, is_loopback
from engine.control import Pools
from engine.errors import ConfigError
from engine.log_context import AUDIT, CALLER_HEADER
from engine.messages import WorkerId
from router.edge.limits import Book
from router.edge.listener import Listener
from router.gateway.metrics.families import CompleteFamilies

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 2**10
MAX_CALLER_CHARS = 200
CLOSE_TIMEOUT_S = 5.0

T = TypeVar("T")


class AdminService(LoopService[str]):
    """Runs a controller and its HTTP API, from `open` to `close`."""

    def __init__(self, controller: PoolController, *, config: AdminConfig, clock: Clock) -> None:
        self._controller = controller
        self._config = config
        self._clock = clock
        self._listener: Listener | None = None
        self._file: Path | None = None

    async def open(self) -> str:
        """Opens the controller, then listens for HTTP.

        Returns the URL of the API. Raises ConfigError.
        """
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
        book = Book(
            max_bodies_bytes=16 * 2**20, max_connections=256, max_connections_per_address=256
        )
        self._listener = Listener(app, book)
        self._listener.open(sock)
        return url

    async def close(self) -> None:
        """Stops the HTTP server, then closes the controller."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        if self._listener is not None:
            await self._listener.close(CLOSE_TIMEOUT_S, lambda: None)
        await self._controller.close()


# ---------------------------------------------------------------- orders


@orders("/v1/pools", "Set how many workers there are")
def _set_pools(call: AdminCall, body: PoolsBody) -> SetPools:
    given = msgspec.structs.asdict(body)
    name = given.pop("version")
    intent = call.controller.machine.intent
    version = intent.current if name is None else known(intent, name)
    changes = {role: n for role, n in given.items() if n is not None}
    return SetPools(msgspec.structs.replace(version.pools, **changes), version=name)


@orders("/v1/workers/{worker_id}/flip", "Change a worker's role")
def _flip(call: AdminCall, body: FlipBody) -> Flip:
    return Flip(WorkerId(call.name), body.role)


@orders("/v1/workers/{worker_id}/drain", "Drain a worker")
def _drain(call: AdminCall) -> Drain:
    return Drain(WorkerId(call.name))


@orders("/v1/workers/{worker_id}/stop", "Drain a worker, then stop it")
def _stop(call: AdminCall) -> Stop:
    return Stop(WorkerId(call.name))


@orders("/v1/weights", "Share requests among versions")
def _set_weights(_: AdminCall, body: WeightsBody) -> SetWeights:
    return SetWeights(body.weights)


@orders("/v1/versions/{name}/finish", "Replace all other versions")
def _finish(call: AdminCall, body: FinishBody) -> Finish:
    return Finish(call.name, None if body.pools is None else counted(body.pools, Pools()))


@orders("/v1/versions/{name}/abort", "Remove a version")
def _abort(call: AdminCall) -> Abort:
    return Abort(call.name)


@orders("/v1/rollback", "Let a former version take over")
def _rollback(_: AdminCall, body: RollbackBody) -> Rollback:
    return Rollback(body.name)


@orders("/v1/planner", "Set the planner's mode")
def _set_planner(_: AdminCall, body: PlannerBody) -> SetPlanner:
    return SetPlanner(body.mode)


@orders("/v1/versions", "Start a version beside the others")
async def _add_version(call: AdminCall, body: UpdateBody) -> AddVersion:
    controller = call.controller
    try:
        return await asyncio.to_thread(
            order_of, body, controller.machine.intent, controller.device_of
        )
    except ConfigError as error:
        raise OrderRefused(str(error), status=400) from error


@orders("/v1/config", "Carry out what a file declares, but for settings that need a restart")
async def _declare(call: AdminCall, body: Declaration) -> list[Order]:
    return [
        await _add_version(call, each) if isinstance(each, UpdateBody) else each
        for each in (await _declared(call, body)).orders()
    ]


@operation(
    "POST",
    "/v1/config/differences",
    "What a file declares otherwise than it runs; nothing is changed",
)
async def _differences(call: AdminCall, body: Declaration) -> DifferencesAnswer:
    call.request.state.is_preview = True
    return DifferencesAnswer(tuple((await _declared(call, body)).differences))


async def _declared(call: AdminCall, body: Declaration) -> Declared:
    controller = call.controller
    try:
        if body.model is not None:
            model = await asyncio.to_thread(pinned, body.model)
            body = msgspec.structs.replace(body, model=model)
        return Declared(body, controller.config, controller.machine.intent)
    except ConfigError as error:
        raise OrderRefused(str(error), status=400) from error


@operation("POST", "/v1/stores/drop", "Let stores forget all blocks", answer=DropAnswer)
def _drop_stores(call: AdminCall, body: DropBody) -> Response:
    order = chosen_stores(call.controller, body)
    is_preview = call.asks_preview()
    if not is_preview:
        call.request.state.order = order
        drop(call.controller, order)
    return _json(200 if is_preview else 202, DropAnswer(list(order.names)))


# ---------------------------------------------------------------- answering


def admin_app(controller: PoolController, *, key: str, clock: Clock) -> Starlette:
    """Returns the application, for any ASGI server on the controller's loop."""

    def metrics(_: Request) -> Response:
        """Returns the controller's metrics for Prometheus. Gateways export these metrics too."""
        page = generate_latest(CompleteFamilies(controller.metrics()))
        return Response(page, headers={"content-type": CONTENT_TYPE_LATEST})

    def description(_: Request) -> Response:
        return _json(200, openapi(importlib.metadata.version("baton-serve")))

    def guarded(
        answer: Callable[[Request], Response | Awaitable[Response]],
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            return await _guarded(request, key, answer)

        return endpoint

    def answering(operation: AdminOperation) -> Callable[[Request], Awaitable[Response]]:
        return guarded(
            lambda request: _answered(operation, AdminCall(controller, request, clock.now_s()))
        )

    return Starlette(
        routes=[
            *(Route(op.path, answering(op), methods=[op.method]) for op in OPERATIONS),
            Route("/metrics", guarded(metrics)),
            Route("/openapi.json", guarded(description)),
        ],
        exception_handlers={HTTPException: _http_error},
    )


async def _guarded(
    request: Request, key: str, answer: Callable[[Request], Response | Awaitable[Response]]
) -> Response:
    """Answers a call that has the admin key, and writes the call's order to the audit log."""
    given = request.headers.get("authorization", "")
    if not hmac.compare_digest(given.encode("latin-1"), f"Bearer {key}".encode()):
        log.warning(
            "%s %s from %s is refused: its admin key is missing or wrong",
            *(request.method, request.url.path, _address_of(request)),
        )
        return _error(401, "unauthorized", "this needs the admin key")
    try:
        found = answer(request)
        response = found if isinstance(found, Response) else await found
    except OrderRefused as refusal:
        response = _error(refusal.status, "refused", str(refusal))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        response = _error(400, "invalid_request", str(error))
    if request.method == "POST" and not hasattr(request.state, "is_preview"):
        refusal_text = "" if response.status_code < 400 else bytes(response.body).decode()
        order = getattr(request.state, "order", None)
        record_order(request, order, response.status_code, refusal_text)
    return response


async def _answered(op: AdminOperation, call: AdminCall) -> Response:
    """Decodes the body and calls the page. If the page returns orders, carries the orders out."""
    bodies = [] if op.body is None else [await _body(call.request, op.body)]
    found = op.page(call, *bodies)
    if isawaitable(found):
        found = await found
    if isinstance(found, Response):
        return found
    if isinstance(found, op.answer):
        return _json(200, found)
    return _ordered(call, found if isinstance(found, list) else [found])


def _ordered(call: AdminCall, orders: Sequence[Order]) -> Response:
    """Carries out orders. The answer has the steps that follow from the orders.

    With `preview=1` the answer lists their effects. If one order is refused, no order is carried
    out.
    """
    controller, now_s = call.controller, call.now_s
    if call.asks_preview():
        return _json(200, preview_answer(controller, orders, now_s))
    call.request.state.order = orders[0] if len(orders) == 1 else tuple(orders)
    if len(orders) > 1:
        preview_answer(controller, orders, now_s)
    history = controller.machine.history
    before = history[-1].number if history else 0
    for order in orders:
        controller.order(order)
    return _json(202, pools_answer(controller, now_s, since=before))


def record_order(request: Request, order: object | None, status: int, refusal: str = "") -> None:
    """Writes the audit line of a call. `order` is None if the body could not be decoded."""
    caller = request.headers.get(CALLER_HEADER, "")[:MAX_CALLER_CHARS]
    fields = {
        "who": "admin",
        "from": _address_of(request),
        "caller": caller,
        "what": str(order) if order is not None else f"{request.method} {request.url.path}",
        "status": status,
        "refusal": refusal,
    }
    told = {name: value for name, value in fields.items() if value != ""}
    text = " ".join(f"{name}={value}" for name, value in told.items())
    AUDIT.info("order: %s", text, extra={"fields": told})


def _address_of(request: Request) -> str:
    """Returns the address of the client, or of the gateway that forwards the client's order."""
    return request.client.host if request.client is not None else ""


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
