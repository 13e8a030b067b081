"""The plan of one `bench hostile`. Pure.

A prefill and a decode worker run behind one gateway. Honest clients stream answers all the time.
Beside them hostile clients come in three waves:

1. *bodies*: mutated, truncated, nested and random requests (`bench.hostile.bodies`);
2. *slow connections*: heads and bodies that come a byte at a time, or never;
3. *disconnects*: clients that leave before, in or after their request.

Then an attacker in a process of its own carries out assaults (`bench.hostile.assaults`), one after
the other. Attacker and honest clients have keys of their own.

A part of each wave comes first and is not measured. It fills caches and the allocator, so later
growth of memory is growth that attackers can cause.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from bench.common.report import Scalar
from engine.errors import ConfigError

OPTIONS: Mapping[str, Scalar] = {"--prefill": 1, "--decode": 1, "--weights": "int8"}
KV_MIB = 64  # of each worker
CALM = "calm"  # the phase before the waves
CALM_S = 5.0  # in which the honest streams are alone
WARM_UP_SHARE = 0.1  # of each wave
MAX_RSS_GROWTH = 0.05
RECOVERY_S = 30.0  # deadline for memory to shrink after an assault
MAX_KEPT = 0.1  # allowed growth of memory after that time
MAX_BEYOND_CALM_S = 0.3  # worst pause of an honest stream, minus the worst one in the calm
ATTACKER_KEY, HONEST_KEY = "attacker-key", "honest-key"
ENVIRONMENT: Mapping[str, str] = {
    "BATON_GATEWAY__API_KEY": f'["{ATTACKER_KEY}", "{HONEST_KEY}"]',
}
MAX_PAUSE_S = 0.25  # of an honest stream, on a machine that does nothing else


@dataclass(frozen=True, slots=True)
class HostilePlan:
    """The sizes of the waves, and the honest streams."""

    num_bodies: int = 50_000
    num_slow: int = 2_000
    num_disconnects: int = 10_000
    num_streams: int = 4  # honest ones
    at_once: int = 16  # hostile requests under way
    seed: int = 0
    slow_s: float = 40.0  # how long slow connections last, if the server lets them
    assaults: tuple[str, ...] = ()
    times: int = 4  # how often each assault is carried out


def check(plan: HostilePlan) -> HostilePlan:
    """Returns the plan. Raises ConfigError where a wave or the honest streams are missing."""
    counts = (plan.num_bodies, plan.num_slow, plan.num_disconnects, plan.num_streams, plan.at_once)
    if min(counts) < 1:
        raise ConfigError("each wave, the streams beside it and --at-once need at least 1")
    return plan


def quick(plan: HostilePlan) -> HostilePlan:
    """A small part of each wave: under 50 s, and each assault once."""
    return replace(plan, num_bodies=1_500, num_slow=100, num_disconnects=300, slow_s=5.0, times=1)


def bearer(key: str) -> dict[str, str]:
    """The header of a request with a key."""
    return {"Authorization": f"Bearer {key}"}


def config_of(plan: HostilePlan) -> dict[str, Scalar]:
    """The plan as a flat mapping for the report."""
    return {
        "bodies": plan.num_bodies,
        "slow": plan.num_slow,
        "disconnects": plan.num_disconnects,
        "streams": plan.num_streams,
        "at_once": plan.at_once,
        "assaults": " ".join(plan.assaults),
        "times": plan.times,
    }
