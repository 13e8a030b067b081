"""The HTTP endpoints of files and batches."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from engine.clock import unix_time_s
from engine.config import GatewayConfig
from router.access.guard import tenant_of
from router.access.limits import Tenant
from router.edge.exchange import EXCHANGE, Exchange
from router.gateway.batches import tables
from router.gateway.batches.records import (
    BatchList,
    BatchRecord,
    DeletedFile,
    FileList,
    FilePurpose,
    FileRecord,
    window_s,
)
from router.gateway.batches.uploads import UploadForm
from router.gateway.endpoint import ClientLeft, read_body
from router.gateway.pages.replies import json_reply
from router.gateway.storage import Storage
from router.inbox.api_errors import ApiError, invalid_value

PIECE_BYTES = 256 * 2**10
FORM_BYTES = 64 * 2**10  # maximum size of an upload's form without its file
UPLOAD_TIMEOUT_S = 3600.0
MAX_PAGE = {"files": 10_000, "batches": 100}
DEFAULT_PAGE = {"files": 10_000, "batches": 20}
MAX_BODY_BYTES = 65_536  # maximum body of a batch, which is mostly metadata
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * 86_400

Handler = Callable[[HttpRequest, Tenant], Awaitable[Response]]


class ExpiresAfter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The time after its creation at which a file is deleted."""

    anchor: str
    seconds: int


class BatchBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body that creates a batch."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchPages:
    """The handlers of `/v1/files` and `/v1/batches`."""

    def __init__(
        self,
        storage: Storage,
        config: GatewayConfig,
        *,
        endpoints: Collection[str],
        rng: random.Random,
        wake: Callable[[], None],
    ) -> None:
        """`wake` is called after a batch was created or cancelled, so that the runner reads the
        batches.
        """
        self._storage = storage
        self._config = config
        self._endpoints = sorted(endpoints)
        self._rng = rng
        self._wake = wake

    def routes(self) -> list[Route]:
        """Returns the routes of all handlers."""
        handlers: list[tuple[str, str, Handler]] = [
            ("POST", "/v1/files", self.upload),
            ("GET", "/v1/files", self.files),
            ("GET", "/v1/files/{file_id}", self.file),
            ("DELETE", "/v1/files/{file_id}", self.delete),
            ("GET", "/v1/files/{file_id}/content", self.content),
            ("POST", "/v1/batches", self.create),
            ("GET", "/v1/batches", self.batches),
            ("GET", "/v1/batches/{batch_id}", self.batch),
            ("POST", "/v1/batches/{batch_id}/cancel", self.cancel),
        ]
        return [Route(path, self._page(call), methods=[method]) for method, path, call in handlers]

    def _page(self, handler: Handler) -> Callable[[HttpRequest], Awaitable[Response]]:
        async def page(request: HttpRequest) -> Response:
            return await handler(request, tenant_of(request.scope))

        return page

    # ------------------------------------------------------------ handlers of /v1/files

    async def upload(self, request: HttpRequest, tenant: Tenant) -> Response:
        """POST /v1/files."""
        config = self._config
        size = request.headers.get("content-length", "")
        if size.isdigit() and int(size) > config.max_file_bytes + FORM_BYTES:
            raise tables.too_large(config)
        file_id = f"file-{self._rng.getrandbits(96):024x}"
        now_s = unix_time_s()
        record = FileRecord(file_id, tenant.owner, FilePurpose.BATCH, "", 0, now_s, None)
        exchange: Exchange | None = request.scope.get(EXCHANGE)
        if exchange is not None:
            exchange.streams_body = True
        await self._storage.run(tables.begin_file, file=record)
        try:
            async with asyncio.timeout(UPLOAD_TIMEOUT_S):
                filename, fields = await self._receive(request, file_id)
            expires_s = _checked_form(fields, now_s)
            file = await self._storage.run(
                tables.complete_file, file_id=file_id, filename=filename, expires_s=expires_s
            )
        except BaseException as error:
            await asyncio.shield(self._storage.run(tables.delete_file, file_id=file_id))
            if isinstance(error, TimeoutError):
                message = f"the upload did not end within {UPLOAD_TIMEOUT_S:g} s"
                raise ApiError(message, code="request_timeout", status=408) from error
            raise
        return json_reply(200, file.shown())

    async def _receive(self, request: HttpRequest, file_id: str) -> tuple[str, Mapping[str, str]]:
        """Reads a form and stores its file in pieces.

        Returns the file's name and the form's other fields.
        """
        config = self._config
        waiting = bytearray()
        form = UploadForm(request.headers.get("content-type", ""), waiting.extend)
        num_bytes = 0

        async def store(data: bytes) -> None:
            await self._storage.run(
                tables.append_piece, file_id=file_id, data=data, now_s=unix_time_s(), config=config
            )

        async for data in _body_of(request):
            num_bytes += len(data)
            if num_bytes > config.max_file_bytes + FORM_BYTES:
                raise tables.too_large(config)
            form.feed(data)
            if len(waiting) >= PIECE_BYTES:
                await store(bytes(waiting))
                waiting.clear()
        found = form.finish()
        if waiting:
            await store(bytes(waiting))
        return found

    async def files(self, request: HttpRequest, tenant: Tenant) -> Response:
        """GET /v1/files."""
        page = _page_of(request, "files")
        files = await self._storage.run(
            tables.list_files,
            tenant=tenant.owner,
            purpose=request.query_params.get("purpose"),
            page=_with_one_more(page),
            now_s=unix_time_s(),
        )
        # A page may list 10,000 files, so a thread encodes the page.
        return await asyncio.to_thread(_listing, files, page.limit, FileList)

    async def file(self, request: HttpRequest, tenant: Tenant) -> Response:
        """GET /v1/files/{file_id}."""
        return json_reply(200, (await self._find(request, tenant)).shown())

    async def delete(self, request: HttpRequest, tenant: Tenant) -> Response:
        """DELETE /v1/files/{file_id}."""
        file = await self._find(request, tenant)
        await self._storage.run(tables.delete_file, file_id=file.id)
        return json_reply(200, DeletedFile(file.id))

    async def content(self, request: HttpRequest, tenant: Tenant) -> Response:
        """GET /v1/files/{file_id}/content."""
        file = await self._find(request, tenant)
        headers = {"content-length": str(file.num_bytes)}
        return StreamingResponse(
            self._pieces(file), media_type="application/octet-stream", headers=headers
        )

    async def _pieces(self, file: FileRecord) -> AsyncIterator[bytes]:
        start = 0
        while start < file.num_bytes:
            piece = await self._storage.run(tables.read_piece, file_id=file.id, start=start)
            if not piece:  # file deleted meanwhile: a too short body shows this
                raise ClientDisconnect
            start += len(piece)
            yield piece

    async def _find(self, request: HttpRequest, tenant: Tenant) -> FileRecord:
        file_id = request.path_params["file_id"]
        return await self._storage.run(
            tables.find_file, tenant=tenant.owner, file_id=file_id, now_s=unix_time_s()
        )

    # ------------------------------------------------------------ handlers of /v1/batches

    async def create(self, request: HttpRequest, tenant: Tenant) -> Response:
        """POST /v1/batches."""
        body = await self._batch_body(request)
        now_s = unix_time_s()
        batch = BatchRecord(
            id=f"batch_{self._rng.getrandbits(96):024x}",
            tenant=tenant.owner,
            sharing=tenant.sharing,
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            window=body.completion_window,
            metadata=body.metadata,
            output_expires_after_s=_expiry_of(body.output_expires_after),
            created_s=now_s,
            expires_s=now_s + window_s(body.completion_window),
        )
        await self._storage.run(tables.create_batch, batch=batch, now_s=now_s)
        self._wake()
        return json_reply(200, batch.shown())

    async def _batch_body(self, request: HttpRequest) -> BatchBody:
        data = await read_body(request.receive, self._config)
        if len(data) > MAX_BODY_BYTES:
            message = f"the body of a batch is longer than {MAX_BODY_BYTES} bytes"
            raise ApiError(message, code="request_too_large", status=413)
        try:
            body = msgspec.json.decode(data, type=BatchBody)
        except msgspec.ValidationError as error:
            raise invalid_value(str(error), _field_of(str(error))) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            message = f"the body is not a JSON object: {error}"
            raise ApiError(message, code="invalid_json") from error
        if body.endpoint not in self._endpoints:
            names = ", ".join(self._endpoints)
            message = f"endpoint is {body.endpoint[:80]!r}; expected one of: {names}"
            raise invalid_value(message, "endpoint")
        _check_metadata(body.metadata or {})
        return body

    async def batches(self, request: HttpRequest, tenant: Tenant) -> Response:
        """GET /v1/batches."""
        page = _page_of(request, "batches")
        batches = await self._storage.run(
            tables.list_batches, tenant=tenant.owner, page=_with_one_more(page)
        )
        return _listing(batches, page.limit, BatchList)

    async def batch(self, request: HttpRequest, tenant: Tenant) -> Response:
        """GET /v1/batches/{batch_id}."""
        batch_id = request.path_params["batch_id"]
        find, owner = tables.find_batch, tenant.owner
        batch = await self._storage.run(find, tenant=owner, batch_id=batch_id)
        return json_reply(200, batch.shown())

    async def cancel(self, request: HttpRequest, tenant: Tenant) -> Response:
        """POST /v1/batches/{batch_id}/cancel."""
        batch_id = request.path_params["batch_id"]
        batch = await self._storage.run(
            tables.cancel_batch, tenant=tenant.owner, batch_id=batch_id, now_s=unix_time_s()
        )
        self._wake()
        return json_reply(200, batch.shown())


