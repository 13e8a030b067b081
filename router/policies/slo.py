"""The placement with the least predicted time to first token that keeps the pace of tokens.

For each prefill worker that has little left to do:

    TTFT = its wait + min(prefill(n, held here), pull(best - held here) + prefill(n, best held))

So a prefix is pulled where that is quicker than computing it, which copies hot prefixes to where
they are used. The best in memory, on disk and as objects are compared: see `pulling`. A mixed
worker counts as a prefill worker. It is a last resort if it could not keep the bound on the time
per output token (TPOT), or if its running sequences would wait too long.

The decode worker is the one with the least TPOT after joining, D + E (b + 1) + F kv. Here kv is
taken in the middle of the predicted growth of all sequences there. If no worker keeps the bound the
request waits, unless even an empty worker would not keep it.

A decode worker prefills locally if the first token then comes sooner than from any other worker,
queues included, and if its own queue is short. It computes no more than its steps have time for.
With a bound, that is the time which the bound leaves beside the present batch. Without a bound, it
is once more the time of a step. The policy asks the worker that would decode anyway, and those that
hold most of the prompt.

Before the first measurement the policy is `least-loaded`.

`router.native.fleet` makes the same decision in C++, and is asked first.

Sources: Algorithm 1 of Mooncake, Qin et al., FAST 2025; both bounds at once, DistServe, Zhong et
al., OSDI 2024.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from engine.messages import WorkerId
from router.cluster.view import WorkerView
from router.policies.base import Asked, Busy, Costs, Decision, Need, Worker
from router.policies.candidates import has_memory, predicted_ready_s
from router.policies.least_loaded import shortest_backlog
from router.policies.pulling import Holder, Holders, bid
from router.policies.sharing import emptiest_decoder, kept_tokens, with_leader


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A worker that could prefill, with its predicted times."""

    worker: Worker
    wait_s: float
    work_s: float
    source: Holder | None
    num_matched: int

    @property
    def ttft_s(self) -> float:
        return self.wait_s + self.work_s


class Slo:
    """Minimises predicted TTFT subject to a bound on predicted TPOT."""

    name: ClassVar[str] = "slo"
    binds_late: ClassVar[bool] = True
    pulls: ClassVar[bool] = True
    prefills_locally: ClassVar[bool] = True

    def choose(self, asked: Asked) -> Decision | Busy:
        """The best placement."""
        return with_leader(asked, self.name) or _Question(asked).answer()


