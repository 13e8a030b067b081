"""Figures, goodput and warnings of one run of load against a server. Pure.

Latencies are in milliseconds and include complete answers only. Failures are counted by kind; a
failed request meets no SLO. Throughput is the tokens of complete answers, divided by the time from
the first request's due time to the end of the last request.

`ttft` and `e2e` begin when the request is sent. `ttft_due` and `e2e_due` begin at the request's due
time, so they include the client's lateness and the wait for a slot. Only the `_due` figures include
the delay of requests that could not be sent because the server was slow (Gil Tene's "coordinated
omission"). Goodput counts from the due time.

`client/*` is the client's own processor time: as a share of the machine, per request, and per
content chunk.

Goodput is computed by three definitions, because published figures use all three:

- `goodput/attainment`: share of requests with TTFT and TPOT inside their bounds. DistServe, Zhong
  et al., OSDI 2024, searches for the highest rate at which this share is 90 %.
- `goodput/effective_capacity`: share of requests with TTFT inside its bound and TBT, the mean of
  the longest 10 % of gaps, inside the bound on TPOT. Mooncake, Qin et al., FAST 2025.
- `goodput/requests`: requests/s with TTFT and TPOT inside their bounds; vLLM's and AIPerf's
  `--goodput`.

A bound that is not set counts as met. An answer of one token meets any bound on TPOT.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from bench.client.answers import Answer, Failure
from bench.common.report import Figure
from bench.common.stats import mean_of_longest, summarize
from engine.errors import BatonError

TBT_SHARE = 0.1
# if the client's p99 lateness is larger, a warning says that the load differed from the plan
LATE_MS = 10.0
LENGTH_TOLERANCE = 0.1
CACHED_SHARE = 0.1
# a warning is printed if the client uses a larger share of the machine's processor time
MOST_CLIENT_SHARE = 0.05
MEASURES = {  # entries of the timeline that are not stages, because they overlap with stages
    "kv_transfer": "kv/transfer",
    "kv_exposed": "kv/exposed",
    "move_pull": "kv/move_pull",
}


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """The outcome of one request: its lateness, its wait for a slot, and its answer or failure."""

    send_lag_s: float  # the client's own lateness in seconds, without the wait for a slot
    slot_wait_s: float | None  # seconds of waiting for the concurrency limit; None without a limit
    result: Answer | Failure
    due_s: float = 0.0  # due time in seconds from the start of the run
    session: int = 0
    turn: int = 0

    @property
    def delay_s(self) -> float:
        """Returns the seconds from the due time to sending."""
        return self.send_lag_s + (self.slot_wait_s or 0.0)


@dataclass(frozen=True, slots=True)
class ClientCost:
    """Processor time that all client processes used during one run."""

    cpu_s: float
    num_cores: int  # number of cores of the client's machine


@dataclass(frozen=True, slots=True)
class LoadRun:
    """The outcomes of all requests of one repetition."""

    duration_s: float
    outcomes: tuple[RequestOutcome, ...]
    cost: ClientCost | None = None

    @property
    def answers(self) -> list[Answer]:
        """Returns the complete answers."""
        results = (outcome.result for outcome in self.outcomes)
        return [result for result in results if isinstance(result, Answer)]

    @property
    def answered(self) -> list[tuple[RequestOutcome, Answer]]:
        """Returns the requests with a complete answer, paired with the answer."""
        return [(one, one.result) for one in self.outcomes if isinstance(one.result, Answer)]

    @property
    def failures(self) -> list[Failure]:
        """Returns the requests without a complete answer."""
        results = (outcome.result for outcome in self.outcomes)
        return [result for result in results if isinstance(result, Failure)]


@dataclass(frozen=True, slots=True)
class SloBounds:
    """Bounds on the latencies of one request. None means no bound."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    @classmethod
    def from_ms(cls, ttft_ms: float | None, tpot_ms: float | None) -> "SloBounds":
        """Makes the bounds from options in milliseconds."""
        return cls(*(None if ms is None else ms / 1e3 for ms in (ttft_ms, tpot_ms)))

    def hold(self, ttft_s: float | None, tpot_s: float | None) -> bool:
        """Returns True if both latencies are within their bounds. A latency of None is within any
        bound.
        """
        return all(
            value_s is None or bound_s is None or value_s <= bound_s
            for value_s, bound_s in ((ttft_s, self.ttft_s), (tpot_s, self.tpot_s))
        )


class RequestsFailed(BatonError):
    """Requests failed, so there is no valid result. `failures` has the failed requests."""

    def __init__(self, what: str, failures: Sequence[Failure]) -> None:
        super().__init__(f"{what} failed: {'; '.join(kinds_of(failures))}")
        self.failures = tuple(failures)


def whole(results: Sequence[Answer | Failure]) -> tuple[Answer, ...]:
    """Returns the answers of all streams. Raises RequestsFailed if a stream failed."""
    failures = [result for result in results if isinstance(result, Failure)]
    if failures:
        raise RequestsFailed(f"{len(failures)} of {len(results)} streams", failures)
    return tuple(result for result in results if isinstance(result, Answer))


