"""The operator's intent, the limits and the history, shared by all parts of the pool machine."""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from engine.config import PoolsConfig, UpdateConfig
from engine.control import HistoryStep, Intent, LiveSettings
from engine.messages import Role

MAX_WORKERS = "see pools.max_workers"  # reason of the limit


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Limits and deadlines of the pools."""

    max_workers: int
    why_no_more: str = ""  # the reason of `max_workers`
    pools: PoolsConfig = field(default_factory=PoolsConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    idle_s: Mapping[str, float] = field(default_factory=dict)  # by line
    gateways_share_socket: bool = False  # then other gateways take a silent one's connections
    has_stores: bool = False  # one store of KV for each version on each node


@dataclass(slots=True)
class Wanted:
    """The intent and the limits that all parts of the machine share.

    The intent is a guess if an earlier controller left services and no gateway has reported its
    intent. A later gateway's report replaces the guess, unless an order came first.
    """

    intent: Intent
    limits: PoolLimits
    is_guess: bool = False
    is_unconfirmed: bool = False  # True until a gateway has reported an intent
    followed: LiveSettings | None = None  # the settings that the limits were taken from

    def follow(self) -> None:
        """Takes limits from the intent if an operator has changed their settings."""
        live = self.intent.live
        if live is None or live == self.followed:
            return
        pools, self.followed = live.pools, live
        self.limits = replace(self.limits, pools=pools, update=live.update)
        if pools.max_workers is not None:  # otherwise the next `RoomSeen` sets the limit
            self.limit(pools.max_workers, MAX_WORKERS)

    def limit(self, max_workers: int, why: str) -> None:
        """Sets the largest number of workers, and the reason of this limit."""
        self.limits = replace(self.limits, max_workers=max_workers, why_no_more=why)


MAX_STEPS_KEPT = 1000


class PoolHistory:
    """The latest steps in order, and the number of troubles by kind."""

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
