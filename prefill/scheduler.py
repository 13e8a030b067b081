"""Chunked prefill, first come first served.

Life of a sequence here:

    waiting    has nothing; starts when the pool has blocks for its whole prompt
    pulling    owns its blocks; the beginning of its prefix, which another worker offered, is being
               pulled into some of them, while later prompts go ahead
    computing  runs chunk by chunk; its lease, if it has one, grows with each chunk
    leased     computed: the sequence is gone, its blocks belong to the lease until that ends

A `Prefill` leases its blocks and forgets the sequence after the first token; a `Generate` opens no
lease and passes the sequence on to the decode scheduler of this worker. A prefix that is cached
here is not computed again, except for its last token, without which there is nothing to sample
from.

A prompt whose log-probabilities are asked for is computed from its first token on, whatever is
cached or offered; they are collected over its chunks and sent with its first token.

An offered prefix is held from arrival on, but not while memory is short: a worker that waited for
memory and held another's could wait for ever if the other did the same. Nothing depends on the
pull: what it does not bring is computed. A sequence cancelled meanwhile keeps its blocks until the
transfer endpoint has reported that nothing writes into them any more.

The scheduler knows no clock, tensor or socket, and not who pulls.

Sources: chunked prefill, Agrawal et al., Sarathi-Serve, OSDI 2024; two owners of a block,
sglang#24527.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from engine.grammar.guide import OpenedGuide
from engine.messages import (
    ROLE_CHANGED,
    Cancel,
    ComputePrompt,
    FinishReason,
    GatewayId,
    Generate,
    GivenBack,
    LeaseId,
    LeaseRef,
    Logprobs,
    Prefill,
    PrefillDone,
    PrefillStarted,
    SeqId,
    TransferAddress,
)
from engine.worker.batch import Row, RowResult
from engine.worker.blocks import BlockId, BlockPool
from engine.worker.core import Scheduled, Workload
from engine.worker.events import (
    AbortPull,
    Adopted,
    Effect,
    Emit,
    Event,
    FromGateway,
    GatewayLost,
    GrowLease,
    HoldLease,
    LeaseEnded,
    OpenLease,
    PullDone,
    PullFailed,
    RevokeLease,
    StartPull,
)
from engine.worker.intake import Intake
from engine.worker.sequence import Sequence


@dataclass(slots=True)
class _Job:
    seq: Sequence
    hands_over: bool
    place: int  # in the order of arrival
    prefix: LeaseRef | None = None  # held, until its pull starts or it is given up
    pulled: tuple[BlockId, ...] = ()  # being written, from the first block that was not cached
    lease_id: LeaseId | None = None  # open, from the first chunk until it ends
    num_leased_ready: int = 0  # blocks that the lease has grown by
    num_top: int | None = None  # log-probabilities of the prompt are wanted, with so many others
    scored: list[Logprobs] = field(default_factory=list)  # what has come of them


@dataclass(frozen=True, slots=True)
class _Lease:
    seq_id: SeqId
    gateway_id: GatewayId
    block_ids: tuple[BlockId, ...]


class PrefillScheduler:
    """Prompts waiting, pulling a prefix, being computed, and leased out."""

    def __init__(
        self, pool: BlockPool, *, intake: Intake, chunk_tokens: int, address: TransferAddress
    ) -> None:
        """What `intake` does not let in is given back."""
        self._pool = pool
        self._intake = intake
        self._block_size = intake.block_size
        self._chunk_tokens = chunk_tokens
        self._address = address
        self._num_jobs = 0  # that ever came
        self._waiting: deque[_Job] = deque()
        self._pulling: dict[SeqId, _Job] = {}
        self._aborting: dict[SeqId, _Job] = {}  # cancelled; their pulls may still write
        self._computing: dict[SeqId, _Job] = {}
        self._leases: dict[LeaseId, _Lease] = {}
        self._counters: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        """Prompts of which nothing is computed here."""
        return len(self._waiting) + len(self._pulling)

    @property
    def num_running(self) -> int:
        """Prompts being computed."""
        return len(self._computing)

    @property
    def workload(self) -> Workload:
        """The prompts that are not computed yet, with what is cached of them."""
        jobs = (*self._waiting, *self._pulling.values(), *self._computing.values())
        return Workload(prompt_tokens=sum(len(job.seq.token_ids) for job in jobs))

    @property
    def num_leases(self) -> int:
        """Leases that have not ended."""
        return len(self._leases)

    @property
    def counters(self) -> Mapping[str, int]:
        """Blocks of prefixes pulled, and offered prefixes that were computed all the same."""
        return self._counters

    def accepts(self, kind: type) -> bool:
        """Prompts are computed here."""
        return kind in (Prefill, Generate)

    def give_back(self, accepts: Callable[[type], bool]) -> list[Effect]:
        """Prompts that wait, if new ones like them are not accepted any more."""
        late = [j for j in self._waiting if not accepts(Prefill if j.hands_over else Generate)]
        effects: list[Effect] = []
        for job in reversed(late):  # who comes back last is first in the queue again
            seq = job.seq
            effects += self._cancel(seq.seq_id)
            effects.append(Emit(seq.gateway_id, GivenBack(seq.seq_id, ROLE_CHANGED)))
        return effects

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Takes note of an event."""
        match event:
            case FromGateway(gateway_id, Prefill() | Generate() as message, guide):
                return self._enqueue(gateway_id, message, guide)
            case FromGateway(_, Cancel(seq_id)):
                return self._cancel(seq_id)
            case GatewayLost(gateway_id):
                return self._forget_gateway(gateway_id)
            case LeaseEnded(lease_id, reason):
                return self._on_lease_ended(lease_id, reason)
            case PullDone(seq_id):
                return self._on_pull_ended(seq_id, None)
            case PullFailed(seq_id):
                return self._on_pull_ended(seq_id, event)
            case _:
                return []

    def schedule(self, budget_tokens: int, now_s: float) -> Scheduled:
        """One chunk of each prompt, in order of arrival, while budget and memory last."""
        scheduled = Scheduled()
        for job in self._computing.values():
            budget_tokens -= self._add_row(job, budget_tokens, scheduled)
        while budget_tokens > 0 and self._waiting:
            if not self._start(self._waiting[0], scheduled):
                scheduled.effects += self._give_up_prefixes()
                break
            job = self._waiting.popleft()
            if job.pulled:
                self._pulling[job.seq.seq_id] = job
                continue
            scheduled.effects += self._begin(job)
            budget_tokens -= self._add_row(job, budget_tokens, scheduled)
        return scheduled

    def advance(self, row: Row, result: RowResult, now_s: float) -> list[Effect | Adopted]:
        """A chunk is computed; with the last one comes the first token of the answer."""
        job = self._computing[row.seq_id]
        job.seq.advance(len(row.token_ids), self._pool)
        job.scored += result.scored
        if not result.token_ids:
            return list(self._grow(job, job.seq.num_computed_tokens // self._block_size))
        [token] = result.token_ids
        del self._computing[row.seq_id]
        if (fault := job.seq.fault) is not None:
            return self._give_up(job, fault)
        effects: list[Effect | Adopted] = list(self._grow(job, len(job.seq.block_table)))
        finish = job.seq.append(token)
        logprobs = result.logprobs[0] if result.logprobs else None
        done = PrefillDone(row.seq_id, token, finish, logprobs, job.scored)
        effects.append(Emit(job.seq.gateway_id, done))
        return effects + self._leave(job, finish)

    def validate(self) -> None:
        """Asserts the scheduler's invariants."""
        for job in self._waiting:
            assert not job.seq.block_table
            assert job.seq.num_computed_tokens == 0
            assert not job.pulled
        assert len({*self._pulling, *self._aborting, *self._computing}) == (
            len(self._pulling) + len(self._aborting) + len(self._computing)
        )
        for job in (*self._pulling.values(), *self._aborting.values()):
            assert job.pulled
            assert job.lease_id is None
            assert job.prefix is None
        for seq_id, job in self._computing.items():
            assert job.prefix is None
            assert job.seq.seq_id == seq_id
            assert len(job.seq.block_table) == job.seq.num_blocks
            assert job.num_leased_ready <= job.seq.num_blocks
            if job.lease_id is not None:
                assert job.lease_id in self._leases

    # ------------------------------------------------------------ arrival

    def _enqueue(
        self, gateway_id: GatewayId, message: ComputePrompt, guide: OpenedGuide | None
    ) -> list[Effect]:
        if self._is_known(message.seq_id):
            return [Emit(gateway_id, GivenBack(message.seq_id, "the id is in use"))]
        seq = self._intake.open(gateway_id, message, guide)
        if isinstance(seq, GivenBack):
            return [Emit(gateway_id, seq)]
        if seq.num_blocks > self._pool.num_blocks:
            return [Emit(gateway_id, GivenBack(seq.seq_id, "prompt exceeds the KV pool"))]
        hands_over = isinstance(message, Prefill)
        job = _Job(seq, hands_over, self._num_jobs, num_top=message.prompt_logprobs)
        self._num_jobs += 1
        self._waiting.append(job)
        if message.prefix is None:
            return []
        held: Effect = HoldLease(seq.seq_id, message.prefix)
        if job.num_top is not None:
            return [held, AbortPull(seq.seq_id)]  # the source need not keep it
        job.prefix = message.prefix
        return [held]

    def _is_known(self, seq_id: SeqId) -> bool:
        states = (self._pulling, self._aborting, self._computing)
        return (
            any(seq_id in state for state in states)
            or LeaseId(seq_id) in self._leases
            or any(job.seq.seq_id == seq_id for job in self._waiting)
        )

    def _start(self, job: _Job, scheduled: Scheduled) -> bool:
        """Takes blocks for a prompt, and starts to pull its prefix. False if memory is short."""
        seq = job.seq
        num_reusable = self._reusable_blocks(seq) if job.num_top is None else 0
        cached = self._pool.match(seq.block_hashes[:num_reusable])
        seq.adopt_cached(cached, self._pool)
        missing = seq.num_blocks - len(cached)
        if missing > self._pool.num_idle:
            seq.release(self._pool)
            return False
        seq.block_table += self._pool.allocate(missing)
        if job.prefix is not None:
            scheduled.effects.append(self._start_pull(job, job.prefix))
        return True

    def _reusable_blocks(self, seq: Sequence) -> int:
        """Full blocks that need not be computed: one token at least must be."""
        return (len(seq.token_ids) - 1) // self._block_size

    def _start_pull(self, job: _Job, prefix: LeaseRef) -> Effect:
        """Pulls what is not cached here, and nothing if all is."""
        seq = job.seq
        first = seq.num_computed_tokens // self._block_size
        indices = range(first, min(prefix.num_blocks, self._reusable_blocks(seq)))
        job.prefix = None
        if not indices:
            return AbortPull(seq.seq_id)
        job.pulled = tuple(seq.block_table[indices.start : indices.stop])
        self._pool.begin_write(job.pulled)
        return StartPull(seq.seq_id, tuple(zip(indices, job.pulled, strict=True)))

    def _give_up_prefixes(self) -> list[Effect]:
        """Memory is short: nobody may wait for it who holds another worker's."""
        effects: list[Effect] = []
        for job in self._waiting:
            if job.prefix is not None:
                job.prefix = None
                self._counters["fallbacks:prefix_without_memory"] += 1
                effects.append(AbortPull(job.seq.seq_id))
        return effects

    def _on_pull_ended(self, seq_id: SeqId, failed: PullFailed | None) -> list[Effect]:
        """What has come of a prefix is here to stay; the rest of the prompt is computed."""
        job = self._pulling.get(seq_id) or self._aborting.get(seq_id)
        if job is None:
            return [] if failed is None else self._on_offer_lost(seq_id)
        seq = job.seq
        self._pool.end_write(job.pulled)
        first = seq.num_computed_tokens // self._block_size
        everything = range(first, first + len(job.pulled))
        arrived: Collection[int] = everything if failed is None else frozenset(failed.arrived)
        seq.keep_pulled(arrived, self._pool)
        job.pulled = ()
        self._counters["pulled_prefix_blocks"] += (
            seq.num_computed_tokens // self._block_size - first
        )
        if self._aborting.pop(seq_id, None) is not None:
            seq.release(self._pool)
            return []
        if failed is not None:
            self._counters["fallbacks:prefix_pull_failed"] += 1
        del self._pulling[seq_id]
        effects = self._begin(job)
        # Later prompts went ahead while it was pulled. It waits for none of them any longer.
        in_order = sorted(self._computing.items(), key=lambda item: item[1].place)
        self._computing = dict(in_order)
        return effects

    def _on_offer_lost(self, seq_id: SeqId) -> list[Effect]:
        """The lease on a prefix ended before there was memory for it."""
        for job in self._waiting:
            if job.seq.seq_id == seq_id and job.prefix is not None:
                job.prefix = None
                self._counters["fallbacks:prefix_pull_failed"] += 1
        return []

    # ------------------------------------------------------------ computing

    def _begin(self, job: _Job) -> list[Effect]:
        """Opens the lease of a prompt whose next chunk can run."""
        seq = job.seq
        self._computing[seq.seq_id] = job
        effects: list[Effect] = []
        lease = self._open_lease(job, effects) if job.hands_over else None
        effects.append(
            Emit(seq.gateway_id, PrefillStarted(seq.seq_id, seq.num_cached_tokens, lease))
        )
        return effects

    def _open_lease(self, job: _Job, effects: list[Effect]) -> LeaseRef | None:
        seq = job.seq
        if seq.limits.max_len <= len(seq.token_ids) + 1:
            return None  # the first token is the last: nobody will decode
        job.lease_id = LeaseId(seq.seq_id)
        block_ids = tuple(seq.block_table)
        self._leases[job.lease_id] = _Lease(seq.seq_id, seq.gateway_id, block_ids)
        self._pool.lease(block_ids)
        effects.append(OpenLease(job.lease_id, len(block_ids)))
        effects += self._grow(job, seq.num_computed_tokens // self._block_size)
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
        token_ids = seq.token_ids[start : start + num]
        last = start + num == len(seq.token_ids)
        row = Row(
            seq_id=seq.seq_id,
            token_ids=token_ids,
            start=start,
            block_table=seq.block_table,
            sampling=seq.sampling if last else None,
            banned=seq.banned() if last else (),
            draft_token_ids=token_ids,
            history=seq.history if last else None,
            prompt_len=seq.limits.prompt_len,
            guide=seq.guide if last else None,
            scored=() if job.num_top is None else seq.token_ids[start + 1 : start + num + 1],
            num_top=job.num_top or 0,
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

    def _give_up(self, job: _Job, fault: str) -> list[Effect | Adopted]:
        """Nobody can go on with this answer."""
        job.seq.release(self._pool)
        given_back = GivenBack(job.seq.seq_id, fault, hopeless=True)
        revoked = [] if job.lease_id is None else [RevokeLease(job.lease_id)]
        return [Emit(job.seq.gateway_id, given_back), *revoked]

    # ------------------------------------------------------------ ends

    def _cancel(self, seq_id: SeqId) -> list[Effect]:
        effects: list[Effect] = []
        if (job := self._computing.pop(seq_id, None)) is not None:
            job.seq.release(self._pool)
        elif (job := self._pulling.pop(seq_id, None)) is not None:
            self._aborting[seq_id] = job  # until its pull is over
            effects.append(AbortPull(seq_id))
        else:
            dropped = [job for job in self._waiting if job.seq.seq_id == seq_id]
            effects += [AbortPull(seq_id) for job in dropped if job.prefix is not None]
            self._waiting = deque(j for j in self._waiting if j.seq.seq_id != seq_id)
        if LeaseId(seq_id) in self._leases:
            effects.append(RevokeLease(LeaseId(seq_id)))
        return effects

    def _forget_gateway(self, gateway_id: GatewayId) -> list[Effect]:
        """Its prompts are nobody's, and nobody will be told of its leases."""
        jobs = [*self._waiting, *self._pulling.values(), *self._computing.values()]
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
