"""Chooses the fastest way to attend long rows on this device, by measurements when a model is
opened.

Each candidate attends the same batch of two rows. One row has only new tokens; the other row has
equally many cached tokens before its new tokens. The result must agree with the result of the
Triton kernels. The time of making plans is not measured, because a step makes them once for all
layers. The batch uses blocks of the cache that no sequence owns yet. The blocks are cleared
afterwards.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from engine.clock import Clock
from engine.messages import SeqId
from engine.model.attention.base import AttentionBatch, Scoring, build_batch
from engine.model.attention.kvcache import KVCache
from engine.model.attention.prefill import LONG_ROW, Way
from engine.worker.batch import Row
from engine.worker.blocks import BlockId

KERNELS = "triton"  # name of the candidate that uses the Triton kernels alone
MEASURED_TOKENS = 2048  # new tokens of each row; fewer if the cache is small
MEASURED_RUNS = 5
TOLERANCE = 0.03  # largest allowed error / largest element; bf16 has 8 significant bits

# (query, key, value, cache, layer, batch, scoring, way) → attention
AttendBy = Callable[..., torch.Tensor]


class AttentionChoice(NamedTuple):
    """The name of the fastest candidate, and the time or the error of each candidate."""

    name: str
    seconds: Mapping[str, float]
    failures: Mapping[str, str]

    def __str__(self) -> str:
        times = [f"{name} {seconds * 1e3:.3f} ms" for name, seconds in self.seconds.items()]
        faults = [f"{name} fails: {why}" for name, why in self.failures.items()]
        return f"{self.name} ({'; '.join([*times, *faults])})"


def choose_fastest(candidates: Mapping[str, Callable[[], float]]) -> AttentionChoice:
    """Calls each candidate, which measures itself and returns its seconds. Returns the fastest one.

    Candidates that raise an error are skipped. Of equally fast candidates the first is chosen. If
    all candidates raise errors, the first error is raised.
    """
    seconds: dict[str, float] = {}
    errors: dict[str, Exception] = {}
    for name, measure in candidates.items():
        try:
            seconds[name] = measure()
        except Exception as error:  # a library may raise any exception
            errors[name] = error
    if not seconds:
        raise next(iter(errors.values()))
    failures = {name: str(error) or type(error).__name__ for name, error in errors.items()}
    return AttentionChoice(min(seconds, key=seconds.__getitem__), seconds, failures)


class PrefillTrial:
    """The batch that all candidates attend. It uses the first blocks of a cache."""

    def __init__(
        self,
        cache: KVCache,
        *,
        num_heads: int,
        context_len: int,
        attend: AttendBy,
        clock: Clock,
    ) -> None:
        self._cache = cache
        self._num_heads = num_heads
        self._attend = attend
        self._clock = clock
        capacity = min(cache.num_blocks * cache.layout.block_size // 3, context_len // 2)
        size = cache.layout.block_size
        self._num_tokens = min(MEASURED_TOKENS, capacity) // size * size
        self._scoring = Scoring(cache.section.head_dim**-0.5)

    @property
    def is_possible(self) -> bool:
        """True if the cache has room for rows that count as long."""
        return self._num_tokens >= LONG_ROW

    @torch.inference_mode()
    def choose(self, ways: Sequence[Way]) -> AttentionChoice:
        """Measures the Triton kernels and all ways. Closes each way afterwards."""
        num_blocks = self._cache.layout.num_blocks_for(3 * self._num_tokens)
        try:
            batch = self._begin()
            inputs = self._inputs(2 * self._num_tokens)
            expected = self._run(inputs, batch, None)
            candidates = {KERNELS: lambda: self._measure(inputs, batch, None, expected)}
            for way in ways:
                candidates[way.name] = lambda way=way: self._tried(way, inputs, batch, expected)
            return choose_fastest(candidates)
        finally:
            self._cache.buffer[:num_blocks].zero_()

    def _begin(self) -> AttentionBatch:
        """Stores K and V of the second row's cached tokens, and returns the batch."""
        num, size = self._num_tokens, self._cache.layout.block_size
        table = [BlockId(i) for i in range(3 * num // size)]
        first, second = table[: num // size], table[num // size :]
        before = build_batch([Row(SeqId("b"), [0] * num, 0, second, None)], self._cache)
        self._run(self._inputs(num), before, None)
        rows = [
            Row(SeqId("a"), [0] * num, 0, first, None),
            Row(SeqId("b"), [0] * num, num, second, None),
        ]
        return build_batch(rows, self._cache)

    def _inputs(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns random queries, keys and values, from a fixed seed."""
        section, device = self._cache.section, self._cache.device
        generator = torch.Generator(device).manual_seed(num_tokens)
        heads = (self._num_heads, section.num_kv_heads, section.num_kv_heads)
        shapes = [(num_tokens, number, section.head_dim) for number in heads]
        query, key, value = (
            torch.randn(shape, generator=generator, device=device).bfloat16() for shape in shapes
        )
        return query, key, value

    def _tried(
        self,
        way: Way,
        inputs: Sequence[torch.Tensor],
        batch: AttentionBatch,
        expected: torch.Tensor,
    ) -> float:
        try:
            way.open(self._cache.device)
            return self._measure(inputs, batch, way, expected)
        finally:
            way.close()

    def _measure(
        self,
        inputs: Sequence[torch.Tensor],
        batch: AttentionBatch,
        way: Way | None,
        expected: torch.Tensor,
    ) -> float:
        """Returns the median time of one layer in seconds. Raises ValueError if the result is
        wrong.
        """
        found = self._run(inputs, batch, way)
        error = float((found.float() - expected.float()).abs().max())
        largest = float(expected.float().abs().max())
        if not error <= TOLERANCE * largest:
            raise ValueError(
                f"its results differ by {error:.3g}, where the largest is {largest:.3g}"
            )
        seconds = []
        for _ in range(MEASURED_RUNS):
            self._wait()
            begin_s = self._clock.now_s()
            self._run(inputs, batch, way)
            self._wait()
            seconds.append(self._clock.now_s() - begin_s)
        return statistics.median(seconds)

    def _run(
        self, inputs: Sequence[torch.Tensor], batch: AttentionBatch, way: Way | None
    ) -> torch.Tensor:
        return self._attend(*inputs, self._cache, 0, batch, self._scoring, way)

    def _wait(self) -> None:
        if self._cache.device.type == "cuda":
            torch.cuda.synchronize(self._cache.device)
