"""Predicts the time of a decode step, from the times of earlier steps.

    target_s = [1, rows, read, verifies, drafted] · weights     drafted: tokens verified beyond one
                                                                a row; verifies: 1 if there are any
    draft_s  = [1, passes, tokens] · weights                    passes and tokens of the draft model

`target_s` is the time since the end of the last step. It includes planning, but excludes the draft
model. `read` is the number of context tokens that attention reads, in thousands, summed over the
computed tokens. Each formula is fitted by recursive least squares, in which old steps weigh less
and less. Errors are relative, since times span decades. A large error is clipped: an interrupted
step does not predict the next one. But many large errors in a row mean that the machine's speed has
changed. If these are errors of steps without drafts, all weights are scaled. If these are errors of
steps with drafts, learning restarts from the latest step.

The cost of one more token depends on the size of the batch. The cost is low if reading the model's
weights takes most of the time, and high if computing does. So each power of two of the batch size
has its own costs.

Before the first step, the weights fit a small model on a CPU. Only their proportions matter: the
first timed step scales them.

`TimeCredit` limits the cost of drafting that does not pay. Each of these purposes may use a small
share of all time:

    looks         searches that find no draft worth its cost, and drafts that lose time. Time that
                  drafts gain is credited, so each step has a look while drafts pay
    trials        drafts that are not expected to pay
    catching up   passes in which the draft model computes tokens that it skipped

So speculation never costs more than the sum of these shares plus the saved credit, even if all its
estimates are wrong.
"""

import copy
from collections.abc import Sequence
from operator import mul

_NOISE = 0.05  # relative error of a step's measured time
_MEMORY = 0.99  # factor by which each new step reduces the weight of older steps
_ERRORS = (-0.3, 0.3)  # bounds to which an error is clipped, as shares of the prediction
# number of clipped errors in a row, in steps of one kind, after which learning restarts
_SURPRISES = 4
# number of steps after a restart with wider bounds, and these bounds
_YOUNG, _YOUNG_ERRORS = 6, (-0.8, 0.5)
_LEAST = 0.1  # lowest prediction, as a share of the measured time
_LEANING = 0.3  # prior standard deviation of a weight around zero, as a share of a step

_PACE_RATE = 0.25  # weight of the latest step without drafts in the average pace

# weight of the latest step in the trust, for at least this number of rows; lower for fewer
_TRUST_RATE, _TRUST_ROWS = 0.2, 16
_LEAST_SHARE = 0.5  # lowest share of the expected gain that one step can contribute
_HOPE = 0.05  # part of the missing trust that each choice without drafts restores

_CHEAPEST = 1e-3  # lowest cost of a drafted token, as a share of the fixed cost of a step

# Initial weights in seconds, and the likely error of each weight.
_TARGET = (0.9e-3, 0.02e-3, 0.005e-3, 0.02e-3, 0.03e-3)
_TARGET_SPREAD = (0.5e-3, 0.02e-3, 0.01e-3, 0.5e-3, 0.05e-3)
_DRAFT = (0.03e-3, 0.1e-3, 0.002e-3)
_DRAFT_SPREAD = (0.1e-3, 0.1e-3, 0.004e-3)


