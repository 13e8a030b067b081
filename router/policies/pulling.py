"""Workers and stores from which a prompt's prefix could be pulled before the rest is computed.

Blocks in memory are pulled at once. A store reads blocks from a lower medium while they are pulled,
so the two times do not add up:

    in memory     answer + pull(k)
    on disk, or   max(pull(k), load(what the store lacks in memory))
    as objects

For each medium, the store with the longest prefix is compared; a faster medium may have less of the
prompt. A store reads all blocks that are not in its memory, even those that the sink has, since its
lease grows in the order of the prompt. It reads its lower media in parallel.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from engine.messages import WorkerId
from engine.worker.block_events import LOWER_MEDIA, Medium
from router.cluster.view import WorkerView
from router.policies.base import Asked, Worker
from router.policies.candidates import predicted_ready_s

# While costs are unknown, a prefix is pulled only if it saves at least this many tokens, because
# computing fewer tokens may be as fast as the offer. A slower medium must save this many more
# tokens than a faster one.
LEAST_SPARED_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Holder:
    """A worker or store that has more of the prompt cached than the prefill worker."""

    worker_id: WorkerId
    num_tokens: int
    medium: str | None = None  # a medium of a store; None: the block pool of a worker
    answers_s: float = 0.0  # seconds until the holder answers, added to the pull
    load_s: float = 0.0  # seconds until the store has read the blocks


class _Hold(NamedTuple):
    """The number of leading tokens that a worker or store has on one medium."""

    num_tokens: int
    worker_id: WorkerId
    load_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Found:
    """The holders on one medium that are equally good."""

    medium: str
    num_tokens: int
    workers: list[WorkerId]
    answers_s: float
    load_s: float


class Holders:
    """The workers and stores that have a prefix of a prompt, longest prefix first."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._found: dict[Hashable, list[_Found]] = {}  # by fingerprint and layout of the sink
        self.matched = dict(asked.known.matched_tokens())
        suspects = {source for source, _ in asked.view.severed}
        live = asked.view.workers.keys() - suspects if suspects else asked.view.workers.keys()
        in_memory = [_Hold(n, i) for i, n in self.matched.items() if i in live]
        self._ranked = {Medium.HOST: _longest_first(in_memory)}
        below = asked.known.matched_below()
        if below:
            self._rank_below(below, live)

    def _rank_below(self, below: Mapping[tuple[WorkerId, str], int], live: Set[WorkerId]) -> None:
        """Ranks the stores by lower medium. Only tokens that faster media of a store lack count."""
        found: dict[Medium, list[_Hold]] = {medium: [] for medium in LOWER_MEDIA}
        for store_id in {store_id for store_id, _ in below if store_id in live}:
            store = self._asked.view.workers[store_id]
            num_above, load_s = self.matched.get(store_id, 0), 0.0
            for medium in LOWER_MEDIA:
                num_tokens = below.get((store_id, medium), 0)
                if num_tokens <= num_above:
                    continue
                num_blocks = (num_tokens - num_above) // store.info.layout.block_size
                load_s = max(load_s, self._asked.costs.load_s(store, medium, num_blocks))
                found[medium].append(_Hold(num_tokens, store_id, load_s))
                num_above = num_tokens
        self._ranked |= {medium: _longest_first(holds) for medium, holds in found.items()}

    def best_for(self, sink: Worker) -> list[Holder]:
        """Returns the best holder on each medium, the fastest medium first.

        Only holders with a longer prefix than the sink count. The best holder has most tokens, and
        among equals it is the one that can answer first. Further ties are broken at random.
        """
        here = self.matched.get(sink[0], 0)
        most = max((ranked[0].num_tokens for ranked in self._ranked.values() if ranked), default=0)
        if not self._asked.need.may_pull or most <= here:
            return []
        return [self._one_of(found) for found in self._all_for(sink[1]) if found.num_tokens > here]

    def below_for(self, sink: Worker) -> list[Holder]:
        """Does the same as `best_for`, for lower media only."""
        if not self._asked.need.may_pull:
            return []
        here, found = self.matched.get(sink[0], 0), self._search(sink[1], LOWER_MEDIA)
        return [self._one_of(each) for each in found if each.num_tokens > here]

    def _one_of(self, found: _Found) -> Holder:
        chosen = self._asked.rng.choice(found.workers)
        is_pool = not self._asked.view.workers[chosen].is_store
        medium = None if is_pool else found.medium
        return Holder(chosen, found.num_tokens, medium, found.answers_s, found.load_s)

    def _all_for(self, sink: WorkerView) -> list[_Found]:
        """Returns the best holders for a sink. Cached by kind of sink, as many sinks are alike."""
        info = sink.info
        kind = (info.fingerprint, info.kv_wire_dtype, info.layout)
        if kind not in self._found:
            self._found[kind] = self._search(sink, (Medium.HOST, *LOWER_MEDIA))
        return self._found[kind]

    def _search(self, sink: WorkerView, media: Sequence[Medium]) -> list[_Found]:
        """Returns the best holders on each medium. A medium without holders is left out."""
        longest = [(m, self._most_for(sink, self._ranked.get(m, ()))) for m in media]
        return [self._soonest(medium, equals) for medium, equals in longest if equals]

    def _most_for(self, sink: WorkerView, ranked: Sequence[_Hold]) -> list[_Hold]:
        """Returns the longest prefixes on a medium that this sink can pull."""
        equals: list[_Hold] = []
        for hold in ranked:
            if equals and hold.num_tokens < equals[0].num_tokens:
                break
            if sink.can_pull_from(self._asked.view.workers[hold.worker_id]):
                equals.append(hold)
        return equals

    def _soonest(self, medium: str, equals: Sequence[_Hold]) -> _Found:
        """Returns the holders that can answer first. Workers answer only between two steps.

        A store runs no steps, but may have to read from a lower medium.
        """
        waits_s = [(self._answers_s(hold.worker_id), hold.load_s) for hold in equals]
        least = min(waits_s)
        pairs = zip(equals, waits_s, strict=True)
        workers = [hold.worker_id for hold, wait_s in pairs if wait_s == least]
        return _Found(medium, equals[0].num_tokens, workers, *least)

    def _answers_s(self, worker_id: WorkerId) -> float:
        asked = self._asked
        worker = asked.view.workers[worker_id]
        if worker.is_store:
            return 0.0
        ready_s = predicted_ready_s(worker, asked.costs, asked.now_s)
        return min(ready_s or 0.0, asked.costs.offer_s())


