"""Finds the workers that could take a request now, for every policy.

A prompt waits in the router until a prefill worker has little work left. So no prompt waits behind
a long one while another worker is idle. "Little" is a number of predicted seconds, or of tokens
while there is no prediction. Policies that do not bind late skip this rule.

Memory at a decode worker is counted for the predicted lengths of answers, of running requests and
of the new one. If a prediction is too short, the worker returns its youngest sequence.

If a decode worker ran out of memory and returned this request, it may take the request again after
it has reported room for the whole request.

A mixed worker decodes what it prefills. If there is no prefill worker, fluid decode workers prefill
in its place, however long their prefill takes.

Two workers between which a pull failed are not combined while there are other workers, even busy
ones. Waiting is quicker than another failure.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from math import inf

from engine.messages import Role, WorkerId
from router.cluster.estimates import Estimates
from router.cluster.view import ClusterView, WorkerView
from router.policies.base import (
    Asked,
    Busy,
    Candidates,
    Decision,
    Impossible,
    Need,
    Worker,
)

LEAST_WAIT_S = 1e-3  # seconds; predictions and sums of times are not more exact
LEAST_ROOM = 1 / 16  # minimum share of blocks counted as cache, as a full worker gets room again


@dataclass(frozen=True, slots=True)
class Backlog:
    """The maximum work that a prefill worker may have when it gets another prompt."""

    tokens: int  # limit including the new prompt; an idle worker takes any prompt
    seconds: float  # limit without the new prompt, if times are known
    costs: Estimates
    now_s: float

    def wait_s(self, worker: WorkerView, num_tokens: int) -> float:
        """Returns the seconds until the worker may get another prompt; 0 if it may now.

        Returns infinity if the time is unknown, or if no time can be predicted: the worker's first
        prompt takes longer than predicted, and the other prompts wait for it.
        """
        ready_s = predicted_ready_s(worker, self.costs, self.now_s)
        if ready_s is not None:
            behind_s = worker.ready(foreign_prefill_s(worker, self.costs) or 0.0)[1]
            if behind_s - self.seconds >= LEAST_WAIT_S:
                return inf
            wait_s = ready_s - self.seconds
            return wait_s if wait_s >= LEAST_WAIT_S else 0.0
        backlog = worker.reserved_tokens
        fits = backlog == 0 or backlog + num_tokens <= self.tokens
        return 0.0 if fits else inf


def predicted_ready_s(worker: WorkerView, costs: Estimates, now_s: float) -> float | None:
    """Returns the seconds until the worker has computed all its prompts; None if unknown."""
    if worker.prefills and not worker.reserved_s:
        return None
    foreign_s = foreign_prefill_s(worker, costs)
    return None if foreign_s is None else worker.ready_s(now_s, foreign_s=foreign_s)


def longest_predicted_s(worker: WorkerView, costs: Estimates) -> float | None:
    """Returns the longest predicted step of a worker, with all its work and whole prompts.

    Returns None if unknown.
    """
    foreign_s = foreign_prefill_s(worker, costs)
    if foreign_s is None or (worker.prefills and not worker.reserved_s):
        return None
    prefill_s, num_seqs = foreign_s + worker.reserved_s, worker.num_decodes
    if not num_seqs:
        return prefill_s
    context_tokens = worker.context_tokens + worker.foreign.context_tokens
    step_s = costs.step_s(worker, num_seqs, context_tokens)
    return None if step_s is None else prefill_s + step_s


def foreign_prefill_s(worker: WorkerView, costs: Estimates) -> float | None:
    """Returns the seconds of other gateways' prompts at the last report; None if unknown."""
    if not worker.foreign.prompt_tokens:
        return 0.0
    return costs.prefill_s(worker, worker.foreign.prompt_tokens, 0)


