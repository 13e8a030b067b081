"""Chunked prefill, first come first served.

Life of a sequence here:

    waiting    has nothing; starts when the pool has blocks for its whole prompt
    computing  owns its blocks, runs chunk by chunk; its lease, if it has one, grows with each chunk
    leased     computed: the sequence is gone, its blocks belong to the lease until that ends

A `Prefill` leases its blocks and forgets the sequence after the first token; a `Generate` opens no
lease and passes the sequence on to the decode scheduler of this worker. A prefix that is cached
here is not computed again, except for its last token, without which there is nothing to sample
from.

The scheduler knows no clock, tensor or socket, and not who pulls.

Sources: chunked prefill, Agrawal et al., Sarathi-Serve, OSDI 2024.
"""

from collections import deque
from dataclasses import dataclass

from engine.batch import Row
from engine.blocks import BlockId, BlockPool
from engine.events import (
    Adopted,
    Effect,
    Emit,
    Event,
    FromGateway,
    GatewayLost,
    GrowLease,
    LeaseEnded,
    OpenLease,
    RevokeLease,
)
from engine.messages import (
    Cancel,
    FinishReason,
    GatewayId,
    Generate,
    GivenBack,
    LeaseId,
    LeaseRef,
    Prefill,
    PrefillDone,
    PrefillStarted,
    SeqId,
    TransferAddress,
)
from engine.sequence import Sequence
from engine.worker import Scheduled


@dataclass(slots=True)
class _Job:
    seq: Sequence
    hands_over: bool
    lease_id: LeaseId | None = None  # open, from the first chunk until it ends
    num_leased_ready: int = 0  # blocks that the lease has grown by


@dataclass(frozen=True, slots=True)
class _Lease:
    seq_id: SeqId
    gateway_id: GatewayId
    block_ids: tuple[BlockId, ...]


