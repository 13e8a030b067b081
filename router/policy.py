"""Placement: which worker computes a prompt and which one goes on from it.

A policy is a pure function of the view. It answers with a placement, with `Busy` (no worker has
room now: ask again when something changes) or with `Impossible` (no live worker could ever serve
this).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.messages import Role, WorkerId
from router.view import ClusterView, WorkerView


@dataclass(frozen=True, slots=True)
class Need:
    """What a placement must provide for."""

    num_tokens: int  # to prefill
    max_len: int  # tokens at the end of the answer, prompt included


@dataclass(frozen=True, slots=True)
class Placement:
    """Both workers are the same where prefill and decode run in one."""

    prefill: WorkerId
    decode: WorkerId


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

    A prompt waits in the router until some prefill worker's backlog is under the bound, so nobody
    waits behind a long prompt while another worker idles. A mixed worker that prefills goes on
    decoding.
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
    prefill, worker = min(open_prefillers, key=lambda item: (item[1].reserved_tokens, item[0]))
    if worker.info.role is Role.MIXED:
        return Placement(prefill, prefill)
    return Placement(prefill, _emptiest(open_decoders))


def _emptiest(workers: Iterable[tuple[WorkerId, WorkerView]]) -> WorkerId:
    """Of decode workers, the one with the smallest share of its KV promised."""
    chosen, _ = min(
        workers, key=lambda item: (item[1].reserved_blocks / item[1].info.num_blocks, item[0])
    )
    return chosen


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
    return blocks <= worker.info.num_blocks and len(worker.decode_blocks) < worker.info.max_running


def _has_backlog_room(worker: WorkerView, need: Need, prefill_backlog_tokens: int) -> bool:
    backlog = worker.reserved_tokens
    return backlog == 0 or backlog + need.num_tokens <= prefill_backlog_tokens
