"""The mixes of requests of `bench fluid`, its figures on real deployments, and its goals. Pure.

A mix is named after its tokens of input and output. A closed loop of a few clients plays each mix.
A client sends its next request as soon as it has its answer. The clients begin one after the other,
in a ramp before the measured window. `turning` alternates between the mix of most prompt tokens and
the mix of most output tokens every few seconds.

| result                 | unit  |                                                               |
|------------------------|-------|---------------------------------------------------------------|
| fluid/MIX              |       | requests/s of `fluid` over the better other deployment        |
| requests/MIX/…         | 1/s   | requests answered in the window                               |
| ttft_p50/…, ttft_p99/… | ms    | TTFT of requests that were sent in the window                 |
| tpot_p50/…             | ms    | TPOT of requests that were sent in the window                 |
| itl_p99/MIX/…          | ms    | gap between two chunks, in the window                         |
| busy_least/…, busy_most/… | % of a core | CPU time of the least and the most busy worker       |
| itl_ratio/bound        |       | p99 of gaps with prompts over p99 without; also /walled       |
| itl_p50/…, itl_p99/…   | ms    | gap between two chunks of the streams                         |
| prompts/…              | 1/s   | prompts answered while the streams run                        |
| prompt_ttft_p50/…      | ms    | TTFT of these prompts                                         |
| failed                 |       | requests without an answer                                    |
| background/cpu         | %     | share of all cores that other programs used                   |

A request that lies partly in a window counts by the share of its chunks in the window. The better
of `walled` and `mixed` is the one with the greater median over all repetitions. Ratios are computed
within each repetition.
"""

import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from bench.client.answers import Answer, Failure
from bench.common.background import busy_results
from bench.common.command import values_of
from bench.common.options import check_choices
from bench.common.report import Figure, Goals, Result, results_of
from bench.common.stats import percentile
from bench.lab.experiment import results_by_arm
from bench.lab.streams import BesideRun, answer_warnings, answered_per_s, gaps_within
from engine.errors import ConfigError

