"""Carries out batch plans with a transformers model.

A step is one forward pass over all rows as one flat sequence (`cpu` or `cuda`). It computes the
logits of the rows that sample, then chooses their tokens (`verify`), which are copied to the host.
Even then a GPU may not have stored K and V yet, or may still compute a step without tokens. So each
step on a GPU has a fence, an event after all its work, and the step's result waits for the fence.

With a draft model, the draft model's passes come first (`draft`). They cover the rows whose K and V
the draft model must compute, then the tokens that it proposes. Its K and V are the second section
of each block. A block has the KV of both models or of neither. So a worker that receives the block,
by prefix or by transfer, can draft immediately. Tokens that other code proposed are verified in the
same way.

A worker may have several ranks (`engine.model.parallel`). Each rank has a runner of its part of the
model. All runners open together. Then rank 0 receives the plans, and the other ranks `follow`.

The KV buffer may be memory that other processes read and write. `open` requests it when the layout,
and so its size, is known. Not thread-safe: one thread runs steps.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from inspect import isfunction
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from engine.clock import Clock, MonotonicClock
from engine.config import WeightFormat
from engine.devices.heap import return_freed_memory
from engine.errors import ConfigError
from engine.layout import KVFormat, KVLayout, Shard
from engine.messages import Sampling, SeqId
from engine.model import cpu, cuda
from engine.model.attention.kvcache import KVCache, allocate_buffer, wrap_buffer
from engine.model.cpu import CpuForward
from engine.model.cuda import MAX_CHOSEN, CudaForward
from engine.model.loading.checkpoint import LoadedModel, load, load_draft
from engine.model.overlap import OverlappedStep, TokenMemory
from engine.model.parallel.group import RankGroup
from engine.model.parallel.shared import SharedForward
from engine.model.parallel.steps import StepChannel, StepFeed
from engine.model.profiling import (
    CudaMeter,
    DeviceNeeds,
    LargestStep,
    MemoryMeter,
    measure_needs,
)
from engine.model.sampling import verify
from engine.model.sampling.draft import DraftedRow, Masks
from engine.model.sampling.verify import Verified
from engine.model.sizes import of_all_ranks, sizes_of
from engine.worker.batch import (
    BatchPlan,
    BatchResult,
    LaunchedStep,
    Row,
    RowResult,
    StepTimes,
)
from engine.worker.blocks import BlockId
from engine.worker.ranks import shards_of
from engine.worker.steps import ModelSizes

WARM_UP_TOKENS = 32
WARM_UP_DRAFTED = 2
PACKED_BYTES = {WeightFormat.FP32: 4, WeightFormat.INT8: 1, WeightFormat.FP8: 1}  # bytes per weight

# Takes a number of bytes; returns writable memory that starts on a cache line.
Allocate = Callable[[int], memoryview]


class KVNeeds(NamedTuple):
    """The facts that determine the size of KV memory, known after the model is loaded."""

    weights_bytes: int  # estimate of the final size of the weights, in bytes
    block_bytes: int
    num_context_blocks: int  # number of blocks for one context of full length
    device: DeviceNeeds | None = None  # memory use of a GPU; None on a CPU


SizeKV = Callable[[KVNeeds], int]  # returns the bytes for KV memory


class Fence(Protocol):
    """An event after queued work, such as `torch.cuda.Event`."""

    def synchronize(self) -> None:
        """Waits until the work is done."""
        ...


class TorchStep(msgspec.Struct, frozen=True):
    """A step of a `TorchRunner`. A step without a fence is already complete."""

    rows: Sequence[RowResult]
    times: StepTimes  # without the time of sampling, which ends at the fence
    begin_s: float
    clock: Clock
    fence: Fence | None = None

    def result(self) -> BatchResult:
        """Waits for the fence. After that, K and V of all tokens are in the buffer."""
        if self.fence is not None:
            self.fence.synchronize()
        sample_s = self.clock.now_s() - self.begin_s - self.times.total_s
        return BatchResult(self.rows, msgspec.structs.replace(self.times, sample_s=sample_s))


class RunnerChoices(NamedTuple):
    """The kernels and formats that a runner has chosen when it was opened."""

    attention: str
    num_captured: int  # number of captured steps
    fallbacks: dict[str, int]  # number of missing optional parts, by name


ATTENTIONS = {"cuda": "triton", "plain": "torch", "native": "c++"}  # names of attentions, by module


class TorchRunner:
    """A `Runner` with transformers models. `open` sets the attributes that the constructor does not
    set.
    """

    layout: KVLayout  # layout of this rank's blocks
    whole_layout: KVLayout  # layout of the blocks of all ranks together
    shards: tuple[Shard, ...] = ()  # each rank's share of the blocks, if there are several ranks
    num_blocks: int
    context_len: int  # tokens; no row may end beyond it
    vocab_size: int
    overlaps = False  # True once a model is open whose device computes while the host goes on
    # True if rows return hidden states; then the tokens that rows choose have no meaning.
    embeds: bool
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    weights: WeightFormat  # a resolved format, never `auto`
    weights_bytes: int  # bytes of the linear layers, with the draft model's
    sizes: ModelSizes  # sizes of the target, to estimate the work of steps
    buffer: memoryview | None  # num_blocks * block_bytes; None if it is not host memory
    # The draft model's forward passes, over the same blocks.
    draft_forward: CpuForward | CudaForward | SharedForward | None = None
    kv_address: int  # address of the buffer in its device's memory

    def __init__(  # noqa: PLR0913 - all but the path have defaults
        self,
        path: Path,
        *,
        draft: Path | None = None,
        block_size: int = 16,
        kv_format: KVFormat = KVFormat.FP32,
        num_blocks: int | None = None,
        kv_bytes: int | SizeKV | None = None,
        max_len: int | None = None,
        weights: WeightFormat = WeightFormat.AUTO,
        device: str = "cpu",
        largest: LargestStep | None = None,
        meter: MemoryMeter | None = None,
        group: RankGroup | None = None,
        feed: StepFeed | None = None,
    ) -> None:
        """Needs either `num_blocks`, or `kv_bytes`, which determines the number of blocks.

        If `kv_bytes` is a function, it is called after the model is loaded. No row may end beyond
        `max_len` tokens or the model's context.

        `kv_bytes` is the sum over all ranks. Rank 0 gets the `feed` to the other ranks.

        `draft` is a smaller model with the same vocabulary; blocks have room for its K and V too. A
        CPU computes with torch's number of threads at the time of opening. If `largest` is given, a
        GPU runs this step once to measure the memory that is left for KV; `meter` reads the memory.
        """
        self.path = path
        self.draft_path = draft
        self.block_size = block_size
        self.kv_format = kv_format
        self.device = device
        self._wanted_weights = weights
        self._clock = MonotonicClock()
        self._masks = Masks()
        self._num_blocks = num_blocks
        self._kv_bytes = kv_bytes
        self._max_len = max_len
        self._largest = largest
        self._meter = meter
        self._group = group
        self._feed = feed
        self._last: OverlappedStep | None = None
        self._tokens: TokenMemory | None = None

    def open(self, allocate: Allocate | None = None) -> None:
        """Loads the model and allocates memory for KV, with `allocate` if given. Waits for all
        ranks.

        Raises CheckpointError, or ConfigError if the memory is too small or unsuitable.
        """
        device = _device(self.device)
        self._is_cuda = device.type == "cuda"
        if device.type == "cpu":
            self.weights = cpu.resolve_weights(self._wanted_weights)
        else:
            self.weights = cuda.resolve_weights(self._wanted_weights, device)
        if self._group is not None:
            self._group.open()
        in_fp32 = device.type == "cuda" and self.weights is WeightFormat.FP32
        dtype = torch.float32 if in_fp32 else None
        models = _load_models(
            self.path,
            self.draft_path,
            dtype,
            kv_format=self.kv_format,
            block_size=self.block_size,
            device=self.device,
            group=self._group,
            max_len=self._max_len,
        )
        self._describe(models)
        kv_bytes = self._kv_bytes
        if callable(kv_bytes):
            num_context_blocks = self.layout.num_blocks_for(self.context_len)
            kv_bytes = kv_bytes(
                KVNeeds(
                    weights_bytes=_weights_bytes(models, self.weights),
                    block_bytes=self.layout.block_bytes,
                    num_context_blocks=num_context_blocks,
                    device=_device_needs(models[0], self.weights, self._largest, self._meter),
                )
            )
        if self._group is not None and kv_bytes is not None and not self._is_cuda:
            kv_bytes //= self._group.place.size  # all ranks use the memory of one machine
        self.num_blocks = _resolve_num_blocks(self.layout, self._num_blocks, kv_bytes)
        if self._group is not None:
            self.num_blocks = self._group.least(self.num_blocks)
        if allocate is None:
            buffer = allocate_buffer(self.layout, self.num_blocks, self.device)
        elif device.type != "cpu":
            raise ConfigError(f"a KV buffer of host memory cannot serve device {self.device}")
        else:
            memory = allocate(self.num_blocks * self.layout.block_bytes)
            buffer = wrap_buffer(memory, self.layout, self.num_blocks)
        self.buffer = memoryview(buffer.view(-1).numpy()) if buffer.is_cpu else None
        self.kv_address = buffer.data_ptr()
        self._open_forwards(models, buffer)
        return_freed_memory()

    def _describe(self, models: Sequence[LoadedModel]) -> None:
        """Sets the public attributes that describe the target and, if there is one, its draft
        model.
        """
        target = models[0]
        sections = tuple(section for model in models for section in model.layout.sections)
        self.layout = msgspec.structs.replace(target.layout, sections=sections)
        wholes = (model.whole_layout or model.layout for model in models)
        sections = tuple(section for whole in wholes for section in whole.sections)
        self.whole_layout = msgspec.structs.replace(target.layout, sections=sections)
        if self._group is not None:
            self.shards = shards_of(self._group.place, self.whole_layout, self.layout)
        self.context_len = _limited(self._max_len, min(model.context_len for model in models))
        self.vocab_size = target.vocab_size
        self.eos_token_ids = target.eos_token_ids
        self.embeds = target.embedding is not None
        self.fingerprint = "-".join([*(model.fingerprint for model in models), self.weights])

    def _open_forwards(self, models: Sequence[LoadedModel], buffer: torch.Tensor) -> None:
        """Opens the forward passes of the target and of its draft, each over its section of
        `buffer`.
        """
        self._context = models[0].context
        sizes = sizes_of(models[0])  # measured before the weights are packed
        target = _forward(models[0], self.weights)
        feed = self._feed  # from rank 0 to the other ranks
        self._forward = target if feed is None else SharedForward(target, 0, feed)
        self._forward.open(KVCache(self.layout, buffer))
        self.weights_bytes = self._forward.weights_bytes
        self.sizes = msgspec.structs.replace(sizes, weights_bytes=float(self.weights_bytes))
        if self._group is not None:
            self.sizes = of_all_ranks(self.sizes, self._group, self.whole_layout)
        if len(models) == 2:
            draft = _forward(models[1], self.weights, beside=target)
            self.draft_forward = draft if feed is None else SharedForward(draft, 1, feed)
            self.draft_forward.open(KVCache(self.layout, buffer, section=1))
            self.weights_bytes += self.draft_forward.weights_bytes
        self._overlap()

    def _overlap(self) -> None:
        """Allows overlapping steps if no part of a step makes the device wait for the host."""
        is_plain = self.draft_forward is None and not self.embeds
        self.overlaps = is_plain and isinstance(self._forward, CudaForward)
        if self.overlaps:
            self._tokens = TokenMemory(MAX_CHOSEN, pinned=self._is_cuda)

    def follow(self, channel: StepChannel) -> None:
        """Computes this rank's part of the passes that rank 0 sends. Returns when rank 0 has
        exited.
        """
        forwards = (self._forward, self.draft_forward)
        with torch.inference_mode():
            while (step := channel.receive()) is not None:
                forward = forwards[step.model]
                forward.launch(forward.unpack(step))

    def close(self) -> None:
        """Drops the model and the KV buffer, so that the buffer's memory can be unmapped."""
        if self._feed is not None:
            self._feed.close()
        self.buffer = None
        self._masks.close()
        if self.draft_forward is not None:
            self.draft_forward.close()
            self.draft_forward = None
        self._forward.close()
        del self._forward
        if self._group is not None:
            self._group.close()

    def enter_thread(self) -> None:
        """Prepares the calling thread to run steps: its operations go to the runner's device."""
        device = _device(self.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)

    @property
    def is_fused(self) -> bool:
        """True if a forward pass (on a GPU: a decode step) is one call into compiled code."""
        return self._forward.is_fused and (
            self.draft_forward is None or self.draft_forward.is_fused
        )

    @property
    def kernels(self) -> str:
        """Returns a text that names the kernels. Runners with equal texts choose the same tokens
        for the same model.
        """
        return self._forward.kernels

    @property
    def choices(self) -> RunnerChoices:
        """Returns the choices made at opening, for a log or a report."""
        return _choices(self._forward, self._context.attend)

    @property
    def counters(self) -> dict[str, int]:
        """Returns the numbers of optional parts that this rank's models lack, by name."""
        counts: Counter[str] = Counter()
        for forward in filter(None, (self._forward, self.draft_forward)):
            counts.update(_choices(forward, self._context.attend).fallbacks)
        return {f"fallbacks:{what}": count for what, count in counts.items()}

    @property
    def is_batch_invariant(self) -> bool:
        """True if measurements at opening gave a sequence the same bits in any batch."""
        return self._forward.is_batch_invariant

    def run(self, plan: BatchPlan) -> BatchResult:
        """Launches a step and waits for it."""
        return self.launch(plan).result()

    def launch(self, plan: BatchPlan) -> LaunchedStep:
        """Runs the passes of a plan and chooses tokens. On a GPU, only queues this work."""
        if self.overlaps and (step := self._launch_overlapped(plan)) is not None:
            return step
        begin_s = self._clock.now_s()
        proposals = []
        for row in plan.rows:
            end = row.start + len(row.token_ids) + len(row.draft) + row.num_to_draft
            assert end <= self.context_len
            proposals.append(_proposed(row) if row.draft else DraftedRow(row))
        if not proposals:
            return TorchStep((), StepTimes(0.0, 0.0, 0.0), begin_s, self._clock)
        with torch.inference_mode():
            if self.embeds:
                verified = verify.verify_by_parts(
                    self._forward, proposals, self._masks, self._clock
                )
            elif self.draft_forward is not None:
                models = self._forward, self.draft_forward
                verified = _drafted_and_verified(*models, proposals, self._masks, self._clock)
            else:
                verified = self._forward.verify(proposals, self._masks, self._clock)
            results = verify.results(proposals, verified.chosen, verified.logits)
            if self.embeds:
                results = _embedded(results, verified.logits)
        times = StepTimes(verified.prepare_s, verified.forward_s, 0.0, verified.draft_s)
        fence = None
        if self._is_cuda:
            fence = torch.cuda.Event()
            fence.record()
        return TorchStep(results, times, begin_s, self._clock, fence)

    def _launch_overlapped(self, plan: BatchPlan) -> LaunchedStep | None:
        """Queues a step after the last step, which may be in flight. Returns None if drafts need
        the last step's end.
        """
        if not plan.rows or any(row.max_drafted for row in plan.rows):
            self._last = None  # without pending rows, the last step has ended
            return None
        assert isinstance(self._forward, CudaForward)
        assert self._tokens is not None
        step = OverlappedStep(
            *(plan, self._forward, self._masks, self._clock, self._last, self._tokens)
        )
        step.launch()
        self._last = step
        return step

    def warm_up(self, clock: Clock | None = None) -> float:
        """Runs a chunk and a decode step on blocks that no sequence owns yet. Returns their
        duration in seconds.
        """
        clock = clock or MonotonicClock()
        begin_s = clock.now_s()
        capacity = min(self.num_blocks * self.block_size, self.context_len)
        num_tokens = min(WARM_UP_TOKENS, capacity - 1)
        num_drafted = min(WARM_UP_DRAFTED, capacity - num_tokens - 1)
        num_to_draft = 0 if self.draft_forward is None else num_drafted
        table = [BlockId(i) for i in range(self.layout.num_blocks_for(capacity))]
        for start, num, drafted in ((0, num_tokens, 0), (num_tokens, 1, num_to_draft)):
            tokens = [0] * num
            row = Row(
                SeqId("warm-up"),
                tokens,
                start,
                table,
                Sampling(),
                num_to_draft=drafted,
                draft_token_ids=tokens,
            )
            self.run(BatchPlan([row]))
        return clock.now_s() - begin_s


