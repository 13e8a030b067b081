"""What stores of KV bring to a trace on a simulated cluster.

One run for each setting of the stores:

    none          no store: prefixes live as long as they are cached in workers
    memory        all of it in memory
    disk          a disk besides, ten times as large by default
    small_memory  the same disk behind a tenth of the memory
    slow_intake   as `disk`, but stores take blocks from workers at the server's default rate

Sizes are tokens in all stores together. Results of a setting:

| result                | unit  |                                                              |
|-----------------------|-------|--------------------------------------------------------------|
| prefix/hits           | share | prompt tokens that were not computed                         |
| prefix/of_infinite    | share | the same over the hits of a cache that never forgets         |
| ttft/mean, ttft/p99   | ms    | at the gateway                                               |
| utilisation/prefill   | share | of the time, that prefill workers spent in steps             |
| store/…               |       | hits by medium and the work of stores: `bench.simulator.results` |
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bench.client.load import SloBounds
from bench.common.progress import Say
from bench.common.report import Figure, Result, results_of
from bench.simulator.cluster import (
    MAX_ANSWER_TOKENS,
    SimulatedPools,
    SimulationSetup,
    simulate,
)
from bench.simulator.hardware import HardwareProfile
from bench.simulator.results import figures_of
from bench.simulator.tiers import SimulatedStores
from bench.simulator.traces import Trace
from engine.config import RouterConfig
from router.native.machine import native_machine

KEPT = ("prefix/hits", "ttft/mean", "ttft/p99", "utilisation/prefill")
OF_STORES = ("store/hits/", "store/taken", "store/loads/", "store/evicted/", "store/dropped")
SLOW_BYTES_PER_S = 512 * 2**20  # taken from workers, by a store that is held back
SMALLER = 10  # the memory of `small_memory` is that many times smaller


@dataclass(frozen=True, slots=True)
class TiersPlan:
    """A trace, a cluster, and the size of its stores in tokens."""

    trace: Trace
    hardware: HardwareProfile
    pools: SimulatedPools
    memory_tokens: float
    disk_tokens: float
    take_bytes_per_s: float  # of one store
    node_workers: int
    seed: int = 0

    def settings(self) -> Mapping[str, SimulatedStores | None]:
        """Returns the stores of each run, by its name. Raises ConfigError for sizes of no block."""
        num_nodes = -(-self.pools.total // self.node_workers)
        tokens = self.hardware.layout.block_size * num_nodes
        memory = SimulatedStores(
            int(self.memory_tokens // tokens),
            node_workers=self.node_workers,
            take_bytes_per_s=self.take_bytes_per_s,
        )
        disk = replace(memory, disk_blocks=int(self.disk_tokens // tokens))
        return {
            "none": None,
            "memory": memory,
            "disk": disk,
            "small_memory": replace(disk, memory_blocks=memory.memory_blocks // SMALLER),
            "slow_intake": replace(disk, take_bytes_per_s=SLOW_BYTES_PER_S),
        }


def study(plan: TiersPlan, say: Say) -> tuple[Result, ...]:
    """Returns the results of all settings; names begin with the setting."""
    figures: dict[str, Figure] = {}
    for name, stores in plan.settings().items():
        of_run = _figures(plan, stores)
        figures |= {f"{name}/{result}": figure for result, figure in of_run.items()}
        say(f"{name}: hits {of_run['prefix/hits'].value:.1%}")
    return results_of([figures])


def _figures(plan: TiersPlan, stores: SimulatedStores | None) -> dict[str, Figure]:
    router = RouterConfig(
        seed=plan.seed,
        max_queue=len(plan.trace.requests),
        queue_timeout_s=3600.0,
    )
    setup = SimulationSetup(
        plan.hardware, plan.pools, max_answer_tokens=MAX_ANSWER_TOKENS, stores=stores
    )
    run = simulate(plan.trace, setup, native_machine(router))
    price = plan.hardware.usd_per_gpu_hour
    found = figures_of(run, SloBounds(None, None), usd_per_gpu_hour=price)
    most = found["prefix/infinite_cache"].value
    share = found["prefix/hits"].value / most if most else 0.0
    return {
        **_chosen(found, KEPT),
        "prefix/of_infinite": Figure(share, "share"),
        **_chosen(found, [name for name in found if name.startswith(OF_STORES)]),
    }


def _chosen(figures: Mapping[str, Figure], names: Sequence[str]) -> dict[str, Figure]:
    return {name: figures[name] for name in names if name in figures}
