"""Chooses a random worker with room; all have the same chance."""

from typing import ClassVar

from router.policies.base import Asked, Busy, Decision


class AtRandom:
    """The baseline for every other policy."""

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