class PrefillScheduler:
    """Prompts waiting, being computed, and leased out."""

    def __init__(
        self, pool: BlockPool, *, block_size: int, chunk_tokens: int, address: TransferAddress
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._chunk_tokens = chunk_tokens
        self._address = address
        self._waiting: deque[_Job] = deque()
        self._computing: dict[SeqId, _Job] = {}
        self._leases: dict[LeaseId, _Lease] = {}

    @property
    def num_waiting(self) -> int:
        """Prompts of which nothing is computed."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Prompts being computed."""
        return len(self._computing)

    @property
    def num_leases(self) -> int:
        """Leases that have not ended."""
        return len(self._leases)

    def accepts(self, kind: type) -> bool:
        """Prompts are computed here."""
        return kind in (Prefill, Generate)

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Takes note of an event."""
        match event:
            case FromGateway(gateway_id, Prefill() | Generate() as message):
                seq = Sequence(
                    seq_id=message.seq_id,
                    gateway_id=gateway_id,
                    token_ids=list(message.token_ids),
                    sampling=message.sampling,
                    limits=message.limits,
                    block_size=self._block_size,
                )
                if seq.num_blocks > self._pool.num_blocks:
                    return [Emit(gateway_id, GivenBack(seq.seq_id, "prompt exceeds the KV pool"))]
                self._waiting.append(_Job(seq, isinstance(message, Prefill)))
                return []
            case FromGateway(_, Cancel(seq_id)):
                return self._cancel(seq_id)
            case GatewayLost(gateway_id):
                return self._forget_gateway(gateway_id)
            case LeaseEnded(lease_id, reason):
                return self._on_lease_ended(lease_id, reason)
            case _:
                return []

    def schedule(self, budget_tokens: int, now_s: float) -> Scheduled:
        """One chunk of each prompt, in order of arrival, while budget and memory last."""
        scheduled = Scheduled()
        for job in self._computing.values():
            budget_tokens -= self._add_row(job, budget_tokens, scheduled)
        while budget_tokens > 0 and self._waiting:
            job = self._waiting[0]
            if not self._start(job, scheduled):
                break
            self._waiting.popleft()
            self._computing[job.seq.seq_id] = job
            budget_tokens -= self._add_row(job, budget_tokens, scheduled)
        return scheduled

    def advance(self, row: Row, token: int | None, now_s: float) -> list[Effect | Adopted]:
        """A chunk is computed; with the last one comes the first token of the answer."""
        job = self._computing[row.seq_id]
        job.seq.advance(len(row.token_ids), self._pool)
        if token is None:
            return list(self._grow(job, job.seq.num_computed_tokens // self._block_size))
        del self._computing[row.seq_id]
        effects: list[Effect | Adopted] = list(self._grow(job, len(job.seq.block_table)))
        finish = job.seq.append(token)
        done = PrefillDone(row.seq_id, token, finish)
        effects.append(Emit(job.seq.gateway_id, done))
        return effects + self._leave(job, finish)

    def validate(self) -> None:
        """Asserts the scheduler's invariants."""
        for job in self._waiting:
            assert not job.seq.block_table
            assert job.seq.num_computed_tokens == 0
        for seq_id, job in self._computing.items():
            assert job.seq.seq_id == seq_id
            assert len(job.seq.block_table) == job.seq.num_blocks
            assert job.num_leased_ready <= job.seq.num_blocks
            if job.lease_id is not None:
                assert job.lease_id in self._leases

    def _start(self, job: _Job, scheduled: Scheduled) -> bool:
        """Takes blocks for a prompt, and opens its lease. False if memory is short."""
        seq = job.seq
        reusable = (len(seq.token_ids) - 1) // self._block_size
        cached = self._pool.match(seq.block_hashes[:reusable])
        seq.adopt_cached(cached, self._pool)
        missing = seq.num_blocks - len(cached)
        if missing > self._pool.num_idle:
            seq.release(self._pool)
            return False
        seq.block_table += self._pool.allocate(missing)
        lease = self._open_lease(job, scheduled) if job.hands_over else None
        started = PrefillStarted(seq.seq_id, seq.num_cached_tokens, lease)
        scheduled.effects.append(Emit(seq.gateway_id, started))
        return True

    def _open_lease(self, job: _Job, scheduled: Scheduled) -> LeaseRef | None:
        seq = job.seq
        if seq.limits.max_len <= len(seq.token_ids) + 1:
            return None  # the first token is the last: nobody will decode
        job.lease_id = LeaseId(seq.seq_id)
        block_ids = tuple(seq.block_table)
        self._leases[job.lease_id] = _Lease(seq.seq_id, seq.gateway_id, block_ids)
        self._pool.lease(block_ids)
        scheduled.effects.append(OpenLease(job.lease_id, len(block_ids)))
        scheduled.effects += self._grow(job, seq.num_computed_tokens // self._block_size)
        return LeaseRef(job.lease_id, self._address, len(block_ids))

    def _grow(self, job: _Job, num_ready: int) -> list[Effect]:
        """Tells the lease of newly computed blocks."""
        if job.lease_id is None or num_ready == job.num_leased_ready:
            return []
        block_ids = tuple(job.seq.block_table[job.num_leased_ready : num_ready])
        job.num_leased_ready = num_ready
        return [GrowLease(job.lease_id, block_ids)]

    def _add_row(self, job: _Job, budget_tokens: int, scheduled: Scheduled) -> int:
        """Adds the next chunk of a prompt; returns its length."""
        seq = job.seq
        start = seq.num_computed_tokens
        num = min(budget_tokens, self._chunk_tokens, len(seq.token_ids) - start)
        if num <= 0:
            return 0
        last = start + num == len(seq.token_ids)
        row = Row(
            seq_id=seq.seq_id,
            token_ids=seq.token_ids[start : start + num],
            start=start,
            block_table=seq.block_table,
            sampling=seq.sampling if last else None,
            banned=seq.banned() if last else (),
        )
        scheduled.rows.append(row)
        return num

    def _leave(self, job: _Job, finish: FinishReason | None) -> list[Effect | Adopted]:
        """What becomes of a computed prompt."""
        if not job.hands_over and finish is None:
            return [Adopted(job.seq)]
        job.seq.release(self._pool)  # its lease, if it has one, still holds the blocks
        if job.lease_id is not None and finish is not None:
            return [RevokeLease(job.lease_id)]
        return []

    def _cancel(self, seq_id: SeqId) -> list[Effect]:
        effects: list[Effect] = []
        job = self._computing.pop(seq_id, None)
        if job is not None:
            job.seq.release(self._pool)
        else:
            self._waiting = deque(j for j in self._waiting if j.seq.seq_id != seq_id)
        if LeaseId(seq_id) in self._leases:
            effects.append(RevokeLease(LeaseId(seq_id)))
        return effects

    def _forget_gateway(self, gateway_id: GatewayId) -> list[Effect]:
        """Its prompts are nobody's, and nobody will be told of its leases."""
        jobs = [*self._waiting, *self._computing.values()]
        mine = [job.seq.seq_id for job in jobs if job.seq.gateway_id == gateway_id]
        mine += [lease.seq_id for lease in self._leases.values() if lease.gateway_id == gateway_id]
        return [effect for seq_id in dict.fromkeys(mine) for effect in self._cancel(seq_id)]

    def _on_lease_ended(self, lease_id: LeaseId, reason: str) -> list[Effect]:
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return []
        self._pool.end_lease(lease.block_ids)
        job = self._computing.get(lease.seq_id)
        if job is None:
            return []
        job.lease_id = None
        if reason != "expired":
            return []  # the sink has all it wants, or the sequence is being cancelled
        del self._computing[lease.seq_id]
        job.seq.release(self._pool)
        return [Emit(job.seq.gateway_id, GivenBack(lease.seq_id, "lease expired"))]
