"""A network namespace is cut off: its packets vanish silently until the network is reconnected."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from bench.chaos.netns import (
    CommandFailed,
    NetworkPlace,
    Unavailable,
    cut_off,
    hub,
    inside,
    place,
    run,
)

SILENT_S = 0.5
HEARD_WITHIN_S = 10.0  # seconds; TCP waits longer before each retransmission
FORWARDS = Path("/proc/sys/net/ipv4/ip_forward")


@contextmanager
def network() -> Iterator[tuple[NetworkPlace, NetworkPlace]]:
    """Makes two namespaces of a hub; the calling thread runs in the hub."""
    try:
        with hub():
            places = place("one", 1), place("other", 2)
            try:
                yield places
            finally:
                for each in places:
                    os.close(each.fd)
    except Unavailable as error:
        pytest.skip(str(error))


def echo(server: socket.socket) -> None:
    """Serves one connection until the client closes it: echoes all received data."""
    with suppress(OSError):
        connection, _ = server.accept()
        with connection:
            while said := connection.recv(100):
                connection.sendall(said)


def listening(there: NetworkPlace) -> socket.socket:
    with inside(there.fd):
        return socket.create_server(("", 0))


def connected(here: NetworkPlace, there: NetworkPlace, port: int) -> socket.socket:
    with inside(here.fd):
        return socket.create_connection((there.address, port), HEARD_WITHIN_S)


@contextmanager
def process_in(there: NetworkPlace) -> Iterator[int]:
    """Returns the pid of a running process whose main thread is in the namespace."""
    reading, writing = os.pipe()
    with inside(there.fd):
        pid = os.posix_spawn(
            "/bin/cat", ["cat"], {}, file_actions=[(os.POSIX_SPAWN_DUP2, reading, 0)]
        )
    os.close(reading)
    try:
        yield pid
    finally:
        os.close(writing)
        os.waitpid(pid, 0)


def test_a_stream_between_places_stalls_while_one_is_cut_off_and_loses_nothing():
    forwards = FORWARDS.read_text()
    with network() as (one, other), listening(other) as server, process_in(other) as pid:
        port = server.getsockname()[1]
        thread = threading.Thread(target=echo, args=(server,))
        thread.start()
        with connected(one, other, port) as client:
            client.sendall(b"a")
            assert client.recv(1) == b"a"
            with cut_off("other", pid):
                client.sendall(b"b")
                client.settimeout(SILENT_S)
                with pytest.raises(TimeoutError):
                    client.recv(1)
                for stranger in (one, other):  # new connections are not refused either
                    target = other if stranger is one else one
                    with inside(stranger.fd), pytest.raises(TimeoutError):
                        socket.create_connection((target.address, port), SILENT_S)
                assert "DOWN" not in run("ip", "-br", "link", "show", "dev", "other")
            client.settimeout(HEARD_WITHIN_S)
            client.sendall(b"c")
            heard = client.recv(1)  # a socket with a timeout returns fewer bytes than requested
            assert heard + client.recv(1) == b"bc"
        thread.join(HEARD_WITHIN_S)
        assert not thread.is_alive()
    links = {line.split("@")[0].split()[0] for line in run("ip", "-br", "link").splitlines()}
    assert not links & {"one", "other"}
    assert FORWARDS.read_text() == forwards


def test_an_unknown_place_cannot_be_cut_off():
    with (
        network() as (one, _),
        process_in(one) as pid,
        pytest.raises(CommandFailed, match="nobody"),
        cut_off("nobody", pid),
    ):
        pass
