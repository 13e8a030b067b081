"""The sockets that processes listen on, as reported by the kernel."""

import contextlib
import ipaddress
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.kits.services.served import Served, command_line

LISTENS = "0A"  # the LISTEN state of a TCP socket in /proc/net
TABLES = ("tcp", "tcp6", "udp", "udp6")


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket that accepts connections or receives packets."""

    protocol: str
    address: ipaddress.IPv4Address | ipaddress.IPv6Address
    port: int
    pid: int

    @property
    def is_loopback(self) -> bool:
        mapped = getattr(self.address, "ipv4_mapped", None)
        return (mapped or self.address).is_loopback

    def __str__(self) -> str:
        line = command_line(self.pid)[:80]
        return f"{self.protocol} [{self.address}]:{self.port} of process {self.pid}: {line}"


def listeners(pids: Iterable[int]) -> list[Listener]:
    """Returns the listening TCP sockets and the UDP sockets of these processes."""
    owners = {inode: pid for pid in pids for inode in _inodes(pid)}
    found = []
    for table in TABLES:
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if inode in owners and (state == LISTENS or table.startswith("udp")):
                address, _, port = local.partition(":")
                found.append(Listener(table, _address(address), int(port, 16), owners[inode]))
    return found


def beyond_loopback(served: Served, pids: Iterable[int]) -> list[str]:
    """Returns listeners beyond loopback.

    Asserts that the gateway's are found, to check the search.
    """
    found = listeners(pids)
    assert int(served.url.rpartition(":")[2]) in {each.port for each in found}
    return [str(each) for each in found if not each.is_loopback]


def tree(pid: int) -> set[int]:
    """Returns a process and all its descendants."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has exited
            state_and_parent = stat.read_text().rpartition(")")[2].split()
            parents[int(stat.parent.name)] = int(state_and_parent[1])
    found, wave = set[int](), {pid}
    while wave:
        found |= wave
        wave = {child for child, parent in parents.items() if parent in wave} - found
    return found


def _inodes(pid: int) -> set[str]:
    """Returns the inodes of a process's sockets, or none if the process has exited."""
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # the socket was closed
                target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                if target.startswith("socket:["):
                    found.add(target[len("socket:[") : -1])
    return found


def _address(words: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Decodes an address: the kernel writes words of four bytes in the machine's byte order."""
    packed = b"".join(struct.pack("=I", int(words[i : i + 8], 16)) for i in range(0, len(words), 8))
    return ipaddress.ip_address(packed)
