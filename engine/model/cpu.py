"""Forward passes on a CPU by the C++ kernels, in one of two ways.

1. As a whole (`native.decoder`): decoders of Llama's shape.
2. Layer by layer: the model's own code over packed linear layers and paged attention. Used for
   every other decoder, and for a model whose logits the first way does not reproduce.

The choice is logged. A sequence's results are the same bits alone, in any batch and in any
chunking. For the model's own code this is true as far as `native.invariant` replaces the functions
that the code calls. It is measured when the model is opened (`loading.probe`).
"""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from engine.clock import Clock
from engine.config import WeightFormat
from engine.errors import ConfigError
from engine.layout import KVFormat
from engine.model import packing
from engine.model.attention.base import AttentionBatch, Extent, build_batch
from engine.model.attention.hook import forward
from engine.model.attention.kvcache import KVCache
from engine.model.loading import probe
from engine.model.loading.checkpoint import LoadedModel, try_again
from engine.model.memory import one_torch_thread
from engine.model.native import decoder as native_decoder
from engine.model.native.building import NotFused, build
from engine.model.native.decoder import Decoder, Drafting, NativeAttention, PreparedCall
from engine.model.native.invariant import InvariantProducts
from engine.model.native.linear import PackedLinear, Team, bare_bytes, pack_linears
from engine.model.native.sampling import sample
from engine.model.native.structs import INT8, INT8_AS_FLOAT, instructions
from engine.model.parallel.steps import PackedStep
from engine.model.sampling.changes import TokenChoice
from engine.model.sampling.draft import DraftedRow, Masks, draft_step_by_step, has_guide
from engine.model.sampling.verify import Verified, verify_by_parts
from engine.model.sizes import share_of_experts
from engine.native.library import library
from engine.worker.batch import Row

log = logging.getLogger(__name__)

MOST_BARE = 0.2  # share of a model's weight bytes that may stay in fp32 without a warning
FUSED_TOLERANCE = 1e-4  # largest error, relative to the spread of the logits
# Largest error with packed weights of each format, relative to the spread of the logits.
PACKED_TOLERANCE = {
    WeightFormat.FP32: 1e-3,
    WeightFormat.BF16: 0.1,
}


def resolve_weights(wanted: WeightFormat) -> WeightFormat:
    """Returns the weight format that `wanted` selects on this CPU. Raises ConfigError if the CPU
    lacks it.
    """
    if wanted is WeightFormat.FP8:
        raise ConfigError("weights fp8 need a GPU; a CPU has fp32, bf16 and int8")
    return WeightFormat.INT8 if wanted is WeightFormat.AUTO else wanted


class CpuPass(NamedTuple):
    """The inputs of one forward pass."""

    token_ids: Sequence[int]  # tokens of the flat batch
    positions: Sequence[int]
    keep: Sequence[int]  # indices of tokens whose logits are needed
    batch: AttentionBatch


