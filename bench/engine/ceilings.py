"""Measures this machine's peaks, with as many threads as an engine has.

    read_bytes_per_s    256 MiB, far more than caches hold, read once: sum, dot, matrix by vector
    fp32_flops_per_s    two fp32 matrices of 2048 × 2048
    int8_flops_per_s    two such int8 matrices, or fp32 rows that are quantised on the way by an
                        int8 matrix

Each figure is tried in all ways that torch offers on this CPU, and with our own kernels. The median
of a few runs counts for each way, and the fastest way counts as the ceiling. A way that this CPU
lacks is left out. Runs in a process of its own, driven like an engine:

    python -m bench.engine.ceilings THREADS
"""

import statistics
import sys
import warnings
from collections.abc import Callable, Iterator

import torch

from bench.peers.driver import drive, stdout_for_answers
from engine.clock import Clock, MonotonicClock
from engine.config import WeightFormat
from engine.model.native.library import kernels
from engine.model.native.linear import PackedLinear, Team

READ_BYTES = 256 * 2**20
SIZE = 2048
NUM_TIMES = 3
QUANTISED_ENGINES = ("onednn", "x86", "fbgemm")  # of torch's operators

Way = Callable[[], object]


class CeilingProbe:
    """Holds the inputs of all measurements; made once and reused."""

    def __init__(self, threads: int, clock: Clock | None = None) -> None:
        torch.set_num_threads(threads)
        self.facts: dict[str, object] = {"version": torch.__version__}
        self._clock = clock or MonotonicClock()
        library = kernels()
        team = None if library is None else Team(library, threads)
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")  # torch's quantised types are deprecated
            left, right = torch.randn(2, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
            self._reads = list(_working(*_reads(team)))
            self._fp32 = list(_working(lambda: left @ right))
            self._int8 = list(_working(*_int8_products(left, right, team)))

    def measure(self) -> dict[str, object]:
        """Measures and returns the figures, by the names above."""
        num_flops = 2 * SIZE**3
        with torch.inference_mode():
            return {
                "read_bytes_per_s": READ_BYTES / self._best_s(self._reads),
                "fp32_flops_per_s": num_flops / self._best_s(self._fp32),
                "int8_flops_per_s": num_flops / self._best_s(self._int8),
            }

    def _best_s(self, ways: list[Way]) -> float:
        return min(statistics.median(self._times_s(way)) for way in ways)

    def _times_s(self, way: Way) -> Iterator[float]:
        for _ in range(NUM_TIMES):
            begin_s = self._clock.now_s()
            way()
            yield self._clock.now_s() - begin_s


def _working(*ways: Way) -> Iterator[Way]:
    """The ways that work here. Each has run once, so its preparation is done."""
    for way in ways:
        try:
            way()
        except (RuntimeError, NotImplementedError, AttributeError):
            continue
        yield way


def _reads(team: Team | None) -> list[Way]:
    memory = torch.full((READ_BYTES // 4 // SIZE, SIZE), 1 / 3)  # bf16 cannot hold this value
    flat, vector = memory.view(-1), torch.ones(SIZE)
    ways: list[Way] = [flat.sum, lambda: torch.dot(flat, flat), lambda: memory @ vector]
    if team is not None:
        packed = _packed(memory, team, WeightFormat.FP32)
        ways.append(lambda: packed(vector[None]))
    return ways


def _int8_products(left: torch.Tensor, right: torch.Tensor, team: Team | None) -> list[Way]:
    a, b = ((x * 20).clamp(-127, 127).to(torch.int8) for x in (left, right))
    ways: list[Way] = [lambda: torch._int_mm(a, b.t())]
    ways += [_QuantisedLinear(engine, left, right) for engine in QUANTISED_ENGINES]
    if team is not None:
        packed = _packed(right, team, WeightFormat.INT8)
        ways.append(lambda: packed(left))
    return ways


class _QuantisedLinear:
    """torch's linear layer over int8 weights, as one of its engines computes it."""

    def __init__(self, engine: str, left: torch.Tensor, right: torch.Tensor) -> None:
        self._engine = engine
        self._left = left
        self._right: torch.Tensor | None = right
        self._packed: object = None

    def __call__(self) -> object:
        if self._right is not None:
            self._packed = self._pack(self._right)
            self._right = None
        return torch.ops.quantized.linear_dynamic(
            self._left,
            self._packed,
            reduce_range=True,
        )

    def _pack(self, right: torch.Tensor) -> object:
        before = torch.backends.quantized.engine
        torch.backends.quantized.engine = self._engine
        try:
            weight = torch.quantize_per_tensor(right, 0.05, 0, torch.qint8)
            return torch.ops.quantized.linear_prepack(weight, None)
        finally:
            torch.backends.quantized.engine = before


def _packed(weight: torch.Tensor, team: Team, form: WeightFormat) -> PackedLinear:
    linear = torch.nn.Linear(1, 1, bias=False)
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    linear.out_features, linear.in_features = weight.shape
    return PackedLinear(linear, team, form)


def main() -> None:
    """Answers `measure` until its input ends."""
    out = stdout_for_answers()
    drive(lambda: CeilingProbe(threads=int(sys.argv[1])), sys.stdin, out)


if __name__ == "__main__":
    main()
