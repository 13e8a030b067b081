"""Builds a request machine with its index and its placements in C++.

`RouterMachine` itself compiles nothing. Where C++ cannot be built, `native_machine` falls back to
the index and the policy in Python; `router.native.library` logs that once.
"""

import random
from functools import partial

from engine.config import RouterConfig
from router.cluster.estimates import Estimates
from router.cluster.view import ClusterView
from router.machine.machine import RouterMachine
from router.native.fleet import Fleet
from router.native.index import PrefixIndex
from router.native.library import is_native
from router.policies.base import Policy
from router.policies.slo import Slo
from router.prefixes.base import Prefixes


def native_machine(
    config: RouterConfig,
    *,
    estimates: Estimates | None = None,
    rng: random.Random | None = None,
) -> RouterMachine:
    """Returns a machine in C++ where that can be built, else one in Python."""
    if not is_native():
        return RouterMachine(config, estimates=estimates, rng=rng)
    index = PrefixIndex(seed=config.seed or 0)
    fleet = partial(_fleet, config)
    return RouterMachine(config, estimates=estimates, rng=rng, prefixes=index, make_placer=fleet)


def _fleet(
    config: RouterConfig,
    policy: Policy,
    view: ClusterView,
    prefixes: Prefixes,
    estimates: Estimates,
) -> Fleet | None:
    """A fleet if the policy has one in C++, else None."""
    if not isinstance(policy, Slo) or not isinstance(prefixes, PrefixIndex):
        return None
    return Fleet(
        view, prefixes, estimates, backlog_s=config.prefill_backlog_s, seed=config.seed or 0
    )