def figures_of_runs(runs: Sequence[LoadRun], slo: SloBounds | None) -> list[dict[str, Figure]]:
    """Returns the figures of every run. If a kind of error occurs in any run, the other runs have
    it with count zero.
    """
    kinds = sorted({failure.kind for run in runs for failure in run.failures})
    return [
        {
            **_latency(run),
            **_throughput(run),
            **(_goodput(run, slo) if slo else {}),
            **_tokens(run.answers),
            **_requests(run, kinds),
            **_timeline(run.answers),
            **_client(run),
        }
        for run in runs
    ]


def meets(answer: Answer, slo: SloBounds, *, delay_s: float = 0.0) -> bool:
    """Returns True if TTFT and TPOT are within their bounds. TTFT is measured from the due time,
    `delay_s` before sending.
    """
    return slo.hold(answer.ttft_s + delay_s, answer.tpot_s)


def meets_by_longest_gaps(answer: Answer, slo: SloBounds, *, delay_s: float = 0.0) -> bool:
    """Returns True if TTFT and Mooncake's TBT are within their bounds."""
    tbt_s = mean_of_longest(answer.gaps_s, TBT_SHARE) if answer.gaps_s else None
    return slo.hold(answer.ttft_s + delay_s, tbt_s)


def num_within(run: LoadRun, slo: SloBounds) -> int:
    """Returns the number of requests whose TPOT and TTFT are within their bounds. TTFT is measured
    from the due time.
    """
    return sum(meets(answer, slo, delay_s=one.delay_s) for one, answer in run.answered)


def warnings(
    runs: Sequence[LoadRun],
    *,
    input_len: float | None,
    output_len: float | None,
    is_shared: bool = False,
) -> list[str]:
    """Returns a warning for each reason not to trust the figures.

    A length is None if lengths vary. If `is_shared`, the load repeats prefixes on purpose, so
    cached prompts cause no warning.
    """
    answers = [answer for run in runs for answer in run.answers]
    return [
        *(f"failed: {kind}" for kind in kinds_of([f for run in runs for f in run.failures])),
        *_late_client(runs),
        *_costly_client(runs),
        *_waits_for_slots(runs),
        *_other_length(
            "prompt tokens", input_len, [answer.num_prompt_tokens for answer in answers]
        ),
        *_other_length(
            "output tokens", output_len, [answer.num_output_tokens for answer in answers]
        ),
        *_no_usage(answers),
        *([] if is_shared else _cached_prompts(answers)),
    ]


def kinds_of(failures: Sequence[Failure]) -> list[str]:
    """Returns a line for each kind of failure, with its count and the detail of one example."""
    first = {failure.kind: failure.detail for failure in reversed(failures)}
    counts = Counter(failure.kind for failure in failures)
    return [f"{count} {kind} ({first[kind]})" for kind, count in counts.items()]


def _latency(run: LoadRun) -> dict[str, Figure]:
    answers, outcomes = run.answers, run.outcomes
    samples_s = {
        "ttft": [answer.ttft_s for answer in answers],
        "itl": [gap_s for answer in answers for gap_s in answer.gaps_s],
        "tpot": [answer.tpot_s for answer in answers if answer.tpot_s is not None],
        "e2e": [answer.e2e_s for answer in answers],
        "ttft_due": [answer.ttft_s + one.delay_s for one, answer in run.answered],
        "e2e_due": [answer.e2e_s + one.delay_s for one, answer in run.answered],
        "send_lag": [outcome.send_lag_s for outcome in outcomes],
        "slot_wait": [
            wait_s for outcome in outcomes if (wait_s := outcome.slot_wait_s) is not None
        ],
    }
    return {
        f"{name}/{statistic}": Figure(value_s * 1e3, "ms")
        for name, values_s in samples_s.items()
        if (summary := summarize(values_s))
        for statistic, value_s in asdict(summary).items()
    }


def _throughput(run: LoadRun) -> dict[str, Figure]:
    answers = run.answers
    num_output = sum(answer.num_output_tokens for answer in answers)
    num_prompt = sum(answer.num_prompt_tokens or 0 for answer in answers)
    return {
        "throughput/requests": Figure(len(answers) / run.duration_s, "req/s"),
        "throughput/output_tokens": Figure(num_output / run.duration_s, "tok/s"),
        "throughput/total_tokens": Figure((num_prompt + num_output) / run.duration_s, "tok/s"),
        "duration": Figure(run.duration_s, "s"),
    }


def _goodput(run: LoadRun, slo: SloBounds) -> dict[str, Figure]:
    num_sent = len(run.outcomes)
    num_met = num_within(run, slo)
    num_effective = sum(
        meets_by_longest_gaps(answer, slo, delay_s=one.delay_s) for one, answer in run.answered
    )
    return {
        "goodput/attainment": Figure(num_met / num_sent, "share"),
        "goodput/effective_capacity": Figure(num_effective / num_sent, "share"),
        "goodput/requests": Figure(num_met / run.duration_s, "req/s"),
    }


