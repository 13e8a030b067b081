"""Which gateways are started, which serve, and which are ended because nobody reaches them.

A part of the machine of the pools (`deploy.pools.machine`), and pure as that is:

    waiting ──> starting ──> serving ──> stopping: without a session for too long
       ^            │           │            │
       └────────────┴───────────┴────────────┘   it did not start, died, or was ended

A start is answered, also one that fails; and so is an end. Here are the words of gateways too, as
far as the pools go by them.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Protocol

from deploy.pools.events import (
    Died,
    GatewayFailed,
    GatewaySeen,
    GatewayStarted,
    GatewayState,
    GatewayStopped,
    GatewayUnheard,
    PoolEffect,
    StartGateway,
    StopGateway,
    Tell,
)
from deploy.pools.restarts import Restarts
from engine.control import GatewayReport, VersionReport

GATEWAY_UNREACHABLE_S = 5.0  # without a session it is stopped by force then: clients wait there


class Teller(Protocol):
    """Writes a step into the history of the pools."""

    def __call__(self, now_s: float, subject: str, what: str, why: str = "") -> Tell:
        """To be among the effects."""
        ...


class Gateways:
    """The one owner of what is known of them. Handlers of events are generators of effects."""

    def __init__(
        self, names: Sequence[str], *, restarts: Restarts, counters: Counter[str], tell: Teller
    ) -> None:
        """`restarts` and `counters` are those of workers too."""
        self.states = dict.fromkeys(names, GatewayState.WAITING)
        self.have_served = False  # one of them at least
        self._unheard_s: dict[str, float] = {}  # those without a session, since when
        self._reports: dict[str, GatewayReport] = {}  # of those that say something
        self._restarts = restarts
        self._counters = counters
        self._tell = tell

    @property
    def all_serve(self) -> bool:
        """Whether none is missing."""
        return all(state is GatewayState.SERVING for state in self.states.values())

    def reports_of(self, version: str) -> list[VersionReport]:
        """What they say of a version of the model."""
        said = (report.versions.get(version) for report in self._reports.values())
        return [each for each in said if each is not None]

    def reports_on(self, members_version: int) -> list[GatewayReport | None]:
        """What each says that is there; None of one that has not heard these members."""
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
        """It listens."""
        self.states[name] = GatewayState.SERVING
        self._restarts.started(name, now_s)
        self.have_served = True

    def heard(self, name: str) -> None:
        """There is a session with it."""
        self._unheard_s.pop(name, None)

    def start(self, now_s: float) -> Iterator[PoolEffect]:
        """Those that are due; the first one ever by itself: where it listens the others do."""
        for name, state in self.states.items():
            if state is GatewayState.WAITING and self._restarts.is_due(name, now_s):
                self.states[name] = GatewayState.STARTING
                yield StartGateway(name)
            if not self.have_served:
                return

    def sweep(self, now_s: float) -> Iterator[PoolEffect]:
        """Ends those that nobody has reached for too long."""
        for name, since_s in list(self._unheard_s.items()):
            if now_s - since_s >= GATEWAY_UNREACHABLE_S:
                del self._unheard_s[name]
                self.states[name] = GatewayState.STOPPING
                self._counters["gateways unreachable"] += 1
                why = f"no session for {GATEWAY_UNREACHABLE_S:g} s"
                yield self._tell(now_s, name, "is stopped", why)
                yield StopGateway(name)

    def on_started(self, event: GatewayStarted, now_s: float) -> Iterator[PoolEffect]:
        """It is to be reached from now on."""
        again = self._restarts.num_failed(event.name) > 0
        self.serve(event.name, now_s)
        self._unheard_s[event.name] = now_s
        yield self._tell(now_s, event.name, "was started again" if again else "was started")

    def on_failed(self, event: GatewayFailed, now_s: float) -> Iterator[PoolEffect]:
        """It is tried again, later each time."""
        yield from self._lose(event.name, f"did not start: {event.reason}", now_s)

    def on_died(self, event: Died, now_s: float) -> Iterator[PoolEffect]:
        """One that is being stopped is told of when that is done."""
        if self.states[event.name] is not GatewayState.STOPPING:
            yield from self._lose(event.name, event.how, now_s)

    def on_unheard(self, event: GatewayUnheard, now_s: float) -> Iterator[PoolEffect]:
        """From now on it has so long to be reached again."""
        if self.states.get(event.name) is GatewayState.SERVING:
            self._unheard_s.setdefault(event.name, now_s)
            yield self._tell(now_s, event.name, "cannot be reached", event.reason)

    def on_stopped(self, event: GatewayStopped, now_s: float) -> Iterator[PoolEffect]:
        """Another one comes in its place."""
        if self.states.get(event.name) is GatewayState.STOPPING:
            yield from self._lose(event.name, "was stopped", now_s)

    def on_seen(self, event: GatewaySeen, _: float) -> Iterator[PoolEffect]:
        """What it said last."""
        if event.report is not None:
            self._reports[event.name] = event.report
        else:
            self._reports.pop(event.name, None)
        yield from ()

    def _lose(self, name: str, how: str, now_s: float) -> Iterator[PoolEffect]:
        self.states[name] = GatewayState.WAITING
        self._unheard_s.pop(name, None)
        yield self._tell(now_s, name, how, self._restarts.note_end(name, now_s))
