"""Predicts the time of a decode step, from the times of earlier steps.

    target_s = [1, rows, read, verifies, drafted] · weights     drafted: tokens verified beyond one
                                                                a row; verifies: 1 if there are any
    draft_s  = [1, passes, tokens] · weights                    of the draft model

`target_s` is the time since the end of the last step. It includes planning, but not the draft
model. `read` is the number of context tokens that attention reads, in thousands, summed over the
computed tokens. Each formula is fitted by recursive least squares, in which old steps weigh less
and less. Errors are relative, since times span decades. A large error is clipped: an interrupted
step does not predict the next one. But many large errors in a row mean that the machine's speed has
changed. If these are errors of steps without drafts, all weights are scaled. If these are errors of
steps with drafts, learning restarts from the latest step.

The cost of one more token depends on the size of the batch. It is low while reading the model's
weights takes most of the time, and high when computing does. So each power of two of the batch
size has its own costs.

Before the first step, the weights fit a small model on a CPU. Only their proportions
matter: the first timed step scales them.

`TimeCredit` limits the cost of drafting that does not pay to a small share of all time for each
purpose:

    looks         searches that find no draft worth its cost, and drafts that lose time. Time that
                  drafts gain is credited, so each step has a look while drafts pay
    trials        drafts that are not expected to pay
    catching up   passes in which the draft model computes tokens that it left out

So speculation never costs more than the sum of these shares plus the saved credit, even if all its
estimates are wrong.
"""

import copy
from collections.abc import Sequence
from operator import mul

_NOISE = 0.05  # share of a step's time
_MEMORY = 0.99  # factor by which each new step reduces the weight of older steps
_ERRORS = (-0.3, 0.3)  # bounds of an error, as shares of the prediction
_SURPRISES = 4  # clipped errors in a row, among steps of one kind, until learning restarts
_YOUNG, _YOUNG_ERRORS = 6, (-0.8, 0.5)  # steps after a restart, and their wider bounds
_LEAST = 0.1  # lowest prediction, as a share of the step's time
_LEANING = 0.3  # likely distance of a weight from zero, as a share of a step

_PACE_RATE = 0.25  # weight of the latest step without drafts

_TRUST_RATE, _TRUST_ROWS = 0.2, 16  # weight of the latest step; less if it has fewer rows
_LEAST_SHARE = 0.5  # lowest measured share that one step can contribute
_HOPE = 0.05  # share of the missing trust that is regained at each choice without drafts

_CHEAPEST = 1e-3  # lowest cost of a drafted token, as a share of a step

# Initial weights in seconds, and the likely error of each.
_TARGET = (0.9e-3, 0.02e-3, 0.005e-3, 0.02e-3, 0.03e-3)
_TARGET_SPREAD = (0.5e-3, 0.02e-3, 0.01e-3, 0.5e-3, 0.05e-3)
_DRAFT = (0.03e-3, 0.1e-3, 0.002e-3)
_DRAFT_SPREAD = (0.1e-3, 0.1e-3, 0.004e-3)


