"""Lists the workers that could have computed a prompt, with the predictions for each.

For people who look at a decision; no policy needs the list. `slo` compares the same numbers.
"""

from math import inf

from engine.messages import WorkerId
from router.policies.base import Asked, PrefillCandidate
from router.policies.candidates import predicted_ready_s
from router.policies.pulling import Holders, bid
from router.policies.slo import bound_s, drag_of

MOST_SHOWN = 8
MOST_COMPARED = 64  # workers: a larger pool is not compared for people


def compared(asked: Asked, chosen: WorkerId) -> tuple[PrefillCandidate, ...]:
    """Returns the candidates with the least predicted TTFT first, and always the chosen one."""
    workers = asked.view.workers
    items = dict(asked.candidates.prefillers)
    if chosen in workers:
        items[chosen] = workers[chosen]
    if len(items) > MOST_COMPARED:
        return ()
    holders, pace_s = Holders(asked), bound_s(asked)
    found = []
    for worker_id, worker in items.items():
        held = holders.matched.get(worker_id, 0)
        best = bid(asked, (worker_id, worker), held, holders.best_for((worker_id, worker)))
        wait_s = predicted_ready_s(worker, asked.costs, asked.now_s)
        drag = drag_of(worker, asked.costs, pace_s)
        ttft_s = None
        if wait_s is not None and best.seconds is not None and drag < inf:
            ttft_s = wait_s + best.seconds * drag
        found.append(PrefillCandidate(worker_id, wait_s, ttft_s, held))
    found.sort(key=lambda each: (each.predicted_ttft_s is None, each.predicted_ttft_s or 0.0))
    others = [each for each in found if each.worker_id != chosen]
    own = [each for each in found if each.worker_id == chosen]
    return (*own, *others[: MOST_SHOWN - 1])
