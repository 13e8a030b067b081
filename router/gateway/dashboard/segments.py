"""Turns the timeline of a request into segments: one for each stage of each attempt.

Pure. Between two attempts a request is in the router's queue. While a worker sends no token of a
running answer, the segment is a stall and not decode steps.

Times are seconds from the HTTP request on.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from router.machine.requests import Stay, Timeline

LOOK_S = 1.0  # the resolution of stalls
ROUTER = "router"
STALLED = "stalled"

Stall = tuple[float, float]  # begin and end of a time without a token


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A stage of a request in one lane: the router's, or a worker's."""

    lane: str
    stage: str
    start_s: float
    end_s: float


class Spent(msgspec.Struct, frozen=True):
    """Where the time of a request went, in seconds. Routing and hidden transfers are left out."""

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
    """Returns the segments up to `end_s`: the last token, or now if the request is not over."""
    if timeline is None:
        return []
    found: list[Segment] = []
    free_s: float | None = timeline.route_s  # since when no attempt runs; None: one runs
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
    """The end of the last attempt; None if an attempt runs."""
    ends_s = [stay.ended_s for stay in stays if stay.ended_s is not None]
    return max(ends_s) if len(ends_s) == len(stays) else None


def _of_stay(stay: Stay, end_s: float, stalls: Sequence[Stall]) -> Iterator[Segment]:
    """The stages that one attempt reached."""
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


def _steps(lane: str, begun_s: float, over_s: float, stalls: Sequence[Stall]) -> Iterator[Segment]:
    """Decode steps, and the stalls between them.

    If a stall was last seen just before the end of the attempt, it lasts until that end.
    """
    at_s = begun_s
    for start_s, seen_s in stalls:
        stop_s = over_s if over_s - seen_s < LOOK_S else seen_s
        start_s = max(start_s, at_s)
        if stop_s > start_s:
            yield Segment(lane, "decode_steps", at_s, start_s)
            yield Segment(lane, STALLED, start_s, stop_s)
            at_s = stop_s
    yield Segment(lane, "decode_steps", at_s, over_s)


def _hidden_transfer(timeline: Timeline, stays: Sequence[Stay]) -> Iterator[Segment]:
    """The part of the first hand-over that prefill hid."""
    hidden_s = (timeline.kv_transfer_s or 0.0) - (timeline.kv_exposed_s or 0.0)
    for stay in stays:
        if stay.prefilled_s is not None and stay.kv_ready_s is not None:
            start_s = max(stay.prefilled_s - hidden_s, stay.placed_s)
            yield Segment(stay.decode_worker, "kv_hidden", start_s, stay.prefilled_s)
            return
