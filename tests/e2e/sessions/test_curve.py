"""ZeroMQ listeners give nothing to clients without the secret, and such clients cost no memory."""

import asyncio
import multiprocessing
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from deploy.worker.block_publisher import BlockPublisher
from engine.clock import MonotonicClock
from engine.config import Transport
from engine.net.curve import HANDSHAKE_S, Channel, client_keys, secure_client, server_keys
from engine.net.trust import Secret
from engine.worker.block_events import EventLog, encode_number
from engine.worker.blocks import Stored, hash_blocks
from kvtransfer.messages import Hold, encode
from tests.kits.endpoints import DEADLINE_S, SECRET, worker

MIB = 2**20
MAX_BYTES = 2**20


GiveKeys = Callable[["zmq.Socket[bytes]", Channel], None]


def with_the_keys(one: "zmq.Socket[bytes]", channel: Channel) -> None:
    secure_client(one, SECRET, channel, max_message_bytes=MAX_BYTES)


def with_wrong_server_key(one: "zmq.Socket[bytes]", channel: Channel) -> None:
    with_the_keys(one, channel)
    other = Channel.BLOCK_EVENTS if channel is Channel.KV else Channel.KV
    one.set(zmq.CURVE_SERVERKEY, server_keys(SECRET, other).public)


def with_keys_of_its_own(one: "zmq.Socket[bytes]", channel: Channel) -> None:
    """Uses the server's public key, which has leaked, but not the clients' secret key."""
    with_the_keys(one, channel)
    public, secret = zmq.curve_keypair()
    one.set(zmq.CURVE_PUBLICKEY, public)
    one.set(zmq.CURVE_SECRETKEY, secret)


def with_another_secret(one: "zmq.Socket[bytes]", channel: Channel) -> None:
    secure_client(one, Secret("guess"), channel, max_message_bytes=MAX_BYTES)


def without_keys(one: "zmq.Socket[bytes]", channel: Channel) -> None:
    """Connects without keys, the default of ZeroMQ clients."""


@contextmanager
def client(
    kind: int, channel: Channel, give_keys: GiveKeys = with_the_keys
) -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, context.socket(kind) as one:
        one.linger = 0
        give_keys(one, channel)
        yield one


STRANGERS = [with_wrong_server_key, with_keys_of_its_own, with_another_secret, without_keys]


def is_answered(one: "zmq.Socket[bytes]", endpoint: str, said: list[bytes], wait_s: float) -> bool:
    one.connect(endpoint)
    one.send_multipart(said)
    return bool(one.poll(int(1000 * wait_s)))


@pytest.mark.parametrize("as_stranger", STRANGERS)
def test_a_source_of_kv_answers_only_clients_with_the_keys(as_stranger):
    hold = [encode(Hold("l", 0, 0))]
    with worker("source", Transport.ZMQ) as source:
        where = source.address.address
        with client(zmq.DEALER, Channel.KV, as_stranger) as stranger:
            assert not is_answered(stranger, where, hold, 0.3)
        with client(zmq.DEALER, Channel.KV) as friend:
            assert is_answered(friend, where, hold, DEADLINE_S)
        refused = source.endpoint.counters().get("refused_connections:wrong key", 0)
        assert (refused > 0) == (as_stranger is with_keys_of_its_own)


@pytest.mark.parametrize("as_stranger", STRANGERS)
def test_only_clients_with_the_keys_get_block_events(as_stranger):
    """A client without keys gets neither published events nor replays."""
    news = [Stored(hash_blocks(range(4), 4)[0], None)]
    ask = [b"", encode_number(0)]

    async def run() -> None:
        publisher = BlockPublisher(
            EventLog(block_size=4),
            worker_id="w",
            incarnation="i",
            secret=SECRET,
            clock=MonotonicClock(),
        )
        address = publisher.open()
        channel = Channel.BLOCK_EVENTS
        publisher.publish(news)
        with client(zmq.SUB, channel, as_stranger) as stranger, client(zmq.SUB, channel) as friend:
            for one in (stranger, friend):
                one.set(zmq.SUBSCRIBE, b"")
                one.connect(address.published)
            clock = MonotonicClock()
            end_s = clock.now_s() + DEADLINE_S
            while not await asyncio.to_thread(friend.poll, 50):
                assert clock.now_s() < end_s
                publisher.publish(news)
            assert not await asyncio.to_thread(stranger.poll, 100)
        with client(zmq.DEALER, channel, as_stranger) as stranger:
            assert not await asyncio.to_thread(is_answered, stranger, address.asked, ask, 0.3)
        with client(zmq.DEALER, channel) as friend:
            assert await asyncio.to_thread(is_answered, friend, address.asked, ask, DEADLINE_S)
        publisher.close()

    asyncio.run(run())


