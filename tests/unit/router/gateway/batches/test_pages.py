"""The endpoints of files and batches: pages, tenants, quotas, and errors that name the field."""

import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.gateway.batches import pages, tables
from router.gateway.storage import Storage
from tests.kits.router.access import key_file
from tests.kits.router.batches import (
    ComputingRouter,
    batch_app,
    create,
    file_of,
    form_of,
    line_of,
    upload,
)
from tests.kits.router.gateway import Connection, fetch

DATA = file_of(line_of("a"))


async def send(app: Any, method: str, path: str, fields: Any = None, **headers: str) -> Any:
    body = b"" if fields is None else msgspec.json.encode(fields)
    return await fetch(app, method, path, body, headers)


async def test_a_file_is_kept_listed_read_and_deleted() -> None:
    async with batch_app(ComputingRouter(), runs=False) as app:
        body, headers = form_of(DATA)
        made = (await fetch(app, "POST", "/v1/files", body, headers)).json()
        assert made["object"] == "file"
        assert (made["bytes"], made["filename"], made["purpose"]) == (
            len(DATA),
            "in.jsonl",
            "batch",
        )
        assert made["status"] == "processed"
        assert made["expires_at"] is None
        path = f"/v1/files/{made['id']}"
        assert (await fetch(app, "GET", path)).json() == made
        assert (await fetch(app, "GET", "/v1/files")).json()["data"] == [made]
        content = await fetch(app, "GET", f"{path}/content")
        assert content.body == DATA
        assert content.headers["content-length"] == str(len(DATA))
        gone = (await fetch(app, "DELETE", path)).json()
        assert gone == {"id": made["id"], "object": "file", "deleted": True}
        for method in ("GET", "DELETE"):
            reply = await fetch(app, method, path)
            assert (reply.status, reply.json()["error"]["code"]) == (404, "file_not_found")


async def test_full_disk_is_reported_to_the_client_and_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    async with batch_app(ComputingRouter(), runs=False) as app:
        monkeypatch.setattr(Storage, "run", fail)
        body, headers = form_of(DATA)
        reply = await fetch(app, "POST", "/v1/files", body, headers)
        error = reply.json()["error"]
        assert (reply.status, error["code"]) == (503, "store_failed")
        assert error["message"] == "the store failed: database or disk is full"
        assert "disk is full" in caplog.text
        monkeypatch.undo()


async def test_large_files_are_stored_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PIECE_BYTES", 100)
    async with batch_app(ComputingRouter(), runs=False) as app:
        data = bytes(range(256)) * 10
        body, headers = form_of(data)
        connection = Connection(app, "POST", "/v1/files", headers)
        connection.put_body(*(body[i : i + 70] for i in range(0, len(body), 70)))
        file_id = (await connection.run()).json()["id"]
        assert (await fetch(app, "GET", f"/v1/files/{file_id}/content")).body == data


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        ({"purpose": None}, "purpose"),
        ({"expires_after[anchor]": "now"}, "expires_after.anchor"),
        ({"expires_after[anchor]": "created_at"}, "expires_after.seconds"),
        (
            {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3"},
            "expires_after.seconds",
        ),
        ({"colour": "red"}, "colour"),
    ],
)
async def test_a_refused_upload_names_the_field_and_leaves_nothing(form: Any, param: str) -> None:
    async with batch_app(ComputingRouter(), runs=False) as app:
        reply = await fetch(app, "POST", "/v1/files", *form_of(DATA, **form))
        assert reply.status == 400
        assert reply.json()["error"]["param"] == param
        assert (await fetch(app, "GET", "/v1/files")).json()["data"] == []


async def test_a_file_expires() -> None:
    async with batch_app(ComputingRouter(), runs=False) as app:
        fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        made = (await fetch(app, "POST", "/v1/files", *form_of(DATA, **fields))).json()
        assert made["expires_at"] == made["created_at"] + 3600
        with pytest.MonkeyPatch.context() as later:
            later.setattr(pages, "unix_time_s", lambda: made["expires_at"])
            assert (await fetch(app, "GET", f"/v1/files/{made['id']}")).status == 404
            assert (await fetch(app, "GET", "/v1/files")).json()["data"] == []


