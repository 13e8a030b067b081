"""Runs a store: the shell around a `StoreMachine`.

    event loop       sessions of gateways and the controller, sessions with workers, the machine,
                     completions of the disk
    transfer thread  the endpoint: leases and pulls, as in a worker

A store learns its fingerprint and layout from the first worker that computes prompts. Until then
the store refuses gateways. After that the store pulls blocks only from workers with the same
fingerprint and layout.

After each event, first the table of the slab is updated, then effects are performed, then block
events are published. So a slot's header is cleared before the slot is overwritten.
"""

import asyncio
import logging
import math
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import cast

import msgspec

from deploy.base.slab import StoreSlab
from deploy.store.control import StoreControl
from deploy.store.peers import StorePeers
from deploy.store.tiers import DiskShelf, LowerTier, ObjectShelf
from deploy.worker.block_publisher import BlockPublisher
from deploy.worker.gateway_sessions import GatewaySessions
from deploy.worker.process_facts import cpu_s, process_gauges
from engine.clock import Clock
from engine.config import StoreConfig, StoreEviction, Transport
from engine.control import Members, PrefixUse, StoreReport, TierReport
from engine.errors import BatonError, ConfigError
from engine.messages import (
    PROTOCOL_VERSION,
    BlocksOffered,
    EventsAddress,
    GatewayId,
    Hello,
    Incarnation,
    Refused,
    Role,
    SetRole,
    ToWorker,
    TransferAddress,
    Welcome,
    WorkerId,
    encode_frame,
)
from engine.net.trust import Secret
from engine.worker.block_events import BlockEvent, EventLog, Medium
from engine.worker.blocks import BlockHash, BlockId, Stored
from engine.worker.events import (
    Emit,
    Event,
    FromGateway,
    GatewayLost,
    LeaseEnded,
    PullDone,
    PullFailed,
)
from kvtransfer.endpoint import EndpointConfig, TransferEndpoint
from kvtransfer.memory import SharedMemory
from kvtransfer.messages import Identity
from kvtransfer.store.disk.format import RecoveredBlocks
from kvtransfer.store.disk.slabs import identity_directory, remove_directory
from kvtransfer.store.disk.tier import DiskTier
from kvtransfer.store.events import (
    AskPeer,
    DropAll,
    EraseAll,
    EraseBlock,
    FromPeer,
    LoadBlock,
    PeerJoined,
    PeerLost,
    PeerNews,
    StoreEffect,
    StoreEvent,
    StoreTick,
    WriteBlock,
)
from kvtransfer.store.eviction.leaf_lru import LeafLru
from kvtransfer.store.eviction.leaf_worth import LeafWorth
from kvtransfer.store.eviction.seam import Eviction
from kvtransfer.store.eviction.sessions import HintBudget
from kvtransfer.store.intake import IntakePace
from kvtransfer.store.machine import StoreMachine, StoreTerms
from kvtransfer.store.objects.tier import ObjectLimits, ObjectTier
from kvtransfer.store.shelf import Shelf

log = logging.getLogger(__name__)

REPORT_EVERY_S = 1.0
OPEN_DISK_EVERY_S = 5.0  # interval of attempts to open the disk tier after a failure
SWEEP_EVERY_S = 0.25  # longest time between two ticks of the machine
LEAST_SLEEP_S = 1e-3
TOP_PREFIXES = 20
MAX_OBJECT_BLOCKS = 4_000_000


@dataclass(frozen=True, slots=True)
class StoreResources:
    """The resources that the keeper passes to the store's process: memory that outlives the
    process, and the ports of the previous process.
    """

    slab: SharedMemory
    table: SharedMemory
    port: int = 0
    control_port: int = 0
    num_starts: int = 1


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """The name, version and secret by which a store's peers identify it."""

    name: WorkerId
    version: str  # version of the model
    secret: Secret
    host: str = "127.0.0.1"
    transport: Transport = Transport.AUTO


