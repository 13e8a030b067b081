"""Forward passes on a GPU: prepared on the host, then replayed as a graph or run eagerly.

    prepare   host only: packs a step's inputs into pinned memory, while the GPU may compute
    launch    queues one copy of them and the pass; does not wait for either

**Decode steps**, in which every row has one token, are replayed as CUDA graphs. `open` captures one
graph for each of `packing.padded_sizes`. A step takes the smallest that holds its rows and fills it
up with rows that store nothing. Graphs read their inputs where they were captured, in one piece of
device memory, and share one pool of memory for all else. So each `launch` overwrites the result of
the one before. All other steps run eagerly.

**torch.compile** fuses the operations between two attentions or two matrix products. Layers are
compiled one by one. They share their code, so one compilation serves them all, and one more serves
steps of any size. Attention stays outside, since its arguments are not tensors: one compiled graph
ends before it and another begins behind it. A captured step does not notice.

If a part is not available, the model runs without it. That is counted in `fallbacks` and logged:
"triton" (attention in plain torch, and then no graphs either), "torch_compile", "cuda_graph" (a
model whose own code waits for the GPU, as some mixtures of experts do).

The host waits for one thing only: before it writes to pinned memory again, for the copy out of it
two steps ago. On a CPU the same code computes without graphs and pinned memory, for tests.
"""

import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from engine.clock import Clock, MonotonicClock
from engine.config import WeightFormat
from engine.errors import ConfigError
from engine.model import fp8, packing
from engine.model.attention import cuda as triton_attention
from engine.model.attention import plain as torch_attention
from engine.model.attention.base import Attend, AttentionBatch, Extent
from engine.model.attention.hook import PAGED, paged_hook
from engine.model.attention.kvcache import KVCache
from engine.model.loading.checkpoint import LoadedModel, try_again
from engine.model.packing import Inputs, Packing, PackingShape
from engine.model.sampling.changes import TokenChoice
from engine.model.sampling.choosing import sample
from engine.model.sampling.draft import DraftedRow, Masks, draft_step_by_step
from engine.model.sampling.verify import Verified, verify_by_parts
from engine.native_build import compiler_cache
from engine.worker.batch import Row

log = logging.getLogger(__name__)

BROKEN_OUT = "baton_paged_broken_out"  # PAGED, for compiled layers
MAX_CAPTURED_ROWS = 128
MAX_COMPILATIONS = 64  # of one layer's code, which models of one kind in a process share
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
WARM_UP_RUNS = 2  # before a capture: libraries choose their kernels in the first
WARM_UP_LENS = (8, 48, 2048)  # tokens of a row: a verification, a prompt's end, a whole chunk


