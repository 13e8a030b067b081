"""Stores the operators' intent for the case that the controller and all gateways are lost.

Gateways know the intent too, and send the intent to the next controller. The store is used if no
gateway is left: after `kill -9` of everything, a reboot, or the death of all gateways.

1. Each change of the intent is written at once, in a thread. A failed write is retried every
   second.
2. A starting controller reads the stored intent. It uses the stored intent or the gateways' intent,
   whichever belongs to the higher version of the members.
3. A stored intent is dropped if the declaration (model, settings, pools at the start) has changed
   since it was stored: the operator has edited the command or the file.
4. An orderly stop of the deployment removes the stored intent.

A store that cannot be read or written is counted and reported, and never stops a deployment.
"""

import asyncio
import hashlib
import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from deploy.base.reasons import explain
from deploy.controller.plan import ControllerPlan
from deploy.controller.tasks import ControllerTasks, pause
from deploy.pools.events import OrdersStored, PoolEvent
from engine.control import Intent, Members
from engine.errors import BatonError

log = logging.getLogger(__name__)

FORMAT = 1  # version of the record's format
RETRY_EVERY_S = 1.0
MAX_NAME = 100  # maximum number of characters in a file's name


class BadIntents(BatonError):
    """The stored record cannot be used; the text says why."""


class KeptIntent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The stored record: the intent, the version of its members, and the declaration's digest."""

    format: int
    declared: str
    version: int
    intent: Intent


class _Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sha256: str
    kept: msgspec.Raw


def declared_by(plan: ControllerPlan) -> str:
    """Returns a digest of the operator's declaration: model, settings and pools at the start."""
    config = plan.config
    told = msgspec.json.encode([plan.first_versions, config.pools, config.update, config.planner])
    return hashlib.sha256(told).hexdigest()


def encode_kept(kept: KeptIntent) -> bytes:
    """Encodes a record with its checksum."""
    told = msgspec.json.encode(kept)
    return msgspec.json.encode(_Sealed(hashlib.sha256(told).hexdigest(), msgspec.Raw(told)))


def decode_kept(record: bytes) -> KeptIntent:
    """Decodes a record. Raises BadIntents."""
    try:
        sealed = msgspec.json.decode(record, type=_Sealed)
        told = bytes(sealed.kept)
        if hashlib.sha256(told).hexdigest() != sealed.sha256:
            raise BadIntents("its checksum is wrong")
        kept = msgspec.json.decode(told, type=KeptIntent)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadIntents(f"it is damaged: {error}") from error
    if kept.format != FORMAT:
        raise BadIntents(f"it has format {kept.format}, and this is {FORMAT}")
    return kept


def latest(kept: KeptIntent | None, heard: Members | None) -> Members | None:
    """Returns the stored members or the gateways' members, whichever are newer.

    Stored members have no workers.
    """
    if kept is None or (heard is not None and heard.version >= kept.version):
        return heard
    return Members(kept.version, (), kept.intent)


class IntentStore(Protocol):
    """A store of one record. All methods may block, so they are called in a thread."""

    def read(self) -> bytes | None:
        """Returns the record, or None if no record is stored. Raises OSError or BadIntents."""
        ...

    def write(self, record: bytes) -> None:
        """Replaces the record atomically. Raises OSError or BadIntents."""
        ...

    def remove(self) -> None:
        """Removes the record, if it exists. Later writes do nothing.

        Raises OSError or BadIntents.
        """
        ...


class IntentFile:
    """A store in a file.

    A write replaces the file atomically, and the file is on disk when `write` returns.
    """

    def __init__(self, path: Path) -> None:
        """Other users must not be able to write to the file's directory."""
        self.path = path
        self._is_removed = False
        self._lock = threading.Lock()  # a write may still run in another thread during `remove`

    def __str__(self) -> str:
        return str(self.path)

    def read(self) -> bytes | None:
        """Returns the record."""
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return None

    def write(self, record: bytes) -> None:
        """Writes a new file, then renames it."""
        with self._lock:
            if not self._is_removed:
                self._write(record)

    def remove(self) -> None:
        """Removes the file."""
        with self._lock:
            self._is_removed = True
            self.path.unlink(missing_ok=True)

    def _write(self, record: bytes) -> None:
        partial = self.path.with_suffix(".new")
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        try:
            with open(os.open(partial, flags, 0o600), "wb") as file:
                file.write(record)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.path)
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(self.path)) from error