def use_threads(number: int) -> None:
    """Makes torch compute with this number of threads."""
    torch.set_num_threads(number)


def prepare_loading() -> None:
    """Does, before workers are forked, the work with which every model's loading begins.

    transformers compiles a thousand patterns of weight names. The modules of decoders import
    modules that all decoders share. Both together take a third of a second of each worker's start.
    """
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.models.llama import modeling_llama  # noqa: F401

    get_checkpoint_conversion_mapping("llama")


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is neither cpu nor cuda")
    return device


def _drafted_and_verified(
    forward: CpuForward | CudaForward | SharedForward,
    draft: CpuForward | CudaForward | SharedForward,
    proposals: Sequence[DraftedRow],
    masks: Masks,
    clock: Clock,
) -> Verified:
    """Runs the draft model over the rows whose KV it computes, and the target over all rows."""
    seen = [proposal for proposal in proposals if proposal.row.draft_token_ids]
    if not seen:
        return forward.verify(proposals, masks, clock)
    seen.sort(key=_num_to_draft, reverse=True)
    is_cpu = isinstance(forward, CpuForward) and isinstance(draft, CpuForward)
    if is_cpu and seen[0].row.num_to_draft > 0:
        drafting = forward.drafting(draft, seen, proposals)
        if drafting is not None:
            return forward.verify(proposals, masks, clock, drafting)
    begin_s = clock.now_s()
    draft.draft(seen, masks)
    draft_s = clock.now_s() - begin_s
    return forward.verify(proposals, masks, clock)._replace(draft_s=draft_s)


