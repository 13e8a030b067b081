"""The plan of one `bench engine`, from its options and the model's size. Pure.

All engines do the same jobs on the same prompts:

    prefill           8 prompts of 512 tokens, to the first token of each          ours and peers
    decode_b32        32 sequences behind prompts of 8 tokens, 32 steps            ours and peers
    decode_b1         one such sequence                                            ours and peers
    prefill_len<n>    about 4096 tokens in prompts of n                            ours
    decode_b<b>_ctx<n>    b sequences behind contexts of n tokens, 32 steps        ours

Our fp32 weights are compared with peers that hold fp32 weights. Our other formats are compared with
all peers: each engine may then use the format that suits it best.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from bench.common.options import check_choices, peers_named
from bench.common.prompts import PromptShape, token_prompts
from bench.common.report import Scalar
from engine.config import WeightFormat
from engine.errors import ConfigError
from engine.layout import KVFormat

NUM_STEPS = 32
QUICK_GRID_STEPS = 8
DECODE_PROMPT_LEN = 8
PREFILL_TOKENS = 4096
NAMED_PREFILL_LEN = 512

# For each kind of peer: the names of its engines in reports, and the variants of its driver.
PEERS = {
    "transformers": {"transformers": "f32"},
    "vllm": {"vllm": "f32", "vllm_w8a8": "w8a8"},
    "llamacpp": {"llamacpp_f32": "f32", "llamacpp_q8_0": "q8_0"},
}
KV_OF_WEIGHTS = {WeightFormat.INT8: KVFormat.INT8, WeightFormat.BF16: KVFormat.BF16}
MEASURED_WEIGHTS = (WeightFormat.FP32, WeightFormat.BF16, WeightFormat.INT8)


@dataclass(frozen=True, slots=True)
class EngineJob:
    """Sequences behind contexts of one length, computed (prefill) or decoded for some steps."""

    name: str
    num_sequences: int
    context_len: int
    num_steps: int  # 0: the prefill is measured
    for_peers: bool
    prefills_all: bool = True  # False: one context is computed and copied

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens that count for the job's speed."""
        return self.num_sequences * (self.num_steps or self.context_len)

    @property
    def kv_tokens(self) -> int:
        """Returns the number of tokens with KV at the end of the job."""
        return self.num_sequences * (self.context_len + self.num_steps + 1)


@dataclass(frozen=True, slots=True)
class EnginePeer:
    """One peer engine: its name in reports, its driver, and the Python that runs it."""

    name: str
    driver: str
    variant: str
    python: Path


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """One benchmark of the engine. Without a checkpoint, random weights of `shape` are made."""

    shape: str
    checkpoint: Path | None
    weights: tuple[WeightFormat, ...]
    kv_format: KVFormat | None  # None: the default for the weights
    num_threads: int
    prefill_lens: tuple[int, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    num_repeats: int
    peers: tuple[EnginePeer, ...] = ()
    seed: int = 0
    is_quick: bool = False


def check(plan: EnginePlan) -> EnginePlan:
    """Returns the plan. Raises ConfigError, which names the option that is wrong."""
    check_choices("--weights", plan.weights, MEASURED_WEIGHTS)
    for option in ("prefill_lens", "batches", "contexts"):
        if any(value < 1 for value in getattr(plan, option)):
            raise ConfigError(f"--{option.replace('_', '-')} must be positive")
    return plan


def quick(plan: EnginePlan) -> EnginePlan:
    """Returns a smaller plan, which takes under 50 s on two cores without peers."""
    return replace(
        plan,
        num_repeats=1,
        prefill_lens=(),
        contexts=tuple(sorted(plan.contexts)[:1]),
        is_quick=True,
    )


def peers_of(options: Sequence[str]) -> tuple[EnginePeer, ...]:
    """Returns the engines of the options `--peer NAME=PYTHON`. Raises ConfigError."""
    return tuple(
        EnginePeer(peer_name, program.name, variant, program.python)
        for program in peers_named(options, PEERS)
        for peer_name, variant in PEERS[program.name].items()
    )


def jobs_of(plan: EnginePlan) -> list[EngineJob]:
    """Returns all jobs; jobs that peers do too come first."""
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
        for n in plan.prefill_lens
        if n != NAMED_PREFILL_LEN
    ]
    grid = [
        EngineJob(f"decode_b{b}_ctx{n}", b, n, grid_steps, for_peers=False, prefills_all=False)
        for b in plan.batches
        for n in plan.contexts
    ]
    return [*named, *prefills, *grid]


def warm_up_jobs(plan: EnginePlan) -> list[EngineJob]:
    """Returns the jobs that every engine does before it is measured.

    With peers these are all jobs for peers, because some peers compile or allocate for each size.
    A quick plan without peers does fewer.
    """
    if plan.peers or not plan.is_quick:
        return [job for job in jobs_of(plan) if job.for_peers]
    return [EngineJob("warm_up", 4, 64, 4, for_peers=True)]


def kv_format_of(plan: EnginePlan, weights: WeightFormat) -> KVFormat:
    """Returns the KV format that is measured with these weights."""
    return plan.kv_format or KV_OF_WEIGHTS.get(weights, KVFormat.FP32)


def is_comparable(weights: str, variant: str) -> bool:
    """True if a peer's figure is compared with ours with these weights."""
    return weights != WeightFormat.FP32 or variant == "f32"


def prompts_of(job: EngineJob, vocab_size: int, *, seed: int, repeat: int) -> list[list[int]]:
    """Returns the job's prompts: the same for every engine, different in every repetition."""
    rng = Random(f"{seed}/{job.name}/{repeat}")
    num_prompts = job.num_sequences if job.prefills_all else 1
    shape = PromptShape(num_prompts=num_prompts, input_len=job.context_len)
    return [[*prompt] for prompt in token_prompts(range(vocab_size), shape, rng)]


def limits_of(jobs: Sequence[EngineJob]) -> dict[str, int]:
    """Returns the largest sizes of these jobs, by the drivers' option names."""
    return {
        "--max-sequences": max(job.num_sequences for job in jobs),
        "--max-len": max(job.context_len + job.num_steps + 1 for job in jobs),
        "--max-tokens": max(job.kv_tokens for job in jobs),
    }


def config_of(plan: EnginePlan) -> dict[str, Scalar]:
    """The plan as a flat mapping for the report."""
    return {
        "shape": None if plan.checkpoint else plan.shape,
        "checkpoint": str(plan.checkpoint) if plan.checkpoint else None,
        "weights": ",".join(plan.weights),
        **{f"kv_of_{weights}": str(kv_format_of(plan, weights)) for weights in plan.weights},
        "num_threads": plan.num_threads,
        "num_repeats": plan.num_repeats,
        "quick": plan.is_quick,
    }
