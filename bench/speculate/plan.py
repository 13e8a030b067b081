"""The plan of one `bench speculate`. Pure: it follows from the options.

Setups, each a target with a draft, in a process of its own:

    bundled        the bundled models
    <shape>        a target of that shape that drafts for itself (see `bench.common.shapes`)
    <shape>_bad    the same target, and a draft with unrelated weights

Workloads, each run with every mode of speculation, without it first or last in turn:

    text, text_sampled       Python code and questions that ask for some         bundled
    random, random_sampled   random tokens                                       shapes
    repeat                   a prompt, its answer with some tokens replaced,     all but bad
                             and the prompt again: most of the answer follows

Answers are greedy, or at temperature 0.7. Answers to random tokens hardly repeat, and sampled ones
not at all, so n-grams find least there. A *cell* is a workload, a batch size and a mode.

Speed is that of decoding while the whole batch runs. It is measured from the step after the last
sequence had its first token, until one sequence has as many as wanted. Such a batch is over in a
tenth of a second, so a run of a cell is many of them, with all modes in turn, until those without
speculation have taken long enough together. The worker lives on from cell to cell.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from bench.common.options import check_choices
from bench.common.report import Scalar
from bench.common.shapes import shape_named
from bench.engine.plan import KV_OF_WEIGHTS
from engine.config import Speculate, WeightFormat
from engine.errors import ConfigError
from engine.layout import KVFormat

BUNDLED = "bundled"
NUM_PROMPTS = 32
PROMPT_LEN = 64
TEMPERATURE = 0.7
EDIT_EVERY = 16  # tokens of an earlier answer, on average, one is replaced
MAX_DRAFT_TOKENS = 8
BATCHES = (1, 8, 32)
LEAST_S = 0.5  # of plain decoding, in one run of a cell
MOST_ROUNDS = 61  # batches in one run; odd, as the order of modes changes with each
CALIBRATED_LENS = (0, 1, 2, 4, 8)  # drafts whose passes are timed by themselves
QUICK_TOKENS = 16
QUICK_IDENTITY = 40
QUICK_PROMPTS = 8

# The least promised values; results of these names have them as limits.
GOALS = {
    "speedup/draft_b1": 1.6,
    "speedup/draft_b8": 1.2,
    "speedup/ngram_repeat_b1": 2.0,
    "speedup/worst": 0.97,
    "identical_share": 1.0,
}


class PromptKind(StrEnum):
    """The source of a prompt."""

    TEXT = "text"
    RANDOM = "random"
    REPEAT = "repeat"


@dataclass(frozen=True, slots=True)
class SpeculateWorkload:
    """Prompts of one kind, answered at one temperature."""

    kind: PromptKind
    temperature: float = 0.0

    @property
    def name(self) -> str:
        """In names of results."""
        return f"{self.kind}_sampled" if self.temperature else str(self.kind)


@dataclass(frozen=True, slots=True)
class SpeculateSetup:
    """Two models and what they are asked."""

    name: str
    shape: str | None  # None: the bundled models
    agrees: bool  # whether the draft was made for this target
    workloads: tuple[SpeculateWorkload, ...]

    @property
    def modes(self) -> tuple[Speculate, ...]:
        """The modes that differ: for n-grams the drafter does not matter."""
        if self.agrees:
            return tuple(Speculate)
        return (Speculate.OFF, Speculate.DRAFT, Speculate.AUTO)


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload at one batch size, in all modes of its setup."""

    setup: SpeculateSetup
    workload: SpeculateWorkload
    batch: int

    @property
    def thing(self) -> str:
        """Setup and workload, as in names of results."""
        return f"{self.setup.name}_{self.workload.name}"

    def name(self, mode: str) -> str:
        """The rest of a result's name."""
        return f"{self.thing}/{mode}_b{self.batch}"


