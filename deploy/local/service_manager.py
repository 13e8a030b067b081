"""Tells the service manager that started this process how it fares: systemd's `sd_notify`.

systemd gives the socket in `$NOTIFY_SOCKET` to services of `Type=notify`. Without that variable
nothing is sent. Protocol: sd_notify(3), one datagram of lines `NAME=value`.
"""

import logging
import socket
from collections.abc import Callable, MutableMapping

log = logging.getLogger(__name__)

VARIABLE = "NOTIFY_SOCKET"
TIMEOUT_S = 1.0


def send_datagram(address: str, message: bytes) -> None:
    """Sends one datagram to a Unix socket; `@` begins an abstract name. Raises OSError."""
    name = "\0" + address[1:] if address.startswith("@") else address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.settimeout(TIMEOUT_S)
        sender.sendto(message, name)


class ServiceManager:
    """The other end of the socket, if there is one."""

    def __init__(
        self,
        environment: MutableMapping[str, str],
        send: Callable[[str, bytes], None] = send_datagram,
    ) -> None:
        """Takes the variable out of `environment`: child processes do not speak for this one."""
        self._address = environment.pop(VARIABLE, "")
        self._send = send

    def serving(self, url: str) -> None:
        """The deployment serves: the unit is started."""
        self._tell(f"READY=1\nSTATUS=serving at {url}")

    def stopping(self) -> None:
        """The deployment lets answers end, then stops."""
        self._tell("STOPPING=1\nSTATUS=letting answers end")

    def _tell(self, lines: str) -> None:
        if not self._address:
            return
        try:
            self._send(self._address, lines.encode())
        except OSError as error:
            log.warning("the service manager cannot be told %r: %s", lines, error)
