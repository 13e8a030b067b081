"""The plan of one `bench router`. Pure.

A case is a number of workers and of different blocks. Three in four workers prefill. Blocks are in
chains of 24, each at three workers. Prompts have 12 blocks, of which the first 0 to 12 are those of
a chain. Workers cost as much as Qwen3-32B on two H200s (fitted to AIConfigurator's tables), with
blocks of 512 tokens.
"""

from dataclasses import dataclass

from bench.common.goals import Goals
from bench.common.report import Scalar
from engine.demand import DecodeCost
from engine.errors import ConfigError
from engine.layout import KVFormat, KVLayout, KVSection
from engine.worker.costs import PrefillCost, PullCost, WorkerCosts

BLOCK_SIZE = 512
CHAIN_BLOCKS = 24
PROMPT_BLOCKS = 12
NUM_REPLICAS = 3
POOL_BLOCKS = 100_000  # of a worker: enough that no request is refused
MAX_RUNNING = 100_000
ANSWER_TOKENS = 343  # the mean of Mooncake's conversations
BUSY = 0.7  # share of time during which a prefill worker computes
IN_FLIGHT_PER_WORKER = 4  # requests not yet released
LAYOUT = KVLayout(BLOCK_SIZE, KVFormat.BF16, (KVSection(64, 8, 128),))
COSTS = WorkerCosts(
    prefill=PrefillCost(fixed_s=3.405e-3, token_s=4.921e-5, square_s=8.41e-10),
    decode=DecodeCost(fixed_s=10.71e-3, row_s=2.053e-5, context_s=3.006e-8),
    pull=PullCost(fixed_s=2e-3, block_s=0.0, bytes_per_s=25e9),
)
MAIN_BLOCKS = 1_000_000
INGEST_WORKERS, INGEST_BLOCKS = 1_000, 200_000  # taken in anew in each repetition
MAX_PEER_BLOCKS = MAIN_BLOCKS  # above this a Python dict takes gigabytes
GOALS = Goals(  # of the project, for one core
    {
        "decisions/1000": 150e3,
        "decisions/10000": 100e3,
        "latency_p99/1000": 25.0,
        "latency_p99/10000": 25.0,
        "ingest": 1e6,
        "bytes_per_block": 100.0,
    },
    at_most=("latency*", "bytes*"),
)


@dataclass(frozen=True, slots=True)
class RouterCase:
    """A number of workers that hold a number of different blocks."""

    num_workers: int
    num_blocks: int

    @property
    def name(self) -> str:
        """Its name in results: only the number of workers if the blocks are those of the goals."""
        if self.num_blocks == MAIN_BLOCKS:
            return str(self.num_workers)
        return f"{self.num_workers}/{self.num_blocks:.0e}".replace("e+0", "e")


@dataclass(frozen=True, slots=True)
class RouterPlan:
    """One benchmark of the router's decisions."""

    cases: tuple[RouterCase, ...]
    num_repeats: int
    num_decisions: int = 20_000  # of a repetition
    seed: int = 0


FULL_CASES = (
    *(RouterCase(num_workers, MAIN_BLOCKS) for num_workers in (10, 100, 1_000, 10_000)),
    *(RouterCase(num_workers, num) for num_workers in (1_000, 10_000) for num in (10**5, 10**7)),
)
QUICK_CASES = (
    RouterCase(1_000, MAIN_BLOCKS),
    RouterCase(10_000, MAIN_BLOCKS),
    RouterCase(10, 10**5),
)


def check(plan: RouterPlan) -> RouterPlan:
    """Returns the plan. Raises ConfigError, which names the option that is wrong."""
    for case in plan.cases:
        if case.num_workers < 2 * NUM_REPLICAS:
            raise ConfigError(f"--workers: {2 * NUM_REPLICAS} at least, not {case.num_workers}")
        if case.num_blocks < CHAIN_BLOCKS:
            raise ConfigError(f"--blocks: {CHAIN_BLOCKS} at least, not {case.num_blocks}")
    return plan


def config_of(plan: RouterPlan) -> dict[str, Scalar]:
    """The plan as a flat mapping for the report."""
    return {
        "num_decisions": plan.num_decisions,
        "num_repeats": plan.num_repeats,
        "prompt_blocks": PROMPT_BLOCKS,
        "block_size": BLOCK_SIZE,
        "num_replicas": NUM_REPLICAS,
        **{f"goal_{name}": goal for name, goal in GOALS.bounds.items()},
    }
