"""The rule of `slo` in plain Python: the slow twin of `router.native.fleet`.

`router.policies.slo` explains the rule. All costs must be known.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import msgspec

from engine.messages import Role, Welcome, WorkerId
from router.cluster.estimates import Estimates
from router.cluster.view import WorkerView
from router.native.fleet import reason
from router.policies.base import EMPTY, Asked, Busy, Decision, Queue, Worker
from router.policies.candidates import has_memory, predicted_ready_s, with_leader
from router.policies.pulling import Holder, Holders, bid
from router.policies.slo import (
    Slo,
    bound_s,
    joined_price_s,
    lend_ratio,
    lending_loss_s,
    lent_tpot_s,
    slowdown_at,
    slowdown_of,
    tpot_s,
)


def choose(asked: Asked, queue: Queue = EMPTY) -> Decision | Busy:
    """Returns the best placement."""
    return with_leader(asked, Slo.name) or _Question(_with_keeper(asked), queue).answer()


def _with_keeper(asked: Asked) -> Asked:
    """Leaves only the decode worker with room that has kept most tokens, if any has kept some."""
    found, kept = asked.candidates, asked.need.kept_tokens
    able = [(kept.get(i, 0), i) for i, w in found.decoders if w.info.role is Role.DECODE]
    if max(able, default=(0, ""))[0] == 0:
        return asked
    keeper = max(able)[1]
    decoders = [item for item in found.decoders if item[0] == keeper]
    prefillers = [item for item in found.prefillers if not item[1].info.role.decodes]
    return replace(
        asked, candidates=msgspec.structs.replace(found, prefillers=prefillers, decoders=decoders)
    )


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A candidate prefill worker with its predicted times."""

    worker: Worker
    wait_s: float
    work_s: float
    source: Holder | None
    num_matched: int
    slowdown: float = 1.0
    weight: float = 1.0  # slowdown plus the cost for sequences on the same worker

    @property
    def ttft_s(self) -> float:
        return self.wait_s + self.work_s * self.slowdown

    @property
    def price_s(self) -> float:
        """Returns the TTFT plus the delay of other sequences."""
        return self.wait_s + self.work_s * self.weight


