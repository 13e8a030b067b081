"""The operator's intent, the limits and the history, shared by all parts of the pool machine."""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from engine.config import PoolsConfig, UpdateConfig
from engine.control import HistoryStep, Intent, LiveSettings
from engine.messages import Role

MAX_WORKERS = "see pools.max_workers"  # why there can be no more


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Limits and deadlines of the pools."""

    max_workers: int
    why_no_more: str = ""  # than `max_workers`
    pools: PoolsConfig = field(default_factory=PoolsConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    idle_s: Mapping[str, float] = field(default_factory=dict)  # by line; then it falls asleep
    gateways_share_socket: bool = False  # so others take the connections of a silent one
    has_stores: bool = False  # one store of KV for each version on each node


@dataclass(slots=True)
class Wanted:
    """The intent and the limits that all parts of the machine share.

    The intent is a guess if an earlier controller left services and no gateway could tell its
    intent. A gateway that is heard later replaces the guess, unless an order came first.
    """

    intent: Intent
    limits: PoolLimits
    is_guess: bool = False
    is_unconfirmed: bool = False  # no gateway has told an earlier controller's intent yet
    followed: LiveSettings | None = None  # the settings that the limits come from

    def follow(self) -> None:
        """Takes limits from the intent if an operator has changed their settings."""
        live = self.intent.live
        if live is None or live == self.followed:
            return
        pools, self.followed = live.pools, live
        self.limits = replace(self.limits, pools=pools, update=live.update)
        if pools.max_workers is not None:  # else the room that is seen next counts
            self.limit(pools.max_workers, MAX_WORKERS)

    def limit(self, max_workers: int, why: str) -> None:
        """Sets how many workers there can be, and why not more."""
        self.limits = replace(self.limits, max_workers=max_workers, why_no_more=why)


MAX_STEPS_KEPT = 1000


class PoolHistory:
    """The latest steps in order, and how often each kind of trouble happened."""

    def __init__(self) -> None:
        self.steps: deque[HistoryStep] = deque(maxlen=MAX_STEPS_KEPT)
        self.counters: Counter[str] = Counter()
        self._num_steps = 0

    def record(
        self, now_s: float, subject: str, what: str, why: str = "", *, role: Role | None = None
    ) -> HistoryStep:
        """Records a step and returns it, as the effect that reports it."""
        self._num_steps += 1
        what = what.removeprefix(f"{subject} ")
        step = HistoryStep(self._num_steps, now_s, subject, what, why, role)
        self.steps.append(step)
        return step
