"""Clients' hints reach each store that is connected to the router, and no worker."""

import pytest

from engine.messages import HASH_BYTES, PinBlocks, Role, SessionEnd, SessionUse, StoreHint
from router import links
from router.gateway.hints.claims import SessionClaim
from router.gateway.hints.uses import notes_of
from router.service import Router
from tests.kits.router.scripted_workers import (
    LAYOUT,
    ScriptedWorker,
    follow,
    request,
    run,
    serving,
    until,
)

END = SessionEnd("key", "session")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(links, "RETRY_EVERY_S", 0.05)


def heard(worker: ScriptedWorker) -> list[StoreHint]:
    return [message for message in worker.received if isinstance(message, StoreHint)]


def test_every_store_gets_hints_in_order_and_no_worker_gets_any():
    async def test() -> None:
        worker = ScriptedWorker()
        stores = [ScriptedWorker(name, Role.STORE) for name in ("s0", "s1")]
        async with serving(worker, *stores) as router:
            assert router.store_block_size() == LAYOUT.block_size
            req = request(prompt=tuple(range(9)))
            token_ids, _ = await follow(router, req)
            notes = notes_of(SessionClaim("key", "session"), LAYOUT.block_size, [req])
            use = notes.use(0, req.token_ids, token_ids)
            assert isinstance(use, SessionUse)
            hints = [use, PinBlocks("key", [bytes(HASH_BYTES)]), END]
            for hint in hints:
                router.tell_stores(hint)
            for store in stores:
                await until(lambda store=store: heard(store) == hints, "the store heard all")
            assert heard(worker) == []

    run(test())


def test_without_a_store_there_is_no_block_size_and_a_hint_goes_nowhere():
    async def test() -> None:
        worker = ScriptedWorker()
        async with serving(worker) as router:
            assert router.store_block_size() is None
            router.tell_stores(END)
            await follow(router, request())
            assert heard(worker) == []

    run(test())


def test_a_store_that_is_lost_is_not_told_and_hears_again_when_it_is_back():
    async def test() -> None:
        store, worker = ScriptedWorker("s0", Role.STORE), ScriptedWorker()
        async with serving(worker, store) as router:
            store.session.broken.set()
            await until(lambda: len(store.sessions) == 2, "the store is linked again")
            await until(lambda: told(router, store), "the new session heard the hint")

    run(test())


def told(router: Router, store: ScriptedWorker) -> bool:
    """Sends a message to a connected store.

    Returns True once its latest session has received it.
    """
    if router.store_block_size() is not None:
        router.tell_stores(END)
    return END in heard(store)