TURNING = "turning"
RAMP_S = 5.0
WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class TokenMix:
    """The tokens of input and output of a mix's requests. A mix with several `phases` alternates
    between them.
    """

    name: str
    phases: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return self.name

    def lengths_at(self, elapsed_s: float, phase_s: float) -> tuple[int, int]:
        """Returns the tokens of input and output of a request that is sent at this time of the
        window.
        """
        return self.phases[int(elapsed_s // phase_s) % len(self.phases)]

    def window_s(self, window_s: float) -> float:
        """Returns the seconds of the mix's measured window. It is longer for a mix of several
        phases.
        """
        return window_s * len(self.phases)


def mixes_of(text: str) -> tuple[TokenMix, ...]:
    """Returns the mixes in a text such as "1024/16,64/256,turning". Raises ConfigError."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    steady = values_of(
        "--mixes", ",".join(n for n in names if n != TURNING), _mix, "INPUT/OUTPUT,…,turning"
    )
    if not names:
        raise ConfigError("--mixes: none given")
    if TURNING not in names:
        return steady
    if len(steady) < 2:
        raise ConfigError("--mixes: turning needs two other mixes, between which it turns")
    reading, writing = (of(steady, key=_prompts_share) for of in (max, min))
    return (*steady, TokenMix(TURNING, reading.phases + writing.phases))


def parts_of(text: str | None, known: Collection[str]) -> Sequence[str]:
    """Returns the parts in a text such as "mixes,bound". None means all parts. Raises
    ConfigError.
    """
    if text is None:
        return [*known]
    parts = values_of("--parts", text, str, "a list")
    check_choices("--parts", parts, known)
    return parts


def starts_s(num_clients: int, ramp_s: float) -> list[float]:
    """Returns the times at which the clients of a closed loop begin.

    Clients that begin together may stay synchronised for long: all prompts arrive at once, and then
    all clients decode. This would favour mixed workers, and real loads of many clients are not
    synchronised.
    """
    return [ramp_s * i / num_clients for i in range(num_clients)]


def _mix(text: str) -> TokenMix:
    input_len, output_len = map(int, text.split("/"))
    if min(input_len, output_len) < 1:
        raise ValueError(text)
    return TokenMix(f"{input_len}+{output_len}", ((input_len, output_len),))


def _prompts_share(mix: TokenMix) -> float:
    [(input_len, output_len)] = mix.phases
    return input_len / output_len


GOALS = Goals({"fluid/*": 0.95, "itl_ratio/bound": 1.3}, at_most=("itl_ratio/*",))
FLUID, WALLED, MIXED = COMPARED = ("fluid", "walled", "mixed")
BOUND = "bound"
# Each arm has its own deployment; in arms with `_idle` no prompts are sent.
STREAM_ARMS = ("bound_idle", "bound", "walled_idle", "walled")


@dataclass(frozen=True, slots=True)
class MixRun:
    """One run of one mix on one deployment. All times are seconds on one clock."""

    mix: str
    deployment: str
    repeat: int
    begin_s: float
    end_s: float
    # all results, including requests that ended before the window
    results: tuple[Answer | Failure, ...]
    busy: tuple[float, ...] = ()  # number of cores that each worker used in the window
    others_share: float | None = None  # share of all cores that other programs used

    @property
    def answers(self) -> list[Answer]:
        """Returns the complete answers."""
        return [result for result in self.results if isinstance(result, Answer)]

    @property
    def requests_per_s(self) -> float:
        """Returns the requests/s that were answered in the window."""
        times_s = (answer.chunk_times_s for answer in self.answers)
        return answered_per_s(times_s, self.begin_s, self.end_s)


@dataclass(frozen=True, slots=True)
class FluidMeasured:
    """All runs, and the pace and the prompt time on which the second part is based."""

    mixes: list[MixRun] = field(default_factory=list)
    streams: list[BesideRun] = field(default_factory=list)
    pace: dict[str, float] = field(default_factory=dict)

    @property
    def others_shares(self) -> list[float | None]:
        """Returns the share of the CPU that other programs used in each run."""
        shares = [run.others_share for run in self.mixes]
        return shares + [run.others_share for run in self.streams]


def results(measured: FluidMeasured) -> tuple[Result, ...]:
    """Returns all results, with the ratios first."""
    mixes, streams = measured.mixes, measured.streams
    mix_names = dict.fromkeys(run.mix for run in mixes)
    mix_arms = [f"{mix}/{deployment}" for mix in mix_names for deployment in COMPARED]
    num_failed = sum(isinstance(result, Failure) for result in _all_of(measured))
    shares = [share for share in measured.others_shares if share is not None]
    return (
        *results_of([_ratios(mixes, repeat) for repeat in _repeats(mixes)]),
        *results_of([_stream_ratios(streams, repeat) for repeat in _repeats(streams)]),
        *results_by_arm(
            ((run.repeat, f"{run.mix}/{run.deployment}", figures_of(run)) for run in mixes),
            mix_arms,
        ),
        *results_by_arm(((run.repeat, run.arm, _of_streams(run)) for run in streams), STREAM_ARMS),
        *results_of([{"failed": Figure(num_failed, "")}]),
        *busy_results(shares),
    )


def warnings(measured: FluidMeasured) -> list[str]:
    """Returns facts that a reader needs before trusting the results."""
    found = _all_of(measured)
    answers = [answer for answer in found if isinstance(answer, Answer)]
    return answer_warnings(answers, found, measured.others_shares)


def rivals_of(runs: Sequence[MixRun]) -> dict[str, str]:
    """Returns, for each mix, the better deployment other than `fluid`, by its median requests/s."""
    medians: dict[tuple[str, str], float] = {}
    for mix in dict.fromkeys(run.mix for run in runs):
        for deployment in COMPARED:
            found = [r.requests_per_s for r in runs if (r.mix, r.deployment) == (mix, deployment)]
            if found:
                medians[mix, deployment] = statistics.median(found)
    others = [each for each in COMPARED if each != FLUID]
    return {
        mix: max(others, key=lambda each: medians.get((mix, each), 0.0))
        for mix in dict.fromkeys(mix for mix, _ in medians)
    }


def _ratios(runs: Sequence[MixRun], repeat: int) -> dict[str, Figure]:
    rates = {(run.mix, run.deployment): run.requests_per_s for run in runs if run.repeat == repeat}
    pairs = {
        mix: (rates.get((mix, FLUID)), rates.get((mix, rival)))
        for mix, rival in rivals_of(runs).items()
    }
    return {
        f"fluid/{mix}": Figure(ours / theirs, "")
        for mix, (ours, theirs) in pairs.items()
        if ours is not None and theirs
    }


def _stream_ratios(runs: Sequence[BesideRun], repeat: int) -> dict[str, Figure]:
    p99_s = {run.arm: percentile(run.gaps_s, 99) for run in runs if run.repeat == repeat}
    return {
        f"itl_ratio/{arm}": Figure(p99_s[arm] / p99_s[f"{arm}_idle"], "")
        for arm in (BOUND, WALLED)
        if arm in p99_s and p99_s.get(f"{arm}_idle")
    }


def figures_of(run: MixRun) -> dict[str, Figure]:
    """Returns the figures of one mix on one deployment."""
    figures = {"requests": Figure(run.requests_per_s, "1/s")}
    sent = [one for one in run.answers if run.begin_s <= one.sent_s < run.end_s]
    gaps_s = gaps_within(run.answers, (run.begin_s, run.end_s))
    samples_s = {
        "ttft": ((50, 99), [one.ttft_s for one in sent]),
        "tpot": ((50,), [one.tpot_s for one in sent if one.tpot_s is not None]),
        "itl": ((99,), gaps_s),
    }
    for name, (ranks, values_s) in samples_s.items():
        if values_s:
            figures |= {f"{name}_p{q}": Figure(1e3 * percentile(values_s, q), "ms") for q in ranks}
    if run.busy:
        figures["busy_least"] = Figure(100 * min(run.busy), "%")
        figures["busy_most"] = Figure(100 * max(run.busy), "%")
    return figures


def _of_streams(run: BesideRun) -> dict[str, Figure]:
    begin_s, end_s = run.window_s
    figures = {f"itl_p{q}": Figure(1e3 * percentile(run.gaps_s, q), "ms") for q in (50, 99)}
    if not run.arm.endswith("_idle"):
        figures["prompts"] = Figure(len(run.answered) / (end_s - begin_s), "1/s")
    if run.answered:
        ttft_s = statistics.median(one.ttft_s for one in run.answered)
        figures["prompt_ttft_p50"] = Figure(1e3 * ttft_s, "ms")
    return figures


def _repeats(runs: Sequence[MixRun | BesideRun]) -> list[int]:
    return sorted({run.repeat for run in runs})


def _all_of(measured: FluidMeasured) -> list[Answer | Failure]:
    found = [one for run in measured.mixes for one in run.results]
    return found + [one for run in measured.streams for one in (*run.streams, *run.others)]
