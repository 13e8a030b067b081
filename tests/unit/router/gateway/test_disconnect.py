"""A client that leaves cancels its request at once, and no task stays behind."""

import asyncio

import msgspec
import pytest

from tests.kits.router.gateway import (
    Connection,
    FakeRouter,
    Never,
    answer,
    make_app,
    run_alone,
    tokens,
)


def connect(router, **fields):
    connection = Connection(make_app(router), "POST", "/v1/completions", {})
    connection.put_body(msgspec.json.encode({"prompt": "yo", **fields}))
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("before", [[], [tokens("a")]])
def test_leaving_while_the_router_works_cancels(stream, before):
    router = FakeRouter([*before, Never()])

    async def leave():
        connection = connect(router, stream=stream)
        call = asyncio.create_task(connection.run())
        await router.waiting.wait()
        assert router.live == 1
        connection.leave()
        reply = await call
        assert not reply.is_complete
        assert bool(reply.messages) == bool(stream and before)

    run_alone(leave())
    assert router.live == 0
    assert router.cancelled == [router.requests[0].request_id]


def test_leaving_while_the_server_waits_to_send_cancels():
    router = FakeRouter(answer("abc"))

    async def leave():
        connection = connect(router, stream=True)
        blocked = asyncio.Event()

        async def send(message):
            if message["type"] == "http.response.body":
                blocked.set()
                await asyncio.Event().wait()  # the client reads no more

        connection._send = send
        call = asyncio.create_task(connection.run())
        await blocked.wait()
        connection.leave()
        await call

    run_alone(leave())
    assert (router.live, len(router.cancelled)) == (0, 1)


def test_leaving_in_the_middle_of_the_body_asks_the_router_nothing():
    router = FakeRouter()

    async def leave():
        connection = Connection(make_app(router), "POST", "/v1/completions", {})
        connection.put_body(b'{"prompt"', complete=False)
        connection.leave()
        assert (await connection.run()).messages == []

    run_alone(leave())
    assert router.requests == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_shuts_down_cancels(stream):
    router = FakeRouter([tokens("a"), Never()])

    async def shut_down():
        call = asyncio.create_task(connect(router, stream=stream).run())
        await router.waiting.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    run_alone(shut_down())
    assert (router.live, len(router.cancelled)) == (0, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_read_to_its_end_is_not_cancelled(stream):
    router = FakeRouter(answer("hi"))

    async def stay():
        assert (await connect(router, stream=stream).run()).is_complete

    run_alone(stay())
    assert (router.live, router.cancelled) == (0, [])


def test_a_stop_string_cancels_before_the_client_takes_the_last_chunk():
    router = FakeRouter([tokens("ab"), Never()])

    async def read_slowly():
        connection = connect(router, stream=True, stop="b")

        async def send(message):
            if message["type"] == "http.response.body" and not message.get("more_body"):
                assert len(router.cancelled) == 1
            connection.reply.messages.append(message)

        connection._send = send
        await connection.run()

    run_alone(read_slowly())
    assert router.live == 0
