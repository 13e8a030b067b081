"""What each harness says of one load, in one form, and all of it in one table. Pure.

| figure       | meaning                                                                        |
|--------------|--------------------------------------------------------------------------------|
| `itl_*`      | of the mean gap of each answer: all harnesses tell this one                    |
| `cpu_load`   | processor time while the load runs, as a share of the machine                  |
| `cpu_all`    | all processor time for each request, with the start and the making of prompts  |

The limit is what the server does by construction; that of `cpu_load` is our goal for ourselves.
"""

from collections.abc import Mapping, Sequence

from bench.client.load import MOST_CLIENT_SHARE
from bench.clients.plan import ClientLoop, ClientsPlan
from bench.common.report import Report, Result, result_of
from engine.errors import BatonError

UNITS = {
    "ttft_p50": "ms",
    "ttft_mean": "ms",
    "itl_p50": "ms",
    "itl_mean": "ms",
    "e2e_p50": "ms",
    "requests": "req/s",
    "output_tokens": "tok/s",
    "answered": "req",
    "cpu_load": "%",
    "cpu_all": "ms/request",
}
AGREED = tuple(name for name in UNITS if not name.startswith("cpu"))
OURS = "baton"
TOLERANCE = 0.05

Told = Mapping[str, float]  # figures by the names of UNITS


class ClientFailed(BatonError):
    """A harness gave no report that can be read."""


def told_by_us(report: Report) -> Told:
    """The figures of a report of `bench serve`. Raises ClientFailed."""
    names = {
        "ttft_p50": "ttft/p50",
        "ttft_mean": "ttft/mean",
        "itl_p50": "tpot/p50",
        "itl_mean": "tpot/mean",
        "e2e_p50": "e2e/p50",
        "requests": "throughput/requests",
        "output_tokens": "throughput/output_tokens",
        "answered": "requests/completed",
    }
    told = {name: value for name, theirs in names.items() if (value := report.value(theirs))}
    if len(told) < len(names):
        raise ClientFailed("a report of bench serve has no complete figures")
    return told


def with_cost(told: Told, *, cpu_s: float, share: float) -> Told:
    """The figures with what they cost."""
    return {**told, "cpu_load": 100 * share, "cpu_all": cpu_s / told["answered"] * 1e3}


def results_of_clients(
    plan: ClientsPlan, found: Mapping[str, Mapping[ClientLoop, Sequence[Told]]]
) -> tuple[Result, ...]:
    """A result for each figure of each load: ours, the server's own, and the peers'."""
    results = []
    for loop, runs in found[OURS].items():
        limits = _known(plan, loop)
        for name, unit in UNITS.items():
            result = result_of(f"{loop}/{name}", [run[name] for run in runs], unit)
            beside = {
                peer: result_of("", [run[name] for run in loops[loop]], unit).value
                for peer, loops in found.items()
                if peer != OURS
            }
            if name in limits:
                result = result.limited(limits[name])
            results.append(result.beside(beside))
    return tuple(results)


def disagreements(results: Sequence[Result]) -> list[str]:
    """A line for each figure in which a peer and we differ by more than the tolerance."""
    return [
        f"{result.name} differs from {peer}'s by {abs(theirs.ratio - 1):.1%}"
        for result in results
        if result.name.rpartition("/")[2] in AGREED
        for peer, theirs in result.peers.items()
        if abs(theirs.ratio - 1) > TOLERANCE
    ]


def _known(plan: ClientsPlan, loop: ClientLoop) -> Told:
    known = {
        "ttft_p50": plan.ttft_ms,
        "ttft_mean": plan.ttft_ms,
        "itl_p50": plan.itl_ms,
        "itl_mean": plan.itl_ms,
        "e2e_p50": plan.e2e_ms,
        "answered": plan.num_requests,
        "cpu_load": 100 * MOST_CLIENT_SHARE,
    }
    if loop is ClientLoop.CLOSED:
        rate = plan.num_clients / plan.e2e_ms * 1e3
        known |= {"requests": rate, "output_tokens": rate * plan.output_len}
    return known
