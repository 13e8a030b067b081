"""Starts a store of KV on each node for each version, and stops the stores of removed versions.

A pure part of the machine of the pools (`deploy.pools.machine`):

    waiting ──> starting ──> serving ──> stopping ──> gone: its version, or its node
       ^            │           │
       └────────────┴───────────┘   start failed, or its keeper died

Requests are served even if a store fails, so no other service waits for a store. A sleeping version
keeps its stores. Versions never share KV, so each store belongs to one version. When a version is
removed, its stores are stopped, and their space is freed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from deploy.pools.events import (
    Died,
    PoolEffect,
    ServiceFailed,
    ServiceStarted,
    ServiceStopped,
    StartStore,
    StopStore,
    StoresSeen,
)
from deploy.pools.state import PoolState
from engine.control import Member, Version
from engine.messages import WorkerId

NODE_CHARS = 12  # characters of a node's id in the name of its store


class StoreState(StrEnum):
    """The stage of a store's life."""

    WAITING = "waiting"
    STARTING = "starting"
    SERVING = "serving"
    STOPPING = "stopping"


@dataclass(slots=True)
class PoolStore:
    """The record of a store that is wanted, or that has not ended yet."""

    version: Version
    node: str
    state: StoreState = StoreState.WAITING
    address: str = ""
    is_wanted: bool = True


def store_name(version: str, node: str) -> str:
    """Returns the name of a version's store on a node. A single machine has no node name."""
    return f"store-{version}@{node[:NODE_CHARS]}" if node else f"store-{version}"


class Stores:
    """Owns the state of each store. The handler of each event yields effects."""

    def __init__(self, state: PoolState) -> None:
        self.by_name: dict[str, PoolStore] = {}
        self.nodes: Sequence[str] | None = None  # None: the nodes are not known yet
        self._seen: Mapping[str, tuple[str, ...]] = {}  # by store: troubles that it reported
        self._state = state

    def members(self) -> tuple[Member, ...]:
        """Returns the serving stores as members."""
        return tuple(
            Member(WorkerId(name), store.address, store.version.name)
            for name, store in sorted(self.by_name.items())
            if store.state is StoreState.SERVING
        )

    def troubles(self) -> Iterator[str]:
        """Yields a sentence for each store that does not run, and for each trouble of a store's
        tier.
        """
        for name in self.by_name:
            if why := self._state.restarts.why(name):
                yield f"{name} {why.removeprefix(f'{name} ')}"
            for seen in self._seen.get(name, ()):
                yield f"{name}: {seen}"

    def on_seen(self, event: StoresSeen, _: float) -> Iterator[PoolEffect]:
        """Keeps the troubles that the stores report."""
        self._seen = event.troubles
        yield from ()

    def reconcile(self, versions: Iterable[Version], now_s: float) -> Iterator[PoolEffect]:
        """Starts missing stores, and stops stores that are not wanted."""
        nodes = self.nodes
        if not self._state.limits.has_stores or nodes is None:
            return
        named = {version.name: version for version in versions if not version.is_over}
        wanted = {
            store_name(name, node): (version, node)
            for name, version in named.items()
            for node in nodes
        }
        for name, (version, node) in wanted.items():
            if name not in self.by_name:
                self.by_name[name] = PoolStore(version, node)
        for name, store in list(self.by_name.items()):
            store.is_wanted = name in wanted
            if store.is_wanted:
                yield from self._start(name, store, now_s)
            else:
                is_over = store.version.name not in named
                yield from self._stop(name, store, now_s, is_over=is_over)

    def _start(self, name: str, store: PoolStore, now_s: float) -> Iterator[PoolEffect]:
        if store.state is StoreState.WAITING and self._state.restarts.is_due(name, now_s):
            store.state = StoreState.STARTING
            self._state.restarts.begun(name, now_s)
            yield StartStore(name, store.version, store.node)

    def _stop(
        self, name: str, store: PoolStore, now_s: float, *, is_over: bool
    ) -> Iterator[PoolEffect]:
        if store.state is StoreState.WAITING:
            self._remove(name)
        elif store.state is StoreState.SERVING:
            store.state = StoreState.STOPPING
            why = "its version is over" if is_over else "its node is gone"
            yield self._state.record(now_s, name, "is stopped", why)
            yield StopStore(name, is_over)

    def found(self, name: str, version: Version, node: str, address: str, now_s: float) -> None:
        """Takes over a store that is already running."""
        self.by_name[name] = PoolStore(version, node, StoreState.SERVING, address)
        self._state.restarts.started(name, now_s)

    def on_started(self, event: ServiceStarted, now_s: float) -> Iterator[PoolEffect]:
        """Records a start."""
        store = self.by_name.get(event.name)
        if store is None:
            return
        store.state, store.address = StoreState.SERVING, event.address
        yield self._state.record_start(event.name, now_s)

    def on_failed(self, event: ServiceFailed, now_s: float) -> Iterator[PoolEffect]:
        """Schedules another start."""
        yield from self._lose(event.name, f"did not start: {event.reason}", now_s)

    def on_died(self, event: Died, now_s: float) -> Iterator[PoolEffect]:
        """Schedules another start."""
        store = self.by_name.get(event.name)
        if store is not None and store.state is not StoreState.STOPPING:
            yield from self._lose(event.name, event.how, now_s)

    def on_stopped(self, event: ServiceStopped, now_s: float) -> Iterator[PoolEffect]:
        """Removes a stopped store."""
        if event.name in self.by_name:
            self._remove(event.name)
            yield self._state.record(now_s, event.name, "has stopped")

    def _lose(self, name: str, how: str, now_s: float) -> Iterator[PoolEffect]:
        store = self.by_name.get(name)
        if store is None:
            return
        store.state, store.address = StoreState.WAITING, ""
        yield self._state.record_end(name, now_s, how)

    def _remove(self, name: str) -> None:
        del self.by_name[name]
        self._state.restarts.remove(name)
