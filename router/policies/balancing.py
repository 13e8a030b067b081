"""Chooses running sequences that move from a busy decode worker to a worker with shorter steps.

New requests are placed where steps are shortest, so pools fill evenly. But a worker that joins late
stays empty: after a start, a role change or a pause, the other workers stay full until their
answers end.

*When.* Sequences move if the predicted step of the slowest worker is longer than the step of the
other worker by the share `least_gain`, even after the other worker has taken a sequence. Both
workers have the same role, block layout and kernels: a move for speed alone must not change a
token.

*Which.* The gain of a sequence is its number of remaining tokens times the difference of the two
steps. Its cost is the copy of its KV, plus `PAYBACK` times the pause that its client sees. The
sequence moves only if the gain is above the cost. So a sequence near its end stays. So does a
sequence whose copy would take as long as its remaining tokens. The sequences with most remaining
tokens per token of context move first.

*Lending.* A fluid prefill worker without prompts also takes sequences without a TPOT bound. It is
assumed to stay without prompts for as long as it has been idle, so only tokens within that time
count. Its step is multiplied by `slo.LEND_RATIO`, and the cost includes the cached prompts that the
sequence evicts. The cost of the move counts twice: when prompts come, `router.machine.moves.free`
gives the sequence back.

*How many.* Sequences move until both steps are predicted to be equal, and no more, so no sequence
moves back. `AT_ONCE` is the maximum. Several gateways may see the same two workers. So each gateway
scales its own sequences up to the worker's total.

*Necessary moves.* If a sequence must leave its worker, `next_decoder` chooses the target as for a
new sequence. The sequence is never held back for its TPOT bound.

Pure. Source: Llumnix, Sun et al., OSDI 2024, which also balances by migration.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter

import msgspec
from msgspec.structs import replace

from engine.demand import DecodeCost
from engine.messages import Role, SeqId, WorkerId
from engine.worker.costs import PullCost
from router.cluster.estimates import Estimates
from router.cluster.learning import AnswerLengths
from router.cluster.view import ClusterView, WorkerView
from router.policies.base import Need, Worker
from router.policies.candidates import has_room, least, promised_share
from router.policies.slo import LEND_RATIO, LEND_SHARE, tpot_s

AT_ONCE = 16  # maximum number of sequences in one `Relief`
LEAST_LEFT = 16.0  # minimum number of tokens that a sequence must still produce after its copy
PAYBACK = 4.0  # minimum seconds gained per second in which the answer pauses
PROMPTS_PAYBACK = 16.0  # seconds gained per second that prompts lose; queued prompts wait too
LAST_BLOCKS = 2  # number of blocks pulled while the answer pauses


@dataclass(frozen=True, slots=True)
class Relief:
    """Sequences that should move from a decode worker to one target."""

    source: WorkerId
    target: WorkerId
    seq_ids: tuple[SeqId, ...]


@dataclass(frozen=True, slots=True)
class Lenders:
    """Fluid prefill workers without prompts, which may take sequences."""

    idle_s: Mapping[WorkerId, float] = field(default_factory=dict)  # seconds without prompts
    cached_token_s: float = 0.0  # seconds of prefill saved per cached token


NO_LENDERS = Lenders()


class _Load(msgspec.Struct, frozen=True):  # one per worker and comparison
    """The sequences of a worker, as needed to predict its step."""

    worker: WorkerView
    cost: DecodeCost | None  # cost of its steps; None if nothing was measured
    num_seqs: float
    context_tokens: float
    lasts_s: float  # predicted seconds for which the worker goes on decoding
    room_s: float  # seconds that later prompts lose per token of KV memory taken

    def step_s(self, more_seqs: float = 0.0, more_tokens: float = 0.0) -> float:
        """Predicts the seconds of a step with additional sequences and tokens of context."""
        assert self.cost is not None
        num_seqs, tokens = self.num_seqs + more_seqs, self.context_tokens + more_tokens
        step_s = self.cost.seconds(round(num_seqs), round(tokens))
        return step_s if self.worker.info.role.decodes else LEND_RATIO * step_s

    def plus(self, num_seqs: float, context_tokens: float) -> "_Load":
        """Returns the load with `num_seqs` additional sequences."""
        return replace(
            self,
            num_seqs=self.num_seqs + num_seqs,
            context_tokens=self.context_tokens + context_tokens,
        )

    @property
    def most_blocks(self) -> float:
        """The maximum number of blocks that all sequences of the worker may use together."""
        info = self.worker.info
        return info.num_blocks * (1.0 if info.role.decodes else LEND_SHARE)


class _Leaver(msgspec.Struct, frozen=True):
    """A sequence that may move."""

    seq_id: SeqId
    context_tokens: int
    left_tokens: float  # predicted number of remaining tokens
    worth: float  # remaining tokens per token of context


def relief(
    view: ClusterView,
    costs: Estimates,
    lengths: AnswerLengths,
    *,
    least_gain: float,
    may_leave: Callable[[SeqId, WorkerId], bool],
    lenders: Lenders = NO_LENDERS,
) -> Relief | None:
    """Returns the sequences that gain by a move from one worker to another; None without any.

    `may_leave` returns True if a sequence may move to a worker. `lenders` are further targets.
    """
    loads = {
        i: _load(worker, costs, lenders)
        for i, worker in view.workers.items()
        if worker.info.role.decodes or i in lenders.idle_s
    }
    if len(loads) < 2:
        return None
    steps_s = {i: load.step_s() for i, load in loads.items() if load.cost is not None}
    slowest_first = sorted(steps_s, key=lambda i: (-steps_s[i], i))
    for source in slowest_first:
        if steps_s[source] <= (1 + least_gain) * steps_s[slowest_first[-1]]:
            return None  # the remaining pairs differ even less
        worker = loads[source].worker
        if not worker.decodes or not worker.info.role.decodes:
            continue
        leavers: list[_Leaver] = []
        for target in _targets(view, source, [loads[i] for i in reversed(slowest_first)]):
            if not _may_gain(loads[source], loads[target], least_gain):
                continue
            leavers = leavers or _leavers(worker, lengths)
            may_go = (leaver for leaver in leavers if may_leave(leaver.seq_id, target))
            chosen = tuple(_chosen(loads[source], loads[target], may_go, costs, least_gain))
            if chosen:
                return Relief(source, target, chosen)
    return None


def counted_step_s(worker: WorkerView, costs: Estimates) -> float | None:
    """Returns the weighted seconds of a worker's present step; None if nothing was measured."""
    load = _load(worker, costs)
    return None if load.cost is None else load.step_s()


