"""The speculator plans drafts for each step, and learns from the steps that ran.

`decode.choosing` computes which drafts pay. A proposer that is not used yields no measurements. A
*look* is a search for drafts that pay. Apart from looks, the speculator has these mechanisms:

    trials        if no draft pays, a few tokens are nevertheless drafted for some sequences
                  (`decode.trials`)
    trust         the best of many estimates overestimates the gain. The measured gain of steps
                  with drafts over the latest plain steps is compared with the expected gain.
                  Later predictions are multiplied by the ratio of the two
    plain steps   while all steps look for drafts, two steps now and then run without a look. The
                  gain is measured against the second one, since the first one finds caches cold
    rests         a look takes host time. A small share of all time is
                  credited for these looks, and so is the measured net gain of drafts. Looks that
                  find nothing, and drafts that lose time, reduce the credit. Without credit, steps
                  rest: they do not look. So the loss is bounded even if the estimates are wrong.
                  Most resting steps are skipped (`num_to_pass`): they plan and learn nothing
    catching up   the draft model computes its own K and V of tokens that it skipped, so that full
                  blocks can be shared

Looks, trials and catching up each cost at most a small share of the time (`decode.stepcost`). The
learned costs, the acceptance and the credit are kept when sequences and batches end.

Deterministic: the same steps with the same times lead to the same choices.
"""

from collections.abc import Sequence

from decode.acceptance import Acceptance, Proposer
from decode.choosing import THOUSAND, Candidate, DraftChooser, Proposal
from decode.stepcost import StepCost, TimeCredit
from decode.trials import REST, TRIED_STEPS, DraftTrials
from engine.config import Speculate
from engine.messages import SeqId
from engine.worker.batch import BatchPlan, BatchResult, Row, StepTimes

_BETWEEN_RATE = 0.1  # weight of the latest time between two steps without a look, in their average
# number of steps with a look before plain steps: at first, and later
_FIRST_PLAIN, _PLAIN_EVERY = 2, 64
_PLAIN_STEPS = 2  # number of consecutive plain steps: the first one finds caches cold
_LEARN_EVERY = 2  # without drafts, one in this number of steps is learned from
# number of steps of one kind after which learning is rarer, and its new interval
_SETTLED, _LEARN_EVERY_SETTLED = 8, 8
_ENOUGH_STEPS = 32  # until this number of steps, all are learned from; later only some are
# interval of observed steps while steps have no look; the steps between are skipped
_SEEN_EVERY = 16
# after `_ENOUGH_STEPS`, one in this number of steps with drafts is learned from
_LEARN_EVERY_DRAFT = 16
_REUSED = 7  # after `_ENOUGH_STEPS`, number of steps that reuse a choice for the same sequences
# longest wait of a full block for the draft model, in steps, if the credit suffices
_CATCH_UP_EVERY = 4
_FIRST_REST = 3  # the first step that may have a look; earlier steps measure the time without looks


