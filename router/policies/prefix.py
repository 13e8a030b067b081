"""Chooses the prefill worker with the fewest tokens to compute until the prompt is done.

One sum weighs affinity against balance: a worker's backlog, plus the part of this prompt that the
worker does not hold. Nothing is pulled and no prompt waits in the router. So requests with a hot
prefix queue at the worker that holds it.

Source: the cost of Dynamo's KV router, with a credit of one for each cached token.
"""

from typing import ClassVar

from router.policies.base import Asked, Busy, Decision, Worker
from router.policies.candidates import least
from router.policies.sharing import emptiest_decoder, with_leader


class Prefix:
    """Chooses the worker that holds the prefix, unless its queue is longer than the prefix."""

    name: ClassVar[str] = "prefix"
    binds_late: ClassVar[bool] = False
    pulls: ClassVar[bool] = False
    is_fluid: ClassVar[bool] = False

    def choose(self, asked: Asked) -> Decision | Busy:
        """Returns the placement with the fewest tokens to compute."""
        shared = with_leader(asked, self.name)
        if shared is not None:
            return shared
        matched = asked.known.matched_tokens()
        prefillers = asked.candidates.prefillers

        def cost(item: Worker) -> tuple[float, ...]:
            worker_id, worker = item
            return (worker.promised_tokens - matched.get(worker_id, 0),)

        prefill = asked.rng.choice(least(prefillers, cost))
        num_matched = matched.get(prefill[0], 0)
        why = "holds the prefix" if num_matched else "shortest backlog"
        decode = emptiest_decoder(asked, prefill)
        return Decision(
            self.name, why, prefill[0], decode, len(prefillers), num_matched_tokens=num_matched
        )
