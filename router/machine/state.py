"""The parts of a request machine's state, each with its owner, and their invariants.

An owner changes what it holds, in its own methods. All others only read it.
"""

import random
from collections import Counter

from engine.config import RouterConfig
from engine.messages import KvReady, RequestId, SeqId, WorkerId
from router.cluster.conversations import Conversations
from router.cluster.estimates import Estimates
from router.cluster.lengths import AnswerLengths
from router.cluster.transfers import PairTransfers
from router.cluster.view import ClusterView, WorkerView
from router.machine.deadlines import Deadlines
from router.machine.flight import Flight
from router.machine.moves.stages import Moves
from router.machine.queue import Waiting
from router.machine.workers import Workers
from router.native.fleet import Fleet
from router.native.index import PrefixIndex
from router.policies import make_policy
from router.policies.base import Policy
from router.policies.slo import Slo

SEVERED_S = 10.0  # after a failed pull, two workers are kept apart for this long


class RouterState:
    """Workers, requests, and what has been learned.

    Three tables have no owner, as each change is one entry: `flights` changes where a request is
    admitted or ends, `by_seq` where a sequence begins or ends, and `counters` where they count.
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
        self.by_seq: dict[SeqId, Flight] = {}  # by the sequences of attempts and of copies
        self.num_left_seqs = 0  # sequences of attempts that ended before their requests
        self.deadlines = Deadlines(config)
        patience = config.queue_patience
        self.waiting = Waiting(estimates, self.lengths, self.deadlines, patience=patience)
        self.moves = Moves()
        self.counters: Counter[tuple[str, str]] = Counter()
        self.transfers = PairTransfers()

    def count(self, event: str, reason: str) -> None:
        """Counts an event, by its reason up to a colon.

        Details follow the colon. They name addresses and numbers, so the counters would have no
        bound.
        """
        self.counters[event, reason.partition(":")[0]] += 1

    def observe_pull(
        self, source: WorkerId, sink: WorkerView, message: KvReady, now_s: float
    ) -> None:
        """Learns from a pull of KV that has ended."""
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

    def validate(self) -> None:
        """Asserts the invariants of all parts, and that they agree."""
        attempts = {a.seq_id: a for flight in self.flights.values() for a in flight.attempts}
        moves = [attempt.move for attempt in attempts.values() if attempt.move is not None]
        copies = {move.copy_id for move in moves if move.copy_id is not None}
        assert attempts.keys() | copies == self.by_seq.keys()
        assert not any(move.seq_id in self.by_seq for move in moves)
        self.workers.validate()
        self.workers.validate_claims(attempts, self.by_seq)
        self.waiting.validate(self.flights)
        self.deadlines.validate(self.flights, self.waiting.held)
        self.moves.validate(self.flights, self.view)
        for flight in self.flights.values():
            flight.validate(self.view)
