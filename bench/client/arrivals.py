"""Due times of the requests of an open-loop load. Pure: the random generator is an argument.

Gaps between requests are independent, with mean 1/rate, and gamma distributed with shape
`burstiness`. At 1 this is a Poisson process; below 1 requests come in bursts, above 1 more evenly.
The gaps' coefficient of variation is 1/√burstiness. `vllm bench serve --burstiness` means the same.
"""

import math
from itertools import accumulate
from random import Random


def arrival_times_s(
    rate_per_s: float, num_requests: int, *, burstiness: float, rng: Random
) -> list[float]:
    """Due time of each request in seconds from the start, in order; the first is 0.

    With an infinite rate all requests are due at once. Raises ValueError if the rate or the
    burstiness is not above 0.
    """
    if not rate_per_s > 0 or not burstiness > 0 or not math.isfinite(burstiness):
        raise ValueError(f"rate {rate_per_s} and burstiness {burstiness} must be above 0")
    if math.isinf(rate_per_s) or num_requests == 0:
        return [0.0] * num_requests
    scale_s = 1 / (rate_per_s * burstiness)
    gaps_s = (rng.gammavariate(burstiness, scale_s) for _ in range(num_requests - 1))
    return list(accumulate(gaps_s, initial=0.0))
