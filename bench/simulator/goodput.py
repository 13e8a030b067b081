"""DistServe's goodput: the highest rate, per GPU, at which enough requests keep both bounds.

Requests per second and GPU, of the trace's own requests sped up or slowed down as a whole, at which
nine of ten have TTFT and TPOT inside their bounds. Who is refused or fails keeps none. One
simulation says whether a rate is kept; this looks for the highest one by simulating several, within
`LEAST` and `MOST` times the trace's own pace, to about 5 %. A rate above one that is not kept is
taken not to be kept either.

Source: Zhong et al., DistServe, OSDI 2024, §2.2: "the maximum request rate that can be served
adhering to the SLO attainment goal (say, 90%) for each GPU provisioned".
"""

from collections.abc import Callable

from bench.client.load import SloBounds
from bench.common.report import Figure
from bench.simulator.cluster import SimulatedRun
from bench.simulator.results import latencies_of, meets
from bench.simulator.traces import Trace

ATTAINMENT = 0.9
LEAST, MOST = 1 / 16, 16.0
NUM_HALVINGS = 4  # of the factor two within which the greatest speed is looked for

Simulate = Callable[[Trace], SimulatedRun]


def distserve_goodput(
    trace: Trace, simulate: Simulate, slo: SloBounds, *, gpus: int
) -> dict[str, Figure]:
    """Its figure; none where nothing is bounded or the trace has no rate."""
    is_bounded = slo.ttft_s is not None or slo.tpot_s is not None
    if not is_bounded or not trace.duration_s:
        return {}
    speed = greatest_speed(
        lambda speed_up: attainment(simulate(trace.sped_up(speed_up)), slo) >= ATTAINMENT,
        least=LEAST,
        most=MOST,
    )
    rate_per_s = len(trace.requests) / trace.duration_s
    return {"goodput/distserve": Figure(speed * rate_per_s / gpus, "1/s/GPU")}


def attainment(run: SimulatedRun, slo: SloBounds) -> float:
    """The share of requests with TTFT and TPOT inside their bounds."""
    return sum(meets(latencies_of(r), slo) for r in run.records) / len(run.records)


def greatest_speed(keeps: Callable[[float], bool], *, least: float, most: float) -> float:
    """The most that a trace may be sped up, powers of two apart at first. 0: not even `least`."""
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
    for _ in range(NUM_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low
