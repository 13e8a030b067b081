"""Predicts the seconds of work on a worker, by formulas whose coefficients are learned online.

    prefill   A + B·(n - p) + C·(n² - p²)     n tokens of a prompt, of which p are cached
    decode    D + E·b + F·kv                  a step of b sequences with kv tokens of context in all
    pull      t0 + t_block·k + bytes / rate   k blocks
    load      t0 + t_block·k                  k blocks that a store reads from disk or objects

The price of a chunk is the price of a prompt up to the chunk's end, with all tokens before the
chunk cached. So the prices of a prompt's chunks add up to the price of the prompt, except that each
chunk pays A.

Coefficients are learned for each class of workers (one role, model and machine) from reports of
their steps and pulls. Each fit has sums of products, in which the weight of old observations
decays. It solves a weighted least-squares problem without negative coefficients. Errors are
relative, because durations differ by orders of magnitude.

An observation far from its prediction is clipped, because one interrupted step says nothing about
the next step. If many observations in a row are clipped on the same side, the workers have changed,
and the fit starts anew.

Each fit also records its recent prediction errors. Check them before you rely on a prediction.

Pure: no clock, no tensor. Sources: the shape of the formulas, DistServe (Zhong et al., OSDI 2024,
appendix A) and AIConfigurator's tables; for the pull, NIXL's cost of a descriptor.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from typing import NamedTuple

import numpy as np

from engine.demand import DecodeCost
from engine.messages import StepReport

# ---------------------------------------------------------------- formulas


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """The seconds in which a prompt is computed: A + B·(n - p) + C·(n² - p²)."""

    fixed_s: float
    token_s: float
    square_s: float = 0.0

    def seconds(self, num_tokens: int, num_cached_tokens: int = 0) -> float:
        """Returns the seconds for a prompt of `num_tokens`, of which `num_cached_tokens` are
        cached.
        """
        new = num_tokens - num_cached_tokens
        squares = num_tokens * num_tokens - num_cached_tokens * num_cached_tokens
        return self.fixed_s + self.token_s * new + self.square_s * squares


@dataclass(frozen=True, slots=True)
class PullCost:
    """The seconds in which blocks are pulled from another worker: t0 + t_block·k + bytes / rate."""

    fixed_s: float
    block_s: float
    bytes_per_s: float

    def seconds(self, num_blocks: int, num_bytes: int) -> float:
        """Returns the seconds for `num_blocks` blocks with `num_bytes` bytes in total."""
        return self.fixed_s + self.block_s * num_blocks + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class LoadCost:
    """The seconds in which a store reads blocks into its memory: t0 + t_block·k."""

    fixed_s: float
    block_s: float

    def seconds(self, num_blocks: int) -> float:
        """Returns the seconds for `num_blocks` blocks."""
        return self.fixed_s + self.block_s * num_blocks


@dataclass(frozen=True, slots=True)
class WorkerCosts:
    """The costs of a class of workers. A cost that is not known yet is None."""

    prefill: PrefillCost | None = None
    decode: DecodeCost | None = None
    pull: PullCost | None = None


@dataclass(frozen=True, slots=True)
class CostErrors:
    """Recent prediction errors, as shares of the true times; None before any prediction."""

    prefill: float | None = None
    decode: float | None = None
    pull: float | None = None


# ---------------------------------------------------------------- observations

_MEMORY = 0.995  # factor by which each new observation reduces the weight of the old ones
_ERROR_MEMORY = 0.95
_LARGEST_ERROR = 0.5  # observations with a larger error, as a share of the prediction, are clipped
_NUM_SURPRISES = 4  # consecutive clipped errors on one side after which the fit starts anew
_NUM_YOUNG = 8  # number of first observations that are never clipped
# The fit is solved after each of the first observations; later after every _SOLVE_EVERY of them.
_NUM_EAGER = 16
_SOLVE_EVERY = 8
# Ridge term, relative to the average observation: it keeps collinear features' coefficients finite.
_RIDGE = 1e-6


class Fit:
    """A fit of y ≈ weights · x in which no weight is negative."""

    def __init__(self, num_features: int) -> None:
        self.error: float | None = None
        self.num_forgotten = 0  # number of times that the fit has started anew
        self._products = [[0.0] * num_features for _ in range(num_features)]
        self._targets = [0.0] * num_features
        self._weights = (0.0,) * num_features
        self._num_seen = 0
        self._num_unsolved = 0
        self._surprises = 0

    @property
    def is_known(self) -> bool:
        """True after the first observation of this fit."""
        return self._num_seen > 0

    @property
    def weights(self) -> tuple[float, ...]:
        """Returns the best weights for the observations. The last few observations may not be
        included.
        """
        if self._num_unsolved and (
            self._num_seen <= _NUM_EAGER or self._num_unsolved >= _SOLVE_EVERY
        ):
            self._weights = _solve(np.array(self._products), np.array(self._targets))
            self._num_unsolved = 0
        return self._weights

    def predict(self, x: Sequence[float]) -> float:
        """Returns the predicted observation for these features."""
        return sum([w * f for w, f in zip(self.weights, x, strict=True)])

    def observe(self, x: Sequence[float], y: float) -> None:
        """Learns that these features gave `y`. Ignores `y` unless it is positive and finite."""
        if not (0 < y < math.inf):
            return
        expected = self.predict(x) if self.is_known else 0.0
        if expected > 0:
            error = abs(y - expected) / y
            self.error = error if self.error is None else _mix(self.error, error)
            y = self._cut(y, expected)
        self._add(x, y)

    def _cut(self, y: float, expected: float) -> float:
        """Returns the observation; clipped if it is far from the prediction."""
        low, high = expected * (1 - _LARGEST_ERROR), expected * (1 + _LARGEST_ERROR)
        side = (y > high) - (y < low)
        self._surprises = self._surprises + side if side and self._surprises * side >= 0 else side
        if abs(self._surprises) >= _NUM_SURPRISES:
            self._remove()
        if self._num_seen < _NUM_YOUNG:
            return y
        return min(max(y, low), high)

    def _add(self, x: Sequence[float], y: float) -> None:
        # Python floats, because NumPy is several times slower for a few numbers.
        features = [value / y for value in x]
        targets, products = self._targets, self._products
        for i, feature in enumerate(features):
            targets[i] = targets[i] * _MEMORY + feature
            row = products[i]
            for j, other in enumerate(features):
                row[j] = row[j] * _MEMORY + feature * other
        self._num_seen += 1
        self._num_unsolved += 1

    def _remove(self) -> None:
        self.num_forgotten += 1
        num = len(self._weights)
        self._targets, self._products = [0.0] * num, [[0.0] * num for _ in range(num)]
        self._weights = (0.0,) * len(self._weights)
        self._num_seen = self._num_unsolved = self._surprises = 0


def _mix(mean: float, value: float) -> float:
    return _ERROR_MEMORY * mean + (1 - _ERROR_MEMORY) * value


class _Subsets(NamedTuple):
    """All subsets of features that have the same size, one subset per row."""

    chosen: np.ndarray  # [subsets, size]
    rows: np.ndarray  # [subsets, size, 1]; `m[rows, columns]` is each subset's part of m
    columns: np.ndarray  # [subsets, 1, size]
    ridge: np.ndarray  # [size, size]


@cache
def _subsets_of(num_features: int) -> list[_Subsets]:
    """Returns the subsets of each size, from one feature up to all features."""
    found = []
    for size in range(1, num_features + 1):
        chosen = np.array(list(combinations(range(num_features), size)))
        found.append(
            _Subsets(chosen, chosen[:, :, None], chosen[:, None, :], _RIDGE * np.eye(size))
        )
    return found


def _solve(products: np.ndarray, targets: np.ndarray) -> tuple[float, ...]:
    """Minimises wᵀ·products·w - 2·targets·w over w ≥ 0, by trying every choice of zeros.

    There are few features, so trying all choices is exact and fast. One NumPy call handles all
    choices of the same size, because a call takes longer than the arithmetic.
    """
    num = len(targets)
    scale = np.sqrt(products.diagonal())
    scale[scale == 0] = 1.0
    scaled, wanted = products / np.multiply.outer(scale, scale), targets / scale
    best, least = np.zeros(num), 0.0
    for chosen, rows, columns, ridge in _subsets_of(num):
        goals = wanted[chosen]
        solved = np.linalg.solve(scaled[rows, columns] + ridge, goals[:, :, None])[:, :, 0]
        for number, weights in enumerate(solved.tolist()):
            if not min(weights) >= 0:
                continue
            loss = -float(solved[number] @ goals[number])
            if loss < least:
                best, least = np.zeros(num), loss
                best[chosen[number]] = weights
    return tuple((best / scale).tolist())


# ---------------------------------------------------------------- worker classes


@dataclass(slots=True)
class _Fits:
    prefill: Fit = field(default_factory=lambda: Fit(3))
    decode: Fit = field(default_factory=lambda: Fit(3))
    pull: Fit = field(default_factory=lambda: Fit(3))
    costs: WorkerCosts | None = None  # None: must be computed again after a new observation


class OnlineCosts:
    """The learned costs of each class of workers."""

    def __init__(self) -> None:
        self._fits: dict[Hashable, _Fits] = {}

    def observe_step(self, worker_class: Hashable, step: StepReport) -> None:
        """Learns from one step of a worker of this class.

        If the step also decodes, the known cost of decoding is subtracted before the prefill cost
        is learned. So the fixed part is counted once.
        """
        fits = self._of(worker_class)
        decode = (1.0, step.num_rows, step.num_context_tokens)
        if not step.num_prefill_tokens:
            if step.num_rows:
                fits.decode.observe(decode, step.seconds)
            return
        seconds = step.seconds
        if step.num_rows:
            if not fits.decode.is_known:
                return
            seconds -= fits.decode.predict((0.0, *decode[1:]))
        fits.prefill.observe((1.0, step.num_prefill_tokens, step.prefill_squares), seconds)

    def observe_pull(
        self, worker_class: Hashable, *, num_blocks: int, num_bytes: int, seconds: float
    ) -> None:
        """Learns from one pull of a worker of this class."""
        if num_blocks > 0:
            self._of(worker_class).pull.observe((1.0, num_blocks, num_bytes), seconds)

    def costs(self, worker_class: Hashable) -> WorkerCosts:
        """Returns the known costs of a class."""
        fits = self._fits.get(worker_class)
        if fits is None:
            return WorkerCosts()
        if fits.costs is None:
            fits.costs = _costs_of(fits)
        return fits.costs

    def num_forgotten(self, kind: str, worker_class: Hashable) -> int:
        """Returns how often the fit of "prefill", "decode" or "pull" has started anew."""
        fits = self._fits.get(worker_class)
        fit: Fit | None = None if fits is None else getattr(fits, kind)
        return 0 if fit is None else fit.num_forgotten

    def errors(self, worker_class: Hashable) -> CostErrors:
        """Returns the recent prediction errors of a class."""
        fits = self._fits.get(worker_class)
        if fits is None:
            return CostErrors()
        return CostErrors(fits.prefill.error, fits.decode.error, fits.pull.error)

    def _of(self, worker_class: Hashable) -> _Fits:
        fits = self._fits.get(worker_class)
        if fits is None:
            fits = self._fits[worker_class] = _Fits()
        fits.costs = None
        return fits


def _costs_of(fits: _Fits) -> WorkerCosts:
    pull = None
    if fits.pull.is_known:
        fixed_s, block_s, byte_s = fits.pull.weights
        pull = PullCost(fixed_s, block_s, 1 / byte_s if byte_s > 0 else math.inf)
    return WorkerCosts(
        prefill=PrefillCost(*fits.prefill.weights) if fits.prefill.is_known else None,
        decode=DecodeCost(*fits.decode.weights) if fits.decode.is_known else None,
        pull=pull,
    )