class StepFit:
    """Fits the weights of y ≈ weights · x to measured steps.

    The code is plain Python: the vectors are short, and calls of a library would cost a tenth of a
    step's time.
    """

    def __init__(self, prior: Sequence[float], spread: Sequence[float]) -> None:
        self.weights: list[float] = list(prior)
        self.num_steps = 0
        self.num_since_start = 0  # number of steps since learning last restarted
        self._scale = sum(prior)
        self._variance = [x**2 for x in spread]
        # clipped errors in a row, by `is_special`: positive if too slow, negative if too fast
        self._surprises = {False: 0, True: 0}
        self._covariance: list[list[float]] = []
        self.restart()

    def scale(self, factor: float) -> None:
        """Multiplies all weights by `factor`."""
        self._scale *= factor
        self._variance = [x * factor**2 for x in self._variance]
        self.weights = [x * factor for x in self.weights]
        self.restart()

    def scale_learned(self, factor: float) -> None:
        """Multiplies all weights by `factor`, and keeps their learned proportions."""
        covariance = [[value * factor**2 for value in row] for row in self._covariance]
        num_since_start = self.num_since_start
        self.scale(factor)
        self._covariance, self.num_since_start = covariance, num_since_start

    def predict(self, x: Sequence[float]) -> float:
        """Returns the predicted seconds of a step with these features."""
        return _dot(self.weights, x)

    def learn(self, x: Sequence[float], y: float, *, is_special: bool = False) -> float:
        """Learns that a step with these features took `y` seconds.

        Returns the factor by which all weights were scaled, or 1. Only steps that are not special
        can show that the whole machine has become slower or faster.
        """
        self.num_steps += 1
        self.num_since_start += 1
        predicted = max(self.predict(x), _LEAST * y)
        if self.num_steps == 1:
            self.scale(y / predicted)
            return y / predicted
        error = y / predicted - 1
        if self._is_change(error, is_special=is_special):
            if not is_special and self.num_since_start > _YOUNG:
                self.scale_learned(y / predicted)
                return y / predicted
            self.restart()
        is_young = self.num_since_start <= _YOUNG
        fastest, slowest = _YOUNG_ERRORS if is_young else _ERRORS
        error = min(max(error, fastest), slowest)
        self._correct([feature / predicted for feature in x], error, _NOISE)
        covariance = self._covariance
        if all(covariance[i][i] < variance for i, variance in enumerate(self._variance)):
            self._covariance = [[value / _MEMORY for value in row] for row in covariance]
        return 1.0

    def shrink(self, index: int) -> None:
        """Moves a weight towards zero, as far as other weights can explain the same times."""
        features = [0.0] * len(self.weights)
        features[index] = 1 / self._scale
        self._correct(features, -self.weights[index] / self._scale, _LEANING)

    def _correct(self, features: Sequence[float], error: float, noise: float) -> None:
        spread = [_dot(row, features) for row in self._covariance]
        size = noise**2 + _dot(features, spread)
        gain = [x / size for x in spread]
        for i, g in enumerate(gain):
            self.weights[i] += g * error
            row = self._covariance[i]
            for j, s in enumerate(spread):
                row[j] -= g * s

    def _is_change(self, error: float, *, is_special: bool) -> bool:
        count = self._surprises[is_special]
        if _ERRORS[0] <= error <= _ERRORS[1]:
            count = 0
        else:
            count = max(count, 0) + 1 if error > 0 else min(count, 0) - 1
        self._surprises[is_special] = count
        return abs(count) >= _SURPRISES

    def restart(self) -> None:
        """Restarts learning, with large uncertainty."""
        self._surprises = {False: 0, True: 0}
        self.num_since_start = 0
        variances = [max(v, w**2) for v, w in zip(self._variance, self.weights, strict=True)]
        self._covariance = [
            [variance if i == j else 0.0 for j in range(len(variances))]
            for i, variance in enumerate(variances)
        ]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return float(sum(map(mul, a, b)))


