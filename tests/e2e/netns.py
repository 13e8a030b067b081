"""Two network namespaces with a bad link between them, which a test can cut.

    here ── veth ── near ══ link ══ far ── veth ── here

Processes in the two namespaces reach each other over the link only; whoever runs the test reaches
both, whatever becomes of the link. A cut is silent: packets vanish, no interface goes down and
nobody is refused. There are two kinds of link:

    NetemLink     a veth pair under `tc netem`; the kernel must have that
    RelayedLink   a TUN device at each end and a thread here that carries the packets, late or not
                  at all; its losses come from a seed

Either is as slow, late and lossy as `RATE_BYTES_PER_S`, `DELAY_S` and `LOSS` say, each way. It is
slow so that what the test wants to cut takes time.

Addresses are out of 198.18.0.0/15, which is set aside for tests of networks (RFC 2544).
"""

import ctypes
import fcntl
import heapq
import json
import os
import random
import secrets
import selectors
import shutil
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Address
from itertools import count
from pathlib import Path
from typing import Protocol

from engine.clock import MonotonicClock

DEVICE = "kv0"  # either end of the link
RATE_BYTES_PER_S = 1_000_000
DELAY_S = 0.02
LOSS = 0.01
FIRST_ADDRESS = IPv4Address("198.18.0.0")
NUM_NETWORKS = 2**14  # of eight addresses: two for each of two veth pairs, and what /30 wastes
TUN = Path("/dev/net/tun")
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MAX_PACKET_BYTES = 65535
MAX_WAIT_S = 0.05
MAX_QUEUED_PACKETS = 1000  # netem's default, too


