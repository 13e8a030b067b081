"""Placement policies: they choose the workers that prefill and decode a request."""

from engine.config import RouterPolicy
from router.policies.base import Policy
from router.policies.simple import AtRandom, LeastLoaded, PowerOfTwo, Prefix, RoundRobin
from router.policies.slo import Slo

_POLICIES: dict[RouterPolicy, type[Policy]] = {
    RouterPolicy.SLO: Slo,
    RouterPolicy.PREFIX: Prefix,
    RouterPolicy.LEAST_LOADED: LeastLoaded,
    RouterPolicy.POWER_OF_TWO: PowerOfTwo,
    RouterPolicy.ROUND_ROBIN: RoundRobin,
    RouterPolicy.RANDOM: AtRandom,
}


def make_policy(name: RouterPolicy) -> Policy:
    """Returns the policy with this name."""
    return _POLICIES[name]()
