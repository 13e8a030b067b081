"""Reports the state of this process to its service manager: systemd's `sd_notify`.

systemd sets `$NOTIFY_SOCKET` for services of `Type=notify`. Without that variable nothing is sent.
Protocol: sd_notify(3), one datagram of lines `NAME=value`.
"""

import logging
import socket
from collections.abc import Callable, MutableMapping

log = logging.getLogger(__name__)

VARIABLE = "NOTIFY_SOCKET"
TIMEOUT_S = 1.0


def send_datagram(address: str, message: bytes) -> None:
    """Sends a datagram to a Unix socket; `@` marks an abstract name. Raises OSError."""
    name = "\0" + address[1:] if address.startswith("@") else address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.settimeout(TIMEOUT_S)
        sender.sendto(message, name)


class ServiceManager:
    """The service manager's socket, if there is one."""

    def __init__(
        self,
        environment: MutableMapping[str, str],
        send: Callable[[str, bytes], None] = send_datagram,
    ) -> None:
        """Removes the variable from `environment`, so that child processes do not use it."""
        self._address = environment.pop(VARIABLE, "")
        self._send = send

    def serving(self, url: str) -> None:
        """Reports that the deployment serves, so the unit counts as started."""
        self._tell(f"READY=1\nSTATUS=serving at {url}")

    def stopping(self) -> None:
        """Reports that the deployment finishes its answers and stops."""
        self._tell("STOPPING=1\nSTATUS=letting answers end")

    def _tell(self, lines: str) -> None:
        if not self._address:
            return
        try:
            self._send(self._address, lines.encode())
        except OSError as error:
            log.warning("the service manager cannot be told %r: %s", lines, error)
