"""Chooses the worker that keeps the KV of a prompt that two workers hold.

After a hand-over, both workers hold the prompt. One of the two copies is redundant, so only one
worker keeps its copy. The other worker evicts these blocks before all others. The same holds after
a pull of a prefix.

The keeper is the worker whose cache has turned over less so far: blocks stored, as a share of its
room for cached blocks. So the caches of all workers turn over equally fast, and together they hold
as much as one cache of their total size. Blocks that a worker has cached already are not counted
again. So a conversation mostly stays on its worker.

A worker that stored nothing for a long time does not get everything afterwards: it is assumed to be
at most one turnover behind.
"""

from engine.messages import WorkerId
from router.cluster.view import WorkerView
from router.policies.base import Decision

LEAST_ROOM = 1 / 16  # minimum share of a worker's blocks, as a full decode worker gets room again


def keeper(
    prefill: WorkerView, decode: WorkerView, decision: Decision, num_tokens: int
) -> WorkerId:
    """Chooses the worker that keeps a prompt, and adds the prompt to the worker's turnover."""
    ends = [_turnover_with(worker, decision, num_tokens) for worker in (prefill, decode)]
    chosen, end = (prefill, ends[0]) if ends[0] <= ends[1] else (decode, ends[1])
    chosen.turnover = max(end, max(prefill.turnover, decode.turnover) - 1.0)
    return chosen.info.worker_id


def _turnover_with(worker: WorkerView, decision: Decision, num_tokens: int) -> float:
    """Returns the turnover of a worker's cache if the worker keeps the prompt."""
    info, num_cached = worker.info, 0
    if info.worker_id == decision.prefill_worker:
        num_cached = decision.num_matched_tokens
    elif info.worker_id == decision.pulled_from:
        num_cached = decision.num_cached_tokens
    room = max(info.num_blocks - worker.promised_blocks, LEAST_ROOM * info.num_blocks)
    return worker.turnover + info.layout.num_blocks_for(num_tokens - num_cached) / room
