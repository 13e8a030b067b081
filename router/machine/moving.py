"""Moves of running sequences to other decode workers, after role changes.

    decoding ──> waiting ──OfferPrefix──> copying ──KvReady──> copied ──HandOver──> leaving
       ^  ^         │       in turn          │                   │     together         │
       │  └─────────┴── target gone, or ─────┴───────────────────┘   HandedOver(lease) ─┘
       │   (stranded)   no room                                              │
       └──────── KvReady, of the few blocks that the copy lacks ── arriving ─┘

Rule: a sequence that decodes on a worker which is no longer to decode is to move. The rule is
checked when a role changes and when a sequence starts to decode. Room is reserved at the target
before the source is told.

*Copy.* A sequence runs while it is copied. K and V of its tokens do not change, so the target pulls
the full blocks under a lease like that on any prefix (`OfferPrefix`). It holds them in a sequence
without a first token (`Decode`). Only then is the source told to stop. After that the target pulls
what its prefix cache lacks: the last block, and blocks that were filled meanwhile. So the client's
wait does not depend on the length of the context. One copy is enough: a sequence needs thousands of
times as long to grow by a block as the network to carry it.

*Turns.* A few sequences of a worker are copied at a time, each with a deadline from its turn on.
They leave together. A client waits for steps, and a target that is joined by one sequence after
another runs a step for each. So a copied sequence runs on until the others of its worker are
copied, for a bounded time. The number that leaves at once is bounded too, or their last blocks
would wait for each other.

*Hand-over.* Tokens of the old id are delivered until `HandedOver`. From then on the attempt is one
whose prompt, all tokens but the last, the source has computed. Pulls, losses and deadlines are as
for any other. A move does not count as a failed attempt. Before it leaves, a sequence that loses
its target or its copy runs on, and the rule is checked anew. The same holds if its worker is to
decode again.

*No room.* A sequence without room elsewhere runs on where it is. It is tried again after each event
that may make room, and every `RETRY_S`. After `move_timeout_s` it is prefilled again, if a worker
has room that cannot pull its KV. Otherwise it runs to its end.

*Failed copies.* Only a failed pull says something about the two workers: no KV is sent between them
for a while. After any other failure the copy is repeated later; a late copy is repeated at once,
but only once. A copy is pure cache, and its target returns it before any sequence waits for its
memory. If the copy was complete, hand over immediately: the last blocks and those evicted since are
pulled together.

*The step that waits.* The target's next step waits for this last pull (`Decode.is_moved`) if the
pull is small: a copy is held, or the whole context is a few blocks.

An attempt that has a decode worker but does not decode yet starts anew elsewhere, and its computed
blocks stay cached. If a mixed worker prefills it, it moves afterwards.

Sources: pre-copy, Clark et al., Live Migration of Virtual Machines, NSDI 2005; of KV, which only
grows, so that the rest at the end is small whatever the length, Sun et al., Llumnix, OSDI 2024.
"""

from collections import Counter
from collections.abc import Iterator

from engine.messages import (
    PULL_FAILED,
    ROLE_CHANGED,
    Cancel,
    Decode,
    FirstToken,
    GivenBack,
    HandedOver,
    HandOver,
    KvReady,
    LeaseRef,
    Limits,
    OfferPrefix,
    PrefixOffered,
    RequestId,
    Role,
    RoleChanged,
    Sampling,
    SeqId,
    ToGateway,
    WorkerId,
)
from router.cluster.view import WorkerView
from router.machine.ends import Ends
from router.machine.events import RouterEffect, SendTo
from router.machine.flight import Attempt, Flight, Move
from router.machine.moves import RETRY_S, MoveStage
from router.machine.placing import Placing
from router.machine.state import SEVERED_S, RouterState
from router.policies.base import Need
from router.policies.candidates import decode_blocks, has_room
from router.policies.joining import next_decoder

DRAINED = "drained"  # reason of a move: its worker has no role any more
NOT_HANDED_OVER = "not handed over"
NOT_MOVED = "not moved in time"
COPY_AT_ONCE = 4  # at least this many sequences of one worker are copied at the same time
LEAVE_AT_ONCE = 16  # that leave it at the same time, at least
MOVING_SHARE = 8  # else, of so many that it decodes, one
GATHER_S = 0.5  # that one which could leave waits for others
FEW_BLOCKS = 2  # without a copy, no step waits for the pull of more
LATE_COPIES = 1  # that are begun again at once


