"""The figures of `bench store`, and its warnings. Pure.

| result                      | unit  |                                                            |
|-----------------------------|-------|------------------------------------------------------------|
| ttft/WAY                    | ms    | TTFT of the same prompts: cold; from the store's memory;   |
|                             |       | from its disk; cached in the worker (limit of both pulls)  |
| ttft_gain/WAY               |       | TTFT of the cold prompt over TTFT of this way              |
| pull_share/WAY              | share | part of the TTFT: from the worker's intake to first chunk  |
| rest_share/WAY              | share | part of the TTFT: computing tokens that were not pulled    |
| pull/MOVER/SIZE             | GiB/s | scattered blocks; limit: memcpy                            |
| pull_of_shm/SIZE            |       | GiB/s of pulls from the slab over pulls between workers    |
| disk_load, disk_fio         | GiB/s | random blocks; the limit of the first is the second        |
| disk_load_of_fio            |       | disk_load over disk_fio of the same repetition             |
| itl_p99/SETTING             | ms    | gaps of streams: store off, on, and off again              |
| itl_p99_ratio/on            |       | store on over store off, in the same repetition            |
| itl_p99_ratio/again         |       | second run without store over first: the noise             |
| taken_blocks                |       | blocks that the store took in, in all runs with a store    |
| store_cpu                   | %     | share of one core that the store used meanwhile            |
| recovery                    | s     | until a store knows all blocks on disk                     |
| hit_share/SETTING           | share | prompt tokens that were cached or pulled; with, without    |
| turn_ttft/SETTING/p50, /p99 | ms    | TTFT of all turns                                          |
| turns_per_s/SETTING         | 1/s   | turns answered in a closed loop                            |
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.client.answers import Answer
from bench.client.load import LoadRun, kinds_of
from bench.common.background import busy_results, busy_warning
from bench.common.report import Missing, Result, result_of
from bench.common.stats import percentile
from bench.lab.kv.cases import size_name
from bench.lab.kv.contest import GIB, TimeKey
from bench.lab.store.disk import DiskRates
from bench.lab.store.parts import RestartTimes, StreamsMeasured, TurnsMeasured
from bench.lab.store.peer import PeerRestart
from bench.lab.store.plan import AGAIN, OFF, ON, STREAM_ARMS
from kvtransfer.store.disk.measuring import RecoveryTime

SLAB = "slab"
LOOSE = 0.05  # if the noise of p99 is larger, a warning says that its goal means little
INTAKE, COMPUTE = "prefill_queue", "prefill_compute"  # stages of a prompt in its worker


@dataclass(frozen=True, slots=True)
class StoreMeasured:
    """The measurements of each part. A part that was left out or failed is None."""

    restarts: RestartTimes | None = None
    pulls: Mapping[TimeKey, tuple[float, ...]] | None = None
    disk: DiskRates | None = None
    streams: StreamsMeasured | None = None
    recovery: tuple[RecoveryTime, ...] = ()
    turns: TurnsMeasured | None = None
    peer: PeerRestart | None = None
    background: tuple[float, ...] = ()  # share of the CPU that other programs used, by part
    missing: tuple[Missing, ...] = field(default=())


def results(measured: StoreMeasured) -> tuple[Result, ...]:
    """Returns all results of the parts that were measured."""
    found: list[Result] = []
    if measured.restarts is not None:
        found += restart_results(measured.restarts, measured.peer)
    if measured.pulls is not None:
        found += pull_results(measured.pulls)
    if measured.disk is not None:
        found += disk_results(measured.disk)
    if measured.streams is not None:
        found += stream_results(measured.streams)
    if measured.recovery:
        seconds = [each.open_s + each.dict_s for each in measured.recovery]
        found += [result_of("recovery", seconds, "s")]
    if measured.turns is not None:
        found += turn_results("without", measured.turns.without)
        found += turn_results("with", measured.turns.with_store)
    return (*found, *busy_results(measured.background))


def restart_results(times: RestartTimes, peer: PeerRestart | None = None) -> list[Result]:
    """Returns TTFT by the source of a prompt's prefix, the gain of pulls, and the peer's
    figures.
    """
    ways = {
        "cold": times.cold,
        "memory": times.memory,
        "disk": times.disk,
        "worker": times.worker,
    }
    ttft = {way: result_of(f"ttft/{way}", _ttft_ms(each), "ms") for way, each in ways.items()}
    if peer is not None:
        cold_s, files_s = statistics.median(peer.cold_s), statistics.median(peer.files_s)
        ttft["cold"] = ttft["cold"].beside({"vllm": 1e3 * cold_s})
        ttft["disk"] = ttft["disk"].beside({"vllm": 1e3 * files_s})
    found = [ttft["cold"], ttft["worker"]]
    for way in ("memory", "disk"):
        pulled = ways[way]
        gains = _ratios([a.ttft_s for a in times.cold], [a.ttft_s for a in pulled])
        found += [
            ttft[way].limited(ttft["worker"].value),
            result_of(f"ttft_gain/{way}", gains, ""),
            result_of(f"pull_share/{way}", _shares(pulled, INTAKE), "share"),
            result_of(f"rest_share/{way}", _shares(pulled, COMPUTE), "share"),
        ]
    return found


def pull_results(seconds: Mapping[TimeKey, tuple[float, ...]]) -> list[Result]:
    """Returns the bandwidths of slab and shm, with memcpy's fastest way as limit, and slab over
    shm.
    """
    found = []
    for case in dict.fromkeys(key.case for key in seconds):
        rates = {
            (key.mover, key.way): [case.num_bytes / GIB / each_s for each_s in runs]
            for key, runs in seconds.items()
            if key.case == case
        }
        best = {
            mover: max(
                (runs for (other, _), runs in rates.items() if other == mover),
                key=statistics.median,
            )
            for mover in dict.fromkeys(mover for mover, _ in rates)
        }
        size = size_name(case.block_bytes)
        limit = result_of(f"pull/memcpy/{size}", best["memcpy"], "GiB/s")
        for mover in (SLAB, "shm"):
            one = result_of(f"pull/{mover}/{size}", best[mover], "GiB/s")
            found.append(one.limited(limit.value))
        found += [
            limit,
            result_of(f"pull_of_shm/{size}", _ratios(best[SLAB], best["shm"]), ""),
        ]
    return found


def disk_results(rates: DiskRates) -> list[Result]:
    """Returns the bandwidth of loads through the disk tier, with fio's as limit if fio ran."""
    ours = result_of("disk_load", [rate / GIB for rate in rates.tier], "GiB/s")
    if rates.fio is None:
        return [ours]
    theirs = result_of("disk_fio", [rate / GIB for rate in rates.fio], "GiB/s")
    share = result_of("disk_load_of_fio", _ratios(rates.tier, rates.fio), "")
    return [ours.limited(theirs.value), theirs, share]


