"""A router for each version that the controller names, until its last request ends.

The shell around `router.gateway.versions.Versions`. It opens and closes routers, loads tokenizers
in a thread with retries, and lists the versions that can serve. A version that is no longer named
was left by all its requests, as far as the controller saw. A request that is still there is waited
for. So is another version that can serve, as a gateway without news of the controller may know none
yet.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from engine.control import Intent, Member, Members, Version, VersionReport
from router.gateway.versions import SERVER_SHUTDOWN, ServedVersion, Versions
from router.machine.requests import Failed
from router.service import Router
from router.text.tokenizer import TextModel

log = logging.getLogger(__name__)

RETRY_EVERY_S = 5.0  # to load a tokenizer
SHUT_DOWN = Failed("the server was stopped before the answer was complete", SERVER_SHUTDOWN)
LOOK_EVERY_S = 0.1  # whether the requests of a version that is gone are over

LoadText = Callable[[Version], TextModel]  # blocks; raises what it likes


@dataclass(slots=True)
class _Host:
    """One version, its router and tokenizer."""

    version: Version
    router: Router
    addresses: list[str]
    context_len: int = 0  # 0: none of its workers is known yet
    text: TextModel | None = None
    is_open: bool = False
    failure: str = "its tokenizer is being loaded"

    def follow(self, version: Version, members: tuple[Member, ...]) -> None:
        self.version = version
        self.addresses = [member.address for member in members]
        self.context_len = min((m.context_len for m in members), default=self.context_len)
        if self.is_open:
            self.router.follow(self.addresses)

    def missing(self) -> str | None:
        return self.router.readiness() if self.text is not None else self.failure

    def served(self) -> ServedVersion | None:
        """The version as requests see it; None while it cannot be chosen."""
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
        )


class VersionRouters:
    """Keeps `versions` what the controller says, as far as they can be served."""

    def __init__(self, *, new_router: Callable[[], Router], load_text: LoadText) -> None:
        self._new_router = new_router
        self._load_text = load_text
        self._hosts: dict[str, _Host] = {}  # the current version first
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving: list[_Host] = []
        self.versions = Versions()

    async def open(self, members: Members) -> Version:
        """Serves what is said; returns when a version that takes requests has a tokenizer: which.

        Raises what loading that raises.
        """
        self._never = asyncio.get_running_loop().create_future()
        first = _first_to_serve(members.intent)
        host = self._take(first)
        host.follow(first, members.of(first.name))
        await self._open(host)
        self.follow(members)
        return first

    def follow(self, members: Members) -> None:
        """From now on these are the versions, and their workers."""
        named = members.intent.versions
        for host in list(self._hosts.values()):
            if not any(version.serves_like(host.version) for version in named):
                self._leave(host)
        for version in named:
            if version.name not in self._hosts:
                self._spawn(self._open_at_last(self._take(version)))
            host = self._hosts[version.name]
            host.follow(version, members.of(version.name))
        self._hosts = {version.name: self._hosts[version.name] for version in named}
        self._tell()

    async def close(self) -> None:
        """Ends all sessions."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for host in [*self._hosts.values(), *self._leaving]:
            if host.is_open:
                await host.router.close()

    def cut(self) -> int:
        """Ends all requests with an error that tells of the shutdown; how many there were."""
        hosts = [*self._hosts.values(), *self._leaving]
        return sum(host.router.cut(SHUT_DOWN) for host in hosts if host.is_open)

    def routers(self) -> Mapping[str, Router]:
        """Open routers by version, the current version's first."""
        return {name: host.router for name, host in self._hosts.items() if host.is_open}

    def reports(self) -> dict[str, VersionReport]:
        """The state of each version, for the controller."""
        return {
            name: VersionReport(
                missing=host.missing(),
                num_requests=self.versions.num_requests(name),
                fingerprint=host.router.fingerprint(),
            )
            for name, host in self._hosts.items()
        }

    def _take(self, version: Version) -> _Host:
        self._hosts[version.name] = host = _Host(version, self._new_router(), [])
        return host

    async def _open(self, host: _Host) -> None:
        text = await asyncio.to_thread(self._load_text, host.version)
        if self._hosts.get(host.version.name) is not host:  # it has gone meanwhile
            return
        await host.router.open()
        host.text, host.is_open = text, True
        host.router.follow(host.addresses)
        log.info("version %s is served", host.version.name)

    async def _open_at_last(self, host: _Host) -> None:
        while True:
            try:
                await self._open(host)
                self._tell()
                return
            except Exception as error:  # whatever it was, it is tried again and told
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
        """When the last of its requests is over, and no other can be given to it."""
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
        served = (host.served() for host in self._hosts.values())
        table = tuple(each for each in served if each is not None)
        if table:  # else what was served before is the best there is
            self.versions.follow(table)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("a task of a version died: %r", error, exc_info=error)


def _first_to_serve(intent: Intent) -> Version:
    """The current one, unless it is leaving or another one has all the weight."""
    stays = [version for version in intent.versions if not version.is_leaving]
    return next((version for version in stays if version.weight), stays[0])
