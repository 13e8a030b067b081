"""Body parts written past ASGI: sent together, in order, and only to connected clients."""

import asyncio
import gc
import weakref
from socket import socketpair

import msgspec
import pytest

from router.edge.connection import Clients, Connection
from router.edge.exchange import EXCHANGE, NO_SOCKET
from router.edge.limits import (
    FREE_PARTS,
    MIN_PART_BYTES,
    PART_WORK,
    SLICE_BYTES,
    WORK_PER_ITERATION,
    Book,
)
from router.inbox.parse_pools import WIDE_BODY_BYTES
from tests.kits.router.frames import no_frames_in_cycles
from tests.kits.router.gateway import (
    FakeRouter,
    Never,
    answer,
    make_app,
    tokens,
)


class Transport(asyncio.Transport):
    """A transport that adds its writes to a list shared with other transports."""

    def __init__(self, name, written, facts):
        super().__init__(facts)
        self.name = name
        self.closing = False
        self.num_unsent = 0
        self._written = written

    def get_write_buffer_size(self):
        return self.num_unsent

    def write(self, data):
        assert not self.closing
        self._written.append((self.name, bytes(data)))

    def is_closing(self):
        return self.closing

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass

    def close(self):
        self.closing = True


async def nothing(scope, receive, send):
    raise AssertionError("no request is made here")


def connect(name, written, app=nothing, facts=None, kind=Connection, clients=None):
    clients = clients or Clients(app, Book())
    clients.book.admit("")
    connection = kind(clients)
    transport = Transport(name, written, facts)
    connection.connection_made(transport)
    return connection, transport


def tasks_of(connection):
    return connection._clients.tasks


async def test_parts_of_all_connections_are_sent_together_at_the_end_of_a_turn():
    written, clients = [], Clients(nothing, Book())
    first, second = (connect(name, written, clients=clients)[0] for name in "ab")
    first.write(b"hello")
    second.write(b"x" * 16)
    first.write(b"!")
    assert written == []
    await asyncio.sleep(0)
    assert written == [
        ("a", b"5\r\nhello\r\n"),
        ("b", b"10\r\n" + b"x" * 16 + b"\r\n"),
        ("a", b"1\r\n!\r\n"),
    ]
    await asyncio.sleep(0)
    assert len(written) == 3


async def test_flush_sends_waiting_parts_exactly_once():
    written = []
    connection, _ = connect("a", written)
    connection.flush()
    connection.write(b"1")
    connection.flush()
    assert written == [("a", b"1\r\n1\r\n")]
    connection.write(b"2")
    await asyncio.sleep(0)
    assert written == [("a", b"1\r\n1\r\n"), ("a", b"1\r\n2\r\n")]


async def test_a_client_that_left_delays_no_other_client():
    written = []
    (gone, transport), (other, _) = connect("gone", written), connect("other", written)
    gone.write(b"1")
    other.write(b"2")
    transport.closing = True
    await asyncio.sleep(0)
    assert written == [("other", b"1\r\n2\r\n")]


@pytest.mark.parametrize("blocks", ["nothing", "unsent", "closing", "tls"])
async def test_a_socket_is_offered_only_if_nothing_has_to_be_sent_before(blocks):
    sock, other = socketpair()
    with sock, other:
        connection, transport = connect("a", [], facts={"socket": sock})
        assert connection.socket() == sock.fileno()
        if blocks == "tls":
            facts = {"socket": sock, "sslcontext": "encrypts"}
            connection, transport = connect("a", [], facts=facts)
        transport.num_unsent = int(blocks == "unsent")
        transport.closing = blocks == "closing"
        assert (connection.socket() == sock.fileno()) == (blocks == "nothing")
        assert (connection.socket() == NO_SOCKET) == (blocks != "nothing")


async def test_a_failing_connection_is_cut_and_others_get_their_parts(caplog):
    written, cut, clients = [], [], Clients(nothing, Book())
    (first, _), (broken, transport), (last, _) = (
        connect(name, written, clients=clients) for name in "abc"
    )
    transport.write = lambda data: 1 / 0
    transport.abort = lambda: cut.append("b")
    for connection in (first, broken, last):
        connection.write(b"1")
    first.flush()
    assert written == [("a", b"1\r\n1\r\n"), ("c", b"1\r\n1\r\n")]
    assert cut == ["b"]
    assert "its connection is cut" in caplog.text


