"""A network of Linux namespaces, each of which can be cut off. One namespace forwards packets.

    place ── gate ═ NAME ── hub ── NAME ═ gate ── place

Each place has one connection, a veth pair to the hub. No namespace has a name in the file system. A
namespace with its devices exists as long as a process is in it or holds its descriptor. So no
namespace remains after these processes, even if they are killed. The machine's own network does not
change: forwarding is a setting of the hub.

A cut is silent, like a broken cable in the middle of a network. Packets vanish both ways, no
interface goes down, and no connection is refused. Each end of a pair has a permanent neighbour
entry with the hardware address of the other end. A cut replaces that address by an unused one, so
the other end drops the packets. The kernel does not verify permanent entries, so senders get no
error.

Addresses are from 198.18.0.0/15, which RFC 2544 reserves for network tests.

`own_places` puts each worker of a deployment into its own place. `baton serve --launcher process
--places bench.chaos.netns:own_places` loads it (see `deploy/local/launcher.py`). The command runs
in a hub. The controller and the gateways, which share a port, stay in the hub. Each worker gets a
place with the worker's name. A restarted worker gets the same place.

The command ends when the bench ends, so no process or namespace remains after a killed bench. The
environment variable `STARTED_BY` has the bench's process id. One exception: if the bench has just
stopped the command (`stop-controller`), processes and namespaces stay until the command is
continued.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path

from bench.processes.deployment import STARTED_BY
from engine.errors import BatonError

HUB = IPv4Address("198.18.0.1")
MAX_PLACES = 253
GATE = "gate"  # name of the device at a place's end of the pair
HUB_END, PLACE_END = "169.254.0.1", "169.254.0.2"  # addresses of the two ends of every pair
HUB_MAC, PLACE_MAC, UNUSED_MAC = (f"02:00:00:00:00:0{i}" for i in (1, 2, 3))
CLONE_NEWNET = 0x40000000
COMMAND_TIMEOUT_S = 20.0


class Unavailable(BatonError):
    """This machine or this user cannot create such a network. The message says why."""

    def __init__(self, why: str) -> None:
        super().__init__(f"a partition: {why}")


class CommandFailed(BatonError):
    """A command failed that should succeed."""


@dataclass(frozen=True, slots=True)
class NetworkPlace:
    """A namespace, as an open descriptor, and its address in the network."""

    fd: int
    address: str

    @property
    def path(self) -> str:
        """Returns a path to the namespace, for tools such as nsenter."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def entered(self) -> AbstractContextManager[None]:
        """Moves the calling thread into this namespace during the context. Processes that the
        thread starts are there too.
        """
        return inside(self.fd)


@contextmanager
def hub() -> Iterator[None]:
    """Moves the calling thread into a new hub during the context. Processes that the thread starts
    are there too.

    Raises Unavailable.
    """
    if os.geteuid() != 0:
        raise Unavailable("network namespaces need root")
    if shutil.which("ip") is None:
        raise Unavailable("ip (iproute2) is not installed")
    before = _here()
    try:
        try:
            _unshare()
        except OSError as error:
            raise Unavailable(f"no network namespace can be made: {error}") from error
        try:
            try:
                Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
                ip("link set dev lo up", f"address add {HUB}/32 dev lo")
            except (OSError, CommandFailed) as error:
                raise Unavailable(f"a network namespace cannot be set up: {error}") from error
            yield
        finally:
            _enter(before)
    finally:
        os.close(before)


