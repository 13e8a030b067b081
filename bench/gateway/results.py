"""Computes the results of `bench gateway` from its measured streams. Pure.

| result                    | unit     |                                                        |
|---------------------------|----------|--------------------------------------------------------|
| gateway/tok_per_cpu_s     | tokens/s | of a second of the server's CPU, at 64 paced streams   |
| gateway/added_ttft_ms     | ms       | median TTFT of single requests, less the bare server's |
| gateway/added_ttft_p99_ms | ms       | their 99th percentile, less the bare server's median   |
| gateway/ttft_p99/<load>   | ms       | of streams that begin at once                          |
| gateway/itl_p99/<load>    | ms       | between two pieces of a stream; the pace is in it      |
| background/cpu            | %        | of all cores, used by other programs                   |

The limit of tokens per second of CPU is that of the bare server with one timer and a write a token.
A peer's `ratio` is ours over theirs; for times, less than one is better.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.common.background import busy_results, busy_warning
from bench.common.report import Result, result_of
from bench.common.stats import percentile
from bench.gateway.plan import BARE, OURS, WRITES, GatewayPlan, StreamLoad

CLIENT_BOUND = 0.7  # above this share of a core, the client may be the bottleneck
SATURATED = 0.95  # above this share of a core, times are those of a queue


@dataclass(frozen=True, slots=True)
class GatewayRun:
    """The times of one load on one server, in seconds."""

    server: str
    load: StreamLoad
    repeat: int
    cpu_s: float
    client_cpu_s: float
    wall_s: float
    num_events: int
    ttft_s: tuple[float, ...]
    gaps_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class GatewayMeasured:
    """All runs, and versions of the peers."""

    runs: tuple[GatewayRun, ...]
    background: tuple[float, ...] = ()  # share of the CPU that others used, by repetition
    versions: Mapping[str, str] = field(default_factory=dict)

    def of(self, server: str, load: StreamLoad) -> list[GatewayRun]:
        """A server's runs of one load, by repetition."""
        return [run for run in self.runs if (run.server, run.load) == (server, load)]


def results(plan: GatewayPlan, measured: GatewayMeasured) -> tuple[Result, ...]:
    """All results, in the order of the table above."""
    first = plan.loads[0]
    peers = [name for name in plan.servers if name not in (OURS, WRITES)]

    def compared(
        name: str, unit: str, load: StreamLoad, of: Callable[[GatewayRun], float]
    ) -> Result:
        values = {
            server: [of(run) for run in measured.of(server, load)] for server in (OURS, *peers)
        }
        return _result(name, unit, values)

    speed = compared("gateway/tok_per_cpu_s", "tokens/s", first, _tokens_per_cpu_s)
    limit = statistics.median(_tokens_per_cpu_s(run) for run in measured.of(WRITES, first))
    found = [speed.limited(limit)]
    for name, percent in (("added_ttft_ms", 50), ("added_ttft_p99_ms", 99)):
        found.append(_added(plan, measured, f"gateway/{name}", percent))
    for load in plan.loads:
        found.append(compared(f"gateway/ttft_p99/{load.name}", "ms", load, _ttft_p99_ms))
        found.append(compared(f"gateway/itl_p99/{load.name}", "ms", load, _gap_p99_ms))
    return (*found, *busy_results(measured.background))


def warnings(plan: GatewayPlan, measured: GatewayMeasured) -> list[str]:
    """A line for each reason not to trust the results."""
    lines = busy_warning(measured.background)
    for load in (plan.serial, *plan.loads):
        for server in plan.servers:
            lines += _warnings_of(server, load, measured.of(server, load))
    return lines


def _warnings_of(server: str, load: StreamLoad, runs: Sequence[GatewayRun]) -> list[str]:
    lines: list[str] = []
    if not runs:
        return lines
    if any(run.num_events < load.total_tokens for run in runs):
        lines.append(f"{server} sent fewer events than tokens at {load.name}: it merges them")
    client = max(run.client_cpu_s / run.wall_s for run in runs)
    if client > CLIENT_BOUND:
        lines.append(f"the client used {client:.0%} of a core for {server} at {load.name}")
    used = max(run.cpu_s / run.wall_s for run in runs)
    if used > SATURATED and load.num_streams > 1:
        lines.append(f"{server} was saturated at {load.name}: its times are those of a queue")
    return lines


def _added(plan: GatewayPlan, measured: GatewayMeasured, name: str, percent: int) -> Result:
    """A percentile of TTFT, less the bare server's median in the same repetition."""
    load = plan.serial
    bare_ms = {run.repeat: _ttft_ms(run, 50) for run in measured.of(BARE, load)}
    servers = [server for server in plan.servers if server not in (BARE, WRITES)]
    values = {
        server: [_ttft_ms(r, percent) - bare_ms[r.repeat] for r in measured.of(server, load)]
        for server in servers
    }
    return _result(name, "ms", values)


def _result(name: str, unit: str, values: Mapping[str, Sequence[float]]) -> Result:
    theirs = {server: statistics.median(v) for server, v in values.items() if server != OURS}
    known = {server: value for server, value in theirs.items() if value}
    return result_of(name, values[OURS], unit).beside(known)


def _tokens_per_cpu_s(run: GatewayRun) -> float:
    return run.load.total_tokens / run.cpu_s


def _ttft_ms(run: GatewayRun, percent: int) -> float:
    return 1e3 * percentile(run.ttft_s, percent)


def _ttft_p99_ms(run: GatewayRun) -> float:
    return _ttft_ms(run, 99)


def _gap_p99_ms(run: GatewayRun) -> float:
    return 1e3 * percentile(run.gaps_s, 99)
