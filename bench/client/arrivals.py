"""When each request of an open-loop load is due. Pure: the generator of randomness is an argument.

Gaps between requests are independent, of mean 1/rate, gamma distributed with shape `burstiness`:
1 is a Poisson process, below 1 requests come in bursts, above 1 they come more evenly. The gaps'
coefficient of variation is 1/√burstiness. Same meaning as `--burstiness` of `vllm bench serve`.
"""

import math
from itertools import accumulate
from random import Random


def arrival_times_s(
    rate_per_s: float, num_requests: int, *, burstiness: float, rng: Random
) -> list[float]:
    """Seconds from the start at which each request is due, in order; the first is due at 0.

    An infinite rate makes all of them due at once.
    """
    if not rate_per_s > 0 or not burstiness > 0 or not math.isfinite(burstiness):
        raise ValueError(f"rate {rate_per_s} and burstiness {burstiness} must be above 0")
    if math.isinf(rate_per_s) or num_requests == 0:
        return [0.0] * num_requests
    scale_s = 1 / (rate_per_s * burstiness)
    gaps_s = (rng.gammavariate(burstiness, scale_s) for _ in range(num_requests - 1))
    return list(accumulate(gaps_s, initial=0.0))
