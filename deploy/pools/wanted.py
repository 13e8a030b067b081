"""The operator's intent and the limits, shared by all parts of the pool machine."""

from dataclasses import dataclass, replace

from deploy.pools.restarts import STEADY_S
from engine.control import Intent


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Limits and deadlines of the pools."""

    max_workers: int
    why_no_more: str = ""  # than `max_workers`
    drain_timeout_s: float = 60.0
    update_timeout_s: float = 900.0  # an update without a step for this long is given up
    steady_s: float = STEADY_S  # after a run of this length, a failure counts as the first again


@dataclass(slots=True)
class Wanted:
    """The intent and the limits that all parts of the machine share.

    The intent is a guess if an earlier controller left services and no gateway could tell its
    intent. A gateway that is heard later replaces the guess, unless an order came first.
    """

    intent: Intent
    limits: PoolLimits
    is_guess: bool = False
    is_unheard: bool = False  # no gateway has told an earlier controller's intent yet

    def limit(self, max_workers: int, why: str) -> None:
        """Sets how many workers there can be, and why not more."""
        self.limits = replace(self.limits, max_workers=max_workers, why_no_more=why)
