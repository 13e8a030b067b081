"""A deployment's listening socket stays open when the gateways that accept from it exit."""

import os
import socket
from pathlib import Path

import pytest

from deploy.services.shared_port import (
    GRPC,
    HTTP,
    PortHolder,
    listen_on,
    take_or_listen,
    take_socket,
)
from engine.errors import ConfigError


@pytest.fixture
def holder(tmp_path: Path):
    holder = PortHolder(tmp_path, HTTP)
    holder.hold(listen_on("127.0.0.1", 0))
    yield holder
    holder.close()


def test_a_connection_waits_for_the_successor_of_a_gateway(holder: PortHolder):
    first = take_socket(holder.path)
    address = first.getsockname()
    first.close()
    with socket.create_connection(address, 1.0) as client, take_socket(holder.path) as second:
        accepted, _ = second.accept()
        with accepted:
            accepted.sendall(b"hello")
        assert client.recv(5) == b"hello"


def test_a_gateway_that_does_not_accept_takes_no_connection(holder: PortHolder):
    path = holder.path
    with take_socket(path) as _stopped, take_socket(path) as running:
        for _ in range(8):
            with socket.create_connection(running.getsockname(), 1.0):
                running.accept()[0].close()


def test_the_port_is_free_after_all_have_closed_it(holder: PortHolder):
    gateway = take_socket(holder.path)
    address = gateway.getsockname()
    holder.close()
    socket.create_connection(address, 1.0).close()  # the gateway is still draining
    gateway.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, 1.0)


def test_a_taken_port_and_a_missing_holder_are_reported(holder: PortHolder, tmp_path: Path):
    with take_socket(holder.path) as gateway:
        port = gateway.getsockname()[1]
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
        listen_on("127.0.0.1", port)
    with pytest.raises(ConfigError, match="did not come"):
        take_socket(tmp_path / "nobody")


def test_processes_have_the_socket_from_each_other_also_under_a_long_path(tmp_path: Path):
    folder = tmp_path / ("long" * 40)  # longer than a Unix socket's address may be
    folder.mkdir()
    address = ("127.0.0.1", 0)
    first, from_first = take_or_listen(folder, HTTP, "first", address)
    second, from_second = take_or_listen(folder, HTTP, "second", address)
    assert second.getsockname() == first.getsockname()
    first.close()
    from_first.close()
    third, from_third = take_or_listen(folder, HTTP, "third", address)
    other, from_other = take_or_listen(folder, GRPC, "third", address)
    assert third.getsockname() == second.getsockname() != other.getsockname()
    for each in (second, from_second, third, from_third, other, from_other):
        each.close()
    assert list(folder.iterdir()) == []


def test_no_process_makes_the_socket_of_others_block(tmp_path: Path):
    """All copies of the socket share the flag O_NONBLOCK. A process that loses the race for a
    connection must not block.
    """
    first, from_first = take_or_listen(tmp_path, HTTP, "first", ("127.0.0.1", 0))
    second, from_second = take_or_listen(tmp_path, HTTP, "second", ("127.0.0.1", 0))
    for each in (first, second):
        assert not os.get_blocking(each.fileno())
    for each in (second, from_second, first, from_first):
        each.close()
