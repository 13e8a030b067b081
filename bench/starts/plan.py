"""The plan of one `bench starts`. Pure.

    ready/process, ready/ray    from the start of the command to the line with its URL, caches warm
    first/process               the same with an empty cache of kernels: they are compiled
    import/worker               what a process takes that only imports what a worker needs

A round takes each once, so that rounds compare alike on a machine whose speed changes. A round that
comes before the others warms the caches, and is not counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from bench.common.report import Scalar
from engine.errors import ConfigError

LAUNCHERS = ("process", "ray")
FIRST = "first/process"
IMPORT = "import/worker"
IMPORTS = "import deploy.services.worker, engine.model.runner"


@dataclass(frozen=True, slots=True)
class StartsPlan:
    """One benchmark of starts, of the bundled model."""

    launchers: tuple[str, ...] = LAUNCHERS
    num_repeats: int = 5
    has_first: bool = True  # also measures a start that compiles


def check(plan: StartsPlan) -> StartsPlan:
    """Returns the plan. Raises ConfigError for an unknown launcher."""
    for name in plan.launchers:
        if name not in LAUNCHERS:
            raise ConfigError(f"no launcher is called {name!r}: use {' or '.join(LAUNCHERS)}")
    return plan


def config_of(plan: StartsPlan) -> Mapping[str, Scalar]:
    """The plan as a flat mapping for the report."""
    return {
        "launchers": ",".join(plan.launchers),
        "num_repeats": plan.num_repeats,
        "first": plan.has_first,
    }
