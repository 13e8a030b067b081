"""The open leases on a worker's blocks, and offers of blocks that the worker has already computed.

Blocks stay leased until their lease ends, even if the sequence that computed them ends earlier.

A gateway may place a prompt on another worker, although this worker has cached more of the prompt's
beginning. Then the gateway requests an offer of these blocks from this worker (`OfferPrefix`), and
the other worker pulls them. Workers of every role make offers: a decode worker has conversations
with their answers, and a conversation is the beginning of the next prompt.

The full blocks of a running sequence that will move are offered too, while the sequence continues.
When the gateway stops the sequence (`HandOver`), the blocks of all its tokens except the last are
leased in the same way. The sequence is then no longer on this worker.

An offer is complete when it opens, because its blocks are computed already. It ends like any lease:
by release, by the gateway's `Cancel` or loss, or if its sink is silent. An offer removes cached
blocks from the free list, but takes no block from a sequence. A sequence that holds blocks of a
prefix may not wait for memory (see `prefill.scheduler`). So offers cannot make workers wait for
each other.

Nothing is computed here. This module uses no clock, tensor or socket.

Sources: pulling a prefix from any node that holds it, Qin et al., Mooncake, FAST 2025.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.messages import (
    BlocksOffered,
    GatewayId,
    HandedOver,
    LeaseId,
    LeaseRef,
    OfferBlocks,
    OfferPrefix,
    PrefixOffered,
    SeqId,
    TransferAddress,
)
from engine.worker.blocks import EVICT_FIRST, LEASED, BlockHash, BlockId, BlockPool
from engine.worker.events import Effect, Emit, GrowLease, OpenLease, RevokeLease
from engine.worker.intake import Intake
from engine.worker.sequence import Sequence as OpenSequence


@dataclass(frozen=True, slots=True)
class OpenedLease:
    """A lease that has not ended, and the gateway that requested it."""

    gateway_id: GatewayId
    block_ids: tuple[BlockId, ...]
    evict_first: bool = False  # mark the blocks evict-first after the lease has ended


class LeaseTable:
    """The open leases, by id. Each lease holds its blocks in the pool."""

    def __init__(self, pool: BlockPool, address: TransferAddress) -> None:
        """`address` is the address from which sinks pull."""
        self._pool = pool
        self._address = address
        self.opened: dict[LeaseId, OpenedLease] = {}

    def of(self, gateway_id: GatewayId) -> list[LeaseId]:
        """Returns the leases that a gateway requested."""
        return [i for i, lease in self.opened.items() if lease.gateway_id == gateway_id]

    def open(
        self,
        lease_id: LeaseId,
        gateway_id: GatewayId,
        block_ids: Sequence[BlockId],
        *,
        num_ready: int,
        evict_first: bool = False,
    ) -> tuple[LeaseRef, list[Effect]]:
        """Opens a lease on blocks, of which the first `num_ready` are computed.

        With `evict_first`, the sink keeps the blocks, so this worker evicts them first.
        """
        assert lease_id not in self.opened
        lease = OpenedLease(gateway_id, tuple(block_ids), evict_first)
        self.opened[lease_id] = lease
        self._pool.hold(LEASED, lease.block_ids)
        effects: list[Effect] = [OpenLease(lease_id, len(block_ids))]
        if num_ready:
            effects.append(GrowLease(lease_id, lease.block_ids[:num_ready]))
        return LeaseRef(lease_id, self._address, len(block_ids)), effects

    def close(self, lease_id: LeaseId) -> bool:
        """Releases the blocks of a lease that has ended. Returns False if the lease is not in this
        table.
        """
        lease = self.opened.pop(lease_id, None)
        if lease is None:
            return False
        mark = EVICT_FIRST if lease.evict_first else None
        self._pool.release(LEASED, lease.block_ids, mark)
        return True


def prefix_lease_id(seq_id: SeqId) -> LeaseId:
    """Returns the id of the lease on a prefix. (The lease of a hand-over has the sequence's own
    id.)
    """
    return LeaseId(f"{seq_id}.prefix")


def moved_lease_id(seq_id: SeqId) -> LeaseId:
    """Returns the id of the lease on a moved sequence. `seq_id` is the sequence's id on the other
    worker.
    """
    return LeaseId(f"{seq_id}.moved")


class PrefixOffers:
    """The open offers of one worker, to other workers."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        intake: Intake,
        address: TransferAddress,
    ) -> None:
        self._pool = pool
        self._read = intake.read
        self._block_size = intake.block_size
        self.leases = LeaseTable(pool, address)
        self._counters: Counter[str] = Counter()

    @property
    def counters(self) -> Mapping[str, int]:
        """Returns the numbers of offered prefixes, of offers without any block, and of sequences
        that were handed over.
        """
        return self._counters

    def cancel(self, seq_id: SeqId) -> list[Effect]:
        """Revokes all offers for a sequence."""
        lease_ids = (prefix_lease_id(seq_id), moved_lease_id(seq_id))
        return [RevokeLease(lease_id) for lease_id in lease_ids if lease_id in self.leases.opened]

    def remove_gateway(self, gateway_id: GatewayId) -> list[Effect]:
        """Revokes all offers that a gateway requested."""
        return [RevokeLease(lease_id) for lease_id in self.leases.of(gateway_id)]

    def validate(self) -> None:
        """Asserts every invariant of the offers."""
        for lease in self.leases.opened.values():
            assert lease.block_ids
            assert len(set(lease.block_ids)) == len(lease.block_ids)

    def offer(self, gateway_id: GatewayId, message: OfferPrefix) -> list[Effect]:
        """Leases the cached blocks at the beginning of a prompt."""
        lease_id = prefix_lease_id(message.seq_id)
        if lease_id in self.leases.opened:
            return []  # a repeated request gets no second answer
        # At least one token must be left to compute: sampling needs its logits.
        num_blocks = (len(message.token_ids) - 1) // self._block_size
        hashes = self._read(message, self._block_size).block_hashes
        block_ids = tuple(self._pool.match(hashes[:num_blocks]))
        if not block_ids:
            self._counters["prefix_offers:not_held"] += 1
            return [Emit(gateway_id, PrefixOffered(message.seq_id, None))]
        self._counters["prefix_offers:held"] += 1
        lease, effects = self.leases.open(
            lease_id,
            gateway_id,
            block_ids,
            num_ready=len(block_ids),
            evict_first=message.evict_first,
        )
        return [*effects, Emit(gateway_id, PrefixOffered(message.seq_id, lease))]

    def offer_blocks(self, gateway_id: GatewayId, message: OfferBlocks) -> list[Effect]:
        """Leases blocks, found by their hashes, whatever their position in a prompt."""
        lease_id = prefix_lease_id(message.seq_id)
        if lease_id in self.leases.opened:
            return []  # a repeated request gets no second answer
        hashes = dict.fromkeys(BlockHash(each) for each in message.hashes)
        found = self._pool.find(hashes)
        if not found or len(hashes) < len(message.hashes):
            return [Emit(gateway_id, BlocksOffered(message.seq_id, None))]
        self._counters["offered_blocks"] += len(found)
        block_ids = tuple(block for _, block in found)
        lease, effects = self.leases.open(lease_id, gateway_id, block_ids, num_ready=len(block_ids))
        held = [index for index, _ in found]
        return [*effects, Emit(gateway_id, BlocksOffered(message.seq_id, lease, held))]

    def hand_over(self, seq: OpenSequence, as_seq_id: SeqId) -> list[Effect]:
        """Transfers the blocks of a sequence that has stopped to a lease.

        The sequence continues on another worker, under another id.
        """
        lease_id = moved_lease_id(as_seq_id)
        # The gateway has used the same id twice, which is an error of the gateway.
        if lease_id in self.leases.opened:
            seq.release(self._pool)
            return [Emit(seq.gateway_id, HandedOver(seq.seq_id, None))]
        self._counters["handed_over"] += 1
        num_blocks = -(-seq.num_computed_tokens // self._block_size)
        block_ids = tuple(seq.block_table[:num_blocks])
        num_draft_tokens = seq.num_draft_tokens if seq.num_unseen_tokens else None
        lease, effects = self.leases.open(
            lease_id, seq.gateway_id, block_ids, num_ready=len(block_ids)
        )
        seq.release(self._pool)
        handed_over = HandedOver(seq.seq_id, lease, num_draft_tokens)
        return [*effects, Emit(seq.gateway_id, handed_over)]
