"""The plan of one run of `bench serve`, from its options. Pure, except that it reads traces from
files.

Two runs of one plan send the same load, because the seed determines arrival times and prompts. All
repetitions have the same arrival times and lengths, so differences between them are due to the
server. Each repetition has new prompts, which cannot hit the prefix cache of the previous
repetition.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Annotated
from urllib.parse import urlsplit, urlunsplit

import typer

from bench.client.answers import Endpoint
from bench.client.load import SloBounds
from bench.common.report import Scalar
from bench.serve.lengths import (
    LEN_64,
    LEN_128,
    ArrivalShape,
    LengthSpread,
    PromptLengths,
    Session,
    TalkShape,
    arranged,
    drawn_sessions,
    fixed,
    lengths_option,
    replayed,
)
from bench.simulator.traces import Trace, read_trace
from engine.errors import ConfigError

QUICK_REQUESTS = 16
QUICK_RATE_PER_S = 2.0
QUICK_TIMEOUT_S = 18.0
QUICK_INPUT_LEN = 128
QUICK_OUTPUT_LEN = 32
MOST_PROCESSES = 64
WARMUP_LEN = 64  # most tokens of an answer in the warm-up


@dataclass(frozen=True, slots=True)
class ServeTarget:
    """The server under test."""

    url: Annotated[str, typer.Option(help="The server's address.")] = "http://127.0.0.1:8000"
    endpoint: Annotated[Endpoint, typer.Option(help="Which API to ask.")] = Endpoint.COMPLETIONS
    model: Annotated[
        str | None, typer.Option(help="Model name.", show_default="the first listed")
    ] = None
    api_key: Annotated[
        str | None, typer.Option(envvar="BATON_API_KEY", help="Sent as a bearer token.")
    ] = field(default=None, repr=False)
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Limit for one request.")] = 120.0


@dataclass(frozen=True, slots=True)
class ServeLoad:
    """The number of requests and their arrival times."""

    rate_per_s: Annotated[
        float, typer.Option("--rate", help="Requests/s; inf sends all at once.")
    ] = 4.0
    num_requests: Annotated[int, typer.Option("--requests", min=1, help="How many requests.")] = 64
    burstiness: Annotated[
        float, typer.Option(help="Gamma shape of the gaps: 1 Poisson, less bursts, more even.")
    ] = 1.0
    concurrency_limit: Annotated[
        int | None, typer.Option(min=1, help="Most requests in flight.")
    ] = None
    num_warmup: Annotated[
        int, typer.Option("--warmup", min=0, help="Requests sent first and not measured.")
    ] = 2
    num_repeats: Annotated[
        int, typer.Option("--repeat", min=1, help="Runs; results are their medians.")
    ] = 1
    ramp_to_per_s: Annotated[
        float | None, typer.Option("--ramp-to", help="Move the rate from --rate to this one.")
    ] = None
    clients: Annotated[
        int | None, typer.Option(min=1, help="Closed loop: this many clients, no rate.")
    ] = None
    num_processes: Annotated[int, typer.Option("--processes", min=1, help="Client processes.")] = 1


@dataclass(frozen=True, slots=True)
class ServeAsk:
    """The content of each request. Prompts are token ids if there is a tokenizer, else words."""

    input_len: Annotated[
        LengthSpread,
        lengths_option("--input-len", "Prompt tokens: 128, uniform:64-256, lognormal:128,0.8."),
    ] = LEN_128
    output_len: Annotated[
        LengthSpread, lengths_option("--output-len", "Output tokens a request, likewise.")
    ] = LEN_64
    shared_prefix_len: Annotated[
        int, typer.Option(min=0, help="Tokens of a prefix that prompts share.")
    ] = 0
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature.")] = 0.0
    tokenizer_dir: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            exists=True,
            file_okay=False,
            help="Folder of a tokenizer.json: prompts are token ids of exact length.",
        ),
    ] = None
    num_prefixes: Annotated[
        int, typer.Option("--prefixes", min=1, help="How many shared prefixes.")
    ] = 1


@dataclass(frozen=True, slots=True)
class ServeReplay:
    """A recorded load: its file, a factor for its arrival rate, and a divisor for its lengths."""

    path: Path
    speed_up: float = 1.0
    shorten: int = 1


@dataclass(frozen=True, slots=True)
class ServePlan:
    """One benchmark of one server. With `replay`, arrivals and lengths are from the trace."""

    target: ServeTarget
    load: ServeLoad
    ask: ServeAsk
    slo: SloBounds | None = None
    seed: int = 0
    talk: TalkShape = field(default_factory=TalkShape)
    replay: ServeReplay | None = None


def check(plan: ServePlan) -> ServePlan:
    """Returns the plan. Raises ConfigError, which names the wrong option."""
    load, ask = plan.load, plan.ask
    if not load.rate_per_s > 0:
        raise ConfigError(f"--rate must be above 0, not {load.rate_per_s}")
    if not 0 < load.burstiness < math.inf:
        raise ConfigError(f"--burstiness must be above 0, not {load.burstiness}")
    if not ask.shared_prefix_len < ask.input_len.least:
        raise ConfigError("--shared-prefix-len must be below --input-len")
    if ask.tokenizer_dir and plan.target.endpoint is Endpoint.CHAT:
        raise ConfigError("--tokenizer makes prompts of token ids, which chat does not take")
    if urlsplit(plan.target.url).scheme not in ("http", "https"):
        raise ConfigError(f"--url must start with http:// or https://, not {plan.target.url!r}")
    _check_loop(plan)
    return plan


def _check_loop(plan: ServePlan) -> None:
    """Raises ConfigError if options exclude each other."""
    load, talk = plan.load, plan.talk
    if load.ramp_to_per_s is not None:
        if not 0 < load.ramp_to_per_s < math.inf or math.isinf(load.rate_per_s):
            raise ConfigError("--ramp-to needs finite rates above 0 at both ends")
        if load.clients is not None or plan.replay is not None:
            raise ConfigError("--ramp-to is for open loops, not for --clients or --trace")
    if load.clients is not None and (plan.replay is not None or load.concurrency_limit is not None):
        raise ConfigError("--clients excludes --trace and --concurrency-limit")
    if plan.replay is not None and not talk.is_single:
        raise ConfigError("--trace excludes --turns and --steps: a trace has its own requests")
    if not 1 <= load.num_processes <= MOST_PROCESSES:
        raise ConfigError(f"--processes must be 1 to {MOST_PROCESSES}, not {load.num_processes}")
    for option, limit in (
        ("--clients", load.clients),
        ("--concurrency-limit", load.concurrency_limit),
    ):
        if limit is not None and limit < load.num_processes:
            raise ConfigError(f"{option} must be at least --processes, not {limit}")
    if not (0 <= talk.think_s < math.inf and 0 <= talk.tool_s < math.inf):
        raise ConfigError("--think-s and --tool-s must be 0 or more")


def sized(plan: ServePlan) -> ServePlan:
    """Returns the plan with at most as many requests as its trace has. Raises TraceError."""
    if plan.replay is None:
        return plan
    number = len(trace_of(plan, plan.replay).requests)
    return replace(plan, load=replace(plan.load, num_requests=number))


def quick(plan: ServePlan) -> ServePlan:
    """Returns a smaller plan, which takes under 50 s even if the server does not answer.

    It takes at most 18 s for the warm-up, about 8 s of arrivals, and at most 18 s for the last
    request.
    """
    load, ask, target = plan.load, plan.ask, plan.target
    return replace(
        plan,
        target=replace(target, timeout_s=min(target.timeout_s, QUICK_TIMEOUT_S)),
        load=replace(
            load,
            rate_per_s=max(load.rate_per_s, QUICK_RATE_PER_S),
            ramp_to_per_s=load.ramp_to_per_s and max(load.ramp_to_per_s, QUICK_RATE_PER_S),
            num_requests=min(load.num_requests, QUICK_REQUESTS),
            num_repeats=1,
        ),
        ask=replace(
            ask,
            input_len=_at_most(ask.input_len, max(QUICK_INPUT_LEN, ask.shared_prefix_len + 1)),
            output_len=_at_most(ask.output_len, QUICK_OUTPUT_LEN),
        ),
        talk=TalkShape(),
    )


def _at_most(lengths: LengthSpread, most: int) -> LengthSpread:
    return lengths if lengths.most <= most else fixed(most)


def sessions(
    plan: ServePlan, vocab: Sequence[int] | None
) -> tuple[list[Session], list[list[Session]]]:
    """Returns the sessions of the warm-up, and the sessions of each repetition. All prompts
    differ.
    """
    return warmup_sessions(plan, vocab), [
        repetition(plan, vocab, number) for number in range(plan.load.num_repeats)
    ]


def warmup_sessions(plan: ServePlan, vocab: Sequence[int] | None) -> list[Session]:
    """Returns sessions of one request with the plan's typical lengths, for the warm-up."""
    lengths = PromptLengths(
        fixed(max(round(plan.ask.input_len.typical), plan.ask.shared_prefix_len + 1)),
        fixed(min(round(plan.ask.output_len.typical), WARMUP_LEN)),
    )
    return drawn_sessions(
        plan.load.num_warmup,
        lengths,
        TalkShape(),
        vocab,
        shape=Random(plan.seed),
        content=Random(f"{plan.seed}/warmup"),
    )


