"""Chooses the lengths of drafts that maximise the batch's tokens per second.

Tokens per second are the expected tokens of a step, from the acceptance so far, divided by the
predicted time of the step. Drafting a token pays if its probability of being kept, divided by its
cost in seconds, exceeds the batch's rate without the token. The rate depends on the chosen drafts,
so a few rounds find the best rate (Dinkelbach's method for a ratio). Sequences share passes of the
draft model, so each number of passes is tried. In a full batch, each further token is expensive, so
often no draft pays.

Sources: Dinkelbach, 1967; expected tokens of a draft, Leviathan et al., ICML 2023; goodput of a
batch as the aim, Liu et al., SmartSpec, 2024.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from decode.acceptance import DRAFT, NGRAMS, Acceptance, Proposer
from decode.stepcost import StepCost
from engine.messages import SeqId

# largest number of unseen tokens with which the draft model still catches up
MAX_UNSEEN_TOKENS = 1024
THOUSAND = 1000.0
_LASTING = 128  # number of steps over which the cost of catching up is spread
_LEAST_GAIN = 1.04  # a draft must raise the rate without drafts by this factor
_ROUNDS = 3


class Candidate(msgspec.Struct, frozen=True):
    """A sequence of the next step, for which a draft may be chosen."""

    seq_id: SeqId
    context_len: int
    max_tokens: int  # largest number of tokens to draft
    match_len: int = 0  # length of the matching n-gram; 0 without a match
    num_unseen: int = 0  # number of tokens that the draft model must compute before it can propose


class Proposal(msgspec.Struct, frozen=True):
    """The draft that was chosen for a sequence."""

    proposer: Proposer
    num_tokens: int
    match_len: int = 0  # length of the matching n-gram; 0 without a match


@dataclass(slots=True)
class DraftOption:
    """A possible draft for one candidate."""

    index: int  # index of the candidate in the list of candidates
    proposer: Proposer
    share: float  # probability that the target keeps each token
    token_s: float  # cost of each drafted token, seconds
    max_tokens: int
    first_s: float = 0.0  # cost before the first drafted token, seconds
    match_len: int = 0

    def num_worth(self, rate: float, max_tokens: int) -> int:
        """Returns the number of drafted tokens that each add more tokens per second than `rate`."""
        least = rate * self.token_s
        num, kept = 0, self.share
        while num < max_tokens and kept > least:
            num += 1
            kept *= self.share
        return num

    def expected(self, num_tokens: int) -> float:
        """Returns the expected number of kept tokens if `num_tokens` are drafted."""
        return self.share * (1 - self.share**num_tokens) / (1 - self.share)

    def surplus(self, rate: float, shared_s: float = 0.0) -> float:
        """Returns the expected tokens, minus the tokens that `rate` yields in the time of the
        draft.
        """
        if self.share <= rate * (self.token_s + shared_s):
            return 0.0
        num = self.num_worth(rate, self.max_tokens)
        seconds = self.first_s / _LASTING + num * (self.token_s + shared_s)
        return self.expected(num) - rate * seconds


class DraftChooser:
    """Chooses proposers and lengths of drafts, from acceptance and costs measured so far."""

    def __init__(
        self, acceptance: Acceptance, *, uses_ngrams: bool, uses_draft_model: bool
    ) -> None:
        # predicted rate of the latest choice as a multiple of the rate without drafts; 0: no drafts
        self.expected_gain = 0.0
        self._acceptance = acceptance
        self._uses_ngrams = uses_ngrams
        self._uses_draft_model = uses_draft_model

    def choose(
        self, candidates: Sequence[Candidate], cost: StepCost, num_rows: int, read: float
    ) -> list[Proposal | None]:
        """Returns the best proposal for each of the `candidates`, in a step of `num_rows` rows."""
        proposals: list[Proposal | None] = [None] * len(candidates)
        base_s = cost.plain_s(num_rows, read)
        rate = num_rows / base_s
        options = [
            option
            for i in self._hopeful(candidates, cost, rate, num_rows)
            if (option := self._best_option(i, candidates[i], cost, rate, num_rows)) is not None
        ]
        self.expected_gain = 0.0
        if options:
            self.expected_gain = _allocate(options, cost, num_rows, base_s, proposals)
        return proposals

    def weighs_draft_model(self, cost: StepCost, num_rows: int, read: float) -> bool:
        """Returns False if drafts of the draft model cannot pay for any sequence."""
        token_s, _, least_s = cost.drafted_prices
        drafted_s = max(token_s, least_s) + cost.draft_token_s + cost.draft_pass_s / num_rows
        return self._acceptance.highest(DRAFT) > num_rows / cost.plain_s(num_rows, read) * drafted_s

    def _hopeful(
        self, candidates: Sequence[Candidate], cost: StepCost, rate: float, num_rows: int
    ) -> list[int]:
        """Returns the indices of the candidates for which a first drafted token may pay at this
        rate.

        Most steps have few such candidates, so this function is written to be fast.
        """
        token_s, read_s, least_s = cost.drafted_prices
        draft_s = cost.draft_token_s + cost.draft_pass_s / num_rows
        share_of = self._acceptance.of
        hopeful = []
        for i, candidate in enumerate(candidates):
            drafted_s = max(token_s + read_s * (candidate.context_len / THOUSAND), least_s)
            seq_id, length = candidate.seq_id, candidate.match_len
            if (
                length and self._uses_ngrams and share_of(seq_id, NGRAMS[length]) > rate * drafted_s
            ) or (
                self._uses_draft_model and share_of(seq_id, DRAFT) > rate * (drafted_s + draft_s)
            ):
                hopeful.append(i)
        return hopeful

    def options(
        self, index: int, candidate: Candidate, cost: StepCost, rate: float = 0.0
    ) -> list[DraftOption]:
        """Returns the possible drafts for a candidate, except drafts that do not pay at this
        rate.
        """
        found = (self.option(index, candidate, way, cost, rate) for way in Proposer)
        return [option for option in found if option is not None]

    def option(
        self, index: int, candidate: Candidate, way: Proposer, cost: StepCost, rate: float = 0.0
    ) -> DraftOption | None:
        """Returns a candidate's draft by this proposer; None if no draft is possible or none
        pays.
        """
        seq_id, max_tokens = candidate.seq_id, candidate.max_tokens
        length = candidate.match_len if way is Proposer.NGRAM else 0
        if way is Proposer.NGRAM:
            if not (self._uses_ngrams and length):
                return None
        elif not self._uses_draft_model or candidate.num_unseen > MAX_UNSEEN_TOKENS:
            return None
        token_s = cost.drafted_s(candidate.context_len / THOUSAND)
        first_s = 0.0
        if way is Proposer.DRAFT:
            first_s = cost.draft_token_s * candidate.num_unseen
            token_s += cost.draft_token_s
        share = self._acceptance.of(seq_id, NGRAMS[length] if length else DRAFT)
        if max_tokens <= 0 or share <= rate * token_s:
            return None
        return DraftOption(index, way, share, token_s, max_tokens, first_s, length)

    def _best_option(
        self, index: int, candidate: Candidate, cost: StepCost, rate: float, num_rows: int
    ) -> DraftOption | None:
        """Returns the draft that pays best at this rate, if all rows share the draft model's
        passes.
        """
        best, best_surplus = None, 0.0
        for option in self.options(index, candidate, cost, rate):
            is_draft = option.proposer is Proposer.DRAFT
            shared_s = cost.draft_pass_s / num_rows if is_draft else 0.0
            surplus = option.surplus(rate, shared_s)
            if surplus > best_surplus:
                best, best_surplus = option, surplus
        return best


def _allocate(
    options: list[DraftOption],
    cost: StepCost,
    num_rows: int,
    base_s: float,
    proposals: list[Proposal | None],
) -> float:
    """Chooses the lengths of all drafts, and puts them into `proposals` if the drafts together pay.

    Returns the expected tokens per second, divided by the rate without drafts; 0 if they do not
    pay.
    """
    plain = rate = num_rows / base_s
    lookups = [o for o in options if o.proposer is Proposer.NGRAM]
    drafts = [o for o in options if o.proposer is Proposer.DRAFT]
    lengths: list[tuple[DraftOption, int]] = []
    for _ in range(_ROUNDS):
        tokens, seconds = float(num_rows), base_s + cost.verifying_s
        round_lengths = [(o, o.num_worth(rate, o.max_tokens)) for o in lookups]
        for option, num in round_lengths:
            tokens += option.expected(num)
            seconds += num * option.token_s
        deep, tokens, seconds = _draft_lengths(drafts, cost, rate, tokens, seconds)
        if tokens / seconds <= rate:
            break
        rate, lengths = tokens / seconds, round_lengths + deep
    if rate * min(cost.trust, 1.0) <= plain * _LEAST_GAIN:
        return 0.0
    for option, num in lengths:
        if num > 0:
            proposals[option.index] = Proposal(option.proposer, num, option.match_len)
    return rate / plain


def _draft_lengths(
    drafts: list[DraftOption], cost: StepCost, rate: float, tokens: float, seconds: float
) -> tuple[list[tuple[DraftOption, int]], float, float]:
    """Returns the draft lengths for the best number of passes, and the step's tokens and time.

    `tokens` and `seconds` are the tokens and the time of the step without the draft model.
    """
    worth = [(o, num) for o in drafts if (num := o.num_worth(rate, o.max_tokens)) > 0]
    best_depth, best_tokens, best_s = 0, tokens, seconds
    seconds += sum(option.first_s for option, _ in worth) / _LASTING
    seconds += cost.draft_start_s if worth else 0.0
    for depth in range(1, max((num for _, num in worth), default=0) + 1):
        seconds += cost.draft_pass_s
        for option, num in worth:
            if num >= depth:
                tokens += option.share**depth
                seconds += option.token_s
        if tokens * best_s > best_tokens * seconds:
            best_depth, best_tokens, best_s = depth, tokens, seconds
    lengths = [(option, min(num, best_depth)) for option, num in worth]
    return lengths, best_tokens, best_s
