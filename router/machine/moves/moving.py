"""Moves of running sequences to other decode workers, because they must leave or gain by it.

    decoding ──> waiting ──OfferPrefix──> copying ──KvReady──> copied ──HandOver──> leaving
       ^  ^         │       in turn          │                   │     together         │
       │  └─────────┴── target gone, or ─────┴───────────────────┘   HandedOver(lease) ─┘
       │   (stranded)   no room                                              │
       └──────── KvReady, of the few blocks that the copy lacks ── arriving ─┘

Rule: a sequence must move if it decodes on a worker that must no longer decode. The rule is checked
when a role changes and when a sequence starts to decode. Room is reserved at the target before the
source is told. Two kinds of moves are free, as their sequences may stay. `balancing` moves
sequences to a worker that is much less busy, or to an idle prefill worker. `lending` moves
sequences away from prefill workers that decode.

*Copy.* A sequence runs while it is copied. K and V of its tokens do not change. So the target pulls
the full blocks under the same kind of lease as any prefix (`OfferPrefix`). The target stores the
blocks in a sequence without a first token (`Decode`). Only then is the source told to stop. After
that the target pulls the blocks that its prefix cache lacks: the last block, and blocks that were
filled in the meantime. So the client's wait does not depend on the length of the context. One copy
is enough: filling another block takes thousands of times as long as sending a block.

*Turns.* A few sequences of a worker are copied at a time, each with a deadline from the start of
its copy. They leave together. If sequences joined a target one after another, the target would run
one more step for each, and the clients would wait for these steps. So a copied sequence runs on
until the other sequences of its worker are copied, for a bounded time. The number that leaves at
once is bounded too, or their last blocks would wait for each other.

*Hand-over.* Tokens of the old id are delivered until `HandedOver`. From then on there is a new
attempt: its prompt is all tokens but the last, and the source has prefilled it. Pulls, losses and
deadlines are handled as for any other attempt. A move does not count as a failed attempt. If a
sequence loses its target or its copy before it leaves, it runs on, and the rule is checked anew.
The same holds if its worker may decode again.

*No room.* A sequence for which no other worker has room is *stranded*: it runs on at its source.
The move is tried again after each event that may make room, and every `RETRY_S`. After
`move_timeout_s` the sequence is prefilled again, if a worker has room but cannot pull its KV.
Otherwise the sequence runs to its end.

*Failed copies.* Only a failed pull is evidence against the two workers: for a while no KV is sent
between them. After any other failure the copy is repeated later; a late copy is repeated at once,
but only once. A copy is pure cache, and its target returns it before any sequence waits for memory.
If the copy was complete, the hand-over follows immediately: the last blocks and those evicted since
are pulled together.

*The step that waits.* The target's next step waits for this last pull (`Decode.is_moved`) if the
pull is small: the target has a copy, or the whole context is a few blocks.

An attempt whose decode worker has not started to decode starts anew on another worker, and its
computed blocks stay cached. If a mixed worker prefills it, it moves after the prefill.

Sources: pre-copy, Clark et al., Live Migration of Virtual Machines, NSDI 2005. KV only grows, so
the rest at the end is small whatever the length: Sun et al., Llumnix, OSDI 2024.
"""

from engine.messages import ROLE_CHANGED, Role, RoleChanged, WorkerId
from router.cluster.view import WorkerView
from router.machine.ends import Ends
from router.machine.events import RouterEffect
from router.machine.flight import Attempt, Flight
from router.machine.moves.copying import Copying, end_copy
from router.machine.moves.free import Balancing, Lending
from router.machine.moves.rule import MoveRule
from router.machine.moves.stages import RETRY_S, MoveStage
from router.machine.placing import Placing
from router.machine.state import RouterState
from router.policies.candidates import has_room

NOT_MOVED = "not moved in time"


