"""Plays a trace in this simulator and in the peer's, at the same costs and pool sizes."""

import time
from collections.abc import Callable
from math import inf

from bench.common.progress import Say
from bench.common.report import Result
from bench.common.stats import summarize
from bench.comparison.peer import NAME, Dynamo, PeerDeployment, PeerReplay
from bench.comparison.plan import ComparisonPlan
from bench.comparison.results import result_of
from bench.simulator.cluster import (
    MAX_ANSWER_TOKENS,
    SimulatedPools,
    SimulatedRun,
    SimulationSetup,
    simulate,
)
from bench.simulator.figures.cache import infinite_cache_hits
from bench.simulator.figures.latencies import latencies_of
from bench.simulator.goodput import greatest_speed
from bench.simulator.traces import Trace
from engine.config import RouterConfig, RouterPolicy
from router.native.machine import native_machine

MAX_SPEED_UP = 16.0
Play = Callable[[PeerDeployment], PeerReplay]


def measure(
    plan: ComparisonPlan, peer: Dynamo | None, short_peer: Dynamo | None, say: Say
) -> list[Result]:
    """Returns all figures. `short_peer` plays only the first requests; peers may be None."""
    prefill, decode = plan.splits[0]
    results = []
    once, twice = PeerDeployment(prefill, decode), PeerDeployment(prefill, decode, 2.0)
    for name, shape, policy, router in (
        ("sim/round_robin", once, RouterPolicy.ROUND_ROBIN, "round_robin"),
        ("sim/ttft_x1", once, RouterPolicy.SLO, "kv_router"),
        ("sim/ttft_x2", twice, RouterPolicy.SLO, "kv_router"),
    ):
        ours = play(plan, plan.trace, shape, policy)
        theirs = None if peer is None else peer.play(shape, router)
        say(f"{name}: {ours}" + ("" if theirs is None else f"; dynamo {theirs}"))
        results.append(
            result_of(name, ours.ttft_mean_s, "s", None if theirs is None else theirs.ttft_mean_s)
        )
        if name == "sim/ttft_x1":
            most = infinite_cache_hits(plan.trace)
            their_hits = None if theirs is None or not most else theirs.hits / most
            results.append(
                result_of("sim/hit_ratio", ours.hits / most if most else 0.0, "", their_hits)
            )
            results.append(
                result_of("sim/wall_s", ours.wall_s, "s", None if theirs is None else theirs.wall_s)
            )
    return results + _goodput(plan, short_peer, say)


def _goodput(plan: ComparisonPlan, peer: Dynamo | None, say: Say) -> list[Result]:
    if not plan.num_for_goodput:
        return []
    trace = plan.trace.first(plan.num_for_goodput)

    def play_ours(shape: PeerDeployment) -> PeerReplay:
        return play(plan, trace, shape, RouterPolicy.SLO, keeps_bounds=True)

    ours = _best(plan, play_ours, "ours", say)
    if peer is None:
        return [result_of("sim/goodput", ours, "×", None)]
    theirs = _best(plan, lambda shape: peer.play(shape, "kv_router"), NAME, say)
    ratio = ours / theirs if theirs else float("inf")
    return [
        result_of("sim/goodput", ours, "×", theirs),
        result_of("sim/goodput_ratio", ratio, "", None),
    ]


def _best(plan: ComparisonPlan, play_one: Play, player: str, say: Say) -> float:
    """Returns the greatest speed-up over all splits."""
    best = 0.0
    for prefill, decode in plan.splits:

        def keeps(speed_up: float, prefill: int = prefill, decode: int = decode) -> bool:
            played = play_one(PeerDeployment(prefill, decode, speed_up))
            return played.keeps(ttft_s=plan.ttft_s, tpot_s=plan.tpot_s)

        speed = greatest_speed(keeps, least=1.0, most=MAX_SPEED_UP)
        say(f"goodput of {player}, {prefill} + {decode}: {speed:.2f} times the trace's pace")
        best = max(best, speed)
    return best


def play(
    plan: ComparisonPlan,
    trace: Trace,
    shape: PeerDeployment,
    policy: RouterPolicy,
    *,
    keeps_bounds: bool = False,
) -> PeerReplay:
    """Plays the trace in this simulator.

    With `keeps_bounds` the router knows the bounds and refuses requests that would miss them.
    """
    config = RouterConfig(
        policy=policy,
        seed=plan.seed,
        max_queue=len(trace.requests),
        queue_timeout_s=1e6,
        slo_ttft_s=plan.ttft_s if keeps_bounds else None,
        slo_tpot_s=plan.tpot_s if keeps_bounds else None,
    )
    pools = SimulatedPools(shape.prefill, shape.decode)
    setup = SimulationSetup(
        plan.hardware,
        pools,
        max_answer_tokens=MAX_ANSWER_TOKENS,
        stretch=plan.stretch if policy is RouterPolicy.SLO else None,
    )
    began_s = time.perf_counter()
    run = simulate(trace.sped_up(shape.speed_up), setup, native_machine(config))
    return _played(run, time.perf_counter() - began_s)


def _played(run: SimulatedRun, wall_s: float) -> PeerReplay:
    """Returns the result; a refused request has infinite latency, which makes means infinite."""
    latencies = [latencies_of(record) for record in run.records]
    ttft = summarize([inf if one is None else one.ttft_s for one in latencies])
    paces_s = [inf if one is None else one.tpot_s for one in latencies]
    tpot = summarize([pace_s for pace_s in paces_s if pace_s is not None])
    assert ttft is not None
    cached = sum(r.timeline.num_cached_tokens for r in run.records if r.timeline is not None)
    return PeerReplay(
        ttft.mean,
        ttft.p90,
        0.0 if tpot is None else tpot.p90,
        cached / sum(r.asked.input_len for r in run.records),
        wall_s,
    )
