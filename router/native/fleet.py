"""The `slo` policy in C++: a placement among thousands of workers in microseconds.

`Fleet` keeps the load of each worker beside the index of all blocks. One call finds the blocks of a
prompt that each worker and store has, predicts the times, chooses the workers, and reserves their
resources for the next call.

`router.policies.slo` explains the rule, and decides itself while costs are unknown, or while
workers have different block sizes.

C++ does not support requests with kept tokens or a back-off, second attempts, or severed workers.
For such a decision some workers are hidden: C++ is told that they take no prompts, or no sequences.
The next update makes them visible again.

`router.cluster.view` alone owns the claims on workers. If anything but the number of tokens changed
at a worker, the fleet is updated before the next decision. The number of tokens is updated with the
worker's next report.

A seeded generator breaks ties among idle workers and among holders of the same prefix. Among idle
workers without a prefix of the prompt, the search starts at a random worker and ends at the first
match.
"""

import ctypes
import math
import struct
from collections.abc import Hashable, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from weakref import finalize

from msgspec.structs import replace

from engine.messages import Role, Welcome, WorkerId
from engine.native.library import NONE, Native, library
from engine.worker.block_events import LOWER_MEDIA, Medium
from engine.worker.blocks import BlockHash
from router.cluster.estimates import Estimates, worker_class
from router.cluster.view import ClusterView, WorkerView
from router.native import structs
from router.native.index import PrefixIndex, name_on, pack
from router.policies.base import EMPTY, Busy, Decision, Need, Queue
from router.policies.candidates import (
    LEAST_WAIT_S,
    foreign_prefill_s,
    has_memory,
    has_room,
    reaching,
)
from router.policies.slo import LEND_RATIO, LEND_SHARE, PROMPT_WEIGHT, Slo

MEDIA = (Medium.HOST, *LOWER_MEDIA)  # in the order in which C++ numbers them

_ASK = struct.Struct("=Q4q7dq")  # the fields of a `Call` in src/router.cpp before the decision
_DECISION = struct.Struct("=7i4x5d")
_LOAD = struct.Struct("=q2d5q")
_CLOSED = math.inf, math.inf  # ready time and minimum wait of a worker that takes no prompts
_FULL = 2**40  # a number of sequences above the limit of any worker
_PLACED, _NO_ROOM = 0, 2


class FleetDecision(NamedTuple):
    """A decision of C++. Workers are given as slots; `NONE` means no worker."""

    status: int
    prefill: int
    decode: int
    source: int  # slot of the worker or store from which further blocks are pulled
    matched_blocks: int  # the prompt's blocks that are cached in the prefill worker
    pulled_blocks: int
    medium: int  # medium of the source, as an index of `MEDIA`
    wait_s: float  # seconds until the chosen or else the first prefill worker is ready
    ttft_s: float  # seconds from now to the first token, including the wait
    tpot_s: float
    load_s: float  # seconds until the source has read the blocks it lacks in memory
    slowdown: float  # factor by which decoding on its worker slows the prompt down


_decision = partial(tuple.__new__, FleetDecision)  # the constructor's own code, in half the time


@dataclass(slots=True)
class _Class:
    """Workers whose work has the same cost; one of them represents all."""

    number: int
    worker: WorkerView
    size: int = 0
    costs: tuple[float, ...] | None = None  # in the form that C++ expects


