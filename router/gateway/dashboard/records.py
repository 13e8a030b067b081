"""The dashboard's records of running and ended requests, and of each second. Pure.

The timeline of a request is shown as segments: one segment for each stage of each attempt. Between
two attempts a request is in the router's queue. If a worker sends no token of a running answer for
some time, that time is a segment "stalled" instead of "decode_steps".

Times in records are seconds on the gateway's clock. Times in segments are seconds since the arrival
of the HTTP request.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import msgspec

from engine.messages import RequestId
from router.machine.requests import Outcome, Request, Stay, Timeline

LOOK_S = 1.0  # seconds between checks; the precision of stalls
ROUTER = "router"
STALLED = "stalled"

Stall = tuple[float, float]  # start and end of a period without a token


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A stage of a request, in the timeline's row of the router or of a worker."""

    row: str
    stage: str
    start_s: float
    end_s: float


class Spent(msgspec.Struct, frozen=True):
    """The time that a request spent in each stage, in seconds.

    Routing and hidden transfers are left out.
    """

    queued_s: float = 0.0  # waits for a worker, in a worker, and for KV
    prefill_s: float = 0.0
    decode_s: float = 0.0
    stalled_s: float = 0.0


_PARTS = {
    "queue": "queued_s",
    "prefill_queue": "queued_s",
    "kv_wait": "queued_s",
    "decode_queue": "queued_s",
    "prefill_compute": "prefill_s",
    "decode_steps": "decode_s",
    STALLED: "stalled_s",
}


def segments_of(
    timeline: Timeline | None, end_s: float, stalls: Sequence[Stall] = (), *, is_over: bool
) -> list[Segment]:
    """Returns the segments of a request up to `end_s`.

    `end_s` is the time of the last token, or now if the request still runs.
    """
    if timeline is None:
        return []
    found: list[Segment] = []
    free_s: float | None = timeline.route_s  # end of the last attempt; None: an attempt runs
    stays = sorted(timeline.stays, key=lambda stay: stay.placed_s)
    for index, stay in enumerate(stays):
        if free_s is not None:
            found.append(Segment(ROUTER, "queue", free_s, stay.placed_s))
        found += _of_stay(stay, end_s, stalls)
        free_s = _free_from(stays[: index + 1])
    found += _hidden_transfer(timeline, stays)
    if not stays:
        found.append(
            Segment(ROUTER, "queue", timeline.route_s, timeline.route_s + timeline.queue_s)
        )
    if stays and free_s is not None and not is_over:
        found.append(Segment(ROUTER, "queue", free_s, end_s))
    return [each for each in found if each.end_s > each.start_s]


def spent_of(segments: Iterable[Segment]) -> Spent:
    """Returns the seconds of a request by stage: sums over its segments."""
    sums = dict.fromkeys(Spent.__struct_fields__, 0.0)
    for each in segments:
        if (part := _PARTS.get(each.stage)) is not None:
            sums[part] += each.end_s - each.start_s
    return Spent(**sums)


def _free_from(stays: Sequence[Stay]) -> float | None:
    """Returns the time at which the last attempt ended; None if an attempt runs."""
    ends_s = [stay.ended_s for stay in stays if stay.ended_s is not None]
    return max(ends_s) if len(ends_s) == len(stays) else None


def _of_stay(stay: Stay, end_s: float, stalls: Sequence[Stall]) -> Iterator[Segment]:
    """Yields a segment for each stage that an attempt has reached."""
    over_s = end_s if stay.ended_s is None else stay.ended_s
    if stay.prefilled_s is None or stay.prefill_started_s is not None:
        started_s = over_s if stay.prefill_started_s is None else stay.prefill_started_s
        first_s = over_s if stay.prefilled_s is None else stay.prefilled_s
        yield Segment(stay.prefill_worker, "prefill_queue", stay.placed_s, started_s)
        yield Segment(stay.prefill_worker, "prefill_compute", started_s, first_s)
    if stay.prefilled_s is None:
        return
    ready_s = over_s if stay.kv_ready_s is None else max(stay.kv_ready_s, stay.prefilled_s)
    begun_s = over_s if stay.decode_started_s is None else max(stay.decode_started_s, ready_s)
    yield Segment(stay.decode_worker, "kv_wait", stay.prefilled_s, ready_s)
    yield Segment(stay.decode_worker, "decode_queue", ready_s, begun_s)
    yield from _steps(stay.decode_worker, begun_s, over_s, stalls)


