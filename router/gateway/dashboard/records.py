"""The dashboard's records of running and ended requests, and of each second. Pure.

The timeline of a request is shown as segments: one for each stage of each attempt. Between two
attempts a request is in the router's queue. While a worker sends no token of a running answer, the
segment is a stall instead of decode steps.

Records have seconds on the gateway's clock, segments have seconds since the HTTP request.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import msgspec

from engine.messages import RequestId
from router.machine.requests import Outcome, Request, Stay, Timeline

LOOK_S = 1.0  # seconds; the resolution of stalls
ROUTER = "router"
STALLED = "stalled"

Stall = tuple[float, float]  # start and end of a period without a token


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A stage of a request in one row of the timeline: the router's, or a worker's."""

    row: str
    stage: str
    start_s: float
    end_s: float


class Spent(msgspec.Struct, frozen=True):
    """The seconds of a request by stage. Routing and hidden transfers are left out."""

    queued_s: float = 0.0  # waiting for a worker, in a worker, and for KV
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
    """Returns the segments up to `end_s`: the time of the last token, or now if it still runs."""
    if timeline is None:
        return []
    found: list[Segment] = []
    free_s: float | None = timeline.route_s  # since when no attempt runs; None: an attempt runs
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
    """Returns the sum of the segments of each stage."""
    sums = dict.fromkeys(Spent.__struct_fields__, 0.0)
    for each in segments:
        if (part := _PARTS.get(each.stage)) is not None:
            sums[part] += each.end_s - each.start_s
    return Spent(**sums)


def _free_from(stays: Sequence[Stay]) -> float | None:
    """Returns the end of the last attempt; None if an attempt runs."""
    ends_s = [stay.ended_s for stay in stays if stay.ended_s is not None]
    return max(ends_s) if len(ends_s) == len(stays) else None


def _of_stay(stay: Stay, end_s: float, stalls: Sequence[Stall]) -> Iterator[Segment]:
    """Yields the stages that an attempt reached."""
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
    """Yields decode steps, and the stalls between them.

    A stall that was last seen just before the end of the attempt lasts until that end.
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
    """Yields the part of the first hand-over that was hidden behind prefill."""
    hidden_s = (timeline.kv_transfer_s or 0.0) - (timeline.kv_exposed_s or 0.0)
    for stay in stays:
        if stay.prefilled_s is not None and stay.kv_ready_s is not None:
            start_s = max(stay.prefilled_s - hidden_s, stay.placed_s)
            yield Segment(stay.decode_worker, "kv_hidden", start_s, stay.prefilled_s)
            return


class Bounds(msgspec.Struct, frozen=True):
    """The service level objective, in seconds. None: no bound."""

    ttft_s: float | None = None
    tpot_s: float | None = None


UNBOUNDED = Bounds()


class EndedRequest(msgspec.Struct):
    """One ended answer. `missed` names the stage that broke a bound; empty if none did.

    `segments` and `spent` are computed when the answer is shown for the first time.
    """

    number: int
    id: str  # the id that the client knows
    request_id: RequestId  # the server's own id of one choice
    version: str
    tenant: str
    outcome: str
    reason: str  # reason of the failure, or the finish reason
    received_s: float
    e2e_s: float  # seconds to its last token
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
    version: str  # the version that answers it
    outcome: Outcome | None  # None: the answer runs, or its client has left

    @property
    def request(self) -> Request:
        """The request of the answer."""
        ...

    @property
    def timeline(self) -> Timeline | None:
        """The stages; known from the first token on."""
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
    """One running answer. Its timeline is None while its request is at no router."""

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
    """Prompt tokens by source. `infinite`: the cached tokens of a cache that never evicts."""

    prompt_tokens: int = 0
    local: int = 0  # cached in the worker that prefilled
    peer: int = 0  # pulled from another worker's cache
    infinite: int = 0


class Totals(msgspec.Struct):
    """Counts since the start of the process."""

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
    """One second: requests that wait and run at its end, and requests that ended or arrived in it.

    `ttft` covers answers that began, `tpot` running answers; None without such answers.
    """

    number: int
    at_s: float
    queue: int
    in_flight: int
    ended: int
    good: int
    unbounded: int
    prompt_tokens: int  # in requests that ended
    answer_tokens: int  # sent to clients, over all requests
    missed: dict[str, int]
    ttft: TimeSpread | None = None
    tpot: TimeSpread | None = None
    waiting_s: float = 0.0  # longest present wait for a first token
    num_stalled: int = 0  # answers that began and now stall
