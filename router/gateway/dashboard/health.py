"""The health of a deployment in one word, with reasons, from the facts that this gateway has.

Pure. An unknown state is never good: without reports about the pools, the level is a warning.
"""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from router.gateway.metrics.pools import PoolCount


class Level(StrEnum):
    """The severity of the health. The page shows it as a colour."""

    GOOD = "good"
    WARN = "warn"
    BAD = "bad"


class PoolHealth(msgspec.Struct, frozen=True):
    """The health in one word, and its reasons, worst reason first."""

    level: Level
    word: str
    reasons: list[str]


class HealthFacts(msgspec.Struct, frozen=True):
    """The facts from which the health is computed.

    `missing` is the reason why no request can be served; None if requests can be served.
    """

    missing: str | None
    pools: Sequence[PoolCount] | None  # None: no controller has reported the wanted sizes
    has_controller: bool
    num_troubles: int
    is_settled: bool
    num_stalled: int  # number of answers that stall now


def health_of(facts: HealthFacts) -> PoolHealth:
    """Returns the health.

    The level is BAD if no request can be served, or if a pool has no worker.
    """
    empty, short = _gaps(facts.pools or ())
    reasons = [*([] if facts.missing is None else [facts.missing]), *empty, *short, *_others(facts)]
    if facts.missing is not None:
        return PoolHealth(Level.BAD, "Not ready", reasons)
    if empty:
        return PoolHealth(Level.BAD, "Degraded", reasons)
    if reasons:
        return PoolHealth(Level.WARN, "Limited" if short else "Ready", reasons)
    return PoolHealth(
        Level.GOOD, "Ready", ["as wanted" if facts.is_settled else "pools are changing"]
    )


def _gaps(pools: Sequence[PoolCount]) -> tuple[list[str], list[str]]:
    """Returns texts for pools without a worker, and for pools with fewer workers than wanted."""
    is_one = len({pool.version for pool in pools}) == 1
    empty, short = [], []
    for pool in pools:
        where = pool.role.value if is_one else f"{pool.role.value} of {pool.version}"
        if pool.wanted and not pool.serving:
            empty.append(f"{where}: no worker of {pool.wanted}")
        elif pool.serving < pool.wanted:
            short.append(f"{where}: {pool.serving} of {pool.wanted} workers")
    return empty, short


def _others(facts: HealthFacts) -> list[str]:
    """Returns the reasons that concern no single pool."""
    found = []
    if facts.num_stalled:
        found.append(_several(facts.num_stalled, "answer stands still", "answers stand still"))
    if facts.pools is None:
        found.append("wanted workers are unknown")
    if not facts.has_controller:
        found.append("no controller reports")
    if facts.num_troubles:
        found.append(_several(facts.num_troubles, "trouble", "troubles"))
    return found


def _several(number: int, one: str, more: str) -> str:
    return f"{number} {one if number == 1 else more}"