def find(
    view: ClusterView,
    need: Need,
    backlog: Backlog | None,
    *,
    is_fluid: bool = False,
    other_than: WorkerId | None = None,
) -> Candidates | Busy | Impossible:
    """Finds workers that have room, except `other_than`.

    With `backlog`, only prefill workers with little work count. With `is_fluid`, the list of
    prefill workers may be empty if a fluid decode worker has room. The list of decode workers may
    be empty if a fluid prefill worker has time.
    """
    workers = view.workers.items()
    decoders = [(i, w) for i, w in workers if w.info.role.decodes and i != other_than]
    prefillers = [item for item in view.prefillers if item[0] != other_than]
    if not prefillers:
        return Busy(lacks=Role.PREFILL)  # a prefill worker may join later or change its role
    if not decoders:
        return Busy()
    fault = _fault(prefillers, decoders, need)
    if fault is not None:
        return fault
    prefillers = [item for item in prefillers if _could_prefill(item[1], need)]
    open_decoders = [item for item in decoders if has_room(item[1], need)]
    if not open_decoders and not is_fluid:
        return Busy()
    waits = [(_wait_s(w, need, backlog), i, w) for i, w in prefillers]
    open_prefillers = [(i, w) for wait_s, i, w in waits if wait_s == 0.0]
    may_decode = (w.info.is_fluid and not w.info.role.decodes for _, w in open_prefillers)
    if not open_decoders and not any(may_decode):
        return Busy()
    busy = Busy()
    if open_prefillers:
        if not view.severed or not open_decoders:
            return Candidates(open_prefillers, open_decoders)
        found = _kept_apart(view, (prefillers, decoders), (open_prefillers, open_decoders))
        if isinstance(found, Candidates):
            return found
    else:
        wait_s = min((wait_s for wait_s, _, _ in waits))
        until_s = None if backlog is None or wait_s == inf else backlog.now_s + wait_s
        busy = Busy(until_s, Role.PREFILL)
    if is_fluid and any(worker.info.is_fluid for _, worker in open_decoders):
        return Candidates([], open_decoders, busy=busy)
    return busy


def _fault(
    prefillers: Sequence[Worker], decoders: Sequence[Worker], need: Need
) -> Impossible | None:
    if not any(_fits_empty(w, need) for _, w in decoders):
        return Impossible("the request is larger than the KV memory of any decode worker")
    if not any(_could_prefill(w, need) for _, w in prefillers):
        return Impossible("the request is larger than the KV memory of any prefill worker")
    return None


def _wait_s(worker: WorkerView, need: Need, backlog: Backlog | None) -> float:
    if worker.info.role.decodes and not has_room(worker, need):
        return inf
    if backlog is None:
        return 0.0
    return backlog.wait_s(worker, tokens_to_compute(worker, need))


def _kept_apart(
    view: ClusterView,
    alive: tuple[list[Worker], list[Worker]],
    room: tuple[list[Worker], list[Worker]],
) -> Candidates | Busy:
    """Keeps only the prefill workers whose KV reaches a decode worker with room.

    Without any, returns `Busy` if other live workers can be combined, or else all candidates.
    """
    apart = frozenset(view.severed)
    prefillers, decoders = room
    able = reaching(prefillers, decoders, apart)
    if able:
        return Candidates(able, decoders, apart)
    if reaching(*alive, apart):
        return Busy()
    return Candidates(prefillers, decoders)


def reaching(
    prefillers: Sequence[Worker],
    decoders: Sequence[Worker],
    apart: Container[tuple[WorkerId, WorkerId]],
) -> list[Worker]:
    """Returns the prefill workers whose KV reaches at least one of these decode workers."""
    return [
        (worker_id, worker)
        for worker_id, worker in prefillers
        if worker.info.role.decodes
        or any((worker_id, decode_id) not in apart for decode_id, _ in decoders)
    ]


def tokens_to_compute(worker: WorkerView, need: Need) -> int:
    """Returns the number of tokens to prefill, without a prompt that the request's group shares."""
    if need.shared is None or need.shared.placement.prefill != worker.info.worker_id:
        return need.num_tokens
    return need.num_tokens - need.shared.num_tokens


def decode_blocks(worker: WorkerView, need: Need) -> int:
    """Returns the number of KV blocks that the request is predicted to fill at its end."""
    return worker.info.layout.num_blocks_for(need.end_len)


def has_memory(worker: WorkerView, num_tokens: int) -> bool:
    """True if the worker, when empty, has memory for this many tokens."""
    return worker.info.layout.num_blocks_for(num_tokens) <= worker.info.num_blocks


def _fits_empty(worker: WorkerView, need: Need) -> bool:
    return has_memory(worker, need.max_len)


def _could_prefill(worker: WorkerView, need: Need) -> bool:
    """True if the worker has memory for the prompt and, if it also decodes, for the answer."""
    if worker.info.role.decodes:
        return _fits_empty(worker, need)
    return has_memory(worker, need.num_tokens)


def promised_share(worker: WorkerView) -> float:
    """Returns the share of a worker's KV blocks that is promised to requests."""
    return worker.promised_blocks / worker.info.num_blocks


def has_room(worker: WorkerView, need: Need) -> bool:
    """True if a decode worker has memory and a slot for the request."""
    blocks = worker.promised_blocks + decode_blocks(worker, need)
    if blocks > worker.info.num_blocks or worker.num_decodes >= worker.info.max_running:
        return False
    preempted_s = need.preempted_s.get(worker.info.worker_id)
    return preempted_s is None or _has_reported_room(worker, need, preempted_s)