class _Running:
    """The parts of a store that exist once the layout is known."""

    def __init__(
        self,
        info: Welcome,
        slab: StoreSlab,
        endpoint: TransferEndpoint,
        address: TransferAddress,
        incarnation: Incarnation,
    ) -> None:
        self.info = info
        self.slab = slab
        self.endpoint = endpoint
        self.address = address
        self.incarnation = incarnation
        self.tiers: dict[Medium, LowerTier] = {}
        self.machine: StoreMachine
        self.publisher: BlockPublisher
        self.events: EventsAddress

    def follow_up(
        self, effects: list[StoreEffect], peers: StorePeers, gateways: GatewaySessions
    ) -> None:
        """Updates the slab's table, then performs the effects, then publishes block events."""
        news = self.machine.pop_events()
        for item in news:
            if item.medium != Medium.HOST:
                continue
            if isinstance(item, Stored):
                slot = self.machine.holdings.memory.find(item.block_hash)
                if slot is not None:
                    self.slab.put(slot, item.block_hash, item.parent)
            else:
                self.slab.clear(item.block_hash)
        frames: dict[GatewayId, list[Emit]] = {}
        for effect in effects:
            match effect:
                case Emit():
                    frames.setdefault(effect.gateway_id, []).append(effect)
                case AskPeer(peer_id, message):
                    peers.ask(peer_id, message)
                case LoadBlock():
                    self.tiers[effect.medium].load(effect)
                case WriteBlock():
                    self.tiers[effect.medium].write(effect)
                case EraseBlock():
                    self.tiers[effect.medium].erase(effect)
                case EraseAll(medium):
                    self.tiers[medium].erase_all()
                case _:
                    self.endpoint.perform(effect)
        if news:
            self.publisher.publish(news)
        for gateway_id, emitted in frames.items():
            gateways.post(gateway_id, encode_frame([each.message for each in emitted]))

    def gauges(self) -> dict[str, float]:
        """Returns the gauges of the process and of the store's tiers."""
        found = process_gauges()
        for medium, tier in self.tiers.items():
            if tier.pace.is_known:
                found[f"load_fixed_s:{medium}"] = tier.pace.fixed_s
                found[f"load_block_s:{medium}"] = tier.pace.block_s
        for medium, shelf in self.machine.holdings.shelves.items():
            found[f"store_blocks:{medium}"] = len(shelf)
        return found

    def welcome(self, name: WorkerId) -> Welcome:
        """Returns the store's introduction to gateways."""
        return Welcome(
            version=PROTOCOL_VERSION,
            worker_id=name,
            incarnation=self.incarnation,
            role=Role.STORE,
            fingerprint=self.info.fingerprint,
            layout=self.info.layout,
            num_blocks=self.slab.num_slots,
            max_running=0,
            kv_wire_dtype=self.info.kv_wire_dtype,
            events=self.events,
            kernels=self.info.kernels,
        )

    def report(self, faults: Mapping[Medium, str]) -> StoreReport:
        """Returns the store's report from the machine's state.

        `faults` has the reasons why tiers could not be opened.
        """
        machine, holdings = self.machine, self.machine.holdings
        tiers = [
            _tier_report(medium, shelf, holdings.off.get(medium), self.tiers.get(medium))
            for medium, shelf in holdings.shelves.items()
        ]
        tiers += [TierReport(medium, 0, 0, why) for medium, why in faults.items()]
        roots = machine.offers.roots.most_common(TOP_PREFIXES)
        return StoreReport(
            block_bytes=self.info.layout.block_bytes,
            tiers=tiers,
            num_peers=0,
            num_leases=len(machine.offers.leases),
            num_new=machine.intake.num_new,
            num_starts=0,
            counters=machine.counters,
            prefixes=[PrefixUse(root.hex(), number) for root, number in roots],
        )


