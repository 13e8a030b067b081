"""The running sequences that a busy decode worker gives to one with shorter steps.

New requests go where steps are shortest, so pools fill evenly. A worker that joins late has no part
in that: it starts, takes the other role or comes back from a pause, and the others stay full until
their answers end.

*When.* The step of the slowest worker is predicted to be longer than that of another one by the
share `least_gain`, after that one has taken a sequence. Both have the same role, block layout and
kernels: a move for speed alone must not change a token.

*Which.* A sequence's gain is the tokens that it has left, each sooner by the difference of the two
steps. Its cost is the copy of its KV, and `PAYBACK` times the pause that its client sees. It goes
only if the gain is above the cost. So no sequence goes that is near its end, or whose copy would
take as long as its rest. First go those with most tokens left for each token of context.

*Lending.* A fluid prefill worker without prompts takes sequences, too, if they have no bound on
TPOT. It is taken to stay without prompts for as long again, so only the tokens of that time count.
A step counts there for a little more than it takes (`slo.LEND_RATIO`), and the room that the
sequence needs for what prompts would have found there. When prompts come,
`router.machine.moves.lending` gives the sequences back.

*How many.* Until both steps are predicted to be equal, and never beyond, so nothing goes back.
`AT_ONCE` is the most. Several gateways may see the same two workers. Each counts one of its own
sequences for as many as its share of the source is short of all of it.

Pure. Source: Llumnix, Sun et al., OSDI 2024, which balances by migration too.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from operator import attrgetter

from engine.messages import Role, SeqId, WorkerId
from router.cluster.lengths import AnswerLengths
from router.cluster.view import ClusterView, DecodeClaim, WorkerView
from router.policies.base import Costs
from router.policies.slo import LEND_RATIO, LEND_SHARE

AT_ONCE = 16  # sequences
LEAST_LEFT = 16.0  # tokens that a sequence has to come after its copy
PAYBACK = 4.0  # seconds to gain for each second in which the answer stands still
PROMPTS_PAYBACK = 16.0  # for each second of prompts more: those behind them wait too
LAST_BLOCKS = 2  # pulled while it stands still


@dataclass(frozen=True, slots=True)
class Relief:
    """Sequences that are to leave a decode worker, and the worker that is to take them."""

    source: WorkerId
    target: WorkerId
    seq_ids: tuple[SeqId, ...]


@dataclass(frozen=True, slots=True)
class Lenders:
    """Fluid prefill workers without prompts, which may take sequences."""

    idle_s: Mapping[WorkerId, float] = field(default_factory=dict)  # for how long without
    cached_token_s: float = 0.0  # seconds that a token in their caches saves prompts


NO_LENDERS = Lenders()


@dataclass(frozen=True, slots=True)
class _Load:
    """The sequences of a worker, as the price of its step sees them."""

    worker: WorkerView
    num_seqs: float
    context_tokens: float
    lasts_s: float = inf  # how long it is expected to go on decoding
    room_s: float = 0.0  # what prompts lose by the room of a token

    def step_s(self, costs: Costs) -> float | None:
        """For how many seconds its step counts, as predicted; None if nothing was measured."""
        step_s = costs.step_s(self.worker, round(self.num_seqs), round(self.context_tokens))
        return step_s if step_s is None or self.worker.info.role.decodes else LEND_RATIO * step_s

    def plus(self, num_seqs: float, context_tokens: float) -> "_Load":
        """Returns the load with so many more sequences."""
        return replace(
            self,
            num_seqs=self.num_seqs + num_seqs,
            context_tokens=self.context_tokens + context_tokens,
        )

    @property
    def most_blocks(self) -> float:
        """Blocks that all its sequences together may have."""
        info = self.worker.info
        return info.num_blocks * (1.0 if info.role.decodes else LEND_SHARE)


@dataclass(frozen=True, slots=True)
class _Leaver:
    """A sequence that may leave."""

    seq_id: SeqId
    context_tokens: int
    left_tokens: float  # predicted
    worth: float  # tokens left for each token of context


def relief(
    view: ClusterView,
    costs: Costs,
    lengths: AnswerLengths,
    *,
    least_gain: float,
    may_leave: Callable[[SeqId, WorkerId], bool],
    lenders: Lenders = NO_LENDERS,
) -> Relief | None:
    """Returns the sequences that gain by a move to another worker; None if none does.

    `may_leave` says which sequences may be moved to a worker. `lenders` may take some, too.
    """
    loads = {
        i: _load(worker, lenders)
        for i, worker in view.workers.items()
        if worker.info.role.decodes or i in lenders.idle_s
    }
    if len(loads) < 2:
        return None
    steps_s = {i: load.step_s(costs) for i, load in loads.items()}
    known_s = {i: step_s for i, step_s in steps_s.items() if step_s is not None}
    slowest_first = sorted(known_s, key=lambda i: (-known_s[i], i))
    for source in slowest_first:
        if known_s[source] <= (1 + least_gain) * known_s[slowest_first[-1]]:
            return None  # nor does any other of those that follow
        worker = loads[source].worker
        if not worker.decodes or not worker.info.role.decodes:
            continue
        takers = [i for i in reversed(slowest_first) if _could_take(view, source, loads[i])]
        # The fastest of each role: an idle prefill worker may take none of these sequences.
        targets = {loads[i].worker.info.role: i for i in reversed(takers)}
        for target in sorted(targets.values(), key=takers.index):
            may_go = [seq_id for seq_id in worker.decodes if may_leave(seq_id, target)]
            leavers = _leavers(worker, lengths, may_go)
            chosen = tuple(_chosen(loads[source], loads[target], leavers, costs, least_gain))
            if chosen:
                return Relief(source, target, chosen)
    return None


def counted_step_s(worker: WorkerView, costs: Costs) -> float | None:
    """For how many seconds a worker's present step counts; None if nothing was measured."""
    return _load(worker).step_s(costs)


