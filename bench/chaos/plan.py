"""The plan of one run of `bench chaos`, with its load and its faults. Pure.

    kill             SIGKILL of a worker
    pool             SIGKILL of all workers of a pool at once
    stop             SIGSTOP of a worker for a while, then SIGCONT
    slow             a worker that runs for a fifth of the time, for a while
    flip             a worker of one pool changes to the other, and back after a while
    drain            for a while a worker gets no work, and its sequences are moved away
    partition        the network of a worker: for a while every packet to or from it vanishes
    gateway          SIGKILL of a gateway process
    stop-gateway     SIGSTOP of a gateway process for a while
    stop-controller  SIGSTOP of the controller for a while
    disk-full        SIGKILL of a worker; its replacement cannot write any file
    gcs              SIGKILL of the GCS of the deployment's own Ray
    raylet           SIGKILL of Ray's raylet: gateways finish their answers, and Ray is replaced
    store            SIGKILL of the store's process and of its keeper, in turn
    everything       SIGKILL of `baton serve` and all gateways at once. The command starts again,
                     as under a service manager. It must use the ordered pools, not the
                     declared ones

If kills are requested, there is a kill every `every_s`. Between two kills there is one fault of
another kind, so that it meets a deployment that still recovers. The other kinds are used in turn.

When a fault is due, `Fault.draw` selects one of the possible victims (`chosen`). The test is about
failover, so only `pool` may hit the last working worker of a pool. If a kind has no possible
victim, another kind replaces it, and the first kind is tried next.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from typing import TypeVar

from bench.client.arrivals import arrival_times_s
from bench.common.report import Scalar
from engine.config import Transport
from engine.errors import ConfigError

QUICK_REQUESTS = 60
LASTS_S = (1.5, 4.0)  # range of durations, in seconds, of temporary faults
LONG_SILENCE_S = 14.0  # longer than the timeout after which a silent peer counts as dead
LONG_SILENCES = 0.25  # share of stops and partitions that last LONG_SILENCE_S
# Due time of the first fault, in units of `every_s`. Some requests are in flight by then.
FIRST_AT = 0.5
# range of the due time of a fault between two kills, as a share of the interval
MARGIN = (0.3, 0.7)

T = TypeVar("T")


class FaultKind(StrEnum):
    """The kinds of faults that can be injected into a service."""

    KILL = "kill"
    POOL = "pool"
    STOP = "stop"
    SLOW = "slow"
    FLIP = "flip"
    DRAIN = "drain"
    PARTITION = "partition"
    GATEWAY = "gateway"
    STOP_GATEWAY = "stop-gateway"
    STOP_CONTROLLER = "stop-controller"
    DISK_FULL = "disk-full"
    GCS = "gcs"
    RAYLET = "raylet"
    STORE = "store"
    EVERYTHING = "everything"


STOPS = frozenset({FaultKind.STOP, FaultKind.STOP_GATEWAY, FaultKind.STOP_CONTROLLER})
SILENCES = STOPS | {FaultKind.PARTITION}
LASTING = SILENCES | {FaultKind.DISK_FULL, FaultKind.SLOW, FaultKind.FLIP, FaultKind.DRAIN}
OF_GATEWAYS = frozenset({FaultKind.GATEWAY, FaultKind.STOP_GATEWAY})
OF_RAY = frozenset({FaultKind.GCS, FaultKind.RAYLET})
BREAKS_CONNECTIONS = OF_GATEWAYS | {FaultKind.RAYLET, FaultKind.EVERYTHING}


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that is due `at_s` seconds after the load begins. `draw`, in [0, 1), selects the
    victim.

    `silent_s` is the duration for kinds that silence a service; `lasts_s` is the duration for other
    temporary kinds.
    """

    at_s: float
    kind: FaultKind
    draw: float
    lasts_s: float = 0.0
    silent_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Returns the duration of the fault in seconds."""
        if self.kind in SILENCES:
            return self.silent_s
        return self.lasts_s if self.kind in LASTING else 0.0


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """The load, the deployment and the kinds of faults."""

    num_requests: int = 1000
    rate_per_s: float = 4.0
    every_s: float = 5.0
    prefill: int = 2
    decode: int = 2
    gateways: int = 2
    spares: int = 0  # spare workers that replace dead ones
    kinds: tuple[FaultKind, ...] = (FaultKind.KILL,)
    seed: int = 0
    kv_mib: int = 24  # KV memory of a worker in MiB: too little to cache all prompts
    store_mib: int = 0  # memory of the store in MiB, which also has a disk; 0: no store

    @property
    def duration_s(self) -> float:
        """Returns the duration of the load in seconds."""
        return self.num_requests / self.rate_per_s

    @property
    def is_partitioned(self) -> bool:
        """Returns True if each worker needs its own network place, so that it can be cut off."""
        return FaultKind.PARTITION in self.kinds

    @property
    def is_restarted(self) -> bool:
        """Returns True if the plan has a fault that kills and restarts the `baton serve`
        command.
        """
        return FaultKind.EVERYTHING in self.kinds

    @property
    def has_store(self) -> bool:
        """Returns True if the deployment has a store."""
        return self.store_mib > 0

    @property
    def launcher(self) -> str:
        """Returns the launcher: Ray if there are faults of Ray, else processes, which start
        faster.
        """
        return "ray" if OF_RAY & set(self.kinds) else "process"

    @property
    def kv_transport(self) -> Transport:
        """Returns the KV transport. With partitions it must be one that uses the network, unlike
        shared memory.
        """
        return Transport.ZMQ if self.is_partitioned else Transport.AUTO


def check(plan: ChaosPlan) -> ChaosPlan:
    """Returns the plan unchanged. Raises ConfigError if the plan cannot test anything."""
    if not plan.kinds:
        raise ConfigError("chaos needs at least one kind of fault")
    if OF_GATEWAYS & set(plan.kinds) and plan.gateways < 2:
        raise ConfigError("a gateway process can be hit only if there is another one")
    if OF_RAY & set(plan.kinds) and FaultKind.DISK_FULL in plan.kinds:
        raise ConfigError("disk-full is for a deployment of processes, without Ray")
    if OF_RAY & set(plan.kinds) and plan.is_partitioned:
        raise ConfigError("networks are partitioned without Ray only")
    if FaultKind.STORE in plan.kinds and not plan.has_store:
        raise ConfigError("a store can be killed only if there is one: --store-mib")
    if not min(plan.rate_per_s, plan.every_s) > 0:
        raise ConfigError("the rate and the time between faults must be above 0")
    if min(plan.prefill, plan.decode) < 1 or max(plan.prefill, plan.decode) < 2:
        raise ConfigError("one pool needs at least two workers, or no worker may fail")
    if plan.is_restarted and (plan.is_partitioned or OF_RAY & set(plan.kinds)):
        raise ConfigError("everything is killed in a deployment of processes, without networks")
    if plan.is_restarted and plan.decode < 2:
        raise ConfigError("everything needs two decode workers: one of them is ordered")
    return plan


def quick(plan: ChaosPlan) -> ChaosPlan:
    """Returns a plan with few requests. A run of it takes under 50 s."""
    return replace(plan, num_requests=min(plan.num_requests, QUICK_REQUESTS))


def due_times_s(plan: ChaosPlan) -> list[float]:
    """Returns the due times of all requests, in seconds from the begin of the load."""
    rng = Random(f"{plan.seed}/arrivals")
    return arrival_times_s(plan.rate_per_s, plan.num_requests, burstiness=1.0, rng=rng)


def faults_of(plan: ChaosPlan) -> tuple[Fault, ...]:
    """Returns all faults in order of due time. They depend on the plan only."""
    rng = Random(f"{plan.seed}/faults")
    others = [kind for kind in plan.kinds if kind is not FaultKind.KILL]
    kills = FaultKind.KILL in plan.kinds
    faults = []
    # shuffled kinds: each kind is used once before any kind is used again
    deck: list[FaultKind] = []
    at_s = FIRST_AT * plan.every_s
    while at_s < plan.duration_s:
        if kills:
            faults.append(_fault(FaultKind.KILL, at_s, rng))
        if others:
            later_s = rng.uniform(*MARGIN) * plan.every_s if kills else 0.0
            deck = deck or rng.sample(others, k=len(others))
            faults.append(_fault(deck.pop(), at_s + later_s, rng))
        at_s += plan.every_s
    return tuple(fault for fault in faults if fault.at_s < plan.duration_s)


def is_full(plan: ChaosPlan) -> bool:
    """Returns True if the run is long enough for each kind of fault to occur."""
    return {fault.kind for fault in faults_of(plan)} == set(plan.kinds)


def _fault(kind: FaultKind, at_s: float, rng: Random) -> Fault:
    draw, lasts_s, is_long = rng.random(), rng.uniform(*LASTS_S), rng.random() < LONG_SILENCES
    return Fault(at_s, kind, draw, lasts_s, LONG_SILENCE_S if is_long else lasts_s)


def kinds_in_turn(
    kinds: Sequence[FaultKind], fault: Fault, counts: Mapping[FaultKind, int]
) -> list[FaultKind]:
    """Returns the kinds that may replace a fault, in order of their number so far, the rarest
    first.

    A kill is never replaced. Other kinds are replaced by kinds of the plan that are not kills.
    """
    if fault.kind is FaultKind.KILL:
        return [fault.kind]
    others = [kind for kind in kinds if kind is not FaultKind.KILL]
    return sorted(others, key=lambda kind: (counts.get(kind, 0), kind is not fault.kind))


def chosen(fault: Fault, eligible: Sequence[T]) -> T | None:
    """Returns the possible victim that the fault's `draw` selects; None if there is none."""
    return eligible[int(fault.draw * len(eligible))] if eligible else None


def config_of(plan: ChaosPlan) -> dict[str, Scalar]:
    """Returns the plan as a flat mapping for the report."""
    return {
        "num_requests": plan.num_requests,
        "rate_per_s": plan.rate_per_s,
        "every_s": plan.every_s,
        "prefill": plan.prefill,
        "decode": plan.decode,
        "gateways": plan.gateways,
        "spares": plan.spares,
        "faults": ",".join(plan.kinds),
        "launcher": plan.launcher,
        "kv_mib": plan.kv_mib,
        "store_mib": plan.store_mib,
        "kv_transport": plan.kv_transport,
    }
