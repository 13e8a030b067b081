"""A profile fitted to a recorded deployment: what its workers take, as its gateway saw it.

Everything is timed at the gateway, so what lies around a forward pass is part of a step's price:
planning, encoding, threads that wait for each other.

    prompts    from the word that the first chunk begins to the first token, of those that had their
               worker to themselves; A is paid for each chunk
    decoding   from one step's tokens to the next one's, where the next followed at once. Messages
               bunch, so steps are taken a few together. How uneven single ones are is kept too
    messages   the way of a prompt to a worker that had nothing to do, and back; and from the first
               token to the word that decoding begins. Some take longer than others, and the more
               so the more workers are busy: as they did in the recording, so they do by chance
    pulls      from the first token to the word that KV is in the decode worker, as far as that was
               not hidden behind the message with the first token

Workers that share cores slow each other down, so a step takes 1 + s·u times as long while u other
workers compute, each of two kinds of steps with an s of its own. For lack of a better theory s is
what explains the recording best: it is of this machine, and of this number of workers.

All fits weigh relative errors, and are then scaled such that all that was observed takes as long in
sum as it did: means are to be right, also where a few are much slower than most. Of several
recordings that is the median's scale, as a machine may have had something else to do in one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np
from numpy.typing import NDArray

from bench.simulator.hardware import NO_CHANCES, Chances, Hardware
from bench.simulator.recordings import Attempt, DecodeStep, Told
from engine.errors import ConfigError
from engine.messages import WorkerId
from router.costs import DecodeCost, PrefillCost, PullCost

STEPS_TOGETHER = 16
MAX_SLOWER = 2.0  # how many times as long a step may take for each other busy worker
NUM_TRIED = 41
LEAST_SAMPLES = 8
FAR_OFF = 0.15  # as a share: what is further off counts less
NUM_REFITS = 6
ALWAYS_OFF = 0.5  # of the median, beside as much of each
INSTANTLY = 1e18  # bytes/s

Interval = tuple[float, float]
Matrix = NDArray[np.float64]
Vector = NDArray[np.float64]


class NotEnough(ConfigError):
    """A recording that says too little to fit a profile to it."""


@dataclass(frozen=True, slots=True)
class Sample:
    """So long did this take, with so many other workers busy on average meanwhile."""

    features: tuple[float, ...]
    others: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Fitted:
    """A profile, and what is no part of one: what messages take, and some of them beside that."""

    hardware: Hardware
    latency_s: float
    chances: Chances = NO_CHANCES


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What workers were started with that their gateway is not told."""

    max_batch_tokens: int
    chunk_tokens: int


def fit(recordings: Sequence[Told], limits: WorkerLimits, *, name: str) -> Fitted:
    """The profile of workers that are alike, from recordings of them. Raises NotEnough."""
    infos = [info for told in recordings for info in told.workers.values()]
    if not infos:
        raise NotEnough("no worker joined")
    prompts: list[list[Sample]] = []
    decoding: list[list[Sample]] = []
    for told in recordings:
        busy = _busy(told)
        prompts.append(_prompts(told, busy, limits.chunk_tokens))
        decoding.append(_decoding(told, busy))
    prefill, prefill_slower = _fit(prompts, "prompts")
    decode, decode_slower = _fit(decoding, "decode steps")
    latency_s = _latency_s(recordings)
    hardware = Hardware(
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
        prefill_slower=prefill_slower,
        decode_slower=decode_slower,
    )
    chances = _chances(recordings, latency_s, _unevenness(recordings, hardware))
    return Fitted(hardware, latency_s, chances)


# ---------------------------------------------------------------- what was observed


