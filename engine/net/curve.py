"""CURVE on ZeroMQ sockets, with keys derived from the deployment's secret.

Frames are encrypted and authenticated in both directions. A client first proves that it knows the
server's public key. This key is derived from the secret too, and is not published. Then the
`Doorkeeper` checks the client's own key. An unauthenticated connection is closed after HANDSHAKE_S,
or at its first wrong byte.

Each *channel* (KV, block events) has keys of its own. So the keys of one channel can be given to
others without the keys of the other channel.

Sources: CurveZMQ (rfc.zeromq.org/spec/26), ZAP (rfc.zeromq.org/spec/27).
"""

import logging
import threading
from collections import Counter
from enum import StrEnum
from hmac import compare_digest
from typing import NamedTuple

import zmq
from zmq.utils import z85

from engine.clock import Clock
from engine.net.seldom import Seldom
from engine.net.trust import Secret

log = logging.getLogger(__name__)

HANDSHAKE_S = 5
MIN_MESSAGE_BYTES = 1024  # the longest command of a handshake needs half of it
OVERHEAD_BYTES = 64  # an encrypted frame adds 33 bytes
LOG_EVERY_S = 10.0
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_ZAP_FRAMES = 7  # version, request, domain, address, identity, mechanism, key
_DOMAIN = b"baton"


class Channel(StrEnum):
    """The purpose of a socket. The keys of each channel are different."""

    KV = "KV"
    BLOCK_EVENTS = "block events"


class KeyPair(NamedTuple):
    """The keys of one side, in ZeroMQ's text form (Z85)."""

    public: bytes
    secret: bytes


def server_keys(secret: Secret, channel: Channel) -> KeyPair:
    """Returns the key pair that all servers of a channel use."""
    return _pair(secret.key(f"CURVE key of servers of {channel}"))


def client_keys(secret: Secret, channel: Channel) -> KeyPair:
    """Returns the key pair that all clients of a channel use."""
    return _pair(secret.key(f"CURVE key of clients of {channel}"))


def secure_server(
    socket: "zmq.Socket[bytes]", secret: Secret, channel: Channel, *, max_message_bytes: int
) -> None:
    """Secures a server's socket before it is bound. The socket's context needs a `Doorkeeper`."""
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, server_keys(secret, channel).secret)
    socket.set(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a `Doorkeeper` no client can connect
    _limit(socket, max_message_bytes)


def secure_client(
    socket: "zmq.Socket[bytes]", secret: Secret, channel: Channel, *, max_message_bytes: int
) -> None:
    """Secures a client's socket before it is connected."""
    keys = client_keys(secret, channel)
    socket.set(zmq.CURVE_SERVERKEY, server_keys(secret, channel).public)
    socket.set(zmq.CURVE_PUBLICKEY, keys.public)
    socket.set(zmq.CURVE_SECRETKEY, keys.secret)
    _limit(socket, max_message_bytes)


def keep_alive(socket: "zmq.Socket[bytes]", silence_s: float) -> None:
    """Makes ZeroMQ close connections to hosts that do not answer, and drop their messages.

    The kernel detects such hosts. ZeroMQ's own heartbeat is not used, because it can abort this
    process: its timer may fire after a peer has left whose messages were not read yet
    (`!_io_error`, libzmq 4.3.5).
    """
    seconds = max(1, round(silence_s))
    socket.set(zmq.TCP_MAXRT, 1000 * seconds)  # milliseconds without an acknowledgement
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, seconds)
    socket.set(zmq.TCP_KEEPALIVE_INTVL, 1)
    socket.set(zmq.TCP_KEEPALIVE_CNT, seconds)


def _limit(socket: "zmq.Socket[bytes]", max_message_bytes: int) -> None:
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_S * 1000)
    socket.set(zmq.MAXMSGSIZE, max(max_message_bytes + OVERHEAD_BYTES, MIN_MESSAGE_BYTES))


def _pair(key: bytes) -> KeyPair:
    secret = z85.encode(key)
    return KeyPair(zmq.curve_public(secret), secret)


class Doorkeeper:
    """Decides which clients may connect to a ZeroMQ context's servers. Runs in a thread of its
    own.
    """

    def __init__(self, secret: Secret, channel: Channel, clock: Clock) -> None:
        self._key = z85.decode(client_keys(secret, channel).public)
        self._clock = clock
        self._refusals = Seldom(LOG_EVERY_S)
        self.counters: Counter[str] = Counter()

    def open(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        """Starts the thread. The thread ends when the context is closed."""
        own: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
        # The thread owns the socket, so that `context.destroy` does not close it.
        socket = own.socket(zmq.REP)
        socket.set(zmq.LINGER, 0)
        socket.bind(_ZAP_ADDRESS)
        threading.Thread(target=self._run, args=(socket,), name="doorkeeper", daemon=True).start()

    def _run(self, socket: "zmq.Socket[bytes]") -> None:
        try:
            while True:
                socket.send_multipart(self._answer(socket.recv_multipart()))
        except zmq.ContextTerminated:
            pass
        finally:
            socket.close()

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        """Answers one request of ZAP 1.0, given as frames."""
        assert len(frames) == _ZAP_FRAMES, "ZeroMQ itself asks, with CURVE as the mechanism"
        _, request, _, address, _, _, key = frames
        if compare_digest(key, self._key):
            return [_ZAP_VERSION, request, b"200", b"OK", b"", b""]
        self.counters["refused_connections:wrong key"] += 1
        if (num := self._refusals.due(self._clock.now_s())) is not None:
            log.warning("refused %d connections, the last from %s", num, address.decode())
        return [_ZAP_VERSION, request, b"400", b"wrong key", b"", b""]
