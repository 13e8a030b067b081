"""Stores of KV for the operator: their contents, and the order to drop all blocks."""

from collections.abc import Sequence
from dataclasses import dataclass

from deploy.admin.schema import DropBody, StoreInfo, StoreTier
from deploy.controller.shell import PoolController
from deploy.pools.orders import OrderRefused
from deploy.pools.stores import StoreState
from deploy.pools.versions.orders import known
from engine.control import DropBlocks, StoreReport, TierReport

_SILENT = StoreReport(0, [], 0, 0, 0, 0, {}, [])


@dataclass(frozen=True, slots=True)
class DropStores:
    """An operator's order: these stores drop all blocks."""

    names: tuple[str, ...]


def stores_of(controller: PoolController) -> list[StoreInfo]:
    """Returns all stores, by name."""
    return [_store(controller, name) for name in sorted(controller.machine.stores)]


def chosen_stores(controller: PoolController, body: DropBody) -> DropStores:
    """Returns the stores that the body selects.

    Raises OrderRefused: 400 if the body contradicts itself, 404 if there is no such version or
    store, 409 if one of the stores has no session. Then no blocks are dropped.
    """
    machine = controller.machine
    if body.version is not None and body.every_version:
        raise OrderRefused("give a version or every_version, not both", status=400)
    if not machine.stores:
        raise OrderRefused("there is no store: store.memory_mib is 0", status=404)
    names = sorted(machine.stores)
    if not body.every_version:
        intent = machine.intent
        version = intent.current if body.version is None else known(intent, body.version)
        names = [name for name in names if machine.stores[name].version.name == version.name]
        if not names:
            raise OrderRefused(f"{version.name} has no store", status=404)
    reports = controller.sessions.store_reports()
    away = [name for name in names if reports.get(name) is None]
    if away:
        verb = "has" if len(away) == 1 else "have"
        raise OrderRefused(f"{', '.join(away)} {verb} no session: nothing is dropped")
    return DropStores(tuple(names))


def drop(controller: PoolController, order: DropStores) -> None:
    """Sends the order to the stores. Raises OrderRefused if a session has just ended."""
    links = controller.sessions.store_links
    missed = [name for name in order.names if not links[name].tell(DropBlocks())]
    if missed:
        raise OrderRefused(f"{', '.join(missed)} did not get the order; other stores dropped all")


def _store(controller: PoolController, name: str) -> StoreInfo:
    store, ready = controller.machine.stores[name], controller.stores.get(name)
    heard = controller.sessions.store_reports().get(name)
    report = heard or _SILENT
    link, state = controller.sessions.store_links.get(name), store.state
    if heard is None and state is StoreState.SERVING and not (link is None or link.is_late):
        state = StoreState.STARTING  # its first report has not arrived yet
    return StoreInfo(
        name=name,
        version=store.version.name,
        node=store.node,
        state=state,
        is_connected=heard is not None,
        pid=None if ready is None else ready.pid,
        address=store.address or None,
        block_size=store.version.worker.block_size,
        block_bytes=report.block_bytes,
        tiers=_tiers(report.tiers, report),
        num_peers=report.num_peers,
        num_leases=report.num_leases,
        num_new=report.num_new,
        num_starts=report.num_starts,
        counters=report.counters,
        prefixes=report.prefixes,
        why=controller.machine.restarts.why(name),
    )


def _tiers(tiers: Sequence[TierReport], report: StoreReport) -> list[StoreTier]:
    return [
        StoreTier(
            medium=tier.medium,
            num_blocks=tier.num_blocks,
            max_blocks=tier.max_blocks,
            num_bytes=tier.num_blocks * report.block_bytes,
            max_bytes=tier.max_blocks * report.block_bytes,
            offered_blocks=int(report.counters.get(f"offered_blocks:{tier.medium}", 0)),
            fault=tier.fault,
            shortage=tier.shortage,
        )
        for tier in tiers
    ]