def is_idle_lender(worker: WorkerView) -> bool:
    """True for a fluid prefill worker without prompts."""
    info = worker.info
    has_prompts = worker.prefills or worker.foreign.prompt_tokens
    return info.role is Role.PREFILL and info.is_fluid and not has_prompts


def _load(worker: WorkerView, costs: Estimates, lenders: Lenders = NO_LENDERS) -> _Load:
    idle_s = lenders.idle_s.get(worker.info.worker_id)
    return _Load(
        worker,
        costs.decode_cost(worker),
        worker.num_decodes,
        worker.context_tokens + worker.foreign.context_tokens,
        inf if idle_s is None else idle_s,
        0.0 if idle_s is None else lenders.cached_token_s,
    )


def _targets(
    view: ClusterView, source: WorkerId, fastest_first: Iterable[_Load]
) -> Sequence[WorkerId]:
    """Returns the fastest target of each role.

    Both are needed, because the prefill worker may be unable to take any of the sequences.
    """
    found: dict[Role, WorkerId] = {}
    for load in fastest_first:
        role = load.worker.info.role
        if role not in found and _could_take(view, source, load):
            found[role] = load.worker.info.worker_id
    return list(found.values())


def _could_take(view: ClusterView, source: WorkerId, load: _Load) -> bool:
    """True if the target has room, and sequences continue there with the same tokens and KV."""
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


def _leavers(worker: WorkerView, lengths: AnswerLengths) -> list[_Leaver]:
    """Returns a worker's sequences; most remaining tokens per context token first."""
    leavers = []
    for seq_id, claim in worker.decodes.items():
        left, context_tokens = (
            lengths.left(claim.max_tokens, claim.num_tokens),
            claim.context_tokens,
        )
        leavers.append(_Leaver(seq_id, context_tokens, left, left / max(context_tokens, 1)))
    return sorted(leavers, key=attrgetter("worth"), reverse=True)


