"""Placement: which worker computes a prompt and which one goes on from it.

A policy is a pure function of the view. It answers with a placement, with `Busy` (no worker has
room now: ask again when something changes) or with `Impossible` (no live worker could ever serve
this).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from engine.messages import Role, WorkerId
from router.view import ClusterView, WorkerView

_Worker = tuple[WorkerId, WorkerView]


@dataclass(frozen=True, slots=True)
class Placement:
    """Both workers are the same where prefill and decode run in one."""

    prefill: WorkerId
    decode: WorkerId


@dataclass(frozen=True, slots=True)
class SharedPrompt:
    """Where another request had the same prompt computed, and how much of it is found there."""

    placement: Placement
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Need:
    """What a placement must provide for."""

    num_tokens: int  # to prefill
    max_len: int  # tokens at the end of the answer, prompt included
    kept_tokens: Mapping[WorkerId, int] = field(default_factory=dict)  # left by earlier attempts
    shared: SharedPrompt | None = None
    preempted_s: Mapping[WorkerId, float] = field(default_factory=dict)  # when, and by whom

    def tokens_to_compute(self, worker_id: WorkerId) -> int:
        """Tokens that a worker would have to prefill."""
        if self.shared is None or self.shared.placement.prefill != worker_id:
            return self.num_tokens
        return self.num_tokens - self.shared.num_tokens


@dataclass(frozen=True, slots=True)
class Busy:
    """All workers that could serve this are full."""


@dataclass(frozen=True, slots=True)
class Impossible:
    """No live worker could serve this, and why."""

    reason: str


def least_loaded(
    view: ClusterView, need: Need, prefill_backlog_tokens: int
) -> Placement | Busy | Impossible:
    """The prefill worker with the shortest backlog, the decode worker with the most free KV.

    If the two workers that share the prompt have room, it is these. A decode worker where an
    earlier attempt left KV goes before the others: it pulls only the rest. Among prefill workers
    with equal backlogs, one from which it can pull is taken.

    A decode worker that ran out of memory under this request is open to it again when it has
    reported room for all of it: what this gateway promised to it is not all that it holds.

    A prompt waits in the router until some prefill worker's backlog is under the bound, so nobody
    waits behind a long prompt while another worker idles. A mixed worker that prefills goes on
    decoding. Severed workers are not put together while there are others, even if those are busy:
    to wait for them is quicker than to fail again.
    """
    prefillers = [(i, w) for i, w in view.workers.items() if w.info.role.prefills]
    decoders = [(i, w) for i, w in view.workers.items() if w.info.role.decodes]
    if not prefillers:
        return Impossible("no prefill worker is alive")
    if not decoders:
        return Impossible("no decode worker is alive")
    if not any(_fits_empty(w, need) for _, w in decoders):
        return Impossible("the request is larger than the KV memory of any decode worker")
    prefillers = [(i, w) for i, w in prefillers if _could_prefill(w, need)]
    if not prefillers:
        return Impossible("the request is larger than the KV memory of any prefill worker")
    open_prefillers = [
        (i, w)
        for i, w in prefillers
        if _has_backlog_room(w, need, prefill_backlog_tokens)
        and (w.info.role is Role.PREFILL or _has_room(w, need))
    ]
    open_decoders = [(i, w) for i, w in decoders if _has_room(w, need)]
    if not open_prefillers or not open_decoders:
        return Busy()
    if need.shared is not None:
        near = need.shared.placement
        if _is_open(view, near, open_prefillers, open_decoders):
            return near
    partners = _partners(view, open_prefillers, open_decoders)
    if not partners and _partners(view, prefillers, decoders):
        return Busy()
    if partners:
        open_prefillers = [item for item in open_prefillers if item[0] in partners]

    def cost(item: _Worker) -> tuple[int, int, WorkerId]:
        worker_id, worker = item
        kept = (need.kept_tokens.get(i, 0) for i, _ in partners.get(worker_id, ()))
        backlog = worker.reserved_tokens + need.tokens_to_compute(worker_id)
        return backlog, -max(kept, default=0), worker_id

    prefill, worker = min(open_prefillers, key=cost)
    if worker.info.role is Role.MIXED:
        return Placement(prefill, prefill)
    return Placement(prefill, _best_decoder(partners.get(prefill, open_decoders), need))


def _is_open(
    view: ClusterView,
    placement: Placement,
    prefillers: Iterable[_Worker],
    decoders: Iterable[_Worker],
) -> bool:
    return (
        any(worker_id == placement.prefill for worker_id, _ in prefillers)
        and any(worker_id == placement.decode for worker_id, _ in decoders)
        and (placement.prefill, placement.decode) not in view.severed
    )


def _partners(
    view: ClusterView, prefillers: Iterable[_Worker], decoders: Sequence[_Worker]
) -> dict[WorkerId, list[_Worker]]:
    """For each prefill worker the decode workers that KV can reach from it; only those that have
    any, but for mixed workers, which need none.
    """
    return {
        worker_id: reached
        for worker_id, worker in prefillers
        if (reached := [item for item in decoders if (worker_id, item[0]) not in view.severed])
        or worker.info.role is Role.MIXED
    }


def prefix_source(
    view: ClusterView,
    sink_id: WorkerId,
    held_blocks: Mapping[WorkerId, int],
    pays: Callable[[int], bool],
) -> WorkerId | None:
    """The worker to pull a prompt's prefix from before `sink_id` computes it, if that pays.

    It is the one that holds most; `held_blocks` counts the leading blocks that each worker holds.
    `pays` says whether to pull so many blocks is quicker than to compute them.
    """
    sink = view.workers[sink_id]
    here = held_blocks.get(sink_id, 0)
    sources = [
        (-num_blocks, worker_id)
        for worker_id, num_blocks in held_blocks.items()
        if num_blocks > here and _can_exchange(view.workers.get(worker_id), sink)
    ]
    if not sources:
        return None
    most, source_id = min(sources)
    return source_id if pays(-most - here) else None


def _can_exchange(source: WorkerView | None, sink: WorkerView) -> bool:
    """Whether blocks of the one mean the same in the other, and arrive as they were.

    A prefix that was rounded on its way would be cached as if it had been computed.
    """
    return (
        source is not None
        and sink.info.kv_wire_dtype in (None, sink.info.layout.kv_format)
        and source.info.fingerprint == sink.info.fingerprint
        and source.info.layout.difference(sink.info.layout) is None
    )


def _best_decoder(workers: Iterable[tuple[WorkerId, WorkerView]], need: Need) -> WorkerId:
    """The one that kept most of the prompt; among equals, the smallest share of its KV promised."""

    def cost(item: tuple[WorkerId, WorkerView]) -> tuple[int, float, WorkerId]:
        worker_id, worker = item
        share = worker.reserved_blocks / worker.info.num_blocks
        return -need.kept_tokens.get(worker_id, 0), share, worker_id

    return min(workers, key=cost)[0]


def decode_blocks(worker: WorkerView, need: Need) -> int:
    """KV blocks that the request will hold at its greatest length."""
    return worker.info.layout.num_blocks_for(need.max_len)


def _fits_empty(worker: WorkerView, need: Need) -> bool:
    return decode_blocks(worker, need) <= worker.info.num_blocks


def _could_prefill(worker: WorkerView, need: Need) -> bool:
    """Whether it holds the prompt; one that goes on decoding, the whole answer."""
    if worker.info.role is Role.MIXED:
        return _fits_empty(worker, need)
    return worker.info.layout.num_blocks_for(need.num_tokens) <= worker.info.num_blocks


def _has_room(worker: WorkerView, need: Need) -> bool:
    blocks = worker.reserved_blocks + decode_blocks(worker, need)
    if blocks > worker.info.num_blocks or len(worker.decode_blocks) >= worker.info.max_running:
        return False
    preempted_s = need.preempted_s.get(worker.info.worker_id)
    return preempted_s is None or _has_reported_room(worker, need, preempted_s)


def _has_reported_room(worker: WorkerView, need: Need, since_s: float) -> bool:
    load = worker.load
    if load is None or worker.reported_s <= since_s:
        return False
    return load.free_blocks + load.cached_blocks >= decode_blocks(worker, need)


def _has_backlog_room(worker: WorkerView, need: Need, prefill_backlog_tokens: int) -> bool:
    backlog = worker.reserved_tokens
    more = need.tokens_to_compute(worker.info.worker_id)
    return backlog == 0 or backlog + more <= prefill_backlog_tokens