async def _body_of(request: HttpRequest) -> AsyncIterator[bytes]:
    """Yields the pieces of a body. Raises ClientLeft if the client closes the connection."""
    try:
        async for data in request.stream():
            yield data
    except ClientDisconnect as error:
        raise ClientLeft from error


def _with_one_more(page: tables.Page) -> tables.Page:
    """Returns the page with one more row. If the extra row exists, there are more pages."""
    return tables.Page(page.limit + 1, page.after, page.is_ascending)


def _page_of(request: HttpRequest, what: str) -> tables.Page:
    """Returns the page that the query of a request describes. Raises ApiError."""
    asked = request.query_params
    text = asked.get("limit", str(DEFAULT_PAGE[what]))
    most = MAX_PAGE[what]
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= most):
        raise invalid_value(f"limit is {text[:40]!r}; expected 1 to {most}", "limit")
    order = asked.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid_value(f"order is {order[:40]!r}; expected asc or desc", "order")
    return tables.Page(int(text), asked.get("after"), order == "asc")


def _listing(
    rows: Sequence[FileRecord | BatchRecord], limit: int, kind: type[FileList | BatchList]
) -> Response:
    shown: Any = [row.shown() for row in rows[:limit]]
    page = kind(
        data=shown,
        first_id=shown[0].id if shown else None,
        last_id=shown[-1].id if shown else None,
        has_more=len(rows) > limit,
    )
    return json_reply(200, page)


def _checked_form(fields: Mapping[str, str], now_s: int) -> int | None:
    """Returns the Unix time at which the file expires, or None.

    Raises ApiError for an invalid field.
    """
    if "purpose" not in fields:
        raise ApiError("purpose is missing", param="purpose", code="missing_required_parameter")
    purpose = fields["purpose"]
    if purpose != FilePurpose.BATCH:
        raise invalid_value(f"purpose is {purpose[:40]!r}; only 'batch' is supported", "purpose")
    anchor = fields.get("expires_after[anchor]")
    text = fields.get("expires_after[seconds]")
    if anchor is None and text is None:
        return None
    seconds = int(text) if text is not None and text.isdigit() and len(text) < 10 else 0
    after_s = _expiry_of(ExpiresAfter(anchor or "", seconds), "expires_after")
    return None if after_s is None else now_s + after_s


def _expiry_of(asked: ExpiresAfter | None, name: str = "output_expires_after") -> int | None:
    if asked is None:
        return None
    if asked.anchor != "created_at":
        message = f"{name}.anchor is {asked.anchor[:40]!r}; expected 'created_at'"
        raise invalid_value(message, f"{name}.anchor")
    if not MIN_EXPIRY_S <= asked.seconds <= MAX_EXPIRY_S:
        message = f"{name}.seconds must be {MIN_EXPIRY_S} to {MAX_EXPIRY_S}"
        raise invalid_value(message, f"{name}.seconds")
    return asked.seconds


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise invalid_value(f"metadata may have {MAX_METADATA} keys", "metadata")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            message = (
                f"a key of metadata may have {MAX_METADATA_KEY} characters, "
                f"a value {MAX_METADATA_VALUE}"
            )
            raise invalid_value(message, "metadata")


def _field_of(message: str) -> str | None:
    """Returns the field that an error of msgspec names, or None.

    The error's last name in backquotes is the field's, after `$.`.
    """
    names = message.split("`")[1::2]
    return names[-1].removeprefix("$.") if names else None
