"""Leases of a store's blocks to workers that compute prompts, and prefetches of blocks for prompts.

A lease covers the leading blocks of a prompt that the store has on any medium. The lease opens at
once and grows as blocks are loaded, like the lease of a prompt that is being computed. So disk
reads overlap with the pull. If a block cannot be loaded, the lease is revoked; the sink keeps the
blocks that have arrived.

A lease ends by release, by the gateway's `Cancel`, by the loss of the gateway, or if its sink is
silent. A load that takes too long ends the leases that wait for the load. The load keeps its slot
until it ends.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from engine.messages import (
    GatewayId,
    LeaseId,
    LeaseRef,
    OfferPrefix,
    PrefixOffered,
    TransferAddress,
)
from engine.worker.blocks import BlockHash, BlockId
from engine.worker.events import Emit, GrowLease, OpenLease, RevokeLease
from engine.worker.intake import ReadPrompt, read_prompt
from engine.worker.offers import prefix_lease_id
from kvtransfer.store.events import LoadBlock, StoreEffect
from kvtransfer.store.holdings import Holdings

LOAD_TIMEOUT_S = 5.0  # longest wait of a lease for the load of a block, seconds
PREFETCH_SHARE = 0.25  # largest share of memory slots that concurrent prefetches may fill
MAX_ROOTS = 512  # number of prefixes whose offers are counted


@dataclass(slots=True)
class StoreLease:
    """An open lease of the store, and the number of its leading blocks that are in memory."""

    gateway_id: GatewayId
    blocks: tuple[BlockHash, ...]
    slots: tuple[BlockId, ...]
    num_ready: int = 0
    is_revoked: bool = False


class StoreOffers:
    """The open leases of one store."""

    def __init__(
        self,
        holdings: Holdings,
        *,
        block_size: int,
        address: TransferAddress,
        counters: Counter[str],
        read: ReadPrompt = read_prompt,
    ) -> None:
        """Sinks pull from `address`. `read` parses prompts; a caller with parsed prompts passes its
        own.
        """
        self._holdings = holdings
        self._block_size = block_size
        self._address = address
        self._counters = counters
        self._read = read
        self.leases: dict[LeaseId, StoreLease] = {}
        # leases that wait for a slot, because its block is being loaded
        self._waiting: dict[BlockId, list[LeaseId]] = {}
        # number of offers by the first block of the prompt
        self.roots: Counter[BlockHash] = Counter()

    def offer(self, gateway_id: GatewayId, message: OfferPrefix, now_s: float) -> list[StoreEffect]:
        """Opens a lease on the leading blocks of a prompt that this store has."""
        lease_id = prefix_lease_id(message.seq_id)
        if lease_id in self.leases:
            return []  # a repeated message gets no second answer
        # The worker must compute at least the last token: sampling needs its logits.
        num_blocks = (len(message.token_ids) - 1) // self._block_size
        hashes = self._read(message, self._block_size).block_hashes[:num_blocks]
        blocks = hashes[: self._holdings.num_leading(hashes)]
        self._holdings.use(blocks, now_s)
        slots, effects = self._gather(blocks, now_s)
        if not slots:
            self._counters["prefix_offers:not_held"] += 1
            return [*effects, Emit(gateway_id, PrefixOffered(message.seq_id, None))]
        self._counters["prefix_offers:held"] += 1
        self._note_root(blocks[0])
        lease = StoreLease(gateway_id, tuple(blocks[: len(slots)]), tuple(slots))
        self.leases[lease_id] = lease
        for block, slot in zip(lease.blocks, lease.slots, strict=True):
            if block in self._holdings.loads:
                self._waiting.setdefault(slot, []).append(lease_id)
        reference = LeaseRef(lease_id, self._address, len(slots))
        return [
            OpenLease(lease_id, len(slots)),
            *self._grow(lease_id, lease),
            *effects,
            Emit(gateway_id, PrefixOffered(message.seq_id, reference)),
        ]

    def _gather(
        self, blocks: Sequence[BlockHash], now_s: float
    ) -> tuple[list[BlockId], list[StoreEffect]]:
        """Leases a slot of memory for each block, and loads the blocks of lower tiers.

        If memory runs out, the last blocks are left out.
        """
        holdings, memory = self._holdings, self._holdings.memory
        there = [self._slot_of(block) for block in blocks]
        held = [slot for slot in there if slot is not None]
        memory.lease(held)  # leased before `take`, which could evict these blocks
        taken = holdings.take(len(blocks) - len(held))
        memory.lease(taken)
        slots: list[BlockId] = []
        effects: list[StoreEffect] = []
        left = iter(taken)
        for number, (block, slot) in enumerate(zip(blocks, there, strict=True)):
            if slot is None:
                new = next(left, None)
                if new is None:
                    self._counters["fallbacks:store_memory_short"] += 1
                    memory.end_lease([each for each in there[number:] if each is not None])
                    break
                effects.append(holdings.load(block, new, now_s))
                slot = new
            else:
                self._counters["offered_blocks:host"] += 1
            slots.append(slot)
        for effect in effects:
            assert isinstance(effect, LoadBlock)
            self._counters[f"offered_blocks:{effect.medium}"] += 1
        return slots, effects

    def _slot_of(self, block: BlockHash) -> BlockId | None:
        """Returns the memory slot of a block that is in memory or being loaded; otherwise None."""
        load = self._holdings.loads.get(block)
        return self._holdings.memory.find(block) if load is None else load.slot

    def prefetch(self, blocks: Sequence[BlockHash], now_s: float) -> list[StoreEffect]:
        """Loads leading blocks of a prompt that a worker will need soon."""
        holdings = self._holdings
        num = holdings.num_leading(blocks)
        missing = [
            block
            for block in blocks[:num]
            if block not in holdings.loads and block not in holdings.memory
        ]
        room = int(PREFETCH_SHARE * holdings.memory.num_slots) - len(holdings.loads)
        missing = missing[: max(room, 0)]
        if not missing:
            return []
        holdings.use(blocks[:num], now_s)
        here = [slot for block in blocks[:num] if (slot := holdings.memory.find(block)) is not None]
        # `take` must not evict the prompt's own blocks, so they are leased during the call
        holdings.memory.lease(here)
        slots = holdings.take(len(missing))
        holdings.memory.end_lease(here)
        self._counters["prefetched_blocks"] += len(slots)
        return [holdings.load(b, s, now_s) for b, s in zip(missing, slots, strict=False)]

    # ------------------------------------------------------------ growth and ends

    def on_loaded(self, slot: BlockId, *, is_good: bool) -> list[StoreEffect]:
        """Grows the leases that waited for a loaded slot. Revokes the leases if the load failed."""
        waiting = [
            (lease_id, self.leases[lease_id])
            for lease_id in self._waiting.pop(slot, ())
            if lease_id in self.leases
        ]
        if is_good:
            return [effect for each in waiting for effect in self._grow(*each)]
        return [effect for each in waiting for effect in self._revoke(*each)]

    def revoke_late(self, now_s: float) -> list[StoreEffect]:
        """Revokes the leases that have waited too long for a load."""
        effects: list[StoreEffect] = []
        for load in self._holdings.loads.values():  # loads are in order of their start
            if now_s - load.begun_s < LOAD_TIMEOUT_S:
                break
            for lease_id in self._waiting.get(load.slot, ()):
                lease = self.leases.get(lease_id)
                if lease is not None and not lease.is_revoked:
                    self._counters["fallbacks:load_too_slow"] += 1
                    effects += self._revoke(lease_id, lease)
        return effects

    def revoke_incomplete(self) -> list[StoreEffect]:
        """Revokes the leases that still wait for loads, because all blocks are dropped."""
        growing = [(i, each) for i, each in self.leases.items() if each.num_ready < len(each.slots)]
        return [effect for each in growing for effect in self._revoke(*each)]

    def cancel(self, lease_id: LeaseId) -> list[StoreEffect]:
        """Revokes a lease that its gateway no longer needs."""
        lease = self.leases.get(lease_id)
        return [] if lease is None else self._revoke(lease_id, lease)

    def remove_gateway(self, gateway_id: GatewayId) -> list[StoreEffect]:
        """Revokes all leases of a lost gateway."""
        lost = [(i, lease) for i, lease in self.leases.items() if lease.gateway_id == gateway_id]
        return [effect for each in lost for effect in self._revoke(*each)]

    def end(self, lease_id: LeaseId) -> None:
        """Releases the slots of a lease that has ended."""
        lease = self.leases.pop(lease_id, None)
        if lease is not None:
            self._holdings.memory.end_lease(lease.slots)

    def validate(self) -> None:
        """Asserts the invariants of the open leases."""
        loading = {load.slot for load in self._holdings.loads.values()}
        for lease in self.leases.values():
            assert len(lease.slots) == len(lease.blocks) > 0
            assert len(set(lease.slots)) == len(lease.slots)
            for slot in lease.slots[: lease.num_ready]:
                assert slot not in loading
            # a block that is neither loading nor ready would never become ready
            for number in range(lease.num_ready, len(lease.slots)):
                will_be = lease.slots[number] in loading or self._is_ready(lease, number)
                assert will_be or lease.is_revoked

    def _grow(self, lease_id: LeaseId, lease: StoreLease) -> list[StoreEffect]:
        if lease.is_revoked:
            return []
        first = lease.num_ready
        while lease.num_ready < len(lease.slots) and self._is_ready(lease, lease.num_ready):
            lease.num_ready += 1
        grown = lease.slots[first : lease.num_ready]
        return [GrowLease(lease_id, grown)] if grown else []

    def _is_ready(self, lease: StoreLease, number: int) -> bool:
        """True if the block of the lease is in memory. A leased slot keeps its block."""
        return self._holdings.memory.find(lease.blocks[number]) == lease.slots[number]

    def _revoke(self, lease_id: LeaseId, lease: StoreLease) -> list[StoreEffect]:
        if lease.is_revoked:
            return []
        lease.is_revoked = True
        return [RevokeLease(lease_id)]

    def _note_root(self, block: BlockHash) -> None:
        """Counts an offer by the prompt's first block, for the report of the most used prefixes."""
        self.roots[block] += 1
        if len(self.roots) > 2 * MAX_ROOTS:
            self.roots = Counter(dict(self.roots.most_common(MAX_ROOTS)))
