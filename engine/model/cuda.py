"""Forward passes on a GPU: prepared on the host, then replayed as a graph or run eagerly.

    prepare   host only: packs a step's inputs into pinned memory, while the GPU may compute
    launch    queues one copy of them and the pass; does not wait for either

**Decode and verification**, in which every row has one token or a few, are replayed as CUDA graphs.
`open` captures one graph for each of `packing.captured_sizes`. A step uses the smallest graph that
has room for its rows, and is padded with tokens whose KV is not stored. Graphs read their inputs at
the addresses of the capture, in one piece of device memory, and share one pool for all other
memory. So each `launch` overwrites the result of the last `launch`. All other steps run eagerly.
Captures for verification stop when all captures together have used MAX_CAPTURE_S or
MAX_CAPTURE_BYTES. Steps of sizes without a capture run eagerly.

**torch.compile** fuses the operations between two attentions or two matrix products. Layers are
compiled one by one. They share their code, so one compilation is enough for all layers, and one
more for steps of any size. Attention is not compiled, because its arguments are not tensors: one
compiled graph ends before the attention and another graph begins after it. This makes no difference
for a captured step.

If an optional part is not available, the model runs without it. The missing part is counted in
`fallbacks` and logged: "triton" (attention in plain torch, and then no graphs either),
"triton_sampling" (tokens are chosen by torch, in many small kernels), "torch_compile", "cuda_graph"
(a model whose own code waits for the GPU, as some mixtures of experts do), "captured_verification"
(some sizes were left out), "prefill_" and the name of a way to attend long rows, if this way fails
or is wrong on this device.

The host waits only before it reuses pinned memory (`staging`). On a CPU the same code
computes without graphs and pinned memory, for tests.
"""

import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface

from engine.clock import Clock, MonotonicClock
from engine.config import WeightFormat
from engine.errors import ConfigError
from engine.model import fp8, packing
from engine.model.attention.base import Attend, AttentionBatch
from engine.model.attention.hook import PAGED, paged_hook
from engine.model.attention.kvcache import KVCache
from engine.model.kernels import DeviceKernels, Sampler
from engine.model.loading.checkpoint import LoadedModel, try_again
from engine.model.packing import Inputs, PackingShape, StepSize
from engine.model.parallel.stages import decoder_layers
from engine.model.parallel.steps import PackedStep, bare_shape
from engine.model.sampling import choosing
from engine.model.sampling.changes import TokenChoice
from engine.model.sampling.draft import DraftedRow, Masks, draft_step_by_step
from engine.model.sampling.verify import Verified, verify_by_parts
from engine.model.staging import CudaStep, StepStaging, bring
from engine.native.build import compiler_cache
from engine.worker.batch import Row

log = logging.getLogger(__name__)

BROKEN_OUT = "baton_paged_broken_out"  # the name of PAGED in compiled layers
MAX_CAPTURED_ROWS = 256
MAX_CHOSEN = 8192  # most tokens of one step that the next step can continue
MAX_CAPTURE_S = 60.0
MAX_CAPTURE_BYTES = 2 << 30
# Most compilations of one layer's code. Models of one kind share the limit in a process.
MAX_COMPILATIONS = 64
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
WARM_UP_RUNS = 2  # runs before a capture: libraries choose their kernels in the first run
WARM_UP_LENS = (2, 8, 32, 128)  # row lengths in tokens that cover every kind of launch
WARM_UP_ROWS = 64  # rows of the longest warm-up length: a step of 8,192 tokens


class Captured(NamedTuple):
    """A captured step of one size."""

    graph: torch.cuda.CUDAGraph
    keep: torch.Tensor  # [num_tokens]: the view of `keep` in its inputs
    logits: torch.Tensor  # [num_tokens, vocab]: where the step writes its logits


