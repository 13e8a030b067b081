"""Running requests, recently ended requests, and totals of their outcomes.

Pure, with bounded memory. A request costs one call at its start and one call at its end; its tokens
cost nothing. Times are seconds on the gateway's clock.

A request is *good* if it finished within its bounds on TTFT and TPOT. A request that exceeds a
bound is charged to the longest stage among the stages that the bound covers.

All running answers are checked once a second, without an event for each token. An answer *stalls*
if no token has arrived for `STALL_S`. A stall ends at the first check that finds new tokens, so the
error of its length is about a second.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from engine.messages import RequestId
from router.gateway.dashboard.records import (
    UNBOUNDED,
    Bounds,
    EndedRequest,
    Hits,
    RunningAnswer,
    Sample,
    Stall,
    TimeSpread,
    Totals,
    segments_of,
    spent_of,
)
from router.gateway.versions import Tallies
from router.machine.requests import Failed, Finished, Outcome, Rejected, Request, Timeline

MAX_REQUESTS = 256  # maximum ended requests kept with their timelines
MAX_SAMPLES = 600  # maximum samples kept, one per second
MAX_RUNNING = 128  # maximum running requests shown, oldest first
UNIT_TOKENS = 64  # tokens per unit in the model of an unbounded cache
MAX_UNITS = 65_536  # maximum units kept: 4 million tokens
MAX_PROMPT_TOKENS = 8192  # tokens of one prompt that are counted, in some 0.1 ms

_TTFT_STAGES = ("route_s", "queue_s", "prefill_queue_s", "prefill_compute_s")
_HAND_OVER_STAGES = ("kv_wait_s", "decode_queue_s")
DECODE_STEPS = "decode_steps"
FAILED = "failed"
HUNG_AFTER = 10.0  # factor: an answer hangs after this many times its bound on TTFT without a token
DEFAULT_BOUND_S = 3.0  # seconds; replaces the bound if there is none, to find answers that hang


class RecentRequests:
    """Keeps running requests, the latest ended requests, samples and totals."""

    def __init__(self, bounds: Bounds, tallies: Tallies | None = None) -> None:
        """`tallies` records the same outcomes, which the controller reads."""
        self.bounds = bounds
        self._tallies = tallies or Tallies()
        self._tallies.hung = self.hung
        self._hung: set[RequestId] = set()  # running requests that have hung at least once
        self.requests: deque[EndedRequest] = deque(maxlen=MAX_REQUESTS)
        self.samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self.running: dict[RequestId, RunningAnswer] = {}  # in order of arrival
        self.hits = Hits()
        self.totals = Totals()
        self._rates = AnswerRates()
        self._stalls: dict[int, list[Stall]] = {}  # by number: stalls of requests not shown yet
        self._units: OrderedDict[int, None] = OrderedDict()
        self._sampled = Totals()
        self._sampled_tokens = 0
        self._num_requests = 0
        self._num_samples = 0

    def hung(self, now_s: float) -> Counter[str]:
        """Returns the number of hanging answers by version.

        An answer hangs if no token has arrived for `HUNG_AFTER` times its bound on TTFT.

        An answer that has hung counts as late when it ends, even if its client has left.
        """
        found: Counter[str] = Counter()
        for request_id, answer in self.running.items():
            request = answer.request
            bound_s = bounds_of(request, self.bounds).ttft_s or DEFAULT_BOUND_S
            silent_s = now_s - max(answer.last_s, request.received_s)
            if silent_s > HUNG_AFTER * bound_s and not request.is_background:
                found[answer.version] += 1
                self._hung.add(request_id)
        return found

    def record(self, answer: RunningAnswer) -> None:
        """Records an answer that has ended or was cancelled because its client left."""
        request, timeline = answer.request, answer.timeline
        self.running.pop(request.request_id, None)
        has_hung = request.request_id in self._hung
        self._hung.discard(request.request_id)
        bounds = bounds_of(request, self.bounds)
        ended = self._ended(answer, bounds)
        self.requests.append(ended)
        if not ended.is_background:
            if ended.outcome != "cancelled":
                self._count(ended, bounds)
            if ended.outcome != "cancelled" or has_hung:
                self._tallies.record(
                    ended.version,
                    failed=ended.outcome == "failed",
                    late=has_hung
                    or ended.outcome == "rejected"
                    or ended.missed not in ("", FAILED),
                    num_tokens=ended.prompt_tokens + ended.answer_tokens,
                    now_s=ended.received_s + ended.e2e_s,
                )
        if timeline is not None and request.leader is None:  # choices of one prompt count once
            self._record_hits(request, timeline)

    def _ended(self, answer: RunningAnswer, bounds: Bounds) -> EndedRequest:
        """Returns the record of an ended answer. The stalls are kept until the record is shown."""
        request, timeline, num_tokens = answer.request, answer.timeline, answer.num_tokens
        e2e_s = max(answer.last_s - request.received_s, 0.0)
        ttft_s = timeline.ttft_s if timeline is not None and num_tokens else None
        tpot_s = None
        if ttft_s is not None and num_tokens > 1:
            tpot_s = max(e2e_s - ttft_s, 0.0) / (num_tokens - 1)
        outcome, reason = _shown_outcome(answer.outcome)
        missed = ""
        if outcome in ("failed", "rejected"):
            missed = FAILED
        elif outcome == "finished" and timeline is not None and bounds != UNBOUNDED:
            missed = missed_stage(timeline, ttft_s, tpot_s, bounds)
        self._num_requests = number = self._num_requests + 1
        self._stalls.pop(number - MAX_REQUESTS, None)
        if stalls := self._rates.remove(request, ttft_s):
            self._stalls[number] = stalls
        return EndedRequest(
            number=number,
            id=answer.shown_id,
            request_id=request.request_id,
            version=answer.version,
            tenant=request.tenant,
            outcome=outcome,
            reason=reason,
            received_s=request.received_s,
            e2e_s=e2e_s,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            prompt_tokens=len(request.token_ids),
            answer_tokens=num_tokens,
            is_background=request.is_background,
            missed=missed,
            timeline=timeline,
        )

    def shown(self, after: int = 0) -> list[EndedRequest]:
        """Returns the ended requests with numbers above `after`, oldest first, with their
        segments.
        """
        found = [each for each in self.requests if each.number > after]
        for each in found:
            if each.segments is None:
                stalls = self._stalls.pop(each.number, [])
                each.segments = segments_of(each.timeline, each.e2e_s, stalls, is_over=True)
                each.spent = spent_of(each.segments)
        return found

    def sample(self, now_s: float, *, queue: int, in_flight: int, answer_tokens: int) -> Sample:
        """Ends a one-second sample.

        `answer_tokens` is the number of tokens sent since the process started.
        """
        totals, before = self.totals, self._sampled
        self._num_samples += 1
        missed = {name: n - before.missed.get(name, 0) for name, n in totals.missed.items()}
        seen = self._rates.check(self.running, now_s)
        sample = Sample(
            number=self._num_samples,
            at_s=now_s,
            queue=queue,
            in_flight=in_flight,
            ended=totals.ended - before.ended,
            good=totals.good - before.good,
            unbounded=totals.unbounded - before.unbounded,
            prompt_tokens=totals.prompt_tokens - before.prompt_tokens,
            answer_tokens=answer_tokens - self._sampled_tokens,
            missed={name: n for name, n in missed.items() if n},
            ttft=seen.ttft,
            tpot=seen.tpot,
            waiting_s=seen.waiting_s,
            num_stalled=seen.num_stalled,
        )
        self.samples.append(sample)
        self._sampled = msgspec.structs.replace(totals, missed=dict(totals.missed))
        self._sampled_tokens = answer_tokens
        return sample

    def _count(self, ended: EndedRequest, bounds: Bounds) -> None:
        totals = self.totals
        totals.ended += 1
        totals.prompt_tokens += ended.prompt_tokens
        totals.answer_tokens += ended.answer_tokens
        if ended.missed:
            totals.missed[ended.missed] = totals.missed.get(ended.missed, 0) + 1
        elif bounds != UNBOUNDED:
            totals.good += 1
        else:
            totals.unbounded += 1

    def stalls_of(self, request_id: RequestId) -> list[Stall]:
        """Returns the stalls of a running answer, in seconds since its request."""
        return self._rates.stalls_of(request_id)

    def _record_hits(self, request: Request, timeline: Timeline) -> None:
        """Counts the prompt's cached tokens, and the tokens that an unbounded cache would contain.

        Adds the prompt to the modelled unbounded cache.
        """
        cached, decision = timeline.num_cached_tokens, timeline.decision
        pulled = 0 if decision is None else decision.pulled_of(cached)
        key, held, is_prefix = hash(request.salt), 0, True
        units, tokens = self._units, request.token_ids
        end = min(len(tokens), MAX_PROMPT_TOKENS) // UNIT_TOKENS * UNIT_TOKENS
        for start in range(0, end, UNIT_TOKENS):
            key = hash((key, tokens[start : start + UNIT_TOKENS]))
            if key in units:
                units.move_to_end(key)
                held += UNIT_TOKENS if is_prefix else 0
            else:
                units[key] = None
                is_prefix = False
        while len(units) > MAX_UNITS:
            units.popitem(last=False)
        hits = self.hits
        hits.prompt_tokens += len(tokens)
        hits.peer += pulled
        hits.local += cached - pulled
        hits.infinite += max(held, cached)


def bounds_of(request: Request, default: Bounds) -> Bounds:
    """Returns the bounds of a request.

    Bounds that the request does not set are the deployment's.
    """
    own = request.deadline_s
    if own is None and request.tpot_bound_s is None:
        return default
    return Bounds(
        default.ttft_s if own is None else own - request.received_s,
        default.tpot_s if request.tpot_bound_s is None else request.tpot_bound_s,
    )


def missed_stage(
    timeline: Timeline, ttft_s: float | None, tpot_s: float | None, bounds: Bounds
) -> str:
    """Returns the stage that is charged with an exceeded bound; empty if no bound was exceeded."""
    if bounds.ttft_s is not None and ttft_s is not None and ttft_s > bounds.ttft_s:
        return _longest(timeline, _TTFT_STAGES)
    if bounds.tpot_s is not None and tpot_s is not None and tpot_s > bounds.tpot_s:
        hand_over_s = sum(getattr(timeline, name) or 0.0 for name in _HAND_OVER_STAGES)
        is_late = hand_over_s > bounds.tpot_s and hand_over_s >= tpot_s - bounds.tpot_s
        return _longest(timeline, _HAND_OVER_STAGES) if is_late else DECODE_STEPS
    return ""


def _longest(timeline: Timeline, names: Sequence[str]) -> str:
    name = max(names, key=lambda each: getattr(timeline, each) or 0.0)
    return name.removesuffix("_s")


def _shown_outcome(outcome: Outcome | None) -> tuple[str, str]:
    """Returns the name of an outcome on the dashboard, and its reason."""
    match outcome:
        case Finished(reason):
            return "finished", reason.value
        case Failed(message, _):
            return "failed", message[:200]
        case Rejected(message, _):
            return "rejected", message[:200]
    return "cancelled", ""


STALL_S = 1.5
MAX_STALLS = 32  # maximum stalls kept per answer, latest stalls


class RatesSeen(NamedTuple):
    """The result of one check of all running answers: rates, longest wait and stalls."""

    ttft: TimeSpread | None
    tpot: TimeSpread | None
    waiting_s: float
    num_stalled: int


class _Progress:
    """The state of one running answer at the last check."""

    __slots__ = ("is_stalled", "looked_s", "num_tokens", "stalls")

    def __init__(self, looked_s: float, num_tokens: int) -> None:
        self.looked_s = looked_s
        self.num_tokens = num_tokens
        self.is_stalled = False
        self.stalls: list[Stall] = []

    def check(self, answer: RunningAnswer, now_s: float) -> float:
        """Updates the progress. Returns the seconds per token since the last check.

        Without new tokens, returns the seconds without a token.
        """
        num_tokens, silent_s = answer.num_tokens, now_s - answer.last_s
        num_new, lasted_s = num_tokens - self.num_tokens, now_s - self.looked_s
        if silent_s >= STALL_S:
            if not self.is_stalled:
                began_s = answer.last_s - answer.request.received_s
                self.stalls = [*self.stalls[1 - MAX_STALLS :], (began_s, began_s)]
            self.stalls[-1] = (self.stalls[-1][0], now_s - answer.request.received_s)
        self.is_stalled = silent_s >= STALL_S
        self.looked_s, self.num_tokens = now_s, num_tokens
        return lasted_s / num_new if num_new else max(silent_s, lasted_s)


class AnswerRates:
    """The progress of running answers, and the times to first token since the last check."""

    def __init__(self) -> None:
        self._progress: dict[RequestId, _Progress] = {}
        self._ttfts_s: list[float] = []  # TTFTs since the last check, of answers that have ended

    def check(self, running: Mapping[RequestId, RunningAnswer], now_s: float) -> RatesSeen:
        """Checks all running answers. Requests of batches are left out of times and rates."""
        ttfts_s, self._ttfts_s = self._ttfts_s, []
        tpots_s: list[float] = []
        waiting_s, num_stalled = 0.0, 0
        for request_id, answer in running.items():
            request = answer.request
            if not answer.num_tokens:
                if not request.is_background:
                    waiting_s = max(waiting_s, now_s - request.received_s)
                continue
            known = self._progress.get(request_id)
            if known is None:
                self._progress[request_id] = _Progress(now_s, answer.num_tokens)
                if answer.timeline is not None and not request.is_background:
                    ttfts_s.append(answer.timeline.ttft_s)
                continue
            rate_s = known.check(answer, now_s)
            num_stalled += known.is_stalled
            if not request.is_background:
                tpots_s.append(rate_s)
        return RatesSeen(spread_of(ttfts_s), spread_of(tpots_s), waiting_s, num_stalled)

    def stalls_of(self, request_id: RequestId) -> list[Stall]:
        """Returns the stalls of a running answer, in seconds since its request."""
        known = self._progress.get(request_id)
        return [] if known is None else known.stalls

    def remove(self, request: Request, ttft_s: float | None) -> list[Stall]:
        """Removes an ended answer, and returns its stalls."""
        known = self._progress.pop(request.request_id, None)
        if known is not None:
            return known.stalls
        if ttft_s is not None and not request.is_background:
            self._ttfts_s.append(ttft_s)
        return []


def spread_of(times_s: list[float]) -> TimeSpread | None:
    """Returns the median and the 95th percentile; None without times."""
    if not times_s:
        return None
    ordered, last = sorted(times_s), len(times_s) - 1
    return TimeSpread(ordered[last // 2], ordered[round(last * 0.95)])
