"""Times the GPU's ceilings, attention alone, and the steps of a whole model.

All times are from the host's clock. A timed interval begins and ends with an idle GPU and contains
many calls. A decode job does the steps of a worker, one after the other: it packs and copies
inputs, replays the captured step, samples tokens with temperature and top-p, and copies the tokens
to the host. `…_queued` launches the same step repeatedly without waiting, which hides the host's
time.

A step reads the weights and the KV of all contexts, with the record's scales and padding. The limit
of its speed follows from the least time for these bytes, or for the step's matrix products, at this
GPU's measured ceilings.

Call these functions in torch's inference mode.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from bench.common.roofline import ModelMemory, Work, decode_work, prefill_work
from bench.engine.jobs import GpuShape, scattered_tables
from bench.gpu.models import BLOCK_SIZE
from bench.gpu.session import GpuSession
from engine.clock import Clock
from engine.config import WeightFormat
from engine.layout import KVFormat, KVLayout
from engine.messages import Sampling, SeqId
from engine.model import fp8
from engine.model.attention import cuda as triton_attention
from engine.model.attention import plain as torch_attention
from engine.model.attention.base import Attend, Scoring, build_batch
from engine.model.attention.kvcache import KVCache, allocate_buffer
from engine.model.cuda import CudaForward
from engine.model.loading.checkpoint import LoadedModel
from engine.model.sampling.changes import TokenChoice
from engine.worker.batch import Row
from engine.worker.blocks import BlockId

NUM_RUNS = 3
RUN_S = 0.1  # least seconds of all calls of one run
MAX_CALLS = 200
LARGEST_BYTE = 64  # bytes of random KV are below this, so all numbers are below 2 and none is NaN
RESERVE_BYTES = 6 * 2**30  # GPU memory that is left free for activations and captured steps
WARM_UP_STEPS = 3

SAMPLING = Sampling(temperature=0.8, top_p=0.95)  # used in every timed decode step

ATTENTION_GOAL = 0.75
DECODE_GOAL = 0.80
PREFILL_GOAL = 0.55

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class GpuCeilings:
    """Measured peaks of this GPU."""

    bytes_per_s: float
    bf16_flops_per_s: float
    fp8_flops_per_s: float | None  # None if the GPU has no fp8

    def least_time_s(self, work: Work, weights: WeightFormat) -> float:
        """Returns the least seconds that this GPU needs for the work."""
        matrices = self.bf16_flops_per_s
        if weights is WeightFormat.FP8 and self.fp8_flops_per_s is not None:
            matrices = self.fp8_flops_per_s
        compute_s = work.matrix_flops / matrices + work.attention_flops / self.bf16_flops_per_s
        return max(compute_s, work.read_bytes / self.bytes_per_s)


class GpuStopwatch:
    """A stopwatch for calls on a device."""

    def __init__(self, device: str, clock: Clock) -> None:
        self._is_cuda = device != "cpu"
        self._clock = clock

    def once(self, call: Call, *, times: int = 1) -> float:
        """Returns the mean seconds per call of `times` calls. The device is idle before and after
        them.
        """
        self._wait()
        begin_s = self._clock.now_s()
        for _ in range(times):
            call()
        self._wait()
        return (self._clock.now_s() - begin_s) / times

    def runs(self, call: Call) -> list[float]:
        """Returns the mean seconds per call of each of NUM_RUNS runs. A warm-up call before them is
        not counted.
        """
        self.once(call)
        times = max(1, min(MAX_CALLS, int(RUN_S / max(self.once(call), 1e-6))))
        return [self.once(call, times=times) for _ in range(NUM_RUNS)]

    def _wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()


def measure_ceilings(session: GpuSession, shape: GpuShape, device: str) -> GpuCeilings:
    """Measures bandwidth and matrix rates. For bandwidth, the fastest of several ways to read is
    used.
    """
    watch = GpuStopwatch(device, session.clock)
    source = torch.randn(shape.read_bytes // 4, device=device)
    target = torch.empty_like(source)
    matrix = source.view(torch.bfloat16).view(-1, 4096)
    vector = torch.ones(4096, dtype=torch.bfloat16, device=device)
    ways = {
        "copy": (2 * shape.read_bytes, lambda: target.copy_(source)),
        "sum": (shape.read_bytes, lambda: source.sum()),
        "max": (shape.read_bytes, lambda: source.amax()),
        "matvec": (shape.read_bytes, lambda: matrix @ vector),
    }
    fastest = 0.0
    for name, (num_bytes, call) in ways.items():
        rates = [num_bytes / seconds for seconds in watch.runs(call)]
        session.add(f"ceiling/{name}", [rate / 1e9 for rate in rates], "GB/s")
        fastest = max(fastest, statistics.median(rates))
    size = shape.matrix_size
    left, right = torch.randn(2, size, size, device=device, dtype=torch.bfloat16)
    bf16 = [2 * size**3 / seconds for seconds in watch.runs(lambda: left @ right)]
    session.add("ceiling/bf16", [rate / 1e12 for rate in bf16], "TFLOP/s")
    by_fp8 = None
    if fp8.can_multiply(torch.device(device)):
        (a, a_scales), (b, b_scales) = map(fp8.quantise_rows, (left, right))
        operands = (a, a_scales, b, b_scales[:, 0].contiguous())
        rates = [
            2 * size**3 / seconds for seconds in watch.runs(partial(fp8.scaled_matmul, *operands))
        ]
        session.add("ceiling/fp8", [rate / 1e12 for rate in rates], "TFLOP/s")
        by_fp8 = statistics.median(rates)
    return GpuCeilings(fastest, statistics.median(bf16), by_fp8)


def measure_attention(
    session: GpuSession, shape: GpuShape, ceilings: GpuCeilings, kv_format: KVFormat, device: str
) -> None:
    """Times the attention of all layers in captured decode steps, including the storing of K and V.

    The KV records have the size of a whole model's. So the layers of a block are as far apart as in
    a server, which costs time for address translation. Only the first of the shape's jobs has a
    goal: other jobs may be too small for this GPU.
    """
    layout = KVLayout(BLOCK_SIZE, kv_format, (shape.section(),))
    num_layers = layout.sections[0].num_layers
    for num_rows, context_len in shape.attention_jobs:
        num_bytes = num_rows * context_len * layout.block_bytes // BLOCK_SIZE
        name = f"attention_b{num_rows}_ctx{context_len}/{kv_format}"
        if device != "cpu" and num_bytes > torch.cuda.mem_get_info()[0] - RESERVE_BYTES:
            session.skip(name, f"{num_bytes / 2**30:.0f} GiB of KV do not fit")
            continue
        tables = scattered_tables([context_len] * num_rows, BLOCK_SIZE, seed=0)
        cache = KVCache(layout, random_blocks(layout, sum(map(len, tables)), device))
        rows = [Row(SeqId(f"s{i}"), [0], context_len - 1, t, None) for i, t in enumerate(tables)]
        batch = build_batch(rows, cache)
        query = _random_heads(num_rows, shape.model.num_heads, shape.model.head_dim, device)
        key = _random_heads(num_rows, shape.model.num_kv_heads, shape.model.head_dim, device)
        attend = torch_attention.attend if device == "cpu" else triton_attention.attend
        scoring = Scoring(shape.model.head_dim**-0.5)
        call = captured(
            partial(_all_layers, attend, num_layers, (query, key, key, cache), (batch, scoring)),
            device,
        )
        runs = [
            num_bytes / seconds / 1e9 for seconds in GpuStopwatch(device, session.clock).runs(call)
        ]
        session.add(
            name,
            runs,
            "GB/s",
            limit=ceilings.bytes_per_s / 1e9,
            goal=ATTENTION_GOAL if (num_rows, context_len) == shape.attention_jobs[0] else None,
        )


def _all_layers(
    attend: Attend, num_layers: int, before: tuple[object, ...], behind: tuple[object, ...]
) -> None:
    for layer in range(num_layers):
        attend(*before, layer, *behind)


class ModelSpeeds:
    """Times a model in one format of weights and one format of KV."""

    def __init__(
        self,
        session: GpuSession,
        shape: GpuShape,
        ceilings: GpuCeilings,
        loaded: LoadedModel,
        *,
        weights: WeightFormat,
        kv_format: KVFormat,
    ) -> None:
        self._session = session
        self._shape = shape
        self._ceilings = ceilings
        self._loaded = loaded
        self._weights = weights
        self._name = f"{weights}-{kv_format}"
        self._device = loaded.device.type
        self._layout = KVLayout(BLOCK_SIZE, kv_format, loaded.layout.sections)
        self._forward = CudaForward(
            loaded, weights, captured_rows=shape.batches, captured_lens=(1,)
        )
        self._watch = GpuStopwatch(self._device, session.clock)

    def run(self, *, has_prefill: bool) -> None:
        """Loads the model, measures all jobs for which there is memory and time, and frees the
        model.
        """
        jobs = list(self._jobs_that_fit())
        lens = [self._kv_lens(*job) for job in jobs] + [[self._shape.prefill_len]]
        num_blocks = max(sum(-(-n // BLOCK_SIZE) for n in each) for each in lens)
        cache = KVCache(self._layout, random_blocks(self._layout, num_blocks, self._device))
        begin_s = self._session.clock.now_s()
        self._forward.open(cache)
        self._session.add(f"open/{self._name}", [self._session.clock.now_s() - begin_s], "s")
        try:
            for what in self._forward.fallbacks:
                self._session.fail(f"{self._name}: {what} is not used")
            if has_prefill and self._session.has_time(f"prefill/{self._name}", 10):
                self._prefill()
            for job in jobs:
                if self._session.has_time(f"{_job_name(*job)}/{self._name}", 8):
                    self._decode(*job)
        finally:
            self._forward.close()

    def _jobs_that_fit(self) -> Iterator[tuple[int, int]]:
        room = None
        if self._device != "cpu":
            torch.cuda.empty_cache()
            room = torch.cuda.mem_get_info()[0] - RESERVE_BYTES
        for num_rows in self._shape.batches:
            for context_len in self._shape.contexts:
                num_tokens = sum(self._kv_lens(num_rows, context_len))
                num_bytes = num_tokens * self._layout.block_bytes // BLOCK_SIZE
                if room is None or num_bytes <= room:
                    yield num_rows, context_len
                else:
                    what = f"{_job_name(num_rows, context_len)}/{self._name}"
                    self._session.skip(what, f"{num_bytes / 2**30:.0f} GiB of KV do not fit")

    def _kv_lens(self, num_rows: int, context_len: int) -> list[int]:
        return [context_len + WARM_UP_STEPS + self._shape.num_steps] * num_rows

    def _prefill(self) -> None:
        """Times the prefill of one prompt in one step."""
        length = self._shape.prefill_len
        [table] = scattered_tables([length], BLOCK_SIZE, seed=0)
        ids = torch.randint(self._shape.model.vocab_size, (length,)).tolist()
        row = Row(SeqId("prompt"), ids, 0, table, None)
        runs = self._watch.runs(lambda: self._step([row], [length - 1]))
        work = prefill_work(self._shape.model.size, self._memory, [length])
        least_s = self._ceilings.least_time_s(work, self._weights)
        name = f"prefill_{length}"
        self._session.add(
            f"{name}/{self._name}", [length / s for s in runs], "tokens/s", limit=length / least_s
        )
        self._session.add(
            f"{name}_compute/{self._name}",
            [work.flops / s / 1e12 for s in runs],
            "TFLOP/s",
            limit=work.flops / least_s / 1e12,
            goal=PREFILL_GOAL if self._weights is WeightFormat.BF16 else None,
        )

    def _decode(self, num_rows: int, context_len: int) -> None:
        """Times decode steps of sequences with contexts of this length."""
        tables = scattered_tables(self._kv_lens(num_rows, context_len), BLOCK_SIZE, seed=1)
        self._steps(tables, context_len, WARM_UP_STEPS, [0] * num_rows)
        first = context_len + WARM_UP_STEPS
        num_steps = self._shape.num_steps
        runs = [
            self._watch.once(lambda: self._steps(tables, first, num_steps, [0] * num_rows))
            / num_steps
            for _ in range(NUM_RUNS)
        ]
        middle = first + num_steps // 2
        work = decode_work(self._shape.model.size, self._memory, [middle] * num_rows)
        self._add_speed(num_rows, context_len, work, runs, suffix="", goal=num_rows == 1)
        rows = _rows_at(tables, middle, [0] * num_rows)
        prepared = self._forward.prepare(rows, range(num_rows))
        queued = self._watch.runs(lambda: self._forward.launch(prepared))
        self._add_speed(num_rows, context_len, work, queued, suffix="_queued", goal=False)

    def _add_speed(
        self,
        num_rows: int,
        context_len: int,
        work: Work,
        runs: Sequence[float],
        *,
        suffix: str,
        goal: bool,
    ) -> None:
        """Adds the result of a speed with its limit. If memory is the bottleneck, also adds bytes
        per second.
        """
        name = _job_name(num_rows, context_len) + suffix
        least_s = self._ceilings.least_time_s(work, self._weights)
        self._session.add(
            f"{name}/{self._name}",
            [num_rows / seconds for seconds in runs],
            "tokens/s",
            limit=num_rows / least_s,
        )
        self._session.add(
            f"{name}_bandwidth/{self._name}",
            [work.read_bytes / seconds / 1e9 for seconds in runs],
            "GB/s",
            limit=self._ceilings.bytes_per_s / 1e9,
            goal=DECODE_GOAL if goal and self._weights is WeightFormat.BF16 else None,
        )

    def _steps(
        self,
        tables: Sequence[Sequence[BlockId]],
        context_len: int,
        num_steps: int,
        tokens: list[int],
    ) -> None:
        """Continues decoding after `tokens`, with one token per sequence in each step."""
        for step in range(num_steps):
            rows = _rows_at(tables, context_len + step, tokens)
            tokens = self._step(rows, range(len(rows)))

    def _step(self, rows: Sequence[Row], keep: Sequence[int]) -> list[int]:
        logits = self._forward.launch(self._forward.prepare(rows, keep))
        choices = [TokenChoice(SAMPLING, row.end) for row in rows]
        chosen: list[int] = self._forward.sample(logits, choices).tolist()
        return chosen

    @property
    def _memory(self) -> ModelMemory:
        kv_token_bytes = self._layout.block_bytes / BLOCK_SIZE
        return ModelMemory(self._forward.weights_bytes, kv_token_bytes)


def random_blocks(layout: KVLayout, num_blocks: int, device: str) -> torch.Tensor:
    """Returns a KV buffer with random bytes, which are finite numbers in every format. Zeros would
    make a GPU faster.
    """
    return allocate_buffer(layout, num_blocks, device).random_(0, LARGEST_BYTE)


def captured(call: Call, device: str) -> Call:
    """Returns the call as a captured CUDA graph. On a CPU, returns the call itself."""
    if device == "cpu":
        return call
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    replay: Call = graph.replay
    return replay


def _random_heads(num_rows: int, num_heads: int, head_dim: int, device: str) -> torch.Tensor:
    return torch.randn(num_rows, num_heads, head_dim, dtype=torch.bfloat16, device=device)


def _rows_at(tables: Sequence[Sequence[BlockId]], start: int, tokens: Sequence[int]) -> list[Row]:
    return [
        Row(SeqId(f"s{i}"), [token], start, table, None)
        for i, (token, table) in enumerate(zip(tokens, tables, strict=True))
    ]


def _job_name(num_rows: int, context_len: int) -> str:
    return f"decode_b{num_rows}_ctx{context_len}"