def _tokens(answers: Sequence[Answer]) -> dict[str, Figure]:
    if not answers:
        return {}
    num_output = sum(answer.num_output_tokens for answer in answers)
    num_chunks = sum(len(answer.chunk_times_s) for answer in answers)
    prompts = [n for answer in answers if (n := answer.num_prompt_tokens) is not None]
    figures = {
        "tokens/output_per_request": Figure(num_output / len(answers), "tok"),
        "tokens/per_chunk": Figure(num_output / num_chunks, "tok"),
    }
    if prompts:
        figures["tokens/prompt_per_request"] = Figure(sum(prompts) / len(prompts), "tok")
    return figures


def _requests(run: LoadRun, kinds: Iterable[str]) -> dict[str, Figure]:
    by_kind = Counter(failure.kind for failure in run.failures)
    return {
        "requests/sent": Figure(len(run.outcomes), "req"),
        "requests/completed": Figure(len(run.answers), "req"),
        "requests/failed": Figure(len(run.failures), "req"),
        **{f"errors/{kind}": Figure(by_kind[kind], "req") for kind in kinds},
    }


def _timeline(answers: Sequence[Answer]) -> dict[str, Figure]:
    samples_s: dict[str, list[float]] = {}
    for answer in answers:
        for name, value_s in answer.timeline_s.items():
            samples_s.setdefault(MEASURES.get(name, f"timeline/{name}"), []).append(value_s)
    return {
        name: Figure(sum(values_s) / len(values_s) * 1e3, "ms")
        for name, values_s in samples_s.items()
    }


def _client(run: LoadRun) -> dict[str, Figure]:
    cost = run.cost
    if cost is None or not run.outcomes:
        return {}
    figures = {
        "client/cpu": Figure(100 * _share_of_machine(run.duration_s, cost), "%"),
        "client/cpu_per_request": Figure(cost.cpu_s / len(run.outcomes) * 1e6, "µs"),
    }
    if num_chunks := sum(len(answer.chunk_times_s) for answer in run.answers):
        figures["client/cpu_per_event"] = Figure(cost.cpu_s / num_chunks * 1e6, "µs")
    return figures


def _share_of_machine(duration_s: float, cost: ClientCost) -> float:
    return cost.cpu_s / (duration_s * cost.num_cores)


def _costly_client(runs: Sequence[LoadRun]) -> list[str]:
    shares = [_share_of_machine(run.duration_s, run.cost) for run in runs if run.cost is not None]
    if not shares or max(shares) <= MOST_CLIENT_SHARE:
        return []
    return [
        f"the client used {max(shares):.1%} of this machine: if the server shares it, run the"
        " client elsewhere"
    ]


def _late_client(runs: Sequence[LoadRun]) -> list[str]:
    lag = summarize([outcome.send_lag_s for run in runs for outcome in run.outcomes])
    if lag is None or lag.p99 * 1e3 <= LATE_MS:
        return []
    return [
        f"the client itself sent late: send lag p99 {lag.p99 * 1e3:.1f} ms; its machine is busy,"
        " or it needs more --processes"
    ]


def _waits_for_slots(runs: Sequence[LoadRun]) -> list[str]:
    outcomes = [outcome for run in runs for outcome in run.outcomes]
    waits = summarize([wait for outcome in outcomes if (wait := outcome.slot_wait_s) is not None])
    if waits is None or waits.p99 * 1e3 <= LATE_MS:
        return []
    return [
        f"requests waited for a slot, p99 {waits.p99 * 1e3:.1f} ms: ttft and e2e leave this wait"
        " out; ttft_due, e2e_due and goodput include it"
    ]


def _other_length(what: str, asked: float | None, counted: Sequence[int | None]) -> list[str]:
    known = [n for n in counted if n is not None]
    if (
        asked is None
        or not known
        or abs(sum(known) / len(known) - asked) <= LENGTH_TOLERANCE * asked
    ):
        return []
    return [f"{asked:g} {what} were asked for, {sum(known) / len(known):.1f} were counted"]


def _no_usage(answers: Sequence[Answer]) -> list[str]:
    num_without = sum(answer.num_prompt_tokens is None for answer in answers)
    if num_without == 0:
        return []
    return [f"{num_without} answers came without usage: each content chunk counts as one token"]


def _cached_prompts(answers: Sequence[Answer]) -> list[str]:
    num_cached = sum(answer.num_cached_tokens or 0 for answer in answers)
    num_prompt = sum(answer.num_prompt_tokens or 0 for answer in answers)
    if num_prompt == 0 or num_cached <= CACHED_SHARE * num_prompt:
        return []
    share = num_cached / num_prompt
    return [f"the server had {share:.0%} of prompt tokens cached: use another --seed"]
