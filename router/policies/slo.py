"""The placement of the least predicted time to first token, as long as tokens keep their pace.

For each prefill worker that has little left to do:

    TTFT = its wait + min(prefill(n, held here), pull(best - held here) + prefill(n, best held))

so a prefix is pulled where that is quicker than to compute it, which copies hot prefixes to where
they are wanted. A mixed worker is one of these: where the part that is not cached is short and its
queue allows it, that is quicker than to hand over. It must not hold up those that decode there for
longer than the bound on the time per output token (TPOT).

The decode worker is that of the least TPOT after joining, D + E (b + 1) + F kv, with kv in the
middle of the growth that is predicted for the sequences there and for this one. Where none keeps
the bound the request waits, unless even an empty worker would not keep it.

Nothing is predicted before something was measured: until then it is `least-loaded`.

Sources: Algorithm 1 of Mooncake, Qin et al., FAST 2025; both bounds at once, DistServe, Zhong et
al., OSDI 2024.
"""

from dataclasses import dataclass
from typing import ClassVar

from engine.messages import Role, WorkerId
from router.policies.base import Asked, Busy, Choice, Costs, Need, Placement, Worker
from router.policies.candidates import predicted_ready_s
from router.policies.least_loaded import shortest_backlog
from router.policies.pulling import Bid, Holders, bid
from router.policies.sharing import emptiest_decoder, kept_tokens, with_leader
from router.view import WorkerView


@dataclass(frozen=True, slots=True)
class _Prefill:
    """What a prefill worker comes to."""

    worker: Worker
    ttft_s: float
    bid: Bid
    num_matched: int


class Slo:
    """Minimises predicted TTFT subject to a bound on predicted TPOT."""

    name: ClassVar[str] = "slo"
    binds_late: ClassVar[bool] = True

    def choose(self, asked: Asked) -> Choice | Busy:
        """The best placement."""
        shared = with_leader(asked)
        if shared is not None:
            return shared
        holders = Holders(asked)
        predicted = [_predict(asked, item, holders) for item in asked.candidates.prefillers]
        prefills = [prefill for prefill in predicted if prefill is not None]
        if len(prefills) < len(predicted):
            return shortest_backlog(asked, "nothing was measured yet")
        prefills = _not_in_the_way(asked, prefills) or prefills
        best_s = min(prefill.ttft_s for prefill in prefills)
        equals = [prefill for prefill in prefills if prefill.ttft_s == best_s]
        most = max(kept_tokens(asked, prefill.worker) for prefill in equals)
        equals = [prefill for prefill in equals if kept_tokens(asked, prefill.worker) == most]
        equals.sort(key=lambda prefill: prefill.worker[0])
        return _with_decoder(asked, asked.rng.choice(equals))


def _predict(asked: Asked, item: Worker, holders: Holders) -> _Prefill | None:
    worker_id, worker = item
    ready_s = predicted_ready_s(worker, asked.costs, asked.now_s)
    num_matched = holders.matched.get(worker_id, 0)
    best = bid(asked, item, num_matched, holders.best_for(item))
    if ready_s is None or best is None:
        return None
    return _Prefill(item, ready_s + best.seconds, best, num_matched)


def _not_in_the_way(asked: Asked, prefills: list[_Prefill]) -> list[_Prefill]:
    """Those that hold nobody up for too long."""
    bound_s = asked.need.tpot_bound_s
    if bound_s is None:
        return prefills
    return [
        prefill
        for prefill in prefills
        if prefill.worker[1].info.role is not Role.MIXED
        or not prefill.worker[1].num_decodes
        or prefill.bid.seconds <= bound_s
    ]


def _with_decoder(asked: Asked, prefill: _Prefill) -> Choice | Busy:
    prefill_id, worker = prefill.worker
    mixed = worker.info.role is Role.MIXED
    partners = [prefill.worker] if mixed else asked.candidates.partners(prefill_id)
    paces = {decode_id: tpot_s(w, asked.need, asked.costs) for decode_id, w in partners}
    known = {decode_id: pace_s for decode_id, pace_s in paces.items() if pace_s is not None}
    if len(known) < len(paces):
        return _choice(asked, prefill, emptiest_decoder(asked, prefill.worker), None)
    decode = _steadiest(asked, partners, known)
    bound_s = asked.need.tpot_bound_s
    if bound_s is not None and known[decode] > bound_s and _would_keep(asked, partners, bound_s):
        return Busy()
    return _choice(asked, prefill, Placement(prefill_id, decode), known[decode])


def _steadiest(asked: Asked, partners: list[Worker], paces_s: dict[WorkerId, float]) -> WorkerId:
    """The decode worker that kept most of the prompt; among equals, that of the least TPOT."""
    kept = asked.need.kept_tokens
    costs = {i: (-kept.get(i, 0), paces_s[i]) for i, _ in partners}
    lowest = min(costs.values())
    return asked.rng.choice(sorted(i for i, cost in costs.items() if cost == lowest))


def _would_keep(asked: Asked, partners: list[Worker], bound_s: float) -> bool:
    """Whether any of these would keep the bound if nothing else were there."""
    length = asked.need.end_len
    alone = (asked.costs.step_s(worker, 1, length) for _, worker in partners)
    return any(step_s is not None and step_s <= bound_s for step_s in alone)


def tpot_s(worker: WorkerView, need: Need, costs: Costs) -> float | None:
    """Seconds per token at a decode worker once the request has joined."""
    end_tokens = worker.reserved_blocks * worker.info.layout.block_size
    own = (worker.context_tokens + end_tokens) // 2
    new = (need.num_tokens + need.end_len) // 2
    context_tokens = own + worker.foreign.context_tokens + new
    return costs.step_s(worker, worker.num_decodes + 1, context_tokens)


def _choice(asked: Asked, prefill: _Prefill, placement: Placement, pace_s: float | None) -> Choice:
    source = prefill.bid.source
    local = placement.prefill == placement.decode
    why = "least TTFT, decoded where it is prefilled" if local else "least TTFT"
    return Choice(
        placement,
        why if source is None else f"{why}, with a prefix pulled",
        len(asked.candidates.prefillers),
        num_matched_tokens=prefill.num_matched,
        source=None if source is None else source.worker_id,
        num_source_tokens=0 if source is None else source.num_tokens,
        ttft_s=prefill.ttft_s,
        tpot_s=pace_s,
    )
