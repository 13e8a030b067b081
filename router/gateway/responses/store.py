"""The stored responses of a gateway, in the gateway's database.

Each method is one transaction in the storage's thread. An error of the database is logged, counted,
and becomes an error with status 503.
"""

import logging
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from engine.clock import unix_time_s
from engine.config import GatewayConfig
from router.gateway.responses import table
from router.gateway.responses.draft import ResponseDraft
from router.gateway.responses.items import Item
from router.gateway.responses.table import KeptEvent, KeptResponse, NewResponse
from router.gateway.storage import Storage
from router.inbox.api_errors import ApiError

log = logging.getLogger(__name__)

LEASE_S = 10.0  # seconds without renewal after which a response's process counts as dead
MAX_READ_BYTES = 2**20  # maximum bytes of events read per transaction

P = ParamSpec("P")
T = TypeVar("T")


class Context(NamedTuple):
    """The earlier conversation of a new response."""

    items: list[Item]  # all items of the earlier conversation
    named: dict[str, Item]  # by id: items to which the new input refers


class ResponseStore:
    """Stores responses. Only the owner of a response can read the response."""

    def __init__(
        self,
        storage: Storage,
        config: GatewayConfig,
        unix_s: Callable[[], float] = unix_time_s,
    ) -> None:
        self.config = config
        self.counters: Counter[str] = Counter()
        self._storage = storage
        self._unix_s = unix_s

    async def add(self, new: NewResponse) -> None:
        """Stores a response that has ended."""
        await self._run(table.insert, new, self.config, self._unix_s())

    async def start(self, new: NewResponse, *, has_events: bool) -> None:
        """Stores a response that starts to run in the background."""
        now_s = self._unix_s()
        end_s = now_s + LEASE_S
        await self._run(
            table.insert, new, self.config, now_s, lease_end_s=end_s, has_events=has_events
        )

    async def beat(
        self, running: dict[str, str], events: Mapping[str, Sequence[KeptEvent]]
    ) -> set[str]:
        """Stores new events, and renews the leases of running responses.

        `running` has the status of each running response, by id. Returns the ids of runs that must
        stop.
        """

        def work(db: sqlite3.Connection) -> set[str]:
            gone = table.renew(db, running, self._unix_s() + LEASE_S)
            for id, batch in events.items():
                table.add_events(db, id, batch)
            return gone

        return await self._run(work)

    async def finish(
        self,
        id: str,
        fields: dict[str, Any],
        output: Sequence[Item],
        events: Sequence[KeptEvent],
    ) -> bool:
        """Stores the end of a background response.

        Returns False if the response was cancelled or deleted.
        """
        return await self._run(table.finish, id, fields, output, events, self.config)

    async def get(self, id: str, owner: str) -> KeptResponse:
        """Returns a response. Raises ApiError with status 404 if the owner has no such response."""
        return _found(await self._run(table.get, id, owner, self._unix_s()), id)

    async def delete(self, id: str, owner: str) -> None:
        """Deletes a response. Raises ApiError with status 404 if the owner has no such response."""
        if not await self._run(table.delete, id, owner):
            raise _unknown(id)

    async def cancel(self, id: str, owner: str) -> KeptResponse:
        """Cancels a background response. Returns the response. Raises ApiError."""
        now_s = self._unix_s()

        def work(db: sqlite3.Connection) -> KeptResponse | None:
            table.cancel(db, id, owner)
            return table.get(db, id, owner, now_s)

        kept = _found(await self._run(work), id)
        if not kept.fields.get("background"):
            message = "only responses with background: true can be cancelled"
            raise ApiError(message, param="response_id", code="invalid_value")
        return kept

    async def context(
        self, previous: str | None, named: Sequence[str], owner: str, max_bytes: int
    ) -> Context:
        """Returns the earlier conversation and the items to which an input refers.

        Raises ApiError.
        """
        if previous is None and not named:
            return Context([], {})
        now_s = self._unix_s()

        def work(db: sqlite3.Connection) -> Context | None:
            items: list[Item] | None = []
            if previous is not None:
                before = table.get(db, previous, owner, now_s)
                if before is not None and before.is_alive:
                    message = f"the response {previous} is not complete yet"
                    raise ApiError(message, param="previous_response_id", code="invalid_value")
                items = table.conversation(db, previous, owner, now_s, max_bytes)
            if items is None:
                return None
            return Context(items, table.kept_items(db, named, owner))

        found = await self._run(work)
        if found is None:
            message = f"Previous response with id {previous!r} not found: it, or one before it, "
            message += "was not stored, was deleted or has expired"
            code = "previous_response_not_found"
            raise ApiError(message, param="previous_response_id", code=code)
        return found

    async def input_items(self, id: str, owner: str, max_bytes: int) -> list[Item]:
        """Returns all input items of a response, with the earlier conversation.

        Raises ApiError with status 404 if the owner has no such response.
        """
        return _found(await self._run(table.input_items, id, owner, max_bytes), id)

    async def events(
        self, id: str, owner: str, last: int
    ) -> tuple[KeptResponse | None, list[KeptEvent]]:
        """Returns the present response, or None, and its next events after number `last`."""
        now_s = self._unix_s()

        def work(db: sqlite3.Connection) -> tuple[KeptResponse | None, list[KeptEvent]]:
            kept = table.get(db, id, owner, now_s)
            if kept is None:
                return None, []
            return kept, table.events_after(db, kept.number, last, MAX_READ_BYTES)

        return await self._run(work)

    async def _run(
        self,
        work: Callable[Concatenate[sqlite3.Connection, P], T],
        *args: P.args,
        **given: P.kwargs,
    ) -> T:
        try:
            return await self._storage.run(work, *args, **given)
        except sqlite3.Error as error:
            self.counters["fault"] += 1
            log.exception("the store of responses failed")
            message = f"the store of responses failed: {error}"
            raise ApiError(message, code="store_failed", status=503) from error


class ResponseSaver:
    """Stores one response when it has ended, unless its client has set `store` to false."""

    def __init__(self, store: ResponseStore, owner: str, input: Sequence[Item]) -> None:
        self._store = store
        self._owner = owner
        self._input = input

    async def save(self, draft: ResponseDraft) -> None:
        """Stores the response. If the store fails, sets `store: false` in the response."""
        fields = draft.fields()
        if not fields["store"]:
            return
        try:
            await self._store.add(self.record(draft))
        except ApiError as error:
            self._store.counters["not_kept"] += 1
            log.warning("the response %s is not kept: %s", draft.id, error.message)
            draft.remove()

    def record(self, draft: ResponseDraft) -> NewResponse:
        """Returns the data to be stored for the present response."""
        fields = draft.fields()
        previous = fields["previous_response_id"]
        return NewResponse(draft.id, self._owner, previous, fields, self._input, [*draft.items])


def _found(found: T | None, id: str) -> T:
    if found is None:
        raise _unknown(id)
    return found


def _unknown(id: str) -> ApiError:
    message = f"Response with id {id[:64]!r} not found."
    return ApiError(message, param="response_id", code="not_found", status=404)
