"""Fits a profile to recordings of a deployment, from times at its gateway.

All times are from the gateway's clock. So the price of a step includes the work around the forward
pass: planning, encoding, threads that wait for each other.

    prompts    the time from the report that the first chunk begins to the first token, for prompts
               that were alone on their worker; the price A counts once per chunk
    decoding   the time between the tokens of two consecutive steps, if there was no pause. Messages
               may arrive together, so several steps are combined
    messages   the round trip of a prompt to an idle worker; and the time from the first token to
               the report that decoding begins. Delays beyond these times grow with the number of
               busy workers, and the simulation draws from the measured delays
    pulls      the time from the first token to the report that KV is in the decode worker, without
               the part that overlaps with the message of the first token

Workers and gateway slow each other down if they share cores. This slowdown is not fitted;
it follows from the number of cores (see `crowd`). Each observation is converted to seconds of a
core, given the other threads that computed meanwhile. The gateway's CPU time is spread over the
time in which workers decoded.

The deviations of single prompts and steps from their prices are also part of the result.

All fits weigh relative errors. The fitted prices are then scaled so that the fitted times add up to
the observed times: means must be right even if a few steps are much slower than most. If there are
several recordings, the median of their scales is used, since another program may have disturbed one
recording.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np
from numpy.typing import NDArray

from bench.lab.validation.recordings import DecodeStep, RecordedAttempt, RecordedRun
from bench.simulator.crowd import NO_CHANCES, Chances, core_share
from bench.simulator.hardware import HardwareProfile
from engine.demand import DecodeCost
from engine.errors import ConfigError
from engine.messages import WorkerId
from engine.worker.costs import PrefillCost, PullCost

STEPS_TOGETHER = 16
LEAST_SAMPLES = 8
FAR_OFF = 0.15  # relative deviation above which a sample gets less weight
NUM_REFITS = 6
ALWAYS_OFF = 0.5  # share of the median deviation that is added to each sample's deviation
INSTANTLY = 1e18  # bytes/s: a rate so high that transfers take no time
LONG_S = 1e4  # seconds without computing that are assumed before and after the recording

Interval = tuple[float, float]
Matrix = NDArray[np.float64]
Vector = NDArray[np.float64]


class TooFewSamples(ConfigError):
    """A recording has too few samples to fit a profile."""


@dataclass(frozen=True, slots=True)
class CostSample:
    """The features of a computation, and its time in seconds of one core."""

    features: tuple[float, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Fitted:
    """The fitted profile, the time of a message, and the measured deviations."""

    hardware: HardwareProfile
    latency_s: float
    chances: Chances = NO_CHANCES


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits of workers that a recording does not contain."""

    max_batch_tokens: int
    chunk_tokens: int


def fit(
    recordings: Sequence[RecordedRun], limits: WorkerLimits, *, name: str, cores: int | None = None
) -> Fitted:
    """Returns the fitted profile of workers that are all alike. Raises TooFewSamples.

    `cores` is the number of cores that the workers and the gateway share. None means that each
    worker has its own core.
    """
    infos = [info for told in recordings for info in told.workers.values()]
    if not infos:
        raise TooFewSamples("no worker joined")
    gateway_load = 0.0 if cores is None else _gateway_load(recordings)
    watched = [(told, _busy(told, cores, gateway_load)) for told in recordings]
    prompts = [_prompts(told, busy, limits.chunk_tokens) for told, busy in watched]
    prefill = _fit(prompts, "prompts")
    decode = _fit([_decoding(told, busy) for told, busy in watched], "decode steps")
    latency_s = _latency_s(recordings)
    hardware = HardwareProfile(
        name=name,
        source="fitted to a recording",
        layout=infos[0].layout,
        num_blocks=min(info.num_blocks for info in infos),
        prefill=PrefillCost(*prefill),
        decode=DecodeCost(*decode),
        pull=_pull(recordings),
        max_batch_tokens=limits.max_batch_tokens,
        chunk_tokens=limits.chunk_tokens,
        max_running=min(info.max_running for info in infos),
        gpus=1,
        usd_per_gpu_hour=0.0,
        cores=cores,
        gateway_load=gateway_load,
    )
    prompt, first_token = _delays(watched, latency_s)
    chances = Chances(
        prompt,
        first_token,
        prefill=_unevenness([sample for group in prompts for sample in group], prefill),
        decode=_unevenness(
            [sample for told, busy in watched for sample in _decoding(told, busy, together=1)],
            decode,
        ),
    )
    return Fitted(hardware, latency_s, chances)


