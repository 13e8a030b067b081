"""Rank 0's side of a forward pass that all ranks of a worker compute together."""

from collections.abc import Sequence

import torch

from engine.clock import Clock
from engine.model.attention.kvcache import KVCache
from engine.model.cpu import CpuForward
from engine.model.cuda import CudaForward
from engine.model.packing import Tables
from engine.model.parallel.steps import PackedStep, StepFeed, bare_shape, packed
from engine.model.sampling.changes import TokenChoice
from engine.model.sampling.draft import DraftedRow, Masks, draft_step_by_step
from engine.model.sampling.verify import Verified, verify_by_parts
from engine.worker.batch import Row


class SharedForward:
    """Sends each pass to the other ranks and computes this rank's part. This rank has complete
    logits.
    """

    def __init__(self, own: CpuForward | CudaForward, model: int, feed: StepFeed) -> None:
        """`model` is 0 for the target and 1 for its draft."""
        self.own = own
        self._model = model
        self._feed = feed
        self._tables = Tables()
        self._block_size = 0

    def open(self, cache: KVCache) -> None:
        """Opens this rank's part. The other ranks open their parts at the same time."""
        self.own.open(cache)
        self._block_size = cache.layout.block_size

    def close(self) -> None:
        """Closes this rank's part."""
        self.own.close()

    @property
    def is_fused(self) -> bool:
        """True if a decode step is one call into captured work, on this rank and on the other
        ranks.
        """
        return self.own.is_fused

    @property
    def weights_bytes(self) -> int:
        """Returns the bytes of this rank's weights that a pass reads."""
        return self.own.weights_bytes

    @property
    def kernels(self) -> str:
        """Returns a text that names the kernels and the way in which the model is split."""
        return self.own.kernels

    @property
    def is_batch_invariant(self) -> bool:
        """True if measurements gave a sequence the same bits in any batch."""
        return self.own.is_batch_invariant

    def prepare(self, rows: Sequence[Row], keep: Sequence[int]) -> PackedStep:
        """Packs the inputs once for all ranks."""
        size = self.own.step_size(rows)
        if size is None:
            shape, row_len = bare_shape(rows, keep, self._block_size), None
        else:
            shape, row_len = size
        return packed(
            *(self._model, rows, keep),
            shape=shape,
            row_len=row_len,
            tables=self._tables,
            block_size=self._block_size,
        )

    def launch(self, step: PackedStep) -> torch.Tensor:
        """Computes logits [len(keep), vocab], together with the other ranks."""
        self._feed.send(step)
        return self.own.launch(self.own.unpack(step))

    def sample(self, logits: torch.Tensor, choices: Sequence[TokenChoice]) -> torch.Tensor:
        """Chooses tokens [num_rows]. The other ranks do not choose tokens."""
        return self.own.sample(logits, choices)

    def draft(self, proposals: Sequence[DraftedRow], masks: Masks) -> None:
        """Runs this model, a draft model, over the rows whose KV it computes, and proposes
        tokens.
        """
        draft_step_by_step(self, proposals, masks)

    def verify(self, proposals: Sequence[DraftedRow], masks: Masks, clock: Clock) -> Verified:
        """Runs this model over rows and their proposed tokens, and chooses tokens."""
        return verify_by_parts(self, proposals, masks, clock)
