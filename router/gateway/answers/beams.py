"""Beam search: log-probabilities in, the next hypotheses out.

Pure: `router.gateway.answers.searching` gets the log-probabilities from workers.

1. The search begins with the empty answer. A step extends each open hypothesis by each of the
   `2 * width` likeliest tokens.
2. An extension by a token that ends answers is complete. Of the others, the `width` with the
   highest sums of log-probabilities are open in the next step.
3. The search is over when the answers have their longest length, or when no open hypothesis can
   still become one of the best.
4. Complete and open hypotheses are ranked by their sum over `length ** length_penalty`. The length
   includes the prompt, and leaves out the token that ended the answer.

Sources: vLLM's OpenAI-compatible server, which ranks in this way but always searches to the longest
length; the results are equal. Wu et al., Google's Neural Machine Translation System, 2016, §7, for
the length penalty.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.messages import Logprobs


@dataclass(frozen=True, slots=True)
class BeamRules:
    """The rules of one search. Lengths are in tokens."""

    width: int
    end_ids: frozenset[int]  # tokens that end an answer
    prompt_len: int
    max_tokens: int  # of an answer
    length_penalty: float = 1.0

    @property
    def num_extensions(self) -> int:
        """The number of likeliest tokens by which a hypothesis is extended."""
        return 2 * self.width


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A beginning of an answer, or a complete one with the token that ended it."""

    token_ids: tuple[int, ...] = ()
    scores: tuple[Logprobs, ...] = ()  # of each token
    logprob: float = 0.0  # the sum
    is_complete: bool = False

    def extended(self, scores: Logprobs, rank: int, *, completes: bool) -> "Hypothesis":
        """This hypothesis and the token that has this rank, from 0, among the likeliest."""
        token_id, logprob = scores.top_ids[rank], scores.top_logprobs[rank]
        own = Logprobs(logprob, rank + 1, scores.top_ids, scores.top_logprobs)
        return Hypothesis(
            (*self.token_ids, token_id), (*self.scores, own), self.logprob + logprob, completes
        )


class BeamSearch:
    """One search. The caller gives scores to `step` until `is_over`."""

    def __init__(self, rules: BeamRules) -> None:
        self.open = [Hypothesis()]
        self._rules = rules
        self._complete: list[Hypothesis] = []  # the best ones, in order
        self._num_tokens = 0  # of each open hypothesis

    @property
    def is_over(self) -> bool:
        """True if a further step could not change the best hypotheses."""
        if not self.open or self._num_tokens >= self._rules.max_tokens:
            return True
        if len(self._complete) < self._rules.width:
            return False
        return self._rank(self._complete[-1]) >= self._most(self.open[0])

    def step(self, scores: Sequence[Logprobs]) -> None:
        """Extends the open hypotheses; `scores` are those of the next token of each, in order."""
        extensions = []
        for hypothesis, its_scores in zip(self.open, scores, strict=True):
            for rank in range(min(self._rules.num_extensions, len(its_scores.top_ids))):
                if its_scores.top_ids[rank] in self._rules.end_ids:
                    ended = hypothesis.extended(its_scores, rank, completes=True)
                    self._complete.append(ended)
                else:
                    total = hypothesis.logprob + its_scores.top_logprobs[rank]
                    extensions.append((total, hypothesis, its_scores, rank))
        extensions.sort(key=lambda extension: -extension[0])  # of equal ones the first stay first
        self.open = [
            hypothesis.extended(its_scores, rank, completes=False)
            for _, hypothesis, its_scores, rank in extensions[: self._rules.width]
        ]
        self._num_tokens += 1
        self._complete = self._ranked(self._complete)[: self._rules.width]

    def best(self, number: int) -> list[Hypothesis]:
        """The best hypotheses so far, in order; of equal ones those that were complete first."""
        return self._ranked([*self._complete, *self.open])[:number]

    def _ranked(self, hypotheses: Sequence[Hypothesis]) -> list[Hypothesis]:
        return sorted(hypotheses, key=lambda each: -self._rank(each))

    def _rank(self, hypothesis: Hypothesis) -> float:
        length = len(hypothesis.token_ids) - hypothesis.is_complete
        return self._over_length(hypothesis.logprob, length)

    def _most(self, hypothesis: Hypothesis) -> float:
        """The highest rank that a hypothesis could reach if all its further tokens were certain."""
        is_better_long = self._rules.length_penalty > 0
        return self._over_length(
            hypothesis.logprob, self._rules.max_tokens if is_better_long else self._num_tokens
        )

    def _over_length(self, logprob: float, num_tokens: int) -> float:
        return float(logprob / (self._rules.prompt_len + num_tokens) ** self._rules.length_penalty)