def _has_reported_room(worker: WorkerView, need: Need, since_s: float) -> bool:
    load = worker.load
    if load is None or worker.reported_s <= since_s:
        return False
    return load.free_blocks + load.cached_blocks >= decode_blocks(worker, need)


def least(workers: Sequence[Worker], cost: Callable[[Worker], tuple[float, ...]]) -> list[Worker]:
    """Returns the workers with the least cost, sorted by name."""
    costs = [cost(item) for item in workers]
    lowest = min(costs)
    return sorted(
        (item for item, its in zip(workers, costs, strict=True) if its == lowest),
        key=lambda item: item[0],
    )


def with_leader(asked: Asked, policy: str) -> Decision | None:
    """Returns a placement on the two workers of the group's leader, if these have room."""
    shared = asked.need.shared
    if shared is None:
        return None
    near, candidates = shared.placement, asked.candidates
    if not _has_time(asked, near.prefill):
        return None
    if (near.prefill, near.decode) in asked.view.severed:
        return None
    if not any(worker_id == near.decode for worker_id, _ in candidates.decoders):
        return None
    return Decision(
        policy,
        "with its leader",
        near.prefill,
        near.decode,
        len(candidates.prefillers),
        num_matched_tokens=shared.num_tokens,
    )


def _has_time(asked: Asked, worker_id: WorkerId) -> bool:
    """True if the worker can start another prompt now, as a prefill or a fluid worker."""
    if any(worker_id == candidate for candidate, _ in asked.candidates.prefillers):
        return True
    worker = asked.view.workers.get(worker_id)
    if worker is None or not worker.info.is_fluid:
        return False
    ready_s = predicted_ready_s(worker, asked.costs, asked.now_s)
    has_time = ready_s is not None and ready_s <= asked.wait_bound_s
    return has_time and has_memory(worker, asked.need.max_len)


def emptiest_decoder(asked: Asked, prefill: Worker) -> WorkerId:
    """Returns the decode worker that has most tokens of the prompt from earlier attempts.

    Among equals, the worker with the smallest promised share of KV is chosen. A mixed worker
    decodes what it prefills.
    """
    prefill_id, worker = prefill
    if worker.info.role.decodes:
        return prefill_id

    def cost(item: Worker) -> tuple[float, ...]:
        decode_id, decoder = item
        return -asked.need.kept_tokens.get(decode_id, 0), promised_share(decoder)

    equals = least(asked.candidates.partners(prefill_id), cost)
    return asked.rng.choice(equals)[0]


def kept_tokens(asked: Asked, prefill: Worker) -> int:
    """Returns the most tokens that an earlier attempt left in one of the worker's partners."""
    if not asked.need.kept_tokens:
        return 0
    kept = asked.need.kept_tokens
    return max((kept.get(i, 0) for i, _ in asked.candidates.partners(prefill[0])), default=0)


def keeper(
    prefill: WorkerView, decode: WorkerView, decision: Decision, num_tokens: int
) -> WorkerId:
    """Chooses which of two workers with the same prompt keeps its KV, and updates its turnover.

    After a hand-over, both workers have the prompt. One copy is redundant, so its worker evicts
    these blocks before all others. The same holds after a pull of a prefix.

    The turnover of a cache is the number of blocks stored so far, as a share of its worker's room
    for cached blocks. The worker with the lower turnover keeps the KV. So the caches of all workers
    turn over equally fast, and together they contain as much as one cache of their total size.
    Blocks that a worker has cached already are not counted again. So a conversation mostly stays on
    its worker.

    If a worker stored nothing for a long time, it does not get all later prompts: its turnover is
    raised to one below the other worker's.
    """
    pulled_here = decode.info.worker_id == decision.pulled_from
    here = _turnover_with(prefill, num_tokens - decision.num_matched_tokens)
    there = _turnover_with(decode, num_tokens - (decision.num_cached_tokens if pulled_here else 0))
    chosen, end = (prefill, here) if here <= there else (decode, there)
    chosen.turnover = max(end, max(prefill.turnover, decode.turnover) - 1.0)
    return chosen.info.worker_id


def _turnover_with(worker: WorkerView, num_new_tokens: int) -> float:
    """Returns the turnover of a worker's cache after these tokens are stored."""
    info = worker.info
    room = max(info.num_blocks - worker.promised_blocks, LEAST_ROOM * info.num_blocks)
    return worker.turnover + info.layout.num_blocks_for(num_new_tokens) / room