class Unavailable(Exception):
    """This machine or this user cannot have such a network; the text says why."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """One of the two, and the address at which all others reach it."""

    name: str
    address: str


class Link(Protocol):
    """What connects the two namespaces. `close` comes before theirs."""

    def open(self, near: Namespace, far: Namespace) -> None:
        """Makes `DEVICE` in both, up and without an address. Raises Unavailable."""
        ...

    def cut(self) -> None:
        """From now on nothing comes through."""
        ...

    def heal(self) -> None:
        """Ends a cut."""
        ...

    def carried_bytes(self) -> int:
        """Bytes of packets that came through to the far end so far."""
        ...

    def close(self) -> None:
        """Ends what `open` began; its devices may go with their namespaces."""
        ...


@contextmanager
def network(link: Link) -> Iterator[tuple[Namespace, Namespace]]:
    """Namespaces near and far with `link` between, gone on leaving. Raises Unavailable."""
    if os.geteuid() != 0:
        raise Unavailable("network namespaces need root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise Unavailable(f"{tool} (iproute2) is not installed")
    suffix = secrets.token_hex(3)
    addresses = FIRST_ADDRESS + 8 * secrets.randbelow(NUM_NETWORKS)
    with ExitStack() as stack:
        near, far = (
            stack.enter_context(_namespace(f"baton-{suffix}-{end}", f"bt{suffix}{end}", first))
            for end, first in (("near", addresses), ("far", addresses + 4))
        )
        stack.callback(link.close)
        link.open(near, far)
        for one, other in ((near, far), (far, near)):
            to_other = ("route", "add", f"{other.address}/32", "dev", DEVICE, "src", one.address)
            _run("ip", "-n", one.name, *to_other)
        yield near, far


@contextmanager
def inside(namespace: Namespace) -> Iterator[None]:
    """Meanwhile the calling thread, and every process that it starts, is in the namespace."""
    with (
        Path("/proc/thread-self/ns/net").open() as before,
        Path("/run/netns", namespace.name).open() as there,
    ):
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(before.fileno())


class NetemLink:
    """A veth pair; each end delays and loses what it sends."""

    def open(self, near: Namespace, far: Namespace) -> None:
        """Raises Unavailable where the kernel knows no netem."""
        self._ends = near, far
        pair = (DEVICE, "netns", near.name, "type", "veth", "peer", DEVICE, "netns", far.name)
        _run("ip", "link", "add", *pair)
        for end in self._ends:
            _run("ip", "-n", end.name, "link", "set", DEVICE, "up")
        try:
            self._shape("add", LOSS)
        except CommandFailed as error:
            if "unknown" in str(error):
                raise Unavailable(f"the kernel has no netem: {error}") from error
            raise

    def cut(self) -> None:
        """Loses everything."""
        self._shape("change", 1.0)

    def heal(self) -> None:
        """Loses as little as before."""
        self._shape("change", LOSS)

    def carried_bytes(self) -> int:
        """As the far end counts."""
        answer = _run("ip", "-n", self._ends[1].name, "-s", "-j", "link", "show", "dev", DEVICE)
        return int(json.loads(answer)[0]["stats64"]["rx"]["bytes"])

    def close(self) -> None:
        """The pair goes with the namespaces."""

    def _shape(self, verb: str, loss: float) -> None:
        how = f"netem delay {DELAY_S * 1000:g}ms loss {loss:.0%} rate {8 * RATE_BYTES_PER_S}bit"
        for end in self._ends:
            _run("tc", "-n", end.name, "qdisc", verb, "dev", DEVICE, "root", *how.split())


class RelayedLink:
    """Two TUN devices; a thread carries packets between them."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._clock = MonotonicClock()
        self._opposite: dict[int, int] = {}  # file descriptors of the two ends
        self._free_s: dict[int, float] = {}  # when the line from an end has sent what it has
        self._late: list[tuple[float, int, int, bytes]] = []  # a heap: due, nth, end, packet
        self._numbers = count()
        self._carried_bytes = 0
        self._is_cut = False
        self._stopping = False
        self._thread: threading.Thread | None = None

    def open(self, near: Namespace, far: Namespace) -> None:
        """Raises Unavailable where there are no TUN devices."""
        if not TUN.exists():
            raise Unavailable(f"no {TUN}")
        ends = []
        for namespace in (near, far):
            ends.append(_open_tun(namespace))
            self._free_s[ends[-1]] = 0.0
            _run("ip", "-n", namespace.name, "link", "set", DEVICE, "up")
        self._far_end = ends[1]
        self._opposite = dict(zip(ends, reversed(ends), strict=True))
        self._thread = threading.Thread(target=self._carry, name="link", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Also what is on its way does not arrive."""
        self._is_cut = True

    def heal(self) -> None:
        """Ends a cut."""
        self._is_cut = False

    def carried_bytes(self) -> int:
        """Bytes written to the far device."""
        return self._carried_bytes

    def close(self) -> None:
        """Ends the thread; the devices vanish with their descriptors."""
        self._stopping = True
        if self._thread is not None:
            self._thread.join(5)
            assert not self._thread.is_alive(), "the relay did not stop"
        for end in self._free_s:
            os.close(end)
        self._free_s = {}

    def _carry(self) -> None:
        with selectors.DefaultSelector() as selector:
            for end in self._opposite:
                selector.register(end, selectors.EVENT_READ)
            while not self._stopping:
                due_s = self._late[0][0] - self._clock.now_s() if self._late else MAX_WAIT_S
                for key, _ in selector.select(min(max(due_s, 0.0), MAX_WAIT_S)):
                    self._take(key.fd)
                self._deliver()

    def _take(self, end: int) -> None:
        """Takes all packets that one end has sent."""
        while True:
            try:
                packet = os.read(end, MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            if self._rng.random() >= LOSS and len(self._late) < MAX_QUEUED_PACKETS:
                sent_s = max(self._clock.now_s(), self._free_s[end])
                sent_s += len(packet) / RATE_BYTES_PER_S
                self._free_s[end] = sent_s
                number = next(self._numbers)
                late = (sent_s + DELAY_S, number, self._opposite[end], packet)
                heapq.heappush(self._late, late)

    def _deliver(self) -> None:
        """Hands over what has been under way for long enough."""
        now_s = self._clock.now_s()
        while self._late and self._late[0][0] <= now_s:
            _, _, end, packet = heapq.heappop(self._late)
            if self._is_cut:
                continue
            os.write(end, packet)
            if end == self._far_end:
                self._carried_bytes += len(packet)


class CommandFailed(Exception):
    """A command that ought to work did not."""


@contextmanager
def _namespace(name: str, device: str, network_address: IPv4Address) -> Iterator[Namespace]:
    """A namespace at the far side of a veth pair; `device` is the pair's end here."""
    here, there = network_address + 1, network_address + 2
    try:
        _run("ip", "netns", "add", name)
    except CommandFailed as error:
        raise Unavailable(f"no network namespace can be made: {error}") from error
    with ExitStack() as stack:
        stack.callback(_run, "ip", "netns", "delete", name)
        _run("ip", "link", "add", device, "type", "veth", "peer", "gate", "netns", name)
        # By itself it would go with the namespace, which a connection may outlive for minutes.
        stack.callback(_run, "ip", "link", "delete", device)
        _run("ip", "address", "add", f"{here}/30", "dev", device)
        _run("ip", "link", "set", device, "up")
        _run("ip", "-n", name, "address", "add", f"{there}/30", "dev", "gate")
        for inner in ("gate", "lo"):
            _run("ip", "-n", name, "link", "set", inner, "up")
        yield Namespace(name, str(there))


def _open_tun(namespace: Namespace) -> int:
    """Makes `DEVICE` there; what it sends can be read from the descriptor, and the reverse."""
    with inside(namespace):
        tun = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    return tun


def _enter(namespace_fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace_fd, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _run(*command: str) -> str:
    """The standard output of a command. Raises CommandFailed with what it complained about."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        raise CommandFailed(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
