"""Who drafts for which sequence, and how much, in each step.

What is made as large as possible is the tokens per second of the whole batch: the tokens to be
expected, by the acceptance seen so far, over the time that the step is thought to take, by the
steps that ran. A drafted token is worth its place if it adds more tokens for its seconds than the
batch makes without it; as that rate changes with what is drafted, it is found by a few rounds
(Dinkelbach's method for a ratio). Passes of the draft model are shared: each depth is tried.

So a full batch, where a token more in the pass costs much, or a poor draft, comes to no draft at
all. What is not drafted is not learned about, hence

    trials     a few tokens for some sequences where none is worth it, in some steps on end, since
               the first one finds caches cold; the next trial comes after twice as many steps if
               they are wrong, soon if they are kept; all may cost a small share of the time
    plain      a step without drafts now and then while there are drafts in all others, since the
    steps      gain is measured against them
    catching   the draft model's own K and V of tokens that it left out, so that full blocks can be
    up         shared: within another small share of the time

Deterministic: the same steps with the same times lead to the same choices.

Sources: Dinkelbach, 1967; expected tokens of a draft, Leviathan et al., ICML 2023; goodput of a
batch as the aim, Liu et al., SmartSpec, 2024.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec

from decode.acceptance import Acceptance, Proposer
from decode.stepcost import StepCost
from engine.config import Speculate
from engine.messages import SeqId
from engine.worker.batch import BatchPlan, BatchResult, Row

_LASTING = 32  # steps that a choice is thought to last, for what has to be made up for first
_LEAST_GAIN = 1.04  # of the rate, for drafting to be worth it
_ROUNDS = 3
_TRIED_ROWS = 8
_TRIED_TOKENS = 2  # of each of these
_TRIED_STEPS = 5  # on end
_FEWEST_STEPS, _MOST_STEPS = 8, 2048  # between two trials
_SHARES = {"trials": 0.006, "catching up": 0.01}  # of all time
_CREDIT_STEPS = {"trials": 1600, "catching up": 400}  # whose share is not lost if it is not used
_EARN_EVERY = 16  # steps whose time is shared out together
_BETWEEN_RATE = 0.1
_NEARLY = 0.9
_FIRST_PLAIN, _PLAIN_EVERY = 2, 128  # steps with drafts: at first, and later
_LEARN_EVERY = 8  # steps without; after many, more rarely
_SETTLED, _LEARN_EVERY_SETTLED = 256, 64
_ENOUGH_STEPS = 32  # to learn from, until it is enough
_LEARN_EVERY_DRAFT = 16  # steps with drafts, then
_REUSED = 7  # steps in which a choice is still good for the same sequences, then
_REST = 15  # steps for which it stays with that nothing is worth it
_THOUSAND = 1000.0
MAX_UNSEEN_TOKENS = 1024  # a sequence of which the draft model has left out more is lost to it


class Candidate(msgspec.Struct, frozen=True):
    """A sequence of the next step."""

    seq_id: SeqId
    context_len: int
    max_tokens: int  # that may be drafted
    match_len: int = 0  # of the n-gram that proposes; 0 where none does
    num_unseen: int = 0  # tokens that the draft model has to compute before it proposes


class Proposal(msgspec.Struct, frozen=True):
    """What is to be drafted for a sequence."""

    proposer: Proposer
    num_tokens: int
    match_len: int = 0  # of the n-gram


@dataclass(slots=True)
class _Option:
    """One way to draft for one candidate. `token_s` is what each token of it costs."""

    index: int
    proposer: Proposer
    share: float  # of its tokens that are likely to be kept
    token_s: float
    max_tokens: int
    first_s: float = 0.0  # what comes before the first, once
    match_len: int = 0

    def num_worth(self, rate: float, max_tokens: int) -> int:
        """How many tokens add more per second than `rate`."""
        least = rate * self.token_s
        num, kept = 0, self.share
        while num < max_tokens and kept > least:
            num += 1
            kept *= self.share
        return num

    def expected(self, num_tokens: int) -> float:
        """Tokens kept, of so many drafted."""
        return self.share * (1 - self.share**num_tokens) / (1 - self.share)

    def surplus(self, rate: float, shared_s: float = 0.0) -> float:
        """Tokens that it adds, less those that its time would bring otherwise."""
        if self.share <= rate * (self.token_s + shared_s):
            return 0.0
        num = self.num_worth(rate, self.max_tokens)
        seconds = self.first_s / _LASTING + num * (self.token_s + shared_s)
        return self.expected(num) - rate * seconds


@dataclass(slots=True)
class _Trials:
    """When a proposer that is not used is tried again."""

    interval: int = _FEWEST_STEPS
    num_idle: int = 0  # steps
    num_left: int = 0  # steps of the trial that is under way
    num_rows: int = 0  # in it

    def is_due(self) -> bool:
        self.num_idle += 1
        return self.num_idle >= self.interval

    def used(self) -> None:
        self.num_idle, self.interval, self.num_left = 0, _FEWEST_STEPS, 0

    def tried(self) -> None:
        """Until it is known how it went, as if it had failed."""
        self.num_idle, self.interval = 0, min(2 * self.interval, _MOST_STEPS)


class Speculator:
    """Owned by the thread that schedules."""

    def __init__(self, mode: Speculate, *, max_draft_tokens: int, has_draft_model: bool) -> None:
        self.max_draft_tokens = max_draft_tokens
        self.has_draft_model = has_draft_model
        self.uses_ngrams = mode in (Speculate.NGRAM, Speculate.AUTO)
        self.uses_draft_model = has_draft_model and mode in (Speculate.DRAFT, Speculate.AUTO)
        self._cost = StepCost()  # of steps with so many rows as the latest, of `_costs`
        self._costs: dict[int, StepCost] = {}
        self._acceptance = Acceptance()
        used = {Proposer.NGRAM: self.uses_ngrams, Proposer.DRAFT: self.uses_draft_model}
        self._trials = {proposer: _Trials() for proposer, is_used in used.items() if is_used}
        self._tried: set[SeqId] = set()
        self._step_s: float | None = None  # what steps have been taking
        self._between_s = 0.0  # what lately passed between two of them, where there was no break
        self._last_s: float | None = None  # when the last one ended
        self._credit_s = dict.fromkeys(_SHARES, 0.0)
        self._advanced_s = 0.0  # for catching up in the present step, as predicted
        self._earned_s, self._num_earned = 0.0, 0  # seconds and steps not shared out yet
        self._had_drafts = False  # the last step, and how many were like it
        self._num_like = 0
        self._num_since_plain = 0
        self._plain_every = _FIRST_PLAIN
        self._choice: list[Proposal | None] = []
        self._choice_key: list[tuple[SeqId, int]] = []
        self._num_reused = 0
        self._num_rest = 0  # steps for which nothing is to be weighed

    # ------------------------------------------------------------ choosing

    @property
    def is_on(self) -> bool:
        """Whether anything is ever drafted."""
        return bool(self._trials)

    def rests(self) -> bool:
        """Whether nothing is to be drafted in the next step, without weighing it again.

        That is so for some steps after nothing was worth it. Where n-grams are used each step is
        weighed: a match may come at any time.
        """
        if self._num_rest == 0 or self.uses_ngrams:
            return False
        self._num_rest -= 1
        return True

    def plan(self, candidates: Sequence[Candidate]) -> list[Proposal | None]:
        """What to draft for each of the sequences of the next step."""
        if not self._trials or not candidates:
            return [None] * len(candidates)
        self._turn_to(len(candidates))
        if self._num_since_plain >= self._plain_every and self._cost.is_known:
            self._num_since_plain = 0
            self._plain_every = min(2 * self._plain_every, _PLAIN_EVERY)
            return [None] * len(candidates)
        key = [(candidate.seq_id, candidate.match_len) for candidate in candidates]
        is_learned = self._cost.target.num_since_start >= _ENOUGH_STEPS
        if key == self._choice_key and self._num_reused < _REUSED and is_learned:
            self._num_reused += 1
        else:
            self._choice = self._choose(candidates)
            self._choice_key, self._num_reused = key, 0
        proposals = [
            proposal if proposal is None or proposal.num_tokens <= candidate.max_tokens else None
            for proposal, candidate in zip(self._choice, candidates, strict=True)
        ]
        used = {proposal.proposer for proposal in proposals if proposal is not None}
        self._num_since_plain += bool(used)
        self._try(candidates, proposals, used)
        if not any(proposals):
            self._rest()
        return proposals

    def _rest(self) -> None:
        """Stays with nothing for some steps, though not beyond the next trial.

        One that is due and cannot be paid for yet is not waited for from step to step.
        """
        waits = [trials.interval - trials.num_idle - 1 for trials in self._trials.values()]
        self._num_rest = min([_REST, *(wait for wait in waits if wait >= 0)])
        for trials in self._trials.values():
            trials.num_idle += self._num_rest

    def _choose(self, candidates: Sequence[Candidate]) -> list[Proposal | None]:
        """What is best, as far as it is known."""
        proposals: list[Proposal | None] = [None] * len(candidates)
        read = sum(c.context_len for c in candidates) / _THOUSAND
        base_s = self._cost.plain_s(len(candidates), read)
        rate = len(candidates) / base_s
        options = [
            option
            for i, candidate in enumerate(candidates)
            if (option := self._best_option(i, candidate, rate, len(candidates))) is not None
        ]
        if options:
            self._allocate(options, len(candidates), base_s, proposals)
        for candidate, proposal in zip(candidates, proposals, strict=True):
            if proposal is None:
                self._acceptance.idle(candidate.seq_id)
        return proposals

    def _options(self, index: int, candidate: Candidate, rate: float = 0.0) -> list[_Option]:
        """The ways to draft for a candidate, but for those that cannot be worth it at this rate."""
        if candidate.max_tokens <= 0:
            return []
        options = []
        cost, seq_id, max_tokens = self._cost, candidate.seq_id, candidate.max_tokens
        drafted_s = cost.drafted_s(candidate.context_len / _THOUSAND)
        if self.uses_ngrams and candidate.match_len:
            length = candidate.match_len
            share = self._acceptance.of(seq_id, (Proposer.NGRAM, length))
            if share > rate * drafted_s:
                options.append(
                    _Option(index, Proposer.NGRAM, share, drafted_s, max_tokens, match_len=length)
                )
        if self.uses_draft_model and candidate.num_unseen <= MAX_UNSEEN_TOKENS:
            share = self._acceptance.of(seq_id, (Proposer.DRAFT, 0))
            token_s = cost.draft_token_s
            first_s = token_s * candidate.num_unseen
            token_s += drafted_s
            if share > rate * token_s:
                options.append(_Option(index, Proposer.DRAFT, share, token_s, max_tokens, first_s))
        return options

    def _best_option(
        self, index: int, candidate: Candidate, rate: float, num_rows: int
    ) -> _Option | None:
        """The one that adds most at the present rate, as if all rows shared the draft's passes."""
        best, best_surplus = None, 0.0
        for option in self._options(index, candidate, rate):
            is_draft = option.proposer is Proposer.DRAFT
            shared_s = self._cost.draft_pass_s / num_rows if is_draft else 0.0
            surplus = option.surplus(rate, shared_s)
            if surplus > best_surplus:
                best, best_surplus = option, surplus
        return best

    def _allocate(
        self,
        options: list[_Option],
        num_rows: int,
        base_s: float,
        proposals: list[Proposal | None],
    ) -> None:
        """Lengths for all options at once, where together they are worth it."""
        plain = rate = num_rows / base_s
        lookups = [o for o in options if o.proposer is Proposer.NGRAM]
        drafts = [o for o in options if o.proposer is Proposer.DRAFT]
        lengths: list[tuple[_Option, int]] = []
        for _ in range(_ROUNDS):
            tokens, seconds = float(num_rows), base_s + self._cost.verifying_s
            round_lengths = [(o, o.num_worth(rate, o.max_tokens)) for o in lookups]
            for option, num in round_lengths:
                tokens += option.expected(num)
                seconds += num * option.token_s
            deep, tokens, seconds = self._draft_lengths(drafts, rate, tokens, seconds)
            if tokens / seconds <= rate:
                break
            rate, lengths = tokens / seconds, round_lengths + deep
        if rate <= plain * _LEAST_GAIN:
            return
        for option, num in lengths:
            if num > 0:
                proposals[option.index] = Proposal(option.proposer, num, option.match_len)

    def _draft_lengths(
        self, drafts: list[_Option], rate: float, tokens: float, seconds: float
    ) -> tuple[list[tuple[_Option, int]], float, float]:
        """Lengths under the best depth, and what step comes of it, from one without them."""
        worth = [(o, num) for o in drafts if (num := o.num_worth(rate, o.max_tokens)) > 0]
        best_depth, best_tokens, best_s = 0, tokens, seconds
        seconds += sum(option.first_s for option, _ in worth) / _LASTING
        seconds += self._cost.draft_start_s if worth else 0.0
        for depth in range(1, max((num for _, num in worth), default=0) + 1):
            seconds += self._cost.draft_pass_s
            for option, num in worth:
                if num >= depth:
                    tokens += option.share**depth
                    seconds += option.token_s
            if tokens * best_s > best_tokens * seconds:
                best_depth, best_tokens, best_s = depth, tokens, seconds
        lengths = [(option, min(num, best_depth)) for option, num in worth]
        return lengths, best_tokens, best_s

    # ------------------------------------------------------------ trials and catching up

    def _try(
        self,
        candidates: Sequence[Candidate],
        proposals: list[Proposal | None],
        used: set[Proposer],
    ) -> None:
        """Tries a proposer that has long been idle."""
        for proposer, trials in self._trials.items():
            if proposer in used:
                trials.used()
                continue
            if trials.num_left == 0 and not trials.is_due():
                continue
            options = [
                option
                for i, candidate in enumerate(candidates)
                if proposals[i] is None
                for option in self._options(i, candidate)
                if option.proposer is proposer
            ]
            if not options:
                continue
            options.sort(key=lambda o: (-o.match_len, o.first_s))
            options = options[:_TRIED_ROWS]
            if trials.num_left == 0:
                if not (num_rows := self._afford(options, proposer)):
                    continue
                trials.tried()
                trials.num_left, trials.num_rows = _TRIED_STEPS, num_rows
            trials.num_left -= 1
            for option in options[: trials.num_rows]:
                num_tokens = min(_TRIED_TOKENS, option.max_tokens)
                proposals[option.index] = Proposal(proposer, num_tokens, option.match_len)
                self._tried.add(candidates[option.index].seq_id)

    def _afford(self, options: list[_Option], proposer: Proposer) -> int:
        """For how many of these a trial is paid: for all, unless what there is will not grow."""
        fixed_s = self._cost.verifying_s
        if proposer is Proposer.DRAFT:
            fixed_s += self._cost.draft_start_s + _TRIED_TOKENS * self._cost.draft_pass_s
        rows_s = (_TRIED_TOKENS * o.token_s + o.first_s / _TRIED_STEPS for o in options)
        costs_s = (_TRIED_STEPS * s for s in accumulate(rows_s, initial=fixed_s))
        credit_s = self._credit_s["trials"]
        totals_s = [s for s in costs_s if s <= credit_s or not self._cost.is_known]
        is_all = len(totals_s) == len(options) + 1
        if len(totals_s) <= 1 or not (is_all or credit_s > _NEARLY * self._most_s("trials")):
            return 0
        self._spend("trials", totals_s[-1])
        return len(totals_s) - 1

    def may_catch_up(self, num_tokens: int, num_passes: int) -> bool:
        """Whether the draft model may compute so many tokens more, in so many passes more.

        If so it is counted as done.
        """
        pass_s = self._cost.draft_start_s + self._cost.draft_pass_s
        seconds = pass_s * num_passes + self._cost.draft_token_s * num_tokens
        if not self._spend("catching up", seconds):
            return False
        self._advanced_s = seconds
        return True

    def _spend(self, purpose: str, seconds: float) -> bool:
        if not self._cost.is_known:
            return True
        if self._credit_s[purpose] < seconds:
            return False
        self._credit_s[purpose] -= seconds
        return True

    # ------------------------------------------------------------ learning

    def learn(
        self, seq_id: SeqId, proposal: Proposal, *, num_drafted: int, num_accepted: int
    ) -> None:
        """What came of a proposal. One that was not even verified, for its grammar, was wrong."""
        kind = (proposal.proposer, proposal.match_len)
        self._acceptance.learn(seq_id, kind, max(num_drafted, 1), num_accepted)
        if seq_id in self._tried:
            self._tried.discard(seq_id)
            if 0 < num_drafted == num_accepted:
                self._trials[proposal.proposer].interval = _FEWEST_STEPS

    def forget(self, seq_id: SeqId) -> None:
        """A sequence is gone."""
        self._acceptance.forget(seq_id)
        self._tried.discard(seq_id)

    def observe(self, plan: BatchPlan, result: BatchResult, now_s: float) -> None:
        """How long a step took that just ended. Those that compute prompts tell little."""
        times = result.times
        if not (self._trials or self.has_draft_model):
            return
        if times is None or times.total_s <= 0 or not plan.rows:
            return
        self._earn(times.total_s)
        step_s = times.total_s + self._passed_before(times.total_s, now_s)
        advanced_s, self._advanced_s = self._advanced_s, 0.0
        self._turn_to(len(plan.rows))
        has_drafts = any(row.max_drafted for row in plan.rows)
        if advanced_s and not has_drafts:  # all that the draft model did was to catch up
            self._credit_s["catching up"] += advanced_s - times.draft_s
        for row in plan.rows:
            if row.sampling is None or len(row.token_ids) > 1:
                return
        if not self._is_telling(has_drafts=has_drafts):
            return
        drafted = sum(r.num_drafted for r in result.rows)
        self._cost.learn_target(_features(plan.rows, result, drafted), step_s - times.draft_s)
        if self._cost.target.num_since_start == 0:  # what a plain step takes is not known any more
            self._plain_every = _FIRST_PLAIN
        if times.draft_s > 0 and any(row.draft_token_ids for row in plan.rows):
            self._cost.learn_draft(*_draft_work(plan.rows), times.draft_s)

    def _turn_to(self, num_rows: int) -> None:
        """Reckons with what steps of so many rows cost."""
        size = num_rows.bit_length()
        if size not in self._costs:
            nearest = min(self._costs, key=lambda known: abs(known - size), default=None)
            self._costs[size] = StepCost() if nearest is None else self._costs[nearest].begun_anew()
        self._cost = self._costs[size]

    def _is_telling(self, *, has_drafts: bool) -> bool:
        """Whether a step is one to learn from: some after a change of kind, and every few later.

        The first step with drafts finds caches cold.
        """
        num_like, self._num_like = self._num_like, self._num_like + 1
        if has_drafts != self._had_drafts:
            self._had_drafts, self._num_like = has_drafts, 1
            return not has_drafts
        if self._cost.target.num_since_start < _ENOUGH_STEPS:
            return True
        if has_drafts:
            return num_like < _TRIED_STEPS or num_like % _LEARN_EVERY_DRAFT == 0
        return num_like % (_LEARN_EVERY if num_like < _SETTLED else _LEARN_EVERY_SETTLED) == 0

    def _earn(self, seconds: float) -> None:
        """Shares of the time are to spend, up to what a number of steps brings."""
        if self._step_s is None:
            self._step_s = seconds
            # Blocks that fill at once are not to wait.
            self._credit_s["catching up"] = self._most_s("catching up")
        self._earned_s += min(seconds, 2 * self._step_s)
        self._num_earned += 1
        if self._num_earned < _EARN_EVERY:
            return
        self._step_s += 0.5 * (self._earned_s / self._num_earned - self._step_s)
        for purpose, share in _SHARES.items():
            credit_s = self._credit_s[purpose] + share * self._earned_s
            self._credit_s[purpose] = min(credit_s, self._most_s(purpose))
        self._earned_s, self._num_earned = 0.0, 0

    def _passed_before(self, seconds: float, now_s: float) -> float:
        """What passed since the last step before one that took so long and just ended.

        Planning is part of it, and drafts make that longer. If it is more than the step itself
        there was nothing to do for a while: then it is what passed lately.
        """
        last_s, self._last_s = self._last_s, now_s
        if last_s is not None and 0 <= (before_s := now_s - last_s - seconds) < seconds:
            self._between_s += _BETWEEN_RATE * (before_s - self._between_s)
            return before_s
        return self._between_s

    def _most_s(self, purpose: str) -> float:
        return _SHARES[purpose] * _CREDIT_STEPS[purpose] * (self._step_s or 0.0)


def _features(rows: Sequence[Row], result: BatchResult, drafted: int) -> tuple[float, ...]:
    """Of `StepCost.target`."""
    read = sum(
        row.end * (1 + outcome.num_drafted) for row, outcome in zip(rows, result.rows, strict=True)
    )
    return (1.0, len(rows), read / _THOUSAND, float(drafted > 0), drafted)


def _draft_work(rows: Sequence[Row]) -> tuple[int, int]:
    """Passes and tokens of the draft model. The first pass is there for catching up alone too."""
    passes = max(max(row.num_to_draft for row in rows), 1)
    tokens = sum(len(row.draft_token_ids) + max(row.num_to_draft - 1, 0) for row in rows)
    return passes, tokens
