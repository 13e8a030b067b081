"""How long a decode step takes, learned from the steps that ran.

    target_s = [1, rows, read, verifies, drafted] · weights     drafted: tokens verified beyond one
                                                                a row; verifies: 1 if there are any
    draft_s  = [1, passes, tokens] · weights                    of the draft model

with `read` the tokens of context that attention reads, in thousands, once for each token computed.
Each is a regression by recursive least squares. Old steps count less and less; errors are relative,
since times span decades; an error that is large is cut, since a step that was interrupted says
nothing about the next; but when many are large in a row the machine has changed, and learning
starts anew from the latest.

Before the first step the weights are those of a small model on a CPU; their proportions matter and
not their unit, for the first step that is timed scales them.
"""

from collections.abc import Sequence

import numpy as np

_NOISE = 0.05  # of a step's time, as a share of it
_MEMORY = 0.99  # what a step weighs when the next has come
_ERRORS = (-0.3, 0.3)  # the largest, as shares of the prediction
_SURPRISES = 4  # errors cut in a row, among steps of one kind, until learning starts anew
_YOUNG, _YOUNG_ERRORS = 6, (-0.8, 0.5)  # so many steps then, whose errors may be larger
_LEAST = 0.1  # a prediction, as a share of what the step took
_LEANING = 0.3  # how far from nothing a weight may well be, as a share of a step

_CHEAPEST = 1e-3  # a drafted token, as a share of a step

# Seconds, and how far each may be from the truth.
_TARGET = (0.9e-3, 0.02e-3, 0.005e-3, 0.02e-3, 0.03e-3)
_TARGET_SPREAD = (0.5e-3, 0.02e-3, 0.01e-3, 0.5e-3, 0.05e-3)
_DRAFT = (0.03e-3, 0.1e-3, 0.002e-3)
_DRAFT_SPREAD = (0.1e-3, 0.1e-3, 0.004e-3)


class StepFit:
    """y ≈ weights · x."""

    def __init__(self, prior: Sequence[float], spread: Sequence[float]) -> None:
        self.weights: list[float] = list(prior)
        self.num_steps = 0
        self.num_since_start = 0  # steps since learning last started
        self._scale = sum(prior)
        self._mean = np.array(prior)
        self._variance = np.array(spread) ** 2
        self._surprises = {False: 0, True: 0}  # above zero if too slow, below if too fast
        self._start()

    def scale(self, factor: float) -> None:
        """All weights are so much larger than thought."""
        self._scale *= factor
        self._variance *= factor**2
        self._mean *= factor
        self.weights = self._mean.tolist()
        self._start()

    def predict(self, x: Sequence[float]) -> float:
        """Seconds that a step of these features takes."""
        return sum(weight * feature for weight, feature in zip(self.weights, x, strict=True))

    def learn(self, x: Sequence[float], y: float, *, is_special: bool = False) -> None:
        """A step of these features took `y` seconds.

        Special steps are those that may all be slower than thought while the others are not.
        """
        self.num_steps += 1
        self.num_since_start += 1
        predicted = max(self.predict(x), _LEAST * y)
        if self.num_steps == 1:
            self.scale(y / predicted)
            return
        error = y / predicted - 1
        if self._is_change(error, is_special=is_special):
            self._start()
        is_young = self.num_since_start <= _YOUNG
        fastest, slowest = _YOUNG_ERRORS if is_young else _ERRORS
        error = min(max(error, fastest), slowest)
        self._correct(np.array(x) / predicted, error, _NOISE)
        if (np.diagonal(self._covariance) < self._variance).all():
            self._covariance /= _MEMORY
        self.weights = self._mean.tolist()

    def lean(self, index: int) -> None:
        """A weight is rather nothing than something that others explain as well."""
        feature = np.zeros(len(self._mean))
        feature[index] = 1 / self._scale
        self._correct(feature, -float(self._mean[index]) / self._scale, _LEANING)

    def _correct(self, features: np.ndarray, error: float, noise: float) -> None:
        spread = self._covariance @ features
        gain = spread / (noise**2 + float(features @ spread))
        self._mean = self._mean + gain * error
        self._covariance -= np.outer(gain, spread)

    def _is_change(self, error: float, *, is_special: bool) -> bool:
        count = self._surprises[is_special]
        if _ERRORS[0] <= error <= _ERRORS[1]:
            count = 0
        else:
            count = max(count, 0) + 1 if error > 0 else min(count, 0) - 1
        self._surprises[is_special] = count
        return abs(count) >= _SURPRISES

    def _start(self) -> None:
        """Believes little of what it knows."""
        self._surprises = {False: 0, True: 0}
        self.num_since_start = 0
        self._covariance = np.diag(np.maximum(self._variance, self._mean**2))


class StepCost:
    """What the parts of a step cost, in seconds."""

    def __init__(self) -> None:
        self.target = StepFit(_TARGET, _TARGET_SPREAD)
        self.draft = StepFit(_DRAFT, _DRAFT_SPREAD)

    @property
    def is_known(self) -> bool:
        """Whether a step has been timed."""
        return self.target.num_steps > 0

    def plain_s(self, num_rows: int, read: float) -> float:
        """A step in which nothing is drafted."""
        return self.target.predict((1.0, num_rows, read, 0.0, 0.0))

    @property
    def verifying_s(self) -> float:
        """What is added when any row has drafted tokens, however few.

        It and the price of a token were learned together and are right together: it may be below
        zero, but never so much that a token would cost nothing.
        """
        return max(self.target.weights[3], -max(self.target.weights[4], 0.0))

    def drafted_s(self, context: float) -> float:
        """One more drafted token behind `context` thousands of tokens, to be verified."""
        seconds = self.target.weights[4] + self.target.weights[2] * context
        return max(seconds, _CHEAPEST * self.target.weights[0])

    @property
    def draft_start_s(self) -> float:
        """What the passes of the draft model in one step cost, however few."""
        return max(self.draft.weights[0], 0.0)

    @property
    def draft_pass_s(self) -> float:
        """One more pass of the draft model."""
        return max(self.draft.weights[1], 0.0)

    @property
    def draft_token_s(self) -> float:
        """One more token in such a pass."""
        return max(self.draft.weights[2], 0.0)

    def learn_target(self, x: Sequence[float], seconds: float) -> None:
        """A step of the target, by its features."""
        if not self.is_known and self.draft.num_steps == 0:
            self.draft.scale(seconds / self.target.predict(x))
        is_special = x[3] > 0
        self.target.learn(x, seconds, is_special=is_special)
        if is_special:
            self.target.lean(3)

    def learn_draft(self, num_passes: int, num_tokens: int, seconds: float) -> None:
        """The draft model's part of a step."""
        self.draft.learn((1.0, num_passes, num_tokens), seconds)
