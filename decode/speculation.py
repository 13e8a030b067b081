"""The speculator: plans drafts for each step and learns from the steps that ran.

`decode.choosing` says how much drafting is worth. A proposer that is not used teaches nothing about
itself, hence:

    trials        if no draft is worth it, a few tokens are drafted for some sequences, in several
                  steps on end, since the first one finds caches cold. If they are wrong, the next
                  trial comes after twice as many steps; if they are kept, soon
    trust         a choice takes the best of many estimates, so it hopes for too much. The gain of
                  steps with drafts over the latest plain steps is compared with what was expected,
                  and further choices are expected to bring as much less
    plain steps   while all steps have drafts, one without them now and then: the gain is measured
                  against it
    rests         to look for matches and to choose takes the host's time, in a large batch of a
                  small model a tenth of a step. So steps with a look are compared with steps
                  without: tokens per second, all costs included. While looks bring less than
                  they cost, steps rest from them after each that was in vain, ever longer
    catching up   the draft model computes its own K and V of tokens that it left out, so that full
                  blocks can be shared

Trials and catching up each cost a small share of the time at most (`decode.credit`).

Deterministic: the same steps with the same times lead to the same choices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

from decode.acceptance import Acceptance, Proposer
from decode.choosing import THOUSAND, Candidate, DraftChooser, DraftOption, Proposal
from decode.credit import TimeCredit
from decode.stepcost import StepCost
from engine.config import Speculate
from engine.messages import SeqId
from engine.worker.batch import BatchPlan, BatchResult, Row

_TRIED_ROWS = 8
_TRIED_TOKENS = 2  # of each tried row
_TRIED_STEPS = 5  # of one trial, on end
_FEWEST_STEPS, _MOST_STEPS = 8, 2048  # between two trials
_BETWEEN_RATE = 0.1  # weight of the latest time between two steps
_FIRST_PLAIN, _PLAIN_EVERY = 2, 32  # steps with drafts before a plain one: at first, and later
_LEARN_EVERY = 8  # steps without drafts
_SETTLED, _LEARN_EVERY_SETTLED = 256, 64  # after so many steps of a kind, learn more rarely
_ENOUGH_STEPS = 32  # learned from, before only some steps are
_UNSEEN_S = 1e-3  # of steps that are passed over, before one is not
_LEARN_EVERY_DRAFT = 16  # steps with drafts, after that
_REUSED = 7  # steps for which a choice for the same sequences is reused, after that
_REST = 15  # fewest steps without a choice after the draft model, used alone, was not worth it
_FIRST_REST = 2  # steps of a worker, to see the time of steps without a look
_VAIN_LOOKS = 8  # on end, before a step without a look although looks are worth their time
_MOST_DOUBLED = 6  # times that a rest from looks for matches doubles
_LOOKS = 0.006  # share of all time for looks in vain


@dataclass(slots=True)
class _Trials:
    """The schedule on which an unused proposer is tried again."""

    interval: int = _FEWEST_STEPS
    num_idle: int = 0  # steps
    num_left: int = 0  # steps left of the running trial
    num_rows: int = 0  # in that trial

    def is_due(self) -> bool:
        self.num_idle += 1
        return self.num_idle >= self.interval

    def used(self) -> None:
        self.num_idle, self.interval, self.num_left = 0, _FEWEST_STEPS, 0

    def tried(self) -> None:
        """Counts as a failure until the result is known."""
        self.num_idle, self.interval = 0, min(2 * self.interval, _MOST_STEPS)


class Speculator:
    """Plans drafts and learns. Owned by the thread that schedules."""

    def __init__(self, mode: Speculate, *, max_draft_tokens: int, has_draft_model: bool) -> None:
        self.max_draft_tokens = max_draft_tokens
        self.has_draft_model = has_draft_model
        self.uses_ngrams = mode in (Speculate.NGRAM, Speculate.AUTO)
        self.uses_draft_model = has_draft_model and mode in (Speculate.DRAFT, Speculate.AUTO)
        self._cost = StepCost()  # of steps as large as the latest: one of `_costs`
        self._costs: dict[int, StepCost] = {}  # by the bit length of the number of rows
        self._acceptance = Acceptance()
        self._chooser = DraftChooser(
            self._acceptance,
            uses_ngrams=self.uses_ngrams,
            uses_draft_model=self.uses_draft_model,
        )
        used = {Proposer.NGRAM: self.uses_ngrams, Proposer.DRAFT: self.uses_draft_model}
        self._trials = {proposer: _Trials() for proposer, is_used in used.items() if is_used}
        self._tried: set[SeqId] = set()
        self._credit = TimeCredit()
        self._between_s = 0.0  # recent time between two steps, breaks left out
        self._last_s: float | None = None  # when the last step ended
        self._unseen_s, self._num_unseen = 0.0, 0  # the latest steps, which were passed over
        self._advanced_s = 0.0  # predicted time of catching up in the present step
        self._had_drafts = False  # whether the last step had drafts
        self._num_like = 0  # steps on end like the last one
        self._num_since_plain = 0
        self._plain_every = _FIRST_PLAIN
        self._choice: list[Proposal | None] = []
        self._choice_key: list[tuple[SeqId, int]] = []
        self._num_reused = 0
        self._num_rest = _FIRST_REST  # steps left in which nothing is drafted
        self._num_vain = 0  # choices on end after which nothing was worth drafting
        self._has_looked = False  # for the present step
        self._is_trial = False  # whether its drafts are only a trial

    # ------------------------------------------------------------ choosing

    @property
    def is_on(self) -> bool:
        """True if anything is ever drafted."""
        return bool(self._trials)

    def rests(self) -> bool:
        """True if nothing is drafted in the next step, without a look for it."""
        self._has_looked = False
        if self._num_rest:
            self._num_rest -= 1
            return True
        if self._num_since_plain >= self._plain_every and self._cost.is_known:
            self._num_since_plain = 0
            self._plain_every = min(2 * self._plain_every, _PLAIN_EVERY)
            return True
        return False

    def begin(self) -> None:
        """A batch begins, of which nothing is known: the next step looks for matches."""
        self._num_vain = 0
        if self._cost.is_known:
            self._num_rest = 0

    def plan(self, candidates: Sequence[Candidate]) -> list[Proposal | None]:
        """Returns what to draft for each sequence of the next step."""
        if not self._trials or not candidates:
            return [None] * len(candidates)
        self._turn_to(len(candidates))
        self._has_looked = True
        key = [(candidate.seq_id, candidate.match_len) for candidate in candidates]
        is_learned = self._cost.target.num_since_start >= _ENOUGH_STEPS
        if key == self._choice_key and self._num_reused < _REUSED and is_learned:
            self._num_reused += 1
        else:
            self._choice = self._chooser.choose(candidates, self._cost)
            self._choice_key, self._num_reused = key, 0
        proposals = [
            proposal if proposal is None or proposal.num_tokens <= candidate.max_tokens else None
            for proposal, candidate in zip(self._choice, candidates, strict=True)
        ]
        used = {proposal.proposer for proposal in proposals if proposal is not None}
        self._num_since_plain += bool(used)
        self._num_vain = 0 if used else self._num_vain + 1
        self._is_trial = not used
        self._try(candidates, proposals, used)
        if not used:
            self._cost.hope()
        if not any(proposals):
            self._rest(candidates)
        return proposals

    def _rest(self, candidates: Sequence[Candidate]) -> None:
        """Drafts nothing for some steps, but not beyond the next trial.

        A rest is no longer than the time of a look demands. A match may come at any time, so if
        n-grams are used, rests begin late and double; else they have `_REST` steps at least. A
        trial that is due but not yet affordable does not shorten the rest, nor does one that has
        begun and finds no matches.
        """
        read = sum(candidate.context_len for candidate in candidates) / THOUSAND
        most = self._longest_rest(len(candidates), read)
        if not self.uses_ngrams:
            most = max(most, _REST)
        idle = [trials for trials in self._trials.values() if trials.num_left == 0]
        waits = [trials.interval - trials.num_idle - 1 for trials in idle]
        self._num_rest = min([most, *(wait for wait in waits if wait >= 0)])
        for trials in self._trials.values():
            trials.num_idle += self._num_rest

    def _longest_rest(self, num_rows: int, read: float) -> int:
        """Returns for how many steps a look in vain is to pay.

        While looks are worth their time, one step now and then shows the time without a look.
        """
        if self._cost.look_gain > 0:
            is_due = self._num_vain >= _VAIN_LOOKS
            self._num_vain = 0 if is_due else self._num_vain
            return int(is_due)
        step_s = self._cost.plain_s(num_rows, read)
        num_owed = max(math.ceil(self._cost.look_s / (_LOOKS * step_s)), 2)
        return min(num_owed, 1 << min(self._num_vain, _MOST_DOUBLED)) - 1

    # ------------------------------------------------------------ trials and catching up

    def _try(
        self,
        candidates: Sequence[Candidate],
        proposals: list[Proposal | None],
        used: set[Proposer],
    ) -> None:
        """Adds a trial of a proposer that has long been idle."""
        for proposer, trials in self._trials.items():
            if proposer in used:
                trials.used()
                continue
            if trials.num_left == 0 and not (trials.is_due() and self._may_afford(proposer)):
                continue
            options = self._options_to_try(candidates, proposals, proposer)
            if not options:
                continue
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

    def _options_to_try(
        self,
        candidates: Sequence[Candidate],
        proposals: Sequence[Proposal | None],
        proposer: Proposer,
    ) -> list[DraftOption]:
        """Returns the most promising options for a trial: long matches, or few unseen tokens."""
        free = [i for i, proposal in enumerate(proposals) if proposal is None]
        if proposer is Proposer.NGRAM:
            free.sort(key=lambda i: -candidates[i].match_len)
        else:
            free.sort(key=lambda i: candidates[i].num_unseen)
        found = (self._chooser.option(i, candidates[i], proposer, self._cost) for i in free)
        return list(islice(filter(None, found), _TRIED_ROWS))

    def _fixed_s(self, proposer: Proposer) -> float:
        """Returns the cost of a step of a trial without its rows."""
        if proposer is Proposer.NGRAM:
            return self._cost.verifying_s
        draft_s = self._cost.draft_start_s + _TRIED_TOKENS * self._cost.draft_pass_s
        return self._cost.verifying_s + draft_s

    def _may_afford(self, proposer: Proposer) -> bool:
        """False if the credit pays no trial, whatever its options."""
        fixed_s = _TRIED_STEPS * self._fixed_s(proposer)
        return not self._cost.is_known or fixed_s <= self._credit.of("trials")

    def _afford(self, options: list[DraftOption], proposer: Proposer) -> int:
        """Returns for how many options the credit pays a trial.

        The credit pays for all options or for none, unless it is nearly full and will not grow.
        """
        fixed_s = self._fixed_s(proposer)
        rows_s = (_TRIED_TOKENS * o.token_s + o.first_s / _TRIED_STEPS for o in options)
        costs_s = (_TRIED_STEPS * s for s in accumulate(rows_s, initial=fixed_s))
        credit_s = self._credit.of("trials")
        totals_s = [s for s in costs_s if s <= credit_s or not self._cost.is_known]
        is_all = len(totals_s) == len(options) + 1
        if len(totals_s) <= 1 or not (is_all or self._credit.is_nearly_full("trials")):
            return 0
        if self._cost.is_known:
            self._credit.spend("trials", totals_s[-1])
        return len(totals_s) - 1

    def may_catch_up(self, num_tokens: int, num_passes: int) -> bool:
        """True if the draft model may compute so many more tokens in so many more passes.

        If it may, their cost is taken off the credit.
        """
        pass_s = self._cost.draft_start_s + self._cost.draft_pass_s
        seconds = pass_s * num_passes + self._cost.draft_token_s * num_tokens
        if self._cost.is_known and not self._credit.spend("catching up", seconds):
            return False
        self._advanced_s = seconds
        return True

    # ------------------------------------------------------------ learning

    def learn(
        self, seq_id: SeqId, proposal: Proposal, *, num_drafted: int, num_accepted: int
    ) -> None:
        """Learns from a proposal. It counts as wrong if its grammar kept it from being verified."""
        kind = (proposal.proposer, proposal.match_len)
        self._acceptance.learn(seq_id, kind, max(num_drafted, 1), num_accepted)
        if seq_id in self._tried:
            self._tried.discard(seq_id)
            if 0 < num_drafted == num_accepted:
                self._trials[proposal.proposer].interval = _FEWEST_STEPS

    def forget(self, seq_id: SeqId) -> None:
        """Drops what was learned of a sequence."""
        self._acceptance.forget(seq_id)
        self._tried.discard(seq_id)

    def observe(self, plan: BatchPlan, result: BatchResult, now_s: float) -> None:
        """Learns from the time of a step that just ended, unless it computed prompts."""
        times = result.times
        if not (self._trials or self.has_draft_model):
            return
        if times is None or times.total_s <= 0 or not plan.rows:
            return
        if self._passes_over(times.total_s):
            self._last_s = now_s
            return
        self._earn(times.total_s)
        step_s = times.total_s + self._passed_before(times.total_s, now_s)
        advanced_s, self._advanced_s = self._advanced_s, 0.0
        self._turn_to(len(plan.rows))
        has_drafts = self._has_looked and any(row.max_drafted for row in plan.rows)
        if advanced_s and not has_drafts:  # the draft model did nothing but catch up
            self._credit.add("catching up", advanced_s - times.draft_s)
        is_vain = self._has_looked and not has_drafts and self._cost.is_known
        if is_vain:  # the next step without a look is a change of kind
            self._had_drafts, self._num_like = False, 0
        is_telling = not is_vain and self._is_telling(has_drafts=has_drafts)
        for row in plan.rows:
            if row.sampling is None or len(row.token_ids) > 1:
                return
        if not self._has_looked and self._cost.is_known:
            read = sum(row.end for row in plan.rows) / THOUSAND
            self._cost.see_plain(len(plan.rows), read, step_s - times.draft_s)
        if self._has_looked and self._cost.is_known:
            self._learn_look(plan.rows, result, step_s, has_drafts=has_drafts)
        if not is_telling:
            return
        drafted = sum(r.num_drafted for r in result.rows)
        self._cost.learn_target(_features(plan.rows, result, drafted), step_s - times.draft_s)
        if self._cost.target.num_since_start == 0:  # the time of a plain step is unknown again
            self._plain_every = _FIRST_PLAIN
        if times.draft_s > 0 and any(row.draft_token_ids for row in plan.rows):
            self._cost.learn_draft(*_draft_work(plan.rows), times.draft_s)

    def _passes_over(self, seconds: float) -> bool:
        """Notes no more than the time of a step, if that is enough. Returns False otherwise.

        It is enough for most steps without a look: to learn from one takes as long as a twentieth
        of a small step. Its own time does not decide, or interrupted steps would be those that are
        learned from.
        """
        if self._has_looked or self._had_drafts or self._advanced_s:
            return False
        if self._cost.target.num_since_start < _ENOUGH_STEPS or self._unseen_s > _UNSEEN_S:
            return False
        self._unseen_s += seconds
        self._num_unseen += 1
        return True

    def _earn(self, seconds: float) -> None:
        """Credits the time of a step, and of those before it that were passed over."""
        self._credit.earn(self._unseen_s + seconds, self._num_unseen + 1)
        self._unseen_s, self._num_unseen = 0.0, 0

    def _learn_look(
        self, rows: Sequence[Row], result: BatchResult, step_s: float, *, has_drafts: bool
    ) -> None:
        """Learns what a look cost and, unless its drafts were only a trial, what it brought."""
        read = sum(row.end for row in rows) / THOUSAND
        if not has_drafts:
            assert result.times is not None
            self._cost.learn_look(len(rows), read, step_s - result.times.draft_s)
        elif not self._is_trial:
            num_tokens = sum(len(outcome.token_ids) for outcome in result.rows)
            rate = num_tokens / len(rows) * self._cost.recent_plain_s(len(rows), read) / step_s
            self._cost.learn_gain(rate - 1)
            if self._chooser.expected_gain:
                self._cost.learn_trust(rate / self._chooser.expected_gain, len(rows))

    def _turn_to(self, num_rows: int) -> None:
        """Selects the costs of steps with so many rows."""
        size = num_rows.bit_length()
        if size not in self._costs:
            nearest = min(self._costs, key=lambda known: abs(known - size), default=None)
            self._costs[size] = StepCost() if nearest is None else self._costs[nearest].begun_anew()
        self._cost = self._costs[size]

    def _is_telling(self, *, has_drafts: bool) -> bool:
        """True if to learn from a step: from some after a change of kind, then from every few.

        The first step with drafts is left out: it finds caches cold.
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

    def _passed_before(self, seconds: float, now_s: float) -> float:
        """Returns the time between the last step and the step that just ended after `seconds`.

        Planning is part of it, and drafts make that longer. If it exceeds the step itself, there
        was a break: then the recent average is returned.
        """
        last_s, self._last_s = self._last_s, now_s
        if last_s is not None and 0 <= (before_s := now_s - last_s - seconds) < seconds:
            self._between_s += _BETWEEN_RATE * (before_s - self._between_s)
            return before_s
        return self._between_s


def _features(rows: Sequence[Row], result: BatchResult, drafted: int) -> tuple[float, ...]:
    """Returns the features of a step for `StepCost.target`."""
    read = sum(
        row.end * (1 + outcome.num_drafted) for row, outcome in zip(rows, result.rows, strict=True)
    )
    return (1.0, len(rows), read / THOUSAND, float(drafted > 0), drafted)


def _draft_work(rows: Sequence[Row]) -> tuple[int, int]:
    """Returns passes and tokens of the draft model. Catching up alone takes one pass."""
    passes = max(max(row.num_to_draft for row in rows), 1)
    tokens = sum(len(row.draft_token_ids) + max(row.num_to_draft - 1, 0) for row in rows)
    return passes, tokens
