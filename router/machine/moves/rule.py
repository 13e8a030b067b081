"""The rule of moves: a sequence must leave a worker that must no longer decode.

`router.machine.moves.free` starts the other moves, whose sequences may also stay. They have the
same stages.

`router.machine.moves.moving` explains moves as a whole.
"""

from engine.messages import ROLE_CHANGED, Role, WorkerId
from router.machine.ends import Ends
from router.machine.events import RouterEffect
from router.machine.flight import COUNTED_AS, DRAINED, LENT, Attempt, Flight, Move
from router.machine.moves.stages import MoveStage, may_stay
from router.machine.placing import Placing
from router.machine.state import RouterState
from router.policies.balancing import next_decoder
from router.policies.base import Need
from router.policies.candidates import decode_blocks

GATHER_S = 0.5  # maximum seconds that a copied sequence waits for others
# Minimum seconds from a move, finished or cancelled, to the sequence's next free move.
REST_S = 20.0


class MoveRule:
    """Starts moves, with room reserved at the target, and cancels them."""

    def __init__(self, state: RouterState, ends: Ends, placing: Placing) -> None:
        self._state = state
        self._ends = ends
        self._placing = placing

    def examine(self, flight: Flight, now_s: float) -> list[RouterEffect]:
        """Starts a move if the sequence decodes on a worker that must no longer decode."""
        attempt = flight.attempt
        if attempt is None or not attempt.is_decoding:
            return []
        moves, request_id = self._state.moves, flight.request.request_id
        worker = self._state.view.workers[attempt.decode]
        if may_stay(worker.info, attempt):
            moves.remove(request_id)
            is_free = attempt.move is not None and attempt.move.is_free
            return [] if is_free else self.call_off(flight, attempt)
        reason = DRAINED if worker.info.role is Role.DRAINED else ROLE_CHANGED
        if attempt.move is not None:
            if attempt.move.is_free:  # the move is no longer free, because the sequence must leave
                moves.want(request_id, now_s)
                attempt.move.reason = reason
            return []
        wanted = moves.want(request_id, now_s)
        need = self._placing.need(flight, now_s)
        target = self.choose(attempt, need) if now_s >= wanted.not_before_s else None
        if target is None:
            moves.strand(request_id, attempt.decode, now_s)
            return []
        self._start(flight, target, reason, now_s)
        return []

    def start_free(self, flight: Flight, target: WorkerId, reason: str, now_s: float) -> None:
        """Starts a free move. After any reason but LENT, the next free move waits for `REST_S`."""
        if reason is not LENT:
            flight.rests_until_s = now_s + REST_S
        self._state.counters[COUNTED_AS[reason], "begun"] += 1
        self._start(flight, target, reason, now_s)

    def _start(self, flight: Flight, target: WorkerId, reason: str, now_s: float) -> None:
        """Starts a move: reserves room at its target. The copy follows when its turn comes."""
        attempt, need = flight.attempt, self._placing.need(flight, now_s)
        assert attempt is not None
        attempt.move = move = Move(flight.next_seq_id(), target, need.end_len, reason)
        self.reserve(flight, move, need, now_s)
        worker = self._state.view.workers[attempt.decode]
        if flight.length > worker.info.layout.block_size:
            self._state.moves.enter(flight.request.request_id, MoveStage.WAITING, attempt.decode)
        else:  # no block is full, so there is nothing to copy
            self.gather(flight, move, now_s)

    def gather(self, flight: Flight, move: Move, now_s: float) -> None:
        """Starts the wait of a copied sequence for others of its worker, of at most `GATHER_S`."""
        assert flight.attempt is not None
        move.gather_until_s = now_s + GATHER_S
        request_id, source = flight.request.request_id, flight.attempt.decode
        self._state.moves.enter(request_id, MoveStage.COPIED, source)
        self._state.deadlines.watch(flight)

    def call_off(self, flight: Flight, attempt: Attempt) -> list[RouterEffect]:
        """Cancels a move before its source was told to stop. The sequence runs on at its source."""
        stage = self._state.moves.stage(flight.request.request_id)
        if attempt.move is None or stage is MoveStage.LEAVING:
            return []
        if attempt.move.is_free:
            self._state.counters[COUNTED_AS[attempt.move.reason], "called off"] += 1
        return self._ends.end_move(flight, attempt)

    def choose(self, attempt: Attempt, need: Need) -> WorkerId | None:
        """Returns the next decode worker of a sequence; None if no worker has room."""
        state = self._state
        return next_decoder(
            state.view, need, source=attempt.decode, costs=state.estimates, rng=state.rng
        )

    def reserve(self, flight: Flight, move: Move, need: Need, now_s: float) -> None:
        """Reserves room at the target of a move."""
        target = self._state.view.workers[move.decode]
        target.reserve_decode(
            move.seq_id,
            decode_blocks(target, need),
            context_tokens=need.num_tokens,
            begins_s=now_s,
            prompt_tokens=len(flight.request.token_ids),
            max_tokens=flight.max_tokens,
        )
