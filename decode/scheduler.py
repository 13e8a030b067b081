"""Continuous batching of sequences whose KV came from somewhere else.

Life of a sequence here:

    queued    holds its lease at the source, but no memory
    pulling   owns blocks for its prompt; those it lacks are being pulled
    ready     all KV is here; waits for its first token, which the gateway forwards
    running   has a row in every step

Only a queue head that the pool has room for is admitted, in order of arrival, and room includes the
growth of the sequences admitted before it within the next `growth_tokens` tokens each. If memory
runs short all the same, the youngest running sequence is given back to the gateway, which
continues it elsewhere or later with the same tokens; its blocks stay cached here.

Blocks that a prefix hit finds here are not pulled. A cancelled sequence keeps its blocks until the
transfer endpoint has reported that nothing writes into them any more.

Of a pull that fails or is cancelled half-way, the blocks that are here stay cached, so the next
attempt on this worker pulls only the rest; the gateway is told how much that is.

The scheduler knows no clock, tensor or socket.

Sources: continuous batching, Yu et al., Orca, OSDI 2022; two owners of a block, sglang#24527.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.batch import Row, RowResult
from engine.blocks import BlockId, BlockPool
from engine.events import (
    AbortPull,
    Adopted,
    Effect,
    Emit,
    Event,
    FromGateway,
    GatewayLost,
    HoldLease,
    PullDone,
    PullFailed,
    StartPull,
)
from engine.messages import (
    Cancel,
    Decode,
    DecodeStarted,
    FirstToken,
    GatewayId,
    GivenBack,
    KvReady,
    SeqId,
    Tokens,
)
from engine.sequence import Sequence
from engine.worker import Scheduled


@dataclass(slots=True)
class _Arriving:
    """A sequence whose KV is not all here, or whose first token is not."""

    seq: Sequence
    pulled: tuple[BlockId, ...] | None = None  # being written; None while queued
    kv_here: bool = False
    first_token: int | None = None


@dataclass(slots=True)
class _Running:
    seq: Sequence
    has_run: bool = field(default=False)


class DecodeScheduler:
    """Sequences arriving and running; `max_running` bounds the two together."""

    def __init__(
        self, pool: BlockPool, *, block_size: int, max_running: int, growth_tokens: int = 128
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._max_running = max_running
        self._growth_tokens = growth_tokens
        self._queued: OrderedDict[SeqId, _Arriving] = OrderedDict()
        self._arriving: dict[SeqId, _Arriving] = {}
        self._running: dict[SeqId, _Running] = {}  # oldest first
        self._aborting: dict[SeqId, _Arriving] = {}  # cancelled; their pulls may still write
        self._counters: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        """Sequences whose KV or first token is missing."""
        return len(self._queued) + len(self._arriving)

    @property
    def num_running(self) -> int:
        """Sequences that generate."""
        return len(self._running)

    @property
    def counters(self) -> Mapping[str, int]:
        """Sequences preempted, and blocks that pulls left here without coming to their end."""
        return self._counters

    def accepts(self, kind: type) -> bool:
        """Sequences are decoded here, handed over or prefilled in this worker."""
        return kind in (Decode, Adopted)

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Takes note of an event."""
        match event:
            case FromGateway(gateway_id, Decode() as message):
                return self._enqueue(gateway_id, message)
            case FromGateway(_, FirstToken(seq_id, token)):
                return self._on_first_token(seq_id, token)
            case FromGateway(_, Cancel(seq_id)):
                return self._cancel(seq_id)
            case GatewayLost(gateway_id):
                return self._forget_gateway(gateway_id)
            case PullDone():
                return self._on_pull_done(event)
            case PullFailed():
                return self._on_pull_failed(event)
            case Adopted(seq):
                self._running[seq.seq_id] = _Running(seq)
                return []
            case _:
                return []

    def schedule(self, budget_tokens: int, now_s: float) -> Scheduled:
        """One token of every running sequence; admits what the pool has room for."""
        scheduled = Scheduled()
        scheduled.effects += self._make_room()
        for running in list(self._running.values())[:budget_tokens]:
            seq = running.seq
            if not running.has_run:
                running.has_run = True
                scheduled.effects.append(Emit(seq.gateway_id, DecodeStarted(seq.seq_id)))
            scheduled.rows.append(self._row(seq))
        scheduled.effects += self._admit()
        return scheduled

    def advance(self, row: Row, result: RowResult, now_s: float) -> list[Effect | Adopted]:
        """A sequence has its next token."""
        [token] = result.token_ids
        seq = self._running[row.seq_id].seq
        seq.advance(len(row.token_ids), self._pool)
        finish = seq.append(token)
        if finish is not None:
            del self._running[row.seq_id]
            seq.release(self._pool)
        return [Emit(seq.gateway_id, Tokens(row.seq_id, [token], finish))]

    def validate(self) -> None:
        """Asserts the scheduler's invariants."""
        assert not set(self._queued) & set(self._arriving)
        assert not set(self._arriving) & set(self._running)
        assert not set(self._arriving) & set(self._aborting)
        for queued in self._queued.values():
            assert queued.pulled is None
            assert not queued.seq.block_table
            assert queued.seq.num_computed_tokens == 0
        for arriving in self._arriving.values():
            assert arriving.pulled is not None
            assert not (arriving.kv_here and arriving.first_token is not None)
        for aborting in self._aborting.values():
            assert aborting.pulled is not None
            assert not aborting.kv_here
        for running in self._running.values():
            seq = running.seq
            assert seq.num_computed_tokens == len(seq.token_ids) - 1

    # ------------------------------------------------------------ arrival

    def _enqueue(self, gateway_id: GatewayId, message: Decode) -> list[Effect]:
        seq = Sequence(
            seq_id=message.seq_id,
            gateway_id=gateway_id,
            token_ids=list(message.token_ids),
            sampling=message.sampling,
            limits=message.limits,
            block_size=self._block_size,
        )
        if self._blocks_of(len(seq.token_ids) + 1) > self._pool.num_blocks:
            return [Emit(seq.gateway_id, GivenBack(seq.seq_id, "prompt exceeds the KV pool"))]
        self._queued[seq.seq_id] = _Arriving(seq)
        return [HoldLease(seq.seq_id, message.lease)]

    def _admit(self) -> list[Effect]:
        """Gives memory to queued sequences and starts their pulls."""
        effects: list[Effect] = []
        while self._queued and len(self._running) + len(self._arriving) < self._max_running:
            arriving = next(iter(self._queued.values()))
            seq = arriving.seq
            cached = self._pool.match(seq.block_hashes)
            seq.adopt_cached(cached, self._pool)
            if not self._has_room(seq):
                seq.release(self._pool)
                break
            blocks = self._pool.allocate(seq.num_blocks - len(cached))
            self._pool.begin_write(blocks)
            seq.block_table += blocks
            arriving.pulled = tuple(blocks)
            del self._queued[seq.seq_id]
            self._arriving[seq.seq_id] = arriving
            indices = range(len(cached), seq.num_blocks)
            effects.append(StartPull(seq.seq_id, tuple(zip(indices, blocks, strict=True))))
        return effects

    def _has_room(self, candidate: Sequence) -> bool:
        """Whether its prompt fits, and with it the growth to come unless nothing else runs."""
        admitted = [r.seq for r in self._running.values()]
        admitted += [a.seq for a in self._arriving.values()]
        if not admitted:
            return candidate.num_blocks - len(candidate.block_table) <= self._pool.num_idle
        return sum(map(self._soon_blocks, (candidate, *admitted))) <= self._pool.num_idle

    def _soon_blocks(self, seq: Sequence) -> int:
        """Blocks that it lacks for the tokens it has and the next `growth_tokens`."""
        length = min(seq.limits.max_len, len(seq.token_ids) + self._growth_tokens)
        return self._blocks_of(length) - len(seq.block_table)

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _on_pull_done(self, done: PullDone) -> list[Effect]:
        arriving = self._end_pull(done.seq_id)
        if arriving is None:
            return []
        seq = arriving.seq
        seq.advance(len(seq.token_ids) - seq.num_computed_tokens, self._pool)
        if self._aborting.pop(done.seq_id, None) is not None:
            seq.release(self._pool)
            return []
        assert arriving.pulled is not None
        arriving.kv_here = True
        num_pulled = len(arriving.pulled)
        ready = KvReady(
            seq_id=done.seq_id,
            num_pulled_blocks=num_pulled,
            num_cached_blocks=len(seq.block_table) - num_pulled,
            transport=done.transport,
            transfer_s=done.transfer_s,
            exposed_s=done.exposed_s,
        )
        self._join_if_complete(arriving)
        return [Emit(seq.gateway_id, ready)]

    def _on_first_token(self, seq_id: SeqId, token: int) -> list[Effect]:
        arriving = self._arriving.get(seq_id) or self._queued.get(seq_id)
        if arriving is None:
            return []
        arriving.first_token = token
        self._join_if_complete(arriving)
        return []

    def _join_if_complete(self, arriving: _Arriving) -> None:
        if not arriving.kv_here or arriving.first_token is None:
            return
        seq = arriving.seq
        finish = seq.append(arriving.first_token)
        assert finish is None, "a complete sequence was handed over"
        del self._arriving[seq.seq_id]
        self._running[seq.seq_id] = _Running(seq)

    def _on_pull_failed(self, failed: PullFailed) -> list[Effect]:
        seq_id = failed.seq_id
        reason = f"pull failed: {failed.reason}"
        if (queued := self._queued.pop(seq_id, None)) is not None:
            return [Emit(queued.seq.gateway_id, GivenBack(seq_id, reason))]
        arriving = self._end_pull(seq_id)
        if arriving is None:
            return []
        num_kept_tokens = self._keep(arriving.seq, failed.arrived)
        if self._aborting.pop(seq_id, None) is not None:
            return []
        del self._arriving[seq_id]
        return [Emit(arriving.seq.gateway_id, GivenBack(seq_id, reason, num_kept_tokens))]

    def _keep(self, seq: Sequence, arrived: tuple[int, ...]) -> int:
        """Lets go of a sequence; the tokens whose KV stays cached with what has arrived of it."""
        num_cached_tokens = seq.num_computed_tokens
        seq.keep_pulled(frozenset(arrived), self._pool)
        num_kept_tokens = seq.num_computed_tokens
        num_new_blocks = (num_kept_tokens - num_cached_tokens) // self._block_size
        self._counters["kept_blocks"] += num_new_blocks
        seq.release(self._pool)
        return num_kept_tokens

    def _end_pull(self, seq_id: SeqId) -> _Arriving | None:
        """The sequence whose pull is over, wanted or not: its blocks have one holder less."""
        arriving = self._arriving.get(seq_id) or self._aborting.get(seq_id)
        if arriving is None or arriving.kv_here:
            return None
        assert arriving.pulled is not None
        self._pool.end_write(arriving.pulled)
        return arriving

    # ------------------------------------------------------------ running

    def _row(self, seq: Sequence) -> Row:
        return Row(
            seq_id=seq.seq_id,
            token_ids=seq.token_ids[-1:],
            start=seq.num_computed_tokens,
            block_table=seq.block_table,
            sampling=seq.sampling,
            banned=seq.banned(),
        )

    def _make_room(self) -> list[Effect]:
        """Gives running sequences the blocks of their next tokens; the youngest may have to go."""
        effects: list[Effect] = []
        for seq_id in list(self._running):
            running = self._running.get(seq_id)
            if running is None:
                continue
            while len(running.seq.block_table) < running.seq.num_blocks:
                if self._pool.num_idle:
                    running.seq.block_table += self._pool.allocate(1)
                    continue
                youngest = next(reversed(self._running))
                effects += self._preempt(youngest)
                if youngest == seq_id:
                    break
        return effects

    def _preempt(self, seq_id: SeqId) -> list[Effect]:
        self._counters["preempted"] += 1
        seq = self._running.pop(seq_id).seq
        seq.release(self._pool)
        return [Emit(seq.gateway_id, GivenBack(seq_id, "preempted"))]

    def _cancel(self, seq_id: SeqId) -> list[Effect]:
        if (running := self._running.pop(seq_id, None)) is not None:
            running.seq.release(self._pool)
            return []
        if self._queued.pop(seq_id, None) is not None:
            return [AbortPull(seq_id)]
        arriving = self._arriving.pop(seq_id, None)
        if arriving is None:
            return []
        if arriving.kv_here:
            arriving.seq.release(self._pool)
            return []
        self._aborting[seq_id] = arriving  # until its pull is over
        return [AbortPull(seq_id)]

    def _forget_gateway(self, gateway_id: GatewayId) -> list[Effect]:
        seqs = [a.seq for a in (*self._queued.values(), *self._arriving.values())]
        seqs += [r.seq for r in self._running.values()]
        mine = [seq.seq_id for seq in seqs if seq.gateway_id == gateway_id]
        return [effect for seq_id in mine for effect in self._cancel(seq_id)]
