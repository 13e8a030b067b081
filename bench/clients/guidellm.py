"""guidellm 0.8: its command line for a load, and what its report says. Pure."""

from pathlib import Path

import msgspec

from bench.clients.plan import ClientLoop, ClientsPlan
from bench.clients.results import ClientFailed, Told
from bench.common.stats import percentile

NAME = "guidellm"
REPORT = "guidellm.json"


class _Guide(msgspec.Struct):
    """One request of guidellm's report."""

    request_start_time: float
    request_end_time: float
    request_latency: float
    time_to_first_token_ms: float
    inter_token_latency_ms: float
    output_tokens: int


class _GuideRequests(msgspec.Struct):
    successful: list[_Guide]


class _GuideBenchmark(msgspec.Struct):
    requests: _GuideRequests


class _GuideReport(msgspec.Struct):
    benchmarks: list[_GuideBenchmark]


def guidellm_command(
    plan: ClientsPlan, loop: ClientLoop, *, url: str, program: Path, folder: Path, tokenizer: Path
) -> list[str]:
    """The command, with its report in `folder`."""
    profile = (
        f"kind=concurrent,streams={plan.num_clients}"
        if loop is ClientLoop.CLOSED
        else f"kind=constant,rate={plan.rate_per_s:g}"
    )
    options = {
        "--backend": f"kind=openai_http,target={url},model=known,request_format=/v1/completions",
        "--profile": profile,
        "--constraint": f"kind=max_requests,count={plan.num_requests}",
        "--tokenizer": f"kind=huggingface_auto,model={tokenizer}",
        "--data": (
            f"kind=synthetic_text,prompt_tokens={plan.input_len},output_tokens={plan.output_len}"
        ),
        "--output": f"kind=json,path={folder / REPORT}",
    }
    pairs = [word for pair in options.items() for word in pair]
    return [str(program), "run", *pairs, "--disable-progress", "--disable-console"]


def told_by_guidellm(data: bytes) -> Told:
    """The figures of its report, from its requests. Raises ClientFailed."""
    try:
        [benchmark] = msgspec.json.decode(data, type=_GuideReport).benchmarks
    except (msgspec.MsgspecError, ValueError) as error:
        raise ClientFailed(f"guidellm's report cannot be read: {error}") from error
    requests = benchmark.requests.successful
    if not requests:
        raise ClientFailed("guidellm had no answer")
    begin_s = min(one.request_start_time for one in requests)
    seconds = max(one.request_end_time for one in requests) - begin_s
    ttft, itl = (
        [one.time_to_first_token_ms for one in requests],
        [one.inter_token_latency_ms for one in requests],
    )
    return {
        "ttft_p50": percentile(ttft, 50),
        "ttft_mean": sum(ttft) / len(ttft),
        "itl_p50": percentile(itl, 50),
        "itl_mean": sum(itl) / len(itl),
        "e2e_p50": percentile([one.request_latency * 1e3 for one in requests], 50),
        "requests": len(requests) / seconds,
        "output_tokens": sum(one.output_tokens for one in requests) / seconds,
        "answered": len(requests),
    }