def repetition(plan: ServePlan, vocab: Sequence[int] | None, number: int) -> list[Session]:
    """Returns the sessions of one repetition."""
    load, ask = plan.load, plan.ask
    if plan.replay is not None:
        return replayed(trace_of(plan, plan.replay), vocab, f"{plan.seed}/{number}")
    lengths = PromptLengths(ask.input_len, ask.output_len, ask.shared_prefix_len, ask.num_prefixes)
    drawn = drawn_sessions(
        load.num_requests,
        lengths,
        plan.talk,
        vocab,
        shape=Random(f"{plan.seed}/lengths"),
        content=Random(f"{plan.seed}/prompts/{number}"),
    )
    arrivals = ArrivalShape(load.rate_per_s, load.burstiness, load.ramp_to_per_s, load.clients)
    return arranged(drawn, arrivals, Random(f"{plan.seed}/arrivals"))


def trace_of(plan: ServePlan, replay: ServeReplay) -> Trace:
    """Returns the first requests of the trace, sped up and shortened as in the plan. Raises
    TraceError.
    """
    read = read_trace(replay.path).first(plan.load.num_requests)
    return read.sped_up(replay.speed_up).shortened(replay.shorten)


def rate_text(plan: ServePlan) -> str:
    """Returns the load's rate in words."""
    load, replay = plan.load, plan.replay
    if replay is not None:
        return f"of {replay.path.name} × {replay.speed_up:g}"
    if load.clients is not None:
        return f"by {load.clients} clients"
    ramp = f" to {load.ramp_to_per_s:g}" if load.ramp_to_per_s else ""
    bursts = f", burstiness {load.burstiness:g}" if load.burstiness != 1 else ""
    return f"at {load.rate_per_s:.4g}{ramp}/s{bursts}"


