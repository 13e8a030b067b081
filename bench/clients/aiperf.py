"""NVIDIA AIPerf 0.13: its command line for a load, and what its report says. Pure."""

from pathlib import Path

import msgspec

from bench.clients.plan import ClientLoop, ClientsPlan
from bench.clients.results import ClientFailed, Told

NAME = "aiperf"
REPORT = "profile_export_aiperf.json"


class _Total(msgspec.Struct):
    """A figure of a whole run."""

    avg: float


class _Spread(msgspec.Struct):
    """A figure of each request."""

    avg: float
    p50: float


class _PerfReport(msgspec.Struct):
    time_to_first_token: _Spread
    inter_token_latency: _Spread
    request_latency: _Spread
    request_throughput: _Total
    output_token_throughput: _Total
    request_count: _Total


def aiperf_command(
    plan: ClientsPlan, loop: ClientLoop, *, url: str, program: Path, folder: Path, tokenizer: Path
) -> list[str]:
    """The command, with its report in `folder`. Tokens are counted by the server, as we do."""
    shape = (
        ["--concurrency", str(plan.num_clients)]
        if loop is ClientLoop.CLOSED
        else ["--request-rate", f"{plan.rate_per_s:g}", "--request-rate-mode", "constant"]
    )
    options = {
        "--url": url,
        "--model": "known",
        "--endpoint-type": "completions",
        "--tokenizer": str(tokenizer),
        "--request-count": str(plan.num_requests),
        "--isl": str(plan.input_len),
        "--osl": str(plan.output_len),
        "--ui": "none",
        "--export-level": "summary",
        "--artifact-dir": str(folder),
    }
    pairs = [word for pair in options.items() for word in pair]
    bare = ["--streaming", "--use-server-token-count", "--no-gpu-telemetry", "--no-server-metrics"]
    return [str(program), "profile", *shape, *pairs, *bare]


def told_by_aiperf(data: bytes) -> Told:
    """The figures of its report. Raises ClientFailed."""
    try:
        found = msgspec.json.decode(data, type=_PerfReport)
    except msgspec.MsgspecError as error:
        raise ClientFailed(f"aiperf's report cannot be read: {error}") from error
    return {
        "ttft_p50": found.time_to_first_token.p50,
        "ttft_mean": found.time_to_first_token.avg,
        "itl_p50": found.inter_token_latency.p50,
        "itl_mean": found.inter_token_latency.avg,
        "e2e_p50": found.request_latency.p50,
        "requests": found.request_throughput.avg,
        "output_tokens": found.output_token_throughput.avg,
        "answered": found.request_count.avg,
    }
