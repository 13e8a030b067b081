"""Starts gateways, and stops gateways without a session.

A pure part of the machine of the pools (`deploy.pools.machine`):

    waiting ──> starting ──> serving ──> stopping: no session for too long
       ^            │           │            │
       └────────────┴───────────┴────────────┘   start failed, died, or was ended

An event reports the outcome of each start and each stop. This module also keeps the gateways'
reports.

A gateway without a session may be paused, stuck or cut off from the network. If the gateway
recovers, its answers continue. If it is stopped, its answers are lost, and the loss is counted. So
the stop is delayed while all gateways accept from one socket and another gateway serves.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum

from deploy.pools.events import (
    Died,
    GatewaySeen,
    GatewaySilent,
    PoolEffect,
    ServiceFailed,
    ServiceStarted,
    ServiceStopped,
    StartGateway,
    StopGateway,
)
from deploy.pools.state import PoolState
from engine.control import GatewayReport, VersionReport

GATEWAY_UNREACHABLE_S = 8.0  # longest time without a session; short, because clients wait
# The longest time if other gateways accept all new connections: only running answers wait then.
GATEWAY_PATIENCE_S = 30.0


class GatewayState(StrEnum):
    """The stage of a gateway's life."""

    WAITING = "waiting"  # to be started when its restart is due
    STARTING = "starting"
    SERVING = "serving"
    STOPPING = "stopping"  # being killed, because it had no session


class Gateways:
    """Owns the state of each gateway. The handler of each event yields effects."""

    def __init__(
        self,
        names: Sequence[str],
        state: PoolState,
    ) -> None:
        self.states = dict.fromkeys(names, GatewayState.WAITING)
        self.have_served = False  # True once any gateway has served
        self._silent_since_s: dict[str, float] = {}  # by gateway: end of its session
        self._reports: dict[str, GatewayReport] = {}  # by gateway: its latest report
        self._lost: set[str] = set()  # gateways whose session has ended
        self._num_requests: dict[str, int] = {}  # by gateway: requests in its last report
        self._state = state

    @property
    def all_serve(self) -> bool:
        """True if all gateways serve."""
        return all(state is GatewayState.SERVING for state in self.states.values())

    def reports_of(self, version: str) -> list[VersionReport]:
        """Returns the gateways' latest reports about a version of the model."""
        said = (report.versions.get(version) for report in self._reports.values())
        return [each for each in said if each is not None]

    def reports_on(self, members_version: int) -> list[GatewayReport | None]:
        """Returns each started gateway's report.

        None for a gateway that has not received these members.
        """
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
        """Records that a gateway listens and serves."""
        self.states[name] = GatewayState.SERVING
        self._state.restarts.started(name, now_s)
        self.have_served = True

    def heard(self, name: str) -> None:
        """Records that a gateway has a session."""
        self._silent_since_s.pop(name, None)
        self._lost.discard(name)

    def troubles(self) -> Iterator[str]:
        """Yields a sentence for each gateway that does not answer, or that fails to start."""
        for name in self.states:
            if name in self._lost:
                where = " New requests go to the others." if self._others_serve(name) else ""
                yield f"{name} does not answer.{where}"
            elif why := self._state.restarts.why(name):
                yield f"{name} {why.removeprefix(f'{name} ')}"

    def start(self, now_s: float) -> Iterator[PoolEffect]:
        """Starts the gateways whose start is due.

        The first gateway starts alone: it chooses the port that all gateways share.
        """
        for name, state in self.states.items():
            if state is GatewayState.WAITING and self._state.restarts.is_due(name, now_s):
                self.states[name] = GatewayState.STARTING
                self._state.restarts.begun(name, now_s)
                yield StartGateway(name)
            if not self.have_served:
                return

    def sweep(self, now_s: float) -> Iterator[PoolEffect]:
        """Stops the gateways that have had no session for too long."""
        for name, since_s in list(self._silent_since_s.items()):
            is_lost_alone = (
                self._state.limits.gateways_share_socket
                and name in self._lost
                and self._others_serve(name)
            )
            patience_s = GATEWAY_PATIENCE_S if is_lost_alone else GATEWAY_UNREACHABLE_S
            if now_s - since_s >= patience_s:
                del self._silent_since_s[name]
                self.states[name] = GatewayState.STOPPING
                self._state.counters["gateways unreachable"] += 1
                why = f"no session for {patience_s:g} s"
                yield self._state.record(now_s, name, "is stopped", why)
                yield StopGateway(name)

    def on_started(self, event: ServiceStarted, now_s: float) -> Iterator[PoolEffect]:
        """Records a gateway's start.

        From now on the controller must have a session with the gateway.
        """
        step = self._state.record_start(event.name, now_s)
        self.serve(event.name, now_s)
        self._silent_since_s[event.name] = now_s
        yield step

    def on_failed(self, event: ServiceFailed, now_s: float) -> Iterator[PoolEffect]:
        """Schedules another start."""
        yield from self._lose(event.name, f"did not start: {event.reason}", now_s)

    def on_died(self, event: Died, now_s: float) -> Iterator[PoolEffect]:
        """Schedules another start.

        If the gateway was being stopped, waits for `ServiceStopped` instead.
        """
        if self.states[event.name] is not GatewayState.STOPPING:
            yield from self._lose(event.name, event.how, now_s)

    def on_silent(self, event: GatewaySilent, now_s: float) -> Iterator[PoolEffect]:
        """Starts the deadline by which a session must be open again."""
        if self.states.get(event.name) is GatewayState.SERVING:
            self._silent_since_s.setdefault(event.name, now_s)
            self._lost.add(event.name)
            yield self._state.record(now_s, event.name, "cannot be reached", event.reason)

    def on_stopped(self, event: ServiceStopped, now_s: float) -> Iterator[PoolEffect]:
        """Schedules another start."""
        if self.states.get(event.name) is GatewayState.STOPPING:
            yield from self._lose(event.name, "was stopped", now_s)

    def on_seen(self, event: GatewaySeen, _: float) -> Iterator[PoolEffect]:
        """Keeps the latest report."""
        if event.report is not None:
            self._reports[event.name] = event.report
            self._num_requests[event.name] = event.report.num_requests
        else:
            self._reports.pop(event.name, None)
        yield from ()

    def _lose(self, name: str, how: str, now_s: float) -> Iterator[PoolEffect]:
        self.states[name] = GatewayState.WAITING
        self._silent_since_s.pop(name, None)
        self._lost.discard(name)
        if num_lost := self._num_requests.pop(name, 0):
            self._state.counters["requests lost with gateways"] += num_lost
            how = f"{how}, with {num_lost} requests"
        yield self._state.record_end(name, now_s, how)

    def _others_serve(self, name: str) -> bool:
        """True if another gateway serves and has a session with the controller."""
        return any(
            other != name and state is GatewayState.SERVING and other not in self._silent_since_s
            for other, state in self.states.items()
        )