class StepFit:
    """y ≈ weights · x.

    The code is plain Python: the vectors are short, and calls of a library would cost a tenth of
    a step's time.
    """

    def __init__(self, prior: Sequence[float], spread: Sequence[float]) -> None:
        self.weights: list[float] = list(prior)
        self.num_steps = 0
        self.num_since_start = 0  # steps since the last restart of learning
        self._scale = sum(prior)
        self._variance = [x**2 for x in spread]
        self._surprises = {False: 0, True: 0}  # by `is_special`: > 0 if too slow, < 0 if too fast
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

        Returns the factor by which all weights were scaled, else 1. Only steps that are not
        special can show that the whole machine became slower or faster.
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
        """Pulls a weight towards zero, if other weights can explain the same times."""
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
    """The costs of a step's parts, in seconds."""

    def __init__(self) -> None:
        self.target = StepFit(_TARGET, _TARGET_SPREAD)
        self.draft = StepFit(_DRAFT, _DRAFT_SPREAD)
        self.between_s = 0.0  # recent time between two steps without a look
        self.trust = 1.0  # measured gain of steps with drafts, as a share of the expected gain
        self._pace = 1.0  # time of recent plain steps, as a share of their prediction

    def begun_anew(self) -> "StepCost":
        """Returns a copy with large uncertainty: the first guess for another batch size."""
        other = copy.deepcopy(self)
        other.target.restart()
        other.draft.restart()
        return other

    @property
    def is_known(self) -> bool:
        """True if a step has been timed."""
        return self.target.num_steps > 0

    def plain_s(self, num_rows: int, read: float) -> float:
        """Returns the time of a step in which nothing is drafted."""
        return self.target.predict((1.0, num_rows, read, 0.0, 0.0))

    @property
    def verifying_s(self) -> float:
        """The fixed extra cost of a step in which at least one row has drafted tokens.

        This cost and the cost per token are fitted together, so only their sum is reliable. This
        one may be negative, but the first token always has a positive cost.
        """
        return max(self.target.weights[3], -max(self.target.weights[4], 0.0))

    def drafted_s(self, context: float) -> float:
        """Returns the cost to verify one more token behind `context` thousands of tokens."""
        token_s, read_s, least_s = self.drafted_prices
        return max(token_s + read_s * context, least_s)

    @property
    def drafted_prices(self) -> tuple[float, float, float]:
        """The parts of `drafted_s`: cost per token, per thousand context tokens, and minimum."""
        base_s, _, read_s, _, token_s = self.target.weights
        return token_s, read_s, _CHEAPEST * base_s

    @property
    def draft_start_s(self) -> float:
        """The fixed cost of the draft model's passes in one step."""
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
        """Learns the time of a step without the draft model's part."""
        is_first, is_special = not self.is_known, x[3] > 0
        factor = self.target.learn(x, seconds, is_special=is_special)
        if factor != 1.0:
            (self.draft.scale if is_first else self.draft.scale_learned)(factor)
            self._pace = 1.0
        if is_special:
            self.target.shrink(3)

    def recent_plain_s(self, num_rows: int, read: float) -> float:
        """Returns the time of a plain step, scaled to the latest plain steps.

        A fitted prediction averages over many steps, so it lags when the machine's speed changes.
        """
        return self._pace * self.plain_s(num_rows, read)

    def see_plain(self, num_rows: int, read: float, seconds: float) -> None:
        """Records the time of a step without drafts, not counting looks for drafts.

        A large difference is clipped, like a large error of a prediction.
        """
        change = seconds / self.recent_plain_s(num_rows, read) - 1
        self._pace *= 1 + _PACE_RATE * min(max(change, _ERRORS[0]), _ERRORS[1])

    def learn_trust(self, share: float, num_rows: int) -> None:
        """Learns from the share of its expected gain that a step with drafts reached."""
        rate = _TRUST_RATE * min(num_rows / _TRUST_ROWS, 1.0)
        self.trust += rate * (max(share, _LEAST_SHARE) - self.trust)

    def hope(self) -> None:
        """Raises the trust a little, after a choice without drafts, which measures no gain."""
        self.trust += _HOPE * (1.0 - self.trust)

    def learn_draft(self, num_passes: int, num_tokens: int, seconds: float) -> None:
        """Learns the time of the draft model's part of a step."""
        self.draft.learn((1.0, num_passes, num_tokens), seconds)


SHARES = {"looks": 0.01, "trials": 0.002, "catching up": 0.003}  # share of all time
_CREDIT_STEPS = {"looks": 4, "trials": 6, "catching up": 4}  # maximum credit, in times of a step
_EARN_EVERY = 16  # steps whose time is credited together
_NEARLY = 0.9


class TimeCredit:
    """Credit in seconds for each purpose in `SHARES`. Steps add credit; spending subtracts it."""

    def __init__(self) -> None:
        self._credit_s = dict.fromkeys(SHARES, 0.0)
        self._step_s: float | None = None  # average time of recent steps
        self._earned_s, self._num_earned = 0.0, 0  # seconds and steps not credited yet

    def earn(self, seconds: float, num_steps: int = 1) -> None:
        """Adds the credit for `num_steps` steps that took `seconds`."""
        if self._step_s is None:
            self._step_s = seconds / num_steps
            # The first full blocks and the first looks need not wait for credit.
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
        """Returns the seconds that may be spent on a purpose."""
        return self._credit_s[purpose]

    def is_nearly_full(self, purpose: str) -> bool:
        """True if waiting would add little to the credit."""
        return self._credit_s[purpose] > _NEARLY * self._most_s(purpose)

    def add(self, purpose: str, seconds: float) -> None:
        """Credits seconds that were gained or not spent; negative seconds reduce the credit."""
        self._credit_s[purpose] = min(self._credit_s[purpose] + seconds, self._most_s(purpose))

    def spend(self, purpose: str, seconds: float) -> bool:
        """Subtracts seconds from the credit. Returns False, and subtracts none, without credit."""
        if self._credit_s[purpose] < seconds:
            return False
        self._credit_s[purpose] -= seconds
        return True

    def _most_s(self, purpose: str) -> float:
        return _CREDIT_STEPS[purpose] * (self._step_s or 0.0)
