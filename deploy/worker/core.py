"""Assembles the core of a worker: its schedulers around one block pool. Pure.

Workers, simulated workers, benchmarks and tests all get their cores here.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from decode.scheduler import DecodeScheduler
from decode.speculation import Speculator
from engine.messages import ROLES_OF_WORKERS, Role, TransferAddress
from engine.worker.blocks import BlockPool
from engine.worker.core import Duties, WorkerCore
from engine.worker.intake import Intake
from engine.worker.offers import PrefixOffers
from engine.worker.pace import StepPace
from prefill.scheduler import PrefillScheduler


class StepLimits(Protocol):
    """The limits of a worker's steps, which its settings have."""

    @property
    def max_batch_tokens(self) -> int:
        """Tokens of a step."""
        ...

    @property
    def chunk_tokens(self) -> int:
        """Tokens of one prompt in a step."""
        ...

    @property
    def max_running(self) -> int:
        """Sequences that decode together."""
        ...


@dataclass(frozen=True, slots=True)
class CoreParts:
    """The core of a worker, and its schedulers."""

    core: WorkerCore
    decode: DecodeScheduler
    prefill: PrefillScheduler
    offers: PrefixOffers


def worker_core(  # noqa: PLR0913 - the parts of a worker
    pool: BlockPool,
    limits: StepLimits,
    *,
    intake: Intake,
    address: TransferAddress,
    role: Role,
    possible: Collection[Role] = ROLES_OF_WORKERS,
    stretch: float | None = None,
    speculator: Speculator | None = None,
    growth_tokens: int = 128,
) -> CoreParts:
    """Returns a core with all schedulers. `possible` are the roles that it may take later.

    Sinks pull from `address`. `stretch` is as in `Welcome`.
    """
    pace = None if stretch is None else StepPace(stretch)
    decode = DecodeScheduler(
        pool,
        intake=intake,
        max_running=limits.max_running,
        growth_tokens=growth_tokens,
        speculator=speculator,
    )
    prefill = PrefillScheduler(
        pool, intake=intake, chunk_tokens=limits.chunk_tokens, address=address, pace=pace
    )
    offers = PrefixOffers(pool, intake=intake, address=address)
    core = WorkerCore(
        [decode, prefill, offers],
        pool,
        limits.max_batch_tokens,
        duties=Duties(role, possible, is_fluid=stretch is not None),
        pace=pace,
        observe=None if speculator is None else speculator.observe,
    )
    return CoreParts(core, decode, prefill, offers)