# ---------------------------------------------------------------- observations


def _prompts(told: RecordedRun, busy: "_Busy", chunk_tokens: int) -> list[CostSample]:
    samples = []
    for attempt, computing_s in _alone(told):
        new = attempt.num_tokens - attempt.num_cached_tokens
        squares = attempt.num_tokens**2 - attempt.num_cached_tokens**2
        seconds = busy.work_s(attempt.prefill_worker, computing_s)
        samples.append(CostSample((-(-new // chunk_tokens), new, squares), seconds))
    return samples


def _alone(told: RecordedRun) -> list[tuple[RecordedAttempt, Interval]]:
    """Returns the handed-over attempts whose prefill ran alone on its worker, with begin and end of
    the prefill.
    """
    by_worker: dict[WorkerId, list[tuple[RecordedAttempt, Interval]]] = {}
    for attempt in told.attempts.values():
        if attempt.hands_over and (computing_s := attempt.computing_s) is not None:
            by_worker.setdefault(attempt.prefill_worker, []).append((attempt, computing_s))
    found = []
    for attempts in by_worker.values():
        attempts.sort(key=lambda one: one[0].sent_s)
        following_s = [*(attempt.sent_s for attempt, _ in attempts[1:]), math.inf]
        free_s = 0.0
        for (attempt, computing_s), next_s in zip(attempts, following_s, strict=True):
            done_s = computing_s[1]
            if attempt.sent_s >= free_s and next_s >= done_s:
                found.append((attempt, computing_s))
            free_s = max(free_s, done_s)
    return found


def _decoding(told: RecordedRun, busy: "_Busy", together: int = STEPS_TOGETHER) -> list[CostSample]:
    samples = []
    for worker_id in told.steps:
        for run in _only_decoding(told, worker_id):
            following = iter(pairwise(run))
            while batch := list(islice(following, together)):
                counted = [step for _, step in batch]
                features = (
                    len(counted),
                    sum(len(step.rows) for step in counted),
                    sum(step.num_context for step in counted),
                )
                interval = batch[0][0].at_s, batch[-1][1].at_s
                samples.append(CostSample(features, busy.work_s(worker_id, interval)))
    return samples


def _only_decoding(told: RecordedRun, worker_id: WorkerId) -> Iterator[list[DecodeStep]]:
    """Yields runs of a worker's decode steps. A step that also computed a prompt ends a run."""
    prompts = [
        computing_s
        for attempt in told.attempts.values()
        if attempt.prefill_worker == worker_id and (computing_s := attempt.computing_s) is not None
    ]
    for run in _runs(told.steps[worker_id]):
        kept = run[:1]
        for before, step in pairwise(run):
            if any(begin_s < step.at_s and before.at_s < end_s for begin_s, end_s in prompts):
                yield kept
                kept = []
            kept.append(step)
        yield kept


def _runs(steps: Sequence[DecodeStep]) -> list[list[DecodeStep]]:
    """Returns runs of steps in which each step began directly after the previous one."""
    runs: list[list[DecodeStep]] = []
    goes_on = False
    for step in steps:
        if goes_on:
            runs[-1].append(step)
        else:
            runs.append([step])
        goes_on = bool(step.rows.keys() - step.finished)
    return runs


class _Busy:
    """The times in which workers computed, and the speed of a worker given the other workers."""

    def __init__(
        self,
        intervals: Mapping[WorkerId, Sequence[Interval]],
        demands: Mapping[WorkerId, float],
        cores: int | None,
    ) -> None:
        """Sets up the times. `demands` are the cores that a computing worker uses, with its share
        of the gateway.
        """
        ends = sorted({end_s for own in intervals.values() for pair in own for end_s in pair})
        first_s, last_s = (ends[0], ends[-1]) if ends else (0.0, 0.0)
        self._at_s = np.array([first_s - LONG_S, *ends, last_s + LONG_S])
        computes = {worker_id: self._covered(own) for worker_id, own in intervals.items()}
        self._num_busy = sum(computes.values(), np.zeros(len(self._at_s) - 1))
        wanted = sum((computes[i] * demands[i] for i in computes), np.zeros(len(self._num_busy)))
        self._work_s: dict[WorkerId, Vector] = {}
        for worker_id, own in computes.items():
            with_it = wanted + (1 - own) * demands[worker_id]
            paces = np.array([core_share(cores, float(demand)) for demand in with_it])
            done_s = np.cumsum(np.diff(self._at_s) * paces)
            self._work_s[worker_id] = np.concatenate(([0.0], done_s))

    def _covered(self, intervals: Sequence[Interval]) -> Vector:
        """Returns 1 for each part of time that an interval covers, else 0."""
        covered: Vector = np.zeros(len(self._at_s) - 1)
        for interval in intervals:
            begin, end = np.searchsorted(self._at_s, interval)
            covered[begin:end] = 1.0
        return covered

    def number(self, at_s: float) -> int:
        """Returns the number of workers that computed at this time."""
        return int(self._num_busy[np.searchsorted(self._at_s, at_s, side="right") - 1])

    def work_s(self, worker_id: WorkerId, interval: Interval) -> float:
        """Returns the core seconds of a computing worker in an interval."""
        begin_s, end_s = np.interp(interval, self._at_s, self._work_s[worker_id])
        return float(end_s - begin_s)


def _busy(told: RecordedRun, cores: int | None, gateway_load: float) -> _Busy:
    intervals: dict[WorkerId, list[Interval]] = {
        worker_id: [(run[0].at_s, run[-1].at_s) for run in _runs(steps)]
        for worker_id, steps in told.steps.items()
    }
    demands = dict.fromkeys(intervals, 1 + gateway_load)
    for attempt in told.attempts.values():
        if (computing_s := attempt.computing_s) is not None:
            intervals.setdefault(attempt.prefill_worker, []).append(computing_s)
            demands.setdefault(attempt.prefill_worker, 1.0)
    return _Busy(intervals, demands, cores)


def _gateway_load(recordings: Sequence[RecordedRun]) -> float:
    """Returns the number of cores that the gateway used for each decoding worker."""
    decoded_s = sum(
        run[-1].at_s - run[0].at_s
        for told in recordings
        for steps in told.steps.values()
        for run in _runs(steps)
    )
    return sum(told.gateway_cpu_s for told in recordings) / decoded_s if decoded_s else 0.0


# ---------------------------------------------------------------- fits


def _fit(groups: Sequence[Sequence[CostSample]], what: str) -> tuple[float, ...]:
    """Returns the weights of the features, scaled so that the fitted times add up to the observed
    times.
    """
    samples = [sample for group in groups for sample in group]
    if len(samples) < LEAST_SAMPLES:
        raise TooFewSamples(f"{len(samples)} {what} to fit; {LEAST_SAMPLES} needed")
    features = np.array([sample.features for sample in samples], dtype=float)
    seconds = np.array([sample.seconds for sample in samples])
    deviations = np.hypot(ALWAYS_OFF * np.median(seconds), seconds)
    weights = _robust(features, seconds, deviations)
    ends = np.cumsum([len(group) for group in groups if group])[:-1]
    scales = [
        actual.sum() / guess.sum()
        for actual, guess in zip(
            np.split(seconds, ends), np.split(features @ weights, ends), strict=True
        )
    ]
    return tuple((weights * np.median(scales)).tolist())


def _robust(features: Matrix, seconds: Vector, deviations: Vector) -> Vector:
    """Returns weights that outliers hardly change. Outliers are steps that were interrupted."""
    trust = np.ones(len(seconds))
    for _ in range(NUM_REFITS):
        weights = _nonnegative(features, seconds, trust / deviations)
        off = np.abs(features @ weights - seconds) / deviations
        trust = np.sqrt(np.minimum(1.0, FAR_OFF / np.maximum(off, 1e-9)))
    return weights


def _nonnegative(features: Matrix, seconds: Vector, weight: Vector) -> Vector:
    """Solves weighted least squares; features with negative weights are left out."""
    scale = np.maximum(features.mean(axis=0), 1e-12)
    columns = features / scale * weight[:, None]
    kept = list(range(features.shape[1]))
    while True:
        solution = np.linalg.lstsq(columns[:, kept], seconds * weight, rcond=None)[0]
        if (solution >= 0).all() or len(kept) == 1:
            break
        kept.pop(int(solution.argmin()))
    weights: Vector = np.zeros(features.shape[1])
    weights[kept] = np.maximum(solution, 0.0)
    unscaled: Vector = weights / scale
    return unscaled


def _pull(recordings: Sequence[RecordedRun]) -> PullCost:
    """Returns the least pull time without outliers: in longer pulls, the message with the first
    token was late.
    """
    seconds = [
        attempt.ready_s - attempt.done_s
        for told in recordings
        for attempt in told.attempts.values()
        if attempt.ready_s is not None and attempt.done_s is not None
    ]
    fixed_s = _least(seconds) if seconds else 0.0
    return PullCost(max(fixed_s, 0.0), 0.0, INSTANTLY)


def _latency_s(recordings: Sequence[RecordedRun]) -> float:
    """Returns half of the least round trip of a prompt to an idle worker, without outliers."""
    ways = [
        started_s - attempt.sent_s
        for told in recordings
        for attempt, (started_s, _) in _alone(told)
    ]
    if len(ways) < LEAST_SAMPLES:
        raise TooFewSamples(f"{len(ways)} prompts found their worker idle; {LEAST_SAMPLES} needed")
    return _least(ways) / 2


def _least(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 10]


def _delays(
    watched: Sequence[tuple[RecordedRun, _Busy]], latency_s: float
) -> tuple[tuple[tuple[float, ...], ...], tuple[tuple[float, ...], ...]]:
    """Returns the delays of prompts and of first tokens beyond the round trip, by number of busy
    workers.

    Only round trips can be measured. Their excess is counted as a delay on the way to the worker,
    which has to wake up. A first token also waits for its KV.
    """
    prompts: list[tuple[int, float]] = []
    firsts: list[tuple[int, float]] = []
    for told, busy in watched:
        for attempt, (started_s, _) in _alone(told):
            prompts.append((busy.number(attempt.sent_s), started_s - attempt.sent_s))
        for attempt in told.attempts.values():
            if (
                attempt.hands_over
                and attempt.decode_started_s is not None
                and attempt.done_s is not None
            ):
                seconds = attempt.decode_started_s - attempt.done_s
                # counted one latency later, because the next prompt may have begun by then
                firsts.append((busy.number(attempt.done_s + latency_s), seconds))
    return _table(prompts, 2 * latency_s), _table(firsts, 2 * latency_s)


def _unevenness(samples: Sequence[CostSample], cost: Sequence[float]) -> tuple[float, ...]:
    """Returns each sample's time divided by its price, in the same order. The average is 1."""
    ratios = [sample.seconds / float(np.dot(cost, sample.features)) for sample in samples]
    mean = sum(ratios) / len(ratios)
    return tuple(ratio / mean for ratio in ratios)


def _table(observed: Sequence[tuple[int, float]], usual_s: float) -> tuple[tuple[float, ...], ...]:
    """Returns the rows in order. If a row has few entries, the entries of the row before are
    added.
    """
    rows: list[tuple[float, ...]] = []
    for number in range(max((number for number, _ in observed), default=-1) + 1):
        row = tuple(max(seconds - usual_s, 0.0) for n, seconds in observed if n == number)
        if len(row) < LEAST_SAMPLES and rows:
            row += rows[-1]
        rows.append(row or (0.0,))
    return tuple(rows)
