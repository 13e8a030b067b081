"""Messages to systemd reach its socket, by a path or by an abstract name."""

import socket

import pytest

from deploy.commands.serve import send_datagram


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_datagram_reaches_the_socket(kind, tmp_path):
    name = f"{tmp_path}/notify" if kind == "path" else f"@baton-{id(tmp_path)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(name.replace("@", "\0"))
        receiver.settimeout(5.0)
        send_datagram(name, b"READY=1")
        assert receiver.recv(100) == b"READY=1"
