"""Ends of attempts and of requests, and the return of a request to the queue.

When an attempt ends, its claims are released, and a message is sent to each of its workers. Each
accepted request ends as exactly one of Finished, Rejected, Failed, Cancelled.
"""

from msgspec.structs import replace

from engine.messages import Cancel
from router.machine.events import RouterEffect, SendTo
from router.machine.flight import Attempt, Flight, timeline
from router.machine.moves.stages import MoveStage
from router.machine.requests import Failed, Finished, Outcome, Update
from router.machine.state import RouterState
from router.policies.base import Placement, SharedPrompt


class Ends:
    """Ends attempts, moves and requests."""

    def __init__(self, state: RouterState) -> None:
        self._state = state

    def end(
        self,
        flight: Flight,
        outcome: Outcome,
        now_s: float,
        *,
        last: Update | None = None,
        notify_workers: bool = True,
    ) -> list[RouterEffect]:
        """Ends a request and its attempts. `last` is an update with the last tokens."""
        state = self._state
        request_id = flight.request.request_id
        attempt = flight.attempt
        if flight.leads:
            self.release_followers(flight, now_s)
        if attempt is None:
            state.waiting.drop(flight)
        has_kv = attempt is not None and attempt.is_decoding
        if attempt is not None and has_kv and (attempt.lease or not attempt.hands_over):
            # After a first token that was also the last, no KV was handed over. The last token of
            # an answer is never computed, so no KV exists for it.
            state.workers.credit(attempt.decode, flight, flight.length - 1)
        if isinstance(outcome, Finished):
            state.lengths.observe(flight.max_tokens, len(flight.tokens))
        effects = self.end_attempt(flight, now_s, notify_workers=notify_workers)
        del state.flights[request_id]
        state.deadlines.remove(request_id)
        state.counters["ended", type(outcome).__name__.lower()] += 1
        final = last or Update(request_id=request_id)
        return [*effects, replace(final, outcome=outcome, timeline=timeline(flight, now_s))]

    def retry(self, flight: Flight, reason: str, now_s: float) -> list[RouterEffect]:
        """Ends the attempt, and puts the request at the head of the queue.

        If the request has a second attempt, it continues with the second attempt instead.
        """
        state = self._state
        if flight.attempt is not None and flight.hedge is not None:
            return self.drop(flight, flight.attempt, reason, now_s)
        state.count("retried", reason)
        self.release_followers(flight, now_s)
        state.num_left_seqs += 1
        effects = self.end_attempt(flight, now_s)
        if flight.num_counted >= state.config.max_attempts:
            message = f"given up after {flight.num_attempts} attempts; the last one: {reason}"
            return effects + self.end(flight, Failed(message), now_s)
        flight.last_message_s = now_s
        state.waiting.put_back(flight)
        return effects

    def excuse(self, flight: Flight, reason: str, now_s: float) -> list[RouterEffect]:
        """Does the same as `retry`, but the attempt does not count as failed."""
        flight.num_excused += 1
        return self.retry(flight, reason, now_s)

    def drop(self, flight: Flight, attempt: Attempt, why: str, now_s: float) -> list[RouterEffect]:
        """Ends one of a request's two attempts. The request continues with the other attempt."""
        first, second = flight.attempt, flight.hedge
        assert first is not None
        assert second is not None
        other = second if attempt is first else first
        self._state.count("hedge", why)
        flight.attempt, flight.hedge = other, None
        flight.workers, flight.decision = (other.prefill, other.decode), other.decision
        if not flight.tokens:
            flight.stamps.prefill_started_s = other.started_s
            flight.num_cached_tokens = other.num_cached_tokens
        self._state.num_left_seqs += 1
        effects = self._end_one(flight, attempt, now_s, notify_workers=True)
        self._state.deadlines.watch(flight)
        return effects

    def end_attempt(
        self, flight: Flight, now_s: float, *, notify_workers: bool = True
    ) -> list[RouterEffect]:
        """Ends all attempts of a request, and releases their claims on workers."""
        effects: list[RouterEffect] = []
        for attempt in (flight.attempt, flight.hedge):
            if attempt is not None:
                effects += self._end_one(flight, attempt, now_s, notify_workers=notify_workers)
        flight.attempt = flight.hedge = None
        return effects

    def _end_one(
        self, flight: Flight, attempt: Attempt, now_s: float, *, notify_workers: bool
    ) -> list[RouterEffect]:
        del self._state.by_seq[attempt.seq_id]
        flight.leave(attempt, now_s)
        effects: list[RouterEffect] = []
        if self._state.moves.stages:
            if attempt is flight.attempt:
                self._state.moves.remove(flight.request.request_id)
            effects = self.end_move(flight, attempt, notify_workers=notify_workers)
        concerned = [attempt.prefill, attempt.decode]
        if attempt.holder is not None:
            concerned.append(attempt.holder)
        for worker_id in dict.fromkeys(concerned):
            worker = self._state.view.workers.get(worker_id)
            if worker is None:
                continue
            worker.release_prefill(attempt.seq_id, now_s)
            worker.release_decode(attempt.seq_id)
            if notify_workers:
                effects.append(SendTo(worker_id, Cancel(attempt.seq_id)))
        return effects

    def end_move(
        self, flight: Flight, attempt: Attempt, *, notify_workers: bool = True
    ) -> list[RouterEffect]:
        """Releases the claims of a move: the room at its target, its copy, and its lease.

        Both workers are always told to drop the copy, because the end of the sequence does not drop
        it.
        """
        state, request_id = self._state, flight.request.request_id
        stage = state.moves.stage(request_id)
        state.moves.end(request_id)
        move, attempt.move = attempt.move, None
        if move is None:
            return []
        workers = state.view.workers
        if (target := workers.get(move.decode)) is not None:
            target.release_decode(move.seq_id)
        cancels = []
        if stage is MoveStage.LEAVING and notify_workers:
            cancels.append(SendTo(attempt.decode, Cancel(move.seq_id)))
        if move.copy_id is not None:
            del state.by_seq[move.copy_id]
            cancels += [SendTo(i, Cancel(move.copy_id)) for i in (attempt.decode, move.decode)]
        return [cancel for cancel in cancels if cancel.worker_id in workers]

    def release_followers(self, leader: Flight, now_s: float) -> None:
        """Queues the followers that were held back for a leader."""
        leader.leads, leader.shared, attempt = False, None, leader.attempt
        if attempt is not None and attempt.prefilled_s is not None:
            worker = self._state.view.workers.get(attempt.prefill)
            if worker is not None:
                # A worker computes at least one token, because it samples from that token's logits.
                block_size = worker.info.layout.block_size
                num_tokens = (leader.prompt_len - 1) // block_size * block_size
                placement = Placement(attempt.prefill, attempt.decode)
                leader.shared = SharedPrompt(placement, num_tokens)
        for flight in leader.followers:
            flight.shared, flight.last_message_s = leader.shared, now_s
        if leader.followers:
            self._state.waiting.release(leader)