class Moving:
    """Applies role changes, retries stranded sequences, and replaces lost targets."""

    def __init__(self, state: RouterState, ends: Ends, placing: Placing) -> None:
        self._state = state
        self._ends = ends
        self._placing = placing
        self.rule = MoveRule(state, ends, placing)
        self.copying = Copying(state, ends, self.rule)
        self.balancing = Balancing(state, placing, self.rule)
        self.lending = Lending(state, placing, self.rule)

    def on_role_changed(
        self, worker: WorkerView, message: RoleChanged, now_s: float
    ) -> list[RouterEffect]:
        """Applies a worker's new role. A worker may also repeat its present role.

        A store never changes its role, and no worker becomes a store.
        """
        state, worker_id = self._state, worker.info.worker_id
        if worker.is_store or message.role is Role.STORE:
            state.counters["role changed", "not possible"] += 1
            return []
        if worker.info.role is not message.role:
            state.counters["role changed", message.role] += 1
        state.workers.change_role(worker, message)
        effects: list[RouterEffect] = []
        # Youngest first, so the oldest is at the head of the queue.
        for flight in reversed(list(state.flights.values())):
            effects += self._after_change(flight, worker_id, now_s)
        for flight in list(state.flights.values()):
            if flight.attempt is not None and flight.attempt.decode == worker_id:
                effects += self.rule.examine(flight, now_s)
        return effects

    def _after_change(
        self, flight: Flight, worker_id: WorkerId, now_s: float
    ) -> list[RouterEffect]:
        """Restarts or redirects an attempt that needs the old role of the worker."""
        attempt = flight.attempt
        if attempt is None:
            return []
        info = self._state.view.workers[worker_id].info
        if attempt.move is not None and attempt.move.decode == worker_id:
            return [] if info.role.decodes else self.redirect(flight, attempt, now_s)
        if attempt.is_decoding:
            return []
        waits_for_offer = attempt.offer_due_s is not None and attempt.prefill == worker_id
        if attempt.hands_over:
            lacks = attempt.decode == worker_id and not info.role.decodes
            lacks = lacks or (waits_for_offer and not info.role.prefills)
        else:
            lacks = waits_for_offer and not info.generates
        return self._ends.excuse(flight, ROLE_CHANGED, now_s) if lacks else []

    def on_prompt(self, worker: WorkerView, now_s: float) -> list[RouterEffect]:
        """Moves sequences away from a prefill worker that has started a prompt."""
        if not worker.decodes or not self.lending.on_prompt(worker, now_s):
            return []
        return self.copying.copy_next(now_s)

    def move_all(self, now_s: float) -> list[RouterEffect]:
        """Retries stranded sequences, oldest first, and starts the copies whose turn it is.

        A long sequence does not block shorter ones. But a sequence is skipped if it needs at least
        as much room as one of the same source that has just found none.
        """
        state, moves = self._state, self._state.moves
        state.view.remove_severed(now_s)
        effects: list[RouterEffect] = []
        too_long: dict[WorkerId, int] = {}  # shortest length that found no room, by source
        for since_s, flight in self._stranded():
            request_id, attempt = flight.request.request_id, flight.attempt
            assert attempt is not None
            if now_s >= moves.wanted[request_id].not_before_s:
                source, end_len = attempt.decode, self._placing.need(flight, now_s).end_len
                if source not in too_long or end_len < too_long[source]:
                    effects += self.rule.examine(flight, now_s)
                if moves.stage(request_id) is MoveStage.STRANDED:
                    too_long[source] = min(end_len, too_long.get(source, end_len))
            is_stranded = moves.stage(request_id) is MoveStage.STRANDED
            if is_stranded and now_s - since_s >= state.config.move_timeout_s:
                effects += self._give_up(flight, now_s)
        if moves.retry_s is not None:
            moves.retry_s = now_s + RETRY_S
        return effects + self.copying.copy_next(now_s)

    def _stranded(self) -> list[tuple[float, Flight]]:
        """Returns the stranded sequences, oldest first, each with the time when it became due."""
        state, moves = self._state, self._state.moves
        stranded = moves.at(MoveStage.STRANDED)
        since = [(moves.wanted[i].since_s, state.flights[i]) for i in stranded]
        return sorted(since, key=lambda each: each[0])

    def redirect(self, flight: Flight, attempt: Attempt, now_s: float) -> list[RouterEffect]:
        """Handles the loss of a move's target.

        If the source was already told to stop, another target is chosen. The source need not know
        which worker is the target.
        """
        move = attempt.move
        assert move is not None
        if self._state.moves.stage(flight.request.request_id) is not MoveStage.LEAVING:
            return [*self.rule.call_off(flight, attempt), *self.rule.examine(flight, now_s)]
        need = self._placing.need(flight, now_s)
        target = self.rule.choose(attempt, need)
        if target is None:
            return self._ends.excuse(flight, ROLE_CHANGED, now_s)
        effects = end_copy(self._state, move)
        if (old := self._state.view.workers.get(move.decode)) is not None:
            old.release_decode(move.seq_id)
        move.decode, move.reserved_len = target, need.end_len
        self.rule.reserve(flight, move, need, now_s)
        return effects

    def _give_up(self, flight: Flight, now_s: float) -> list[RouterEffect]:
        """Prefills a sequence again, if a worker has room for it but cannot pull its KV.

        Otherwise the sequence runs on, as no worker has room for a new attempt either.
        """
        attempt = flight.attempt
        assert attempt is not None
        workers, need = self._state.view.workers.items(), self._placing.need(flight, now_s)
        others = [w for i, w in workers if i != attempt.decode and w.info.role.decodes]
        if not any(has_room(worker, need) for worker in others):
            return []
        return self._ends.excuse(flight, NOT_MOVED, now_s)