def is_idle_lender(worker: WorkerView) -> bool:
    """True for a fluid prefill worker without prompts."""
    info = worker.info
    has_prompts = worker.prefills or worker.foreign.prompt_tokens
    return info.role is Role.PREFILL and info.is_fluid and not has_prompts


def _load(worker: WorkerView, lenders: Lenders = NO_LENDERS) -> _Load:
    context_tokens = worker.context_tokens + worker.foreign.context_tokens
    load = _Load(worker, worker.num_decodes, context_tokens)
    if (idle_s := lenders.idle_s.get(worker.info.worker_id)) is not None:
        load = replace(load, lasts_s=idle_s, room_s=lenders.cached_token_s)
    return load


def _could_take(view: ClusterView, source: WorkerId, load: _Load) -> bool:
    """True if the target has a place, where a sequence goes on with the same tokens and KV."""
    worker, ours = load.worker, view.workers[source].info
    theirs, target = worker.info, worker.info.worker_id
    return (
        source != target
        and worker.num_decodes < theirs.max_running
        and worker.promised_blocks < load.most_blocks
        and (ours.role is theirs.role or (ours.role is Role.DECODE and not theirs.role.decodes))
        and ours.kernels == theirs.kernels
        and ours.layout.difference(theirs.layout) is None
        and (source, target) not in view.severed
    )


def _leavers(worker: WorkerView, lengths: AnswerLengths, seq_ids: Iterable[SeqId]) -> list[_Leaver]:
    """Returns these sequences of a worker, those with most to gain first."""
    leavers = [_leaver(seq_id, worker.decodes[seq_id], lengths) for seq_id in seq_ids]
    return sorted(leavers, key=attrgetter("worth"), reverse=True)


def _leaver(seq_id: SeqId, claim: DecodeClaim, lengths: AnswerLengths) -> _Leaver:
    left = lengths.left(claim.max_tokens, claim.num_tokens)
    return _Leaver(seq_id, claim.context_tokens, left, left / max(claim.context_tokens, 1))


def _chosen(
    source: _Load, target: _Load, leavers: Iterable[_Leaver], costs: Costs, least_gain: float
) -> Iterator[SeqId]:
    """Yields the sequences that leave, until both workers are predicted to be equally fast."""
    # Other gateways move their share: each sequence stands for several.
    weight = source.num_seqs / max(len(source.worker.decodes), 1)
    num_chosen, num_blocks, wanted_gain = 0, target.worker.promised_blocks, least_gain
    for leaver in leavers:
        num_blocks_then = num_blocks + source.worker.decodes[leaver.seq_id].blocks
        if num_blocks_then > target.most_blocks:
            continue
        after = source.plus(-weight, -weight * leaver.context_tokens)
        there = target.plus(weight, weight * leaver.context_tokens)
        here_s, after_s, there_s = (load.step_s(costs) for load in (source, after, there))
        assert here_s is not None
        assert after_s is not None
        assert there_s is not None
        is_full = target.worker.num_decodes + num_chosen >= target.worker.info.max_running
        if is_full or num_chosen >= AT_ONCE or here_s <= (1 + wanted_gain) * there_s:
            return
        if after_s < there_s or not _pays(leaver, target, here_s, there_s, costs):
            continue
        yield leaver.seq_id
        num_chosen, num_blocks, wanted_gain = num_chosen + 1, num_blocks_then, 0.0
        source, target = after, there


def _pays(leaver: _Leaver, target: _Load, here_s: float, there_s: float, costs: Costs) -> bool:
    """True if the move saves the client more seconds than it costs."""
    block_size = target.worker.info.layout.block_size
    copy_s = costs.pull_s(target.worker, leaver.context_tokens)
    pause_s = costs.pull_s(target.worker, LAST_BLOCKS * block_size) + there_s
    left_then = min(leaver.left_tokens - copy_s / here_s, target.lasts_s / there_s)
    if left_then < LEAST_LEFT:
        return False
    room_s = target.room_s * (leaver.context_tokens + left_then)
    cost_s = copy_s + PAYBACK * pause_s + PROMPTS_PAYBACK * room_s
    return left_then * (here_s - there_s) > cost_s
