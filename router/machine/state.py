"""The parts of a request machine's state, each with its owner, and their invariants.

An owner changes its part in its own methods. All others only read the part.

`Workers` has the workers that this gateway knows, and the prefixes that each is believed to cache.
`ClusterView` has the claims on them. The prefix index, and the fleet if the policy has one, list
the same workers as the view: a worker joins, leaves and changes its role in all three at once.

At first, a worker is credited with the prefixes that its requests must have left in its cache.
After its first block event, the worker is credited only with the blocks that its events report. A
store is credited with the blocks that its events report, on each medium. Requests are never placed
on a store. In the index a store has one name for each medium (`router.native.index`).
"""

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import inf

from engine.config import RouterConfig
from engine.messages import (
    KvReady,
    PrefillStarted,
    RequestId,
    RoleChanged,
    SeqId,
    Welcome,
    WorkerId,
)
from engine.worker.block_events import LOWER_MEDIA, BlockEvent, Medium
from router.block_news import apply_events
from router.cluster.estimates import Estimates
from router.cluster.learning import AnswerLengths, Conversations, PairTransfers
from router.cluster.view import ClusterView, WorkerView
from router.machine.flight import Attempt, Flight
from router.machine.moves.stages import Moves
from router.machine.queue import Waiting
from router.native.fleet import Fleet
from router.native.index import PrefixIndex, name_on
from router.policies import make_policy
from router.policies.base import Policy
from router.policies.slo import Slo

SEVERED_S = 10.0  # seconds without pulls between two workers after a failed pull
# The heap is rebuilt when it has more than this many entries per request, plus `LEAST_STALE`.
MAX_STALE = 4
LEAST_STALE = 64