def _steps(row: str, begun_s: float, over_s: float, stalls: Sequence[Stall]) -> Iterator[Segment]:
    """Yields segments of decode steps, and of the stalls between the steps.

    A stall that was last seen just before the attempt ended is drawn up to the attempt's end.
    """
    at_s = begun_s
    for start_s, seen_s in stalls:
        stop_s = over_s if over_s - seen_s < LOOK_S else seen_s
        start_s = max(start_s, at_s)
        if stop_s > start_s:
            yield Segment(row, "decode_steps", at_s, start_s)
            yield Segment(row, STALLED, start_s, stop_s)
            at_s = stop_s
    yield Segment(row, "decode_steps", at_s, over_s)


def _hidden_transfer(timeline: Timeline, stays: Sequence[Stay]) -> Iterator[Segment]:
    """Yields the part of the first KV transfer that ran during prefill."""
    hidden_s = (timeline.kv_transfer_s or 0.0) - (timeline.kv_exposed_s or 0.0)
    for stay in stays:
        if stay.prefilled_s is not None and stay.kv_ready_s is not None:
            start_s = max(stay.prefilled_s - hidden_s, stay.placed_s)
            yield Segment(stay.decode_worker, "kv_hidden", start_s, stay.prefilled_s)
            return


class Bounds(msgspec.Struct, frozen=True):
    """The bounds of the service level objective, in seconds. None: no bound."""

    ttft_s: float | None = None
    tpot_s: float | None = None


UNBOUNDED = Bounds()


class EndedRequest(msgspec.Struct):
    """One ended answer. `missed` is the stage charged with an exceeded bound; empty without one.

    `segments` and `spent` are computed when the answer is shown for the first time.
    """

    number: int
    id: str  # the id that the client received
    request_id: RequestId  # the gateway's own id of one choice
    version: str
    tenant: str
    outcome: str
    reason: str  # reason of the failure, or the finish reason
    received_s: float
    e2e_s: float  # seconds from arrival to the last token
    ttft_s: float | None
    tpot_s: float | None
    prompt_tokens: int
    answer_tokens: int
    is_background: bool
    missed: str
    timeline: Timeline | None
    segments: list[Segment] | None = None
    spent: Spent = Spent()


class RunningAnswer(Protocol):
    """One answer, running or ended."""

    shown_id: str  # the client's id of the request
    version: str  # the version that answers the request
    outcome: Outcome | None  # None: the answer still runs, or its client has left

    @property
    def request(self) -> Request:
        """The router's request for the answer."""
        ...

    @property
    def timeline(self) -> Timeline | None:
        """The times of the stages; None before the first token."""
        ...

    @property
    def num_tokens(self) -> int:
        """The number of tokens so far."""
        ...

    @property
    def last_s(self) -> float:
        """The time of the latest tokens; 0 before the first token."""
        ...


class RunningRequest(msgspec.Struct, frozen=True):
    """One running answer. `timeline` is None while no router has the request."""

    id: str
    request_id: RequestId
    version: str
    tenant: str
    received_s: float
    prompt_tokens: int
    answer_tokens: int
    is_background: bool
    timeline: Timeline | None
    segments: list[Segment] = []
    spent: Spent = Spent()


class Hits(msgspec.Struct):
    """Prompt tokens by source.

    `infinite` is the number of tokens that a cache without evictions would contain.
    """

    prompt_tokens: int = 0
    local: int = 0  # found in the cache of the prefill worker
    peer: int = 0  # pulled from the cache of another worker or of a store
    infinite: int = 0


class Totals(msgspec.Struct):
    """Counts of ended requests and their tokens since the start of the process."""

    ended: int = 0
    good: int = 0  # finished within bounds
    unbounded: int = 0  # finished without any bound
    prompt_tokens: int = 0
    answer_tokens: int = 0
    missed: dict[str, int] = {}


class TimeSpread(msgspec.Struct, frozen=True):
    """The median and the 95th percentile of several times, in seconds."""

    p50_s: float
    p95_s: float


class Sample(msgspec.Struct, frozen=True):
    """The sample of one second. `queue` and `in_flight` are counted at its end.

    `ttft` covers answers that had their first token in this second; `tpot` covers running answers.
    Both are None without such answers.
    """

    number: int
    at_s: float
    queue: int
    in_flight: int
    ended: int
    good: int
    unbounded: int
    prompt_tokens: int  # in requests that ended in this second
    answer_tokens: int  # sent to clients of all requests in this second
    missed: dict[str, int]
    ttft: TimeSpread | None = None
    tpot: TimeSpread | None = None
    waiting_s: float = 0.0  # longest time that a request has waited for its first token
    num_stalled: int = 0  # number of answers that stall now
