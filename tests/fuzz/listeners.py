"""A process with all listeners of a worker, and clients that send unauthenticated bytes."""

import asyncio
import multiprocessing
import random
import select
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from bench.hostile.corpus import with_damage
from deploy.worker.block_publisher import BlockPublisher
from engine.clock import MonotonicClock
from engine.config import Transport
from engine.messages import LeaseId
from engine.net.challenge import CLAIM_BYTES
from engine.net.curve import Channel, secure_client
from engine.net.sessions import GREETING, Line, SessionClient, SessionServer
from engine.worker.block_events import EventLog, encode_number
from engine.worker.blocks import Stored, hash_blocks
from kvtransfer.lease.effects import Timing
from kvtransfer.messages import (
    AttachBody,
    Attached,
    Ended,
    Hold,
    Identity,
    MaySeal,
    Read,
    attach,
    decode_to_sink,
    encode,
)
from kvtransfer.transports.sealed import GREETING_BYTES, SealedLink
from tests.kits.endpoints import LAYOUT, SECRET, worker

LISTENERS = ("sessions", "kv", "sealed kv", "published", "asked")
DEADLINE_S = 20.0
THROW_S = 1.0
MAX_CHANGES = 3
MAX_PIECE_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class Listeners:
    """The addresses (host:port) of the listeners, and their process."""

    addresses: dict[str, str]
    pid: int
    runner: asyncio.Runner  # runs the test's clients

    def memory_mib(self) -> float:
        """Returns the resident memory of the listeners' process, in MiB."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        [line] = [line for line in lines if line.startswith("VmRSS")]
        return int(line.split()[1]) / 1024


async def _echo(line: Line) -> None:
    async for frame in line:
        await line.send(frame)


def _serve(told: Any) -> None:
    async def run() -> None:
        server, clock = SessionServer(_echo, SECRET), MonotonicClock()
        who = {"worker_id": "w", "incarnation": "i"}
        publisher = BlockPublisher(EventLog(block_size=4), secret=SECRET, clock=clock, **who)
        events = publisher.open()
        news = [Stored(hash_blocks(range(4), 4)[0], None)]
        with worker("w", Transport.ZMQ) as source:
            sealed = f"127.0.0.1:{source.endpoint._source_end._sealed.port}"
            endpoints = (source.address.address, sealed, events.published, events.asked)
            addresses = [await server.open(), *(e.removeprefix("tcp://") for e in endpoints)]
            told.put(dict(zip(LISTENERS, addresses, strict=True)))
            never = asyncio.get_running_loop().create_future()
            while True:
                await asyncio.wait([never], timeout=0.02)
                publisher.publish(news)

    asyncio.run(run())


@contextmanager
def listening() -> Iterator[Listeners]:
    """Runs the listeners in a process. Asserts at the end that the process lives, and kills it."""
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    process = context.Process(target=_serve, args=(told,), daemon=True)
    process.start()
    try:
        assert process.pid is not None
        with asyncio.Runner() as runner:
            yield Listeners(told.get(timeout=DEADLINE_S), process.pid, runner)
        assert process.is_alive()
    finally:
        process.kill()
        process.join()


# ---------------------------------------------------------------- clients with the secret


def is_served(listeners: Listeners, name: str) -> bool:
    """Returns True if the listener serves a client with the secret."""
    address = listeners.addresses[name]
    if name == "sessions":
        return listeners.runner.run(_has_session(address))
    if name == "sealed kv":
        return _has_stream(listeners.addresses["kv"], address)
    channel = Channel.KV if name == "kv" else Channel.BLOCK_EVENTS
    with zmq.Context() as context, context.socket(_KINDS[name]) as client:
        client.linger = 0
        secure_client(client, SECRET, channel, max_message_bytes=2**20)
        if name == "published":
            client.set(zmq.SUBSCRIBE, b"")
        client.connect(f"tcp://{address}")
        if name != "published":
            client.send_multipart(_ASKS[name])
        return bool(client.poll(int(1000 * DEADLINE_S)))


_KINDS = {"kv": zmq.DEALER, "published": zmq.SUB, "asked": zmq.DEALER}
_ASKS = {"kv": [encode(Hold("l", 0, 0))], "asked": [b"", encode_number(0)]}


def _has_stream(control: str, address: str) -> bool:
    """Returns True if a sink gets a sealed stream and an answer to its read on the stream."""
    link = SealedLink()
    with (
        zmq.Context() as context,
        context.socket(zmq.DEALER) as client,
        select.epoll() as poller,
        closing(link),
    ):
        client.linger = 0
        client.set(zmq.RCVTIMEO, int(1000 * DEADLINE_S))
        secure_client(client, SECRET, Channel.KV, max_message_bytes=2**20)
        client.connect(f"tcp://{control}")
        client.send(encode(attach(AttachBody("raw", "w-1", Identity("model", LAYOUT)))))
        assert isinstance(decode_to_sink(client.recv()), Attached)
        client.send(encode(link.ask))
        answer = decode_to_sink(client.recv())
        assert isinstance(answer, MaySeal)
        port = int(address.rpartition(":")[2])
        link.connect(f"tcp://{control}", port, poller, Timing(), lanes=answer.lanes)
        assert poller.poll(DEADLINE_S)
        # the source has sent nothing yet
        link.receive(None, may_wait=False)  # type: ignore[arg-type]
        assert link.read(Read(LeaseId("none"), [0]))
        return decode_to_sink(client.recv()) == Ended(LeaseId("none"), "unknown")


async def _has_session(address: str) -> bool:
    client = SessionClient(address, SECRET)
    async with asyncio.timeout(DEADLINE_S):
        await client.open()
        await client.send(b"a")
        answer = await client.receive()
        await client.close()
    return answer == b"a"


# ---------------------------------------------------------------- clients without the secret


def throw(listeners: Listeners, name: str, pieces: list[bytes]) -> None:
    """Sends all messages over one connection until the listener closes it, then disconnects."""
    host, port = listeners.addresses[name].rsplit(":", 1)
    with (
        suppress(OSError),
        socket.create_connection((host, int(port)), timeout=THROW_S) as connection,
    ):
        for piece in pieces:
            connection.sendall(piece)


def spoiled_opening(name: str, rng: random.Random) -> list[bytes]:
    """Returns a valid first message of a connection, with a few bytes changed."""
    pieces = list(rng.choice(_OPENINGS[name]))
    for _ in range(rng.randint(0, MAX_CHANGES)):
        place = rng.randrange(len(pieces))
        match rng.choice(["damage", "lost", "many", "noise"]):
            case "damage":
                pieces[place] = with_damage(pieces[place], rng)
            case "lost" if len(pieces) > 1:
                del pieces[place]
            case "many":
                most = max(1, MAX_PIECE_BYTES // max(1, len(pieces[place])))
                pieces[place] *= min(most, rng.choice((2, 100, 2000)))
            case _:
                pieces.insert(place, rng.randbytes(rng.choice((1, 64, 4096))))
    return pieces


def _greeting(mechanism: bytes, minor: int = 0) -> bytes:
    """Returns a ZMTP 3 greeting, which is 64 bytes long."""
    start = b"\xff" + bytes(8) + b"\x7f\x03" + bytes([minor])
    return start + mechanism.ljust(20, b"\0") + bytes(32)


def _command(name: bytes, body: bytes) -> bytes:
    content = bytes([len(name)]) + name + body
    if len(content) < 256:
        return b"\x04" + bytes([len(content)]) + content
    return b"\x06" + len(content).to_bytes(8, "big") + content


_READY = _command(b"READY", b"\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00")
_HELLO = _command(b"HELLO", b"\x01\x00" + bytes(72) + b"k" * 32 + bytes(8) + b"b" * 80)
_INITIATE = _command(b"INITIATE", b"c" * 96 + bytes(8) + b"b" * 200)
_MESSAGE = b"\x00\x05hello"
_LONG = b"\x02" + (2**40).to_bytes(8, "big") + bytes(4096)
_ZMTP = [
    [_greeting(b"CURVE"), _HELLO, _INITIATE, _MESSAGE],
    [_greeting(b"CURVE", 1), _HELLO, _command(b"MESSAGE", bytes(40))],
    [_greeting(b"NULL"), _READY, _MESSAGE, b"\x01\x05parts"],
    [_greeting(b"PLAIN"), _command(b"HELLO", b"\x01a\x01b"), _MESSAGE],
    [_greeting(b"NULL"), _LONG],
    [b"\xff" + bytes(8) + b"\x7f\x01\x05", b"\x00\x00", _MESSAGE],  # the greeting of ZMTP 2
    [b"\x01\x00", b"\x06\x00hello"],  # the greeting of ZMTP 1
]


_CLAIM = bytes(CLAIM_BYTES)
_FRAME = b"\x05\x00\x00\x00hello"
_SESSION = [
    [_CLAIM, _FRAME],
    [_CLAIM[:50], _CLAIM[50:], _FRAME * 1000],
    [_FRAME, _CLAIM],
    [GREETING, _CLAIM, b"\xff\xff\xff\xff"],
    # announces a frame of 48 MiB, and sends only its first bytes
    [_CLAIM, b"\x00\x00\x00\x03" + bytes(16379)],
    [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", bytes(3) + b"\x04" + bytes(5)],
    [b"GET / HTTP/1.1\r\n", b"Host: x\r\n" * 100, b"\r\n"],
]
_STREAM = [
    [bytes(GREETING_BYTES), bytes(100)],
    [bytes(10), bytes(GREETING_BYTES - 10), b"\x01\x00\x00\x00\xff\xff\xff\xff"],
    [bytes(GREETING_BYTES - 1)],
]
_OPENINGS = dict.fromkeys(LISTENERS, _ZMTP) | {"sessions": _SESSION, "sealed kv": _STREAM}
