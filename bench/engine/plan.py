"""The plan of one run of `bench engine`: its jobs and engines. Pure.

All engines do the same jobs on the same prompts:

    prefill           8 prompts of 512 tokens, to the first token of each          ours and peers
    decode_b32        32 sequences behind prompts of 8 tokens, 32 steps            ours and peers
    decode_b1         one sequence behind a prompt of 8 tokens, 32 steps         ours and peers
    prefill_len<n>    about 4096 tokens in prompts of n                            ours
    decode_b<b>_ctx<n>    b sequences behind contexts of n tokens, 32 steps        ours

Our engine with fp32 weights is compared with peers that use fp32 weights. Our engine in other
formats is compared with all peers, so each engine may use its best format.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Self

import typer

from bench.common.command import RepeatOption, numbers_of, peer_option, values_of
from bench.common.options import check_choices, peers_named
from bench.common.report import Scalar, hardware
from bench.engine.jobs import EngineJob
from bench.lab.experiment import Experiment, ShapeOption
from engine.config import WeightFormat
from engine.errors import ConfigError
from engine.layout import KVFormat

NUM_STEPS = 32
QUICK_GRID_STEPS = 8
DECODE_PROMPT_LEN = 8
PREFILL_TOKENS = 4096
NAMED_PREFILL_LEN = 512

# The engines of each kind of peer: a name for reports, and a variant of the driver.
PEERS = {
    "transformers": {"transformers": "f32"},
    "vllm": {"vllm": "f32", "vllm_w8a8": "w8a8"},
    "llamacpp": {"llamacpp_f32": "f32", "llamacpp_q8_0": "q8_0"},
}
KV_OF_WEIGHTS = {WeightFormat.INT8: KVFormat.INT8, WeightFormat.BF16: KVFormat.BF16}
MEASURED_WEIGHTS = (WeightFormat.FP32, WeightFormat.BF16, WeightFormat.INT8)


@dataclass(frozen=True, slots=True)
class EnginePeer:
    """One peer engine: its name in reports, its driver, and the Python that runs it."""

    name: str
    driver: str
    variant: str
    python: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan(Experiment):
    """The options of the benchmark, with the values that depend on them."""

    NAME: ClassVar = "engine"
    QUICK: ClassVar = "One run of fewer jobs: under 50 s without peers."

    shape: ShapeOption = "88m"
    checkpoint: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="A real model instead.")
    ] = None
    weights: Annotated[str, typer.Option(help="Formats to measure: fp32, bf16, int8.")] = (
        "fp32,int8"
    )
    kv_dtype: Annotated[
        KVFormat | None, typer.Option(help="Format of KV.", show_default="the weights' format")
    ] = None
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of every engine.", show_default="all cores")
    ] = None
    prefill_lens: Annotated[str, typer.Option(help="Prompt lengths to prefill.")] = "128,512,2048"
    batches: Annotated[str, typer.Option(help="Batch sizes of the decode grid.")] = "1,8,32"
    contexts: Annotated[str, typer.Option(help="Contexts of the decode grid.")] = "128,512,2048"
    repeat: RepeatOption = 5
    peer: Annotated[list[str] | None, peer_option(*PEERS)] = None

    def __post_init__(self) -> None:
        """Checks the options. Raises ConfigError, which names the wrong option."""
        check_choices("--weights", self.formats, MEASURED_WEIGHTS)
        for option in ("prefill_lens", "batches", "contexts"):
            if any(value < 1 for value in self.numbers(option)):
                raise ConfigError(f"--{option.replace('_', '-')} must be positive")
        peers_named(self.peer or (), PEERS)

    @property
    def formats(self) -> tuple[WeightFormat, ...]:
        """Returns the formats of weights to measure."""
        form = f"a list of {', '.join(WeightFormat)}"
        return values_of("--weights", self.weights, WeightFormat, form)

    @property
    def peers(self) -> tuple[EnginePeer, ...]:
        """Returns the peer engines that the options `--peer` name."""
        return tuple(
            EnginePeer(peer_name, program.name, variant, program.python)
            for program in peers_named(self.peer or (), PEERS)
            for peer_name, variant in PEERS[program.name].items()
        )

    @property
    def num_threads(self) -> int:
        """Returns the number of threads of every engine."""
        return self.threads or hardware().num_cores

    @property
    def title(self) -> str:
        """Returns the title of the table."""
        model = self.checkpoint or f"{self.shape} with random weights"
        runs = "once" if self.repeat == 1 else f"{self.repeat} times"
        return f"{model}: {self.num_threads} threads, each job {runs}"

    def numbers(self, option: str) -> tuple[int, ...]:
        """Returns the numbers in the value of an option. Raises ConfigError."""
        return numbers_of(f"--{option.replace('_', '-')}", getattr(self, option))

    def quick(self) -> Self:
        """Returns a smaller plan. On two cores without peers, a run takes under 50 s."""
        least = min(self.numbers("contexts"), default="")
        return replace(self, repeat=1, prefill_lens="", contexts=str(least), is_quick=True)

    def config(self) -> dict[str, Scalar]:
        """Returns the options as a flat mapping for the report."""
        return {
            "shape": None if self.checkpoint else self.shape,
            "checkpoint": str(self.checkpoint) if self.checkpoint else None,
            "weights": ",".join(self.formats),
            **{f"kv_of_{weights}": str(kv_format_of(self, weights)) for weights in self.formats},
            "num_threads": self.num_threads,
            "num_repeats": self.repeat,
            "quick": self.is_quick,
        }


def jobs_of(plan: EnginePlan) -> list[EngineJob]:
    """Returns all jobs. The jobs that peers also do are first."""
    grid_steps = QUICK_GRID_STEPS if plan.is_quick else NUM_STEPS
    named = [
        EngineJob(
            "prefill", PREFILL_TOKENS // NAMED_PREFILL_LEN, NAMED_PREFILL_LEN, 0, for_peers=True
        ),
        EngineJob("decode_b32", 32, DECODE_PROMPT_LEN, NUM_STEPS, for_peers=True),
        EngineJob("decode_b1", 1, DECODE_PROMPT_LEN, NUM_STEPS, for_peers=True),
    ]
    prefills = [
        EngineJob(f"prefill_len{n}", max(1, PREFILL_TOKENS // n), n, 0, for_peers=False)
        for n in plan.numbers("prefill_lens")
        if n != NAMED_PREFILL_LEN
    ]
    grid = [
        EngineJob(f"decode_b{b}_ctx{n}", b, n, grid_steps, for_peers=False, prefills_all=False)
        for b in plan.numbers("batches")
        for n in plan.numbers("contexts")
    ]
    return [*named, *prefills, *grid]


def warm_up_jobs(plan: EnginePlan) -> list[EngineJob]:
    """Returns the jobs that every engine does once before it is measured.

    With peers, these are all jobs for peers, because some peers compile or allocate for each size.
    A quick plan without peers has fewer warm-up jobs.
    """
    if plan.peers or not plan.is_quick:
        return [job for job in jobs_of(plan) if job.for_peers]
    return [EngineJob("warm_up", 4, 64, 4, for_peers=True)]


def kv_format_of(plan: EnginePlan, weights: WeightFormat) -> KVFormat:
    """Returns the KV format that is measured together with this format of weights."""
    return plan.kv_dtype or KV_OF_WEIGHTS.get(weights, KVFormat.FP32)


def is_comparable(weights: str, variant: str) -> bool:
    """Returns True if a peer's figure is compared with our figure for this format of weights."""
    return weights != WeightFormat.FP32 or variant == "f32"
