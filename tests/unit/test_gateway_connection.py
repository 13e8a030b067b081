"""Parts of a body on their way past ASGI: sent together, in order, and not to who is gone."""

import asyncio
import gc

import uvicorn
from uvicorn.server import ServerState

from router.connection import Connection, _outboxes


class Transport(asyncio.Transport):
    """Keeps what is written, beside what other transports of the same list were given."""

    def __init__(self, name, written):
        super().__init__()
        self.name = name
        self.closing = False
        self._written = written

    def write(self, data):
        assert not self.closing
        self._written.append((self.name, bytes(data)))

    def is_closing(self):
        return self.closing

    def get_extra_info(self, name, default=None):
        return default


async def nothing(scope, receive, send):
    raise AssertionError("no request is made here")


def connect(name, written):
    config = uvicorn.Config(nothing, lifespan="off", log_config=None)
    config.load()
    loop = asyncio.get_running_loop()
    connection = Connection(config, server_state=ServerState(), app_state={}, _loop=loop)
    transport = Transport(name, written)
    connection.connection_made(transport)
    return connection, transport


def test_parts_of_all_connections_are_sent_together_at_the_end_of_a_turn():
    async def run():
        written = []
        (first, _), (second, _) = connect("a", written), connect("b", written)
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

    asyncio.run(run())


def test_what_is_flushed_is_sent_at_once_and_once():
    async def run():
        written = []
        connection, _ = connect("a", written)
        connection.flush()
        connection.write(b"1")
        connection.flush()
        assert written == [("a", b"1\r\n1\r\n")]
        connection.write(b"2")
        await asyncio.sleep(0)
        assert written == [("a", b"1\r\n1\r\n"), ("a", b"1\r\n2\r\n")]

    asyncio.run(run())


def test_a_client_that_left_meanwhile_does_not_keep_others_waiting():
    async def run():
        written = []
        (gone, transport), (other, _) = connect("gone", written), connect("other", written)
        gone.write(b"1")
        other.write(b"2")
        transport.closing = True
        await asyncio.sleep(0)
        assert written == [("other", b"1\r\n2\r\n")]

    asyncio.run(run())


def test_loops_have_nothing_to_do_with_one_another():
    written = []

    async def leave_unsent():
        connection, _ = connect("first loop", written)
        connection.write(b"1")

    async def run():
        connection, _ = connect("second loop", written)
        connection.write(b"2")
        connection.flush()

    asyncio.run(leave_unsent())  # ends before the turn that would send it
    written.clear()
    asyncio.run(run())
    assert written == [("second loop", b"1\r\n2\r\n")]


def test_one_that_cannot_be_written_to_is_cut_off_and_others_get_all(caplog):
    async def run():
        written, cut = [], []
        (first, _), (broken, transport), (last, _) = (connect(name, written) for name in "abc")
        transport.write = lambda data: 1 / 0
        transport.abort = lambda: cut.append("b")
        for connection in (first, broken, last):
            connection.write(b"1")
        first.flush()
        assert written == [("a", b"1\r\n1\r\n"), ("c", b"1\r\n1\r\n")]
        assert cut == ["b"]

    asyncio.run(run())
    assert "its connection ends" in caplog.text


def test_a_loop_that_is_over_is_forgotten():
    async def run():
        connection, _ = connect("a", [])
        connection.write(b"1")
        await asyncio.sleep(0)

    gc.collect()
    before = len(_outboxes)
    asyncio.run(run())
    gc.collect()
    assert len(_outboxes) == before