def orders_path(plan: ControllerPlan, environment: Mapping[str, str]) -> Path | None:
    """Returns the path of a deployment's file of orders. Deployments of the same name use one file.

    None if the deployment has neither a name nor a fixed port. The folder is systemd's
    $STATE_DIRECTORY, else $BATON_RUN_DIR, else `baton` in $XDG_STATE_HOME or in ~/.local/state.
    """
    admin, gateway = plan.config.admin, plan.config.gateway
    if admin.name is None and not gateway.port:
        return None
    words = [admin.name or gateway.host, *([str(gateway.port)] if gateway.port else [])]
    name = re.sub(r"[^A-Za-z0-9.-]", "_", "-".join(words))[:MAX_NAME]
    if chosen := environment.get("STATE_DIRECTORY") or environment.get("BATON_RUN_DIR"):
        folder = Path(chosen.split(":")[0])
    else:
        state = environment.get("XDG_STATE_HOME") or "~/.local/state"
        folder = Path(state).expanduser() / "baton"
    return folder / f"{name}.orders"


def remove_orders(store: IntentStore) -> None:
    """Removes the record at an orderly stop. The next start then uses the declaration."""
    try:
        store.remove()
    except (OSError, BadIntents) as error:
        log.error("the stored orders in %s cannot be removed: %s", store, error)


class IntentWriter:
    """Reads the store once, then writes each change of the intent.

    The controller owns the writer.
    """

    def __init__(
        self,
        store: IntentStore | None,
        *,
        declared: str,
        tasks: ControllerTasks,
        report: Callable[[str], None],
        handle: Callable[[PoolEvent], None],
    ) -> None:
        """Without a `store`, no intent is read or written."""
        self.counters: Counter[str] = Counter()
        self.store = store
        self._declared = declared
        self._tasks = tasks
        self._report = report
        self._handle = handle
        self._wanted: KeptIntent | None = None  # the latest intent, which is not written yet
        self._written: KeptIntent | None = None
        # True once an earlier record has been replaced, or is about to be.
        self.has_replaced = False
        self._changed = asyncio.Event()

    async def read(self) -> KeptIntent | None:
        """Returns the intent that was stored under the same declaration, or None."""
        if self.store is None:
            return None
        try:
            record = await self._tasks.in_thread(self.store.read)
            kept = None if record is None else decode_kept(record)
        except (OSError, BadIntents) as error:
            self.counters["orders not read"] += 1
            log.error("the stored orders cannot be used: %s", error)
            self._report(f"the stored orders in {self.store} cannot be used: {explain(error)}")
            return None
        if kept is not None and kept.declared != self._declared:
            self._report(f"the stored orders in {self.store} are of another declaration: dropped")
            return None
        return kept

    def record(self, members: Members) -> None:
        """Queues the intent of the members for writing, if the intent has changed."""
        wanted, intent = self._wanted, members.intent
        if self.store is not None and (wanted is None or wanted.intent != intent):
            self._wanted = KeptIntent(FORMAT, self._declared, members.version, intent)
            self._changed.set()

    async def run(self) -> None:
        """Writes each queued change. After a failure, retries every second."""
        while self.store is not None:
            await self._changed.wait()
            self._changed.clear()
            while self._written != self._wanted:
                await self._write(self.store)

    async def _write(self, store: IntentStore) -> None:
        wanted = self._wanted
        assert wanted is not None
        self.has_replaced = True
        try:
            await self._tasks.in_thread(store.write, encode_kept(wanted))
        except (OSError, BadIntents) as error:
            self.counters["orders not stored"] += 1
            log.error("orders cannot be stored: %s", error)
            self._handle(OrdersStored(f"orders cannot be stored: {explain(error)}"))
            await pause(RETRY_EVERY_S)
        else:
            self._written = wanted
            self._handle(OrdersStored(None))