class RouterState:
    """Workers, requests, and what has been learned from them.

    Three tables have no owner, because each change is a single entry. `flights` changes where a
    request is admitted or ends, `by_seq` where a sequence starts or ends, `counters` where an event
    is counted.
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        estimates: Estimates,
        rng: random.Random,
    ) -> None:
        self.config = config
        self.estimates = estimates
        self.rng = rng
        self.policy: Policy = make_policy(config.policy)
        self.view = ClusterView()
        seed, backlog_s = config.seed or 0, config.prefill_backlog_s
        index, fleet = PrefixIndex(seed=seed), None
        if isinstance(self.policy, Slo):
            fleet = Fleet(self.view, index, estimates, backlog_s=backlog_s, seed=seed)
        self.workers = Workers(self.view, index, fleet)
        self.lengths = AnswerLengths()
        self.conversations = Conversations()
        self.flights: dict[RequestId, Flight] = {}  # all accepted requests, in order of arrival
        self.by_seq: dict[SeqId, Flight] = {}  # the request of each sequence, attempt or copy
        self.num_left_seqs = 0  # number of attempts that ended before their requests
        self.deadlines = Deadlines(config)
        patience = config.queue_patience
        self.waiting = Waiting(estimates, self.lengths, self.deadlines.watch, patience=patience)
        self.moves = Moves()
        self.counters: Counter[tuple[str, str]] = Counter()
        self.transfers = PairTransfers()

    def count(self, event: str, reason: str) -> None:
        """Counts an event under its reason. The text after the first colon is left out.

        This text contains addresses and numbers, which would make the table grow without bound.
        """
        self.counters[event, reason.partition(":")[0]] += 1

    def observe_pull(
        self, source: WorkerId, sink: WorkerView, message: KvReady, now_s: float
    ) -> None:
        """Updates the costs of KV pulls after a pull."""
        num_blocks = message.num_pulled_blocks
        self.estimates.observe_pull(sink, num_blocks, seconds=message.transfer_s)
        self.transfers.record(
            source,
            sink.info.worker_id,
            num_blocks * sink.info.layout.block_bytes,
            now_s,
            seconds=message.transfer_s,
            exposed_s=message.exposed_s,
        )

    def observe_prefix_pull(
        self, attempt: Attempt, holder: WorkerId, message: PrefillStarted, now_s: float
    ) -> None:
        """Updates the costs of pulls after the pull of a prefix, which precedes the first chunk.

        A pull from a lower medium includes the reading of a disk, so its time is not used.
        """
        sink = self.view.workers[attempt.prefill]
        layout = sink.info.layout
        num_blocks = min(message.num_pulled_blocks, attempt.base_len // layout.block_size)
        if num_blocks <= 0:
            return
        medium = None if attempt.decision is None else attempt.decision.pulled_medium
        if medium not in LOWER_MEDIA:
            self.estimates.observe_pull(sink, num_blocks, seconds=message.pull_s)
        num_bytes = num_blocks * layout.block_bytes
        self.transfers.record(holder, attempt.prefill, num_bytes, now_s, seconds=message.pull_s)
        self.counters["pulled tokens", medium or "worker"] += num_blocks * layout.block_size

    def validate(self) -> None:
        """Asserts the invariants of all parts, and that the parts are consistent."""
        attempts = {a.seq_id: a for flight in self.flights.values() for a in flight.attempts}
        moves = [attempt.move for attempt in attempts.values() if attempt.move is not None]
        copies = {move.copy_id for move in moves if move.copy_id is not None}
        assert attempts.keys() | copies == self.by_seq.keys()
        assert not any(move.seq_id in self.by_seq for move in moves)
        self.workers.validate()
        self.workers.validate_claims(attempts, self.by_seq)
        self.waiting.validate(self.flights)
        self.deadlines.validate(self.flights)
        self.moves.validate(self.flights, self.view)
        for flight in self.flights.values():
            flight.validate(self.view)


class Workers:
    """Adds and removes workers, and updates the prefixes that they have cached."""

    def __init__(self, view: ClusterView, prefixes: PrefixIndex, fleet: Fleet | None) -> None:
        self.view = view
        self.prefixes = prefixes
        self.fleet = fleet
        self._reporting: set[WorkerId] = set()  # workers that have sent block events
        self._media: dict[WorkerId, dict[str, WorkerId]] = {}  # index names of a store, by medium
        self.on_lower: dict[WorkerId, tuple[WorkerId, str]] = {}  # store and medium, by index name

    def join(self, info: Welcome) -> None:
        """Adds a worker."""
        assert info.worker_id not in self.view.workers
        self.prefixes.add(info.worker_id, info.num_blocks)
        worker = self.view.add(info)
        if worker.is_store:
            self._add_media(info)
        if self.fleet is not None:
            self.fleet.add(worker)

    def _add_media(self, info: Welcome) -> None:
        """Adds a name in the index for each medium of a store."""
        store_id = info.worker_id
        self._media[store_id] = {Medium.HOST: store_id}
        for medium in LOWER_MEDIA:
            name = self._media[store_id][medium] = name_on(store_id, medium)
            self.prefixes.add(name, info.num_blocks)
            self.on_lower[name] = store_id, medium

    def lose(self, worker_id: WorkerId) -> bool:
        """Removes a worker. Returns False if the worker was not known."""
        worker = self.view.remove(worker_id)
        if worker is None:
            return False
        self.view.touched.discard(worker_id)
        if self.fleet is not None:
            self.fleet.remove(worker)
        for name in self._names_of(worker_id):
            self.prefixes.remove(name)
            self.on_lower.pop(name, None)
        self._media.pop(worker_id, None)
        self._reporting.discard(worker_id)
        return True

    def change_role(self, worker: WorkerView, message: RoleChanged) -> None:
        """Changes the role of a worker other than a store. Claims on the worker are kept."""
        if self.fleet is not None:
            self.fleet.remove(worker)
        worker.change_role(message)
        self.view.measure()
        if self.fleet is not None:
            self.fleet.add(worker)

    # ------------------------------------------------------------ cached prefixes

    def apply_events(self, worker_id: WorkerId, events: Sequence[BlockEvent]) -> int:
        """Applies block events. The first events replace the blocks credited so far.

        Returns the number of events of unknown media, which are ignored.
        """
        if worker_id not in self.view.workers:
            return 0
        if worker_id not in self._reporting:
            self._reporting.add(worker_id)
            self._clear(worker_id)
        return apply_events(self.prefixes, worker_id, events, self._media.get(worker_id))

    def _clear(self, worker_id: WorkerId) -> None:
        for name in self._names_of(worker_id):
            self.prefixes.cleared(name)

    def _names_of(self, worker_id: WorkerId) -> Collection[WorkerId]:
        media = self._media.get(worker_id)
        return (worker_id,) if media is None else media.values()

    def remove_events(self, worker_id: WorkerId) -> bool:
        """Removes all blocks that events reported.

        From then on, the worker is credited again with the blocks of its requests. Returns False if
        the worker had sent no events.
        """
        if worker_id not in self._reporting:
            return False
        self._reporting.discard(worker_id)
        self._clear(worker_id)
        return True

    def credit(self, worker_id: WorkerId, flight: Flight, num_tokens: int) -> None:
        """Credits a worker with the KV of a request's first `num_tokens`."""
        workers = self.view.workers
        worker = workers.get(worker_id)
        if worker is not None and worker_id not in self._reporting and len(workers) > 1:
            self.prefixes.record(worker_id, flight.leading_hashes(num_tokens, worker))

    def retract(
        self, worker_id: WorkerId, flight: Flight, num_tokens: int, num_held_blocks: int
    ) -> None:
        """Withdraws credit for KV of `num_tokens`, except for the first `num_held_blocks` blocks.

        Does nothing for a worker with block events, because it reports each eviction itself. Since
        its answer it may have stored some of these blocks again, and would not report them a second
        time.
        """
        if worker_id not in self._reporting:
            hashes = flight.leading_hashes(num_tokens, self.view.workers[worker_id])
            self.prefixes.retract(worker_id, hashes[num_held_blocks:])

    # ------------------------------------------------------------ invariants

    def validate(self) -> None:
        """Asserts that the view, the index and the fleet have the same workers."""
        self.view.validate()
        self.prefixes.validate()
        if self.fleet is not None:
            self.fleet.validate()
        assert self._reporting <= set(self.view.workers)
        stores = {i for i, worker in self.view.workers.items() if worker.is_store}
        assert self._media.keys() == stores
        assert set(self.on_lower.values()) == {(i, m) for i in stores for m in LOWER_MEDIA}
        assert self.prefixes.workers == {*self.view.workers, *self.on_lower}

    def validate_claims(
        self, attempts: Mapping[SeqId, Attempt], by_seq: Mapping[SeqId, Flight]
    ) -> None:
        """Asserts that each claim on a worker belongs to one attempt or move, and the reverse."""
        for worker_id, worker in self.view.workers.items():
            prefills = {
                i for i, a in attempts.items() if a.prefill == worker_id and a.prefilled_s is None
            }
            decodes = {i for i, a in attempts.items() if a.decode == worker_id}
            moves = [a.move for a in attempts.values() if a.move is not None]
            arriving = {move.seq_id for move in moves if move.decode == worker_id}
            assert set(worker.prefills) == prefills
            assert set(worker.decodes) == decodes | arriving
            for seq_id, claim in worker.decodes.items():
                if seq_id in arriving:
                    continue  # the claim is unchanged since the start of the move
                length = by_seq[seq_id].length
                assert claim.context_tokens == length
                assert claim.blocks >= worker.info.layout.num_blocks_for(length)


