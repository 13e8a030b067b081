"""Runs beam searches on the workers, and hands their results to the choices of an answer.

Each step requests one token after each open hypothesis. The router queues, places and repeats these
requests like any other request. Workers find the blocks of earlier tokens in their prefix caches.
So hypotheses share the blocks of their common tokens, and a step computes at most one block of
tokens per hypothesis. If the router rejects a later step because it is full, the step is submitted
again after a pause. Otherwise the work of the earlier steps would be lost.

1. The search begins with the empty answer. A step extends each open hypothesis by each of the
   `2 * width` likeliest tokens.
2. An extension by a token that ends answers is a complete hypothesis. Among all other extensions,
   the `width` extensions with the highest sums of log-probabilities are open in the next step.
3. The search is over when the open hypotheses have the maximum length, or when no open hypothesis
   can become one of the best.
4. Complete and open hypotheses are ranked by their sum over `length ** length_penalty`. The length
   includes the prompt, and leaves out the token that ended the answer.

Sources: vLLM's OpenAI-compatible server, which uses the same ranking but always searches up to the
maximum length; the results are equal. Wu et al., Google's Neural Machine Translation System, 2016,
§7, for the length penalty.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from msgspec.structs import replace

from engine.clock import Clock
from engine.messages import FinishReason, Limits, Logprobs, RequestId, Sampling
from router.gateway.answers.choice import AnswerChoice, AnswerPiece
from router.gateway.answers.writing import AnswerWriter, write_and_wait
from router.gateway.requests.calls import CheckedCall
from router.inbox.fair_queue import Turn
from router.inbox.task_groups import LightTaskGroup
from router.machine.requests import Finished, Outcome, PrefixHashes, Rejected, Request, Update
from router.port import RequestPort, ask

MAX_TRIES = 30  # times that a step is submitted to a full router before the search fails
MAX_PAUSE_S = 1.0  # maximum seconds between two tries


@dataclass(frozen=True, slots=True)
class BeamRules:
    """The rules of one search. Lengths are in tokens."""

    width: int
    end_ids: frozenset[int]  # ids of tokens that end an answer
    prompt_len: int
    max_tokens: int  # maximum length of an answer
    length_penalty: float = 1.0

    @property
    def num_extensions(self) -> int:
        """The number of likeliest tokens by which a hypothesis is extended."""
        return 2 * self.width


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """The beginning of an answer, or a complete answer with the token that ended it."""

    token_ids: tuple[int, ...] = ()
    scores: tuple[Logprobs, ...] = ()  # one per token of `token_ids`
    logprob: float = 0.0  # sum over all tokens of `token_ids`
    is_complete: bool = False

    def extended(self, scores: Logprobs, rank: int, *, completes: bool) -> "Hypothesis":
        """Returns this hypothesis extended by the token with this rank (from 0) among the
        likeliest.
        """
        token_id, logprob = scores.top_ids[rank], scores.top_logprobs[rank]
        own = Logprobs(logprob, rank + 1, scores.top_ids, scores.top_logprobs)
        return Hypothesis(
            (*self.token_ids, token_id), (*self.scores, own), self.logprob + logprob, completes
        )


class BeamSearch:
    """One beam search. The caller computes scores and passes them to `step` until `is_over`."""

    def __init__(self, rules: BeamRules) -> None:
        self.open = [Hypothesis()]
        self._rules = rules
        self._complete: list[Hypothesis] = []  # the `width` best complete hypotheses, best first
        self._num_tokens = 0  # number of tokens in each open hypothesis

    @property
    def is_over(self) -> bool:
        """True if further steps cannot change the best hypotheses."""
        if not self.open or self._num_tokens >= self._rules.max_tokens:
            return True
        if len(self._complete) < self._rules.width:
            return False
        return self._rank(self._complete[-1]) >= self._most(self.open[0])

    def step(self, scores: Sequence[Logprobs]) -> None:
        """Extends the open hypotheses.

        `scores` has the scores of each hypothesis's next token, in the order of the hypotheses.
        """
        extensions = []
        for hypothesis, its_scores in zip(self.open, scores, strict=True):
            for rank in range(min(self._rules.num_extensions, len(its_scores.top_ids))):
                if its_scores.top_ids[rank] in self._rules.end_ids:
                    ended = hypothesis.extended(its_scores, rank, completes=True)
                    self._complete.append(ended)
                else:
                    total = hypothesis.logprob + its_scores.top_logprobs[rank]
                    extensions.append((total, hypothesis, its_scores, rank))
        extensions.sort(key=lambda extension: -extension[0])  # stable: ties keep their order
        self.open = [
            hypothesis.extended(its_scores, rank, completes=False)
            for _, hypothesis, its_scores, rank in extensions[: self._rules.width]
        ]
        self._num_tokens += 1
        self._complete = self._ranked(self._complete)[: self._rules.width]

    def best(self, number: int) -> list[Hypothesis]:
        """Returns the best hypotheses so far, best first.

        Among equal ranks, hypotheses are in the order in which they were completed.
        """
        return self._ranked([*self._complete, *self.open])[:number]

    def _ranked(self, hypotheses: Sequence[Hypothesis]) -> list[Hypothesis]:
        return sorted(hypotheses, key=lambda each: -self._rank(each))

    def _rank(self, hypothesis: Hypothesis) -> float:
        length = len(hypothesis.token_ids) - hypothesis.is_complete
        return self._over_length(hypothesis.logprob, length)

    def _most(self, hypothesis: Hypothesis) -> float:
        """Returns the highest rank that a hypothesis can reach, if all its further tokens are
        certain.
        """
        is_better_long = self._rules.length_penalty > 0
        return self._over_length(
            hypothesis.logprob, self._rules.max_tokens if is_better_long else self._num_tokens
        )

    def _over_length(self, logprob: float, num_tokens: int) -> float:
        return float(logprob / (self._rules.prompt_len + num_tokens) ** self._rules.length_penalty)


class Searches:
    """The beam searches of one call, one for each prompt."""

    def __init__(self, port: RequestPort, clock: Clock, call: CheckedCall) -> None:
        self.num_tokens = 0  # tokens generated for hypotheses, including dropped hypotheses
        self._port = port
        self._clock = clock
        self._call = call

    async def follow(
        self, choices: Sequence[AnswerChoice], writer: AnswerWriter, turn: Turn
    ) -> AnswerPiece:
        """Runs the searches, and writes the best hypotheses of each prompt as its choices.

        Returns the last piece of the answer. If a step fails, that piece reports the failure.
        """
        failed: list[_StepFailed] = []
        tasks: list[asyncio.Task[list[Update]]] = []
        try:
            async with LightTaskGroup() as group:
                tasks = [group.create_task(self._search(leader)) for leader in self._call.leaders]
        except* _StepFailed as errors:
            failed = _leaves(errors)
        if failed:
            return AnswerPiece(choice=0, text="", num_tokens=0, outcome=failed[0].outcome)
        updates = [update for task in tasks for update in task.result()]
        now_s = self._clock.now_s()
        last: AnswerPiece | None = None
        for choice, update in zip(choices, updates, strict=True):
            for part in update.parts(choice.num_at_once):
                if last is not None:
                    await write_and_wait(writer, last)
                    await turn()
                last = choice.receive(part, now_s)
        assert last is not None
        return last

    async def _search(self, leader: Request) -> list[Update]:
        """Runs the search for one prompt.

        Returns the best answers, best answer first. Each answer is one update.
        """
        prompt_len, body = len(leader.token_ids), self._call.body
        rules = BeamRules(
            width=body.num_candidates,
            end_ids=frozenset(leader.limits.stop_token_ids),
            prompt_len=prompt_len,
            max_tokens=leader.limits.max_len - prompt_len,
            length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        )
        search = BeamSearch(rules)
        # All steps share the hashes of the prompt's blocks, which the first step computes.
        leader = replace(leader, hashes=PrefixHashes(salt=leader.salt))
        first: Update | None = None
        step = 0
        while not search.is_over:
            updates = await self._step(leader, rules, step, search.open)
            first = first or updates[0]
            search.step([update.logprobs[0] for update in updates])
            step += 1
        assert first is not None
        best = search.best(body.num_choices)
        return [_answer(each, first, is_first=not at) for at, each in enumerate(best)]

    async def _step(
        self, leader: Request, rules: BeamRules, step: int, hypotheses: Sequence[Hypothesis]
    ) -> list[Update]:
        """Requests the next token of each hypothesis, with the likeliest alternatives."""
        num_top = max(rules.num_extensions, self._call.body.num_top_logprobs or 0)
        requests = [
            replace(
                leader,
                request_id=RequestId(f"{leader.request_id}-step{step}-{index}"),
                token_ids=leader.token_ids + hypothesis.token_ids,
                sampling=Sampling(temperature=0.0, logprobs=num_top),
                limits=Limits(
                    max_len=rules.prompt_len + step + 1, prompt_len=leader.limits.prompt_len
                ),
            )
            for index, hypothesis in enumerate(hypotheses)
        ]
        if step:
            requests = [_later(request, self._clock.now_s()) for request in requests]
        async with LightTaskGroup() as group:
            tasks = [
                group.create_task(self._next_token(request, waits=step > 0)) for request in requests
            ]
        self.num_tokens += len(tasks)
        return [task.result() for task in tasks]

    async def _next_token(self, request: Request, *, waits: bool) -> Update:
        """Runs a request and returns all its updates as one.

        If the router is full and `waits` is set, tries again after a pause. Raises _StepFailed.
        """
        asked, num_tries = request, 0
        while True:
            joint = await ask(self._port, asked)
            outcome = joint.outcome
            assert outcome is not None
            if isinstance(outcome, Finished):
                return joint
            num_tries += 1
            if not isinstance(outcome, Rejected) or num_tries >= (MAX_TRIES if waits else 1):
                raise _StepFailed(outcome)
            await _pause(min(outcome.retry_after_s, MAX_PAUSE_S))
            again = RequestId(f"{request.request_id}-again{num_tries}")
            asked = _later(replace(request, request_id=again), self._clock.now_s())


async def _pause(duration_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(duration_s):
            await asyncio.Event().wait()


class _StepFailed(Exception):
    """A request of a search ended without a token."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(str(outcome))
        self.outcome = outcome


def _leaves(errors: BaseExceptionGroup[_StepFailed]) -> list[_StepFailed]:
    """Returns the errors of a group and of its nested groups."""
    found: list[_StepFailed] = []
    for error in errors.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


def _later(request: Request, now_s: float) -> Request:
    """Returns the request for a step after the first: no deadline, no scores of the prompt."""
    assert request.hashes is not None
    hashes = request.hashes.copy()
    return replace(request, received_s=now_s, deadline_s=None, prompt_logprobs=None, hashes=hashes)


def _answer(hypothesis: Hypothesis, first: Update, *, is_first: bool) -> Update:
    """Returns a hypothesis as the only update of a choice.

    The first choice also gets the prompt's log-probabilities from the first step.
    """
    reason = FinishReason.STOP if hypothesis.is_complete else FinishReason.LENGTH
    update = Update(
        hypothesis.token_ids,
        outcome=Finished(reason),
        timeline=first.timeline,
        logprobs=hypothesis.scores,
    )
    if is_first:
        return replace(update, prompt_logprobs=first.prompt_logprobs)
    return update
