"""Due times of the requests of an open-loop load. Pure: the random generator is an argument.

Gaps between requests are independent, with mean 1/rate, and gamma distributed with shape
`burstiness`. At burstiness 1 this is a Poisson process; below 1 requests arrive in bursts, above 1
more evenly. The coefficient of variation of the gaps is 1/√burstiness. `vllm bench serve
--burstiness` has the same definition.

In a ramp the rate changes linearly from a first to a last rate. The due times come from a process
of rate 1: its request at time u is due when the integral of the ramp's rate reaches u.
"""

import math
from itertools import accumulate
from random import Random


def arrival_times_s(
    rate_per_s: float,
    num_requests: int,
    *,
    burstiness: float,
    rng: Random,
    ramp_to_per_s: float | None = None,
) -> list[float]:
    """Returns the due times of all requests in seconds from the start, in order; the first is 0.

    With an infinite rate all requests are due at once. On average, a ramp reaches its last rate at
    the last request. If requests remain after the ramp, they arrive at the last rate. Raises
    ValueError if a rate or the burstiness is not above 0.
    """
    if not rate_per_s > 0 or not burstiness > 0 or not math.isfinite(burstiness):
        raise ValueError(f"rate {rate_per_s} and burstiness {burstiness} must be above 0")
    if math.isinf(rate_per_s) or num_requests == 0:
        return [0.0] * num_requests
    if ramp_to_per_s is not None:
        if not 0 < ramp_to_per_s < math.inf:
            raise ValueError(f"the rate of a ramp's end must be above 0, not {ramp_to_per_s}")
        units = arrival_times_s(1.0, num_requests, burstiness=burstiness, rng=rng)
        return [_ramped_s(unit, num_requests, rate_per_s, ramp_to_per_s) for unit in units]
    scale_s = 1 / (rate_per_s * burstiness)
    gaps_s = (rng.gammavariate(burstiness, scale_s) for _ in range(num_requests - 1))
    return list(accumulate(gaps_s, initial=0.0))


def _ramped_s(unit: float, num_requests: int, first_per_s: float, last_per_s: float) -> float:
    """Returns the time at which a ramp has produced `unit` requests on average. The whole ramp has
    `num_requests` requests.
    """
    ramp_s = 2 * num_requests / (first_per_s + last_per_s)
    if unit >= num_requests:
        return ramp_s + (unit - num_requests) / last_per_s
    # Solves first·t + (last - first)·t²/(2·ramp) = unit for t, in a form without cancellation of
    # digits.
    root = math.sqrt(first_per_s**2 + 2 * (last_per_s - first_per_s) / ramp_s * unit)
    return 2 * unit / (first_per_s + root)