class Fleet:
    """The workers of a view, and their blocks. Raises BuildError."""

    def __init__(
        self,
        view: ClusterView,
        index: PrefixIndex,
        estimates: Estimates,
        *,
        backlog_s: float,
        seed: int = 0,
    ) -> None:
        """A prefill worker gets no new prompt while it has more than `backlog_s` of work."""
        self._view = view
        self._index = index
        self._estimates = estimates
        self._backlog_s = backlog_s
        self._wait_bound_s = backlog_s + LEAST_WAIT_S
        self._seed = seed
        self._core = library()
        self._handle = self._block_size = 0  # set when the first worker joins
        self._classes: dict[Hashable, _Class] = {}  # classes of live workers
        # The numbers of all classes, groups and kinds ever seen.
        self._numbers: dict[Hashable, int] = {}
        self._groups: dict[Hashable, int] = {}
        self._kinds: dict[Hashable, int] = {}
        self._homes: dict[WorkerId, _Class] = {}
        self._stores: set[WorkerId] = set()  # stores to be added to C++, or added already
        # workers with another block size, or beyond the limit of kinds
        self._odd: set[WorkerId] = set()
        self._unsure: set[WorkerId] = set()  # workers whose compute time is unknown
        self._shared: set[WorkerId] = set()  # workers that also compute for other gateways
        self._version = -1  # version of the estimates that C++ has
        # True if costs are new since the last update of loads, and if all costs are known.
        self._has_new_costs = self._is_known = False
        self._num_prefillers, self._largest = 0, (0, 0, 0)
        self._call = bytearray(_ASK.size + _DECISION.size)
        self._call_address = structs.address_of(self._call)
        self._resize_loads(1)

    def add(self, worker: WorkerView) -> None:
        """Adds a worker that the index contains already.

        A store has no load, and may join before the first worker, which sets the block size.
        """
        if worker.is_store:
            self._put_store(worker)
            return
        info, worker_id = worker.info, worker.info.worker_id
        if not self._handle:
            self._open(info.layout.block_size)
        its_class, kind = _class_of(worker), None
        if info.layout.block_size == self._block_size:
            number = self._numbers.setdefault(its_class, len(self._numbers))
            kind = self._kind(number, worker)
        if kind is None:
            self._odd.add(worker_id)
            return
        home = self._classes.get(its_class)
        if home is None:
            alike = WorkerView(info)  # a separate view, as the original may change its class
            home = self._classes[its_class] = _Class(number, alike)
        home.size += 1
        self._homes[worker_id] = home
        self._num_prefillers += info.role.prefills
        slot = self._index.slots[worker_id]
        self._send_costs()
        self._core.baton_fleet_join(self._handle, slot, kind)
        self._measure()
        self._view.touched.add(worker_id)

    def remove(self, worker: WorkerView) -> None:
        """Removes a worker that the index still contains."""
        worker_id = worker.info.worker_id
        if worker_id in self._stores:
            self._stores.discard(worker_id)
            self._core.baton_fleet_drop_store(self._handle, self._index.slots[worker_id])
        self._odd.discard(worker_id)
        self._unsure.discard(worker_id)
        self._shared.discard(worker_id)
        home = self._homes.pop(worker_id, None)
        if home is None:
            return
        self._num_prefillers -= worker.info.role.prefills
        self._core.baton_fleet_leave(self._handle, self._index.slots[worker_id])
        home.size -= 1
        if not home.size:
            del self._classes[_class_of(worker)]
            self._send_costs()
        self._measure()

    def choose(
        self,
        need: Need,
        hashes: Sequence[BlockHash],
        now_s: float,
        queue: Queue = EMPTY,
        *,
        other_than: WorkerId | None = None,
    ) -> Decision | Busy | None:
        """Places a request whose full blocks have these hashes, but not on `other_than`.

        Returns None if the policy itself must decide.
        """
        self.update()
        if not self._can_decide(need):
            return None
        view, none = self._view, frozenset[WorkerId]()
        if not (view.severed or need.kept_tokens or need.preempted_s or other_than is not None):
            return self.choice(self.decide(need, hashes, now_s, queue), now_s)
        unreaching, others = _unreaching(view, need), {other_than} if other_than else none
        severed = () if unreaching is None else view.severed
        closed, full = (unreaching or none) | others, _full(view, need) | others
        while True:
            self.update(closed, full)
            choice = self.choice(self.decide(need, hashes, now_s, queue), now_s)
            if isinstance(choice, Busy):
                return choice
            prefill, decode = choice.prefill_worker, choice.decode_worker
            if (prefill, decode) in severed:
                closed = {i for i, _ in view.prefillers if i != prefill}
                full = full | {sink for source, sink in severed if source == prefill}
            elif (choice.pulled_from, prefill) in view.severed:
                need = replace(need, may_pull=False)
            else:
                return choice
            view.touched |= {prefill, decode}  # C++ has changed its own loads of these two workers

    def decide(
        self, need: Need, hashes: Sequence[BlockHash], now_s: float, queue: Queue = EMPTY
    ) -> FleetDecision:
        """Returns the decision of C++ for a request that C++ can place."""
        _ASK.pack_into(
            self._call,
            0,
            self._handle,
            len(hashes),
            need.num_tokens,
            need.end_len,
            need.max_len,
            now_s,
            _tpot_bound_s(need, self._classes.values(), self._estimates),
            self._wait_bound_s,
            self._estimates.offer_s(),
            queue.waiting,
            queue.seconds,
            queue.busy,
            need.may_pull,
        )
        self._core.baton_fleet_decide(self._call_address, pack(hashes))
        return _decision(_DECISION.unpack_from(self._call, _ASK.size))

    def choice(self, decision: FleetDecision, now_s: float) -> Decision | Busy:
        """Converts a decision of C++ to a `Decision`."""
        if decision.status != _PLACED:
            return self._busy(decision, now_s)
        names, block_size = self._index.names, self._block_size
        prefill, decode = names[decision.prefill], names[decision.decode]
        assert prefill is not None
        assert decode is not None
        source = None if decision.source == NONE else names[decision.source]
        pulls, workers = source is not None, self._view.workers
        return Decision(
            Slo.name,
            reason(workers[prefill].info, workers[decode].info, pulls=pulls),
            prefill,
            decode,
            self._num_prefillers,
            num_matched_tokens=decision.matched_blocks * block_size,
            pulled_from=source,
            num_pulled_tokens=decision.pulled_blocks * block_size if pulls else 0,
            pulled_medium=MEDIA[decision.medium] if source in self._stores else None,
            predicted_load_s=decision.load_s,
            predicted_ttft_s=decision.ttft_s,
            predicted_tpot_s=decision.tpot_s,
            slowdown=decision.slowdown,
        )

    def update(
        self, closed: Set[WorkerId] = frozenset(), full: Set[WorkerId] = frozenset()
    ) -> None:
        """Updates C++ with all changes since the last call.

        Until the next call, `closed` workers take no prompts and `full` workers no sequences.
        """
        touched = self._view.touched
        if self._version != self._estimates.version:
            self._send_costs()
        if self._has_new_costs:  # the loads contain seconds at the old costs
            touched |= self._unsure | self._shared
            self._has_new_costs = False
        touched |= closed | full
        if not touched:
            return
        count = 0
        if len(self._loads) < len(touched) * _LOAD.size:
            self._resize_loads(2 * len(touched))
        for worker_id in touched:
            if worker_id in self._homes:
                is_closed, is_full = worker_id in closed, worker_id in full
                self._put_load(count, worker_id, is_closed=is_closed, is_full=is_full)
                count += 1
            elif worker_id in self._stores:
                self._put_store(self._view.workers[worker_id])
        touched.clear()
        touched |= closed | full
        self._core.baton_fleet_loads(self._handle, self._loads_address, count)

    def validate(self) -> None:
        """Asserts that the arrays in C++ are consistent and have the same workers. Slow."""
        stores = {i for i, worker in self._view.workers.items() if worker.is_store}
        assert self._homes.keys() | self._odd == self._view.workers.keys() - stores
        assert self._stores <= stores
        assert sum(home.size for home in self._classes.values()) == len(self._homes)
        assert all(home.size for home in self._classes.values())
        assert self._unsure <= self._homes.keys()
        if self._handle:
            assert self._core.baton_fleet_is_sound(self._handle)

    # ------------------------------------------------------------ decisions

    def _can_decide(self, need: Need) -> bool:
        """True if C++ has all costs, and if some worker could serve the request."""
        if self._odd or self._unsure or not self._is_known:
            return False
        decode_tokens, prefill_tokens, mixed_tokens = self._largest
        fits = need.num_tokens <= prefill_tokens or need.max_len <= mixed_tokens
        return fits and need.max_len <= decode_tokens

    def _busy(self, decision: FleetDecision, now_s: float) -> Busy:
        """Converts a refusal to `Busy`, with the role whose workers have no room."""
        if decision.status == _NO_ROOM or decision.wait_s <= self._wait_bound_s:
            return Busy()
        until_s = now_s + decision.wait_s - self._backlog_s
        return Busy(until_s if until_s < math.inf else None, Role.PREFILL)

    # ------------------------------------------------------------ updates of C++

    def _send_costs(self) -> None:
        """Sends new costs of each class to C++, and records whether all costs are known.

        Most observations do not change any cost.
        """
        self._is_known = bool(self._classes)
        for home in self._classes.values():
            costs = _costs(home.worker, self._estimates)
            if costs is None:
                self._is_known = False
            elif costs != home.costs:
                home.costs = costs
                self._core.baton_fleet_costs(
                    self._handle, home.number, ctypes.byref(structs.FleetCosts(*costs))
                )
                self._has_new_costs = True
        self._version = self._estimates.version

    def _resize_loads(self, num_workers: int) -> None:
        self._loads = bytearray(num_workers * _LOAD.size)
        self._loads_address = structs.address_of(self._loads)

    def _put_load(self, row: int, worker_id: WorkerId, *, is_closed: bool, is_full: bool) -> None:
        """Writes a worker's load into a row of the update."""
        worker = self._view.workers[worker_id]
        foreign_s = foreign_prefill_s(worker, self._estimates)
        if foreign_s is None or (worker.prefills and not worker.reserved_s):
            self._unsure.add(worker_id)
            foreign_s = 0.0
        else:
            self._unsure.discard(worker_id)
        (self._shared.add if worker.foreign.prompt_tokens else self._shared.discard)(worker_id)
        ready = _CLOSED if is_closed else worker.ready(foreign_s)
        load = _load(worker, ready, is_full=is_full)
        _LOAD.pack_into(self._loads, row * _LOAD.size, self._index.slots[worker_id], *load)

    def _open(self, block_size: int) -> None:
        self._block_size = block_size
        rule = (ctypes.c_double * 3)(LEND_RATIO, LEND_SHARE, PROMPT_WEIGHT)
        self._handle = self._core.baton_fleet_open(self._index.handle, block_size, self._seed, rule)
        # The fleet reads the index, so the index must not be closed first.
        finalize(self, _close, self._core, self._handle, self._index)
        for worker in self._view.workers.values():
            if worker.is_store:
                self._put_store(worker)

    def _put_store(self, store: WorkerView) -> None:
        """Sends a store, or its new costs, to C++ if the fleet is open."""
        info = store.info
        if not self._handle:
            return
        self._stores.add(info.worker_id)
        slots = [self._index.slots[name_on(info.worker_id, medium)] for medium in MEDIA]
        loads = [self._estimates.load_cost(store, medium) for medium in LOWER_MEDIA]
        news = structs.FleetStore(
            _group(self._groups, info),
            (ctypes.c_int32 * len(MEDIA))(*slots),
            (ctypes.c_double * len(MEDIA))(0.0, *(load.fixed_s for load in loads)),
            (ctypes.c_double * len(MEDIA))(0.0, *(load.block_s for load in loads)),
        )
        self._core.baton_fleet_put_store(self._handle, ctypes.byref(news))

    def _kind(self, number: int, worker: WorkerView) -> int | None:
        """Returns the number of a worker's kind; None if there are too many kinds."""
        info, role = worker.info, worker.info.role
        group, pulls = _group(self._groups, info), info.pulls_unchanged
        key = (number, group, info.stretch, pulls)
        kind = self._kinds.get(key)
        if kind is None:
            fields = (number, group, role.prefills, role.decodes, pulls, info.is_fluid)
            sizes = (info.num_blocks, info.max_running, info.stretch or 0.0)
            found = ctypes.byref(structs.FleetKind(*fields, *sizes))
            kind = self._kinds[key] = int(self._core.baton_fleet_kind(self._handle, found))
        return None if kind == NONE else kind

    def _measure(self) -> None:
        infos = [home.worker.info for home in self._classes.values()]
        has_prefillers = self._num_prefillers > 0
        self._largest = _largest(infos, self._block_size, has_prefillers=has_prefillers)


