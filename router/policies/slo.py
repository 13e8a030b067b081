"""The placement with the least predicted time to first token that keeps the time per token.

For each prefill worker that has little work left:

    TTFT = its wait + min(prefill(n, held here), pull(best - held here) + prefill(n, best held))

So a prefix is pulled where that is quicker than computing it, which copies hot prefixes to the
workers that use them. The longest prefixes in memory, on disk and as objects are compared: see
`pulling`. A mixed worker counts as a prefill worker. It is a last resort if it could not keep the
bound on the time per output token (TPOT), or if its running sequences would wait too long.

The decode worker is the one with the least TPOT after joining, D + E (b + 1) + F kv. Here b is its
number of sequences, and kv is the context of all of them, each in the middle of its predicted
growth. If no worker keeps the bound the request waits, unless even an empty worker would not keep
it.

Fluid workers take requests of the other pool (`Welcome.stretch`). If sequences decode on the
worker, a prompt is computed in chunks that keep their TPOT (`engine.worker.pace`). So the prompt
takes longer:

    limit = the bound on TPOT, or else `stretch` times their present step
    slowdown  = limit / (limit - their present step); 1 if nothing decodes there
    TTFT  = its wait + slowdown · min(...)

Without a TPOT bound, each of these sequences waits for the whole prompt. So workers are compared by
wait + (slowdown + sequences) · min(...). With a bound, the sequences keep their TPOT.

A decode worker prefills locally if its TTFT is the least of all workers, and if its own queue is
short. If all prefill workers are busy, local prefill is compared with waiting for a prefill worker.
Local prefill also lets each other request in the queue start sooner, by min(...) divided by the
number of workers that prefill. This gain is added.

A prefill worker goes on to decode an answer if the answer's gain is larger than the loss of the
prompts. Let n be the number of other prompts in the queue and S the seconds that they take, both
divided by the number of prefill workers. Let `busy` be the share of recent time that a prefill
worker spent on prompts:

    gain = (token at the best decode worker - token here · LEND_RATIO / (1 - busy)) · tokens to come
    loss = its wait here + S · (1 + (slowdown - 1) · (n + 1) / 2)

A token's price is the step time after joining. Without a TPOT bound, the price also includes the
slowdown of the other sequences: the time that this sequence adds to the step of each. On a prefill
worker the price also includes the time taken from prompts to come. The prompts behind them wait
too, so a second of a prompt has a larger weight:

    token      = step after + sequences · (step after - step before)
    token here = the same · (1 + PROMPT_WEIGHT · busy · (slowdown - 1) / (1 - busy)²)

If no decode worker has room and keeps the bound, prefill workers decode too. The worker that loses
least time for prompts is chosen, and among equals the fullest:

    delay = (step after - step before, 0 if nothing decodes there) · busy · tokens to come

The first sequence adds the D of each step, further sequences add little. So only few prefill
workers decode, perhaps not the one that computed the prompt. The others compute prompts at full
speed. A prompt waits for one of these others if that is quicker:

    its wait there + min(...)  <  its price here - the time saved for the prompts behind it

A prefill worker uses at most `LEND_SHARE` of its memory for decoding. When prompts wait, it may
give its sequences back, or hand them to a prefill worker that decodes more
(`router.machine.moves.free`).

If a decode worker that has room has KV of the request from an earlier attempt, no other decode
worker is considered. Two workers are not combined if KV lately did not arrive between them, unless
there are no others. If this holds for a prefix's source and the prefill worker, the prefix is
computed.

`router.native.fleet` implements all of this in C++. This file has the prices that other rules
share, and the placement before the first measurement, which is the placement of `least-loaded`.

Sources: Algorithm 1 of Mooncake, Qin et al., FAST 2025; both bounds at once, DistServe, Zhong et
al., OSDI 2024.
"""

from math import inf
from typing import ClassVar

from engine.messages import Role
from router.cluster.estimates import Estimates
from router.cluster.view import WorkerView
from router.policies.base import Asked, Busy, Decision, Need, Queue
from router.policies.candidates import has_memory, has_room
from router.policies.simple import shortest_backlog

LEND_RATIO = 1.1
LEND_SHARE = 0.75  # maximum share of a prefill worker's KV memory used for decoding
PROMPT_WEIGHT = 8.0  # weight of a second taken from prompts, relative to a second of decoding