class Deadlines:
    """Finds the next deadline of all requests quickly.

    Each message about a request moves its deadline to a later time, but the heap is not updated. So
    the time in the heap is a lower bound: the request has no earlier deadline. At that time, the
    true deadline is computed and pushed. So a request costs one heap entry at each stage of its
    life, and one more for each full timeout that passes.
    """

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._noted: dict[RequestId, float] = {}
        self._heap: list[tuple[float, RequestId]] = []  # lower bounds; some entries may be outdated

    def record(self, request_id: RequestId, due_s: float) -> None:
        """Sets the lower bound of a request's deadline, instead of an earlier bound."""
        if self._noted.get(request_id) != due_s:
            self._noted[request_id] = due_s
            heappush(self._heap, (due_s, request_id))
            if len(self._heap) > MAX_STALE * len(self._noted) + LEAST_STALE:
                self._heap = [(at_s, i) for i, at_s in self._noted.items()]
                heapify(self._heap)

    def remove(self, request_id: RequestId) -> None:
        """Removes a request."""
        self._noted.pop(request_id, None)

    def soonest_s(self) -> float | None:
        """Returns the least of all lower bounds; None without requests."""
        heap = self._heap
        while heap and self._noted.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else None

    def pop_due(self, now_s: float) -> set[RequestId]:
        """Removes and returns the requests whose lower bound has passed.

        The caller must `watch` again each of these requests that has not ended.
        """
        due: set[RequestId] = set()
        while (soonest_s := self.soonest_s()) is not None and soonest_s <= now_s:
            _, request_id = heappop(self._heap)
            del self._noted[request_id]
            due.add(request_id)
        return due

    def watch(self, flight: Flight) -> None:
        """Records a request's next deadline. Call this when the deadline may be earlier now."""
        self.record(flight.request.request_id, self.due_s(flight))

    def due_s(self, flight: Flight) -> float:
        """Returns the time of a request's next deadline. A follower held back has no deadline."""
        attempt, deadline_s = flight.attempt, self.deadline_s(flight)
        if attempt is None:
            return deadline_s
        due_s = [deadline_s, attempt.offer_due_s or inf, attempt.hedge_due_s or inf]
        if (move := attempt.move) is not None:
            due_s += [move.copy_due_s or inf, move.gather_until_s or inf]
        return min(due_s)

    def deadline_s(self, flight: Flight) -> float:
        """Returns until when a request may wait for a worker, or for a worker's message."""
        config = self._config
        if flight.attempt is None:
            overdue_s = flight.last_message_s + config.queue_timeout_s
            if flight.tokens or flight.request.deadline_s is None:
                return overdue_s
            return min(overdue_s, flight.request.deadline_s)
        timeout_s = config.progress_timeout_s
        if flight.attempt.prefilled_s is None:
            timeout_s += flight.attempt.base_len / config.slowest_prefill_tokens_per_s
        return flight.last_message_s + timeout_s

    def validate(self, flights: Mapping[RequestId, Flight]) -> None:
        """Asserts that each request has a lower bound that is not after its deadline.

        Followers that are held back have no bound.
        """
        assert {(due_s, i) for i, due_s in self._noted.items()} <= set(self._heap)
        assert self._noted.keys() == {i for i, flight in flights.items() if flight.held_by is None}
        assert all(due_s <= self.due_s(flights[i]) for i, due_s in self._noted.items())
