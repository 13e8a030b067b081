"""The stages of a move: copy and hand-over.

The target pulls full blocks while the sequence runs at its source. Then the source stops the copied
sequences together, and the target runs them.

`router.machine.moves.moving` explains moves as a whole.
"""

from collections import Counter
from collections.abc import Iterator

from engine.messages import (
    PULL_FAILED,
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
    Sampling,
    SeqId,
    ToGateway,
    WorkerId,
)
from router.machine.ends import Ends
from router.machine.events import RouterEffect, SendTo
from router.machine.flight import Attempt, Flight, Move
from router.machine.moves.rule import MoveRule
from router.machine.moves.stages import RETRY_S, MoveStage
from router.machine.state import SEVERED_S, RouterState

COPY_AT_ONCE = 4  # minimum number of sequences of one worker that are copied at the same time
LATE_COPIES = 1  # number of late copies repeated at once; later ones wait `RETRY_S`
NOT_HANDED_OVER = "not handed over"
LEAVE_AT_ONCE = 16  # minimum number of sequences that may leave one worker at the same time
MOVING_SHARE = 8  # 1/8 of the worker's decoding sequences, if this is above the minimum
# Number of blocks; without a copy, a step waits only for a pull of at most this size.
FEW_BLOCKS = 2


class Copying:
    """Starts copies, and hands copied sequences over to their targets."""

    def __init__(self, state: RouterState, ends: Ends, rule: MoveRule) -> None:
        self._state = state
        self._ends = ends
        self._rule = rule

    def copy_next(self, now_s: float) -> list[RouterEffect]:
        """Tells sources to offer full blocks, for a few sequences of each source at a time."""
        state = self._state
        effects: list[RouterEffect] = []
        for flight, source, move in self._next_to_copy():
            state.moves.enter(flight.request.request_id, MoveStage.COPYING, source)
            move.copy_id = copy_id = SeqId(f"{move.seq_id}.copy")
            move.copy_due_s = now_s + state.config.move_timeout_s
            state.by_seq[copy_id] = flight
            state.deadlines.watch(flight)
            effects.append(
                SendTo(source, OfferPrefix(copy_id, flight.token_ids, flight.request.salt))
            )
        return effects

    def _next_to_copy(self) -> Iterator[tuple[Flight, WorkerId, Move]]:
        """Yields the next sequences to copy, each with its source and its move.

        Only a few sequences of each source are copied at a time.
        """
        state = self._state
        num_copying = Counter(state.moves.at(MoveStage.COPYING).values())
        for request_id in list(state.moves.at(MoveStage.WAITING)):
            flight, source, move = running_move(self._state, request_id)
            if num_copying[source] < most_at_once(self._state, source, COPY_AT_ONCE):
                num_copying[source] += 1
                yield flight, source, move

    def on_message(self, flight: Flight, message: ToGateway, now_s: float) -> list[RouterEffect]:
        """Handles messages from the source and the target about a copy."""
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
                    evict_first=move.is_free,
                )
                return [SendTo(move.decode, copy)]
            case PrefixOffered():
                self._state.counters["fallback", "nothing to copy"] += 1
                self._end_copying(flight, move, now_s)
                return end_copy(self._state, move)
            case KvReady():
                self._state.observe_pull(attempt.decode, target, message, now_s)
                self._end_copying(flight, move, now_s)
                return []
            case GivenBack(_, reason):
                return self._on_copy_given_back(flight, attempt, move, reason, now_s)
        return []

    def stop_waiting(self, flight: Flight, now_s: float) -> list[RouterEffect]:
        """Cancels a late copy. The sequence runs on, and the blocks that arrived stay cached.

        A copy may be late because a worker or the network is busy. So KV may still be sent between
        the two workers.
        """
        attempt = flight.attempt
        move = None if attempt is None else attempt.move
        if move is None or move.copy_due_s is None or move.copy_due_s > now_s:
            return []
        assert attempt is not None
        wanted = self._state.moves.wanted.get(flight.request.request_id)
        self._state.counters["fallback", "copy late"] += 1
        if wanted is not None:  # the sequence must still leave its worker
            wanted.num_late += 1
            if wanted.num_late > LATE_COPIES:
                wanted.not_before_s = now_s + RETRY_S
        return [*self._rule.call_off(flight, attempt), *self._rule.examine(flight, now_s)]

    def _on_copy_given_back(
        self, flight: Flight, attempt: Attempt, move: Move, reason: str, now_s: float
    ) -> list[RouterEffect]:
        """Handles a failed copy: the pull failed, or the target returned the copy."""
        state = self._state
        state.counters["fallback", "copy failed"] += 1
        if state.moves.stage(flight.request.request_id) in (
            MoveStage.COPIED,
            MoveStage.LEAVING,
        ):
            # The target had the whole copy, and most of it is still cached. The evicted blocks are
            # pulled with the last blocks. The sooner the sequence leaves, the fewer blocks are
            # evicted.
            move.gather_until_s = None
            return end_copy(self._state, move)
        wanted = state.moves.wanted.get(flight.request.request_id)
        if reason.startswith(PULL_FAILED):
            state.view.severed[attempt.decode, move.decode] = now_s + SEVERED_S
        elif wanted is not None:
            wanted.not_before_s = now_s + RETRY_S
        return [*self._rule.call_off(flight, attempt), *self._rule.examine(flight, now_s)]

    def _end_copying(self, flight: Flight, move: Move, now_s: float) -> None:
        """Marks a copy as complete as it will be. The sequence then waits for its turn to leave."""
        if self._state.moves.stage(flight.request.request_id) is MoveStage.COPYING:
            move.copy_due_s = None
            self._rule.gather(flight, move, now_s)

    # ------------------------------------------------------------ departure

    def stop_gathering(self, flight: Flight, now_s: float) -> None:
        """Lets a copied sequence leave when it has waited long enough for others."""
        move = None if flight.attempt is None else flight.attempt.move
        if move is not None and move.gather_until_s is not None and move.gather_until_s <= now_s:
            move.gather_until_s = None

    def hand_over_next(self) -> list[RouterEffect]:
        """Tells sources to stop the sequences whose turn it is.

        The copied sequences of a worker leave together, when all of them or enough of them are
        copied. The sequences that left before must first run at their targets.
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
        """Starts a sequence at its target, after the source has stopped it and leased its KV."""
        move = attempt.move
        if move is None:
            return []  # the hand-over was not requested
        if message.lease is None:
            return self._ends.excuse(flight, NOT_HANDED_OVER, now_s)
        self._state.counters["moved", move.reason] += 1
        self._state.workers.credit(attempt.decode, flight, flight.length - 1)
        is_near = move.copy_id is not None or message.lease.num_blocks <= FEW_BLOCKS
        self._become(flight, attempt, move, message.lease, now_s)
        flight.last_message_s = now_s
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
            # In the same frame, so the target still finds the copy in its cache.
            *end_copy(self._state, move),
        ]

    def _become(
        self, flight: Flight, old: Attempt, move: Move, lease: LeaseRef, now_s: float
    ) -> None:
        """Replaces the attempt at the source by an attempt at the target, with the prefill done."""
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
    """Returns the flight, source and move of a sequence that still runs at its source."""
    flight = state.flights[request_id]
    assert flight.attempt is not None
    assert flight.attempt.move is not None
    return flight, flight.attempt.decode, flight.attempt.move


def most_at_once(state: RouterState, source: WorkerId, least: int) -> int:
    """Returns the maximum number of a worker's sequences that are copied, or leave, together."""
    return max(least, len(state.view.workers[source].decodes) // MOVING_SHARE)


def end_copy(state: RouterState, move: Move) -> list[RouterEffect]:
    """Tells the target to release a copy; its blocks stay cached there."""
    copy_id, move.copy_id = move.copy_id, None
    if copy_id is None:
        return []
    del state.by_seq[copy_id]
    is_there = move.decode in state.view.workers
    return [SendTo(move.decode, Cancel(copy_id))] if is_there else []