def request(body, *extra_headers):
    headers = b"".join(header + b"\r\n" for header in extra_headers)
    length = str(len(body)).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: " + length + b"\r\n" + headers + b"\r\n" + body
    )


def asked(**fields):
    return request(msgspec.json.encode({"prompt": "yo", "stream": True, **fields}))


async def until(holds):
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110  (no event marks a turn of the loop)
            await asyncio.sleep(0)


async def echo(scope, receive, send):
    """Answers with the body, and tells whether the body arrived later than the head."""
    body = scope[EXCHANGE].take_body()
    way = b"at once " if body is not None else b"waited for "
    if body is None:
        body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": way + body})


async def test_a_body_that_has_come_is_not_waited_for_and_the_head_comes_with_the_answer():
    written = []
    connection, _ = connect("a", written, echo)
    connection.data_received(request(b"hello"))
    await until(lambda: written)
    [(_, data)] = written
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert body == b"d\r\nat once hello\r\n0\r\n\r\n"


async def test_pipelined_requests_keep_their_own_bodies():
    written = []
    connection, _ = connect("a", written, echo)
    connection.data_received(request(b"first") + request(b"second"))
    await until(lambda: len(written) == 2)
    bodies = [data.partition(b"\r\n\r\n")[2].split(b"\r\n")[1] for _, data in written]
    assert bodies == [b"at once first", b"at once second"]
    assert connection._exchanges == []


async def test_what_was_made_for_a_request_is_freed_at_its_end():
    callers = []

    async def app(scope, receive, send):
        callers.append(weakref.ref(scope[EXCHANGE]))
        await echo(scope, receive, send)

    written = []
    connection, _ = connect("a", written, app)
    gc.collect()
    gc.disable()
    try:
        connection.data_received(request(b"hello"))
        await until(lambda: written)
        await until(lambda: callers[0]() is None)
    finally:
        gc.enable()


@pytest.mark.parametrize("body", [b"{", b"[" * (WIDE_BODY_BYTES + 1), b'{"prompt": 5}'])
async def test_a_refused_body_is_freed_at_its_end(body):
    written = []
    connection, _ = connect("a", written, make_app(FakeRouter()))

    async def refuse():
        written.clear()
        connection.data_received(request(body))
        await until(lambda: written and not tasks_of(connection))
        assert written[0][1].startswith(b"HTTP/1.1 400 ")

    await refuse()
    with no_frames_in_cycles():
        await refuse()


async def test_a_body_that_comes_late_is_waited_for():
    written = []
    connection, _ = connect("a", written, echo)
    connection.data_received(request(b"hello")[:-2])
    await asyncio.sleep(0)
    connection.data_received(b"lo")
    await until(lambda: written)
    assert b"waited for hel" in written[0][1]


async def test_a_body_that_is_asked_for_is_waited_for():
    written = []
    connection, _ = connect("a", written, echo)
    connection.data_received(request(b"hello", b"expect: 100-continue"))
    await until(lambda: b"hello" in b"".join(data for _, data in written))
    data = b"".join(data for _, data in written)
    assert data.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")


