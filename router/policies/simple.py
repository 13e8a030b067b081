"""The policies without predictions: random, round robin, and by backlogs or cached prefixes."""

from collections.abc import Sequence
from typing import ClassVar

from engine.messages import WorkerId
from router.policies.base import Asked, Busy, Decision, Worker
from router.policies.candidates import (
    emptiest_decoder,
    kept_tokens,
    least,
    tokens_to_compute,
    with_leader,
)
from router.policies.pulling import Holders, bid


class AtRandom:
    """Places requests at random, as the baseline for every other policy."""

    name: ClassVar[str] = "random"
    binds_late: ClassVar[bool] = False
    pulls: ClassVar[bool] = False
    is_fluid: ClassVar[bool] = False

    def choose(self, asked: Asked) -> Decision | Busy:
        """Returns a random placement among the candidates."""
        prefillers = asked.candidates.prefillers
        prefill, worker = asked.rng.choice(prefillers)
        decode = prefill
        if not worker.info.role.decodes:
            decode, _ = asked.rng.choice(asked.candidates.partners(prefill))
        return Decision(self.name, "by chance", prefill, decode, len(prefillers))


class RoundRobin:
    """Chooses the workers of each pool in turn."""

    name: ClassVar[str] = "round-robin"
    binds_late: ClassVar[bool] = False
    pulls: ClassVar[bool] = False
    is_fluid: ClassVar[bool] = False

    def __init__(self) -> None:
        self._last_prefill = WorkerId("")
        self._last_decode = WorkerId("")

    def choose(self, asked: Asked) -> Decision | Busy:
        """Returns the placement on the next worker of each pool."""
        prefillers = asked.candidates.prefillers
        prefill, worker = _after(self._last_prefill, prefillers)
        self._last_prefill = prefill
        decode = prefill
        if not worker.info.role.decodes:
            decode, _ = _after(self._last_decode, asked.candidates.partners(prefill))
            self._last_decode = decode
        return Decision(self.name, "its turn", prefill, decode, len(prefillers))


def _after(last: WorkerId, workers: Sequence[Worker]) -> Worker:
    """Returns the next worker by name; after the last worker, the first."""
    return min(workers, key=lambda item: (item[0] <= last, item[0]))


class PowerOfTwo:
    """Chooses the less loaded of two random workers, for prefill and for decode.

    Source: Mitzenmacher, The power of two choices in randomized load balancing, 2001.
    """

    name: ClassVar[str] = "power-of-two"
    binds_late: ClassVar[bool] = False
    pulls: ClassVar[bool] = False
    is_fluid: ClassVar[bool] = False

    def choose(self, asked: Asked) -> Decision | Busy:
        """Returns a placement on the less loaded of two random workers of each pool."""
        shared = with_leader(asked, self.name)
        if shared is not None:
            return shared
        prefillers = asked.candidates.prefillers
        prefill_id, prefill = min(_two(asked, prefillers), key=lambda item: item[1].promised_tokens)
        decode_id = prefill_id
        if not prefill.info.role.decodes:
            partners = _two(asked, asked.candidates.partners(prefill_id))
            decode_id, _ = min(partners, key=lambda item: item[1].promised_blocks)
        return Decision(self.name, "less loaded of two", prefill_id, decode_id, len(prefillers))


def _two(asked: Asked, workers: Sequence[Worker]) -> Sequence[Worker]:
    return asked.rng.sample(workers, 2) if len(workers) > 2 else workers


class Prefix:
    """Chooses the prefill worker with the fewest tokens to compute until the prompt is done.

    These tokens are a worker's backlog, plus the part of this prompt that the worker has not
    cached. So one sum weighs affinity against balance. Nothing is pulled and no prompt waits in the
    router. So requests with a hot prefix queue at the worker that has it cached.

    Source: the cost of Dynamo's KV router, with a credit of one for each cached token.
    """

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


class LeastLoaded:
    """Chooses the prefill worker with the shortest backlog, and the emptiest decode worker.

    If the two workers of a shared prompt have room, the policy chooses them. A decode worker with
    KV of an earlier attempt is preferred, as it pulls only the rest. Among prefill workers with
    equal backlogs, the policy prefers one from which that decode worker can pull. A prefix is
    pulled if that is quicker than computing it.
    """

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
    """Returns the placement with the shortest backlog, in tokens to compute before this prompt."""

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
