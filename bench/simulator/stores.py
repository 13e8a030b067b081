"""Simulates a store: the real store machine, with prices in place of memory, disk and object store.

The store receives the block events of its node's workers at the same time as the gateway. It asks
these workers for blocks and pulls the blocks. Workers also pull from the store. All pulls go
through `transfers`, at the profile's price. The lower tiers have their own prices (see `tiers`).

The machine handles each event at once. It is woken at the times that it requests. While it waits
until it may take in a batch, it is woken at least every `RETRY_S`.

A live store measures the read time of its disk and reports it to gateways. A simulated store
reports the price of a read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from bench.simulator.hardware import HardwareProfile
from bench.simulator.tiers import SimulatedStores, SimulatedTier
from bench.simulator.transfers import Future, Rank, Transfers
from bench.simulator.workers import REPORT_EVERY_S, Frame, FrameListener, Said
from engine.messages import (
    PROTOCOL_VERSION,
    BlocksOffered,
    Cancel,
    Incarnation,
    OfferBlocks,
    Role,
    SeqId,
    TransferAddress,
    Welcome,
    WorkerId,
)
from engine.worker.block_events import BlockEvent, Medium, events_of
from engine.worker.events import (
    Emit,
    Event,
    FromGateway,
    LeaseEnded,
    PullDone,
    PullFailed,
)
from engine.worker.intake import ReadPrompt
from kvtransfer.store.events import (
    AskPeer,
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
from kvtransfer.store.intake import IntakePace
from kvtransfer.store.machine import StoreMachine, StoreTerms
from kvtransfer.store.shelf import Shelf

RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """The work of one store: its counters, and the number of its blocks on each medium."""

    store_id: WorkerId
    counters: Mapping[str, float]
    num_held: Mapping[str, int]


class StoreListener(FrameListener, Protocol):
    """Receives the messages that a store sends to gateways and to workers."""

    def ask(self, store_id: WorkerId, worker_id: WorkerId, message: OfferBlocks | Cancel) -> None:
        """Delivers a store's message to a worker."""
        ...