async def test_a_head_alone_is_sent_at_the_end_of_its_turn():
    async def slow(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.Event().wait()

    written = []
    connection, _ = connect("a", written, slow)
    connection.data_received(request(b""))
    await until(lambda: written)
    assert written[0][1].endswith(b"\r\n\r\n")
    connection.transport.close()
    assert len(written) == 1
    for task in tasks_of(connection):
        task.cancel()
    await asyncio.wait(tasks_of(connection))


async def test_an_answer_over_a_connection_is_whole():
    written = []
    router = FakeRouter(answer("abc"))
    connection, _ = connect("a", written, make_app(router))
    connection.data_received(asked())
    await until(lambda: written and written[-1][1].endswith(b"0\r\n\r\n"))
    await until(lambda: not tasks_of(connection))
    text = b"".join(data for _, data in written)
    assert text.count(b"data: {") == 4  # three tokens and the end marker
    assert written[0][1].count(b"data: {") == 1  # the first event is sent with the head
    assert router.cancelled == []


async def test_a_client_that_leaves_cancels_its_request_and_nothing_stays_behind():
    router = FakeRouter([tokens("a"), Never()])
    connection, transport = connect("a", [], make_app(router))
    connection.data_received(asked())
    await router.waiting.wait()
    transport.closing = True
    connection.connection_lost(None)
    await until(lambda: not tasks_of(connection))
    assert router.live == 0
    assert router.cancelled == [router.requests[0].request_id]


async def test_a_client_that_leaves_before_its_request_is_looked_at_asks_the_router_nothing():
    router = FakeRouter()
    connection, transport = connect("a", [], make_app(router))
    connection.data_received(asked())
    transport.closing = True
    connection.connection_lost(None)
    await until(lambda: not tasks_of(connection))
    assert router.requests == []


async def test_a_stopping_server_may_cancel_running_answers():
    router = FakeRouter([Never()])
    connection, _ = connect("a", [], make_app(router))
    connection.data_received(asked())
    await router.waiting.wait()
    [task] = tasks_of(connection)
    task.cancel()
    await asyncio.wait([task])
    assert router.live == 0


async def test_a_body_that_is_too_long_is_refused_though_it_has_come():
    written = []
    router = FakeRouter()
    connection, _ = connect("a", written, make_app(router, max_body_bytes=10))
    connection.data_received(asked())
    await until(lambda: written)
    assert written[0][1].startswith(b"HTTP/1.1 413 ")
    assert router.requests == []


async def test_a_body_that_is_taken_in_pieces_does_not_count_and_has_a_deadline_for_each_piece():
    received = []

    async def app(scope, receive, send):
        scope[EXCHANGE].streams_body = True
        is_last = False
        while not is_last:
            message = await receive()
            received.append(message["body"])
            is_last = not message["more_body"]

    connection, _ = connect("a", [], app)
    book, times = connection._book, connection._times
    whole = request(b"x" * 40)
    head, body = whole[:-40], whole[-40:]
    connection.data_received(head + body[:10])
    assert book.bodies_bytes == 10  # the application has not started yet
    await until(lambda: received)
    times.body_s = 0.0
    connection.data_received(body[10:20])
    assert book.bodies_bytes == 0
    assert times.body_s > 0.0
    connection.data_received(body[20:])
    await until(lambda: not tasks_of(connection))
    assert book.bodies_bytes == 0
    assert b"".join(received) == body
    book.validate()


GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
CHUNKED = request(b"").replace(b"content-length: 0", b"transfer-encoding: chunked")


async def answered(app, *inputs):
    """Returns the bytes that a connection sends for input that arrives in a few reads."""
    written = []
    connection, transport = connect("a", written, app)
    for data in inputs:
        if not transport.closing:
            connection.data_received(data)
    await until(lambda: written and not tasks_of(connection) and not connection._feeder._waiting)
    return b"".join(data for _, data in written)


async def read_all(scope, receive, send):
    """Answers with the length of the body."""
    num_bytes, more_body = 0, True
    while more_body:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        num_bytes += len(message["body"])
        more_body = message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"%d bytes" % num_bytes})


@pytest.mark.parametrize("reads", ["one", "many", "one-byte"])
async def test_a_body_in_tiny_parts_is_refused(reads):
    data = CHUNKED + b"1\r\nx\r\n" * (3 * FREE_PARTS)
    if reads == "one-byte":
        head = request(b"x" * (3 * FREE_PARTS))
        start = head.index(b"\r\n\r\n") + 4
        inputs = [head[:start], *(head[i : i + 1] for i in range(start, len(head)))]
    else:
        size = len(data) if reads == "one" else 5000
        inputs = [data[i : i + size] for i in range(0, len(data), size)]
    said = await answered(read_all, *inputs)
    assert said.startswith(b"HTTP/1.1 400 ")
    assert b"too many small parts" in said
    assert b"connection: close" in said


@pytest.mark.parametrize(
    ("size", "num"), [(1, FREE_PARTS), (MIN_PART_BYTES, 4 * FREE_PARTS), (70_000, 20)]
)
async def test_a_body_in_sensible_parts_is_read(size, num):
    data = CHUNKED + (b"%x\r\n" % size + b"x" * size + b"\r\n") * num + b"0\r\n\r\n"
    said = await answered(read_all, data)
    assert b"%d bytes" % (size * num) in said