class StoreHost:
    """Runs a store from `open` to `close`. `on_crash` must end the process."""

    def __init__(
        self,
        identity: StoreIdentity,
        config: StoreConfig,
        place: StoreResources,
        *,
        clock: Clock,
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._identity = identity
        self._config = config
        self._place = place
        self._clock = clock
        self._on_crash = on_crash
        self._run: _Running | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._faults: dict[Medium, str] = {}  # by tier: why it could not be opened
        self._is_closed = False
        self._is_retired = False  # True once all its blocks have to be deleted
        self._gateways = GatewaySessions(
            identity.secret,
            identity.host,
            welcome=self._welcome,
            listen=lambda gateway_id: _StoreListener(gateway_id, self._handle_now),
            on_lost=lambda gateway_id: self._handle_now(GatewayLost(gateway_id)),
            port=place.port,
        )
        self._peers = StorePeers(
            GatewayId(f"{identity.name}-{secrets.token_hex(6)}"),
            secret=identity.secret,
            clock=clock,
            listener=self,
        )
        self.control = StoreControl(
            identity.name,
            identity.secret,
            identity.host,
            on_members=self._follow,
            on_drop=self._drop_all,
            on_retire=self._retire,
            report=self._store_report,
            port=place.control_port,
        )

    async def open(self) -> tuple[str, str]:
        """Starts to listen. Returns the addresses for gateways and for the controller."""
        self._loop = asyncio.get_running_loop()
        address = await self._gateways.open()
        return address, await self.control.open()

    async def close(self) -> None:
        """Ends sessions and threads. Memory and disk keep their blocks."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        await self._peers.close()
        await self.control.close()
        await self._gateways.close()
        run = self._run
        if run is None:
            return
        self._opening.cancel()
        await asyncio.gather(self._opening, return_exceptions=True)
        run.publisher.close()
        await asyncio.to_thread(run.endpoint.close)
        for tier in run.tiers.values():
            await tier.close()
        run.machine.validate()
        if self._is_retired and self._config.disk is not None:
            await asyncio.to_thread(_remove_disk, Path(self._config.disk), run.info)

    # ------------------------------------------------------------ peers

    def _follow(self, members: Members) -> None:
        """Opens sessions with this version's workers on this host, and with its other stores."""
        own = self._identity
        host = own.host
        workers = [m.address for m in members.of(own.version) if _host_of(m.address) == host]
        stores = [m.address for m in members.stores_of(own.version) if m.worker_id != own.name]
        self._peers.follow([*workers, *stores])

    def admits(self, info: Welcome) -> bool:
        """Learns the layout from the first worker with prompts; admits only peers of its kind."""
        if self._run is None:
            is_model = info.role.prefills or info.is_fluid
            if is_model and info.pulls_unchanged:
                try:
                    self._start(info)
                except (BatonError, OSError) as error:
                    log.error("the store cannot keep blocks of %s: %s", info.worker_id, error)
                    self._on_crash(error)
        run = self._run
        if run is None:
            return False
        return _kind_of(info) == _kind_of(run.info) and info.pulls_unchanged

    def joined(self, info: Welcome) -> None:
        """Starts to track a peer's blocks."""
        self._handle_now(PeerJoined(info.worker_id, info.role is Role.STORE))

    def lost(self, peer_id: WorkerId) -> None:
        """Stops tracking a peer's blocks."""
        self._handle_now(PeerLost(peer_id))

    def news(self, peer_id: WorkerId, events: Collection[BlockEvent]) -> None:
        """Handles a peer's block events."""
        self._handle_now(PeerNews(peer_id, tuple(events)))

    def offered(self, peer_id: WorkerId, message: BlocksOffered) -> None:
        """Handles a worker's answer to a request for blocks."""
        self._handle_now(FromPeer(peer_id, message))

    # ------------------------------------------------------------ the start

    def _start(self, info: Welcome) -> None:
        """Opens memory, endpoint, tiers and machine for this fingerprint and layout."""
        own, config, clock = self._identity, self._config, self._clock
        identity = _digest(info)
        block_bytes = info.layout.block_bytes
        slab = StoreSlab(
            self._place.slab, self._place.table, identity=identity, block_bytes=block_bytes
        )
        if not slab.num_slots:
            raise ConfigError(f"store.memory_mib holds no block of {block_bytes} bytes")
        incarnation = Incarnation(secrets.token_hex(8))
        endpoint = TransferEndpoint(
            _endpoint_config(own, incarnation, info),
            pool=slab.pool,
            clock=clock,
            on_event=self._on_transfer,
            on_crash=self._on_crash,
        )
        run = _Running(info, slab, endpoint, endpoint.open(), incarnation)
        memory = _shelf_of(config, slab.num_slots, slab.recover())
        shelves = {Medium.HOST: memory}
        self._open_objects(run, shelves, identity, block_bytes)
        rate = config.take_mib_per_s
        pace = IntakePace(
            bytes_per_s=math.inf if rate is None else rate * 2**20, copies=max(config.copies, 1)
        )
        terms = StoreTerms(
            name=f"{own.name}.{incarnation}",
            block_size=info.layout.block_size,
            block_bytes=block_bytes,
            address=run.address,
            pace=pace,
            writes=config.writes,
        )
        run.machine = StoreMachine(terms, shelves)
        run.publisher = BlockPublisher(
            EventLog(block_size=info.layout.block_size),
            worker_id=own.name,
            incarnation=incarnation,
            secret=own.secret,
            clock=clock,
            host=own.host,
        )
        run.events = run.publisher.open()
        run.publisher.publish(
            [
                Stored(block, parent, (), medium)
                for medium, shelf in shelves.items()
                for block, parent in shelf.links()
            ]
        )
        self._run = run
        found = ", ".join(f"{len(shelf)} on {medium}" for medium, shelf in shelves.items())
        log.info("keeps blocks of %s: %d slots, %s", info.fingerprint, slab.num_slots, found)
        self._opening = self._loop.create_task(self._open_disk(run, identity, block_bytes))
        self._opening.add_done_callback(self._on_opened)
        self._timer = self._loop.call_later(SWEEP_EVERY_S, self._on_time)
        self._reporting = self._loop.call_later(REPORT_EVERY_S, self._report)

    def _on_opened(self, task: "asyncio.Task[None]") -> None:
        """Ends the process if the opening failed because of a bug."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_crash(error)

    async def _open_disk(self, run: _Running, identity: bytes, block_bytes: int) -> None:
        """Opens the disk tier in the background, since this takes seconds. Retries failures."""
        directory = self._config.disk
        if directory is None:
            return
        max_bytes = int(self._config.disk_gib * 2**30)
        folder, never = identity_directory(Path(directory), identity), self._loop.create_future()

        def opened() -> tuple[DiskTier, Shelf]:
            tier = DiskTier(folder, identity=identity, block_bytes=block_bytes, max_bytes=max_bytes)
            found = tier.open(self._clock.now_s())
            return tier, _shelf_of(self._config, tier.num_slots, found, max_slots=tier.max_slots)

        while True:
            try:
                tier, shelf = await asyncio.to_thread(opened)
                break
            except BatonError as error:  # the store serves without the disk tier
                if self._faults.get(Medium.DISK) != str(error):
                    log.error("blocks are not kept on disk for now: %s", error)
                self._faults[Medium.DISK] = str(error)
            await asyncio.wait([never], timeout=OPEN_DISK_EVERY_S)
        self._faults.pop(Medium.DISK, None)
        log.info("%d blocks are on disk", len(shelf))
        run.tiers[Medium.DISK] = DiskShelf(
            tier, run.slab.pool.blocks, clock=self._clock, on_event=self._handle_now
        )
        run.machine.add_tier(Medium.DISK, shelf)
        self._handle_now(StoreTick())

    def _open_objects(
        self, run: _Running, shelves: dict[Medium, Shelf], identity: bytes, block_bytes: int
    ) -> None:
        url = self._config.objects
        if url is None:
            return
        max_bytes = int(self._config.objects_gib * 2**30)
        tier = ObjectTier(
            url,
            identity,
            block_bytes=block_bytes,
            max_bytes=max_bytes,
            limits=ObjectLimits(),
            clock=self._clock,
        )
        memory = run.slab.pool.blocks
        try:
            objects = ObjectShelf(tier, memory, clock=self._clock, on_event=self._handle_now)
        except BatonError as error:
            log.error("blocks are not kept as objects: %s", error)
            self._faults[Medium.OBJECT] = str(error)
            return
        num_slots = min(max_bytes // block_bytes, MAX_OBJECT_BLOCKS)
        shelves[Medium.OBJECT] = _shelf_of(self._config, num_slots)
        run.tiers[Medium.OBJECT] = objects

    # ------------------------------------------------------------ events and effects

    def _handle_now(self, event: StoreEvent) -> None:
        """Feeds an event to the machine, and follows its effects. Called on the event loop."""
        run = self._run
        if run is None or self._is_closed:
            return
        try:
            effects = run.machine.handle(event, self._clock.now_s())
            run.follow_up(effects, self._peers, self._gateways)
        except Exception as error:  # a bug: the store's state may be wrong, so the process must end
            self._on_crash(error)
            raise

    def _on_transfer(self, event: Event) -> None:
        """Handles a report of the transfer thread."""
        assert isinstance(event, LeaseEnded | PullDone | PullFailed)
        self._loop.call_soon_threadsafe(self._handle_now, event)

    def _on_time(self) -> None:
        run = self._run
        assert run is not None
        self._handle_now(StoreTick())
        wake_s = run.machine.next_wake_s()
        wait_s = SWEEP_EVERY_S if wake_s is None else wake_s - self._clock.now_s()
        wait_s = min(max(wait_s, LEAST_SLEEP_S), SWEEP_EVERY_S)
        if not self._is_closed:
            self._timer = self._loop.call_later(wait_s, self._on_time)

    def _drop_all(self) -> None:
        self._handle_now(DropAll())

    def _retire(self) -> None:
        """Retires the store: objects are deleted now, blocks on disk when the store closes."""
        log.warning("the version is over: its blocks are removed")
        self._is_retired = True
        if self._run is not None and Medium.OBJECT in self._run.tiers:
            self._run.tiers[Medium.OBJECT].erase_all()

    # ------------------------------------------------------------ what it says of itself

    def _welcome(self) -> Welcome | Refused:
        run = self._run
        if run is None:
            return Refused("no worker has told this store its layout yet")
        return run.welcome(self._identity.name)

    def _report(self) -> None:
        """Sends the store's load report to all gateways."""
        run = self._run
        if run is None or self._is_closed:
            return
        self._reporting = self._loop.call_later(REPORT_EVERY_S, self._report)
        counted = {**run.endpoint.counters(), **self._gateways.refused, "cpu_seconds": cpu_s()}
        for medium, tier in run.tiers.items():
            counted |= {f"{medium}_{name}": count for name, count in tier.counters().items()}
        load = run.machine.load(run.endpoint.source.num_leases, counted)
        load = msgspec.structs.replace(
            load, num_event_batches=run.publisher.num_batches, gauges=run.gauges()
        )
        self._gateways.post_all(encode_frame([load]))

    def _store_report(self) -> StoreReport:
        run = self._run
        found = StoreReport(0, [], 0, 0, 0, 0, {}, []) if run is None else run.report(self._faults)
        return msgspec.structs.replace(
            found,
            num_peers=self._peers.num_open,
            num_starts=self._place.num_starts,
            is_retired=self._is_retired,
        )


class _StoreListener:
    """Handles the messages of one gateway."""

    def __init__(self, gateway_id: GatewayId, handle: Callable[[StoreEvent], None]) -> None:
        self._gateway_id = gateway_id
        self._handle = handle

    def receive(self, message: ToWorker) -> None:
        assert not isinstance(message, Hello)
        if isinstance(message, SetRole):
            log.warning("a store cannot become a %s worker", message.role)
            return
        self._handle(FromGateway(self._gateway_id, message))

    def close(self) -> None:
        pass


def _endpoint_config(own: StoreIdentity, incarnation: Incarnation, info: Welcome) -> EndpointConfig:
    """Returns the settings of an endpoint for blocks like those of the worker with this `info`."""
    return EndpointConfig(
        worker_id=own.name,
        incarnation=incarnation,
        identity=Identity(_raw_fingerprint(info), info.layout, kv_wire_dtype=info.kv_wire_dtype),
        secret=own.secret,
        transport=own.transport,
        host=own.host,
    )


def _shelf_of(
    config: StoreConfig,
    num_slots: int,
    found: RecoveredBlocks | None = None,
    *,
    max_slots: int | None = None,
) -> Shelf:
    """Returns a shelf that has the blocks in `found`. The shelf may grow to `max_slots` slots."""
    shelf = Shelf(num_slots, _eviction(config, max_slots or num_slots))
    if found is not None and len(found):
        slots = cast("dict[BlockHash, BlockId]", found.slot_by_hash())
        parents = cast("dict[BlockHash, BlockHash | None]", found.parent_by_hash())
        shelf.put_all(slots, parents)
    return shelf


def _remove_disk(directory: Path, info: Welcome) -> None:
    """Removes this store's blocks on disk, because its version was removed."""
    folder = identity_directory(directory, _digest(info))
    try:
        remove_directory(folder)
    except BatonError as error:  # another version uses the same blocks, or the disk has failed
        log.warning("%s is not removed: %s", folder, error)


def _tier_report(
    medium: Medium, shelf: Shelf, fault: str | None, tier: LowerTier | None
) -> TierReport:
    """Returns a tier's report: its used blocks, and its maximum, which a full disk may reduce."""
    shortage = None if tier is None else tier.shortage()
    most = 0 if tier is None or shortage is not None else tier.most_blocks
    return TierReport(medium, len(shelf), max(shelf.num_slots, most), fault, shortage)


def _eviction(config: StoreConfig, num_slots: int) -> Eviction:
    if config.eviction is StoreEviction.LRU:
        return LeafLru()
    budget = HintBudget.of_tier(num_slots)
    pinned_blocks = int(config.pinned_share * num_slots)
    return LeafWorth(num_slots, replace(budget, pinned_blocks=pinned_blocks))


def _raw_fingerprint(info: Welcome) -> str:
    """Returns the fingerprint without the wire format, as workers compare it."""
    wire = info.kv_wire_dtype
    return info.fingerprint if wire is None else info.fingerprint.removesuffix(f"-wire_{wire}")


def _kind_of(info: Welcome) -> tuple[object, ...]:
    return info.fingerprint, info.layout


def _digest(info: Welcome) -> bytes:
    """Returns 16 bytes that differ between models and between layouts."""
    layout = msgspec.msgpack.encode(info.layout)
    return blake2b(info.fingerprint.encode() + b"\0" + layout, digest_size=16).digest()


def _host_of(address: str) -> str:
    return address.rsplit(":", 1)[0]