def _group(groups: dict[Hashable, int], info: Welcome) -> int:
    """Returns a key of the workers that can use each other's blocks (`can_pull_from`)."""
    return groups.setdefault((info.fingerprint, info.layout), len(groups))


def _load(
    worker: WorkerView, ready: tuple[float, float], *, is_full: bool
) -> tuple[float, float, int, int, int, int, int]:
    """Returns a worker's load in the form of C++."""
    num_decodes, mean_tokens = worker.num_decodes, worker.mean_context_tokens
    num_decoding = worker.num_decoding
    return (
        *ready,
        _FULL if is_full else num_decodes,
        mean_tokens,
        worker.promised_blocks,
        num_decoding,
        mean_tokens * num_decoding // max(num_decodes, 1),  # `decoding_context_tokens`
    )


def _tpot_bound_s(need: Need, classes: Iterable[_Class], estimates: Estimates) -> float:
    """Returns the TPOT bound; infinite without one, or if even an empty worker would miss it."""
    bound_s = need.tpot_bound_s
    if bound_s is None:
        return math.inf
    end_len = need.end_len
    for home in classes:
        if home.worker.info.role.decodes and has_memory(home.worker, end_len):
            alone_s = estimates.step_s(home.worker, 1, end_len)
            if alone_s is None or alone_s <= bound_s:
                return bound_s
    return math.inf


