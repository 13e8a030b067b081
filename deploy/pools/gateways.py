"""Starts gateways, and stops those that have no session.

A part of the machine of the pools (`deploy.pools.machine`), and as pure:

    waiting ──> starting ──> serving ──> stopping: no session for too long
       ^            │           │            │
       └────────────┴───────────┴────────────┘   start failed, died, or was ended

Each start and each end is answered by an event. Gateways' reports are kept here too.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum

from deploy.pools.effects import PoolEffect, StartGateway, StopGateway
from deploy.pools.events import (
    Died,
    GatewayFailed,
    GatewaySeen,
    GatewayStarted,
    GatewayStopped,
    GatewayUnheard,
)
from deploy.pools.history import PoolHistory
from deploy.pools.restarts import Restarts
from engine.control import GatewayReport, VersionReport

GATEWAY_UNREACHABLE_S = 5.0  # without a session; short, because clients wait at the gateway


class GatewayState(StrEnum):
    """The stage of a gateway's life."""

    WAITING = "waiting"  # is started when its restart is due
    STARTING = "starting"
    SERVING = "serving"
    STOPPING = "stopping"  # by force: it had no session


class Gateways:
    """Owns the state of each gateway. Each handler of an event yields effects."""

    def __init__(self, names: Sequence[str], *, restarts: Restarts, history: PoolHistory) -> None:
        """`restarts` and `history` are shared with workers."""
        self.states = dict.fromkeys(names, GatewayState.WAITING)
        self.have_served = False  # at least one of them
        self._unheard_s: dict[str, float] = {}  # when a session ended
        self._reports: dict[str, GatewayReport] = {}  # the latest ones
        self._restarts = restarts
        self._history = history

    @property
    def all_serve(self) -> bool:
        """True if all gateways serve."""
        return all(state is GatewayState.SERVING for state in self.states.values())

    def reports_of(self, version: str) -> list[VersionReport]:
        """Returns what gateways report of a version of the model."""
        said = (report.versions.get(version) for report in self._reports.values())
        return [each for each in said if each is not None]

    def reports_on(self, members_version: int) -> list[GatewayReport | None]:
        """Returns each started gateway's report; None if it has not heard these members yet."""
        said = [
            self._reports.get(name)
            for name, state in self.states.items()
            if state is not GatewayState.WAITING
        ]
        return [
            each if each is not None and each.members_version == members_version else None
            for each in said
        ]

    def serve(self, name: str, now_s: float) -> None:
        """Notes that a gateway listens."""
        self.states[name] = GatewayState.SERVING
        self._restarts.started(name, now_s)
        self.have_served = True

    def heard(self, name: str) -> None:
        """Notes that a gateway has a session."""
        self._unheard_s.pop(name, None)

    def start(self, now_s: float) -> Iterator[PoolEffect]:
        """Starts the gateways that are due.

        The first one starts alone: it chooses the port that the others share.
        """
        for name, state in self.states.items():
            if state is GatewayState.WAITING and self._restarts.is_due(name, now_s):
                self.states[name] = GatewayState.STARTING
                yield StartGateway(name)
            if not self.have_served:
                return

    def sweep(self, now_s: float) -> Iterator[PoolEffect]:
        """Stops the gateways that had no session for too long."""
        for name, since_s in list(self._unheard_s.items()):
            if now_s - since_s >= GATEWAY_UNREACHABLE_S:
                del self._unheard_s[name]
                self.states[name] = GatewayState.STOPPING
                self._history.counters["gateways unreachable"] += 1
                why = f"no session for {GATEWAY_UNREACHABLE_S:g} s"
                yield self._history.tell(now_s, name, "is stopped", why)
                yield StopGateway(name)

    def on_started(self, event: GatewayStarted, now_s: float) -> Iterator[PoolEffect]:
        """Notes a start. From now on a session is expected."""
        again = self._restarts.num_failed(event.name) > 0
        self.serve(event.name, now_s)
        self._unheard_s[event.name] = now_s
        yield self._history.tell(now_s, event.name, "was started again" if again else "was started")

    def on_failed(self, event: GatewayFailed, now_s: float) -> Iterator[PoolEffect]:
        """Tries again later."""
        yield from self._lose(event.name, f"did not start: {event.reason}", now_s)

    def on_died(self, event: Died, now_s: float) -> Iterator[PoolEffect]:
        """Starts the gateway again later. If it was being stopped, `GatewayStopped` follows."""
        if self.states[event.name] is not GatewayState.STOPPING:
            yield from self._lose(event.name, event.how, now_s)

    def on_unheard(self, event: GatewayUnheard, now_s: float) -> Iterator[PoolEffect]:
        """Starts the deadline by which a session must be open again."""
        if self.states.get(event.name) is GatewayState.SERVING:
            self._unheard_s.setdefault(event.name, now_s)
            yield self._history.tell(now_s, event.name, "cannot be reached", event.reason)

    def on_stopped(self, event: GatewayStopped, now_s: float) -> Iterator[PoolEffect]:
        """Starts the gateway again later."""
        if self.states.get(event.name) is GatewayState.STOPPING:
            yield from self._lose(event.name, "was stopped", now_s)

    def on_seen(self, event: GatewaySeen, _: float) -> Iterator[PoolEffect]:
        """Keeps the latest report."""
        if event.report is not None:
            self._reports[event.name] = event.report
        else:
            self._reports.pop(event.name, None)
        yield from ()

    def _lose(self, name: str, how: str, now_s: float) -> Iterator[PoolEffect]:
        self.states[name] = GatewayState.WAITING
        self._unheard_s.pop(name, None)
        yield self._history.tell(now_s, name, how, self._restarts.note_end(name, now_s))
