"""The state that all parts of the pool machine share."""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from deploy.pools.restarts import Restarts
from engine.config import PoolsConfig, UpdateConfig
from engine.control import HistoryStep, Intent, LiveSettings
from engine.messages import Role

MAX_WORKERS = "see pools.max_workers"  # reason of a configured limit of workers
MAX_STEPS_KEPT = 1000


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Limits and deadlines of the pools."""

    max_workers: int
    why_no_more: str = ""  # reason of the limit `max_workers`
    pools: PoolsConfig = field(default_factory=PoolsConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    # By line: idle seconds until its model sleeps.
    idle_s: Mapping[str, float] = field(default_factory=dict)
    gateways_share_socket: bool = False  # True if others accept a silent gateway's connections
    has_stores: bool = False  # True if each node has a store for each version


class PoolState:
    """The state that all parts of the machine share: intent, limits, history and restarts.

    The intent is a guess if an earlier controller left services and no gateway has reported its
    intent. A gateway's later report replaces the guess, unless an order was given before.
    """

    def __init__(self, intent: Intent, limits: PoolLimits, *, is_guess: bool = False) -> None:
        self.intent = intent
        self.limits = limits
        self.is_guess = is_guess
        self.is_unconfirmed = is_guess  # True until a gateway has reported an intent
        self.restarts = Restarts(limits.pools.steady_s)
        self.steps: deque[HistoryStep] = deque(maxlen=MAX_STEPS_KEPT)  # latest steps, oldest first
        self.counters: Counter[str] = Counter()  # by kind of trouble: occurrences
        self._num_steps = 0
        self._followed: LiveSettings | None = None  # settings from which the limits were taken
        self.follow()

    def follow(self) -> None:
        """Updates the limits if an operator has changed the settings in the intent."""
        live = self.intent.live
        if live is None or live == self._followed:
            return
        pools, self._followed = live.pools, live
        self.limits = replace(self.limits, pools=pools, update=live.update)
        if pools.max_workers is not None:  # otherwise the next `RoomSeen` sets the limit
            self.limit(pools.max_workers, MAX_WORKERS)

    def limit(self, max_workers: int, why: str) -> None:
        """Sets the maximum number of workers, and the reason of this limit."""
        self.limits = replace(self.limits, max_workers=max_workers, why_no_more=why)

    def record(
        self, now_s: float, subject: str, what: str, why: str = "", *, role: Role | None = None
    ) -> HistoryStep:
        """Records a step of the history.

        Returns the step, which is also the effect that reports it.
        """
        self._num_steps += 1
        what = what.removeprefix(f"{subject} ")
        step = HistoryStep(self._num_steps, now_s, subject, what, why, role)
        self.steps.append(step)
        return step

    def record_start(self, name: str, now_s: float, *, role: Role | None = None) -> HistoryStep:
        """Records that a service has started and runs."""
        what = "was started again" if self.restarts.num_failed(name) else "was started"
        self.restarts.started(name, now_s)
        return self.record(now_s, name, what, role=role)

    def record_end(
        self, name: str, now_s: float, how: str, *, role: Role | None = None
    ) -> HistoryStep:
        """Records the end or the failed start of a service that will be restarted."""
        outlook = self.restarts.record_end(name, now_s, how)
        return self.record(now_s, name, how, outlook, role=role)
