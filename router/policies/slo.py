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

Fluid workers take requests of the other pool (`Welcome.stretch`). A prompt beside sequences that
decode there is computed in chunks which keep their pace (`engine.worker.pace`). So it takes longer:

    limit = the bound on TPOT, or else `stretch` times their present step
    drag  = limit / (limit - their present step); 1 if nothing decodes there
    TTFT  = its wait + drag · min(...)

Without a bound, each of these sequences waits for the prompt in all. So places are compared by
wait + (drag + sequences) · min(...). With one, they keep their pace.

A decode worker prefills locally if that is less than at any other worker, and if its own queue is
short. If all prefill workers are busy, it is compared with waiting for one of them. The others in
the queue come sooner then, by min(...) over the number of workers that prefill, each. This counts.

A prefill worker goes on with an answer if the whole answer comes sooner, and more so than prompts
come later. With n other prompts in the queue that take S seconds, shares of a prefill worker, and a
share `busy` of its time that prompts lately took:

    gain = (token at the best decode worker - token here · LEND_RATIO / (1 - busy)) · tokens to come
    loss = its wait here + S · (1 + (drag - 1) · (n + 1) / 2)

A token counts for the step after joining. Without a bound, what it costs others counts too. At both
places, that is what it adds to the step of each sequence. Here it is also the time that it takes
from prompts to come, which those behind them wait for, and a prompt's second counts for more:

    token      = step after + sequences · (step after - step before)
    token here = the same · (1 + PROMPT_WEIGHT · busy · (drag - 1) / (1 - busy)²)

If no decode worker has room and keeps the bound, prefill workers decode too. The one is taken that
by this loses least time for prompts, and of equal ones the fullest:

    harm = (step after - step before, 0 if nothing decodes there) · busy · tokens to come

The first sequence costs the D of each step, the next ones little. So few workers decode, which may
be others than that of the prompt, and the rest compute prompts at full speed. A prompt waits for
one of these if it is done sooner there:

    its wait there + min(...)  <  its price here - what it brings those behind it in the queue

A lender uses no more than `LEND_SHARE` of its memory. When prompts wait, it may give its sequences
back, or to a fuller lender (`router.machine.moves.lending`).

Before the first measurement the policy is `least-loaded`.

`router.native.fleet` makes the same decision in C++, and is asked first.

Sources: Algorithm 1 of Mooncake, Qin et al., FAST 2025; both bounds at once, DistServe, Zhong et
al., OSDI 2024.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from engine.messages import Role, Welcome, WorkerId
from router.cluster.view import WorkerView
from router.policies.base import Asked, Busy, Costs, Decision, Need, Queue, Worker
from router.policies.candidates import has_memory, has_room, predicted_ready_s
from router.policies.least_loaded import shortest_backlog
from router.policies.pulling import Holder, Holders, bid
from router.policies.sharing import emptiest_decoder, kept_tokens, with_leader