def _largest(
    infos: Sequence[Welcome], block_size: int, *, has_prefillers: bool
) -> tuple[int, int, int]:
    """Returns the number of tokens that the largest worker of some roles could store.

    The three numbers are the maximum of decode and mixed workers, of prefill workers, and of mixed
    workers. Without prefill workers, fluid decode workers count as mixed workers.
    """
    largest = dict.fromkeys(Role, 0)
    stand_ins = 0
    for info in infos:
        num_tokens = info.num_blocks * block_size
        largest[info.role] = max(largest[info.role], num_tokens)
        if info.is_fluid and not has_prefillers:
            stand_ins = max(stand_ins, num_tokens)
    mixed = max(largest[Role.MIXED], stand_ins)
    return max(largest[Role.DECODE], mixed), largest[Role.PREFILL], mixed


def _class_of(worker: WorkerView) -> Hashable:
    """Returns the class of the workers with equal costs, including the transfer of a block."""
    return worker_class(worker), worker.info.layout


def _costs(worker: WorkerView, estimates: Estimates) -> tuple[float, ...] | None:
    """Returns the costs for C++ of workers like this one; None while some costs are unknown."""
    info = worker.info
    prefill = estimates.prefill_cost(worker)
    decode = estimates.decode_cost(worker)
    pull = estimates.pull_cost(worker)
    if prefill is None or (decode is None and info.role.decodes):
        return None
    return (
        prefill.fixed_s,
        prefill.token_s,
        prefill.square_s,
        *((0.0, 0.0, 0.0) if decode is None else (decode.fixed_s, decode.row_s, decode.context_s)),
        pull.fixed_s,
        pull.block_s + info.layout.block_bytes / pull.bytes_per_s,
    )


