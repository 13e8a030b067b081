"""A disconnected client cancels its request at once, and no task is left behind."""

import asyncio

import msgspec
import pytest

from tests.kits.router.gateway import (
    Connection,
    FakeRouter,
    Never,
    answer,
    make_app,
    tokens,
)


def connect(router, **fields):
    connection = Connection(make_app(router), "POST", "/v1/completions", {})
    connection.put_body(msgspec.json.encode({"prompt": "yo", **fields}))
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("before", [[], [tokens("a")]])
async def test_leaving_while_the_router_works_cancels(stream, before):
    router = FakeRouter([*before, Never()])
    connection = connect(router, stream=stream)
    call = asyncio.create_task(connection.run())
    await router.waiting.wait()
    assert router.live == 1
    connection.leave()
    reply = await call
    assert not reply.is_complete
    assert bool(reply.messages) == bool(stream and before)
    assert router.live == 0
    assert router.cancelled == [router.requests[0].request_id]


async def test_leaving_while_the_server_waits_to_send_cancels():
    router = FakeRouter(answer("abc"))
    connection = connect(router, stream=True)
    blocked = asyncio.Event()

    async def send(message):
        if message["type"] == "http.response.body":
            blocked.set()
            await asyncio.Event().wait()  # the client stops reading

    connection._send = send
    call = asyncio.create_task(connection.run())
    await blocked.wait()
    connection.leave()
    await call
    assert (router.live, len(router.cancelled)) == (0, 1)


async def test_leaving_in_the_middle_of_the_body_asks_the_router_nothing():
    router = FakeRouter()
    connection = Connection(make_app(router), "POST", "/v1/completions", {})
    connection.put_body(b'{"prompt"', complete=False)
    connection.leave()
    assert (await connection.run()).messages == []
    assert router.requests == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_that_shuts_down_cancels(stream):
    router = FakeRouter([tokens("a"), Never()])
    call = asyncio.create_task(connect(router, stream=stream).run())
    await router.waiting.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (router.live, len(router.cancelled)) == (0, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_read_to_its_end_is_not_cancelled(stream):
    router = FakeRouter(answer("hi"))
    assert (await connect(router, stream=stream).run()).is_complete
    assert (router.live, router.cancelled) == (0, [])


async def test_a_stop_string_cancels_before_the_client_takes_the_last_chunk():
    router = FakeRouter([tokens("ab"), Never()])
    connection = connect(router, stream=True, stop="b")

    async def send(message):
        if message["type"] == "http.response.body" and not message.get("more_body"):
            assert len(router.cancelled) == 1
        connection.reply.messages.append(message)

    connection._send = send
    await connection.run()
    assert router.live == 0
