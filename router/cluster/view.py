"""The cluster as one gateway knows it: live workers, and the claims on each.

A store is in the view like a worker, but computes nothing: it keeps blocks that workers pull. A
store never has claims, and its size and block size do not apply to the workers.

Claims are debits on predicted capacity. A claim is made when a request is placed, and released when
its need ends. Claims are exact for the requests of this gateway, whatever the workers last
reported.

Claims of other gateways come from the workers' reports: the reported load minus our own claims. If
a worker sends a report before it has received a new request of ours, our claim is subtracted
although the report lacks it. So the other gateways' share is too small until the next report. No
claim is counted twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import msgspec
from msgspec.structs import replace

from engine.messages import LoadReport, Role, RoleChanged, SeqId, Welcome, WorkerId


class PrefillClaim(msgspec.Struct, frozen=True):
    """The claim of a prompt that waits or is being computed."""

    tokens: int  # number of tokens to compute
    prompt_tokens: int  # number of tokens, with cached and pulled ones
    seconds: float  # predicted seconds; 0 if unknown


class DecodeClaim(msgspec.Struct):
    """The claim of a sequence that decodes or will decode on a worker."""

    blocks: int  # number of blocks at its predicted length
    context_tokens: int  # present number of tokens
    begins_s: float  # predicted time of its first token
    prompt_tokens: int  # number of tokens of the prompt
    max_tokens: int  # maximum number of tokens of the answer
    is_there: bool = False  # True if the worker reports the sequence
    has_begun: bool = False  # True from its first token on

    @property
    def num_tokens(self) -> int:
        """The number of answer tokens so far."""
        return self.context_tokens - self.prompt_tokens


class Foreign(msgspec.Struct, frozen=True):
    """The load of a worker by other gateways, at its last report."""

    prompt_tokens: int = 0  # number of tokens in waiting and running prompts
    seqs: int = 0  # number of sequences that decode or will decode
    blocks: int = 0  # number of blocks that these sequences fill now
    context_tokens: int = 0  # number of context tokens of these sequences


NOTHING = Foreign()


@dataclass(slots=True)
class DecodeTotals:
    """The sequences and context tokens of all decoding workers, over all gateways."""

    num_seqs: int = 0
    context_tokens: int = 0


@dataclass(slots=True)
class WorkerView:
    """A live worker and the claims on it, by sequence, oldest claim first."""

    info: Welcome
    load: LoadReport | None = None
    reported_s: float = 0.0  # time at which `load` was reported
    foreign: Foreign = NOTHING
    prefills: dict[SeqId, PrefillClaim] = field(default_factory=dict)
    decodes: dict[SeqId, DecodeClaim] = field(default_factory=dict)
    reserved_tokens: int = 0
    reserved_prompt_tokens: int = 0
    reserved_s: float = 0.0
    reserved_blocks: int = 0
    context_tokens: int = 0
    num_begun: int = 0  # number of sequences in `decodes` that have begun
    computing_since_s: float = 0.0  # time at which the oldest prompt here was started
    turnover: float = 0.0  # cached tokens stored since the start, as a share of the cache
    touched: set[WorkerId] = field(
        default_factory=set, repr=False
    )  # set of changed workers, shared with the view
    totals: DecodeTotals = field(
        default_factory=DecodeTotals, repr=False, compare=False
    )  # totals of the view, if the worker decodes

    def change_role(self, message: RoleChanged) -> None:
        """Changes the worker's role. Claims on the worker are kept."""
        self.info = replace(self.info, role=message.role)
        self.touched.add(self.info.worker_id)

    def reserve_prefill(
        self,
        seq_id: SeqId,
        num_tokens: int,
        *,
        prompt_tokens: int | None = None,
        seconds: float = 0.0,
        now_s: float = 0.0,
        waits: bool = False,
    ) -> None:
        """Claims the computation of `num_tokens` of a prompt on this worker.

        With `waits`, the prompt does not start before `begin_prefill`: its prefix is pulled first.
        """
        assert seq_id not in self.prefills
        if not self.prefills:
            self.computing_since_s = inf if waits else now_s
        claim = PrefillClaim(num_tokens, prompt_tokens or num_tokens, seconds)
        self.prefills[seq_id] = claim
        self.reserved_tokens += claim.tokens
        self.reserved_prompt_tokens += claim.prompt_tokens
        self.reserved_s += claim.seconds
        self.touched.add(self.info.worker_id)

    def begin_prefill(self, seq_id: SeqId, now_s: float) -> None:
        """Records that a prompt's first chunk starts. A pull of its prefix is over then."""
        if seq_id == next(iter(self.prefills), None):
            self.computing_since_s = now_s
            self.touched.add(self.info.worker_id)

    def release_prefill(self, seq_id: SeqId, now_s: float = 0.0) -> None:
        """Releases a prompt's claim, if the prompt still has one."""
        if seq_id not in self.prefills:
            return
        if seq_id == next(iter(self.prefills)):
            self.computing_since_s = now_s
        claim = self.prefills.pop(seq_id)
        self.reserved_tokens -= claim.tokens
        self.reserved_prompt_tokens -= claim.prompt_tokens
        self.reserved_s = self.reserved_s - claim.seconds if self.prefills else 0.0
        self.touched.add(self.info.worker_id)

    def reserve_decode(
        self,
        seq_id: SeqId,
        num_blocks: int,
        *,
        context_tokens: int = 0,
        begins_s: float = 0.0,
        prompt_tokens: int = 0,
        max_tokens: int = 1,
    ) -> None:
        """Claims the KV of a sequence at its predicted length."""
        assert seq_id not in self.decodes
        self.decodes[seq_id] = DecodeClaim(
            num_blocks, context_tokens, begins_s, prompt_tokens, max_tokens
        )
        self.reserved_blocks += num_blocks
        self.context_tokens += context_tokens
        self.totals.num_seqs += 1
        self.totals.context_tokens += context_tokens
        self.touched.add(self.info.worker_id)

    def begin_decode(self, seq_id: SeqId) -> None:
        """Records the first token of a sequence, which decodes from now on."""
        claim = self.decodes[seq_id]
        self.num_begun += not claim.has_begun
        claim.is_there = claim.has_begun = True
        self.touched.add(self.info.worker_id)

    def grow_decode(self, seq_id: SeqId, num_tokens: int) -> None:
        """Adds tokens to a sequence.

        This happens for each token and changes little, so the worker is not added to `touched`.
        """
        self.decodes[seq_id].context_tokens += num_tokens
        self.context_tokens += num_tokens
        self.totals.context_tokens += num_tokens

    def grow_decodes(self, num_tokens: int) -> None:
        """Adds `num_tokens` to the context totals, for claims that were increased already."""
        self.context_tokens += num_tokens
        self.totals.context_tokens += num_tokens

    def extend_decode(self, seq_id: SeqId, num_blocks: int) -> None:
        """Increases the claim of an unexpectedly long sequence to `num_blocks` in total."""
        claim = self.decodes[seq_id]
        self.reserved_blocks += num_blocks - claim.blocks
        claim.blocks = num_blocks
        self.touched.add(self.info.worker_id)

    def release_decode(self, seq_id: SeqId) -> None:
        """Releases a sequence's claim, if the sequence still has one."""
        claim = self.decodes.pop(seq_id, None)
        if claim is not None:
            self.reserved_blocks -= claim.blocks
            self.context_tokens -= claim.context_tokens
            self.num_begun -= claim.has_begun
            self.totals.num_seqs -= 1
            self.totals.context_tokens -= claim.context_tokens
            self.touched.add(self.info.worker_id)

    def report(self, load: LoadReport, now_s: float) -> None:
        """Records a load report, and computes other gateways' load from it."""
        self.load, self.reported_s = load, now_s
        block_size = self.info.layout.block_size
        own = [claim for claim in self.decodes.values() if claim.is_there]
        own_blocks = sum([-(-claim.context_tokens // block_size) for claim in own])
        own_tokens = sum([claim.context_tokens for claim in own])
        before = self.foreign
        self.foreign = Foreign(
            prompt_tokens=max(load.prompt_tokens - self.reserved_prompt_tokens, 0),
            seqs=max(load.decode_seqs - len(own), 0),
            blocks=max(load.decode_blocks - own_blocks, 0),
            context_tokens=max(load.context_tokens - own_tokens, 0),
        )
        self.totals.num_seqs += self.foreign.seqs - before.seqs
        self.totals.context_tokens += self.foreign.context_tokens - before.context_tokens
        self.touched.add(self.info.worker_id)

    def ready(self, foreign_s: float = 0.0) -> tuple[float, float]:
        """Returns when all its prompts are computed: a time, and a minimum of seconds from now.

        The minimum covers a first prompt that takes longer than predicted: the other prompts start
        after it.

        `foreign_s` is the work for other gateways' prompts at the last report. The worker
        alternates between gateways, so its time for our prompts since then did not reduce that
        work.
        """
        if not self.prefills:
            return (self.reported_s + foreign_s if foreign_s > 0.0 else -inf), 0.0
        total_s = self.reserved_s + foreign_s
        if self.computing_since_s == inf:
            return -inf, total_s
        first_s = self.prefills[next(iter(self.prefills))].seconds
        return self.computing_since_s + total_s, total_s - first_s

    def ready_s(self, now_s: float, *, foreign_s: float = 0.0) -> float:
        """Predicts the seconds until the worker has computed all its prompts."""
        at_s, behind_s = self.ready(foreign_s)
        return max(at_s - now_s, behind_s)

    @property
    def is_store(self) -> bool:
        """True for a store, which only keeps blocks for workers."""
        return self.info.role is Role.STORE

    @property
    def num_tokens(self) -> int:
        """The capacity of the worker's KV memory in tokens."""
        return self.info.num_blocks * self.info.layout.block_size

    @property
    def num_decodes(self) -> int:
        """The number of sequences of all gateways that decode or will decode on this worker."""
        return len(self.decodes) + self.foreign.seqs

    @property
    def num_decoding(self) -> int:
        """The number of sequences that decode now; all those of other gateways are counted."""
        return self.num_begun + self.foreign.seqs

    @property
    def mean_context_tokens(self) -> int:
        """The context tokens of `num_decodes`, with our sequences in the middle of their growth."""
        end_tokens = self.reserved_blocks * self.info.layout.block_size
        return (self.context_tokens + end_tokens) // 2 + self.foreign.context_tokens

    @property
    def decoding_context_tokens(self) -> int:
        """The share of `mean_context_tokens` that belongs to `num_decoding`, at equal lengths."""
        num_decodes = self.num_decodes
        if not num_decodes:
            return 0
        return self.mean_context_tokens * self.num_decoding // num_decodes

    @property
    def promised_blocks(self) -> int:
        """The number of KV blocks that all gateways claim."""
        return self.reserved_blocks + self.foreign.blocks

    @property
    def promised_tokens(self) -> int:
        """The number of prompt tokens that the worker must compute for all gateways."""
        return self.reserved_tokens + self.foreign.prompt_tokens

    def can_pull_from(self, source: "WorkerView") -> bool:
        """True if this worker can use blocks of `source`, and receives them without rounding.

        Rounded blocks would be cached here as if this worker had computed them.
        """
        return (
            self.info.pulls_unchanged
            and source.info.fingerprint == self.info.fingerprint
            and source.info.layout.difference(self.info.layout) is None
        )


@dataclass(slots=True)
class ClusterView:
    """All live workers. Only the router machine changes this view.

    `severed`: pairs of a live source and a live sink between which KV lately did not arrive, each
    with the time at which the pair is tried again. `touched`: workers whose claims or loads changed
    since a reader last cleared the set. `capacity_tokens`: length of the longest request that the
    workers could serve.
    """

    workers: dict[WorkerId, WorkerView] = field(default_factory=dict)
    severed: dict[tuple[WorkerId, WorkerId], float] = field(default_factory=dict)
    touched: set[WorkerId] = field(default_factory=set)
    capacity_tokens: int | None = None
    decode_totals: DecodeTotals = field(default_factory=DecodeTotals)
    # The workers that prefill; if there are none, the fluid decode workers.
    prefillers: Sequence[tuple[WorkerId, WorkerView]] = ()
    decoders: Sequence[WorkerView] = ()  # workers that decode
    computing: WorkerView | None = None  # any worker except a store; all share a block size

    def __post_init__(self) -> None:
        self.measure()

    def add(self, info: Welcome) -> WorkerView:
        """Adds a worker without claims."""
        worker = WorkerView(info, touched=self.touched)
        self.workers[info.worker_id] = worker
        self.measure()
        return worker

    def remove(self, worker_id: WorkerId) -> WorkerView | None:
        """Removes a worker and returns it; None if it was not there."""
        worker = self.workers.pop(worker_id, None)
        self.measure()
        return worker

    def measure(self) -> None:
        """Updates the lists of workers by role, and the length of the longest possible request.

        One worker must have memory for the prompt, and one for the whole request. While a role has
        no worker, the length is kept: the role's workers are likely to return unchanged.
        """
        workers = self.workers.items()
        found = [(i, w) for i, w in workers if w.info.role.prefills]
        self.prefillers = found or [(i, w) for i, w in workers if w.info.is_fluid]
        self.computing = next((w for _, w in workers if not w.is_store), None)
        self.decoders = [w for _, w in workers if w.info.role.decodes]
        self.decode_totals = self._summed()
        for _, worker in workers:
            decodes = worker.info.role.decodes
            worker.totals = self.decode_totals if decodes else DecodeTotals()
        prompt_tokens = max((w.num_tokens for _, w in self.prefillers), default=0)
        end_tokens = max((w.num_tokens for w in self.decoders), default=0)
        if prompt_tokens and end_tokens:
            self.capacity_tokens = min(prompt_tokens, end_tokens)

    def _summed(self) -> DecodeTotals:
        return DecodeTotals(
            sum(w.num_decodes for w in self.decoders),
            sum(w.context_tokens + w.foreign.context_tokens for w in self.decoders),
        )

    def missing(self) -> str | None:
        """Returns the role whose absence prevents serving; None if requests can be served."""
        if not self.prefillers:
            return "no prefill worker"
        if not self.decoders:
            return "no decode worker"
        return None

    def remove_severed(self, now_s: float) -> None:
        """Removes the severed pairs that may be tried again."""
        if self.severed:
            self.severed = {pair: at_s for pair, at_s in self.severed.items() if at_s > now_s}

    def validate(self) -> None:
        """Asserts that every total is the sum of its parts."""
        assert self.decode_totals == self._summed()
        assert self.decoders == [w for w in self.workers.values() if w.info.role.decodes]
        for worker in self.workers.values():
            prefills, decodes = worker.prefills.values(), worker.decodes.values()
            assert not (worker.is_store and (prefills or decodes)), "work for a store"
            assert worker.reserved_tokens == sum(c.tokens for c in prefills)
            assert worker.reserved_prompt_tokens == sum(c.prompt_tokens for c in prefills)
            assert abs(worker.reserved_s - sum(c.seconds for c in prefills)) < 1e-6
            assert worker.reserved_blocks == sum(c.blocks for c in decodes)
            assert worker.context_tokens == sum(c.context_tokens for c in decodes)
            assert worker.num_begun == sum(c.has_begun for c in decodes)
