"""Which worker keeps the KV of a prompt that another worker has too.

After a hand-over, both workers hold the prompt. Of two copies one is wasted, so only one of the
workers keeps it. On the other one, the blocks are evicted before all others. The same holds for a
worker whose prefix was pulled.

The keeper is the worker whose cache has taken in less so far, as a share of its room for cached
blocks. So the caches of all workers turn over equally fast, and together they remember as much as
one cache of their size. What is cached on a worker already is not taken in again. So a conversation
mostly stays where it is.

A worker that took in nothing for long does not take in everything afterwards: it is taken to be at
most one turnover behind.
"""

from engine.messages import WorkerId
from router.cluster.view import WorkerView
from router.policies.base import Decision

LEAST_ROOM = 1 / 16  # share of a worker's blocks: a full decode worker gets room again


def keeper(
    prefill: WorkerView, decode: WorkerView, decision: Decision, num_tokens: int
) -> WorkerId:
    """Chooses the worker that keeps a prompt, and counts it as taken in there."""
    ends = [_turnover_with(worker, decision, num_tokens) for worker in (prefill, decode)]
    chosen, end = (prefill, ends[0]) if ends[0] <= ends[1] else (decode, ends[1])
    chosen.turnover = max(end, max(prefill.turnover, decode.turnover) - 1.0)
    return chosen.info.worker_id


def _turnover_with(worker: WorkerView, decision: Decision, num_tokens: int) -> float:
    """Returns the turnover of a worker's cache after it took the prompt in."""
    info, num_cached = worker.info, 0
    if info.worker_id == decision.prefill_worker:
        num_cached = decision.num_matched_tokens
    elif info.worker_id == decision.pulled_from:
        num_cached = decision.num_cached_tokens
    room = max(info.num_blocks - worker.promised_blocks, LEAST_ROOM * info.num_blocks)
    return worker.turnover + info.layout.num_blocks_for(num_tokens - num_cached) / room