class SimStore:
    """One store of the cluster: its machine, its lower tiers, and the frames that it sends."""

    def __init__(  # noqa: PLR0913 - the parts of a store
        self,
        store_id: WorkerId,
        setup: SimulatedStores,
        *,
        hardware: HardwareProfile,
        future: Future,
        transfers: Transfers,
        listener: StoreListener,
        read: ReadPrompt,
    ) -> None:
        """Sets up the store. `read` is the same as in `engine.worker.intake.Intake`."""
        self.worker_id = store_id  # name of the store as a source or sink of transfers
        self._hardware = hardware
        self._future = future
        self._transfers = transfers
        self._listener = listener
        layout = hardware.layout
        sizes = {Medium.HOST: setup.memory_blocks}
        sizes |= {medium: num for medium, (num, _) in setup.lower().items()}
        terms = StoreTerms(
            name=store_id,
            block_size=layout.block_size,
            block_bytes=layout.block_bytes,
            address=TransferAddress(store_id, Incarnation("1"), ""),
            pace=IntakePace(bytes_per_s=setup.take_bytes_per_s, copies=setup.copies),
            writes=setup.writes,
            read=read,
        )
        self.machine = StoreMachine(
            terms, {medium: Shelf(num, setup.policy(num)) for medium, num in sizes.items()}
        )
        self._tiers = {
            medium: SimulatedTier(
                medium, price, block_bytes=layout.block_bytes, future=future, on_done=self._handle
            )
            for medium, (_, price) in setup.lower().items()
        }
        self._wake_s: float | None = None
        self._next_report_s = 0.0
        self._report_planned = False
        self.reports = True

    def welcome(self) -> Welcome:
        """Returns the store's first message to the gateway."""
        return Welcome(
            version=PROTOCOL_VERSION,
            worker_id=self.worker_id,
            incarnation=Incarnation("1"),
            role=Role.STORE,
            fingerprint=self._hardware.name,
            layout=self._hardware.layout,
            num_blocks=self.machine.holdings.memory.num_slots,
            max_running=0,
        )

    def record(self) -> StoreRecord:
        """Returns the store's counters and its current number of blocks."""
        shelves = self.machine.holdings.shelves
        num_held = {str(medium): len(shelf) for medium, shelf in shelves.items()}
        return StoreRecord(self.worker_id, self.machine.counters, num_held)

    def validate(self) -> None:
        """Asserts the machine's invariants, and that there is no open lease and no running read or
        write.
        """
        self.machine.validate()
        for tier in self._tiers.values():
            tier.validate()
        assert not self.machine.offers.leases
        assert not self.machine.holdings.loads
        for medium, shelf in self.machine.holdings.shelves.items():
            counts = shelf.counts()
            assert counts.free + counts.cached == counts.total, f"{self.worker_id} leaks {medium}"

    # ------------------------------------------------------------ what comes in

    def receive(self, events: list[Event]) -> None:
        """Handles messages of the gateway, and events of leases and pulls."""
        for event in events:
            assert isinstance(event, FromGateway | LeaseEnded | PullDone | PullFailed)
            self._handle(event)

    def meet(self, peer_id: WorkerId, *, is_store: bool) -> None:
        """Starts to follow a worker of the store's node, or another store."""
        self._handle(PeerJoined(peer_id, is_store))

    def miss(self, peer_id: WorkerId) -> None:
        """Removes a worker or store that has ended."""
        self._handle(PeerLost(peer_id))

    def follow(self, peer_id: WorkerId, events: Sequence[BlockEvent]) -> None:
        """Handles block events of a followed worker or store."""
        self._handle(PeerNews(peer_id, events))

    def answered(self, peer_id: WorkerId, message: BlocksOffered) -> None:
        """Handles a worker's answer to a request for blocks."""
        self._handle(FromPeer(peer_id, message))

    # ------------------------------------------------------------ events and effects

    def _handle(self, event: StoreEvent) -> None:
        effects = self.machine.handle(event, self._future.now_s)
        said: list[Said] = []
        for effect in effects:
            self._perform(effect, said)
        news = self.machine.pop_events()
        if self.reports and not self._report_planned:
            self._report_planned = True
            at_s = max(self._next_report_s, self._future.now_s)
            self._future.plan(at_s, Rank.ROUTINE, self._on_report_due, None)
        if said or news:
            frame = Frame(said, events_of(news, self._hardware.layout.block_size))
            self._listener.on_frame(self.worker_id, frame)
        self._look_ahead()

    def _perform(self, effect: StoreEffect, said: list[Said]) -> None:
        match effect:
            case Emit(_, message):
                said.append(Said(message))
            case AskPeer(peer_id, message):
                self._listener.ask(self.worker_id, peer_id, message)
            case LoadBlock() | WriteBlock():
                self._tiers[effect.medium].submit(effect)
            case EraseBlock() | EraseAll():
                pass  # takes no simulated time
            case _:
                self._transfers.perform(self, effect)

    def _look_ahead(self) -> None:
        """Plans an earlier wake-up of the machine, if the machine requests one."""
        wake_s, now_s = self.machine.next_wake_s(), self._future.now_s
        if wake_s is None:
            return
        at_s = wake_s if wake_s > now_s else now_s + RETRY_S
        if self._wake_s is None or at_s < self._wake_s:
            self._wake_s = at_s
            self._future.plan(at_s, Rank.ROUTINE, self._on_wake, at_s)

    def _on_wake(self, at_s: float) -> None:
        if at_s == self._wake_s:  # otherwise an earlier wake-up has replaced this one
            self._wake_s = None
            self._handle(StoreTick())

    def _on_report_due(self, _: None) -> None:
        self._report_planned = False
        if not self.reports:
            return
        self._next_report_s = self._future.now_s + REPORT_EVERY_S
        gauges = {name: value for t in self._tiers.values() for name, value in t.gauges().items()}
        load = self.machine.load(self._transfers.num_leases_of(self.worker_id), {})
        report = replace(load, gauges=gauges)
        self._listener.on_frame(self.worker_id, Frame([Said(report)]))


def store_of(seq_id: SeqId) -> WorkerId:
    """Returns the store that asked for a worker's answer: the store's name is the prefix of its
    pull ids.
    """
    return WorkerId(seq_id.rpartition("-")[0])