class _Question:
    """One request, its bound, and the pace of each decode worker with room after it joined."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._bound_s = bound_s(asked)
        decoders = asked.candidates.decoders
        paces_s = {i: tpot_s(worker, asked.need, asked.costs) for i, worker in decoders}
        self._paces_s = {i: pace_s for i, pace_s in paces_s.items() if pace_s is not None}
        self._all_paces_known = len(self._paces_s) == len(paces_s)
        self._holders = Holders(asked)

    def answer(self) -> Decision | Busy:
        asked = self._asked
        if self._all_paces_known and not any(map(self._is_kept, self._paces_s.values())):
            return Busy()
        predicted = [self._predict(item) for item in asked.candidates.prefillers]
        able = [prefill for prefill in predicted if prefill is not None]
        if len(able) < len(predicted):
            return shortest_backlog(asked, Slo.name, "nothing was measured yet")
        able = [prefill for prefill in able if self._can_go_on(prefill.worker)]
        best = self._soonest([prefill for prefill in able if not self._is_in_the_way(prefill)])
        local = self._soonest(self._locals())
        if local is not None and (best is None or local.ttft_s < best.ttft_s):
            return self._decision(local, local.worker[0])
        best = best or self._soonest(able)
        if best is None:
            return asked.candidates.busy
        return self._with_decoder(best)

    def _predict(self, item: Worker) -> _Prefill | None:
        asked, (worker_id, worker) = self._asked, item
        ready_s = predicted_ready_s(worker, asked.costs, asked.now_s)
        num_matched = self._holders.matched.get(worker_id, 0)
        best = bid(asked, item, num_matched, self._holders.best_for(item))
        if ready_s is None or best.seconds is None:
            return None
        return _Prefill(item, ready_s, best.seconds, best.source, num_matched)

    def _is_kept(self, pace_s: float) -> bool:
        return self._bound_s is None or pace_s <= self._bound_s

    def _can_go_on(self, item: Worker) -> bool:
        """True if a worker that goes on decoding keeps the bound with one more sequence."""
        worker_id, worker = item
        if not worker.info.role.decodes or not self._all_paces_known:
            return True
        return self._is_kept(self._paces_s[worker_id])

    def _is_in_the_way(self, prefill: _Prefill) -> bool:
        """True if the sequences that decode there would wait too long for the prompt."""
        worker = prefill.worker[1]
        if not worker.info.role.decodes or not worker.num_decodes or self._bound_s is None:
            return False
        pace_s = present_tpot_s(worker, self._asked.costs)
        return pace_s is not None and pace_s + prefill.work_s > self._bound_s

    def _locals(self) -> list[_Prefill]:
        """Decode workers that have time to prefill the prompt."""
        asked = self._asked
        decoders = [item for item in asked.candidates.decoders if item[1].info.prefills_locally]
        if not decoders or not self._all_paces_known:
            return []
        matched = self._holders.matched
        deepest = self._holders.deepest_worker
        likely = self._steadiest(asked.candidates.decoders)
        near = [i for i in decoders if i[0] == likely or (deepest and matched.get(i[0]) == deepest)]
        predicted = [self._predict(item) for item in near]
        return [p for p in predicted if p is not None and self._has_time(p)]

    def _has_time(self, prefill: _Prefill) -> bool:
        asked, (worker_id, worker) = self._asked, prefill.worker
        if not self._is_kept(self._paces_s[worker_id]) or prefill.wait_s > asked.wait_bound_s:
            return False
        if not has_memory(worker, asked.need.max_len):
            return False
        return prefill.work_s <= spare_s(worker, asked.costs, self._bound_s)

    def _soonest(self, prefills: Sequence[_Prefill]) -> _Prefill | None:
        if not prefills:
            return None
        asked = self._asked
        best_s = min(prefill.ttft_s for prefill in prefills)
        equals = [prefill for prefill in prefills if prefill.ttft_s == best_s]
        most = max(kept_tokens(asked, prefill.worker) for prefill in equals)
        equals = [prefill for prefill in equals if kept_tokens(asked, prefill.worker) == most]
        equals.sort(key=lambda prefill: prefill.worker[0])
        return asked.rng.choice(equals)

    def _with_decoder(self, prefill: _Prefill) -> Decision | Busy:
        asked, (prefill_id, worker) = self._asked, prefill.worker
        if not self._all_paces_known:
            decode = emptiest_decoder(asked, prefill.worker)
        elif worker.info.role.decodes:
            decode = prefill_id
        else:
            decode = self._steadiest(asked.candidates.partners(prefill_id))
            if not self._is_kept(self._paces_s[decode]):
                return Busy()
        return self._decision(prefill, decode)

    def _steadiest(self, decoders: Sequence[Worker]) -> WorkerId:
        """Returns the worker that kept most of the prompt; among equals, that of the least TPOT."""
        kept = self._asked.need.kept_tokens
        costs = {i: (-kept.get(i, 0), self._paces_s[i]) for i, _ in decoders}
        lowest = min(costs.values())
        return self._asked.rng.choice(sorted(i for i, cost in costs.items() if cost == lowest))

    def _decision(self, prefill: _Prefill, decode: WorkerId) -> Decision:
        prefill_id, source = prefill.worker[0], prefill.source
        return Decision(
            Slo.name,
            reason(is_local=prefill_id == decode, pulls=source is not None),
            prefill_id,
            decode,
            len(self._asked.candidates.prefillers),
            num_matched_tokens=prefill.num_matched,
            pulled_from=None if source is None else source.worker_id,
            num_pulled_tokens=0 if source is None else source.num_tokens - prefill.num_matched,
            pulled_medium=None if source is None else source.medium,
            predicted_load_s=0.0 if source is None else source.load_s,
            predicted_ttft_s=prefill.ttft_s,
            predicted_tpot_s=self._paces_s.get(decode) if self._all_paces_known else None,
        )


def reason(*, is_local: bool, pulls: bool) -> str:
    """The reason of a placement, in words."""
    why = "least TTFT, decoded where it is prefilled" if is_local else "least TTFT"
    return f"{why}, with a prefix pulled" if pulls else why


def bound_s(asked: Asked) -> float | None:
    """The bound on TPOT. None: there is none, or not even an empty worker would keep it."""
    bound_s = asked.need.tpot_bound_s
    if bound_s is None:
        return None
    end_len = asked.need.end_len
    decoders = (w for w in asked.view.workers.values() if w.info.role.decodes)
    able = (worker for worker in decoders if has_memory(worker, end_len))
    alone = (asked.costs.step_s(worker, 1, end_len) for worker in able)
    return bound_s if any(step_s is None or step_s <= bound_s for step_s in alone) else None


def present_tpot_s(worker: WorkerView, costs: Costs) -> float | None:
    """Seconds per token at a decode worker with its present claims."""
    return costs.step_s(worker, worker.num_decodes, worker.mean_context_tokens)


def spare_s(worker: WorkerView, costs: Costs, bound_s: float | None) -> float:
    """Seconds that a decode worker has for a prompt in one step; 0 if unknown."""
    pace_s = present_tpot_s(worker, costs)
    if pace_s is None:
        return -inf
    return pace_s if bound_s is None else bound_s - pace_s


def tpot_s(worker: WorkerView, need: Need, costs: Costs) -> float | None:
    """Seconds per token at a decode worker once the request has joined."""
    context_tokens = worker.mean_context_tokens + need.mean_context_tokens
    return costs.step_s(worker, worker.num_decodes + 1, context_tokens)
