"""The plan of one `bench serve`, from its options. Pure.

Two runs of one plan send the same load: arrival times and prompts are functions of the seed. All
repetitions have the same arrival times, so that their spread is the server's. Each repetition has
new prompts, so that none hits the prefix cache of the previous one.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from urllib.parse import urlsplit, urlunsplit

from bench.client.answers import Endpoint
from bench.client.arrivals import arrival_times_s
from bench.client.load import SloBounds
from bench.common.prompts import Prompt, PromptShape, text_prompts, token_prompts
from bench.common.report import Scalar
from engine.errors import ConfigError

QUICK_REQUESTS = 16
QUICK_RATE_PER_S = 2.0
QUICK_TIMEOUT_S = 18.0
QUICK_INPUT_LEN = 128
QUICK_OUTPUT_LEN = 32


@dataclass(frozen=True, slots=True)
class ServeTarget:
    """The server under test. `model` None means the first model that it lists."""

    url: str
    endpoint: Endpoint = Endpoint.COMPLETIONS
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class ServeLoad:
    """Number and arrival times of requests."""

    rate_per_s: float
    num_requests: int
    burstiness: float = 1.0
    concurrency_limit: int | None = None
    num_warmup: int = 2
    num_repeats: int = 1


@dataclass(frozen=True, slots=True)
class ServeAsk:
    """The content of each request. Prompts are token ids with a tokenizer, words without one."""

    input_len: int
    output_len: int
    shared_prefix_len: int = 0
    temperature: float = 0.0
    tokenizer_dir: Path | None = None


@dataclass(frozen=True, slots=True)
class ServePlan:
    """One benchmark of one server."""

    target: ServeTarget
    load: ServeLoad
    ask: ServeAsk
    slo: SloBounds | None = None
    seed: int = 0


def check(plan: ServePlan) -> ServePlan:
    """Returns the plan. Raises ConfigError, which names the option that is wrong."""
    load, ask = plan.load, plan.ask
    if not load.rate_per_s > 0:
        raise ConfigError(f"--rate must be above 0, not {load.rate_per_s}")
    if not 0 < load.burstiness < math.inf:
        raise ConfigError(f"--burstiness must be above 0, not {load.burstiness}")
    if not ask.shared_prefix_len < ask.input_len:
        raise ConfigError("--shared-prefix-len must be below --input-len")
    if ask.tokenizer_dir and plan.target.endpoint is Endpoint.CHAT:
        raise ConfigError("--tokenizer makes prompts of token ids, which chat does not take")
    if urlsplit(plan.target.url).scheme not in ("http", "https"):
        raise ConfigError(f"--url must start with http:// or https://, not {plan.target.url!r}")
    return plan


def quick(plan: ServePlan) -> ServePlan:
    """A smaller plan, which takes under 50 s even if the server lets requests hang.

    It takes at most 18 s to warm up, about 8 s of arrivals, and at most 18 s for the last request.
    """
    load, ask, target = plan.load, plan.ask, plan.target
    return replace(
        plan,
        target=replace(target, timeout_s=min(target.timeout_s, QUICK_TIMEOUT_S)),
        load=replace(
            load,
            rate_per_s=max(load.rate_per_s, QUICK_RATE_PER_S),
            num_requests=min(load.num_requests, QUICK_REQUESTS),
            num_repeats=1,
        ),
        ask=replace(
            ask,
            input_len=max(min(ask.input_len, QUICK_INPUT_LEN), ask.shared_prefix_len + 1),
            output_len=min(ask.output_len, QUICK_OUTPUT_LEN),
        ),
    )


def due_times_s(plan: ServePlan) -> list[float]:
    """Due time of each request, in seconds from the start of its repetition."""
    load = plan.load
    return arrival_times_s(
        load.rate_per_s,
        load.num_requests,
        burstiness=load.burstiness,
        rng=Random(f"{plan.seed}/arrivals"),
    )


def prompts(
    plan: ServePlan, vocab: Sequence[int] | None
) -> tuple[list[Prompt], list[list[Prompt]]]:
    """The prompts of the warm-up, and those of each repetition. No two are equal."""
    load, ask = plan.load, plan.ask
    shape = PromptShape(
        num_prompts=load.num_warmup + load.num_repeats * load.num_requests,
        input_len=ask.input_len,
        shared_prefix_len=ask.shared_prefix_len,
    )
    rng = Random(f"{plan.seed}/prompts")
    drawn = token_prompts(vocab, shape, rng) if vocab is not None else text_prompts(shape, rng)
    warmup, measured = drawn[: load.num_warmup], drawn[load.num_warmup :]
    size = load.num_requests
    return warmup, [measured[i * size : (i + 1) * size] for i in range(load.num_repeats)]


def config_of(plan: ServePlan, model: str) -> dict[str, Scalar]:
    """The plan as a flat mapping for the report, without secrets."""
    target, slo = plan.target, plan.slo or SloBounds()
    tokenizer_dir = plan.ask.tokenizer_dir
    return {
        "url": _without_password(target.url),
        "endpoint": str(target.endpoint),
        "model": model,
        "timeout_s": target.timeout_s,
        **{name: _finite(value) for name, value in asdict(plan.load).items()},
        **asdict(plan.ask),
        "tokenizer_dir": str(tokenizer_dir) if tokenizer_dir else None,
        "slo_ttft_ms": _ms(slo.ttft_s),
        "slo_tpot_ms": _ms(slo.tpot_s),
    }


def base_url(url: str) -> str:
    """The server's address without a trailing slash or `/v1`, which users often paste."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _finite(value: Scalar) -> Scalar:
    return "inf" if value == math.inf else value  # JSON has no infinity


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else value_s * 1e3
