"""The end of a move: the source stops copied sequences together, and the target runs them.

`router.machine.moves.moving` explains moves as a whole.
"""

from collections import Counter

from engine.messages import (
    Cancel,
    Decode,
    FirstToken,
    HandedOver,
    HandOver,
    LeaseRef,
    RequestId,
    WorkerId,
)
from router.machine.ends import Ends
from router.machine.events import RouterEffect, SendTo
from router.machine.flight import Attempt, Flight, Move
from router.machine.moves.stages import MoveStage
from router.machine.state import RouterState

NOT_HANDED_OVER = "not handed over"
LEAVE_AT_ONCE = 16  # at least this many sequences leave one worker at the same time
MOVING_SHARE = 8  # or 1/8 of its decoding sequences, if that is more
GATHER_S = 0.5  # a copied sequence waits at most this long for others
FEW_BLOCKS = 2  # blocks; without a copy, a step waits only for a pull of this size


class Departures:
    """Stops copied sequences at their sources, and starts them at their targets."""

    def __init__(self, state: RouterState, ends: Ends) -> None:
        self._state = state
        self._ends = ends

    def gather(self, flight: Flight, move: Move, now_s: float) -> None:
        """Lets a copied sequence wait up to `GATHER_S` for other sequences of its worker."""
        assert flight.attempt is not None
        move.gather_until_s = now_s + GATHER_S
        request_id, source = flight.request.request_id, flight.attempt.decode
        self._state.moves.enter(request_id, MoveStage.COPIED, source)
        self._state.deadlines.watch(flight)

    def stop_gathering(self, flight: Flight, now_s: float) -> None:
        """Ends the wait for others when its time is up."""
        move = None if flight.attempt is None else flight.attempt.move
        if move is not None and move.gather_until_s is not None and move.gather_until_s <= now_s:
            move.gather_until_s = None

    def hand_over_next(self) -> list[RouterEffect]:
        """Tells sources to stop the sequences whose turn it is.

        The copied sequences of a worker leave together, when all are copied or enough of them are.
        The sequences that left before must first run at their targets.
        """
        moves = self._state.moves
        num_leaving = Counter(moves.on_their_way())
        missing = {*moves.at(MoveStage.WAITING).values(), *moves.at(MoveStage.COPYING).values()}
        gathered: dict[WorkerId, list[tuple[Flight, Move]]] = {}
        for request_id in moves.at(MoveStage.COPIED):
            flight, source, move = running_move(self._state, request_id)
            gathered.setdefault(source, []).append((flight, move))
        effects: list[RouterEffect] = []
        for source, group in gathered.items():
            most = most_at_once(self._state, source, LEAVE_AT_ONCE)
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
        """Starts a sequence at its target: the source has stopped it and leased its KV."""
        move = attempt.move
        if move is None:
            return []  # the hand-over was not requested
        if message.lease is None:
            return self._ends.excuse(flight, NOT_HANDED_OVER, now_s)
        self._state.counters["moved", move.reason] += 1
        self._state.workers.credit(attempt.decode, flight, flight.length - 1)
        is_near = move.copy_id is not None or message.lease.num_blocks <= FEW_BLOCKS
        self._become(flight, attempt, move, message.lease, now_s)
        flight.last_news_s = now_s
        self._state.deadlines.watch(flight)
        token_ids = flight.token_ids
        request = flight.request
        decode = Decode(
            move.seq_id,
            token_ids[:-1],
            request.sampling,
            flight.limits,
            message.lease,
            message.num_draft_tokens,
            is_moved=is_near,
            salt=request.salt,
            client_id=request.client_id,
            evict_first=move.is_free,
            likely_reused=flight.likely_reused,
        )
        return [
            SendTo(move.decode, decode),
            SendTo(move.decode, FirstToken(move.seq_id, token_ids[-1])),
            *end_copy(self._state, move),  # same frame: the target still finds it cached
        ]

    def _become(
        self, flight: Flight, old: Attempt, move: Move, lease: LeaseRef, now_s: float
    ) -> None:
        """Replaces the attempt at the source by one at the target, prefilled by the source."""
        state = self._state
        source, target = (state.view.workers[i] for i in (old.decode, move.decode))
        source.release_decode(old.seq_id)
        del state.by_seq[old.seq_id]
        flight.leave(old, now_s)
        state.num_left_seqs += 1
        state.by_seq[move.seq_id] = flight
        flight.num_attempts += 1
        flight.num_moves += 1
        flight.moved_why = move.reason
        state.moves.remove(flight.request.request_id)
        state.moves.enter(flight.request.request_id, MoveStage.ARRIVING, old.decode)
        flight.workers = (flight.workers[0], move.decode)
        flight.attempt = Attempt(
            move.seq_id,
            prefill=old.decode,
            decode=move.decode,
            base_len=flight.length - 1,
            reserved_len=move.reserved_len,
            placed_s=now_s,
            lease=lease,
            prefilled_s=now_s,
            is_moved=True,
            is_lent=not target.info.role.decodes,
        )
        claim = target.decodes[move.seq_id]
        target.begin_decode(move.seq_id)
        target.grow_decode(move.seq_id, flight.length - claim.context_tokens)
        if flight.length > move.reserved_len:
            flight.attempt.reserved_len = flight.predicted_len(state.lengths)
            num_blocks = target.info.layout.num_blocks_for(flight.attempt.reserved_len)
            target.extend_decode(move.seq_id, num_blocks)


def running_move(state: RouterState, request_id: RequestId) -> tuple[Flight, WorkerId, Move]:
    """Returns the flight, the source and the move of a sequence that still runs at its source."""
    flight = state.flights[request_id]
    assert flight.attempt is not None
    assert flight.attempt.move is not None
    return flight, flight.attempt.decode, flight.attempt.move


def most_at_once(state: RouterState, source: WorkerId, least: int) -> int:
    """Returns how many sequences of a worker may be copied, or may leave, at once."""
    return max(least, len(state.view.workers[source].decodes) // MOVING_SHARE)


def end_copy(state: RouterState, move: Move) -> list[RouterEffect]:
    """Tells the target to release a copy; its blocks stay cached there."""
    copy_id, move.copy_id = move.copy_id, None
    if copy_id is None:
        return []
    del state.by_seq[copy_id]
    is_there = move.decode in state.view.workers
    return [SendTo(move.decode, Cancel(copy_id))] if is_there else []
