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

The host waits only before it reuses pinned memory: for the copy, two steps earlier, from this
memory. On a CPU the same code computes without graphs and pinned memory, for tests.
"""

import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface

from engine.clock import Clock, MonotonicClock
from engine.config import WeightFormat
from engine.errors import ConfigError
from engine.layout import KVFormat
from engine.model import fp8, packing
from engine.model.attention import cuda as triton_attention
from engine.model.attention import plain as torch_attention
from engine.model.attention.base import Attend, AttentionBatch, Extent
from engine.model.attention.choice import KERNELS, AttendBy, PrefillTrial
from engine.model.attention.hook import PAGED, paged_hook
from engine.model.attention.kvcache import KVCache
from engine.model.attention.prefill import Way, all_ways
from engine.model.loading.checkpoint import LoadedModel, try_again
from engine.model.packing import Inputs, Packing, PackingShape, StepSize
from engine.model.parallel.stages import decoder_layers
from engine.model.parallel.steps import PackedStep, bare_shape
from engine.model.sampling import choosing
from engine.model.sampling import cuda as triton_sampling
from engine.model.sampling.changes import TokenChoice
from engine.model.sampling.draft import DraftedRow, Masks, draft_step_by_step
from engine.model.sampling.verify import Verified, verify_by_parts
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


Sampler = Callable[[torch.Tensor, Sequence[TokenChoice]], torch.Tensor]


class Staged:
    """Pinned host memory for one step's inputs, and an event after the last copy from this
    memory.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._copied = torch.cuda.Event() if pinned else None
        self.memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, num_bytes: int) -> np.ndarray:
        """Waits until the last copy from the memory has ended. Returns `num_bytes` of it for
        writing.
        """
        if self._copied is not None:
            self._copied.synchronize()
        if self.memory.numel() < num_bytes:
            size = 1 << num_bytes.bit_length()
            self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        return self.memory[:num_bytes].numpy()

    def copy_to(self, device_memory: torch.Tensor) -> None:
        """Queues the copy from this memory to `device_memory`."""
        device_memory.copy_(self.memory[: device_memory.numel()], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class CudaStep(NamedTuple):
    """A step that is ready to launch. It must be launched before two more steps are prepared."""

    staged: Staged
    packing: Packing
    extents: tuple[Extent, ...]  # empty for a captured step, which has extents of its own
    num_kept: int
    keeps_first: bool  # True if `keep` is the first tokens, in their order
    size: StepSize | None  # the size after padding; None: the batch is not padded


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
        self._attend = attend
        self._wanted_sampler = sampler
        self._sampler: Sampler = choosing.sample
        self._compiler = compiler
        self._wanted_sizes = packing.captured_sizes(captured_rows, captured_lens)
        self._sizes: tuple[StepSize, ...] = ()  # sizes to which steps are padded
        self._graphs: dict[StepSize, Captured] = {}
        self._table_width = 0  # width of the block tables in captured steps
        self._memory: torch.Tensor | None = None  # the inputs of captured steps
        self._staged: tuple[Staged, ...] = ()
        self._num_prepared = 0
        # Tokens that the last step chose, at the address from which captured steps read them.
        self._chosen: torch.Tensor | None = None
        self._tables = packing.Tables()
        self._compiled: list[nn.Module] = []
        self._way: Way | None = None
        # Name of the attention. The name of the way for long rows is added if it differs.
        self.attention_choice = ""
        self.weights_bytes = 0
        self.fallbacks: Counter[str] = Counter()

    @torch.inference_mode()
    def open(self, cache: KVCache) -> None:
        """Quantises the weights, frees the original weights, and uses `cache` from now on."""
        model, context = self._loaded.model, self._loaded.context
        if self._is_cuda:
            torch.cuda.set_device(self._device)
            _use_own_caches()
        self._staged = tuple(Staged(pinned=self._is_cuda) for _ in range(2))
        self._chosen = torch.zeros(MAX_CHOSEN, dtype=torch.int64, device=self._device)
        if self._weights is WeightFormat.FP8:
            read_outside = self._loaded.read_outside
            kept = [
                *fp8.replace_linears(model, read_outside=read_outside).kept,
                *fp8.replace_experts(model, read_outside).kept,
            ]
            log.info("not in fp8: %s", ", ".join(kept) or "nothing")
            if self._loaded.probe is not None:
                try_again(self._loaded, math.inf)
        self.weights_bytes = weights_bytes(model)
        self._sampler = self._choose_sampler()
        context.attend, can_pad = self._choose_attend()
        context.cache = cache
        if context.attend is triton_attention.attend:
            self._way = self._choose_way(cache)
            context.attend = partial(triton_attention.attend, prefill=self._way)
        if can_pad:
            self._open_padded(cache)

    def close(self) -> None:
        """Drops the cache and the captured steps."""
        self._graphs.clear()
        self._sizes = ()
        self._memory = self._chosen = None
        self._end_compilation()
        if self._way is not None:
            self._way.close()
            self._way = None
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
        if size is not None:
            return self._prepare(rows, keep, size.packed(self._table_width), size, follows)
        return self._prepare(rows, keep, bare_shape(rows, keep, self._block_size), None, follows)

    def step_size(self, rows: Sequence[Row]) -> tuple[PackingShape, int] | None:
        """Returns the size to which the step is padded: its rows, and the tokens of each row.
        Returns None if the step is not padded.
        """
        size = self._padded_size(rows)
        return None if size is None else (size.packed(self._table_width), size.row_len)

    def unpack(self, step: PackedStep) -> CudaStep:
        """Returns the inputs of `launch`, made from the bytes that rank 0 packed."""
        size = StepSize(step.row_len, step.shape.num_rows) if step.row_len else None
        plan = packing.plan(step.shape)
        staged = self._next_staged()
        memory = staged.reserve(plan.num_bytes)
        memory[:] = step.memory
        return self._step(staged, plan, packing.arrays(memory, plan), step.num_kept, size)

    def _padded_size(self, rows: Sequence[Row]) -> StepSize | None:
        longest = max(len(row.token_ids) for row in rows)
        return packing.padded_size(len(rows), longest, self._sizes)

    def _next_staged(self) -> Staged:
        staged = self._staged[self._num_prepared % len(self._staged)]
        self._num_prepared += 1
        return staged

    @torch.inference_mode()
    def launch(self, prepared: CudaStep) -> torch.Tensor:
        """Queues a step and returns its logits, which the next step overwrites."""
        captured = self._graphs.get(prepared.size)
        if captured is not None:
            prepared.staged.copy_to(self._memory[: prepared.packing.num_bytes])
            captured.graph.replay()
            return _kept(captured.logits, captured.keep, prepared)
        inputs, batch = self._bring(prepared, self._new(prepared.packing.num_bytes))
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

    def _prepare(
        self,
        rows: Sequence[Row],
        keep: Sequence[int],
        shape: PackingShape,
        size: StepSize | None = None,
        follows: Sequence[int | None] = (),
    ) -> CudaStep:
        """Packs the inputs of `rows`, padded to `size` if it is given."""
        plan = packing.plan(shape)
        staged = self._next_staged()
        inputs = packing.arrays(staged.reserve(plan.num_bytes), plan)
        packing.fill(
            inputs,
            rows,
            keep,
            tables=self._tables,
            block_size=self._block_size,
            row_len=None if size is None else size.row_len,
            follows=follows,
        )
        return self._step(staged, plan, inputs, len(keep), size)

    def _step(
        self,
        staged: Staged,
        plan: Packing,
        inputs: Inputs[np.ndarray],
        num_kept: int,
        size: StepSize | None,
    ) -> CudaStep:
        return CudaStep(
            staged=staged,
            packing=plan,
            extents=() if size in self._graphs else _extents(inputs),
            num_kept=num_kept,
            keeps_first=np.array_equal(inputs.keep[:num_kept], np.arange(num_kept)),
            size=size,
        )

    def _bring(
        self, prepared: CudaStep, memory: torch.Tensor
    ) -> tuple[Inputs[torch.Tensor], AttentionBatch]:
        """Queues the copy of a step's inputs to the device memory `memory`. Returns views of the
        copies.
        """
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

    def _choose_attend(self) -> tuple[Attend, bool]:
        """Chooses the attention. Also returns True if this attention supports rows that only pad a
        batch.
        """
        if self._attend is not None:
            self.attention_choice = "given"
            return self._attend, True
        if self._is_cuda and triton_attention.available():
            self.attention_choice = KERNELS
            return triton_attention.attend, True
        if self._is_cuda:
            self._fall_back("triton", "it is not installed; attention is slow without it")
        self.attention_choice = "torch"
        return torch_attention.attend, False

    def _choose_way(
        self, cache: KVCache, ways: Sequence[Way] | None = None, attend: AttendBy | None = None
    ) -> Way | None:
        """Measures the ways to attend long rows, and opens the fastest way. Returns None if the
        Triton kernels are fastest.

        The ways need a record in bf16, and a model that computes in bf16.
        """
        config = self._loaded.model.config.get_text_config(decoder=True)
        trial = PrefillTrial(
            cache,
            num_heads=config.num_attention_heads,
            context_len=self._loaded.context_len,
            attend=attend or triton_attention.attend,
            clock=MonotonicClock(),
        )
        is_bf16 = cache.kv_format is KVFormat.BF16 and self._loaded.model.dtype is torch.bfloat16
        if not is_bf16 or not trial.is_possible:
            log.info("prefill attention: %s", KERNELS)
            return None
        wanted = [way for way in ways or all_ways() if way.is_available(self._device)]
        choice = trial.choose(wanted)
        log.info("prefill attention: %s", choice)
        for name, why in choice.failures.items():
            self._fall_back(f"prefill_{name}", why)
        if choice.name == KERNELS:
            return None
        self.attention_choice = f"{KERNELS}, {choice.name}"
        way = next(way for way in wanted if way.name == choice.name)
        way.open(self._device)
        return way

    def _choose_sampler(self) -> Sampler:
        """Chooses the sampler, and compiles its kernel."""
        if self._wanted_sampler is not None or not self._is_cuda:
            return self._wanted_sampler or choosing.sample
        if not triton_attention.available():
            self._fall_back("triton_sampling", "triton is not installed")
            return choosing.sample
        dtypes = {self._loaded.model.dtype, torch.float32}  # changed logits are in fp32
        try:
            triton_sampling.warm_up(self._loaded.vocab_size, dtypes, self._device)
        except Exception as error:  # a compiler may raise anything; then torch samples
            self._fall_back("triton_sampling", error)
            return choosing.sample
        return triton_sampling.sample

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
            self._begin_compilation()
            try:
                self._run_padded()
            except Exception as error:  # a compiler may raise anything: run without it
                self._fall_back("torch_compile", error)
                self._end_compilation()
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
        prepared = self._prepare([], [], shape, size)
        num_bytes = prepared.packing.num_bytes
        there = self._new(num_bytes) if memory is None else memory[:num_bytes]
        return self._bring(prepared, there)

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
            self._fall_back("cuda_graph", error)
            captured = {}
        else:
            seconds, num_bytes = spent()
            log.info("%d steps captured: %.1f s, %d MiB", len(captured), seconds, num_bytes >> 20)
            if left_out:
                sizes = ", ".join(f"{size.num_rows} x {size.row_len}" for size in left_out)
                self._fall_back("captured_verification", f"no time or memory for rows of {sizes}")
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

    def _begin_compilation(self) -> None:
        torch._dynamo.config.recompile_limit = (
            MAX_COMPILATIONS  # above torch's limit, torch would silently stop compiling
        )
        AttentionInterface.register(BROKEN_OUT, torch.compiler.disable(paged_hook))
        self._loaded.model.set_attn_implementation(BROKEN_OUT)
        self._compiled = list(decoder_layers(self._loaded.model))
        for layer in self._compiled:
            layer.compile(backend=self._compiler)

    def _end_compilation(self) -> None:
        if self._compiled:
            self._loaded.model.set_attn_implementation(PAGED)
        for layer in self._compiled:
            layer._compiled_call_impl = None  # `nn.Module.compile` cannot be undone in another way
        self._compiled = []

    def _fall_back(self, what: str, why: object) -> None:
        self.fallbacks[what] += 1
        log.warning("%s is not used: %s", what, why)

    def _new(self, num_bytes: int) -> torch.Tensor:
        """Allocates device memory for the inputs of a step."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def _num_blocks_for(self, num_tokens: int) -> int:
        return self._loaded.context.cache.layout.num_blocks_for(num_tokens)

    @property
    def _block_size(self) -> int:
        return self._loaded.context.cache.layout.block_size


def tensors(memory: torch.Tensor, plan: Packing) -> Inputs[torch.Tensor]:
    """Returns the inputs as views of the bytes in `memory`."""
    return Inputs(
        *(
            memory[place.offset_bytes : place.end_bytes]
            .view(getattr(torch, place.dtype))
            .view(place.shape)
            for place in plan.places
        )
    )


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


def _extents(inputs: Inputs[np.ndarray]) -> tuple[Extent, ...]:
    starts = inputs.cu_seqlens_q
    lens = np.diff(starts)
    return tuple(map(Extent, starts.tolist(), lens.tolist(), inputs.context_lens.tolist()))


def _kept(logits: torch.Tensor, keep: torch.Tensor, prepared: CudaStep) -> torch.Tensor:
    """Returns the wanted logits, without those of padding tokens."""
    if prepared.keeps_first:
        return logits[: prepared.num_kept]
    return logits.index_select(0, keep[: prepared.num_kept])