def _choices(forward: CpuForward | CudaForward | SharedForward, attend: object) -> RunnerChoices:
    module = (attend if isfunction(attend) else type(attend)).__module__
    names = module.split(".")
    attention = next((ATTENTIONS[name] for name in names if name in ATTENTIONS), names[-1])
    own = forward.own if isinstance(forward, SharedForward) else forward
    if isinstance(own, CudaForward):
        attention = own.device_kernels.attention or attention
        return RunnerChoices(attention, own.num_captured, dict(own.fallbacks))
    return RunnerChoices(attention, 0, {})


def _forward(
    loaded: LoadedModel, weights: WeightFormat, beside: CpuForward | CudaForward | None = None
) -> CpuForward | CudaForward:
    """Returns the forward pass of a model. On a CPU the pass uses the threads of `beside`."""
    if loaded.device.type == "cpu":
        return CpuForward(loaded, weights, threads=torch.get_num_threads(), beside=beside)
    return CudaForward(loaded, weights)


def _load_models(
    path: Path, draft_path: Path | None, dtype: torch.dtype | None, **options: Any
) -> list[LoadedModel]:
    """Returns the target, and its draft model or None. `options` are arguments of `load`."""
    target = load(path, dtype=dtype, **options)
    if draft_path is None:
        return [target]
    if target.embedding is not None:
        raise ConfigError(f"{path} gives embeddings, which no draft model speeds up")
    max_len = options["max_len"]
    draft = load_draft(draft_path, target=target, target_path=path, dtype=dtype, max_len=max_len)
    return [target, draft]