async def test_tiny_parts_of_many_connections_take_little_of_each_turn():
    data = CHUNKED + b"1\r\nx\r\n" * FREE_PARTS
    calls = 0

    class Counting(Connection):
        def on_body(self, body):
            nonlocal calls
            calls += 1
            super().on_body(body)

    written, made, clients = [], [], Clients(read_all, Book())
    for index in range(4):
        connection, _ = connect(str(index), written, kind=Counting, clients=clients)
        made.append(connection)
        connection.data_received(data)
    worst, before = calls, calls
    while any(connection._feeder._waiting for connection in made):
        await asyncio.sleep(0)
        worst, before = max(worst, calls - before), calls
    assert calls == 4 * FREE_PARTS
    assert worst * PART_WORK < WORK_PER_ITERATION + PART_WORK * SLICE_BYTES
    for connection in made:
        connection.connection_lost(None)
    await until(lambda: not any(tasks_of(connection) for connection in made))


async def test_endless_trailers_are_refused_early():
    said = await answered(read_all, CHUNKED + b"0\r\n" + b"a:b\r\n" * 100_000)
    assert b" 431 " in said.partition(b"\r\n")[0]


async def test_fields_behind_a_body_are_no_header():
    seen = []

    async def app(scope, receive, send):
        await asyncio.sleep(0)
        seen.append([name for name, _ in scope["headers"]])
        await read_all(scope, receive, send)

    await answered(app, CHUNKED + b"0\r\nauthorization: Bearer k\r\nhost: y\r\n\r\n")
    assert seen == [[b"host", b"content-type", b"transfer-encoding"]]


@pytest.mark.parametrize("field", [b"Host: x", b"AUTHORIZATION: Bearer k"])
async def test_a_field_that_is_given_twice_is_refused(field):
    said = await answered(nothing, request(b"", b"authorization: Bearer a", field))
    assert said.startswith(b"HTTP/1.1 400 ")
    assert b"is given twice" in said


@pytest.mark.parametrize("target", [b"/\xff", b"/health?\xff", "/v1/files?after=ÿ".encode()])
async def test_a_target_with_bytes_that_no_url_has_is_refused(target):
    said = await answered(make_app(FakeRouter()), GET.replace(b"/health", target))
    assert said.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("streams", [False, True])
async def test_a_client_of_http_1_0_gets_no_chunks(streams):
    body = msgspec.json.encode({"prompt": "yo", "stream": streams})
    data = request(body).replace(b"HTTP/1.1", b"HTTP/1.0")
    said = await answered(make_app(FakeRouter(answer("abc"))), data)
    head, _, rest = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head
    assert rest.endswith(b"data: [DONE]\n\n") if streams else msgspec.json.decode(rest)
    if streams:
        assert rest.startswith(b"data: {")


SECOND = (GET, request(b"{}"), request(b"{}")[:-1])


@pytest.mark.parametrize("num_turns", [0, 1, 2, 5, 20])
@pytest.mark.parametrize("second", SECOND, ids=["get", "post", "part"])
@pytest.mark.parametrize("first", [GET, asked(), request(b"{")], ids=["get", "stream", "refused"])
async def test_a_client_that_leaves_pipelined_requests_leaves_no_trace(
    first, second, num_turns, caplog
):
    router = FakeRouter([tokens("a"), Never()])
    connection, transport = connect("a", [], make_app(router))
    connection.data_received(first + second)
    for _ in range(num_turns):
        await asyncio.sleep(0)
    transport.closing = True
    connection.connection_lost(None)
    await until(lambda: not tasks_of(connection))
    assert router.live == 0
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_frames_of_another_protocol_end_the_connection():
    upgrade = GET.replace(
        b"host: localhost", b"host: localhost\r\nconnection: upgrade\r\nupgrade: websocket"
    )
    written = []
    connection, transport = connect("a", written, make_app(FakeRouter()))
    connection.data_received(upgrade + b"\x81\x01a" * 100_000)
    connection.data_received(b"\x81\x01a" * 100_000)
    await until(lambda: not tasks_of(connection) and transport.closing)
    assert written[0][1].startswith(b"HTTP/1.1 200 ")
    assert connection._feeder._waiting == {}


async def test_a_response_of_another_length_than_its_head_says_ends_the_connection(caplog):
    async def app(scope, receive, send):
        headers = [(b"content-length", b"3")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"four"})

    connection, transport = connect("a", [], app)
    connection.data_received(request(b""))
    await until(lambda: transport.closing)
    assert "the application failed" in caplog.text


@pytest.mark.parametrize("header", [(b"x-a", b"1\r\nx-b: 2"), (b"x a", b"1")])
async def test_a_header_that_would_be_two_is_not_sent(header):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [header]})

    said = await answered(app, request(b""))
    assert b"x-b" not in said
    assert said.startswith(b"HTTP/1.1 500 ")