def place(name: str, number: int) -> NetworkPlace:
    """Makes a new place at the caller's hub. The hub's network device for the place has the place's
    name.

    Numbers begin at 1; a hub uses each number once. The caller must close the descriptor.
    """
    if not 1 <= number <= MAX_PLACES:
        raise ValueError(f"{number} is not a place's number: there are {MAX_PLACES}")
    before = _here()
    try:
        _unshare()
        try:
            made = NetworkPlace(_here(), str(HUB + number))
        finally:
            _enter(before)
    finally:
        os.close(before)
    try:
        ip(
            f"link add name {name} address {HUB_MAC} type veth"
            f" peer name {GATE} address {PLACE_MAC} netns {made.path}",
            f"link set dev {name} up",
            _aim(name, PLACE_END, PLACE_MAC),
            f"route add {made.address}/32 via {PLACE_END} dev {name} onlink src {HUB}",
        )
        with inside(made.fd):
            ip(
                "link set dev lo up",
                f"link set dev {GATE} up",
                f"address add {made.address}/32 dev {GATE}",
                _aim(GATE, HUB_END, HUB_MAC),
                f"route add default via {HUB_END} dev {GATE} onlink src {made.address}",
            )
    except BaseException:
        os.close(made.fd)
        raise
    return made


@contextmanager
def cut_off(name: str, pid: int) -> Iterator[None]:
    """Cuts off the place of this name during the context. A process must be in the place.

    The caller must be in the hub. Raises OSError if the process has ended, CommandFailed if there
    is no such place.
    """
    there = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            _connect(name, there, hub_mac=UNUSED_MAC, place_mac=UNUSED_MAC)
            yield
        finally:
            _connect(name, there, hub_mac=HUB_MAC, place_mac=PLACE_MAC)
    finally:
        os.close(there)


@contextmanager
def inside(fd: int) -> Iterator[None]:
    """Moves the calling thread into a process's namespace during the context. Processes that the
    thread starts are there too.
    """
    before = _here()
    try:
        _enter(fd)
        try:
            yield
        finally:
            _enter(before)
    finally:
        os.close(before)


def ip(*commands: str) -> None:
    """Runs commands of ip(8) in the calling thread's namespace. Raises CommandFailed."""
    run("ip", "-batch", "-", given="\n".join(commands))


def run(*command: str, given: str = "") -> str:
    """Runs a command and returns its standard output. Raises CommandFailed with its standard
    error.
    """
    try:
        done = subprocess.run(
            command,
            input=given,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CommandFailed(str(error)) from error
    if done.returncode != 0:
        raise CommandFailed(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _connect(name: str, there: int, *, hub_mac: str, place_mac: str) -> None:
    """Sets the neighbour's hardware address at both ends of a pair. Tries the second end even if
    the first one fails.
    """
    try:
        ip(_aim(name, PLACE_END, place_mac))
    finally:
        with inside(there):
            ip(_aim(GATE, HUB_END, hub_mac))


def _aim(device: str, address: str, mac: str) -> str:
    return f"neigh replace {address} lladdr {mac} dev {device} nud permanent"


def _here() -> int:
    """Returns an open descriptor of the calling thread's namespace."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _unshare() -> None:
    """Moves the calling thread to a new network namespace."""
    _check(_libc.unshare(CLONE_NEWNET))


def _enter(fd: int) -> None:
    _check(_libc.setns(fd, CLONE_NEWNET))


def _check(status: int) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


_libc = ctypes.CDLL(None, use_errno=True)


PR_SET_PDEATHSIG = 1


class OwnPlaces:
    """Network places of workers. A place is made when it is first asked for. Thread-safe."""

    def __init__(self) -> None:
        self._places: dict[str, NetworkPlace] = {}
        self._lock = threading.Lock()

    def __call__(self, kind: str, name: str) -> NetworkPlace | None:
        """Returns the place of a worker, or None for a gateway. Raises CommandFailed."""
        if kind != "worker":
            return None
        with self._lock:
            if name not in self._places:
                self._places[name] = place(name, len(self._places) + 1)
            return self._places[name]


def own_places() -> OwnPlaces:
    """Makes this process end with the bench, and returns the workers' network places."""
    _end_with(int(os.environ[STARTED_BY]))
    return OwnPlaces()


def _end_with(parent: int) -> None:
    """Asks the kernel to send SIGTERM to this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent has ended before the call
        sys.exit(1)