class Speculator:
    """Plans drafts and learns from steps. Owned by the thread that schedules."""

    def __init__(self, mode: Speculate, *, max_draft_tokens: int, has_draft_model: bool) -> None:
        self.max_draft_tokens = max_draft_tokens
        self.has_draft_model = has_draft_model
        self.uses_ngrams = mode in (Speculate.NGRAM, Speculate.AUTO)
        self.uses_draft_model = has_draft_model and mode in (Speculate.DRAFT, Speculate.AUTO)
        self._cost = StepCost()  # costs of steps of the present batch size, one of `_costs`
        # costs of steps, by the bit length of the number of rows
        self._costs: dict[int, StepCost] = {}
        self._acceptance = Acceptance()
        self._chooser = DraftChooser(
            self._acceptance,
            uses_ngrams=self.uses_ngrams,
            uses_draft_model=self.uses_draft_model,
        )
        used = {Proposer.NGRAM: self.uses_ngrams, Proposer.DRAFT: self.uses_draft_model}
        proposers = [proposer for proposer, is_used in used.items() if is_used]
        self._credit = TimeCredit()
        self._trials = DraftTrials(proposers, self._chooser, self._credit)
        self._last_s: float | None = None  # time at which the last step ended
        self.num_to_pass = 0  # number of next steps for which nothing is planned or learned
        self._num_passed = 0  # steps that were skipped since the last observed step
        self._lacks_credit = False  # True if the credit does not suffice for a look
        self._advanced_s = 0.0  # predicted duration of catching up in the present step, seconds
        self._had_drafts = False  # True if the last step had drafts
        self._num_like = 0  # number of consecutive steps of the last step's kind
        self._num_since_plain = 0
        self._plain_every = _FIRST_PLAIN
        self._choice: list[Proposal | None] = []
        self._choice_key: tuple[int, list[tuple[SeqId, int]]] = 0, []
        self._chosen = 0  # number of the step of the latest choice
        self._reused_until = 0  # number of the last step that may reuse the choice
        self._step = 0  # number of the present step
        self._rests_until = _FIRST_REST
        # whether the present step, and the last step, had a look
        self._has_looked = self._had_looked = False
        self._catches_up_at = 0  # number of the next step in which the draft model may catch up
        self._is_trial = False  # True if the present step's drafts are a trial
        # whether the last step, and the present step, have drafts
        self._follows_drafts = self._drafts_now = False

    # ------------------------------------------------------------ choosing

    @property
    def is_on(self) -> bool:
        """True if the settings allow drafts."""
        return self.uses_ngrams or self.uses_draft_model

    def rests(self) -> bool:
        """True if the next step has neither a look nor drafts."""
        self._had_looked, self._has_looked = self._has_looked, False
        self._step += 1
        if not self.is_on:
            return True
        if self._lacks_credit and not self._trials.goes_on:
            return True  # the usual case: no draft pays
        if self._step < self._rests_until and not self._trials.goes_on:
            return True
        if self._num_since_plain >= self._plain_every and self._cost.is_known:
            self._num_since_plain = 0
            self._plain_every = min(2 * self._plain_every, _PLAIN_EVERY)
            self._rests_until = self._step + _PLAIN_STEPS
            return True
        return False

    def weighs_draft_model(self, num_rows: int, num_context_tokens: int) -> bool:
        """Returns False if the draft model cannot propose anything in a step of `num_rows` rows."""
        if not self.uses_draft_model:
            return False
        self._turn_to(num_rows)
        if self._trials.may_run(Proposer.DRAFT, self._step, self._cost):
            return True
        read = num_context_tokens / THOUSAND
        return self._chooser.weighs_draft_model(self._cost, num_rows, read)

    def plan(
        self, candidates: Sequence[Candidate], *, num_others: int = 0, others_tokens: int = 0
    ) -> list[Proposal | None]:
        """Returns the proposal for each candidate in the next step, or None.

        The batch has `num_others` more rows, for which nothing is drafted. Their context has
        `others_tokens` tokens.
        """
        num_rows = len(candidates) + num_others
        if not self.is_on or not num_rows:
            return [None] * len(candidates)
        self._turn_to(num_rows)
        self._has_looked = True
        key = num_rows, [(candidate.seq_id, candidate.match_len) for candidate in candidates]
        is_learned = self._cost.target.num_since_start >= _ENOUGH_STEPS
        if not candidates:
            self._choice, self._choice_key = [], key
        elif key != self._choice_key or self._step > self._reused_until or not is_learned:
            read = (others_tokens + sum([c.context_len for c in candidates])) / THOUSAND
            self._choice = self._chooser.choose(candidates, self._cost, num_rows, read)
            self._choice_key, self._reused_until = key, self._step + _REUSED
            pairs = zip(candidates, self._choice, strict=True)
            drafting = {candidate.seq_id for candidate, proposal in pairs if proposal is not None}
            self._acceptance.idle(drafting, self._step - self._chosen)
            self._chosen = self._step
        proposals = [
            proposal if proposal is None or proposal.num_tokens <= candidate.max_tokens else None
            for proposal, candidate in zip(self._choice, candidates, strict=True)
        ]
        self._num_since_plain += 1
        self._is_trial = all(proposal is None for proposal in proposals)
        self._trials.add(candidates, proposals, self._step, self._cost, num_rows)
        if self._is_trial:
            self._cost.hope()
            if not self.uses_ngrams:
                self._rests_until = self._step + REST
        return proposals

    # ------------------------------------------------------------ catching up

    def catches_up(self) -> bool:
        """Returns True if the draft model may catch up in this step. Call once per planned step."""
        if self._step < self._catches_up_at:
            return False
        has_credit = self._credit.of("catching up") > 0 or not self._cost.is_known
        self._catches_up_at = self._step + (_CATCH_UP_EVERY if has_credit else REST)
        return has_credit

    def may_catch_up(self, num_tokens: int, num_passes: int) -> bool:
        """Returns True if the draft model may compute `num_tokens` more tokens in `num_passes` more
        passes.

        If so, the predicted cost is subtracted from the credit.
        """
        pass_s = self._cost.draft_start_s + self._cost.draft_pass_s
        seconds = pass_s * num_passes + self._cost.draft_token_s * num_tokens
        if self._cost.is_known and not self._credit.spend("catching up", seconds):
            self._catches_up_at = self._step + REST
            return False
        self._advanced_s = seconds
        return True

    # ------------------------------------------------------------ learning

    def learn(
        self, seq_id: SeqId, proposal: Proposal, *, num_drafted: int, num_accepted: int
    ) -> None:
        """Learns from a proposal. A proposal that a grammar prevented counts as rejected."""
        kind = (proposal.proposer, proposal.match_len)
        self._acceptance.learn(seq_id, kind, max(num_drafted, 1), num_accepted)
        is_kept = 0 < num_drafted == num_accepted
        self._trials.learn(seq_id, proposal.proposer, is_kept=is_kept)

    def remove(self, seq_id: SeqId) -> None:
        """Removes the learned data of a sequence."""
        self._acceptance.remove(seq_id)
        self._trials.remove(seq_id)

    def observe(self, plan: BatchPlan, result: BatchResult, now_s: float) -> None:
        """Learns from the time of a step that just ended, unless it computed prompts.

        Most steps without a look are skipped, since learning from a step takes a twentieth of a
        small step's time. The choice of skipped steps must not depend on their own times. Otherwise
        more of the interrupted steps would be learned from.
        """
        if self.num_to_pass:
            self.num_to_pass -= 1
            self._num_passed += 1
            self._step += 1
            self._last_s = now_s
            return
        times = result.times
        if not (self.is_on or self.has_draft_model):
            return
        if times is None or (seconds := times.total_s) <= 0 or not plan.rows:
            return
        num_steps, self._num_passed = self._num_passed + 1, 0
        self._credit.earn(num_steps * seconds, num_steps)
        self._turn_to(len(plan.rows))
        before_s = self._passed_before(seconds, now_s)
        self._learn_step(plan.rows, result, times, before_s)
        self._lacks_credit = self._cost.is_known and self._credit.of("looks") <= 0
        if not self._has_looked and self._cost.target.num_since_start >= _ENOUGH_STEPS:
            self.num_to_pass = self._num_idle()

    def _num_idle(self) -> int:
        """Returns the number of next steps in which neither a look nor catching up is due."""
        end = self._step + _SEEN_EVERY  # number of the next step that is not skipped
        if self.is_on and not self._lacks_credit:
            end = min(end, self._rests_until)
        if self.has_draft_model:
            end = min(end, self._catches_up_at)
        num_steps = end - self._step - 1
        # the gain is measured against the second plain step
        return num_steps if num_steps >= _PLAIN_STEPS else 0

    def _learn_step(
        self, rows: Sequence[Row], result: BatchResult, times: StepTimes, before_s: float
    ) -> None:
        step_s = times.total_s + before_s
        advanced_s, self._advanced_s = self._advanced_s, 0.0
        has_drafts = self._has_looked and any(row.max_drafted for row in rows)
        self._follows_drafts, self._drafts_now = self._drafts_now, has_drafts
        if advanced_s and not has_drafts:  # the draft model only caught up in this step
            spent_s = times.draft_s + max(before_s - self._cost.between_s, 0.0)
            self._credit.add("catching up", advanced_s - spent_s)
        is_vain = self._has_looked and not has_drafts and self._cost.is_known
        # the next step without a look is then the first of its kind
        if is_vain and self._had_drafts:
            self._had_drafts, self._num_like = False, 0
        is_telling = not is_vain and self._is_telling(has_drafts=has_drafts)
        for row in rows:
            if row.sampling is None or len(row.token_ids) > 1:
                return
        if self._cost.is_known:
            if has_drafts:
                self._settle(rows, result, step_s)
            else:
                self._see_plain(rows, times, before_s)
        if not is_telling:
            return
        drafted = sum(r.num_drafted for r in result.rows)
        self._cost.learn_target(_features(rows, result, drafted), step_s - times.draft_s)
        # learning restarted, so the time of a plain step is unknown
        if self._cost.target.num_since_start == 0:
            self._plain_every = _FIRST_PLAIN
        if times.draft_s > 0 and any(row.draft_token_ids for row in rows):
            self._cost.learn_draft(*_draft_work(rows), times.draft_s)

    def _see_plain(self, rows: Sequence[Row], times: StepTimes, before_s: float) -> None:
        """Records the time of a step without drafts, unless caches are cold after a step with
        drafts.

        The host time of this step's look and of the last step's look is subtracted from the credit.
        """
        read = sum([row.end for row in rows]) / THOUSAND
        if self._has_looked or self._had_looked:
            self._credit.add("looks", self._cost.between_s - before_s)
        else:
            self._cost.between_s += _BETWEEN_RATE * (before_s - self._cost.between_s)
        if not self._follows_drafts:
            step_s = times.total_s - times.draft_s + self._cost.between_s
            self._cost.see_plain(len(rows), read, step_s)

    def _settle(self, rows: Sequence[Row], result: BatchResult, step_s: float) -> None:
        """Credits the time that a step's drafts gained, or reduces the credit by the time they
        lost.
        """
        read = sum([row.end for row in rows]) / THOUSAND
        plain_s = self._cost.recent_plain_s(len(rows), read)
        yielded_s = plain_s * sum([len(outcome.token_ids) for outcome in result.rows]) / len(rows)
        if self._is_trial:
            self._credit.add("trials", self._trials.step_s + yielded_s - step_s)
            return
        self._credit.add("looks", yielded_s - step_s)
        if self._chooser.expected_gain:
            rate = yielded_s / step_s
            self._cost.learn_trust(rate / self._chooser.expected_gain, len(rows))

    def _turn_to(self, num_rows: int) -> None:
        """Selects the costs for a batch of `num_rows` rows."""
        size = num_rows.bit_length()
        if size not in self._costs:
            nearest = min(self._costs, key=lambda known: abs(known - size), default=None)
            self._costs[size] = StepCost() if nearest is None else self._costs[nearest].begun_anew()
        self._cost = self._costs[size]

    def _is_telling(self, *, has_drafts: bool) -> bool:
        """Returns True if the step is to be learned from.

        Steps are learned from more often after a change of kind, and more rarely later. The first
        step of a kind is never learned from, since it finds caches cold.
        """
        num_like, self._num_like = self._num_like, self._num_like + 1
        if has_drafts != self._had_drafts:
            self._had_drafts, self._num_like = has_drafts, 1
            return False
        if self._cost.target.num_since_start < _ENOUGH_STEPS:
            return True
        if has_drafts:
            return num_like < TRIED_STEPS or num_like % _LEARN_EVERY_DRAFT == 0
        return num_like % (_LEARN_EVERY if num_like < _SETTLED else _LEARN_EVERY_SETTLED) == 0

    def _passed_before(self, seconds: float, now_s: float) -> float:
        """Returns the time between the end of the last step and the start of the present one.

        The present step just ended and took `seconds`.

        The time includes planning, which drafts make longer. If the time exceeds the step itself,
        the worker was idle: then the recent average is returned.
        """
        last_s, self._last_s = self._last_s, now_s
        if last_s is not None and 0 <= (before_s := now_s - last_s - seconds) < seconds:
            return before_s
        return self._cost.between_s


def _features(rows: Sequence[Row], result: BatchResult, drafted: int) -> tuple[float, ...]:
    """Returns the features of a step for `StepCost.target`."""
    read = sum(
        row.end * (1 + outcome.num_drafted) for row, outcome in zip(rows, result.rows, strict=True)
    )
    return (1.0, len(rows), read / THOUSAND, float(drafted > 0), drafted)


def _draft_work(rows: Sequence[Row]) -> tuple[int, int]:
    """Returns the number of passes and tokens of the draft model. Catching up takes one pass."""
    passes = max(max(row.num_to_draft for row in rows), 1)
    tokens = sum(len(row.draft_token_ids) + max(row.num_to_draft - 1, 0) for row in rows)
    return passes, tokens
