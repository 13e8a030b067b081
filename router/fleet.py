"""Where a request is prefilled and decoded, decided among thousands of workers in microseconds.

`Fleet` keeps each worker's load beside the index of all blocks, so that one call finds what every
worker holds of a prompt, predicts what each would take, chooses and reserves. It decides like this,
with n tokens of which p are cached where they are computed:

    prefill worker   least  ready + min(prefill(n, own), pull(best - own) + prefill(n, best))
    decode worker    least  D + E·(b + 1) + F·(kv + end), of those with room for the request's end

`ready` is how long the worker still computes what it was given; `own` is what it holds of the
prompt, and `best` is the most that any worker holds from which it may pull. Running requests, the
new one included, count with the length that they are predicted to reach (`end`): growth of those
already admitted is part of what a worker has promised. A mixed worker goes on with what it
prefills, so it is open to a prompt only if it could decode it too.

Ties fall by a seeded generator: several idle workers are as good as each other, and so are several
that hold the same prefix; among idle workers that hold nothing, the search starts anywhere and ends
at the first.

Work that this gateway gave to a worker is counted exactly; what others gave to it as the worker
last reported. Not known here: priorities, deadlines, and pairs of workers that do not reach each
other; and a worker's memory is one number.

C++ decides (`router.native`), beside an index that it shares. The rule in plain, slow Python is in
the tests.

Sources: Algorithm 1 of Qin et al., Mooncake, FAST 2025; costs, `router.costs`.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import NamedTuple
from weakref import finalize

from engine.blocks import BlockHash
from engine.messages import RequestId, Role, WorkerId
from router.index import PrefixIndex, pack
from router.native import library

MAX_KINDS = 256

_ASK = struct.Struct("=Q3q3d")  # a Call of src/router.cpp up to the decision
_DECISION = struct.Struct("=7i4x3d")
_OWN = struct.Struct("=4d")


class ClassCosts(NamedTuple):
    """What work costs on workers of one class, in seconds: the formulas of `router.costs`.

    `pull_block_s` is all that one more block adds: its bytes, and the description of it.
    """

    prefill_s: float  # A
    prefill_token_s: float  # B, of tokens to compute
    prefill_square_s: float  # C, of their n² - p²
    decode_s: float  # D
    decode_row_s: float  # E, of running sequences
    decode_context_s: float  # F, of tokens of context
    pull_s: float
    pull_block_s: float


@dataclass(frozen=True, slots=True)
class FleetWorker:
    """A worker as far as decisions depend on it."""

    role: Role
    num_blocks: int
    max_running: int
    costs: str  # name of its class
    blocks_like: str | None = None  # what it holds, others with the same text can use; None: nobody
    pulls: bool = True  # whether it takes prefixes from those others


class Load(NamedTuple):
    """What is to be done on a worker, or reserved there."""

    work_s: float = 0.0  # of prefill that is not over
    num_running: int = 0
    num_tokens: int = 0  # of context, at the end of the answers
    num_blocks: int = 0


class Bounds(NamedTuple):
    """What a decision must keep, in seconds."""

    tpot_s: float = math.inf
    wait_s: float = math.inf  # until the prefill worker is ready


UNBOUNDED = Bounds()


class Decision(NamedTuple):
    """Where a request goes, and what is predicted of it. Its load is reserved there."""

    prefill: WorkerId
    decode: WorkerId
    matched_blocks: int  # of the prompt in the prefill worker
    source: WorkerId | None  # more are pulled from there first
    pulled_blocks: int
    wait_s: float  # until the prefill worker is ready
    ttft_s: float  # from now, the wait included
    tpot_s: float


class Refusal(StrEnum):
    """Why there is no decision."""

    NO_PREFILL = "no prefill worker is open to more work"
    NO_ROOM = "no decode worker has room"
    TOO_SLOW = "no decode worker with room would keep the bound on TPOT"


_decision = partial(tuple.__new__, Decision)  # what its constructor does, in half the time

_REFUSALS = {1: Refusal.NO_PREFILL, 2: Refusal.NO_ROOM, 3: Refusal.TOO_SLOW}


class Fleet:
    """All workers, their blocks and their loads. `index` is the `PrefixIndex` to feed with news.

    Workers are added to and forgotten by the fleet, not the index. Raises BuildError where C++
    cannot be built.
    """

    def __init__(self, *, block_size: int, seed: int = 0) -> None:
        self._core = library.opened()
        self.index = PrefixIndex(seed=seed)
        self.block_size = block_size
        self._handle: int = self._core.baton_fleet_open(self.index.handle, block_size, seed)
        # It looks into the index, which therefore may not be closed before it.
        finalize(self, _close, self._core, self._handle, self.index)
        self._costs: dict[str, int] = {}
        self._groups: dict[str, int] = {}
        self._kinds: dict[tuple[int, int, bool], int] = {}
        self._tickets: dict[RequestId, int] = {}
        self._call = bytearray(_ASK.size + _DECISION.size)
        self._call_address = library.address_of(self._call)
        self._decide = self._core.baton_fleet_decide

    @property
    def num_reserved(self) -> int:
        """Requests that hold reservations."""
        return len(self._tickets)

    def set_costs(self, name: str, costs: ClassCosts) -> None:
        """Work on this class of workers costs so much from now on; what is reserved stays."""
        number = self._costs.setdefault(name, len(self._costs))
        self._core.baton_fleet_costs(self._handle, number, library.Costs(*costs))

    def add(self, worker_id: WorkerId, worker: FleetWorker) -> None:
        """A worker has come, idle and open. Its class's costs have been set.

        Raises TooManyWorkers.
        """
        self.forget(worker_id)
        kind = self._kind(worker)
        self.index.add(worker_id, worker.num_blocks)
        self._core.baton_fleet_join(
            self._handle,
            self.index.slots[worker_id],
            kind,
            worker.role.prefills,
            worker.role.decodes,
            worker.num_blocks,
            worker.max_running,
        )

    def forget(self, worker_id: WorkerId) -> None:
        """A worker is gone, with all it held; what was reserved on it is no more."""
        slot = self.index.slots.get(worker_id)
        if slot is None:
            return
        self._core.baton_fleet_leave(self._handle, slot)
        self.index.forget(worker_id)

    def close(self, worker_id: WorkerId) -> None:
        """It is given nothing new. Others still pull from it."""
        self._core.baton_fleet_set_open(self._handle, self.index.slots[worker_id], 0)

    def reopen(self, worker_id: WorkerId) -> None:
        """It is given work again."""
        self._core.baton_fleet_set_open(self._handle, self.index.slots[worker_id], 1)

    def set_others(self, worker_id: WorkerId, load: Load, now_s: float) -> None:
        """A worker has reported what others gave to it."""
        slot = self.index.slots[worker_id]
        self._core.baton_fleet_others(self._handle, slot, *load, now_s)

    def decide(
        self,
        request_id: RequestId,
        hashes: Sequence[BlockHash],
        *,
        num_tokens: int,
        end_tokens: int,
        now_s: float,
        bounds: Bounds = UNBOUNDED,
    ) -> Decision | Refusal:
        """Chooses where a request goes, and reserves it there until it is released.

        `hashes` are those of the prompt's full blocks, `num_tokens` its tokens, `end_tokens` the
        predicted length of prompt and answer.
        """
        assert request_id not in self._tickets
        _ASK.pack_into(
            self._call, 0, self._handle, len(hashes), num_tokens, end_tokens, now_s, *bounds
        )
        self._decide(self._call_address, pack(hashes))
        status, prefill, decode, source, matched, pulled, ticket, *seconds = _DECISION.unpack_from(
            self._call, _ASK.size
        )
        if status:
            return _REFUSALS[status]
        self._tickets[request_id] = ticket
        names = self.index.names
        source_id = None if source == library.NONE else names[source]
        return _decision((names[prefill], names[decode], matched, source_id, pulled, *seconds))

    def prefilled(self, request_id: RequestId, now_s: float) -> None:
        """Its prompt is computed, or will not be: the prefill worker begins its next work now."""
        self._core.baton_fleet_prefilled(self._handle, self._tickets[request_id], now_s)

    def release(self, request_id: RequestId, now_s: float) -> None:
        """A request is over: all that it reserved is free. One without reservations is ignored."""
        ticket = self._tickets.pop(request_id, None)
        if ticket is not None:
            self._core.baton_fleet_release(self._handle, ticket, now_s)

    def reserved(self, worker_id: WorkerId) -> Load:
        """What this gateway has reserved on a worker."""
        own = bytearray(_OWN.size)
        slot = self.index.slots[worker_id]
        self._core.baton_fleet_own(self._handle, slot, library.address_of(own))
        work_s, num_running, num_tokens, num_blocks = _OWN.unpack(own)
        return Load(work_s, int(num_running), int(num_tokens), int(num_blocks))

    def validate(self) -> None:
        """Asserts that what is reserved on each worker is the sum over requests. Slow."""
        self.index.validate()
        assert self._core.baton_fleet_is_sound(self._handle)

    def _kind(self, worker: FleetWorker) -> int:
        group = library.NONE
        if worker.blocks_like is not None:
            group = self._groups.setdefault(worker.blocks_like, len(self._groups))
        key = (self._costs[worker.costs], group, worker.pulls)
        kind = self._kinds.get(key)
        if kind is None:
            assert len(self._kinds) < MAX_KINDS, "more kinds of workers than C++ has room for"
            kind = self._core.baton_fleet_kind(self._handle, library.Kind(*key, 0))
            self._kinds[key] = kind
        return kind


def _close(core: library.Core, handle: int, _index: PrefixIndex) -> None:
    core.baton_fleet_close(handle)
