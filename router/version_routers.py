"""A router for each version that the controller lists, until the version's last request ends.

This is the shell around `router.gateway.versions.Versions`. It opens and closes routers, loads
tokenizers in a thread with retries, and lists the versions that can serve. The controller removes a
version after its last request has ended. The router still waits for requests that arrived since. It
also waits until another version can serve, as this gateway may have missed messages.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from engine.clock import Clock
from engine.control import MAIN_LINE, Intent, Members, Version, VersionReport
from router.gateway.versions import SERVER_SHUTDOWN, ServedVersion, Versions
from router.machine.requests import Failed
from router.probes import fault_of_version
from router.service import Router
from router.text.tokenizer import TextModel

log = logging.getLogger(__name__)

PROBE_EVERY_S = 0.1  # seconds between two checks whether a new version can serve
RETRY_EVERY_S = 5.0  # seconds between tries to load a tokenizer
SHUT_DOWN = Failed("the server was stopped before the answer was complete", SERVER_SHUTDOWN)
LOOK_EVERY_S = 0.1  # seconds between two checks whether a removed version is unused

LoadText = Callable[[Version], TextModel]  # blocks its thread; may raise any exception
FaultOf = Callable[[str], Awaitable[str]]  # returns the fault in a version's answers, or ""


@dataclass(slots=True)
class _Host:
    """One version with its router and tokenizer."""

    version: Version
    router: Router
    addresses: list[str]
    context_len: int = 0  # maximum length of a request in tokens; 0 while no worker is known
    text: TextModel | None = None
    is_open: bool = False
    failure: str = "its tokenizer is being loaded"
    probe: str | None = None  # fault in its answers to probes; None: not probed yet
    is_probed: bool = False  # True from the start of its probes

    def follow(self, version: Version, all_members: Members) -> None:
        self.version = version
        members = all_members.of(version.name)
        stores = all_members.stores_of(version.name)
        self.addresses = [member.address for member in (*members, *stores)]
        known = self.context_len if version.asleep is None else version.asleep.context_len
        self.context_len = min((m.context_len for m in members), default=known)
        if self.is_open:
            self.router.follow(self.addresses)

    def missing(self) -> str | None:
        return self.router.readiness() if self.text is not None else self.failure

    def served(self) -> ServedVersion | None:
        """Returns the version with its router; None while it cannot serve requests."""
        if self.text is None or not self.context_len:
            return None
        version = self.version
        return ServedVersion(
            name=version.name,
            port=self.router,
            text=self.text,
            model_names=(version.model_name,),
            context_len=self.context_len,
            weight=version.weight,
            is_leaving=version.is_leaving,
            line=version.line,
        )


class VersionRouters:
    """Keeps `versions` equal to those versions in the controller's list that can serve."""

    def __init__(
        self, *, new_router: Callable[[], Router], load_text: LoadText, clock: Clock
    ) -> None:
        self._new_router = new_router
        self._clock = clock
        self._load_text = load_text
        self._hosts: dict[str, _Host] = {}  # the current version first
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving: list[_Host] = []
        self.versions = Versions()
        self._is_rolling = False  # True while a rollout replaces a version
        self.more_probes: FaultOf | None = None  # called after the probes of `router.probes`

    async def open(self, members: Members) -> Version:
        """Starts to serve. Returns the first version after its tokenizer was loaded.

        Raises any exception of loading.
        """
        self._never = asyncio.get_running_loop().create_future()
        first = _first_to_serve(members.intent)
        host = self._take(first)
        host.follow(first, members)
        await self._open(host)
        self.follow(members)
        return first

    def follow(self, members: Members) -> None:
        """Opens and closes routers for a new list of versions and workers."""
        named = members.intent.versions
        for host in list(self._hosts.values()):
            if not any(version.serves_like(host.version) for version in named):
                self._leave(host)
        for version in named:
            if version.name not in self._hosts:
                self._spawn(self._open_at_last(self._take(version)))
            host = self._hosts[version.name]
            host.follow(version, members)
        self._hosts = {version.name: self._hosts[version.name] for version in named}
        self._tell()
        rollout = members.intent.rollout
        self._is_rolling = rollout is not None
        for host in self._hosts.values():
            comes = rollout is not None and rollout.to == host.version.name
            if comes and not host.version.weight and not host.is_probed:
                host.is_probed = True
                self._spawn(self._probe(host))

    async def close(self) -> None:
        """Ends all sessions."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for host in [*self._hosts.values(), *self._leaving]:
            if host.is_open:
                await host.router.close()

    def cut(self) -> int:
        """Ends all requests with an error that reports the shutdown. Returns their number."""
        hosts = [*self._hosts.values(), *self._leaving]
        return sum(host.router.cut(SHUT_DOWN) for host in hosts if host.is_open)

    def routers(self) -> Mapping[str, Router]:
        """Returns the open routers by version, the current version first."""
        return {name: host.router for name, host in self._hosts.items() if host.is_open}

    def reports(self) -> dict[str, VersionReport]:
        """Returns the state of each version, for the controller."""
        now_s, tallies = self._clock.now_s(), self.versions.tallies
        hung = tallies.hung(now_s) if self._is_rolling else {}  # slow, as it reads all requests
        return {
            name: VersionReport(
                missing=host.missing(),
                num_requests=self.versions.num_running[name],
                fingerprint=host.router.fingerprint(),
                num_ended=tally.ended,
                num_failed=tally.failed,
                num_late=tally.late,
                longest_len=max(tally.longest_len(now_s), host.router.machine.longest_len),
                probe=host.probe,
                num_hung=hung.get(name, 0),
            )
            for name, host in self._hosts.items()
            for tally in [tallies.of(name)]
        }

    def _take(self, version: Version) -> _Host:
        self._hosts[version.name] = host = _Host(version, self._new_router(), [])
        return host

    async def _open(self, host: _Host) -> None:
        text = await asyncio.to_thread(self._load_text, host.version)
        if self._hosts.get(host.version.name) is not host:  # it was removed meanwhile
            return
        await host.router.open()
        host.text, host.is_open = text, True
        host.router.follow(host.addresses)
        log.info("version %s is served", host.version.name)

    async def _probe(self, host: _Host) -> None:
        """Probes a version that will replace another, as soon as it can serve.

        Stops if the version is removed.
        """
        while host.missing() is not None or not host.context_len:
            await asyncio.wait([self._never], timeout=PROBE_EVERY_S)
            if self._hosts.get(host.version.name) is not host:
                return
        assert host.text is not None
        try:
            fault = await fault_of_version(host.router, host.text, host.context_len, self._clock)
            if not fault and self.more_probes is not None:
                fault = await self.more_probes(host.version.name)
            host.probe = fault
        except Exception as error:  # after any error, this version must not replace another
            host.probe = f"a probe failed: {error!r}"
        log.info("version %s was probed: %s", host.version.name, host.probe or "all is well")

    async def _open_at_last(self, host: _Host) -> None:
        while True:
            try:
                await self._open(host)
                self._tell()
                return
            except Exception as error:  # any error is reported, and the version is loaded again
                host.failure = f"it cannot be loaded: {str(error) or repr(error)}"
                log.warning("version %s: %s", host.version.name, host.failure)
            await asyncio.wait([self._never], timeout=RETRY_EVERY_S)
            if self._hosts.get(host.version.name) is not host:
                return

    def _leave(self, host: _Host) -> None:
        del self._hosts[host.version.name]
        self._leaving.append(host)
        self._spawn(self._close(host))

    async def _close(self, host: _Host) -> None:
        """Closes a router when its last request has ended and no other request can reach it."""
        while host.is_open and self._is_in_use(host):
            await asyncio.wait([self._never], timeout=LOOK_EVERY_S)
        self._leaving.remove(host)
        if host.is_open:
            await host.router.close()
        log.info("version %s is not served any more", host.version.name)

    def _is_in_use(self, host: _Host) -> bool:
        is_given = any(each.port is host.router for each in self.versions.table)
        return is_given or host.router.machine.num_flights > 0

    def _tell(self) -> None:
        table: list[ServedVersion] = []
        coming: dict[str, str] = {}
        for name, host in self._hosts.items():
            served = host.served()
            if served is not None:
                table.append(served)
            elif not host.version.is_leaving:
                coming[name] = host.version.model_name
        if table:  # without any, the earlier versions stay
            self.versions.follow(tuple(table), coming)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("a task of a version died: %r", error, exc_info=error)


def _first_to_serve(intent: Intent) -> Version:
    """Returns the current version, unless it is leaving or another version has all the weight."""
    stays = [version for version in intent.of_line(MAIN_LINE) if not version.is_leaving]
    return next((version for version in stays if version.weight), stays[0])