async def test_files_are_bounded_alone_for_a_tenant_and_in_total() -> None:
    for bound, status in (
        ("max_file_bytes", 413),
        ("max_tenant_file_bytes", 400),
        ("max_store_bytes", 400),
    ):
        async with batch_app(ComputingRouter(), runs=False, **{bound: len(DATA) * 3 // 2}) as app:
            if bound != "max_file_bytes":
                await upload(app, DATA)
            data = DATA + DATA if bound == "max_file_bytes" else DATA
            reply = await fetch(app, "POST", "/v1/files", *form_of(data))
            assert reply.status == status
            assert reply.json()["error"]["param"] == "file"
            listed = (await fetch(app, "GET", "/v1/files")).json()["data"]
            assert len(listed) == (bound != "max_file_bytes")


async def test_a_declared_length_above_the_bound_is_refused_before_it_is_read() -> None:
    async with batch_app(ComputingRouter(), runs=False, max_file_bytes=100) as app:
        body, headers = form_of(b"")
        headers["content-length"] = str(10**9)
        connection = Connection(app, "POST", "/v1/files", headers)
        assert (await connection.run()).status == 413  # refused without waiting for the body
        assert body


async def test_an_upload_that_breaks_off_leaves_nothing() -> None:
    async with batch_app(ComputingRouter(), runs=False) as app:
        body, headers = form_of(DATA)
        connection = Connection(app, "POST", "/v1/files", headers)
        connection.put_body(body[:80], complete=False)
        connection.leave()
        assert (await connection.run()).status == 499
        assert (await fetch(app, "GET", "/v1/files")).json()["data"] == []


async def test_the_number_of_files_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_FILES", 2)
    async with batch_app(ComputingRouter(), runs=False) as app:
        await upload(app, DATA)
        await upload(app, b"")
        reply = await fetch(app, "POST", "/v1/files", *form_of(DATA))
        assert reply.json()["error"]["code"] == "file_quota_exceeded"


# ---------------------------------------------------------------- listings


async def listed(app: Any, path: str, query: str) -> Any:
    connection = Connection(app, "GET", path, {})
    connection._scope["query_string"] = query.encode()
    return (await connection.run()).json()


async def test_listings_come_in_pages_in_both_orders() -> None:
    async with batch_app(ComputingRouter(), runs=False) as app:
        ids = [await upload(app, DATA) for _ in range(5)]
        first = await listed(app, "/v1/files", "limit=2")
        assert [file["id"] for file in first["data"]] == [ids[4], ids[3]]
        assert (first["first_id"], first["last_id"], first["has_more"]) == (ids[4], ids[3], True)
        rest = await listed(app, "/v1/files", f"after={ids[3]}")
        assert [file["id"] for file in rest["data"]] == ids[2::-1]
        assert rest["has_more"] is False
        other = await listed(app, "/v1/files", f"order=asc&after={ids[1]}&limit=3")
        assert [file["id"] for file in other["data"]] == ids[2:]
        assert other["has_more"] is False
        assert (await listed(app, "/v1/files", "purpose=batch_output"))["data"] == []
        batches = [(await create(app, file_id))["id"] for file_id in ids[:3]]
        page = await listed(app, "/v1/batches", "limit=2")
        assert [batch["id"] for batch in page["data"]] == batches[:0:-1]
        assert page["has_more"] is True


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=x", "limit"),
        ("limit=10001", "limit"),
        ("order=up", "order"),
        ("after=file-x", "after"),
    ],
)
async def test_wrong_pages_are_refused(query: str, param: str) -> None:
    async with batch_app(ComputingRouter(), runs=False) as app:
        assert (await listed(app, "/v1/files", query))["error"]["param"] == param


# ---------------------------------------------------------------- batches


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": 24}, "completion_window"),
        ({"colour": "red"}, "colour"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {f"k{i}": "" for i in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "x", "seconds": 3600}}, "output_expires_after.anchor"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
            "output_expires_after.seconds",
        ),
        ({"input_file_id": "file-x"}, "file_id"),
    ],
)
async def test_a_wrong_batch_is_refused_with_the_field(change: dict, param: str) -> None:
    async with batch_app(ComputingRouter(), runs=False) as app:
        file_id = await upload(app, DATA)
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        reply = await send(app, "POST", "/v1/batches", body | change)
        assert reply.status in (400, 404)
        assert reply.json()["error"]["param"] == param


async def test_a_missing_field_of_a_batch_is_named() -> None:
    async with batch_app(ComputingRouter(), runs=False) as app:
        reply = await send(app, "POST", "/v1/batches", {"input_file_id": "x"})
        assert (reply.status, reply.json()["error"]["param"]) == (400, "endpoint")
        reply = await send(app, "POST", "/v1/batches", {"x": "y" * pages.MAX_BODY_BYTES})
        assert (reply.status, reply.json()["error"]["code"]) == (413, "request_too_large")
        reply = await fetch(app, "POST", "/v1/batches", b"{")
        assert reply.json()["error"]["code"] == "invalid_json"


async def test_active_and_kept_batches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_ACTIVE_BATCHES", 1)
    async with batch_app(ComputingRouter(), runs=False) as app:
        file_id = await upload(app, DATA)
        made = await create(app, file_id)
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        reply = await send(app, "POST", "/v1/batches", body)
        assert reply.status == 429
        path = f"/v1/batches/{made['id']}"
        assert (await send(app, "GET", path)).json()["status"] == "validating"
        reply = await send(app, "POST", f"{path}/cancel")
        assert (reply.json()["status"], reply.json()["cancelling_at"] is None) == (
            "cancelling",
            False,
        )
        assert (await send(app, "POST", f"{path}/cancel")).json()["status"] == "cancelling"
        assert (await send(app, "GET", "/v1/batches/batch_x")).status == 404
        assert (await send(app, "POST", "/v1/batches/batch_x/cancel")).status == 404


async def test_one_tenant_sees_nothing_of_another(tmp_path: Path) -> None:
    keys = key_file(tmp_path / "keys", "alice", "bob")
    alice, bob = ({"authorization": f"Bearer {key}"} for key in ("alice", "bob"))
    async with batch_app(ComputingRouter(), keys=keys, runs=False) as app:
        file_id = await upload(app, DATA, **alice)
        body = {"input_file_id": file_id, "endpoint": "/v1/completions"}
        body["completion_window"] = "24h"
        assert (await send(app, "POST", "/v1/batches", body, **bob)).status == 404
        batch_id = (await send(app, "POST", "/v1/batches", body, **alice)).json()["id"]
        for path in (f"/v1/files/{file_id}", f"/v1/batches/{batch_id}"):
            assert (await send(app, "GET", path, **alice)).status == 200
            assert (await send(app, "GET", path, **bob)).status == 404
        for path in ("/v1/files", "/v1/batches"):
            assert (await send(app, "GET", path, **bob)).json()["data"] == []
        for method, path in (
            ("DELETE", f"/v1/files/{file_id}"),
            ("GET", f"/v1/files/{file_id}/content"),
            ("POST", f"/v1/batches/{batch_id}/cancel"),
        ):
            assert (await send(app, method, path, **bob)).status == 404
        assert (await send(app, "GET", "/v1/files")).status == 401