def resolve_weights(wanted: WeightFormat, device: torch.device) -> WeightFormat:
    """Returns the weight format that `wanted` selects on this GPU. Raises ConfigError if the GPU
    lacks it.
    """
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

    is_batch_invariant = False  # GPU kernels give no such guarantee

    def __init__(  # noqa: PLR0913 - all but two have defaults
        self,
        loaded: LoadedModel,
        weights: WeightFormat,
        *,
        attend: Attend | None = None,
        sampler: Sampler | None = None,
        captured_rows: Sequence[int] = packing.padded_sizes(MAX_CAPTURED_ROWS),
        captured_lens: Sequence[int] = packing.ROW_LENS,
        compiler: str | Callable | None = "inductor",
    ) -> None:
        """`weights` is a resolved format, not `auto`.

        `attend` and `sampler` are chosen for the device unless given. A given `attend` must support
        rows that only pad a batch. `sampler` chooses tokens in the same way as
        `engine.model.sampling.choosing.sample`. `captured_rows` are the numbers of rows for which
        steps are captured, `captured_lens` the numbers of tokens in each row. `compiler` is a
        backend of torch.compile; None means that layers are not compiled.
        """
        self._loaded = loaded
        self._weights = weights
        self._device = loaded.device
        self._is_cuda = loaded.device.type == "cuda"
        self.device_kernels = DeviceKernels(loaded, attend=attend, sampler=sampler)
        self._sampler: Sampler = choosing.sample
        self._compiler = compiler
        self._wanted_sizes = packing.captured_sizes(captured_rows, captured_lens)
        self._sizes: tuple[StepSize, ...] = ()  # sizes to which steps are padded
        self._graphs: dict[StepSize, Captured] = {}
        self._table_width = 0  # width of the block tables in captured steps
        self._memory: torch.Tensor | None = None  # the inputs of captured steps
        # Tokens that the last step chose, at the address from which captured steps read them.
        self._chosen: torch.Tensor | None = None
        self._compiled: list[nn.Module] = []
        self.weights_bytes = 0
        self.fallbacks = self.device_kernels.fallbacks  # number of missing optional parts, by name

    @torch.inference_mode()
    def open(self, cache: KVCache) -> None:
        """Quantises the weights, frees the original weights, and uses `cache` from now on."""
        context = self._loaded.context
        if self._is_cuda:
            torch.cuda.set_device(self._device)
            _use_own_caches()
        self._block_size = cache.layout.block_size
        self._staging = StepStaging(self._block_size, pinned=self._is_cuda)
        self._chosen = torch.zeros(MAX_CHOSEN, dtype=torch.int64, device=self._device)
        if self._weights is WeightFormat.FP8:
            _quantise(self._loaded)
        self.weights_bytes = weights_bytes(self._loaded.model)
        self._sampler = self.device_kernels.choose_sampler()
        context.attend, can_pad = self.device_kernels.open_attention(cache)
        context.cache = cache
        if can_pad:
            self._open_padded(cache)

    def close(self) -> None:
        """Drops the cache and the captured steps."""
        self._graphs.clear()
        self._sizes = ()
        self._memory = self._chosen = None
        self._drop_compiled()
        self.device_kernels.close()
        self._loaded.context.cache = self._loaded.context.batch = None

    @property
    def kernels(self) -> str:
        """Returns a text that names the kind of GPU, and says if decode steps are captured."""
        device = self._device
        name = torch.cuda.get_device_name(device) if self._is_cuda else device.type
        steps = "captured" if self.is_fused else "eager"
        if self._loaded.group is not None:
            steps += f" {self._loaded.group.place.name}"
        return f"{name.lower().replace(' ', '-')} torch-{torch.__version__} {steps}"

    @property
    def num_captured(self) -> int:
        """The number of captured steps."""
        return len(self._graphs)

    @property
    def is_fused(self) -> bool:
        """True if a decode step is one replay of captured work."""
        return bool(self._graphs)

    def fence(self) -> torch.cuda.Event | None:
        """Returns an event after all work that was queued so far; None on a CPU."""
        if not self._is_cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    @torch.inference_mode()
    def remember(self, chosen: torch.Tensor) -> None:
        """Keeps the tokens [num_chosen] that a step chose, as inputs of the next step."""
        self._chosen[: len(chosen)] = chosen

    def logits(self, rows: Sequence[Row], keep: Sequence[int]) -> torch.Tensor:
        """Computes logits [len(keep), vocab] of the tokens whose indices, in the flat batch, are in
        `keep`.

        The next step overwrites the logits.
        """
        return self.launch(self.prepare(rows, keep))

    def prepare(
        self, rows: Sequence[Row], keep: Sequence[int], follows: Sequence[int | None] = ()
    ) -> CudaStep:
        """Packs a step's inputs. Reads and writes host memory only.

        `follows` has an entry for each row. It is the index of the row's input token among the last
        step's tokens, or None if the token is known.
        """
        size = self._padded_size(rows)
        if size is None:
            shape = bare_shape(rows, keep, self._block_size)
        else:
            shape = size.packed(self._table_width)
        is_captured = size in self._graphs
        return self._staging.pack(
            rows, keep, shape=shape, size=size, follows=follows, is_captured=is_captured
        )

    def step_size(self, rows: Sequence[Row]) -> tuple[PackingShape, int] | None:
        """Returns the size to which the step is padded: its rows, and the tokens of each row.
        Returns None if the step is not padded.
        """
        size = self._padded_size(rows)
        return None if size is None else (size.packed(self._table_width), size.row_len)

    def unpack(self, step: PackedStep) -> CudaStep:
        """Returns the inputs of `launch`, made from the bytes that rank 0 packed."""
        size = StepSize(step.row_len, step.shape.num_rows) if step.row_len else None
        return self._staging.stage(step, size, is_captured=size in self._graphs)

    def _padded_size(self, rows: Sequence[Row]) -> StepSize | None:
        longest = max(len(row.token_ids) for row in rows)
        return packing.padded_size(len(rows), longest, self._sizes)

    @torch.inference_mode()
    def launch(self, prepared: CudaStep) -> torch.Tensor:
        """Queues a step and returns its logits, which the next step overwrites."""
        captured = self._graphs.get(prepared.size)
        if captured is not None:
            prepared.staged.copy_to(self._memory[: prepared.packing.num_bytes])
            captured.graph.replay()
            return _kept(captured.logits, captured.keep, prepared)
        inputs, batch = bring(prepared, self._new(prepared.packing.num_bytes))
        if prepared.size is None:
            return self._compute(inputs, batch, inputs.keep)
        return _kept(self._compute(inputs, batch, None), inputs.keep, prepared)

    def sample(self, logits: torch.Tensor, choices: Sequence[TokenChoice]) -> torch.Tensor:
        """Returns tokens [num_rows] on the device, as `engine.model.sampling.choosing.sample`
        defines them.

        The host does not wait for them.
        """
        return self._sampler(logits, choices)

    def draft(self, proposals: Sequence[DraftedRow], masks: Masks) -> None:
        """Runs this model, a draft model, over the rows whose KV it computes, and proposes tokens.

        All passes except the first are captured decode steps. The host waits for each pass.
        """
        draft_step_by_step(self, proposals, masks)

    def verify(self, proposals: Sequence[DraftedRow], masks: Masks, clock: Clock) -> Verified:
        """Runs this model over rows and their proposed tokens, and chooses tokens.

        With a few proposed tokens per row, the pass is a replay of captured work.
        """
        return verify_by_parts(self, proposals, masks, clock)

    def _compute(
        self, inputs: Inputs[torch.Tensor], batch: AttentionBatch, keep: torch.Tensor | None
    ) -> torch.Tensor:
        """Runs the pass. Returns logits [len(keep), vocab], or the logits of all tokens if `keep`
        is None.
        """
        self._loaded.context.batch = batch
        token_ids = torch.where(
            inputs.follows == packing.KNOWN,
            inputs.token_ids,
            self._chosen[inputs.follows.clamp(min=0)],
        )
        logits = self._loaded.model(
            input_ids=token_ids[None],
            position_ids=inputs.positions[None],
            use_cache=False,
            logits_to_keep=0 if keep is None else keep,
        ).logits
        if keep is not None and logits.shape[1] != len(keep):  # the model ignores `logits_to_keep`
            logits = logits[:, keep]
        return logits[0]

    def _open_padded(self, cache: KVCache) -> None:
        """Compiles layers and kernels, and captures steps. All use padding tokens, whose KV is not
        stored.
        """
        begin_s = MonotonicClock().now_s()
        self._sizes = self._wanted_sizes
        self._table_width = min(self._num_blocks_for(self._loaded.context_len), cache.num_blocks)
        plans = [packing.plan(size.packed(self._table_width)) for size in self._sizes]
        self._memory = self._new(max(plan.num_bytes for plan in plans))
        self._warm_up()
        if self._is_cuda:
            self._capture_all()
            torch.cuda.synchronize()
        seconds = MonotonicClock().now_s() - begin_s
        log.info("%.1f s of warm-up, with captures", seconds)

    def _warm_up(self) -> None:
        """Runs a batch of each kind, so that all code that is compiled at first use is compiled
        now.
        """
        if self._compiler is not None:
            self._compiled = _compile_layers(self._loaded.model, self._compiler)
            try:
                self._run_padded()
            except Exception as error:  # a compiler may raise anything: run without it
                self.device_kernels.fall_back("torch_compile", error)
                self._drop_compiled()
            else:
                return
        self._run_padded()

    def _run_padded(self) -> None:
        for size in _largest_first(self._sizes):
            for _ in range(WARM_UP_RUNS):
                self._compute(*self._padding(size), None)
        eager = [(length, 1) for length in WARM_UP_LENS] + [(WARM_UP_LENS[-1], WARM_UP_ROWS)]
        for row_len, num_rows in eager:
            size = StepSize(min(row_len, self._loaded.context_len), num_rows)
            inputs, batch = self._padding(size, table_width=1)
            self._compute(inputs, batch, inputs.keep[:1])

    def _padding(
        self,
        size: StepSize,
        memory: torch.Tensor | None = None,
        table_width: int | None = None,
    ) -> tuple[Inputs[torch.Tensor], AttentionBatch]:
        """Copies a batch of padding rows to `memory`; allocates the memory if it is None."""
        shape = size.packed(self._table_width if table_width is None else table_width)
        prepared = self._staging.pack([], [], shape=shape, size=size)
        num_bytes = prepared.packing.num_bytes
        there = self._new(num_bytes) if memory is None else memory[:num_bytes]
        return bring(prepared, there)

    def _capture_all(self) -> None:
        """Captures decode steps of all sizes, and verification of as many sizes as time and
        memory allow.
        """
        begin_s, begin_bytes = MonotonicClock().now_s(), torch.cuda.memory_reserved()

        def spent() -> tuple[float, int]:
            return MonotonicClock().now_s() - begin_s, torch.cuda.memory_reserved() - begin_bytes

        pool = torch.cuda.graph_pool_handle()
        captured = {}
        left_out = []
        try:
            for size in _largest_first(self._sizes):
                if size.row_len > 1 and _is_too_much(*spent()):
                    left_out.append(size)
                else:
                    captured[size] = self._capture(size, pool)
        # A model's code may wait for the GPU, or move tensors from which the captured step reads.
        except Exception as error:
            self.device_kernels.fall_back("cuda_graph", error)
            captured = {}
        else:
            seconds, num_bytes = spent()
            log.info("%d steps captured: %.1f s, %d MiB", len(captured), seconds, num_bytes >> 20)
            if left_out:
                sizes = ", ".join(f"{size.num_rows} x {size.row_len}" for size in left_out)
                self.device_kernels.fall_back(
                    "captured_verification", f"no time or memory for rows of {sizes}"
                )
        self._graphs = captured
        self._sizes = tuple(sorted(captured))

    def _capture(self, size: StepSize, pool: tuple[int, int]) -> Captured:
        """Captures a step of this size, with its inputs in `_memory`."""
        inputs, batch = self._padding(size, memory=self._memory)
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

    def _drop_compiled(self) -> None:
        if self._compiled:
            self._loaded.model.set_attn_implementation(PAGED)
        for layer in self._compiled:
            layer._compiled_call_impl = None  # `nn.Module.compile` cannot be undone in another way
        self._compiled = []

    def _new(self, num_bytes: int) -> torch.Tensor:
        """Allocates device memory for the inputs of a step."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def _num_blocks_for(self, num_tokens: int) -> int:
        return self._loaded.context.cache.layout.num_blocks_for(num_tokens)


def _quantise(loaded: LoadedModel) -> None:
    """Replaces the weights by fp8, where layers allow it."""
    kept = [
        *fp8.replace_linears(loaded.model, read_outside=loaded.read_outside).kept,
        *fp8.replace_experts(loaded.model, loaded.read_outside).kept,
    ]
    log.info("not in fp8: %s", ", ".join(kept) or "nothing")
    if loaded.probe is not None:
        try_again(loaded, math.inf)


def _compile_layers(model: nn.Module, compiler: str | Callable) -> list[nn.Module]:
    """Compiles each decoder layer at its first use. Returns the layers."""
    torch._dynamo.config.recompile_limit = (
        MAX_COMPILATIONS  # above torch's limit it would silently stop compiling
    )
    AttentionInterface.register(BROKEN_OUT, torch.compiler.disable(paged_hook))
    model.set_attn_implementation(BROKEN_OUT)
    layers = list(decoder_layers(model))
    for layer in layers:
        layer.compile(backend=compiler)
    return layers


def weights_bytes(model: nn.Module) -> int:
    """Returns the bytes of weights that a pass reads. Embeddings count only if they are also the
    output matrix.
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
    """Makes compilers use cache folders of this user alone. By default torch uses a shared folder
    in /tmp.

    Folders that the operator has configured are kept.
    """
    for variable, name in CACHES.items():
        if variable not in os.environ:
            os.environ[variable] = str(compiler_cache(name))


def _largest_first(sizes: Iterable[StepSize]) -> list[StepSize]:
    """Sorts captures by size, largest first, so that later captures can reuse the first one's
    memory.
    """
    return sorted(sizes, key=lambda size: (size.num_tokens, size.num_rows), reverse=True)


def _is_too_much(seconds: float, num_bytes: int) -> bool:
    """True if the captures so far have used up the allowed time or memory."""
    return seconds > MAX_CAPTURE_S or num_bytes > MAX_CAPTURE_BYTES


def _kept(logits: torch.Tensor, keep: torch.Tensor, prepared: CudaStep) -> torch.Tensor:
    """Returns the wanted logits, without those of padding tokens."""
    if prepared.keeps_first:
        return logits[: prepared.num_kept]
    return logits.index_select(0, keep[: prepared.num_kept])
