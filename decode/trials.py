"""Trials measure proposers that no draft uses, so that these can be chosen again.

If no draft of a proposer pays, a few of its tokens are nevertheless drafted for some sequences. A
trial runs several steps in a row, since the first step finds caches cold. If the tokens are
rejected, the interval to the next trial doubles. If all tokens of a draft are kept, the next trial
comes soon. Trials are paid for with a credit of their own (`decode.stepcost.TimeCredit`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

from decode.acceptance import Proposer
from decode.choosing import Candidate, DraftChooser, DraftOption, Proposal
from decode.stepcost import StepCost, TimeCredit
from engine.messages import SeqId

TRIED_STEPS = 5  # number of consecutive steps of one trial
# Steps until the next look if only a trial could change the choice, or if credit is missing.
REST = 32
_TRIED_ROWS = 8
_TRIED_TOKENS = 2  # number of drafted tokens in each row of a trial
_FEWEST_STEPS, _MOST_STEPS = 8, 2048  # bounds of the interval between two trials, in steps


@dataclass(slots=True)
class _Schedule:
    """The schedule of trials of a proposer that is not used."""

    interval: int = _FEWEST_STEPS
    last: int = 0  # the step in which the proposer was last used, or its last trial started
    num_left: int = 0  # remaining steps of the running trial
    num_rows: int = 0  # number of rows of the running trial

    def is_due(self, step: int) -> bool:
        return self.num_left > 0 or step - self.last >= self.interval

    def used(self, step: int) -> None:
        self.last, self.interval, self.num_left = step, _FEWEST_STEPS, 0

    def put_off(self, step: int) -> None:
        """Delays the next trial by `REST` steps, for lack of credit."""
        self.last = step + REST - self.interval

    def tried(self, step: int) -> None:
        """Records the start of a trial, which counts as a failure until its result is known."""
        self.last, self.interval = step, min(2 * self.interval, _MOST_STEPS)


class DraftTrials:
    """Starts and continues trials. Owned by the speculator, which gives the present step."""

    def __init__(
        self, proposers: Iterable[Proposer], chooser: DraftChooser, credit: TimeCredit
    ) -> None:
        self._schedules = {proposer: _Schedule() for proposer in proposers}
        self._chooser = chooser
        self._credit = credit
        self._tried: set[SeqId] = set()
        self.goes_on = False  # True if the next step continues a trial
        self.step_s = 0.0  # expected net cost of one step of the trial, seconds

    def may_run(self, proposer: Proposer, step: int, cost: StepCost) -> bool:
        """Returns True if a trial of this proposer is running, or is due and has credit."""
        schedule = self._schedules[proposer]
        return schedule.num_left > 0 or (schedule.is_due(step) and self._may_afford(cost))

    def add(
        self,
        candidates: Sequence[Candidate],
        proposals: list[Proposal | None],
        step: int,
        cost: StepCost,
        num_rows: int,
    ) -> None:
        """Adds a trial to `proposals`, of each proposer that has not been used for a long time."""
        used = {proposal.proposer for proposal in proposals if proposal is not None}
        self.goes_on = False
        for proposer, schedule in self._schedules.items():
            if proposer in used:
                schedule.used(step)
                continue
            if not schedule.is_due(step):
                continue
            if schedule.num_left == 0 and not self._may_afford(cost):
                schedule.put_off(step)
                continue
            options = self._options(candidates, proposals, proposer, cost)
            if not options:
                continue
            if schedule.num_left == 0:
                if not (num_tried := self._afford(options, proposer, cost, num_rows)):
                    schedule.put_off(step)
                    continue
                schedule.tried(step)
                schedule.num_left, schedule.num_rows = TRIED_STEPS, num_tried
            schedule.num_left -= 1
            self.goes_on = self.goes_on or schedule.num_left > 0
            for option in options[: schedule.num_rows]:
                num_tokens = min(_TRIED_TOKENS, option.max_tokens)
                proposals[option.index] = Proposal(proposer, num_tokens, option.match_len)
                self._tried.add(candidates[option.index].seq_id)

    def learn(self, seq_id: SeqId, proposer: Proposer, *, is_kept: bool) -> None:
        """Learns whether the target kept all tokens of a draft, if the draft was a trial."""
        if seq_id in self._tried:
            self._tried.discard(seq_id)
            if is_kept:
                self._schedules[proposer].interval = _FEWEST_STEPS

    def remove(self, seq_id: SeqId) -> None:
        """Removes what is known of a sequence."""
        self._tried.discard(seq_id)

    def _options(
        self,
        candidates: Sequence[Candidate],
        proposals: Sequence[Proposal | None],
        proposer: Proposer,
        cost: StepCost,
    ) -> list[DraftOption]:
        """Returns the most promising options for a trial: long matches, or few unseen tokens."""
        free = [i for i, proposal in enumerate(proposals) if proposal is None]
        if proposer is Proposer.NGRAM:
            free.sort(key=lambda i: -candidates[i].match_len)
        else:
            free.sort(key=lambda i: candidates[i].num_unseen)
        found = (self._chooser.option(i, candidates[i], proposer, cost) for i in free)
        return list(islice(filter(None, found), _TRIED_ROWS))

    def _may_afford(self, cost: StepCost) -> bool:
        """Returns False if the credit cannot pay for a trial."""
        return not cost.is_known or self._credit.of("trials") > 0

    def _afford(
        self, options: list[DraftOption], proposer: Proposer, cost: StepCost, num_rows: int
    ) -> int:
        """Returns the number of options whose trial the credit pays.

        The credit is reduced by the expected net cost of the trial; the speculator later corrects
        this to the measured cost. The credit pays for all options or for none. Only a nearly full
        credit, which waiting would not increase, may pay for some of the options.
        """
        if not cost.is_known:
            return len(options)
        # value of one token, in seconds of a step
        worth_s = cost.plain_s(num_rows, 0.0) / num_rows
        rows_s = (
            _TRIED_TOKENS * o.token_s
            + o.first_s / TRIED_STEPS
            - o.expected(_TRIED_TOKENS) * worth_s
            for o in options
        )
        steps_s = accumulate(rows_s, initial=_fixed_s(proposer, cost))
        totals_s = [max(TRIED_STEPS * s, 0.0) for s in steps_s]
        credit_s = self._credit.of("trials")
        num_paid = max((n for n, s in enumerate(totals_s) if s <= credit_s), default=0)
        is_all = num_paid == len(options)
        if not num_paid or not (is_all or self._credit.is_nearly_full("trials")):
            return 0
        self._credit.add("trials", -totals_s[num_paid])
        self.step_s = totals_s[num_paid] / TRIED_STEPS
        return num_paid


def _fixed_s(proposer: Proposer, cost: StepCost) -> float:
    """Returns the fixed cost of one step of a trial, without the cost of its rows."""
    if proposer is Proposer.NGRAM:
        return cost.verifying_s
    return cost.verifying_s + cost.draft_start_s + _TRIED_TOKENS * cost.draft_pass_s
