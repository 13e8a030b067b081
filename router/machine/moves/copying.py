"""The copy of a move: the target pulls full blocks while the sequence runs at its source.

`router.machine.moves.moving` explains moves as a whole.
"""

from collections import Counter
from collections.abc import Iterator

from engine.messages import (
    PULL_FAILED,
    Decode,
    GivenBack,
    KvReady,
    LeaseRef,
    Limits,
    OfferPrefix,
    PrefixOffered,
    Sampling,
    SeqId,
    ToGateway,
    WorkerId,
)
from router.machine.events import RouterEffect, SendTo
from router.machine.flight import Attempt, Flight, Move
from router.machine.moves.leaving import Departures, end_copy, most_at_once, running_move
from router.machine.moves.rule import MoveRule
from router.machine.moves.stages import RETRY_S, MoveStage
from router.machine.state import SEVERED_S, RouterState

COPY_AT_ONCE = 4  # at least this many sequences of one worker are copied at the same time
LATE_COPIES = 1  # the number of late copies repeated at once; others wait `RETRY_S`


class Copying:
    """Starts copies in turn, and handles what both workers report about the copies."""

    def __init__(self, state: RouterState, rule: MoveRule, departures: Departures) -> None:
        self._state = state
        self._rule = rule
        self._departures = departures

    def copy_next(self, now_s: float) -> list[RouterEffect]:
        """Asks sources to offer full blocks, for a few sequences of each source at a time."""
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
        """Yields the next sequences to copy, with source and move: a few of each worker."""
        state = self._state
        num_copying = Counter(state.moves.at(MoveStage.COPYING).values())
        for request_id in list(state.moves.at(MoveStage.WAITING)):
            flight, source, move = running_move(self._state, request_id)
            if num_copying[source] < most_at_once(self._state, source, COPY_AT_ONCE):
                num_copying[source] += 1
                yield flight, source, move

    def on_news(self, flight: Flight, message: ToGateway, now_s: float) -> list[RouterEffect]:
        """Handles messages of the source and the target about a copy."""
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

        A copy may be late because a worker or the network is busy. So the two workers may still be
        combined.
        """
        attempt = flight.attempt
        move = None if attempt is None else attempt.move
        if move is None or move.copy_due_s is None or move.copy_due_s > now_s:
            return []
        assert attempt is not None
        wanted = self._state.moves.wanted.get(flight.request.request_id)
        self._state.counters["fallback", "copy late"] += 1
        if wanted is not None:  # else the sequence may stay
            wanted.num_late += 1
            if wanted.num_late > LATE_COPIES:
                wanted.not_before_s = now_s + RETRY_S
        return [*self._rule.call_off(flight, attempt), *self._rule.examine(flight, now_s)]

    def _on_copy_given_back(
        self, flight: Flight, attempt: Attempt, move: Move, reason: str, now_s: float
    ) -> list[RouterEffect]:
        """Handles a failed copy: the pull failed, or the target gave the copy back."""
        state = self._state
        state.counters["fallback", "copy failed"] += 1
        if state.moves.stage(flight.request.request_id) in (
            MoveStage.COPIED,
            MoveStage.LEAVING,
        ):
            # The target had the whole copy, and most of it is still cached. The rest is pulled with
            # the last blocks; the sooner the sequence leaves, the smaller is that rest.
            move.gather_until_s = None
            return end_copy(self._state, move)
        wanted = state.moves.wanted.get(flight.request.request_id)
        if reason.startswith(PULL_FAILED):
            state.view.severed[attempt.decode, move.decode] = now_s + SEVERED_S
        elif wanted is not None:
            wanted.not_before_s = now_s + RETRY_S
        return [*self._rule.call_off(flight, attempt), *self._rule.examine(flight, now_s)]

    def _end_copying(self, flight: Flight, move: Move, now_s: float) -> None:
        """Lets a sequence wait for its turn to leave: its copy will not become more complete."""
        if self._state.moves.stage(flight.request.request_id) is MoveStage.COPYING:
            move.copy_due_s = None
            self._departures.gather(flight, move, now_s)
