"""The open leases on blocks of one worker's pool: of prompts, prefixes, or moved sequences.

The blocks stay leased until the lease ends, whatever becomes of the sequence that computed them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.messages import GatewayId, LeaseId, LeaseRef, TransferAddress
from engine.worker.blocks import BlockId, BlockPool
from engine.worker.events import Effect, GrowLease, OpenLease


@dataclass(frozen=True, slots=True)
class OpenedLease:
    """A lease that has not ended, and the gateway that wanted it."""

    gateway_id: GatewayId
    block_ids: tuple[BlockId, ...]
    evict_first: bool = False  # once it ended


class LeaseTable:
    """Leases by id. Holds their blocks in the pool."""

    def __init__(self, pool: BlockPool, address: TransferAddress) -> None:
        """`address` is where sinks pull from."""
        self._pool = pool
        self._address = address
        self.opened: dict[LeaseId, OpenedLease] = {}

    def __len__(self) -> int:
        return len(self.opened)

    def __contains__(self, lease_id: LeaseId) -> bool:
        return lease_id in self.opened

    def of(self, gateway_id: GatewayId) -> list[LeaseId]:
        """Returns the leases that a gateway wanted."""
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

        They `evict_first` if the sink keeps them.
        """
        assert lease_id not in self.opened
        lease = OpenedLease(gateway_id, tuple(block_ids), evict_first)
        self.opened[lease_id] = lease
        self._pool.lease(lease.block_ids)
        effects: list[Effect] = [OpenLease(lease_id, len(block_ids))]
        if num_ready:
            effects.append(GrowLease(lease_id, lease.block_ids[:num_ready]))
        return LeaseRef(lease_id, self._address, len(block_ids)), effects

    def end(self, lease_id: LeaseId) -> bool:
        """Lets go of the blocks of a lease that ended. Returns False if it is not one of these."""
        lease = self.opened.pop(lease_id, None)
        if lease is None:
            return False
        self._pool.end_lease(lease.block_ids, evict_first=lease.evict_first)
        return True
