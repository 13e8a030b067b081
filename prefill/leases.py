"""Leases on the blocks of prompts: opened with the first chunk, grown with each, until they end."""

from dataclasses import dataclass

from engine.messages import GatewayId, LeaseId, LeaseRef, SeqId, TransferAddress
from engine.worker.blocks import BlockId, BlockPool
from engine.worker.events import Effect, GrowLease, OpenLease
from prefill.prompts import PendingPrompt


@dataclass(frozen=True, slots=True)
class PromptLease:
    """A lease that has not ended. Its blocks outlive the sequence."""

    seq_id: SeqId
    gateway_id: GatewayId
    block_ids: tuple[BlockId, ...]


class PromptLeases:
    """All leases of this worker's prompts."""

    def __init__(self, pool: BlockPool, *, block_size: int, address: TransferAddress) -> None:
        self._pool = pool
        self._block_size = block_size
        self._address = address
        self.open_leases: dict[LeaseId, PromptLease] = {}

    def __len__(self) -> int:
        return len(self.open_leases)

    def __contains__(self, lease_id: LeaseId) -> bool:
        return lease_id in self.open_leases

    def seq_ids_of(self, gateway_id: GatewayId) -> list[SeqId]:
        """Returns the sequences of a gateway that have leases."""
        leases = self.open_leases.values()
        return [lease.seq_id for lease in leases if lease.gateway_id == gateway_id]

    def open(self, prompt: PendingPrompt) -> tuple[LeaseRef | None, list[Effect]]:
        """Opens the lease of a prompt; none if its first token is its last."""
        seq = prompt.seq
        if seq.limits.max_len <= len(seq.token_ids) + 1:
            return None, []
        lease_id = prompt.lease_id = LeaseId(seq.seq_id)
        block_ids = tuple(seq.block_table)
        self.open_leases[lease_id] = PromptLease(seq.seq_id, seq.gateway_id, block_ids)
        self._pool.lease(block_ids)
        effects: list[Effect] = [OpenLease(lease_id, len(block_ids))]
        effects += self.grow(prompt, seq.num_computed_tokens // self._block_size)
        return LeaseRef(lease_id, self._address, len(block_ids)), effects

    def grow(self, prompt: PendingPrompt, num_ready: int) -> list[Effect]:
        """Adds newly computed blocks to the lease, up to `num_ready` in all."""
        if prompt.lease_id is None or num_ready == prompt.num_leased_ready:
            return []
        block_ids = tuple(prompt.seq.block_table[prompt.num_leased_ready : num_ready])
        prompt.num_leased_ready = num_ready
        return [GrowLease(prompt.lease_id, block_ids)]

    def end(self, lease_id: LeaseId) -> PromptLease | None:
        """Lets go of the blocks of a lease that ended; None if it is not one of these."""
        lease = self.open_leases.pop(lease_id, None)
        if lease is not None:
            self._pool.end_lease(lease.block_ids)
        return lease
