"""Estimates the work of a worker's steps: floating-point operations and bytes read.

Divided by time and by the machine's peaks, these give model flops utilisation (MFU) and the use of
memory bandwidth. Only work that users benefit from counts: the target model's, without refused
drafted tokens and without the draft model.

    flops       2 · weights · tokens  +  4 · attention · (pairs of a token and one in its context)
    bytes       weights once a step   +  K and V of all contexts

The head's weights count for rows that choose a token. Sources: Williams et al., "Roofline", CACM
2009; Chowdhery et al., PaLM, 2022, appendix B (MFU).
"""

from collections.abc import Sequence

import msgspec

from engine.worker.batch import Row


class ModelSizes(msgspec.Struct, frozen=True):
    """The sizes of a model on which the work of a step depends."""

    layer_weights: float  # weights used for each token; of experts, only the chosen ones
    head_weights: float
    attention_size: float  # query heads times head_dim, summed over layers
    weights_bytes: float
    kv_token_bytes: float


class StepEffort:
    """Sums of work and time over all steps of a worker. Owned by the step thread."""

    def __init__(self, sizes: ModelSizes | None) -> None:
        """Without `sizes` only time and prompt tokens are counted."""
        self._sizes = sizes
        self._flops = self._read_bytes = self._busy_s = 0.0
        self._num_prompt_tokens = 0

    def record(self, rows: Sequence[Row], seconds: float) -> None:
        """Adds a step that has run."""
        self._busy_s += seconds
        tokens = pairs = contexts = chosen = 0
        for row in rows:
            start, num = row.start, len(row.token_ids)
            tokens += num
            pairs += num * start + num * (num + 1) // 2
            contexts += start + num
            chosen += row.sampling is not None
            if num > 1:
                self._num_prompt_tokens += num
        sizes = self._sizes
        if sizes is not None:
            matrices = sizes.layer_weights * tokens + sizes.head_weights * chosen
            self._flops += 2 * matrices + 4 * sizes.attention_size * pairs
            self._read_bytes += sizes.weights_bytes + sizes.kv_token_bytes * contexts

    def counters(self) -> dict[str, float]:
        """Returns the sums since the start, for load reports."""
        found = {"busy_seconds": self._busy_s, "computed_prompt_tokens": self._num_prompt_tokens}
        if self._sizes is not None:
            found |= {"flops": self._flops, "read_bytes": self._read_bytes}
        return found