def _prompts(told: Told, busy: "_Busy", chunk_tokens: int) -> list[Sample]:
    samples = []
    for attempt in _alone(told):
        assert attempt.started_s is not None
        assert attempt.done_s is not None
        new = attempt.num_tokens - attempt.num_cached_tokens
        squares = attempt.num_tokens**2 - attempt.num_cached_tokens**2
        interval = attempt.started_s, attempt.done_s
        samples.append(
            Sample(
                (-(-new // chunk_tokens), new, squares),
                busy.others(attempt.prefill_worker, interval),
                attempt.done_s - attempt.started_s,
            )
        )
    return samples


def _alone(told: Told) -> list[Attempt]:
    """Those that had their prefill worker to themselves from the moment they were sent."""
    by_worker: dict[WorkerId, list[Attempt]] = {}
    for attempt in told.attempts.values():
        if attempt.started_s is not None and attempt.done_s is not None:
            by_worker.setdefault(attempt.prefill_worker, []).append(attempt)
    found = []
    for attempts in by_worker.values():
        attempts.sort(key=lambda attempt: attempt.sent_s)
        free_s = 0.0
        for index, attempt in enumerate(attempts):
            assert attempt.done_s is not None
            following = attempts[index + 1] if index + 1 < len(attempts) else None
            if attempt.sent_s >= free_s and (
                following is None or following.sent_s >= attempt.done_s
            ):
                found.append(attempt)
            free_s = max(free_s, attempt.done_s)
    return found


def _decoding(told: Told, busy: "_Busy") -> list[Sample]:
    samples = []
    for worker_id, steps in told.steps.items():
        for run in _runs(steps):
            following = iter(pairwise(run))
            while batch := list(islice(following, STEPS_TOGETHER)):
                interval = batch[0][0].at_s, batch[-1][1].at_s
                counted = [step for _, step in batch]
                features = (
                    len(counted),
                    sum(len(step.rows) for step in counted),
                    sum(step.num_context for step in counted),
                )
                others = busy.others(worker_id, interval)
                samples.append(Sample(features, others, interval[1] - interval[0]))
    return samples


def _runs(steps: Sequence[DecodeStep]) -> list[list[DecodeStep]]:
    """Steps of which each was followed by the next at once."""
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
    """When workers computed."""

    def __init__(self, intervals: Mapping[WorkerId, Sequence[Interval]]) -> None:
        self._intervals = {
            worker_id: np.array(own, dtype=float).reshape(-1, 2)
            for worker_id, own in intervals.items()
        }

    def number(self, at_s: float) -> int:
        """How many did at a moment."""
        return sum(
            bool(((own[:, 0] <= at_s) & (at_s < own[:, 1])).any())
            for own in self._intervals.values()
        )

    def others(self, worker_id: WorkerId, interval: Interval) -> float:
        """How many others did, on average over an interval."""
        begin_s, end_s = interval
        busy_s = 0.0
        for other, own in self._intervals.items():
            if other != worker_id:
                shared = np.minimum(own[:, 1], end_s) - np.maximum(own[:, 0], begin_s)
                busy_s += float(np.clip(shared, 0.0, None).sum())
        return busy_s / (end_s - begin_s) if end_s > begin_s else 0.0


def _busy(told: Told) -> _Busy:
    intervals: dict[WorkerId, list[Interval]] = {}
    for worker_id, steps in told.steps.items():
        runs = _runs(steps)
        intervals[worker_id] = [(run[0].at_s, run[-1].at_s) for run in runs]
    computing: dict[WorkerId, list[Interval]] = {}
    for attempt in told.attempts.values():
        if attempt.started_s is not None and attempt.done_s is not None:
            own = computing.setdefault(attempt.prefill_worker, [])
            own.append((attempt.started_s, attempt.done_s))
    for worker_id, own in computing.items():
        intervals.setdefault(worker_id, []).extend(_merged(own))
    return _Busy(intervals)


def _merged(intervals: Sequence[Interval]) -> list[Interval]:
    """The same times, each counted once."""
    merged: list[Interval] = []
    for begin_s, end_s in sorted(intervals):
        if merged and begin_s <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end_s)
        else:
            merged.append((begin_s, end_s))
    return merged


# ---------------------------------------------------------------- what follows from it


def _fit(groups: Sequence[Sequence[Sample]], what: str) -> tuple[tuple[float, ...], float]:
    """Weights of the features, and how much slower it is for each other busy worker."""
    samples = [sample for group in groups for sample in group]
    if len(samples) < LEAST_SAMPLES:
        raise NotEnough(f"{len(samples)} {what} that can be told apart, of {LEAST_SAMPLES}")
    features = np.array([sample.features for sample in samples], dtype=float)
    others = np.array([sample.others for sample in samples])
    seconds = np.array([sample.seconds for sample in samples])
    deviations = np.hypot(ALWAYS_OFF * np.median(seconds), seconds)
    least, best, best_slower = np.inf, np.zeros(features.shape[1]), 0.0
    for slower in np.linspace(0.0, MAX_SLOWER, NUM_TRIED):
        slowed = features * (1 + slower * others)[:, None]
        weights = _robust(slowed, seconds, deviations)
        error = _huber((slowed @ weights - seconds) / deviations).sum()
        if error < least:
            least, best, best_slower = error, weights, float(slower)
    predicted = features @ best * (1 + best_slower * others)
    ends = np.cumsum([len(group) for group in groups if group])[:-1]
    scales = [
        actual.sum() / guess.sum()
        for actual, guess in zip(np.split(seconds, ends), np.split(predicted, ends), strict=True)
    ]
    return tuple((best * np.median(scales)).tolist()), best_slower


def _robust(features: Matrix, seconds: Vector, deviations: Vector) -> Vector:
    """Weights without what is far off having much to say: such steps were interrupted."""
    trust = np.ones(len(seconds))
    for _ in range(NUM_REFITS):
        weights = _nonnegative(features, seconds, trust / deviations)
        off = np.abs(features @ weights - seconds) / deviations
        trust = np.sqrt(np.minimum(1.0, FAR_OFF / np.maximum(off, 1e-9)))
    return weights


def _huber(off: Vector) -> Vector:
    """Squares near zero, lines beyond."""
    far = np.abs(off)
    loss: Vector = np.where(far <= FAR_OFF, far * far / 2, FAR_OFF * (far - FAR_OFF / 2))
    return loss


def _nonnegative(features: Matrix, seconds: Vector, weight: Vector) -> Vector:
    """Weighted least squares; what would come to be negative is left out."""
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


def _pull(recordings: Sequence[Told]) -> PullCost:
    """What hardly any took less than. Where one took longer, the first token was late as well."""
    seconds = [
        attempt.ready_s - attempt.done_s
        for told in recordings
        for attempt in told.attempts.values()
        if attempt.ready_s is not None and attempt.done_s is not None
    ]
    fixed_s = _least(seconds) if seconds else 0.0
    return PullCost(max(fixed_s, 0.0), 0.0, INSTANTLY)


def _latency_s(recordings: Sequence[Told]) -> float:
    """Half of what hardly any prompt took less than, to an idle worker and back."""
    ways = [
        attempt.started_s - attempt.sent_s
        for told in recordings
        for attempt in _alone(told)
        if attempt.started_s is not None
    ]
    if len(ways) < LEAST_SAMPLES:
        raise NotEnough(f"{len(ways)} prompts that found their worker idle, of {LEAST_SAMPLES}")
    return _least(ways) / 2


def _least(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 10]


def _chances(recordings: Sequence[Told], latency_s: float, decode: tuple[float, ...]) -> Chances:
    """What prompts and first tokens took beyond twice the latency, by how many were busy.

    Only both ways together are seen; what is beyond is thought to be the way to the worker, which
    has to be woken up. With a first token KV has to have come, too.
    """
    prompts: list[tuple[int, float]] = []
    firsts: list[tuple[int, float]] = []
    for told in recordings:
        busy = _busy(told)
        for attempt in _alone(told):
            assert attempt.started_s is not None
            prompts.append((busy.number(attempt.sent_s), attempt.started_s - attempt.sent_s))
        for attempt in told.attempts.values():
            if attempt.decode_started_s is not None and attempt.done_s is not None:
                seconds = attempt.decode_started_s - attempt.done_s
                # the next prompt may have begun by then
                firsts.append((busy.number(attempt.done_s + latency_s), seconds))
    return Chances(_table(prompts, 2 * latency_s), _table(firsts, 2 * latency_s), decode)


def _unevenness(recordings: Sequence[Told], hardware: Hardware) -> tuple[float, ...]:
    """How many times as long as its price each decode step took; 1 on average."""
    ratios: list[float] = []
    for told in recordings:
        busy = _busy(told)
        for worker_id, steps in told.steps.items():
            for before, step in (pair for run in _runs(steps) for pair in pairwise(run)):
                price_s = hardware.decode.seconds(len(step.rows), step.num_context)
                others = busy.others(worker_id, (before.at_s, step.at_s))
                price_s *= 1 + hardware.decode_slower * others
                ratios.append((step.at_s - before.at_s) / price_s)
    mean = sum(ratios) / len(ratios)
    return tuple(sorted(ratio / mean for ratio in ratios))


def _table(observed: Sequence[tuple[int, float]], usual_s: float) -> tuple[tuple[float, ...], ...]:
    """Rows by number; those with too few of their own have those of the number before as well."""
    rows: list[tuple[float, ...]] = []
    for number in range(max((number for number, _ in observed), default=-1) + 1):
        row = tuple(max(seconds - usual_s, 0.0) for n, seconds in observed if n == number)
        if len(row) < LEAST_SAMPLES and rows:
            row += rows[-1]
        rows.append(row or (0.0,))
    return tuple(rows)
