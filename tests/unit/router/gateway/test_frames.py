"""Refused requests and disconnected clients are freed at once, without the garbage collector."""

import asyncio
import sqlite3

import msgspec
import pytest

from router.gateway.endpoint import until_client_leaves
from router.gateway.storage import Storage
from router.inbox.api_errors import ApiError
from router.inbox.parse_pools import WIDE_BODY_BYTES, ParsePool
from router.inbox.task_groups import LightTaskGroup
from tests.kits.router.frames import no_frames_in_cycles
from tests.kits.router.gateway import Connection, FakeRouter, Never, answer, make_app, tokens

ANSWERS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
OTHERS = ("/tokenize", "/detokenize", "/invocations", "/v1/batches", "/v1/files")
LONG = b'{"prompt": "' + b"x" * WIDE_BODY_BYTES
BODIES = {
    "broken": b'{"prompt":',
    "long and broken": LONG,
    "a wrong field": b'{"prompt": "x", "input": 5, "max_tokens": "x"}',
    "long with a wrong field": LONG + b'", "max_tokens": -1, "messages": [{}]}',
    "no object": b"[]",
}


async def post(app, path, body):
    connection = Connection(app, "POST", path, {"content-type": "application/json"})
    connection.put_body(body)
    return (await connection.run()).status


@pytest.mark.parametrize("path", ANSWERS + OTHERS)
async def test_a_refused_body_is_freed_at_once(path):
    app = make_app(FakeRouter(), max_body_bytes=10 * WIDE_BODY_BYTES)
    for body in BODIES.values():  # creates what is made once and kept, before the check
        await post(app, path, body)
    with no_frames_in_cycles():
        assert {await post(app, path, body) // 100 for body in BODIES.values()} == {4}


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 3}, {"n": 2, "stream": True}])
async def test_a_client_that_leaves_is_freed_at_once(fields):
    body = msgspec.json.encode({"prompt": "yo", **fields})

    async def leave(app, router):
        connection = Connection(
            app, "POST", "/v1/completions", {"content-type": "application/json"}
        )
        connection.put_body(body)
        call = asyncio.create_task(connection.run())
        await router.waiting.wait()
        connection.leave()
        await call

    router = FakeRouter([tokens("a"), Never()])
    app = make_app(router)
    await leave(app, router)
    router.waiting.clear()
    with no_frames_in_cycles():
        await leave(app, router)


async def test_a_failing_answer_is_freed_at_once():
    app = make_app(FakeRouter([*answer("x")[:1], ValueError("a bug")]))

    async def fail():
        try:
            await post(app, "/v1/completions", b'{"prompt": "x", "n": 2}')
        except ExceptionGroup:
            return True

    await fail()
    with no_frames_in_cycles():
        assert await fail()


async def test_an_error_of_a_thread_is_freed_at_once():
    def fail(_=None):
        raise sqlite3.OperationalError("no")

    async def call(run):
        try:
            await run()
        except sqlite3.OperationalError:
            return True

    lane, storage = ParsePool("test", 100), Storage(None)
    await storage.open()
    for run in (lambda: lane.run("a", 1, fail), lambda: storage.run(fail)):
        with no_frames_in_cycles():
            assert await call(run)
    await storage.close()


async def fail():
    raise ApiError("no", status=400)


async def never():
    await asyncio.Event().wait()


async def in_group(coroutine):
    async with LightTaskGroup() as group:
        group.create_task(coroutine)


@pytest.mark.parametrize("does", ["fails", "is cancelled", "fails outside"])
async def test_an_error_that_leaves_a_task_group_is_freed_at_once(does):
    async def outside():
        async with LightTaskGroup() as group:
            group.create_task(never())
            await fail()

    async def run():
        task = asyncio.ensure_future(
            outside()
            if does == "fails outside"
            else in_group(fail() if does == "fails" else never())
        )
        await asyncio.sleep(0)
        if does == "is cancelled":
            task.cancel()
        await asyncio.wait([task])
        return "cancelled" if task.cancelled() else repr(task.exception())

    with no_frames_in_cycles():
        assert "cancelled" if does == "is cancelled" else "ApiError" in await run()


async def test_a_refusal_beside_a_watched_client_is_freed_at_once():
    async def refused():
        try:
            async with until_client_leaves(never):
                await fail()
        except ApiError:
            return True

    with no_frames_in_cycles():
        assert await refused()
