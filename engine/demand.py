"""A gateway's observations of the load: recent demand, and work that waits.

`router.planning.demand` makes observations. Gateways report them to the controller of the pools,
and `router.planning.planner` decides by their sum.
"""

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """The time of a decode step, D + E·b + F·kv seconds, for b sequences with kv tokens of
    context.
    """

    fixed_s: float
    row_s: float
    context_s: float

    def seconds(self, num_rows: int, num_context_tokens: int) -> float:
        """Returns the seconds of a step of `num_rows` sequences with this total number of context
        tokens.
        """
        return self.fixed_s + self.row_s * num_rows + self.context_s * num_context_tokens


@dataclass(frozen=True, slots=True)
class Observation:
    """A gateway's observations of about the last second. Observations of several gateways can be
    added.

    Rates are per second and include refused requests. Amounts cover the gateway's own requests
    only.
    """

    requests_per_s: float = 0.0
    # predicted seconds in which one worker computes the uncached parts of a second's prompts
    prefill_s_per_s: float = 0.0
    output_tokens_per_s: float = 0.0  # predicted output tokens of the same requests
    queued_s: float = 0.0  # predicted prefill time of the prompts that wait for a worker
    prefilling_s: float = 0.0  # predicted time that prefill workers need to finish their prompts
    num_queued: int = 0  # requests that wait for a decode worker
    queued_tokens: int = 0  # prompt tokens of the requests that wait for a decode worker
    num_decoding: int = 0  # sequences that decode, or will decode after their prompt is computed
    context_tokens: int = 0  # context of decoding sequences, halfway through predicted growth
    reserved_tokens: int = 0  # KV of decoding sequences at their predicted final lengths
    decode_cost: DecodeCost | None = None  # cost on one worker; None until it is learned
    num_gateways: int = 1  # number of gateways whose observations are added up here

    def __add__(self, other: "Observation") -> "Observation":
        """Returns the sum of two observations. The decode cost is taken from the gateway that
        decodes more.
        """
        more, fewer = sorted((self, other), key=lambda one: one.num_decoding, reverse=True)
        names = [field.name for field in fields(self) if field.name != "decode_cost"]
        sums: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in names}
        return Observation(**sums, decode_cost=more.decode_cost or fewer.decode_cost)

    def waiting_s(self, num_prefill: int) -> float:
        """Returns the prefill work that has to wait, in seconds of one worker. One prompt for each
        worker is left out, because it does not wait.
        """
        mean_s = self.prefill_s_per_s / self.requests_per_s if self.requests_per_s else 0.0
        return self.queued_s + max(self.prefilling_s - num_prefill * mean_s, 0.0)