class _Question:
    """One request, its bound, and the TPOT of each decode worker after the request has joined."""

    def __init__(self, asked: Asked, queue: Queue) -> None:
        self._asked = asked
        self._queue = queue
        self._bound_s = bound_s(asked)
        decoders = asked.candidates.decoders
        paces_s = {i: tpot_s(worker, asked.need, asked.costs) for i, worker in decoders}
        self._paces_s = {i: pace_s for i, pace_s in paces_s.items() if pace_s is not None}
        assert self._paces_s.keys() == paces_s.keys()
        self._holders = Holders(asked)

    def answer(self) -> Decision | Busy:
        asked = self._asked
        can_join = self._can_join()
        predicted = [self._predict(item) for item in asked.candidates.prefillers]
        able = [p for p in predicted if p.slowdown < inf and self._can_go_on(p.worker)]
        if not can_join:
            return self._lent(able)
        best = self._soonest([prefill for prefill in able if not self._is_in_the_way(prefill)])
        local = self._soonest(self._locals())
        if local is not None and self._is_quicker(local, best):
            return self._decision(local, local.worker[0])
        best = best or self._soonest(able)
        if best is None:
            return asked.candidates.busy
        if (busy := self._better_late(best)) is not None:
            return busy
        if self._gains_if_lent(best):
            return self._decision(best, best.worker[0])
        return self._with_decoder(best)

    def _can_join(self) -> bool:
        """Returns True if a decode worker has room and would keep the bound."""
        return any(map(self._is_kept, self._paces_s.values()))

    def _is_quicker(self, local: _Prefill, best: _Prefill | None) -> bool:
        """Returns True if local prefill is better than the best prefill worker that has time.

        If no prefill worker has time, local prefill is compared with waiting. Local prefill lets
        the queued requests behind this one start earlier.
        """
        if best is not None:
            return local.price_s < best.price_s
        if self._asked.candidates.prefillers:
            return True
        soonest = self._soonest_busy()
        return soonest is None or self._hastened_s(local) < soonest.price_s

    def _hastened_s(self, prefill: _Prefill) -> float:
        """Returns the price, minus the time by which queued requests start earlier."""
        return prefill.price_s - self._queue.waiting * prefill.work_s

    def _soonest_busy(self) -> _Prefill | None:
        """Returns the best prefill worker among those that have no time at this moment."""
        asked = self._asked
        has_time = {worker_id for worker_id, _ in asked.candidates.prefillers}
        busy = [item for item in asked.view.prefillers if item[0] not in has_time]
        able = [self._predict(item) for item in busy if self._may_be_waited_for(item)]
        return min(able, key=lambda prefill: prefill.price_s, default=None)

    def _better_late(self, prefill: _Prefill) -> Busy | None:
        """Makes the prompt wait if waiting is better than a prefill worker slowed down by
        decodes."""
        asked = self._asked
        if prefill.worker[1].info.role.decodes or prefill.slowdown <= 1.0:
            return None
        soonest = self._soonest_busy()
        if soonest is None or self._hastened_s(prefill) <= soonest.price_s:
            return None
        return Busy(asked.now_s + soonest.wait_s - asked.wait_bound_s, Role.PREFILL)

    def _may_be_waited_for(self, item: Worker) -> bool:
        worker, need = item[1], self._asked.need
        if not worker.info.role.prefills:
            return False
        if not worker.info.role.decodes:
            return has_memory(worker, need.num_tokens)
        return (
            has_memory(worker, need.max_len) and item[0] in self._paces_s and self._can_go_on(item)
        )

    def _predict(self, item: Worker) -> _Prefill:
        asked, (worker_id, worker) = self._asked, item
        ready_s = predicted_ready_s(worker, asked.costs, asked.now_s)
        num_matched = self._holders.matched.get(worker_id, 0)
        best = bid(asked, item, num_matched, self._holders.best_for(item))
        assert ready_s is not None
        assert best.seconds is not None
        slowdown = slowdown_of(worker, asked.costs, self._bound_s)
        weight = weight_of(worker, asked.costs, self._bound_s)
        return _Prefill(item, ready_s, best.seconds, best.source, num_matched, slowdown, weight)

    def _is_kept(self, pace_s: float) -> bool:
        return self._bound_s is None or pace_s <= self._bound_s or not self._asked.need.decodes

    def _can_go_on(self, item: Worker) -> bool:
        """Returns True if the worker would still keep the bound with one more decoding sequence."""
        worker_id, worker = item
        if not worker.info.role.decodes:
            return True
        return self._is_kept(self._paces_s[worker_id])

    def _is_in_the_way(self, prefill: _Prefill) -> bool:
        """Returns True if the prompt would delay sequences that decode on the worker beyond the
        bound."""
        worker = prefill.worker[1]
        if not worker.info.role.decodes or not worker.num_decodes or self._bound_s is None:
            return False
        pace_s = self._asked.costs.step_s(worker, worker.num_decodes, worker.mean_context_tokens)
        return pace_s is not None and pace_s + prefill.work_s > self._bound_s

    def _locals(self) -> list[_Prefill]:
        """Returns the decode workers that may prefill the prompt."""
        asked = self._asked
        fluid = [item for item in asked.candidates.decoders if item[1].info.role is Role.DECODE]
        predicted = [self._predict(item) for item in fluid if item[1].info.is_fluid]
        return [p for p in predicted if self._has_time(p)]

    def _has_time(self, prefill: _Prefill) -> bool:
        asked, (worker_id, worker) = self._asked, prefill.worker
        if not self._is_kept(self._paces_s[worker_id]) or prefill.wait_s > asked.wait_bound_s:
            return False
        return prefill.slowdown < inf and has_memory(worker, asked.need.max_len)

    def _lent(self, prefills: Sequence[_Prefill]) -> Decision | Busy:
        """Places the decode on the prefill worker with the lowest price."""
        asked = self._asked
        if not prefills:
            return Busy()
        lenders = [(i, self._delay_s(worker)) for i, worker in asked.view.prefillers]
        ranks = [(i, delay_s, self._rank(i)) for i, delay_s in lenders if delay_s < inf]
        apart = asked.candidates.apart
        ways = [
            ((prefill.price_s + delay_s, rank, prefill.worker[0] != i), prefill, i)
            for prefill in prefills
            for i, delay_s, rank in ranks
            if (prefill.worker[0], i) not in apart
        ]
        if not ways:
            return Busy()
        least = min(cost for cost, _, _ in ways)
        equals = [(prefill, i) for cost, prefill, i in ways if cost == least]
        equals.sort(key=lambda way: (way[0].worker[0], way[1]))
        prefill, decode = asked.rng.choice(equals)
        return self._better_late(prefill) or self._decision(prefill, decode)

    def _rank(self, lender: WorkerId) -> float:
        """Ranks lenders of equal price: the fullest first while prompts arrive, else the fastest
        first."""
        pace_s = self._pace_of(lender) or 0.0
        return -pace_s if self._queue.busy > 0 else pace_s

    def _delay_s(self, worker: WorkerView) -> float:
        """Returns the delay of prompts in seconds while the worker decodes this request, or
        infinity."""
        need, costs = self._asked.need, self._asked.costs
        pace_s = lent_tpot_s(worker, need, costs)
        if pace_s is None or not self._is_kept(pace_s):
            return inf
        alone_s = costs.step_s(worker, 1, need.mean_context_tokens) or 0.0
        before_s = (costs.step_s(worker, 0, 0) or 0.0) if worker.num_decodes else 0.0
        return (alone_s - before_s) * (self._queue.busy * need.num_to_come)

    def _gains_if_lent(self, prefill: _Prefill) -> bool:
        """Returns True if the whole answer is finished earlier on the worker that prefills it."""
        asked, (worker_id, worker) = self._asked, prefill.worker
        pace_s = lent_tpot_s(worker, asked.need, asked.costs)
        if pace_s is None or not self._is_kept(pace_s):
            return False
        partners = asked.candidates.partners(worker_id)
        keeping = [item for item in partners if self._is_kept(self._paces_s[item[0]])]
        if not keeping:
            return True
        decode_id, decoder = min(keeping, key=lambda item: (self._paces_s[item[0]], item[0]))
        slowdown = slowdown_at(pace_s, worker.info.stretch or inf, self._bound_s)
        loss_s = lending_loss_s(self._queue, slowdown) + prefill.wait_s
        if self._bound_s is not None:
            gain_s = self._paces_s[decode_id] - pace_s * lend_ratio(self._queue, slowdown=1.0)
        else:
            there_s = joined_price_s(decoder, asked.need, asked.costs)
            here_s = joined_price_s(worker, asked.need, asked.costs)
            assert there_s is not None  # the TPOTs are known
            assert here_s is not None
            gain_s = there_s - here_s * lend_ratio(self._queue, slowdown)
        return gain_s * asked.need.num_to_come > loss_s

    def _soonest(self, prefills: Sequence[_Prefill]) -> _Prefill | None:
        if not prefills:
            return None
        asked = self._asked
        best_s = min(prefill.price_s for prefill in prefills)
        equals = [prefill for prefill in prefills if prefill.price_s == best_s]
        equals.sort(key=lambda prefill: prefill.worker[0])
        return asked.rng.choice(equals)

    def _with_decoder(self, prefill: _Prefill) -> Decision | Busy:
        asked, (prefill_id, worker) = self._asked, prefill.worker
        if worker.info.role.decodes:
            decode = prefill_id
        else:
            decode = self._steadiest(asked.candidates.partners(prefill_id))
            if not self._is_kept(self._paces_s[decode]):
                return Busy()
        return self._decision(prefill, decode)

    def _steadiest(self, decoders: Sequence[Worker]) -> WorkerId:
        """Returns the decode worker with the lowest TPOT."""
        costs = {i: self._paces_s[i] for i, _ in decoders}
        lowest = min(costs.values())
        return self._asked.rng.choice(sorted(i for i, cost in costs.items() if cost == lowest))

    def _decision(self, prefill: _Prefill, decode: WorkerId) -> Decision:
        prefill_id, source = prefill.worker[0], prefill.source
        return Decision(
            Slo.name,
            reason(prefill.worker[1].info, self._info(decode), pulls=source is not None),
            prefill_id,
            decode,
            len(self._asked.candidates.prefillers),
            num_matched_tokens=prefill.num_matched,
            pulled_from=None if source is None else source.worker_id,
            num_pulled_tokens=0 if source is None else source.num_tokens - prefill.num_matched,
            pulled_medium=None if source is None else source.medium,
            predicted_load_s=0.0 if source is None else source.load_s,
            predicted_ttft_s=prefill.ttft_s,
            predicted_tpot_s=self._pace_of(decode),
            slowdown=prefill.slowdown,
        )

    def _info(self, worker_id: WorkerId) -> Welcome:
        return self._asked.view.workers[worker_id].info

    def _pace_of(self, decode: WorkerId) -> float | None:
        if decode in self._paces_s:
            return self._paces_s[decode]
        return tpot_s(self._asked.view.workers[decode], self._asked.need, self._asked.costs)


def weight_of(worker: WorkerView, costs: Estimates, bound_s: float | None) -> float:
    """Returns the slowdown.

    Without a TPOT bound, adds the number of sequences that the prompt delays.
    """
    delays = worker.info.is_fluid and bound_s is None
    return slowdown_of(worker, costs, bound_s) + (worker.num_decoding if delays else 0)
