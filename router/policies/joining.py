"""The decode worker in which a running sequence goes on.

The rule is the policy's for a new sequence: room at its predicted end, then the least time per
token after it has joined. While that is unknown, the worker with the smallest promised share of KV
is taken. The sequence is not held back for a bound on its pace.
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
    """Chooses where a sequence at `source` goes on. None if there is no room for it now."""
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
    """Other workers that can read the blocks of `source` and that these blocks reach."""
    layout = view.workers[source].info.layout
    return [
        (worker_id, worker)
        for worker_id, worker in view.workers.items()
        if worker_id != source
        and worker.info.layout.difference(layout) is None
        and (source, worker_id) not in view.severed
    ]
