"""The decode worker on which a running sequence continues.

The rule is the policy's for a new sequence: room at its predicted end, then the least time per
token after it has joined. While that time is unknown, the worker with the smallest promised share
of KV is chosen. The sequence is never held back for its TPOT bound.
"""

import random

from engine.messages import WorkerId
from router.cluster.view import ClusterView
from router.policies.base import Costs, Need, Worker
from router.policies.candidates import has_room, least, promised_share
from router.policies.slo import tpot_s


def next_decoder(
    view: ClusterView, need: Need, *, source: WorkerId, costs: Costs, rng: random.Random
) -> WorkerId | None:
    """Chooses where a sequence at `source` continues. None if no worker has room for it now."""
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
    """Returns the other workers that can read the blocks of `source` and that its KV reaches."""
    layout = view.workers[source].info.layout
    return [
        (worker_id, worker)
        for worker_id, worker in view.workers.items()
        if worker_id != source
        and worker.info.layout.difference(layout) is None
        and (source, worker_id) not in view.severed
    ]
