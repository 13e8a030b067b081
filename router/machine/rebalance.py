"""Rebalances room between API keys: a key that uses little gets room from the key that uses most.

Tenants are served in turn from the queue, but a placed request stays until it ends. So 200 streams
of one key would keep another key waiting until one stream ends. If each key had a reserved share of
the workers, this share would be idle most of the time. So one key may fill all workers, and gives
room back when another key waits:

    in the queue   If the queue is full, a new request of a key with fewer queued requests replaces
                   the latest request of the key with most.
    in workers     If a request has waited for room for `turn_after_s`, the youngest sequences of
                   the key that uses most are put back in the queue: the fewest that make room on
                   one worker. They continue from their journal, as after any other preemption. This
                   is done only if the waiting key will not use more than the other key has left.

Only API keys count. A client without a key chooses its own name, and could claim room for many
names.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from engine.messages import Role
from router.cluster.view import WorkerView
from router.machine.admission import Admission
from router.machine.ends import Ends
from router.machine.events import RouterEffect
from router.machine.flight import Flight
from router.machine.placing import Placing
from router.machine.requests import Rejected
from router.machine.state import RouterState
from router.policies.base import Busy, Candidates, Need
from router.policies.candidates import decode_blocks, has_memory

LOOK_EVERY_S = 0.25
MAX_TURNS = 8  # requests placed by one call of `give`


class Rebalance:
    """Moves room from the API key that uses most to keys that use little."""

    def __init__(
        self, state: RouterState, ends: Ends, placing: Placing, admission: Admission
    ) -> None:
        self._state = state
        self._ends = ends
        self._placing = placing
        self._admission = admission
        self._look_at_s = 0.0
        # Time of the next rebalancing; None: no key waits for another.
        self.due_s: float | None = None

    # ------------------------------------------------------------ in the queue

    def make_place(self, flight: Flight, now_s: float) -> list[RouterEffect]:
        """Makes place for a new request in a full queue, by rejecting a request of another key.

        Only the key with most queued requests loses a request.
        """
        state, tenant = self._state, flight.request.tenant
        if not flight.request.has_key or state.waiting.num_requests < state.config.max_queue:
            return []
        queue = state.waiting.queue
        longest, latest = queue.longest()
        if latest is None or queue.num_of(longest) <= queue.num_of(tenant) + 1:
            return []
        state.counters["rejected", "another key's turn"] += 1
        message = "the queue is full, and other keys have fewer requests in it"
        outcome = Rejected(message, self._admission.drain_s(now_s))
        return self._ends.end(state.flights[latest], outcome, now_s)

    # ------------------------------------------------------------ in workers

    def give(self, now_s: float) -> list[RouterEffect]:
        """Places requests that have waited `turn_after_s`, in room that another key gives back."""
        after_s = self._state.config.turn_after_s
        effects: list[RouterEffect] = []
        # Either all requests have an API key, or no request has one.
        if after_s is None or self._placing.busy is None or next(self._firsts(), None) is None:
            self.due_s = None
            return effects
        if now_s < self._look_at_s:
            self.due_s = self._look_at_s
            return effects
        self._look_at_s = now_s + LOOK_EVERY_S
        for _ in range(MAX_TURNS):
            turn = self._give_one(now_s - after_s, now_s)
            if not turn:
                break
            effects += turn
        self.due_s = self._look_at_s if self._is_contended() else None
        return effects

    def _give_one(self, since_s: float, now_s: float) -> list[RouterEffect]:
        due = [flight for flight in self._firsts() if flight.last_message_s <= since_s]
        held = self._held_tokens() if due else Counter()
        richest = max(held, key=lambda name: (held[name], name), default="")
        for flight in due:
            need = self._placing.need(flight, now_s)
            to_spare = held[richest] - held[flight.request.tenant] - need.end_len
            if to_spare < 0:
                continue
            if effects := self._placing.place_one(flight, now_s):
                return effects
            victims = self._victims(richest, to_spare, need, now_s)
            if not victims:
                continue
            for victim in victims:
                effects += self._ends.excuse(victim, "another key's turn", now_s)
            effects += self._placing.place_one(flight, now_s)
            return effects
        return []

    def _victims(self, richest: str, to_spare: int, need: Need, now_s: float) -> Sequence[Flight]:
        """Returns the fewest requests whose end makes enough room on one worker, or none.

        All of them belong to the richest key, and together they reserve at most `to_spare` tokens.
        """
        if not self._lacks_room(need, now_s):
            return []
        theirs = [f for f in self._state.flights.values() if f.request.tenant == richest]
        theirs.sort(key=lambda flight: -flight.number)
        found = [
            victims
            for worker in self._state.view.workers.values()
            if worker.info.role.decodes
            and (victims := _fewest(worker, need, theirs))
            and sum(_held_by(victim) for victim in victims) <= to_spare
        ]
        return min(found, key=len, default=[])

    def _lacks_room(self, need: Need, now_s: float) -> bool:
        """True if no decode worker has room, even if a prefill worker could decode the request."""
        match self._placing.room_for(need, now_s):
            case Candidates(decoders=[]) | Busy(lacks=Role.DECODE):
                return True
            case _:
                return False

    def _firsts(self) -> Iterator[Flight]:
        """Yields the next queued request of each key."""
        for request_id in self._state.waiting.queue.firsts():
            flight = self._state.flights[request_id]
            if flight.request.has_key:
                yield flight

    def _held_tokens(self) -> Counter[str]:
        """Returns the number of tokens that workers reserve for each key."""
        held: Counter[str] = Counter()
        for flight in self._state.flights.values():
            if flight.request.has_key:
                held[flight.request.tenant] += _held_by(flight)
        return held

    def _is_contended(self) -> bool:
        """True if a key waits while another key's requests are on workers."""
        waiting = {flight.request.tenant for flight in self._firsts()}
        if not waiting:
            return False
        holding = {name for name, tokens in self._held_tokens().items() if tokens}
        return bool(holding) and len(waiting | holding) > 1


def _held_by(flight: Flight) -> int:
    """Returns the number of tokens that decode workers reserve for a request."""
    return sum(attempt.reserved_len for attempt in flight.attempts)


def _fewest(worker: WorkerView, need: Need, youngest_first: Sequence[Flight]) -> list[Flight]:
    """Returns the fewest of the youngest requests that make enough room on a worker, or none."""
    if not has_memory(worker, need.max_len):
        return []
    lacking_blocks = worker.promised_blocks + decode_blocks(worker, need) - worker.info.num_blocks
    lacking_places = worker.num_decodes + 1 - worker.info.max_running
    victims: list[Flight] = []
    for flight in youngest_first:
        attempt = flight.attempt
        is_there = attempt is not None and attempt.decode == worker.info.worker_id
        if attempt is None or not is_there or not attempt.is_decoding or attempt.move is not None:
            continue
        victims.append(flight)
        lacking_blocks -= worker.decodes[attempt.seq_id].blocks
        lacking_places -= 1
        if lacking_blocks <= 0 and lacking_places <= 0:
            return victims
    return []
