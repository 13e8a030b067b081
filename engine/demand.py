"""What a gateway says of the load: what was asked of the workers lately, and what there is to do.

It travels in reports to the controller of the pools, whose planner goes by the sum.
`router.planning.demand`
makes it; what is made of it, `router.planning.planner` says.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Seconds of a step that gives each of its sequences a token: D + E·b + F·kv."""

    fixed_s: float
    row_s: float
    context_s: float

    def seconds(self, num_rows: int, num_context_tokens: int) -> float:
        """For `num_rows` sequences with so many tokens of context in all."""
        return self.fixed_s + self.row_s * num_rows + self.context_s * num_context_tokens


@dataclass(frozen=True, slots=True)
class Observation:
    """What a gateway saw in the last second or so. Those of several gateways add up.

    Rates are per second and count what was refused. Amounts are of the gateway's own requests.
    """

    requests_per_s: float = 0.0
    prefill_s_per_s: float = 0.0  # predicted for their prompts on one worker, what is cached less
    output_tokens_per_s: float = 0.0  # predicted for their answers
    queued_s: float = 0.0  # predicted for prompts that wait for a prefill worker
    prefilling_s: float = 0.0  # predicted for what prefill workers have left to do
    num_queued: int = 0  # requests that wait for a decode worker
    queued_tokens: int = 0  # of their prompts
    num_decoding: int = 0  # sequences that decode, or will when their prompt is computed
    context_tokens: int = 0  # of these, in the middle of their predicted growth
    reserved_tokens: int = 0  # of KV, at the lengths that are predicted for their ends
    decode_cost: DecodeCost | None = None  # of one worker, if it has been learned
    num_gateways: int = 1  # whose observations these are

    def __add__(self, other: "Observation") -> "Observation":
        """Of two gateways; what decoding costs is known best to who sees more of it."""
        more, fewer = sorted((self, other), key=lambda one: one.num_decoding, reverse=True)
        return Observation(
            requests_per_s=self.requests_per_s + other.requests_per_s,
            prefill_s_per_s=self.prefill_s_per_s + other.prefill_s_per_s,
            output_tokens_per_s=self.output_tokens_per_s + other.output_tokens_per_s,
            queued_s=self.queued_s + other.queued_s,
            prefilling_s=self.prefilling_s + other.prefilling_s,
            num_queued=self.num_queued + other.num_queued,
            queued_tokens=self.queued_tokens + other.queued_tokens,
            num_decoding=self.num_decoding + other.num_decoding,
            context_tokens=self.context_tokens + other.context_tokens,
            reserved_tokens=self.reserved_tokens + other.reserved_tokens,
            decode_cost=more.decode_cost or fewer.decode_cost,
            num_gateways=self.num_gateways + other.num_gateways,
        )

    def waiting_s(self, num_prefill: int) -> float:
        """Prompts that wait, seconds of one worker; one in each worker does not wait."""
        mean_s = self.prefill_s_per_s / self.requests_per_s if self.requests_per_s else 0.0
        return self.queued_s + max(self.prefilling_s - num_prefill * mean_s, 0.0)