def stream_results(measured: StreamsMeasured) -> list[Result]:
    """Returns the p99 of gaps in each arm, and the ratios of arms within each repetition."""
    p99_ms: dict[str, list[float]] = {
        arm: [1e3 * percentile(run.gaps_s, 99) for run in measured.runs if run.arm == arm]
        for arm in STREAM_ARMS
    }
    found = [result_of(f"itl_p99/{arm}", runs, "ms") for arm, runs in p99_ms.items()]
    for arm in (ON, AGAIN):
        found.append(result_of(f"itl_p99_ratio/{arm}", _ratios(p99_ms[arm], p99_ms[OFF]), ""))
    found += [
        result_of("taken_blocks", [measured.taken_blocks], ""),
        result_of("store_cpu", [100 * measured.store_cpu], "%"),
    ]
    return found


def turn_results(setting: str, run: LoadRun) -> list[Result]:
    """Returns the hit share, times to the first token and rate of one setting."""
    answers = run.answers
    ttft_ms = _ttft_ms(answers)
    cached = sum(answer.num_cached_tokens or 0 for answer in answers)
    asked = sum(answer.num_prompt_tokens or 0 for answer in answers)
    return [
        result_of(f"hit_share/{setting}", [cached / asked], "share"),
        result_of(f"turn_ttft/{setting}/p50", [percentile(ttft_ms, 50)], "ms"),
        result_of(f"turn_ttft/{setting}/p99", [percentile(ttft_ms, 99)], "ms"),
        result_of(f"turns_per_s/{setting}", [len(answers) / run.duration_s], "1/s"),
    ]


def warnings(measured: StoreMeasured, found: Iterable[Result]) -> list[str]:
    """Returns facts that a reader needs before trusting the results."""
    lines = [missing.warning for missing in measured.missing]
    if measured.disk is not None and measured.disk.fio is None:
        lines.append(f"loads from disk stand alone: {measured.disk.reason}")
    if measured.turns is not None:
        for run in (measured.turns.without, measured.turns.with_store):
            lines += [f"failed: {kind}" for kind in kinds_of(run.failures)]
    for result in found:
        if result.name == "itl_p99_ratio/again":
            furthest = max(abs(run - 1) for run in result.runs)
            if furthest > LOOSE:
                lines.append(
                    f"p99 without a store differs by up to {furthest:.0%} from itself:"
                    " read its ratio with a store against that"
                )
    return [*lines, *busy_warning(measured.background)]


def _ttft_ms(answers: Sequence[Answer]) -> list[float]:
    return [1e3 * answer.ttft_s for answer in answers]


def _shares(answers: Sequence[Answer], stage: str) -> list[float]:
    return [answer.timeline_s.get(stage, 0.0) / answer.ttft_s for answer in answers]


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(ours, theirs, strict=True)]