class Moving:
    """Moves what runs, in the state that it is given."""

    def __init__(self, state: RouterState, ends: Ends, placing: Placing) -> None:
        self._state = state
        self._ends = ends
        self._placing = placing

    # ------------------------------------------------------------ roles

    def on_role_changed(
        self, worker: WorkerView, message: RoleChanged, now_s: float
    ) -> list[RouterEffect]:
        """A worker is there for something else, or says that it is not."""
        state, worker_id = self._state, worker.info.worker_id
        if worker.info.role is not message.role:
            state.counters["role changed", message.role] += 1
        state.give_role(worker, message)
        effects: list[RouterEffect] = []
        for flight in reversed(list(state.flights.values())):  # those put back keep their order
            effects += self._after_change(flight, worker_id, now_s)
        for flight in list(state.flights.values()):
            if flight.attempt is not None and flight.attempt.decode == worker_id:
                effects += self.look_at(flight, now_s)
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

    # ------------------------------------------------------------ moves

    def look_at(self, flight: Flight, now_s: float) -> list[RouterEffect]:
        """Moves a sequence that decodes on a worker which is no longer to decode."""
        attempt = flight.attempt
        if attempt is None or not attempt.is_decoding:
            return []
        moves, request_id = self._state.moves, flight.request.request_id
        worker = self._state.view.workers[attempt.decode]
        if worker.info.role.decodes:
            self._state.moves.forget(request_id)
            return self._call_off(flight, attempt)
        if attempt.move is not None:
            return []
        wanted = moves.want(request_id, now_s)
        need = self._placing.need(flight, now_s)
        target = self._choose(attempt, need) if now_s >= wanted.not_before_s else None
        if target is None:
            moves.strand(request_id, attempt.decode, now_s)
            return []
        reason = DRAINED if worker.info.role is Role.DRAINED else ROLE_CHANGED
        attempt.move = Move(flight.next_seq_id(), target, need.end_len, reason)
        self._reserve(flight, attempt.move, need, now_s)
        if flight.length > worker.info.layout.block_size:
            moves.enter(request_id, MoveStage.WAITING, attempt.decode)
        else:  # no block is full
            self._gather(flight, attempt.move, now_s)
        return []

    def move_all(self, now_s: float) -> list[RouterEffect]:
        """Tries stranded sequences again, oldest first, and starts the copies whose turn it is.

        A long sequence does not block shorter ones. A sequence that needs at least as much as one
        that just found no room is skipped.
        """
        state, moves = self._state, self._state.moves
        state.view.forget_severed(now_s)
        effects: list[RouterEffect] = []
        too_long: dict[WorkerId, int] = {}  # by source: a length for which there is no room
        for since_s, flight in self._stranded():
            request_id, attempt = flight.request.request_id, flight.attempt
            assert attempt is not None
            if now_s >= moves.wanted[request_id].not_before_s:
                source, end_len = attempt.decode, self._placing.need(flight, now_s).end_len
                if source not in too_long or end_len < too_long[source]:
                    effects += self.look_at(flight, now_s)
                if moves.stage(request_id) is MoveStage.STRANDED:
                    too_long[source] = min(end_len, too_long.get(source, end_len))
            is_stranded = moves.stage(request_id) is MoveStage.STRANDED
            if is_stranded and now_s - since_s >= state.config.move_timeout_s:
                effects += self._give_up(flight, now_s)
        if moves.retry_s is not None:
            moves.retry_s = now_s + RETRY_S
        return effects + self._copy_next(now_s)

    def _stranded(self) -> list[tuple[float, Flight]]:
        """Stranded sequences and the times since when they are to move, oldest first."""
        state, moves = self._state, self._state.moves
        stranded = moves.at(MoveStage.STRANDED)
        since = [(moves.wanted[i].since_s, state.flights[i]) for i in stranded]
        return sorted(since, key=lambda each: each[0])

    def redirect(self, flight: Flight, attempt: Attempt, now_s: float) -> list[RouterEffect]:
        """The target of a move is not to be had any more. A source that has been told to stop need
        not know which it is.
        """
        move = attempt.move
        assert move is not None
        if self._stage(flight) is not MoveStage.LEAVING:
            return [*self._call_off(flight, attempt), *self.look_at(flight, now_s)]
        need = self._placing.need(flight, now_s)
        target = self._choose(attempt, need)
        if target is None:
            return self._ends.excuse(flight, ROLE_CHANGED, now_s)
        effects = self._end_copy(move)
        if (old := self._state.view.workers.get(move.decode)) is not None:
            old.release_decode(move.seq_id)
        move.decode, move.reserved_len = target, need.end_len
        self._reserve(flight, move, need, now_s)
        return effects

    def _call_off(self, flight: Flight, attempt: Attempt) -> list[RouterEffect]:
        """It goes on where it is, if it has not been told to stop."""
        if attempt.move is None or self._stage(flight) is MoveStage.LEAVING:
            return []
        return self._ends.end_move(flight, attempt)

    # ------------------------------------------------------------ copies

    def _copy_next(self, now_s: float) -> list[RouterEffect]:
        """Asks sources for what is full, a few sequences at a time of each."""
        state = self._state
        effects: list[RouterEffect] = []
        for flight, source, move in self._next_to_copy():
            state.moves.enter(flight.request.request_id, MoveStage.COPYING, source)
            move.copy_id = copy_id = SeqId(f"{move.seq_id}.copy")
            move.copy_due_s = now_s + state.config.move_timeout_s
            state.by_seq[copy_id] = flight.request.request_id
            state.watch(flight)
            effects.append(
                SendTo(source, OfferPrefix(copy_id, flight.token_ids, flight.request.salt))
            )
        return effects

    def on_news_of_copy(
        self, flight: Flight, message: ToGateway, now_s: float
    ) -> list[RouterEffect]:
        """Handles messages of both workers about a copy."""
        attempt = flight.attempt
        assert attempt is not None
        move = attempt.move
        assert move is not None
        assert move.copy_id is not None
        target = self._state.view.workers[move.decode]
        match message:
            case PrefixOffered(copy_id, LeaseRef() as lease):
                target.decodes[move.seq_id].is_there = True
                token_ids = flight.token_ids[: lease.num_blocks * target.info.layout.block_size]
                limits = Limits(max_len=len(token_ids) + 1)
                copy = Decode(
                    copy_id,
                    token_ids,
                    Sampling(),
                    limits,
                    lease,
                    is_copy=True,
                    salt=flight.request.salt,
                )
                return [SendTo(move.decode, copy)]
            case PrefixOffered():
                self._state.counters["fallback", "nothing to copy"] += 1
                self._end_copying(flight, move, now_s)
                return self._end_copy(move)
            case KvReady():
                self._state.estimates.observe_pull(
                    target, message.num_pulled_blocks, seconds=message.transfer_s
                )
                self._end_copying(flight, move, now_s)
                return []
            case GivenBack(_, reason):
                return self._on_copy_given_back(flight, attempt, move, reason, now_s)
        return []

    def stop_waiting_for_copy(self, flight: Flight, now_s: float) -> list[RouterEffect]:
        """Gives a late copy up. The sequence runs on, and what has arrived stays cached.

        A busy worker or network is late too, so the two workers are not kept apart.
        """
        attempt = flight.attempt
        move = None if attempt is None else attempt.move
        if move is None or move.copy_due_s is None or move.copy_due_s > now_s:
            return []
        assert attempt is not None
        wanted = self._state.moves.wanted[flight.request.request_id]
        self._state.counters["fallback", "copy late"] += 1
        wanted.num_late += 1
        if wanted.num_late > LATE_COPIES:
            wanted.not_before_s = now_s + RETRY_S
        return [*self._call_off(flight, attempt), *self.look_at(flight, now_s)]

    def _on_copy_given_back(
        self, flight: Flight, attempt: Attempt, move: Move, reason: str, now_s: float
    ) -> list[RouterEffect]:
        """Handles a failed copy: KV did not get through, or the target has no use for it now."""
        state = self._state
        state.counters["fallback", "copy failed"] += 1
        if self._stage(flight) in (MoveStage.COPIED, MoveStage.LEAVING):
            # All of it was there, and most is still cached. The rest is pulled with the last
            # blocks; the sooner the sequence leaves, the less that is.
            move.gather_until_s = None
            return self._end_copy(move)
        if reason.startswith(PULL_FAILED):
            state.view.severed[attempt.decode, move.decode] = now_s + SEVERED_S
        else:
            state.moves.wanted[flight.request.request_id].not_before_s = now_s + RETRY_S
        return [*self._call_off(flight, attempt), *self.look_at(flight, now_s)]

    def _end_copying(self, flight: Flight, move: Move, now_s: float) -> None:
        """All is there that can be before the sequence stops."""
        if self._stage(flight) is MoveStage.COPYING:
            move.copy_due_s = None
            self._gather(flight, move, now_s)

    def _end_copy(self, move: Move) -> list[RouterEffect]:
        """Lets the target release a copy, which stays cached there."""
        copy_id, move.copy_id = move.copy_id, None
        if copy_id is None:
            return []
        del self._state.by_seq[copy_id]
        is_there = move.decode in self._state.view.workers
        return [SendTo(move.decode, Cancel(copy_id))] if is_there else []

    def _next_to_copy(self) -> Iterator[tuple[Flight, WorkerId, Move]]:
        """Yields the next sequences to copy, with source and move: a few of each worker."""
        state = self._state
        num_copying = Counter(state.moves.at(MoveStage.COPYING).values())
        for request_id in list(state.moves.at(MoveStage.WAITING)):
            flight, source, move = self._on_its_way(request_id)
            if num_copying[source] < self._most(source, COPY_AT_ONCE):
                num_copying[source] += 1
                yield flight, source, move

    def _on_its_way(self, request_id: RequestId) -> tuple[Flight, WorkerId, Move]:
        flight = self._state.flights[request_id]
        assert flight.attempt is not None
        assert flight.attempt.move is not None
        return flight, flight.attempt.decode, flight.attempt.move

    def _most(self, source: WorkerId, least: int) -> int:
        """How many sequences of a worker may be copied or leave at once."""
        return max(least, len(self._state.view.workers[source].decodes) // MOVING_SHARE)

    # ------------------------------------------------------------ leaving

    def _gather(self, flight: Flight, move: Move, now_s: float) -> None:
        """It can leave, and waits for others of its worker."""
        assert flight.attempt is not None
        move.gather_until_s = now_s + GATHER_S
        request_id, source = flight.request.request_id, flight.attempt.decode
        self._state.moves.enter(request_id, MoveStage.COPIED, source)
        self._state.watch(flight)

    def stop_gathering(self, flight: Flight, now_s: float) -> None:
        """It has waited long enough for others: it leaves with those that are there."""
        move = None if flight.attempt is None else flight.attempt.move
        if move is not None and move.gather_until_s is not None and move.gather_until_s <= now_s:
            move.gather_until_s = None

    def hand_over_next(self) -> list[RouterEffect]:
        """Stops sequences whose turn it is.

        All copied sequences of a worker leave when none is missing or enough are there, after those
        that left before can run again.
        """
        moves = self._state.moves
        num_leaving = Counter(moves.on_their_way())
        missing = {*moves.at(MoveStage.WAITING).values(), *moves.at(MoveStage.COPYING).values()}
        gathered: dict[WorkerId, list[tuple[Flight, Move]]] = {}
        for request_id in moves.at(MoveStage.COPIED):
            flight, source, move = self._on_its_way(request_id)
            gathered.setdefault(source, []).append((flight, move))
        effects: list[RouterEffect] = []
        for source, group in gathered.items():
            most = self._most(source, LEAVE_AT_ONCE)
            waits = num_leaving[source] or (source in missing and len(group) < most)
            if waits and all(move.gather_until_s is not None for _, move in group):
                continue
            for flight, move in group[: max(most - num_leaving[source], 0)]:
                effects.append(self._hand_over(flight, source, move))
        return effects

    def _hand_over(self, flight: Flight, source: WorkerId, move: Move) -> SendTo:
        assert flight.attempt is not None
        move.gather_until_s = None
        self._state.moves.enter(flight.request.request_id, MoveStage.LEAVING, source)
        return SendTo(source, HandOver(flight.attempt.seq_id, move.seq_id))

    def on_handed_over(
        self, flight: Flight, attempt: Attempt, message: HandedOver, now_s: float
    ) -> list[RouterEffect]:
        """The source has stopped; what it leased is pulled by the target."""
        move = attempt.move
        if move is None:
            return []  # it was not requested
        if message.lease is None:
            return self._ends.excuse(flight, NOT_HANDED_OVER, now_s)
        self._state.counters["moved", move.reason] += 1
        self._ends.record(flight, attempt.decode, flight.length - 1)
        is_near = move.copy_id is not None or message.lease.num_blocks <= FEW_BLOCKS
        self._become(flight, attempt, move, message.lease)
        flight.last_news_s = now_s
        self._state.watch(flight)
        *token_ids, last = flight.token_ids
        request = flight.request
        decode = Decode(
            move.seq_id,
            token_ids,
            request.sampling,
            request.limits,
            message.lease,
            message.num_draft_tokens,
            is_moved=is_near,
            salt=request.salt,
        )
        return [
            SendTo(move.decode, decode),
            SendTo(move.decode, FirstToken(move.seq_id, last)),
            *self._end_copy(move),  # in the same frame: it is found in the cache
        ]

    # ------------------------------------------------------------ the parts of a move

    def _stage(self, flight: Flight) -> MoveStage | None:
        return self._state.moves.stage(flight.request.request_id)

    def _choose(self, attempt: Attempt, need: Need) -> WorkerId | None:
        state = self._state
        return next_decoder(
            state.view, need, source=attempt.decode, costs=state.estimates, rng=state.rng
        )

    def _reserve(self, flight: Flight, move: Move, need: Need, now_s: float) -> None:
        target = self._state.view.workers[move.decode]
        target.reserve_decode(
            move.seq_id,
            decode_blocks(target, need),
            context_tokens=need.num_tokens,
            begins_s=now_s,
            prompt_tokens=len(flight.request.token_ids),
            max_tokens=self._state.max_tokens(flight),
        )

    def _become(self, flight: Flight, old: Attempt, move: Move, lease: LeaseRef) -> None:
        """The attempt is over at the source, and the one that follows has been prefilled there."""
        state = self._state
        source, target = (state.view.workers[i] for i in (old.decode, move.decode))
        source.release_decode(old.seq_id)
        del state.by_seq[old.seq_id]
        state.by_seq[move.seq_id] = flight.request.request_id
        flight.num_attempts += 1
        flight.num_moves += 1
        state.moves.forget(flight.request.request_id)
        state.moves.enter(flight.request.request_id, MoveStage.ARRIVING, old.decode)
        flight.workers = (flight.workers[0], move.decode)
        flight.attempt = Attempt(
            move.seq_id,
            prefill=old.decode,
            decode=move.decode,
            base_len=flight.length - 1,
            reserved_len=move.reserved_len,
            lease=lease,
            prefilled=True,
            is_moved=True,
        )
        claim = target.decodes[move.seq_id]
        claim.is_there = True
        target.grow_decode(move.seq_id, flight.length - claim.context_tokens)
        if flight.length > move.reserved_len:
            flight.attempt.reserved_len = state.predicted_len(flight)
            num_blocks = target.info.layout.num_blocks_for(flight.attempt.reserved_len)
            target.extend_decode(move.seq_id, num_blocks)

    def _give_up(self, flight: Flight, now_s: float) -> list[RouterEffect]:
        """Prefills a sequence again, if a worker has room for it that cannot pull it.

        Otherwise it stays: what cannot be moved could not be placed either, and runs well where it
        is.
        """
        attempt = flight.attempt
        assert attempt is not None
        workers, need = self._state.view.workers.items(), self._placing.need(flight, now_s)
        others = [w for i, w in workers if i != attempt.decode and w.info.role.decodes]
        if not any(has_room(worker, need) for worker in others):
            return []
        return self._ends.excuse(flight, NOT_MOVED, now_s)