def _may_gain(source: _Load, target: _Load, least_gain: float) -> bool:
    """False if even the sequence with the least context gains too little by the move."""
    weight = _weight(source)
    least = min([claim.context_tokens for claim in source.worker.decodes.values()])
    return source.step_s() > (1 + least_gain) * target.step_s(weight, weight * least)


def _weight(source: _Load) -> float:
    """Returns the number of sequences that each of our sequences represents.

    Other gateways move their own share of the worker's sequences in the same way.
    """
    return source.num_seqs / max(len(source.worker.decodes), 1)


def _chosen(
    source: _Load, target: _Load, leavers: Iterable[_Leaver], costs: Estimates, least_gain: float
) -> Iterator[SeqId]:
    """Yields the sequences that should move, until both workers would be equally fast."""
    weight, pull = _weight(source), costs.pull_cost(target.worker)
    num_chosen, num_blocks, wanted_gain = 0, target.worker.promised_blocks, least_gain
    here_s, most_blocks = source.step_s(), target.most_blocks
    for leaver in leavers:
        num_blocks_then = num_blocks + source.worker.decodes[leaver.seq_id].blocks
        if num_blocks_then > most_blocks:
            continue
        there_s = target.step_s(weight, weight * leaver.context_tokens)
        is_full = target.worker.num_decodes + num_chosen >= target.worker.info.max_running
        if is_full or num_chosen >= AT_ONCE or here_s <= (1 + wanted_gain) * there_s:
            return
        after_s = source.step_s(-weight, -weight * leaver.context_tokens)
        if after_s < there_s or not _pays(leaver, target, here_s, there_s, pull):
            continue
        yield leaver.seq_id
        num_chosen, num_blocks, wanted_gain = num_chosen + 1, num_blocks_then, 0.0
        source = source.plus(-weight, -weight * leaver.context_tokens)
        target = target.plus(weight, weight * leaver.context_tokens)
        here_s = after_s


def _pays(leaver: _Leaver, target: _Load, here_s: float, there_s: float, pull: PullCost) -> bool:
    """True if the move gains more seconds than it costs."""
    layout = target.worker.info.layout
    num_blocks, block_bytes = layout.num_blocks_for(leaver.context_tokens), layout.block_bytes
    copy_s = pull.seconds(num_blocks, num_blocks * block_bytes)
    left_then = min(leaver.left_tokens - copy_s / here_s, target.lasts_s / there_s)
    if left_then < LEAST_LEFT:
        return False
    pause_s = pull.seconds(LAST_BLOCKS, LAST_BLOCKS * block_bytes) + there_s
    room_s = target.room_s * (leaver.context_tokens + left_then)
    num_moves = 1 if target.worker.info.role.decodes else 2  # a lent sequence also moves back
    cost_s = num_moves * (copy_s + PAYBACK * pause_s) + PROMPTS_PAYBACK * room_s
    return left_then * (here_s - there_s) > cost_s


def next_decoder(
    view: ClusterView, need: Need, *, source: WorkerId, costs: Estimates, rng: random.Random
) -> WorkerId | None:
    """Chooses the worker at which a sequence of `source` continues; None if none has room now.

    The worker with the least time per token after joining is chosen. While these times are unknown,
    it is the worker with the smallest promised share of KV.
    """
    able = [
        item
        for item in reachable(view, source)
        if item[1].info.role.decodes and has_room(item[1], need)
    ]
    if not able:
        return None
    paces_s = {i: tpot_s(worker, need, costs) for i, worker in able}
    known_s = {i: pace_s for i, pace_s in paces_s.items() if pace_s is not None}

    def cost(item: Worker) -> tuple[float, ...]:
        worker_id, worker = item
        return (known_s[worker_id] if len(known_s) == len(able) else promised_share(worker),)

    return rng.choice(least(able, cost))[0]


def reachable(view: ClusterView, source: WorkerId) -> list[Worker]:
    """Returns the other workers that can read blocks of `source` and receive its KV."""
    layout = view.workers[source].info.layout
    return [
        (worker_id, worker)
        for worker_id, worker in view.workers.items()
        if worker_id != source
        and worker.info.layout.difference(layout) is None
        and (source, worker_id) not in view.severed
    ]