class StepCost:
    """The predicted costs of the parts of a step, in seconds."""

    def __init__(self) -> None:
        self.target = StepFit(_TARGET, _TARGET_SPREAD)
        self.draft = StepFit(_DRAFT, _DRAFT_SPREAD)
        self.between_s = 0.0  # average time between two recent steps without a look, seconds
        self.trust = 1.0  # measured gain of steps with drafts, as a share of the expected gain
        self._pace = 1.0  # time of recent plain steps, as a share of their prediction

    def begun_anew(self) -> "StepCost":
        """Returns a copy with large uncertainty, as the first guess for another batch size."""
        other = copy.deepcopy(self)
        other.target.restart()
        other.draft.restart()
        return other

    @property
    def is_known(self) -> bool:
        """True once a step has been timed."""
        return self.target.num_steps > 0

    def plain_s(self, num_rows: int, read: float) -> float:
        """Returns the predicted time of a step without drafts."""
        return self.target.predict((1.0, num_rows, read, 0.0, 0.0))

    @property
    def verifying_s(self) -> float:
        """The fixed extra cost of a step in which at least one row has drafted tokens.

        The fixed cost and the cost per token are fitted together, so only their sum is reliable.
        The fixed cost may be negative, but its sum with the first token's cost never is.
        """
        return max(self.target.weights[3], -max(self.target.weights[4], 0.0))

    def drafted_s(self, context: float) -> float:
        """Returns the cost of verifying one more token after `context` thousands of context
        tokens.
        """
        token_s, read_s, least_s = self.drafted_prices
        return max(token_s + read_s * context, least_s)

    @property
    def drafted_prices(self) -> tuple[float, float, float]:
        """The parts of `drafted_s`: cost per token, per thousand context tokens, and minimum."""
        base_s, _, read_s, _, token_s = self.target.weights
        return token_s, read_s, _CHEAPEST * base_s

    @property
    def draft_start_s(self) -> float:
        """The fixed cost of a step in which the draft model computes."""
        return max(self.draft.weights[0], 0.0)

    @property
    def draft_pass_s(self) -> float:
        """The cost of one more pass of the draft model."""
        return max(self.draft.weights[1], 0.0)

    @property
    def draft_token_s(self) -> float:
        """The cost of one more token in a pass of the draft model."""
        return max(self.draft.weights[2], 0.0)

    def learn_target(self, x: Sequence[float], seconds: float) -> None:
        """Learns from the time of a step, without the draft model's part."""
        is_first, is_special = not self.is_known, x[3] > 0
        factor = self.target.learn(x, seconds, is_special=is_special)
        if factor != 1.0:
            (self.draft.scale if is_first else self.draft.scale_learned)(factor)
            self._pace = 1.0
        if is_special:
            self.target.shrink(3)

    def recent_plain_s(self, num_rows: int, read: float) -> float:
        """Returns the predicted time of a step without drafts, scaled to the latest such steps.

        The fitted prediction is an average over many steps, so it follows changes of the machine's
        speed late.
        """
        return self._pace * self.plain_s(num_rows, read)

    def see_plain(self, num_rows: int, read: float, seconds: float) -> None:
        """Records the time of a step without drafts. The time excludes looks for drafts.

        A large difference is clipped, like a large error of a prediction.
        """
        change = seconds / self.recent_plain_s(num_rows, read) - 1
        self._pace *= 1 + _PACE_RATE * min(max(change, _ERRORS[0]), _ERRORS[1])

    def learn_trust(self, share: float, num_rows: int) -> None:
        """Learns the trust from a step with drafts, which reached this share of its expected
        gain.
        """
        rate = _TRUST_RATE * min(num_rows / _TRUST_ROWS, 1.0)
        self.trust += rate * (max(share, _LEAST_SHARE) - self.trust)

    def hope(self) -> None:
        """Raises the trust a little after a choice without drafts, since such a step measures no
        gain.
        """
        self.trust += _HOPE * (1.0 - self.trust)

    def learn_draft(self, num_passes: int, num_tokens: int, seconds: float) -> None:
        """Learns from the time of the draft model's part of a step."""
        self.draft.learn((1.0, num_passes, num_tokens), seconds)


# largest share of all time for each purpose
SHARES = {"looks": 0.01, "trials": 0.002, "catching up": 0.003}
# largest credit, in durations of a step
_CREDIT_STEPS = {"looks": 4, "trials": 6, "catching up": 4}
_EARN_EVERY = 16  # number of steps whose time is credited at once
_NEARLY = 0.9


class TimeCredit:
    """The credit in seconds for each purpose in `SHARES`. Steps add credit; spending reduces it."""

    def __init__(self) -> None:
        self._credit_s = dict.fromkeys(SHARES, 0.0)
        self._step_s: float | None = None  # average time of recent steps, seconds
        # seconds and number of steps that are not credited yet
        self._earned_s, self._num_earned = 0.0, 0

    def earn(self, seconds: float, num_steps: int = 1) -> None:
        """Adds the credit for `num_steps` steps that took `seconds` together."""
        if self._step_s is None:
            self._step_s = seconds / num_steps
            # A start credit, so that the first full blocks and the first looks need not wait.
            for purpose in ("looks", "catching up"):
                self._credit_s[purpose] = self._most_s(purpose)
        self._earned_s += min(seconds, 2 * self._step_s * num_steps)
        self._num_earned += num_steps
        if self._num_earned < _EARN_EVERY:
            return
        self._step_s += 0.5 * (self._earned_s / self._num_earned - self._step_s)
        for purpose, share in SHARES.items():
            self.add(purpose, share * self._earned_s)
        self._earned_s, self._num_earned = 0.0, 0

    def of(self, purpose: str) -> float:
        """Returns the number of seconds that may be spent on a purpose."""
        return self._credit_s[purpose]

    def is_nearly_full(self, purpose: str) -> bool:
        """Returns True if waiting would add little to the credit for a purpose."""
        return self._credit_s[purpose] > _NEARLY * self._most_s(purpose)

    def add(self, purpose: str, seconds: float) -> None:
        """Adds seconds that were gained or not spent. Negative seconds reduce the credit."""
        self._credit_s[purpose] = min(self._credit_s[purpose] + seconds, self._most_s(purpose))

    def spend(self, purpose: str, seconds: float) -> bool:
        """Subtracts seconds from the credit. Without credit, returns False and subtracts
        nothing.
        """
        if self._credit_s[purpose] < seconds:
            return False
        self._credit_s[purpose] -= seconds
        return True

    def _most_s(self, purpose: str) -> float:
        return _CREDIT_STEPS[purpose] * (self._step_s or 0.0)