class Staged:
    """Host memory for one step's inputs, and an event for the last copy out of it."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._copied = torch.cuda.Event() if pinned else None
        self.memory = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> np.ndarray:
        """Returns `num_bytes` of it for writing, once the last copy has read them."""
        if self._copied is not None:
            self._copied.synchronize()
        if self.memory.numel() < num_bytes:
            size = 1 << num_bytes.bit_length()
            self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        return self.memory[:num_bytes].numpy()

    def copy_to(self, device_memory: torch.Tensor) -> None:
        """Queues the copy that fills `device_memory`."""
        device_memory.copy_(self.memory[: device_memory.numel()], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class CudaStep(NamedTuple):
    """A step that can be launched. Launch it before the second next step is prepared."""

    staged: Staged
    packing: Packing
    extents: tuple[Extent, ...]  # empty for a captured step, which has its own
    num_kept: int
    keeps_all: bool  # keep the logits of every row, in the order of the rows
    padded_rows: int | None  # None: the batch is computed as it is


class Captured(NamedTuple):
    """A captured decode step of a fixed number of rows."""

    graph: torch.cuda.CUDAGraph
    keep: torch.Tensor  # [num_rows]: of its inputs
    logits: torch.Tensor  # [num_rows, vocab]: where it leaves them


def resolve_weights(wanted: WeightFormat, device: torch.device) -> WeightFormat:
    """The format that `wanted` means on this GPU. Raises ConfigError if this GPU cannot use it."""
    if not torch.cuda.is_available():
        raise ConfigError(f"device {device}: torch finds no GPU")
    if wanted is WeightFormat.AUTO:
        return WeightFormat.BF16
    if wanted is WeightFormat.INT8:
        raise ConfigError("weights int8 are for CPUs; a GPU has fp32, bf16 and fp8")
    if wanted is WeightFormat.FP8 and not fp8.can_multiply(device):
        needed = ".".join(map(str, fp8.FIRST_CAPABILITY))
        raise ConfigError(f"weights fp8 need a GPU of compute capability {needed} or above")
    return wanted


class CudaForward:
    """Computes logits of rows with one model on a GPU. Used by one thread at a time."""

    is_batch_invariant = False  # not promised, so not measured

    def __init__(
        self,
        loaded: LoadedModel,
        weights: WeightFormat,
        *,
        attend: Attend | None = None,
        captured_rows: Sequence[int] = packing.padded_sizes(MAX_CAPTURED_ROWS),
        compiler: str | Callable | None = "inductor",
    ) -> None:
        """`weights` are resolved.

        `attend` is chosen for the device unless given; a given one must know rows that fill a batch
        up. `captured_rows` are the numbers of rows for which decode steps are captured. `compiler`
        is a backend of torch.compile; None means that layers are not compiled.
        """
        self._loaded = loaded
        self._weights = weights
        self._device = loaded.device
        self._is_cuda = loaded.device.type == "cuda"
        self._attend = attend
        self._compiler = compiler
        self._wanted_sizes = tuple(sorted(captured_rows))
        self._sizes: tuple[int, ...] = ()  # numbers of rows to which decode steps are padded
        self._graphs: dict[int, Captured] = {}
        self._table_width = 0  # of captured steps
        self._memory: torch.Tensor | None = None  # the inputs of captured steps
        self._staged = tuple(Staged(pinned=self._is_cuda) for _ in range(2))
        self._num_prepared = 0
        self._tables = packing.Tables()
        self._compiled: list[nn.Module] = []
        self.weights_bytes = 0
        self.fallbacks: Counter[str] = Counter()

    @torch.inference_mode()
    def open(self, cache: KVCache) -> None:
        """Quantises weights, frees the ones they replace, and serves `cache` from now on."""
        model, context = self._loaded.model, self._loaded.context
        if self._is_cuda:
            torch.cuda.set_device(self._device)
            _use_own_caches()
        if self._weights is WeightFormat.FP8:
            kept = fp8.replace_linears(model, read_outside=self._loaded.read_outside).kept
            log.info("not in fp8: %s", ", ".join(kept) or "nothing")
            if self._loaded.probe is not None:
                try_again(self._loaded, math.inf)
        self.weights_bytes = weights_bytes(model)
        context.attend, can_pad = self._choose_attend()
        context.cache = cache
        if can_pad:
            self._open_padded(cache)

    def close(self) -> None:
        """Drops the cache and the captured steps."""
        self._graphs.clear()
        self._sizes = ()
        self._memory = None
        self._end_compilation()
        self._loaded.context.cache = self._loaded.context.batch = None

    @property
    def kernels(self) -> str:
        """What computes: the kind of GPU, and if decode steps are captured."""
        device = self._device
        name = torch.cuda.get_device_name(device) if self._is_cuda else device.type
        steps = "captured" if self.is_fused else "eager"
        return f"{name.lower().replace(' ', '-')} torch-{torch.__version__} {steps}"

    @property
    def num_captured(self) -> int:
        """The number of captured steps."""
        return len(self._graphs)

    @property
    def is_fused(self) -> bool:
        """True if a decode step is one call into captured work."""
        return bool(self._graphs)

    def logits(self, rows: Sequence[Row], keep: Sequence[int]) -> torch.Tensor:
        """Logits [len(keep), vocab] of the tokens of the flat batch whose indices are in `keep`.

        The next step overwrites them.
        """
        return self.launch(self.prepare(rows, keep))

    def prepare(self, rows: Sequence[Row], keep: Sequence[int]) -> CudaStep:
        """Packs a step's inputs. Reads and writes host memory only."""
        num_tokens = sum(len(row.token_ids) for row in rows)
        is_decode = num_tokens == len(rows)
        size = packing.padded_size(len(rows), self._sizes) if is_decode else None
        if size is not None:
            return self._prepare(rows, keep, PackingShape(size, size, size, self._table_width))
        width = max(self._num_blocks_for(row.end) for row in rows)
        return self._prepare(rows, keep, PackingShape(len(rows), num_tokens, len(keep), width))

    @torch.inference_mode()
    def launch(self, prepared: CudaStep) -> torch.Tensor:
        """Queues a step and returns its logits, as `logits` does."""
        captured = self._graphs.get(prepared.padded_rows)
        if captured is not None:
            prepared.staged.copy_to(self._memory[: prepared.packing.num_bytes])
            captured.graph.replay()
            return _kept(captured.logits, captured.keep, prepared)
        inputs, batch = self._bring(prepared, self._new(prepared.packing.num_bytes))
        if prepared.padded_rows is None:
            return self._compute(inputs, batch, inputs.keep)
        return _kept(self._compute(inputs, batch, None), inputs.keep, prepared)

    def sample(self, logits: torch.Tensor, choices: Sequence[TokenChoice]) -> torch.Tensor:
        """Tokens [num_rows], chosen on the GPU as `engine.model.sampling.choosing.sample` does."""
        return sample(logits, choices)

    def draft(self, proposals: Sequence[DraftedRow], masks: Masks) -> None:
        """Runs this model, a draft, over the rows that it sees, and proposes tokens.

        All passes but the first are decode steps, and captured. The host waits for each of them.
        """
        draft_step_by_step(self, proposals, masks)

    def verify(self, proposals: Sequence[DraftedRow], masks: Masks, clock: Clock) -> Verified:
        """Runs this model over rows and their proposed tokens, and chooses.

        With proposed tokens the pass is no decode step, so it runs eagerly.
        """
        return verify_by_parts(self, proposals, masks, clock)

    def _prepare(
        self, rows: Sequence[Row], keep: Sequence[int], shape: PackingShape, pad_len: int = 1
    ) -> CudaStep:
        """Packs `rows`, filled up to `shape` with rows of `pad_len` tokens."""
        plan = packing.plan(shape)
        staged = self._staged[self._num_prepared % len(self._staged)]
        self._num_prepared += 1
        inputs = packing.arrays(staged.take(plan.num_bytes), plan)
        packing.fill(
            inputs,
            rows,
            keep,
            tables=self._tables,
            block_size=self._block_size,
            pad_len=pad_len,
        )
        is_padded = shape.num_rows in self._sizes and shape.num_tokens == shape.num_rows
        is_captured = is_padded and shape.num_rows in self._graphs
        return CudaStep(
            staged=staged,
            packing=plan,
            extents=() if is_captured else _extents(inputs),
            num_kept=len(keep),
            keeps_all=len(keep) == len(rows) and all(i == k for i, k in enumerate(keep)),
            padded_rows=shape.num_rows if is_padded else None,
        )

    def _bring(
        self, prepared: CudaStep, memory: torch.Tensor
    ) -> tuple[Inputs[torch.Tensor], AttentionBatch]:
        """Queues the copy of a step's inputs to device `memory` and returns views of them."""
        prepared.staged.copy_to(memory)
        inputs = tensors(memory, prepared.packing)
        batch = AttentionBatch(
            extents=prepared.extents,
            cu_seqlens_q=inputs.cu_seqlens_q,
            context_lens=inputs.context_lens,
            block_tables=inputs.block_tables,
            slot_mapping=inputs.slot_mapping,
        )
        return inputs, batch

    def _compute(
        self, inputs: Inputs[torch.Tensor], batch: AttentionBatch, keep: torch.Tensor | None
    ) -> torch.Tensor:
        """Runs the pass: logits [len(keep), vocab], of all tokens if `keep` is None."""
        self._loaded.context.batch = batch
        logits = self._loaded.model(
            input_ids=inputs.token_ids[None],
            position_ids=inputs.positions[None],
            use_cache=False,
            logits_to_keep=0 if keep is None else keep,
        ).logits
        if keep is not None and logits.shape[1] != len(keep):  # the model ignores logits_to_keep
            logits = logits[:, keep]
        return logits[0]

    def _choose_attend(self) -> tuple[Attend, bool]:
        """Chooses the attention; the flag says if it knows rows that fill a batch up."""
        if self._attend is not None:
            return self._attend, True
        if self._is_cuda and triton_attention.available():
            return triton_attention.attend, True
        if self._is_cuda:
            self._fall_back("triton", "it is not installed; attention is slow without it")
        return torch_attention.attend, False

    def _open_padded(self, cache: KVCache) -> None:
        """Compiles layers and kernels and captures decode steps, with rows that store nothing."""
        begin_s = MonotonicClock().now_s()
        self._sizes = self._wanted_sizes
        self._table_width = min(self._num_blocks_for(self._loaded.context_len), cache.num_blocks)
        largest = packing.plan(PackingShape(*[self._sizes[-1]] * 3, self._table_width))
        self._memory = self._new(largest.num_bytes)
        self._warm_up()
        if self._is_cuda:
            self._capture_all()
            torch.cuda.synchronize()
        seconds = MonotonicClock().now_s() - begin_s
        log.info("%d decode steps captured, %.1f s of warm-up", len(self._graphs), seconds)

    def _warm_up(self) -> None:
        """Runs batches of each kind, so that everything compiled at first use is compiled now."""
        if self._compiler is not None:
            self._begin_compilation()
            try:
                self._run_padded()
            except Exception as error:  # a compiler may raise anything: do without it
                self._fall_back("torch_compile", error)
                self._end_compilation()
            else:
                return
        self._run_padded()

    def _run_padded(self) -> None:
        for size in reversed(self._sizes):  # the largest first: all later ones fit its memory
            for _ in range(WARM_UP_RUNS):
                self._compute(
                    *self._padding(PackingShape(size, size, size, self._table_width)), None
                )
        for length in WARM_UP_LENS:
            inputs, batch = self._padding(PackingShape(1, length, 1, 1), pad_len=length)
            self._compute(inputs, batch, inputs.keep)

    def _padding(
        self, shape: PackingShape, pad_len: int = 1, memory: torch.Tensor | None = None
    ) -> tuple[Inputs[torch.Tensor], AttentionBatch]:
        """A batch of rows that only fill up, brought to `memory` or to new memory."""
        prepared = self._prepare([], [], shape, pad_len)
        num_bytes = prepared.packing.num_bytes
        there = self._new(num_bytes) if memory is None else memory[:num_bytes]
        return self._bring(prepared, there)

    def _capture_all(self) -> None:
        pool = torch.cuda.graph_pool_handle()
        captured = {}
        try:
            for size in reversed(self._sizes):
                captured[size] = self._capture(size, pool)
        except Exception as error:  # a model's code may wait for the GPU, or move what it reads
            self._fall_back("cuda_graph", error)
            self._sizes = ()
        else:
            self._graphs = captured

    def _capture(self, size: int, pool: tuple[int, int]) -> Captured:
        """Captures a decode step of `size` rows over `_memory`."""
        shape = PackingShape(size, size, size, self._table_width)
        inputs, batch = self._padding(shape, memory=self._memory)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP_RUNS):
                self._compute(inputs, batch, None)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits = self._compute(inputs, batch, None)
        return Captured(graph, inputs.keep, logits)

    def _begin_compilation(self) -> None:
        torch._dynamo.config.recompile_limit = (
            MAX_COMPILATIONS  # beyond this, torch silently stops compiling
        )
        AttentionInterface.register(BROKEN_OUT, torch.compiler.disable(paged_hook))
        self._loaded.model.set_attn_implementation(BROKEN_OUT)
        self._compiled = decoder_layers(self._loaded.model)
        for layer in self._compiled:
            layer.compile(backend=self._compiler)

    def _end_compilation(self) -> None:
        if self._compiled:
            self._loaded.model.set_attn_implementation(PAGED)
        for layer in self._compiled:
            layer._compiled_call_impl = None  # `nn.Module.compile` offers no way back
        self._compiled = []

    def _fall_back(self, what: str, why: object) -> None:
        self.fallbacks[what] += 1
        log.warning("%s is not used: %s", what, why)

    def _new(self, num_bytes: int) -> torch.Tensor:
        """New device memory for a step's inputs."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def _num_blocks_for(self, num_tokens: int) -> int:
        return self._loaded.context.cache.layout.num_blocks_for(num_tokens)

    @property
    def _block_size(self) -> int:
        return self._loaded.context.cache.layout.block_size


def tensors(memory: torch.Tensor, plan: Packing) -> Inputs[torch.Tensor]:
    """Views of the inputs in `memory`, which holds bytes."""
    return Inputs(
        *(
            memory[place.offset_bytes : place.end_bytes]
            .view(getattr(torch, place.dtype))
            .view(place.shape)
            for place in plan.places
        )
    )


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder's layers, in order."""
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return list(next(layers for layers in lists if len(layers) == num_layers))


def weights_bytes(model: nn.Module) -> int:
    """Bytes of weights that a pass reads: all, but no embeddings unless they are the output matrix
    too.
    """
    read = {
        id(tensor): tensor.nbytes
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for held in (module.parameters(recurse=False), module.buffers(recurse=False))
        for tensor in held
    }
    return sum(read.values())


def _use_own_caches() -> None:
    """Makes compilers load only files that this user built. torch's default is a shared folder in
    /tmp.

    A folder that the operator has chosen is left as it is.
    """
    for variable, name in CACHES.items():
        if variable not in os.environ:
            os.environ[variable] = str(compiler_cache(name))


def _extents(inputs: Inputs[np.ndarray]) -> tuple[Extent, ...]:
    starts = inputs.cu_seqlens_q
    lens = np.diff(starts)
    return tuple(map(Extent, starts.tolist(), lens.tolist(), inputs.context_lens.tolist()))


def _kept(logits: torch.Tensor, keep: torch.Tensor, prepared: CudaStep) -> torch.Tensor:
    """The wanted logits of a padded step."""
    if prepared.keeps_all:
        return logits[: prepared.num_kept]
    return logits.index_select(0, keep[: prepared.num_kept])
