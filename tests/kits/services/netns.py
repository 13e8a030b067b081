"""Two network namespaces (`bench.chaos.netns`) with a bad link that a test can cut.

    hub ── gate ── near ══ link ══ far ── gate ── hub

Processes in near and far reach each other only over the link. The test itself runs in the hub and
always reaches both. A cut is silent: packets vanish, no interface goes down and no connection is
refused. There are two kinds of link:

    NetemLink     a veth pair under `tc netem`; the kernel must support netem
    RelayedLink   a TUN device at each end; a thread here delays, drops or delivers the packets;
                  its losses come from a seed

Each direction of both kinds has the rate `RATE_BYTES_PER_S`, the delay `DELAY_S` and the loss
`LOSS`. The link is slow, so that a transfer still runs when the test cuts it.
"""

import fcntl
import heapq
import json
import os
import random
import selectors
import shutil
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Protocol

from bench.chaos.netns import CommandFailed, NetworkPlace, Unavailable, hub, inside, ip, place, run
from engine.clock import MonotonicClock

DEVICE = "kv0"  # the device at each end of the link
RATE_BYTES_PER_S = 1_000_000
DELAY_S = 0.02
LOSS = 0.01
TUN = Path("/dev/net/tun")
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MAX_PACKET_BYTES = 65535
MAX_WAIT_S = 0.05
MAX_QUEUED_PACKETS = 1000  # the default of netem too


class Link(Protocol):
    """The link between near and far. It is closed before these namespaces."""

    def open(self, near: NetworkPlace, far: NetworkPlace) -> None:
        """Makes `DEVICE` in both namespaces, up and without an address. Raises Unavailable."""
        ...

    def cut(self) -> None:
        """Drops all packets from now on."""
        ...

    def heal(self) -> None:
        """Ends a cut."""
        ...

    def carried_bytes(self) -> int:
        """Returns the bytes of packets that have reached the far end so far."""
        ...

    def close(self) -> None:
        """Ends what `open` started. Devices may be removed together with their namespaces."""
        ...


@contextmanager
def network(link: Link) -> Iterator[tuple[NetworkPlace, NetworkPlace]]:
    """Makes near and far with `link` between them; removes them at the end.

    The calling thread runs in the hub. Raises Unavailable.
    """
    with ExitStack() as stack:
        stack.enter_context(hub())
        near = place("near", 1)
        stack.callback(os.close, near.fd)
        far = place("far", 2)
        stack.callback(os.close, far.fd)
        stack.callback(link.close)
        link.open(near, far)
        for one, other in ((near, far), (far, near)):
            with inside(one.fd):
                ip(f"route add {other.address}/32 dev {DEVICE} src {one.address}")
        yield near, far


class NetemLink:
    """A veth pair. Each end delays and drops the packets that it sends."""

    def open(self, near: NetworkPlace, far: NetworkPlace) -> None:
        """Raises Unavailable if the kernel has no netem or forbids its configuration."""
        if shutil.which("tc") is None:
            raise Unavailable("tc (iproute2) is not installed")
        self._ends = near, far
        there = f"type veth peer name {DEVICE} netns {far.path}"
        ip(f"link add name {DEVICE} netns {near.path} {there}")
        for end in self._ends:
            with inside(end.fd):
                ip(f"link set dev {DEVICE} up")
        try:
            self._shape("add", LOSS)
        except CommandFailed as error:
            if "unknown" in str(error):
                raise Unavailable(f"the kernel has no netem: {error}") from error
            raise

    def cut(self) -> None:
        """Drops all packets."""
        self._shape("change", 1.0)

    def heal(self) -> None:
        """Sets the loss back to its normal rate."""
        self._shape("change", LOSS)

    def carried_bytes(self) -> int:
        """Returns the bytes that the far end has received."""
        with inside(self._ends[1].fd):
            answer = run("ip", "-s", "-j", "link", "show", "dev", DEVICE)
        return int(json.loads(answer)[0]["stats64"]["rx"]["bytes"])

    def close(self) -> None:
        """Does nothing: the pair is removed with the namespaces."""

    def _shape(self, verb: str, loss: float) -> None:
        how = f"netem delay {DELAY_S * 1000:g}ms loss {loss:.0%} rate {8 * RATE_BYTES_PER_S}bit"
        for end in self._ends:
            with inside(end.fd):
                run("tc", "qdisc", verb, "dev", DEVICE, "root", *how.split())


class RelayedLink:
    """Two TUN devices, and a thread that carries packets between them."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._clock = MonotonicClock()
        self._opposite: dict[int, int] = {}  # file descriptor of each end to that of the other end
        self._free_s: dict[int, float] = {}  # time at which each end has sent all its packets
        # a heap of packets: due time, number, receiving end, packet
        self._late: list[tuple[float, int, int, bytes]] = []
        self._numbers = count()
        self._carried_bytes = 0
        self._is_cut = False
        self._stopping = False
        self._thread: threading.Thread | None = None

    def open(self, near: NetworkPlace, far: NetworkPlace) -> None:
        """Raises Unavailable if the kernel has no TUN devices."""
        if not TUN.exists():
            raise Unavailable(f"no {TUN}")
        ends = []
        for there in (near, far):
            ends.append(_open_tun(there))
            self._free_s[ends[-1]] = 0.0
            with inside(there.fd):
                ip(f"link set dev {DEVICE} up")
        self._far_end = ends[1]
        self._opposite = dict(zip(ends, reversed(ends), strict=True))
        self._thread = threading.Thread(target=self._carry, name="link", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Drops all packets from now on, also packets in flight."""
        self._is_cut = True

    def heal(self) -> None:
        """Ends a cut."""
        self._is_cut = False

    def carried_bytes(self) -> int:
        """Returns the bytes written to the far device."""
        return self._carried_bytes

    def close(self) -> None:
        """Stops the thread. The devices vanish with their descriptors."""
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
        """Removes and returns all packets that one end has sent."""
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
        """Delivers the packets whose delay is over."""
        now_s = self._clock.now_s()
        while self._late and self._late[0][0] <= now_s:
            _, _, end, packet = heapq.heappop(self._late)
            if self._is_cut:
                continue
            os.write(end, packet)
            if end == self._far_end:
                self._carried_bytes += len(packet)


def _open_tun(there: NetworkPlace) -> int:
    """Makes `DEVICE` in a namespace. Packets sent there can be read from the returned descriptor,
    and packets written to the descriptor arrive there.
    """
    with inside(there.fd):
        tun = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    return tun