def _longest_first(holds: Iterable[_Hold]) -> list[_Hold]:
    return sorted(holds, key=lambda hold: (-hold.num_tokens, hold.worker_id))


@dataclass(frozen=True, slots=True)
class Bid:
    """The cost of a prompt at a worker, and the holder from which it pulls first, if any."""

    seconds: float | None  # predicted seconds; None: nothing was measured yet
    source: Holder | None = None


def bid(asked: Asked, sink: Worker, num_cached: int, holders: Iterable[Holder]) -> Bid:
    """Returns the quickest way to the whole prompt: compute it, or first pull from a holder."""
    worker, num_tokens = sink[1], asked.need.num_tokens
    best_s = asked.costs.prefill_s(worker, num_tokens, num_cached)
    if best_s is None:
        return Bid(None, _worth_a_try(num_cached, holders))
    source = None
    for holder in holders:
        rest_s = asked.costs.prefill_s(worker, num_tokens, holder.num_tokens)
        if holder.num_tokens <= num_cached or rest_s is None:
            continue
        pull_s = asked.costs.pull_s(worker, holder.num_tokens - num_cached) + holder.answers_s
        pulled_s = max(pull_s, holder.load_s) + rest_s
        if pulled_s < best_s:
            best_s, source = pulled_s, holder
    return Bid(best_s, source)


def _worth_a_try(num_cached: int, holders: Iterable[Holder]) -> Holder | None:
    """Returns the holder to pull from while the cost of computing is unknown."""
    source, num_there = None, num_cached
    for holder in holders:
        if holder.num_tokens - num_there >= LEAST_SPARED_TOKENS:
            source, num_there = holder, holder.num_tokens
    return source
