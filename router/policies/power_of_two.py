"""Chooses the less loaded of two random workers, for prefill and for decode.

Source: Mitzenmacher, The power of two choices in randomized load balancing, 2001.
"""

from collections.abc import Sequence
from typing import ClassVar

from router.policies.base import Asked, Busy, Decision, Worker
from router.policies.sharing import with_leader


class PowerOfTwo:
    """Compares two workers of each pool, whatever the size of the pool."""

    name: ClassVar[str] = "power-of-two"
    binds_late: ClassVar[bool] = False
    pulls: ClassVar[bool] = False
    is_fluid: ClassVar[bool] = False

    def choose(self, asked: Asked) -> Decision | Busy:
        """Returns the better placement of two."""
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