LEND_RATIO = 1.1
LEND_SHARE = 0.75  # of a prefill worker's KV memory
PROMPT_WEIGHT = 8.0  # seconds of decoding for which a second more until a first token counts


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A worker that could prefill, with its predicted times."""

    worker: Worker
    wait_s: float
    work_s: float
    source: Holder | None
    num_matched: int
    drag: float = 1.0
    weight: float = 1.0  # the drag, with what the prompt costs the sequences beside it

    @property
    def ttft_s(self) -> float:
        return self.wait_s + self.work_s * self.drag

    @property
    def price_s(self) -> float:
        """The TTFT, with what it costs others."""
        return self.wait_s + self.work_s * self.weight


class Slo:
    """Minimises predicted TTFT subject to a bound on predicted TPOT."""

    name: ClassVar[str] = "slo"
    binds_late: ClassVar[bool] = True
    pulls: ClassVar[bool] = True
    is_fluid: ClassVar[bool] = True

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
        can_join = self._can_join()
        predicted = [self._predict(item) for item in asked.candidates.prefillers]
        able = [prefill for prefill in predicted if prefill is not None]
        if len(able) < len(predicted):
            if not can_join:
                return Busy()
            return shortest_backlog(asked, Slo.name, "nothing was measured yet")
        able = [p for p in able if p.drag < inf and self._can_go_on(p.worker)]
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
        """True if a decode worker has room, and would keep the bound or has an unknown pace."""
        if not self._asked.candidates.decoders:
            return False
        return not self._all_paces_known or any(map(self._is_kept, self._paces_s.values()))

    def _is_quicker(self, local: _Prefill, best: _Prefill | None) -> bool:
        """True if a local prefill is better than at the best prefill worker with time.

        If none has time, it is compared with waiting. It brings those behind in the queue forward.
        """
        if best is not None:
            return local.price_s < best.price_s
        if self._asked.candidates.prefillers:
            return True
        soonest = self._soonest_busy()
        return soonest is None or self._hastened_s(local) < soonest.price_s

    def _hastened_s(self, prefill: _Prefill) -> float:
        """The price, less what it brings those behind it in the queue forward."""
        return prefill.price_s - self._asked.queue.waiting * prefill.work_s

    def _soonest_busy(self) -> _Prefill | None:
        """The best of the workers that prefill and have no time now."""
        asked = self._asked
        has_time = {worker_id for worker_id, _ in asked.candidates.prefillers}
        busy = [item for item in asked.view.prefillers() if item[0] not in has_time]
        predicted = [self._predict(item) for item in busy if self._may_be_waited_for(item)]
        able = [prefill for prefill in predicted if prefill is not None]
        return min(able, key=lambda prefill: prefill.price_s, default=None)

    def _better_late(self, prefill: _Prefill) -> Busy | None:
        """Has the prompt wait, rather than be slowed down by what a prefill worker decodes."""
        asked = self._asked
        if prefill.worker[1].info.role.decodes or prefill.drag <= 1.0:
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

    def _predict(self, item: Worker) -> _Prefill | None:
        asked, (worker_id, worker) = self._asked, item
        ready_s = predicted_ready_s(worker, asked.costs, asked.now_s)
        num_matched = self._holders.matched.get(worker_id, 0)
        best = bid(asked, item, num_matched, self._holders.best_for(item))
        if ready_s is None or best.seconds is None:
            return None
        drag = drag_of(worker, asked.costs, self._bound_s)
        weight = weight_of(worker, asked.costs, self._bound_s)
        return _Prefill(item, ready_s, best.seconds, best.source, num_matched, drag, weight)

    def _is_kept(self, pace_s: float) -> bool:
        return self._bound_s is None or pace_s <= self._bound_s or not self._asked.need.decodes

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
        pace_s = self._asked.costs.step_s(worker, worker.num_decodes, worker.mean_context_tokens)
        return pace_s is not None and pace_s + prefill.work_s > self._bound_s

    def _locals(self) -> list[_Prefill]:
        """Decode workers that may prefill the prompt."""
        asked = self._asked
        if not self._all_paces_known:
            return []
        fluid = [item for item in asked.candidates.decoders if item[1].info.role is Role.DECODE]
        predicted = [self._predict(item) for item in fluid if item[1].info.is_fluid]
        return [p for p in predicted if p is not None and self._has_time(p)]

    def _has_time(self, prefill: _Prefill) -> bool:
        asked, (worker_id, worker) = self._asked, prefill.worker
        if not self._is_kept(self._paces_s[worker_id]) or prefill.wait_s > asked.wait_bound_s:
            return False
        return prefill.drag < inf and has_memory(worker, asked.need.max_len)

    def _lent(self, prefills: Sequence[_Prefill]) -> Decision | Busy:
        """Has the answer decoded by a prefill worker, at the least price."""
        asked = self._asked
        if not prefills or not self._all_paces_known:
            return Busy()
        lenders = [(i, self._harm_s(worker)) for i, worker in asked.view.prefillers()]
        ranks = [(i, harm_s, self._rank(i)) for i, harm_s in lenders if harm_s < inf]
        apart = asked.candidates.apart
        ways = [
            ((prefill.price_s + harm_s, rank, prefill.worker[0] != i), prefill, i)
            for prefill in prefills
            for i, harm_s, rank in ranks
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
        """Orders equal lenders: the fullest first while prompts come, or else the quickest."""
        pace_s = self._pace_of(lender) or 0.0
        return -pace_s if self._asked.queue.busy > 0 else pace_s

    def _harm_s(self, worker: WorkerView) -> float:
        """Seconds of prompts not computed while it decodes this; infinite if it may not."""
        asked, need, costs = self._asked, self._asked.need, self._asked.costs
        pace_s = lent_tpot_s(worker, need, costs)
        if pace_s is None or not self._is_kept(pace_s):
            return inf
        alone_s = costs.step_s(worker, 1, need.mean_context_tokens) or 0.0
        before_s = (costs.step_s(worker, 0, 0) or 0.0) if worker.num_decodes else 0.0
        return (alone_s - before_s) * (asked.queue.busy * need.num_to_come)

    def _gains_if_lent(self, prefill: _Prefill) -> bool:
        """True if all of the answer comes sooner where its prompt is computed."""
        asked, (worker_id, worker) = self._asked, prefill.worker
        pace_s = lent_tpot_s(worker, asked.need, asked.costs)
        if pace_s is None or not self._is_kept(pace_s) or not self._all_paces_known:
            return False
        partners = asked.candidates.partners(worker_id)
        keeping = [item for item in partners if self._is_kept(self._paces_s[item[0]])]
        if not keeping:
            return True
        decode_id, decoder = min(keeping, key=lambda item: (self._paces_s[item[0]], item[0]))
        drag = drag_at(pace_s, worker.info.stretch or inf, self._bound_s)
        loss_s = lending_loss_s(asked.queue, drag) + prefill.wait_s
        if self._bound_s is not None:
            gain_s = self._paces_s[decode_id] - pace_s * lend_ratio(asked.queue, drag=1.0)
        else:
            there_s = joined_price_s(decoder, asked.need, asked.costs)
            here_s = joined_price_s(worker, asked.need, asked.costs)
            assert there_s is not None  # as the paces are known
            assert here_s is not None
            gain_s = there_s - here_s * lend_ratio(asked.queue, drag)
        return gain_s * asked.need.num_to_come > loss_s

    def _soonest(self, prefills: Sequence[_Prefill]) -> _Prefill | None:
        if not prefills:
            return None
        asked = self._asked
        best_s = min(prefill.price_s for prefill in prefills)
        equals = [prefill for prefill in prefills if prefill.price_s == best_s]
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
            drag=prefill.drag,
        )

    def _info(self, worker_id: WorkerId) -> Welcome:
        return self._asked.view.workers[worker_id].info

    def _pace_of(self, decode: WorkerId) -> float | None:
        if not self._all_paces_known:
            return None
        if decode in self._paces_s:
            return self._paces_s[decode]
        return tpot_s(self._asked.view.workers[decode], self._asked.need, self._asked.costs)


def reason(prefill: Welcome, decode: Welcome, *, pulls: bool) -> str:
    """The reason of a placement in words."""
    why = "least TTFT"
    if prefill.worker_id == decode.worker_id:
        why += f", {_LOCALLY[prefill.role]}"
    elif decode.role is Role.PREFILL:
        why += ", decoded by another prefill worker"
    return f"{why}, with a prefix pulled" if pulls else why


_LOCALLY = {
    Role.MIXED: "decoded where it is prefilled",
    Role.DECODE: "prefilled by a decode worker",
    Role.PREFILL: "decoded by an idle prefill worker",
}


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


def drag_of(worker: WorkerView, costs: Costs, bound_s: float | None) -> float:
    """How many times as long a prompt takes there, because of what decodes beside it.

    Infinite if these sequences leave no time for it. At mixed workers chunks have no such limit.
    """
    info = worker.info
    pace_s = _present_step_s(worker, costs)
    if not pace_s or not info.is_fluid or info.stretch is None:
        return 1.0
    return drag_at(pace_s, info.stretch, bound_s)


def drag_at(step_s: float, stretch: float, bound_s: float | None) -> float:
    """The drag of a prompt where steps without it take so long."""
    limit_s = stretch * step_s if bound_s is None else bound_s
    return limit_s / (limit_s - step_s) if limit_s > step_s else inf


def lent_tpot_s(worker: WorkerView, need: Need, costs: Costs) -> float | None:
    """Seconds per token if a fluid prefill worker decoded the request. None if it may not."""
    info = worker.info
    if info.role is not Role.PREFILL or not info.is_fluid or not has_room(worker, need):
        return None
    blocks = worker.promised_blocks + info.layout.num_blocks_for(need.end_len)
    if blocks > LEND_SHARE * info.num_blocks or not has_memory(worker, need.max_len):
        return None
    return tpot_s(worker, need, costs)


def lend_ratio(queue: Queue, drag: float) -> float:
    """For how many of its steps a token counts at a prefill worker, with what prompts come.

    These take `drag` times as long meanwhile. Some more, so that sequences do not go to and fro.
    """
    idle = 1.0 - queue.busy
    if idle <= 0:
        return inf
    slowed = queue.busy * (drag - 1.0) / idle**2
    return LEND_RATIO / idle * (1.0 + PROMPT_WEIGHT * slowed)


def lending_loss_s(queue: Queue, drag: float) -> float:
    """What is lost if a sequence decodes where prompts come, which then take `drag` times as long.

    It waits for those in the queue, and each of these waits for those before it.
    """
    return queue.seconds * (1.0 + (drag - 1.0) * (queue.waiting + 1.0) / 2.0)


def weight_of(worker: WorkerView, costs: Costs, bound_s: float | None) -> float:
    """The drag, and without a bound on their pace the sequences that wait for the prompt."""
    delays = worker.info.is_fluid and bound_s is None
    return drag_of(worker, costs, bound_s) + (worker.num_decoding if delays else 0)


def _present_step_s(worker: WorkerView, costs: Costs) -> float | None:
    """Seconds of a step of what decodes there now; 0 if nothing does."""
    num_seqs = worker.num_decoding
    return costs.step_s(worker, num_seqs, worker.decoding_context_tokens) if num_seqs else 0.0


def tpot_s(worker: WorkerView, need: Need, costs: Costs) -> float | None:
    """Seconds per token at a decode worker once the request has joined."""
    context_tokens = worker.mean_context_tokens + need.mean_context_tokens
    return costs.step_s(worker, worker.num_decodes + 1, context_tokens)


def joined_price_s(worker: WorkerView, need: Need, costs: Costs) -> float | None:
    """The same, with what this costs the sequences there."""
    own_tokens = need.mean_context_tokens
    context_tokens = worker.mean_context_tokens + own_tokens
    return token_price_s(worker, costs, worker.num_decodes + 1, context_tokens, own_tokens)


def token_price_s(
    worker: WorkerView, costs: Costs, num_seqs: int, context_tokens: int, own_tokens: int
) -> float | None:
    """Seconds per token of one of the sequences there, with what it adds to the step of each other.

    `context_tokens` are those of all of them; `own_tokens` are its own.
    """
    step_s = costs.step_s(worker, num_seqs, context_tokens)
    without_s = costs.step_s(worker, num_seqs - 1, max(context_tokens - own_tokens, 0))
    if step_s is None or without_s is None:
        return None
    return step_s + (num_seqs - 1) * (step_s - without_s)