def shape_of(plan: ServePlan) -> str:
    """Returns a description of the requests in words. A trace has its own description."""
    if plan.replay is not None:
        return ""
    ask, talk = plan.ask, plan.talk
    shared = f" ({ask.shared_prefix_len} shared)" if ask.shared_prefix_len else ""
    lens = f", {ask.input_len} tokens in{shared}, {ask.output_len} out"
    turns = "" if talk.turns.most == 1 else f", {talk.turns} turns a session"
    steps = "" if talk.steps.most == 1 else f", {talk.steps} steps a turn"
    return f"{lens}{turns}{steps}"


def config_of(plan: ServePlan, model: str) -> dict[str, Scalar]:
    """Returns the plan as a flat mapping for the report, without secrets."""
    target, slo, talk = plan.target, plan.slo or SloBounds(), plan.talk
    ask, replay = plan.ask, plan.replay
    return {
        "url": _without_password(target.url),
        "endpoint": str(target.endpoint),
        "model": model,
        "timeout_s": target.timeout_s,
        **{name: _finite(value) for name, value in asdict(plan.load).items()},
        "input_len": _scalar(ask.input_len),
        "output_len": _scalar(ask.output_len),
        "shared_prefix_len": ask.shared_prefix_len,
        "num_prefixes": ask.num_prefixes,
        "temperature": ask.temperature,
        "tokenizer_dir": str(ask.tokenizer_dir) if ask.tokenizer_dir else None,
        "turns": _scalar(talk.turns),
        "think_s": talk.think_s,
        "steps": _scalar(talk.steps),
        "tool_s": talk.tool_s,
        "trace": replay.path.name if replay else None,
        "speed_up": replay.speed_up if replay else None,
        "shorten": replay.shorten if replay else None,
        "slo_ttft_ms": _ms(slo.ttft_s),
        "slo_tpot_ms": _ms(slo.tpot_s),
    }


def _scalar(lengths: LengthSpread) -> Scalar:
    return lengths.least if lengths.least == lengths.most else str(lengths)


def base_url(url: str) -> str:
    """Returns the server's address without a trailing slash or `/v1`, which users often add."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _finite(value: Scalar) -> Scalar:
    return "inf" if value == math.inf else value  # JSON cannot encode infinity


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else value_s * 1e3
