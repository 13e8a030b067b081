"""DistServe's goodput: the highest rate, per GPU, at which enough requests keep both bounds.

The trace's requests are sped up or slowed down as a whole. At the rate that is reported, nine of
ten requests have TTFT and TPOT inside their bounds; a refused or failed request has neither. One
simulation tests one rate. The search tests several, between `LEAST` and `MOST` times the trace's
own rate, and is exact to about 5 %. It assumes that a rate above a failing one fails too.

Source: Zhong et al., DistServe, OSDI 2024, §2.2: "the maximum request rate that can be served
adhering to the SLO attainment goal (say, 90%) for each GPU provisioned".
"""

from collections.abc import Callable

from bench.client.load import SloBounds
from bench.common.report import Figure
from bench.simulator.cluster import SimulatedRun
from bench.simulator.figures import latencies_of, meets
from bench.simulator.traces import Trace

ATTAINMENT = 0.9
LEAST, MOST = 1 / 16, 16.0
NUM_HALVINGS = 4  # halvings of the last factor of two

Simulate = Callable[[Trace], SimulatedRun]


def distserve_goodput(
    trace: Trace, simulate: Simulate, slo: SloBounds, *, gpus: int
) -> dict[str, Figure]:
    """Returns the figure; empty if nothing is bounded or the trace has no rate."""
    is_bounded = slo.ttft_s is not None or slo.tpot_s is not None
    if not is_bounded or not trace.duration_s:
        return {}
    rate_per_s = attained_per_s(trace, simulate, slo)
    return {"goodput/distserve": Figure(rate_per_s / gpus, "1/s/GPU")}


def attained_per_s(
    trace: Trace, simulate: Simulate, slo: SloBounds, *, num_halvings: int = NUM_HALVINGS
) -> float:
    """Returns the highest rate, in requests/s, at which enough requests keep both bounds."""
    speed = greatest_speed(
        lambda speed_up: attainment(simulate(trace.sped_up(speed_up)), slo) >= ATTAINMENT,
        least=LEAST,
        most=MOST,
        num_halvings=num_halvings,
    )
    return speed * len(trace.requests) / trace.duration_s


def attainment(run: SimulatedRun, slo: SloBounds) -> float:
    """Returns the share of requests with TTFT and TPOT inside their bounds."""
    return sum(meets(latencies_of(r), slo) for r in run.records) / len(run.records)


def greatest_speed(
    keeps: Callable[[float], bool],
    *,
    least: float,
    most: float,
    num_halvings: int = NUM_HALVINGS,
) -> float:
    """Returns the greatest factor for which `keeps` holds; 0 if not even `least` does."""
    low = 1.0
    while not keeps(low):
        if low <= least:
            return 0.0
        low /= 2
    high = 2 * low
    if low == 1.0:
        while high <= most and keeps(high):
            low, high = high, 2 * high
    if high > most:
        return low
    for _ in range(num_halvings):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low