class Slo:
    """Minimises the predicted TTFT, subject to a bound on the predicted TPOT."""

    name: ClassVar[str] = "slo"
    binds_late: ClassVar[bool] = True
    pulls: ClassVar[bool] = True
    is_fluid: ClassVar[bool] = True

    def choose(self, asked: Asked) -> Decision | Busy:
        """Returns the placement of `least-loaded`, while costs are unknown to `Fleet`."""
        found = asked.candidates
        if not found.decoders:
            return Busy()
        if not found.prefillers:
            return found.busy
        return shortest_backlog(asked, self.name, "nothing was measured yet")


def bound_s(asked: Asked) -> float | None:
    """Returns the TPOT bound; None without a bound, or if even an empty worker would miss it."""
    bound_s = asked.need.tpot_bound_s
    if bound_s is None:
        return None
    end_len = asked.need.end_len
    decoders = (w for w in asked.view.workers.values() if w.info.role.decodes)
    able = (worker for worker in decoders if has_memory(worker, end_len))
    alone = (asked.costs.step_s(worker, 1, end_len) for worker in able)
    return bound_s if any(step_s is None or step_s <= bound_s for step_s in alone) else None


def slowdown_of(worker: WorkerView, costs: Estimates, bound_s: float | None) -> float:
    """Returns the factor by which decoding on the worker lengthens a prompt.

    The factor is infinite if the sequences there leave no time for the prompt. Mixed workers do not
    limit chunks.
    """
    info, num_seqs = worker.info, worker.num_decoding  # the sequences that decode there now
    if not num_seqs or not info.is_fluid or info.stretch is None:
        return 1.0
    pace_s = costs.step_s(worker, num_seqs, worker.decoding_context_tokens)
    if not pace_s:
        return 1.0
    return slowdown_at(pace_s, info.stretch, bound_s)


def slowdown_at(step_s: float, stretch: float, bound_s: float | None) -> float:
    """Returns the slowdown of a prompt on a worker whose decode step alone takes `step_s`."""
    limit_s = stretch * step_s if bound_s is None else bound_s
    return limit_s / (limit_s - step_s) if limit_s > step_s else inf


def lent_tpot_s(worker: WorkerView, need: Need, costs: Estimates) -> float | None:
    """Returns the seconds per token if a prefill worker decoded the request; None if it may not."""
    info = worker.info
    if info.role is not Role.PREFILL or not info.is_fluid or not has_room(worker, need):
        return None
    blocks = worker.promised_blocks + info.layout.num_blocks_for(need.end_len)
    if blocks > LEND_SHARE * info.num_blocks or not has_memory(worker, need.max_len):
        return None
    return tpot_s(worker, need, costs)


def lend_ratio(queue: Queue, slowdown: float) -> float:
    """Returns the factor on a step's price at a prefill worker, given the expected prompts.

    Prompts take `slowdown` times as long beside decoding. LEND_RATIO adds a margin, so that
    sequences do not move to and fro.
    """
    idle = 1.0 - queue.busy
    if idle <= 0:
        return inf
    slowed = queue.busy * (slowdown - 1.0) / idle**2
    return LEND_RATIO / idle * (1.0 + PROMPT_WEIGHT * slowed)


def lending_loss_s(queue: Queue, slowdown: float) -> float:
    """Returns the seconds lost by decoding where prompts wait.

    These prompts take `slowdown` times as long beside decoding. The sequence waits for the queued
    prompts, and each prompt waits for those before it.
    """
    return queue.seconds * (1.0 + (slowdown - 1.0) * (queue.waiting + 1.0) / 2.0)


def tpot_s(worker: WorkerView, need: Need, costs: Estimates) -> float | None:
    """Returns the predicted seconds per token at a decode worker after the request has joined."""
    context_tokens = worker.mean_context_tokens + need.mean_context_tokens
    return costs.step_s(worker, worker.num_decodes + 1, context_tokens)


def joined_price_s(worker: WorkerView, need: Need, costs: Estimates) -> float | None:
    """Returns the price of a token there: `tpot_s`, plus the slowdown of the other sequences."""
    own_tokens = need.mean_context_tokens
    context_tokens = worker.mean_context_tokens + own_tokens
    return token_price_s(worker, costs, worker.num_decodes + 1, context_tokens, own_tokens)


def token_price_s(
    worker: WorkerView, costs: Estimates, num_seqs: int, context_tokens: int, own_tokens: int
) -> float | None:
    """Returns a token's price: the step time, plus the time added to the steps of others.

    `context_tokens` counts all sequences of the worker, `own_tokens` only this sequence.
    """
    step_s = costs.step_s(worker, num_seqs, context_tokens)
    without_s = costs.step_s(worker, num_seqs - 1, max(context_tokens - own_tokens, 0))
    if step_s is None or without_s is None:
        return None
    return step_s + (num_seqs - 1) * (step_s - without_s)
