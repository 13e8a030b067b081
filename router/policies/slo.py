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

If a decode worker that has room kept some of the request's tokens, no other one is considered. Two
workers are not combined if KV lately did not arrive between them, unless there are no others. A
prefix is computed if its source and the prefill worker are two of these.

`router.native.fleet` decides all of this in C++. Here are the prices that other rules share, and
the placement before the first measurement, which is that of `least-loaded`.

Sources: Algorithm 1 of Mooncake, Qin et al., FAST 2025; both bounds at once, DistServe, Zhong et
al., OSDI 2024.
"""

from math import inf
from typing import ClassVar

from engine.messages import Role, Welcome
from router.cluster.view import WorkerView
from router.policies.base import Asked, Busy, Costs, Decision, Need, Queue
from router.policies.candidates import has_memory, has_room
from router.policies.least_loaded import shortest_backlog

LEND_RATIO = 1.1
LEND_SHARE = 0.75  # of a prefill worker's KV memory
PROMPT_WEIGHT = 8.0  # seconds of decoding for which a second more until a first token counts


class Slo:
    """Minimises predicted TTFT subject to a bound on predicted TPOT."""

    name: ClassVar[str] = "slo"
    binds_late: ClassVar[bool] = True
    pulls: ClassVar[bool] = True
    is_fluid: ClassVar[bool] = True

    def choose(self, asked: Asked) -> Decision | Busy:
        """The placement while `Fleet` cannot decide, because no costs are known."""
        found = asked.candidates
        if not found.decoders:
            return Busy()
        if not found.prefillers:
            return found.busy
        return shortest_backlog(asked, self.name, "nothing was measured yet")


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
