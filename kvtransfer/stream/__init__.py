"""Sealed streams between endpoints, over which sources send blocks beside ZeroMQ.

CURVE encrypts less than 1 GiB/s in one thread, and a frame of ZeroMQ's passes two more threads and
two more copies. So blocks, and the reads that ask for them, go over a TCP connection of their own:

    sink                      CURVE                      source
    AskSealed(name, word, key)  ──────────────────────>  keeps the key
                                <──────────────────────  MaySeal
    connects, name | word       ──────── TCP ─────────>  knows the sink
    Read                        ──────── sealed ──────>
                                <─────── sealed ───────  Data, its records; the next Data, …

All three are random, and travel over CURVE only: so a recorded connection cannot be decrypted later
with the deployment's secret. A key serves one connection. Who reads the name and the word on the
network can connect in the sink's place, and gets bytes that it cannot open.

Neither end waits for the connection: records are sent and received as far as it takes them, and the
lease is looked at before each such step. So each record that arrives was sent while its lease was
open.

Until the connection is there, blocks come over CURVE. So they do if it breaks, or if C++ or
libsodium is missing at an end; that is counted.
"""

import socket

from kvtransfer.lease.terms import Timing

BUDGET_BYTES = 8 * 2**20  # of one call; then other connections and deadlines have their turn
GREETING_BYTES = 32  # a name and a word


def prepare(connection: socket.socket, timing: Timing) -> None:
    """Sets up a connection: it never blocks, and ends if its peer is gone."""
    connection.settimeout(0)
    silence_ms = max(1, int(1000 * timing.silence_s))
    for level, option, number in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silence_ms),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(timing.silence_s))),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(timing.hold_every_s))),
    ):
        connection.setsockopt(level, option, number)