def _weights_bytes(models: Sequence[LoadedModel], weights: WeightFormat) -> int:
    """Returns an estimate of the final size of the weights, in bytes."""
    parameters = [p for model in models for p in model.model.parameters()]
    stored_bytes = sum(p.numel() * p.element_size() for p in parameters)
    packed_bytes = sum(p.numel() for p in parameters) * PACKED_BYTES.get(weights, 2)
    return max(stored_bytes, packed_bytes)


def _device_needs(
    target: LoadedModel,
    weights: WeightFormat,
    largest: LargestStep | None,
    meter: MemoryMeter | None,
) -> DeviceNeeds | None:
    """Returns the memory use of a GPU and of its largest step. Brings the target's weights into
    their final format.
    """
    if meter is None and target.device.type == "cuda":
        meter = CudaMeter(target.device)
    if meter is None or largest is None:
        return None
    return measure_needs(target, weights, largest, meter)


def _limited(max_len: int | None, context_len: int) -> int:
    """Returns the context length; the configured limit if it is lower."""
    if max_len is None:
        return context_len
    if max_len > context_len:
        raise ConfigError(f"max_model_len is {max_len}, but the model's context is {context_len}")
    return max_len


def _resolve_num_blocks(layout: KVLayout, num_blocks: int | None, kv_bytes: int | None) -> int:
    if num_blocks is None:
        if kv_bytes is None:
            raise ConfigError("neither num_blocks nor kv_bytes is given")
        num_blocks = kv_bytes // layout.block_bytes
    if num_blocks < 1:
        raise ConfigError(f"memory for KV holds no block: one has {layout.block_bytes} bytes")
    return num_blocks


def _proposed(row: Row) -> DraftedRow:
    """Returns the row. Its proposed tokens are cut to the leading tokens that its grammar
    allows.
    """
    assert row.num_to_draft == 0
    num_allowed = len(row.draft) if row.guide is None else row.guide.num_allowed(row.draft)
    return DraftedRow(row, list(row.draft[:num_allowed]))


def _embedded(results: Sequence[RowResult], states: torch.Tensor) -> list[RowResult]:
    """Returns the results. The hidden states [num_choosing_rows, hidden] are added to the results
    of rows that chose a token.
    """
    found = iter(states.float().cpu().numpy())
    return [
        msgspec.structs.replace(each, embedding=next(found).tobytes()) if each.token_ids else each
        for each in results
    ]


def _num_to_draft(proposal: DraftedRow) -> int:
    return proposal.row.num_to_draft