def _close(core: Native, handle: int, _index: PrefixIndex) -> None:
    core.baton_fleet_close(handle)


def _full(view: ClusterView, need: Need) -> set[WorkerId]:
    """Returns the workers that must not decode the request although they have room.

    If a decode worker with room has kept tokens of the request, these are all other workers.
    """
    kept, decoders = need.kept_tokens, [(w.info.worker_id, w) for w in view.decoders]
    able = [
        (kept[i], i)
        for i, w in decoders
        if kept.get(i) and w.info.role is Role.DECODE and has_room(w, need)
    ]
    if able:
        keeper = max(able)[1]
        return {i for i, _ in decoders if i != keeper}
    workers = view.workers
    return {i for i in need.preempted_s if i in workers and not has_room(workers[i], need)}


def _unreaching(view: ClusterView, need: Need) -> set[WorkerId] | None:
    """Returns the prefill workers whose KV reaches no decode worker with room.

    Returns None if no prefill worker reaches any decode worker; then severed pairs are combined.
    """
    decoders = [(w.info.worker_id, w) for w in view.decoders]
    if not view.severed or not reaching(view.prefillers, decoders, view.severed):
        return None
    able = [item for item in decoders if has_room(item[1], need)]
    if not able:
        return set()
    found = reaching(view.prefillers, able, view.severed)
    return {i for i, _ in view.prefillers} - {i for i, _ in found}


def reason(prefill: Welcome, decode: Welcome, *, pulls: bool) -> str:
    """Returns the reason of a placement in words."""
    why = "least TTFT"
    if prefill.worker_id == decode.worker_id:
        why += f", {_LOCALLY[prefill.role]}"
    elif decode.role is Role.PREFILL:
        why += ", decoded by another prefill worker"
    return f"{why}, with a prefix pulled" if pulls else why


_LOCALLY = {
    Role.MIXED: "decoded where it is prefilled",
    Role.DECODE: "prefilled by a decode worker",
    Role.PREFILL: "decoded by an idle prefill worker",
}
