"""Computes the results of `bench batches`. Pure.

| result                  | unit       |                                                   |
|-------------------------|------------|---------------------------------------------------|
| clients/ttft, itl, e2e  | ms         | percentiles over all windows with a batch         |
| quiet/ttft, itl, e2e    | ms         | the same, of pairs of windows without other load  |
| quiet/pairs             | 1          | these pairs; limit: all                           |
| noise/ttft, itl, e2e    | ms         | p99 of the windows without a batch in every other pair |
| batches/answered_once   | requests   | with one result, which is no error; limit: all    |
| batches/beside_clients  | requests/s | answered during windows                           |
| batches/active          | %          | of the windows with a batch: it was not over      |
| batches/pauses          | 1/request  | times that a request of a batch stepped aside     |
| killed/answered_once    | requests   | of the batch whose server was killed              |
| killed/equal            | requests   | of these: with the text of the undisturbed batch  |
| killed/answered_before  | requests   | when the last kill came                           |
| background/cpu          | %          | of all cores, used by other programs              |

The peer of a percentile is the same one in the windows without a batch. A ratio near one says that
batches cost clients nothing. A pair is quiet if other programs used at most 5 % of the CPU in it.
On a shared machine these disturb a 99th percentile more than a batch could. The peer of noise is
the same percentile in the other pairs: their ratio is what the machine does to it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.client.answers import Answer
from bench.client.load import LoadRun
from bench.common.background import TOO_BUSY, busy_results, busy_warning
from bench.common.report import Result, result_of
from bench.common.stats import percentile
from bench.lab.batches.api import Texts

WITH, WITHOUT = "with", "without"

PERCENTS = (50, 99)
GOAL = 1.05  # ratio of the 99th percentiles
NOISE = "noise/"
ENOUGH_ACTIVE = 0.9


@dataclass(frozen=True, slots=True)
class Window:
    """Clients' requests of one window, and the batch beside them."""

    which: str
    pair: int
    load: LoadRun
    num_answered: int = 0  # batch requests that were answered during the window
    active_s: float = 0.0  # the part of the window in which the batch was unfinished


@dataclass(frozen=True, slots=True)
class Killed:
    """One file twice: undisturbed, and with kills."""

    num_requests: int
    undisturbed: Texts
    disturbed: Texts
    num_before: int  # results at the last kill


@dataclass(frozen=True, slots=True)
class BatchesMeasured:
    """All that was measured."""

    num_requests: int  # in the batches of all windows
    windows: tuple[Window, ...]
    texts: Texts  # from the batches of all windows
    num_pauses: float
    killed: Killed | None = None
    background: tuple[float, ...] = ()


def results(measured: BatchesMeasured) -> tuple[Result, ...]:
    """All results, in the order of the table above."""
    found = [
        _compared(f"clients/{name}/p{percent}", measured.windows, of, percent)
        for name, of in _TIMES.items()
        for percent in PERCENTS
    ]
    found += _quiet(measured)
    found += _noise(measured)
    beside = [window for window in measured.windows if window.which == WITH]
    number = measured.num_requests
    once = float(len(once_of(measured.texts)))
    found.append(result_of("batches/answered_once", [once], "requests").limited(number))
    rates = [window.num_answered / window.load.duration_s for window in beside]
    found.append(result_of("batches/beside_clients", rates, "requests/s"))
    shares = [100 * window.active_s / window.load.duration_s for window in beside]
    found.append(result_of("batches/active", shares, "%"))
    found.append(result_of("batches/pauses", [measured.num_pauses / number], "1/request"))
    if measured.killed is not None:
        found += _killed(measured.killed)
    return (*found, *busy_results(measured.background))


def once_of(texts: Texts) -> dict[str, str]:
    """Returns the answers of requests that have exactly one answer."""
    counts = Counter(name for name, _ in texts)
    return {name: text for name, text in texts if counts[name] == 1}


def warnings(measured: BatchesMeasured) -> list[str]:
    """Returns a line for each reason not to trust the results, and for each goal that was
    missed.
    """
    lines = busy_warning(measured.background)
    failures = sum(len(window.load.failures) for window in measured.windows)
    if failures:
        lines.append(f"{failures} requests of clients failed")
    for result in results(measured):
        ratio = max((peer.ratio for peer in result.peers.values()), default=0.0)
        if result.name.endswith("/p99") and ratio > GOAL and not result.name.startswith(NOISE):
            lines.append(f"{result.name} is {ratio:.2f} times that without batches")
        if result.name == "batches/active" and result.value < 100 * ENOUGH_ACTIVE:
            lines.append("batches were over before their windows: give more --requests")
        if result.of_limit is not None and result.of_limit < 1 and result.unit == "requests":
            lines.append(f"{result.name}: {result.value:.0f} of {result.limit:.0f}")
    return lines


def _quiet(measured: BatchesMeasured) -> list[Result]:
    """Returns the percentiles over pairs of windows in which other programs used little CPU."""
    quiet = {pair for pair, share in enumerate(measured.background) if share <= TOO_BUSY}
    windows = [window for window in measured.windows if window.pair in quiet]
    if not windows:
        return []
    found = [
        _compared(f"quiet/{name}/p{percent}", windows, of, percent)
        for name, of in _TIMES.items()
        for percent in PERCENTS
    ]
    number = result_of("quiet/pairs", [float(len(quiet))], "1")
    return [*found, number.limited(len({window.pair for window in measured.windows}))]


def _noise(measured: BatchesMeasured) -> list[Result]:
    """Returns the 99th percentiles without a batch: half of the windows beside the other half."""
    halves: tuple[list[Window], list[Window]] = ([], [])
    for window in measured.windows:
        if window.which == WITHOUT:
            halves[window.pair % 2].append(window)
    if not all(halves):
        return []
    found: list[Result] = []
    for name, times_of in _TIMES.items():
        ours, theirs = (percentile(_pooled(half, times_of) or [0.0], 99) for half in halves)
        result = result_of(f"{NOISE}{name}/p99", [ours], "ms")
        found.append(result.beside({"other_half": theirs}) if theirs else result)
    return found


def _pooled(
    windows: Sequence[Window], times_of: Callable[[Answer], Sequence[float]]
) -> list[float]:
    """Milliseconds of all answers of some windows."""
    return [1e3 * s for window in windows for each in window.load.answers for s in times_of(each)]


def _killed(killed: Killed) -> list[Result]:
    undisturbed, disturbed = once_of(killed.undisturbed), once_of(killed.disturbed)
    equal = sum(undisturbed.get(name) == text for name, text in disturbed.items())
    before = float(killed.num_before)
    return [
        result_of("killed/answered_once", [float(len(disturbed))], "requests").limited(
            killed.num_requests
        ),
        result_of("killed/equal", [float(equal)], "requests").limited(killed.num_requests),
        result_of("killed/answered_before", [before], "requests"),
    ]


def _compared(
    name: str,
    windows: Sequence[Window],
    times_of: Callable[[Answer], Sequence[float]],
    percent: int,
) -> Result:
    ours, theirs = (
        percentile(
            _pooled([each for each in windows if each.which == which], times_of) or [0.0], percent
        )
        for which in (WITH, WITHOUT)
    )
    result = result_of(name, [ours], "ms")
    return result.beside({WITHOUT: theirs}) if theirs else result


_TIMES: dict[str, Callable[[Answer], Sequence[float]]] = {
    "ttft": lambda answer: [answer.ttft_s],
    "itl": lambda answer: answer.gaps_s,
    "e2e": lambda answer: [answer.e2e_s],
}
