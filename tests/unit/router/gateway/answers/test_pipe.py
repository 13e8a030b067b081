"""The answer is the same if the tokens are written directly to the connection's pipe."""

import asyncio

import msgspec
import pytest

from engine.messages import Logprobs
from router.edge.exchange import NO_SOCKET, PIPE
from router.machine.requests import Update
from tests.kits.router.gateway import (
    LENGTH,
    Connection,
    FakeRouter,
    Never,
    answer,
    fetch,
    make_app,
    passes,
    tokens,
)


class Pipe:
    """The pipe of a connection. A flush appends the written parts to the body."""

    def __init__(self, connection: Connection) -> None:
        self.is_ready = True
        self.num_written = 0
        self.num_batched = 0
        self.is_cut = False
        self._unsent = []
        self._connection = connection
        connection._scope[PIPE] = self

    def write(self, data: bytes) -> None:
        assert self.is_ready
        assert data
        self.num_written += 1
        self._unsent.append({"body": data, "more_body": True})

    def cut(self) -> None:
        self.is_ready = False
        self.is_cut = True
        self._connection.leave()

    def socket(self) -> int:
        return NO_SOCKET

    def write_coded(self, data: bytes) -> None:
        assert not self._unsent
        size, _, rest = data.partition(b"\r\n")
        assert rest.endswith(b"\r\n")
        assert int(size, 16) == len(rest) - 2
        self.num_batched += 1
        self.write(rest[:-2])
        self.flush()

    def flush(self) -> None:
        self._connection.reply.messages += self._unsent
        self._unsent.clear()


def connect(router, path="/v1/chat/completions", *, in_python=False, **fields):
    prompt = (
        {"messages": [{"role": "user", "content": "yo"}]} if "chat" in path else {"prompt": "y"}
    )
    app = make_app(router, in_python=in_python)
    connection = Connection(app, "POST", path, {})
    connection.put_body(msgspec.json.encode({"stream": True, "seed": 1, **prompt, **fields}))
    return connection


def texts(reply):
    """Returns the text of each choice."""
    found = {}
    for event in reply.events()[:-1]:
        for choice in event["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            found[choice["index"]] = found.get(choice["index"], "") + text
    return found


def body(reply):
    """Returns the events of a stream, without ids and times, which differ between answers."""
    return [
        event if event == "[DONE]" else event | {"id": "", "created": 0} for event in reply.events()
    ]


SCORED = [
    Update(token_ids=(byte,), logprobs=(Logprobs(-1.0, 1, (byte,), (-1.0,)),)) for byte in b"abc"
]


async def test_a_client_that_reads_slowly_gets_larger_pieces():
    connection = connect(FakeRouter(answer("abcd")))
    Pipe(connection)
    send, blocked = connection._send, asyncio.Event()

    async def slowly(message):
        await send(message)
        if message["type"] == "http.response.body" and not blocked.is_set():
            blocked.set()
            await passes(100)  # until the answer is complete

    connection._send = slowly
    reply = await connection.run()
    deltas = [event["choices"][0]["delta"] for event in reply.events()[1:-1]]
    assert deltas == [{"content": "a"}, {"content": "bcd"}]


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


# ---------------------------------------------------------------- text in C++

BAD_UTF8 = b"\xf0\x9f\xff\xe2\x82 \xed\xa0\x80z\xed\xa0"
BROKEN = [tokens("a"), *(Update(token_ids=(byte,)) for byte in BAD_UTF8)]


@pytest.mark.parametrize(
    ("script", "fields", "num_batched"),
    [
        (answer('hé, "a" \\ longer\n\x01 answer 😀'), {}, True),
        (answer("a text"), {"path": "/v1/completions"}, True),
        (answer("two answers"), {"n": 2}, True),
        (answer("counted"), {"stream_options": {"include_usage": True}}, True),
        (answer("shown"), {"skip_special_tokens": False}, True),
        ([*BROKEN, Update(outcome=LENGTH)], {}, True),
        ([*BROKEN, tokens("", outcome=LENGTH)], {"path": "/v1/completions"}, True),
        ([*BROKEN[:4], tokens("b", timeline=None), *BROKEN[4:], Update(outcome=LENGTH)], {}, True),
        (answer("ends HERE, not there"), {"stop": "HERE"}, False),
        (answer("ids too"), {"return_token_ids": True}, False),
        (answer("echoed"), {"path": "/v1/completions", "echo": True}, False),
        (
            answer("counts"),
            {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            False,
        ),
        (
            [*SCORED, msgspec.structs.replace(SCORED[0], outcome=LENGTH)],
            {"logprobs": 1, "path": "/v1/completions"},
            False,
        ),
    ],
)
async def test_an_answer_is_the_same_in_python_and_in_cpp(script, fields, num_batched):
    plain = connect(FakeRouter(script), in_python=True, **fields)
    batched = connect(FakeRouter(script), **fields)
    Pipe(plain)
    pipe = Pipe(batched)
    await plain.run()
    await batched.run()
    assert body(batched.reply) == body(plain.reply)
    assert bool(pipe.num_batched) == num_batched


async def test_tokens_count_the_same_in_python_and_in_cpp():
    pages = []
    for in_python in (False, True):
        connection = connect(FakeRouter(answer("counted")), in_python=in_python)
        Pipe(connection)
        await connection.run()
        page = await fetch(connection._app, "GET", "/metrics")
        pages.append(
            [
                line
                for line in page.body.decode().splitlines()
                if line.startswith(("baton_generation", "baton_request", "baton_i", "baton_tpot"))
            ]
        )
    assert pages[0] == pages[1]
    assert len(pages[0]) > 40


async def test_a_client_that_leaves_with_tokens_on_their_way_harms_nothing():
    router = FakeRouter([*answer("abc")[:3], Never()])
    connection = connect(router)
    pipe = Pipe(connection)
    running = asyncio.create_task(connection.run())
    await router.waiting.wait()
    pipe.is_ready = False
    connection.leave()
    await running
    assert router.live == 0


async def test_a_stream_whose_tokens_become_no_text_is_cut(caplog):
    too_large = Update(token_ids=(2**63,))
    router = FakeRouter([*answer("abc")[:3], too_large, Never()])
    connection = connect(router)
    pipe = Pipe(connection)
    await connection.run()
    assert pipe.is_cut
    assert "tokens became no text" in caplog.text
    assert router.live == 0
