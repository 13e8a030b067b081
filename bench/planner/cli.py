"""`baton plan`: the number of GPUs that a load needs. Parses options and prints the plan.

baton plan --model qwen3-32b --hardware h200 --rps 10 --input 4000 --output 300 \\
    --slo-ttft 2000 --slo-tpot 25 --prefix-hit 0.37
"""

from typing import Annotated

import typer

from bench.client.load import SloBounds
from bench.common.command import JsonOption, SeedOption, printed_errors, publish
from bench.common.report import report_here, results_of
from bench.planner.load import ExpectedLoad
from bench.planner.model import LAYER_BYTES, MODELS, DenseModel, model_named
from bench.planner.plan import PlanInput, plan_of
from bench.planner.pricing import GPUS, ModelOptions, Platform, Speculation, check_profile
from bench.planner.report import config_of, figures_of, print_plan, title_of
from bench.planner.search import Depth
from bench.planner.stores import StorePrices
from bench.simulator.hardware import PROFILES, hardware_named
from engine.command_options import expanded
from engine.config import WeightFormat
from engine.errors import ConfigError
from engine.layout import KVFormat

_MODEL_OF_PROFILE = {
    "h200-qwen3-0.6b": "qwen3-0.6b",
    "h200-qwen3-8b": "qwen3-8b",
    "h200-qwen3-32b-tp2": "qwen3-32b",
    "h200-qwen3-32b-tp2-linear": "qwen3-32b",
    "h200-llama-3.1-70b-tp8": "llama-3.1-70b",
}


@expanded
def plan_command(  # noqa: PLR0913 (one parameter for each option is how typer declares them)
    *,
    load: ExpectedLoad,
    slo_ttft: Annotated[
        float, typer.Option("--slo-ttft", "--slo-ttft-ms", min=0.0, help="Bound on TTFT, ms.")
    ],
    slo_tpot: Annotated[
        float, typer.Option("--slo-tpot", "--slo-tpot-ms", min=0.0, help="Bound on TPOT, ms.")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help=f"A directory with a config.json, a profile, or {', '.join(MODELS)}.",
            show_default="the profile's",
        ),
    ] = None,
    hardware_: Annotated[
        str | None,
        typer.Option(
            "--hardware",
            help=f"GPUs, {', '.join(GPUS)}; or a measured profile, its file or "
            f"{', '.join(PROFILES)}.",
            show_default="the model's profile, else h200",
        ),
    ] = None,
    weights: Annotated[
        WeightFormat, typer.Option(help="Format of weights: bf16, fp8 or int8.")
    ] = WeightFormat.BF16,
    kv_dtype: Annotated[KVFormat, typer.Option(help="Format of cached K and V.")] = KVFormat.BF16,
    accepted: Annotated[
        float, typer.Option(help="Mean accepted drafted tokens of a step; 0: no speculation.")
    ] = 0.0,
    drafted: Annotated[int, typer.Option(min=1, help="Drafted tokens of a step.")] = 4,
    draft_cost: Annotated[
        float, typer.Option(help="Cost of one drafted token, as a share of a decode step.")
    ] = 0.0,
    max_gpus: Annotated[int, typer.Option(min=1, help="Most GPUs that a plan may have.")] = 1024,
    gpu_hour_usd: Annotated[
        float | None, typer.Option(min=0.0, help="Price.", show_default="a round figure")
    ] = None,
    simulated: Annotated[
        bool, typer.Option("--simulate/--formula-only", help="Whether to check by simulation.")
    ] = True,
    requests: Annotated[
        int, typer.Option(min=40, help="Least number of simulated requests.")
    ] = 600,
    savings: Annotated[bool, typer.Option(help="Show what each option saves.")] = True,
    stores: Annotated[
        bool, typer.Option(help="Try stores of KV, if prompts share prefixes; by simulation only.")
    ] = True,
    prices: StorePrices,
    seed: SeedOption = 0,
    json: JsonOption = None,
) -> None:
    """Plan how many GPUs a load needs, in which pools, at what cost, and what options save."""
    with printed_errors():
        shape, platform = _machine(model, hardware_, gpu_hour_usd)
        ask = PlanInput(
            model=shape,
            platform=platform,
            options=_options(weights, kv_dtype, accepted, drafted, draft_cost),
            load=load,
            slo=SloBounds.from_ms(slo_ttft, slo_tpot),
            max_gpus=max_gpus,
            depth=Depth(requests, seed) if simulated else None,
            store_prices=prices if stores else None,
        )
        plan = plan_of(ask, steps=savings)
        report = report_here(
            "plan",
            seed=seed,
            config=config_of(ask),
            results=results_of([figures_of(plan)]),
        )
        publish(
            report, json, title=title_of(plan), show=lambda console, _: print_plan(console, plan)
        )


def _machine(
    model: str | None, hardware_name: str | None, usd: float | None
) -> tuple[DenseModel, Platform]:
    """Returns model and hardware. If only a profile or only a model is given, it determines the
    other.
    """
    if model in PROFILES and hardware_name is None:
        hardware_name = model
    name = hardware_name or "h200"
    if model is None and name not in _MODEL_OF_PROFILE:
        raise ConfigError("--model is needed: --hardware does not say which")
    shape = model_named(_MODEL_OF_PROFILE.get(model or name, model or name))
    gpu = GPUS.get(name)
    if gpu is not None:
        return shape, Platform(name, gpu, None, gpu.usd_per_hour if usd is None else usd)
    try:
        profile = hardware_named(name)
    except ConfigError as error:
        raise ConfigError(f"--hardware is none of {', '.join(GPUS)}, and {error}") from error
    check_profile(shape, profile)
    price = profile.usd_per_gpu_hour if usd is None else usd
    return shape, Platform(name, None, profile, price)


def _options(
    weights: WeightFormat, kv_format: KVFormat, accepted: float, drafted: int, draft_cost: float
) -> ModelOptions:
    if weights not in LAYER_BYTES:
        raise ConfigError(f"--weights must be {', '.join(LAYER_BYTES)}, not {weights}")
    speculation = Speculation(accepted, drafted, draft_cost) if accepted else None
    return ModelOptions(weights, kv_format, speculation)