class CpuForward:
    """Computes logits of rows with one model on a CPU. Used by one thread at a time."""

    def __init__(
        self,
        loaded: LoadedModel,
        weights: WeightFormat,
        *,
        threads: int,
        beside: "CpuForward | None" = None,
    ) -> None:
        """`weights` is a resolved format, not `auto`.

        `beside` is another pass that is opened before this pass and closed after it. This pass uses
        the threads of `beside`: two teams of threads would spin against each other.
        """
        self._loaded = loaded
        self._weights = weights
        self._threads = threads
        self._beside = beside
        self._team: Team | None = None
        self._products: InvariantProducts | None = None
        self._decoder: Decoder | None = None
        self.weights_bytes = 0
        self.is_batch_invariant = False  # measured when the model is opened

    @torch.inference_mode()
    def open(self, cache: KVCache) -> None:
        """Packs the weights, frees the model's own weights, and uses `cache` from now on."""
        context = self._loaded.context
        self._team = self._beside._team if self._beside else Team(library(), self._threads)
        context.attend = NativeAttention(self._team)
        self.weights_bytes = pack_linears(
            self._loaded.model, self._team, self._weights, self._loaded.read_outside
        )
        self._warn_of_bare_weights()
        packed = self._packed_logits()
        if self._loaded.group is None:  # the kernels' decoder cannot be split into ranks
            self._decoder = self._fused(self._team, packed)
        if self._decoder is None:
            self._products = InvariantProducts(self._loaded.model, self._team)
        self.is_batch_invariant = self._keeps_bits()
        context.cache = cache
        if self._decoder is not None:
            self._decoder.open(cache)

    def close(self) -> None:
        """Drops the cache. Ends the threads unless another pass owns them."""
        self._loaded.context.cache = self._loaded.context.batch = None
        if self._decoder is not None:
            self._decoder.close()
            self._decoder = None
        if self._team is not None and self._beside is None:
            self._team.close()
        self._team = self._products = None

    @property
    def kernels(self) -> str:
        """Returns a text that names the kernels. Equal instructions give equal bits with any
        compiler (`engine.native.build`).
        """
        parts = "" if self._loaded.group is None else f" {self._loaded.group.place.name}"
        return f"cpu {instructions(library())} {'fused' if self.is_fused else 'by-layer'}{parts}"

    @property
    def is_fused(self) -> bool:
        """True if a pass is one call into the C++ kernels."""
        return self._decoder is not None

    def logits(self, rows: Sequence[Row], keep: Sequence[int]) -> torch.Tensor:
        """Computes logits [len(keep), vocab] of the tokens whose indices, in the flat batch, are in
        `keep`.
        """
        return self.launch(self.prepare(rows, keep))

    def prepare(self, rows: Sequence[Row], keep: Sequence[int]) -> CpuPass | PreparedCall:
        """Returns the inputs of `launch`, made from the inputs of `logits`."""
        if self._decoder is not None:
            return self._decoder.prepare(rows, keep)
        token_ids = [token for row in rows for token in row.token_ids]
        positions = [position for row in rows for position in range(row.start, row.end)]
        return CpuPass(token_ids, positions, keep, build_batch(rows, self._loaded.context.cache))

    def step_size(self, rows: Sequence[Row]) -> None:
        """Returns None, because passes on a CPU are not padded."""
        return None

    def unpack(self, step: PackedStep) -> CpuPass:
        """Returns the inputs of `launch`, made from the bytes that rank 0 packed."""
        inputs = packing.arrays(step.memory, packing.plan(step.shape))
        starts, ends = inputs.cu_seqlens_q.tolist(), inputs.context_lens.tolist()
        lens = np.diff(inputs.cu_seqlens_q).tolist()
        batch = AttentionBatch(
            extents=tuple(map(Extent, starts, lens, ends)),
            cu_seqlens_q=torch.from_numpy(inputs.cu_seqlens_q),
            context_lens=torch.from_numpy(inputs.context_lens),
            block_tables=torch.from_numpy(inputs.block_tables),
            slot_mapping=torch.from_numpy(inputs.slot_mapping),
        )
        tokens, positions = inputs.token_ids.tolist(), inputs.positions.tolist()
        return CpuPass(tokens, positions, inputs.keep.tolist(), batch)

    def launch(self, prepared: CpuPass | PreparedCall) -> torch.Tensor:
        """Computes logits [len(keep), vocab] from prepared inputs."""
        if self._decoder is not None:
            return self._decoder.launch(prepared)
        *numbers, batch = prepared
        self._loaded.context.batch = batch
        with self._own_code():
            return forward(self._loaded.model, *numbers)

    def sample(self, logits: torch.Tensor, choices: Sequence[TokenChoice]) -> torch.Tensor:
        """Chooses tokens [num_rows], as `engine.model.sampling.choosing.sample` does."""
        assert self._team is not None
        return sample(logits, choices, team=self._team)

    def draft(self, proposals: Sequence[DraftedRow], masks: Masks) -> None:
        """Runs this model, a draft model, over the rows whose KV it computes, and proposes tokens.

        Rows that propose most must come first. All passes are one call into the kernels, unless a
        pass must wait for a grammar's mask.
        """
        proposing = [proposal for proposal in proposals if proposal.row.num_to_draft > 0]
        if self._decoder is None or has_guide(proposing) or not proposing:
            draft_step_by_step(self, proposals, masks)
            return
        drafted = native_decoder.draft(
            self._decoder,
            [proposal.seen() for proposal in proposals],
            [proposal.choice(0) for proposal in proposing],
            [proposal.row.num_to_draft for proposal in proposing],
        )
        for proposal, token_ids in zip(proposing, drafted, strict=True):
            proposal.token_ids = token_ids

    def drafting(
        self, draft: "CpuForward", seen: Sequence[DraftedRow], proposals: Sequence[DraftedRow]
    ) -> Drafting | None:
        """Returns the inputs with which `verify` drafts in the same call; None if this is
        impossible.
        """
        if self._decoder is None or draft._decoder is None or has_guide(proposals):
            return None
        return Drafting(draft._decoder, seen)

    def verify(
        self,
        proposals: Sequence[DraftedRow],
        masks: Masks,
        clock: Clock,
        drafting: Drafting | None = None,
    ) -> Verified:
        """Runs this model over rows and their proposed tokens, and chooses tokens. Uses one call
        into the kernels if possible.
        """
        if self._decoder is None or has_guide(proposals):
            return verify_by_parts(self, proposals, masks, clock)
        return native_decoder.verify(self._decoder, proposals, clock, drafting)

    def _warn_of_bare_weights(self) -> None:
        """Logs a warning if much of the model stayed in fp32 although another format was
        requested.
        """
        bare = bare_bytes(self._loaded.model, self._loaded.read_outside)
        if self._weights is not WeightFormat.FP32 and bare > MOST_BARE * self.weights_bytes:
            log.warning(
                "%s: %.0f%% of its weights stay in fp32 instead of %s: its own code multiplies by "
                "them (docs/users/models.md)",
                self._loaded.model.config.model_type,
                100 * bare / self.weights_bytes,
                self._weights,
            )

    def _packed_logits(self) -> torch.Tensor:
        """Returns the logits of the load trial, computed by the model's own code over packed
        weights.

        Raises CheckpointError if the model now fails, or if the logits differ from those before
        packing.
        """
        tolerance = PACKED_TOLERANCE.get(self._weights, math.inf)
        text = self._loaded.model.config.get_text_config(decoder=True)
        if self._weights is not WeightFormat.FP32 and share_of_experts(text) < 1:
            tolerance = math.inf  # a router may choose another expert after the slightest rounding
        with _activations_unrounded(self._loaded.model), one_torch_thread():
            return try_again(self._loaded, tolerance)

    @contextmanager
    def _own_code(self) -> Iterator[None]:
        """Returns a context in which the model's own code is batch-invariant, if kernels are
        available.
        """
        if self._products is None:
            yield
            return
        with one_torch_thread(), self._products.active():
            yield

    def _keeps_bits(self) -> bool:
        """Measures if a sequence gets the same bits in any batch and any chunking."""
        loaded = self._loaded
        where = loaded.context, loaded.layout.sections[0], KVFormat.FP32
        num_rows = -(-probe.num_blocks(probe.BLOCK_SIZE) // probe.BLOCKS_PER_ROW)
        with probe.probe_cache(*where, num_rows=num_rows) as cache:
            if self._decoder is not None:
                self._decoder.open(cache)
            found = probe.keeps_bits(self.logits, probe.BLOCK_SIZE)
        if not found:
            log.warning(
                "%s: the last bits of an answer depend on what is computed beside it",
                loaded.model.config.model_type,
            )
        return found

    def _fused(self, team: Team, expected: torch.Tensor) -> Decoder | None:
        """Returns the model as one C++ decoder; None if its shape does not fit or its logits
        differ.
        """
        name = self._loaded.model.config.model_type
        try:
            decoder = build(self._loaded.model, self._loaded.context, team)
        except NotFused as reason:
            log.info("%s is computed layer by layer: %s", name, reason)
            return None
        with _activations_unrounded(self._loaded.model, decoder):
            found = self._fused_logits(decoder)
        off = probe.error(found, expected)
        log.debug("%s: fused logits are off by %.2g", name, off)
        if not off <= FUSED_TOLERANCE:
            log.warning("%s is computed layer by layer: fused logits are off by %.2g", name, off)
            return None
        return decoder

    def _fused_logits(self, decoder: Decoder) -> torch.Tensor:
        """Returns the logits of the load trial, computed by `decoder`."""

        def compute(
            rows: Sequence[Row], origins: Sequence[int], keep: Sequence[int]
        ) -> torch.Tensor:
            return decoder.launch(decoder.prepare(rows, keep, origins))

        loaded = self._loaded
        tried = loaded.probe
        where = loaded.context, loaded.layout.sections[0], tried.kv_format
        with probe.probe_cache(*where, num_rows=len(tried.origins)) as cache:
            decoder.open(cache)
            try:
                return probe.paged_logits(compute, tried.origins)
            finally:
                decoder.close()


@contextmanager
def _activations_unrounded(model: nn.Module, decoder: Decoder | None = None) -> Iterator[None]:
    """Returns a context in which int8 weights are multiplied by fp32 activations, in both the model
    and the decoder.

    Rounded activations turn a difference in a sum's last bit into different bytes, and the
    difference grows in each layer. With random weights, two computations of one model would then
    differ as much as two different models.
    """
    matrices = [
        module.matrix.struct for module in model.modules() if isinstance(module, PackedLinear)
    ]
    fused = () if decoder is None else decoder.weights()
    rounded = [weight for weight in (*matrices, *fused) if weight.kind == INT8]
    for weight in rounded:
        weight.kind = INT8_AS_FLOAT
    try:
        yield
    finally:
        for weight in rounded:
            weight.kind = INT8