@dataclass(frozen=True, slots=True)
class SpeculatePlan:
    """One benchmark of speculation."""

    shape: str
    setups: tuple[str, ...]
    weights: WeightFormat
    num_threads: int
    batches: tuple[int, ...]
    num_tokens: int  # of each answer that is timed
    num_identity: int  # requests that are answered in all modes, to be compared
    num_repeats: int
    least_s: float = LEAST_S  # of plain decoding, in one run of a cell
    seed: int = 0
    is_quick: bool = False

    @property
    def num_prompts(self) -> int:
        """Prompts of a workload; a larger batch repeats them."""
        return QUICK_PROMPTS if self.is_quick else NUM_PROMPTS

    @property
    def kv_format(self) -> KVFormat:
        """The KV format that fits the weights."""
        return KV_OF_WEIGHTS.get(self.weights, KVFormat.FP32)


SETUPS = ("bundled", "shape", "bad")


def check(plan: SpeculatePlan) -> SpeculatePlan:
    """Returns the plan. Raises ConfigError, which names the option that is wrong."""
    shape_named(plan.shape)
    check_choices("--setups", plan.setups, SETUPS)
    if not plan.batches or min(plan.batches) < 1:
        raise ConfigError("--batches must be positive")
    if plan.weights not in (WeightFormat.FP32, WeightFormat.BF16, WeightFormat.INT8):
        raise ConfigError(f"--weights must be fp32, bf16 or int8, not {plan.weights}")
    return plan


def quick(plan: SpeculatePlan) -> SpeculatePlan:
    """A smaller plan, done in under 50 s on two cores: greedy, and with good drafts only."""
    setups = tuple(setup for setup in plan.setups if setup != "bad")
    return replace(
        plan,
        setups=setups or plan.setups,
        num_repeats=1,
        least_s=0.0,
        num_tokens=min(plan.num_tokens, QUICK_TOKENS),
        num_identity=min(plan.num_identity, QUICK_IDENTITY),
        is_quick=True,
    )


def setups_of(plan: SpeculatePlan) -> list[SpeculateSetup]:
    """Setups with their workloads."""
    both = (0.0,) if plan.is_quick else (0.0, TEMPERATURE)
    repeat = SpeculateWorkload(PromptKind.REPEAT)
    text = tuple(SpeculateWorkload(PromptKind.TEXT, temperature) for temperature in both)
    random = tuple(SpeculateWorkload(PromptKind.RANDOM, temperature) for temperature in both)
    known = {
        "bundled": SpeculateSetup(BUNDLED, None, agrees=True, workloads=(*text, repeat)),
        "shape": SpeculateSetup(plan.shape, plan.shape, agrees=True, workloads=(*random, repeat)),
        "bad": SpeculateSetup(f"{plan.shape}_bad", plan.shape, agrees=False, workloads=random[:1]),
    }
    return [known[name] for name in SETUPS if name in plan.setups]


def cells_of(plan: SpeculatePlan, setup: SpeculateSetup) -> list[Cell]:
    """In the order in which they are measured."""
    return [Cell(setup, workload, batch) for workload in setup.workloads for batch in plan.batches]


def prompts_for(cell: Cell, count: int, *, turn: int) -> list[int]:
    """Chooses the prompts of this batch out of `count`: others in each turn."""
    return [(turn * cell.batch + i) % count for i in range(cell.batch)]


def order_of(modes: Sequence[Speculate], turn: int) -> list[Speculate]:
    """Modes in the order of one turn, so that drift meets all of them alike."""
    return [*modes[::-1]] if turn % 2 else [*modes]


def config_of(plan: SpeculatePlan) -> dict[str, Scalar]:
    """The plan as a flat mapping for the report."""
    return {
        "shape": plan.shape,
        "setups": ",".join(plan.setups),
        "weights": str(plan.weights),
        "kv": str(plan.kv_format),
        "num_threads": plan.num_threads,
        "batches": ",".join(map(str, plan.batches)),
        "num_tokens": plan.num_tokens,
        "num_identity": plan.num_identity,
        "num_repeats": plan.num_repeats,
        "least_s": plan.least_s,
        "max_draft_tokens": MAX_DRAFT_TOKENS,
        "quick": plan.is_quick,
    }
