"""The state that the dashboard shows, as one value: `/dashboard/state` and each event send it.

Pure: a function of the routers' state, the recent requests and the controller's reports. Times
named `_s` in requests and samples are on the gateway's clock; `epoch_s` is the origin of that clock
in Unix time. Times in `cluster` are Unix times.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice

import msgspec

from engine.control import ClusterReport
from engine.messages import LoadReport, Role, WorkerId
from router.cluster.learning import MovedKv
from router.gateway.dashboard.health import PoolHealth
from router.gateway.dashboard.recent import MAX_RUNNING, RecentRequests
from router.gateway.dashboard.records import (
    Bounds,
    EndedRequest,
    Hits,
    RunningAnswer,
    RunningRequest,
    Sample,
    Stall,
    Totals,
    segments_of,
    spent_of,
)
from router.gateway.metrics.pools import PoolCount
from router.gateway.versions import Versions
from router.machine.requests import Timeline
from router.port import WorkerStatus

MAX_COUNTS = 300
_TROUBLE = (  # counts of workers that mean trouble
    "fallbacks",
    "preempted",
    "stuck",
    "unsent_messages",
    "bad_messages",
    "dropped_reads",
    "slow_sinks",
    "copies_dropped",
)
_ORDINARY = {  # events without trouble; None: all reasons, otherwise only these reasons
    "placed": None,
    "role changed": None,
    "moved": None,
    "prefix offer": ("asked",),
    "block events": ("batches asked for", "snapshot asked for"),
    "ended": ("finished", "cancelled"),
    "flips": None,
    "drains": None,
}


class Blocks(msgspec.Struct, frozen=True):
    """The KV blocks of a worker.

    `lost` is `total` minus the sum of the other counts, which is 0 if no block is lost.
    """

    free: int
    cached: int
    owned: int
    leased: int
    in_flight: int
    total: int  # size of the pool, in blocks
    lost: int


class WorkerCard(msgspec.Struct, frozen=True):
    """A worker with which this gateway has a session."""

    worker_id: WorkerId
    version: str
    role: Role
    blocks: Blocks | None  # None before the worker's first report
    waiting: int
    running: int
    max_running: int
    open_leases: int
    reserved_blocks: int
    wait_s: float | None  # predicted seconds until the worker has computed its prompts
    tpot_s: float | None  # predicted seconds of a decode step
    num_foreign: int
    pulled_bytes: float
    transfer_s: float
    exposed_s: float
    step_tokens: float


class Severed(msgspec.Struct, frozen=True):
    """Two workers between which no KV is sent for some time, because a pull has failed."""

    source: WorkerId
    sink: WorkerId
    again_in_s: float


class ServedCard(msgspec.Struct, frozen=True):
    """A version at this gateway.

    `missing` is the reason why the version cannot be served; None if it can be.
    """

    name: str
    models: tuple[str, ...]
    weight: int
    is_leaving: bool
    num_requests: int
    max_len: int
    fingerprint: str
    missing: str | None
    ended: int = 0  # ended requests since the start of the process
    failed: int = 0  # ended requests that failed
    late: int = 0  # ended requests that missed their bounds


class Count(msgspec.Struct, frozen=True):
    """The number of events of one kind since the start of the process."""

    where: str  # what counts the event: router, workers or pools
    event: str
    reason: str
    number: float
    is_trouble: bool = True


class ProcessPart(msgspec.Struct, frozen=True):
    """The part of the state that comes from another gateway process."""

    process: str
    started_s: float
    health: PoolHealth
    queue: int
    queue_s: float
    in_flight: int
    totals: Totals
    hits: Hits
    transfers: list[MovedKv]
    versions: list[ServedCard]
    counts: list[Count]
    running: list[RunningRequest]
    requests: list[EndedRequest]
    samples: list[Sample]


class DashboardState(msgspec.Struct, frozen=True):
    """The whole state.

    An event has only new requests and samples, and `cluster` only if it changed.
    """

    epoch_s: float
    now_s: float
    baton: str
    process: str | None  # name of this process among the processes that share a port
    started_s: float  # Unix time of the process's start
    health: PoolHealth
    pools: list[PoolCount] | None  # None: no controller has sent the wanted sizes
    can_order: bool
    has_controller: bool  # True if a controller has reported recently
    missing: str | None
    bounds: Bounds
    queue: int
    queue_s: float  # predicted seconds in which one worker could compute the queued prompts
    in_flight: int
    totals: Totals
    hits: Hits
    workers: list[WorkerCard]
    transfers: list[MovedKv]
    severed: list[Severed]
    versions: list[ServedCard]
    counts: list[Count]
    running: list[RunningRequest]
    requests: list[EndedRequest]
    samples: list[Sample]
    others: list[ProcessPart]  # other processes that share the port
    cluster: ClusterReport | msgspec.UnsetType | None = msgspec.UNSET


class Seen(msgspec.Struct, frozen=True):
    """The numbers of the latest entries that a subscriber has received."""

    requests: int = 0
    samples: int = 0
    news: ClusterReport | None = None


def cards_of(versions: Versions) -> list[WorkerCard]:
    """Returns a card for each worker of all versions."""
    return [
        _card(worker_id, version.name, status)
        for version in versions.table
        for worker_id, status in version.port.workers().items()
    ]


def served_of(versions: Versions) -> list[ServedCard]:
    """Returns a card for each version, the current version first."""
    return [
        ServedCard(
            name=each.name,
            models=each.model_names,
            weight=each.weight,
            is_leaving=each.is_leaving,
            num_requests=versions.num_running[each.name],
            max_len=each.max_len,
            fingerprint=each.port.fingerprint(),
            missing=each.port.readiness(),
            ended=tally.ended,
            failed=tally.failed,
            late=tally.late,
        )
        for each in versions.table
        for tally in [versions.tallies.of(each.name)]
    ]


def running_of(recent: RecentRequests, versions: Versions, now_s: float) -> list[RunningRequest]:
    """Returns the oldest running requests, with their stages up to now."""
    answers = dict(islice(recent.running.items(), MAX_RUNNING))
    timelines = versions.timelines(answers)
    return [
        _running(answer, timelines.get(request_id), recent.stalls_of(request_id), now_s)
        for request_id, answer in answers.items()
    ]


def _running(
    answer: RunningAnswer, timeline: Timeline | None, stalls: Sequence[Stall], now_s: float
) -> RunningRequest:
    request = answer.request
    segments = segments_of(timeline, now_s - request.received_s, stalls, is_over=False)
    return RunningRequest(
        id=answer.shown_id,
        request_id=request.request_id,
        version=answer.version,
        tenant=request.tenant,
        received_s=request.received_s,
        prompt_tokens=len(request.token_ids),
        answer_tokens=answer.num_tokens,
        is_background=request.is_background,
        timeline=timeline,
        segments=segments,
        spent=spent_of(segments),
    )


def counts_of(
    router: Mapping[tuple[str, str], int],
    loads: Sequence[LoadReport],
    news: ClusterReport | None,
) -> list[Count]:
    """Returns event counts of the routers, the workers and the pools; events that mean trouble come
    first.
    """
    found = [
        Count("router", event, reason, number, is_trouble=_is_trouble(event, reason))
        for (event, reason), number in router.items()
    ]
    trouble: Counter[str] = Counter()
    for load in loads:
        for key, number in load.counters.items():
            if key.partition(":")[0] in _TROUBLE and number:
                trouble[key] += number  # type: ignore[assignment]  # counts of workers are floats
    for key, number in trouble.items():
        event, _, reason = key.partition(":")
        found.append(Count("workers", event, reason, number))
    if news is not None:
        found += [
            Count("pools", event, "", number, is_trouble=_is_trouble(event, ""))
            for event, number in news.counters.items()
        ]
    return sorted(found, key=lambda each: (not each.is_trouble, -each.number))[:MAX_COUNTS]


def _is_trouble(event: str, reason: str) -> bool:
    reasons = _ORDINARY.get(event, ())
    return reasons is not None and reason not in reasons


class OtherProcesses:
    """The latest parts of the state that the other processes have sent."""

    def __init__(self) -> None:
        self._parts: dict[str, ProcessPart] = {}

    def replace(self, parts: Sequence[ProcessPart]) -> list[ProcessPart]:
        """Replaces all parts. Returns the new parts with only the entries that are new."""
        new = [_newer(part, self._parts.get(part.process)) for part in parts]
        self._parts = {part.process: part for part in parts}
        return new

    @property
    def whole(self) -> list[ProcessPart]:
        """Returns the latest parts with all their entries."""
        return list(self._parts.values())


def _newer(part: ProcessPart, known: ProcessPart | None) -> ProcessPart:
    """Returns the part without the entries that `known` already has."""
    request = known.requests[-1].number if known is not None and known.requests else 0
    sample = known.samples[-1].number if known is not None and known.samples else 0
    return msgspec.structs.replace(
        part,
        requests=[each for each in part.requests if each.number > request],
        samples=[each for each in part.samples if each.number > sample],
    )


def newer(recent: RecentRequests, seen: Seen) -> tuple[list[EndedRequest], list[Sample]]:
    """Returns the requests and samples after those in `seen`, oldest first."""
    samples = [each for each in recent.samples if each.number > seen.samples]
    return recent.shown(seen.requests), samples


def seen_all(recent: RecentRequests, news: ClusterReport | None) -> Seen:
    """Returns the `Seen` of a subscriber that has received all present entries."""
    return Seen(
        recent.requests[-1].number if recent.requests else 0,
        recent.samples[-1].number if recent.samples else 0,
        news,
    )


def _card(worker_id: WorkerId, version: str, status: WorkerStatus) -> WorkerCard:
    load = status.load
    counters: Mapping[str, float] = {} if load is None else load.counters
    return WorkerCard(
        worker_id=worker_id,
        version=version,
        role=status.role,
        blocks=None if load is None else _blocks(load, status.num_blocks),
        waiting=0 if load is None else load.waiting_seqs,
        running=0 if load is None else load.running_seqs,
        max_running=status.max_running,
        open_leases=0 if load is None else load.open_leases,
        reserved_blocks=status.reserved_blocks,
        wait_s=status.forecast.wait_s,
        tpot_s=status.forecast.tpot_s,
        num_foreign=status.num_foreign,
        pulled_bytes=counters.get("pulled_bytes", 0.0),
        transfer_s=counters.get("transfer_seconds", 0.0),
        exposed_s=counters.get("exposed_seconds", 0.0),
        step_tokens=counters.get("step_tokens", 0.0),
    )


def _blocks(load: LoadReport, total: int) -> Blocks:
    held = load.owned_blocks + load.leased_blocks + load.in_flight_blocks
    return Blocks(
        free=load.free_blocks,
        cached=load.cached_blocks,
        owned=load.owned_blocks,
        leased=load.leased_blocks,
        in_flight=load.in_flight_blocks,
        total=total,
        lost=total - held - load.free_blocks - load.cached_blocks,
    )
