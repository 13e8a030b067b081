"""Tokens written through the pipe, without a task, give the same answer."""

import asyncio

import msgspec
import pytest

from engine.messages import Logprobs
from router.edge.extension import EXTENSION
from router.machine.requests import Update
from tests.kits.router.gateway import (
    LENGTH,
    Connection,
    FakeRouter,
    Never,
    answer,
    make_app,
    tokens,
)


class Pipe:
    """The pipe of a connection; a flush adds the written parts to the body."""

    def __init__(self, connection: Connection) -> None:
        self.is_ready = True
        self.num_written = 0
        self._unsent = []
        self._connection = connection
        connection._scope["extensions"] = {EXTENSION: {"pipe": self}}

    def write(self, data: bytes) -> None:
        assert self.is_ready
        assert data
        self.num_written += 1
        self._unsent.append({"body": data, "more_body": True})

    def flush(self) -> None:
        self._connection.reply.messages += self._unsent
        self._unsent.clear()


def connect(router, path="/v1/chat/completions", **fields):
    prompt = (
        {"messages": [{"role": "user", "content": "yo"}]} if "chat" in path else {"prompt": "y"}
    )
    connection = Connection(make_app(router), "POST", path, {})
    connection.put_body(msgspec.json.encode({"stream": True, "seed": 1, **prompt, **fields}))
    return connection


def texts(reply):
    """The text of each choice."""
    found = {}
    for event in reply.events()[:-1]:
        for choice in event["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            found[choice["index"]] = found.get(choice["index"], "") + text
    return found


def body(reply):
    """Returns the events of a stream, without the ids and times that differ between answers."""
    return [
        event if event == "[DONE]" else event | {"id": "", "created": 0} for event in reply.events()
    ]


SCORED = [
    Update(token_ids=(byte,), logprobs=(Logprobs(-1.0, 1, (byte,), (-1.0,)),)) for byte in b"abc"
]


@pytest.mark.parametrize(
    ("script", "fields"),
    [
        (answer("hé, a longer answer"), {}),
        (answer("ends HERE, not there"), {"stop": "HERE"}),
        (answer("counted"), {"stream_options": {"include_usage": True}}),
        (
            [*SCORED, msgspec.structs.replace(SCORED[0], outcome=LENGTH)],
            {"logprobs": 1, "path": "/v1/completions"},
        ),
    ],
)
async def test_an_answer_is_the_same_with_a_pipe_and_without(script, fields):
    plain = connect(FakeRouter(script), **fields)
    piped = connect(FakeRouter(script), **fields)
    pipe = Pipe(piped)
    await plain.run()
    await piped.run()
    assert pipe.num_written >= 2
    assert body(piped.reply) == body(plain.reply)
    assert piped.reply.is_complete


async def test_the_first_token_is_sent_with_the_head_and_not_before():
    connection = connect(FakeRouter(answer("ab")))
    pipe = Pipe(connection)
    reply = await connection.run()
    assert reply.status == 200
    assert pipe.num_written == 1  # of the second token: the last comes with the end
    assert texts(reply) == {0: "ab"}


async def test_piped_parts_are_sent_before_later_sends():
    connection = connect(FakeRouter(answer("abc")))
    pipe = Pipe(connection)
    reply = await connection.run()
    assert pipe.num_written == 2
    assert pipe._unsent == []
    assert [event["choices"][0]["delta"] for event in reply.events()[1:-2]] == [
        {"content": "a"},
        {"content": "b"},
        {"content": "c"},
    ]


async def test_a_client_that_reads_too_slowly_is_waited_for():
    connection = connect(FakeRouter(answer("abc")))
    pipe = Pipe(connection)
    pipe.is_ready = False
    reply = await connection.run()
    assert pipe.num_written == 0
    assert texts(reply) == {0: "abc"}


async def test_choices_keep_their_order_where_some_pieces_are_written_at_once():
    connection = connect(FakeRouter(answer("abcd"), answer("wxyz")), n=2)
    pipe = Pipe(connection)
    sends = 0
    send = connection._send

    async def slowly(message):
        nonlocal sends
        sends += 1
        pipe.is_ready = sends % 2 == 0
        await asyncio.sleep(0)
        await send(message)

    connection._send = slowly
    assert texts(await connection.run()) == {0: "abcd", 1: "wxyz"}


async def test_a_stop_string_found_at_once_cancels_before_the_end_is_sent():
    router = FakeRouter([tokens("a"), tokens("b"), tokens("c"), Never()])
    connection = connect(router, stop="c")
    Pipe(connection)
    send = connection._send

    async def checked(message):
        if message["type"] == "http.response.body" and not message.get("more_body"):
            assert len(router.cancelled) == 1
        await send(message)

    connection._send = checked
    assert texts(await connection.run()) == {0: "ab"}
    assert router.live == 0


async def test_a_client_leaving_during_piped_writes_cancels_its_request():
    router = FakeRouter([tokens("a"), tokens("b"), Never()])
    connection = connect(router)
    pipe = Pipe(connection)
    call = asyncio.create_task(connection.run())
    await router.waiting.wait()
    assert pipe.num_written == 1
    connection.leave()
    assert not (await call).is_complete
    assert len(router.cancelled) == 1