def test_each_channel_has_keys_of_its_own():
    pairs = [keys(SECRET, channel) for keys in (client_keys, server_keys) for channel in Channel]
    assert len({pair.public for pair in pairs}) == len({pair.secret for pair in pairs}) == 4


# ---------------------------------------------------------------- memory costs


def _serve(addresses: Any) -> None:
    async def run() -> None:
        who = {"worker_id": "w", "incarnation": "i"}
        clock = MonotonicClock()
        publisher = BlockPublisher(EventLog(block_size=16), secret=SECRET, clock=clock, **who)
        events = publisher.open()
        with worker("w", Transport.ZMQ) as source:
            addresses.put([source.address.address, events.published, events.asked])
            await asyncio.Event().wait()

    asyncio.run(run())


@pytest.fixture(scope="module")
def listeners() -> Iterator[tuple[list[str], int]]:
    """Starts a worker in a new process.

    Yields the addresses of its ZeroMQ listeners, and its pid.
    """
    context = multiprocessing.get_context("spawn")
    addresses = context.Queue()
    process = context.Process(target=_serve, args=(addresses,), daemon=True)
    process.start()
    try:
        assert process.pid is not None
        yield addresses.get(timeout=DEADLINE_S), process.pid
    finally:
        process.kill()
        process.join()


def peak_mib(pid: int) -> float:
    """Returns the peak memory of a process in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


FRAME = b"\x03\xff" + bytes(6) + b"\xff\xff" + bytes(65535)  # one frame of an endless message


def greeting(mechanism: bytes) -> bytes:
    """Returns the first 64 bytes that a ZMTP 3.0 client sends."""
    start = b"\xff" + bytes(8) + b"\x7f\x03\x00"
    return start + mechanism.ljust(20, b"\0") + bytes(32)


def throw(endpoint: str, first: bytes, num_bytes: int) -> None:
    """Sends bytes until the total is reached.

    Reconnects whenever the listener closes a connection.
    """
    host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
    sent = 0
    while sent < num_bytes:
        sent += MIB  # a try counts as sent even if the connection accepts no bytes
        with (
            suppress(OSError),
            socket.create_connection((host, int(port)), timeout=DEADLINE_S) as one,
        ):
            one.sendall(first)
            for _ in range(num_bytes // len(FRAME)):
                one.sendall(FRAME)
                sent += len(FRAME)


READY = b"\x04\x29\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"


@pytest.mark.parametrize(
    "first",
    [greeting(b"NULL") + READY, greeting(b"CURVE"), b"", b"\x01\x00"],
    ids=["without keys", "no handshake", "no greeting", "ZMTP 1"],
)
def test_endless_messages_before_the_handshake_cost_no_memory(listeners, first):
    """Sends 100 MB to each listener.

    Without CURVE keys, ZeroMQ would allocate and keep 200 MB each.
    """
    addresses, pid = listeners
    before_mib = peak_mib(pid)
    for address in addresses:
        throw(address, first, 100 * MIB)
    assert peak_mib(pid) - before_mib < 16
    _all_are_served(addresses)


def _all_are_served(addresses: list[str]) -> None:
    kv, _, asked = addresses
    with client(zmq.DEALER, Channel.KV) as friend:
        assert is_answered(friend, kv, [encode(Hold("l", 0, 0))], DEADLINE_S)
    with client(zmq.DEALER, Channel.BLOCK_EVENTS) as friend:
        assert is_answered(friend, asked, [b"", encode_number(0)], DEADLINE_S)


def test_silent_connections_are_closed(listeners):
    addresses, _ = listeners
    with ExitStack() as stack:
        connections = []
        for address in addresses:
            host, port = address.removeprefix("tcp://").rsplit(":", 1)
            one = socket.create_connection((host, int(port)), timeout=HANDSHAKE_S + 5)
            connections.append(stack.enter_context(one))
        for one in connections:  # all connections have waited in parallel
            with suppress(ConnectionError):
                while one.recv(4096):
                    pass
