"""Chooses the prefill worker with the shortest backlog, and the decode worker with most free KV.

If the two workers of a shared prompt have room, the policy chooses them. A decode worker with KV of
an earlier attempt is preferred, as it pulls only the rest. Among prefill workers with equal
backlogs, one from which that decode worker can pull is preferred. A prefix is pulled if that is
quicker than computing it.
"""

from typing import ClassVar

from router.policies.base import Asked, Busy, Decision, Worker
from router.policies.candidates import least, tokens_to_compute
from router.policies.pulling import Holders, bid
from router.policies.sharing import emptiest_decoder, kept_tokens, with_leader


class LeastLoaded:
    """Compares backlogs in tokens. Costs are only used to decide whether a pull pays."""

    name: ClassVar[str] = "least-loaded"
    binds_late: ClassVar[bool] = True
    pulls: ClassVar[bool] = True
    is_fluid: ClassVar[bool] = False

    def choose(self, asked: Asked) -> Decision | Busy:
        """Returns the placement with the shortest backlog."""
        return with_leader(asked, self.name) or shortest_backlog(
            asked, self.name, "shortest backlog"
        )


def shortest_backlog(asked: Asked, policy: str, why: str) -> Decision:
    """Returns the placement with the fewest tokens to compute first."""

    def cost(item: Worker) -> tuple[float, ...]:
        backlog = item[1].promised_tokens + tokens_to_compute(item[1], asked.need)
        return backlog, -kept_tokens(asked, item)

    prefillers = asked.candidates.prefillers
    prefill = asked.rng.choice(least(prefillers, cost))
    decode = emptiest_decoder(asked, prefill)
    holders = Holders(asked)
    matched = holders.matched.get(prefill[0], 0)
    source = bid(asked, prefill, matched, holders.best_for(prefill)).source
    return Decision(
        policy,
        why,
        prefill[0],
        decode,
        len(prefillers),
        num_matched_tokens=matched,
        pulled_from=None if source is None else source.worker_id,
        num_pulled_tokens=0 if source is None else source.num_tokens - matched,
        pulled_medium=None if source is None else source.medium,
        predicted_load_s=0.0 if source is None else source.load_s,
    )
