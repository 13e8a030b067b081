"""Chooses tokens from logits: Gumbel-max with noise keyed by position.

    token = argmax(mask(logits / T) + g(seed, position, token_id))      T = 0: argmax(mask(logits))

This draws from softmax(mask(logits / T)). The noise `g` comes from a counter-based generator, so it
needs no state. The same logits, `TokenChoice` and position give the same token on any worker, in
any batch, after any failure.

If a choice requires it, `changes` first changes the logits: penalties, biases, and masks of banned
ids and of a grammar. If no id is left, or all logits are minus infinity, the token is 0. A caller
that bans all ids must check for this case.

**Bounds** of the distribution at temperature T, in this order:

    top_k    ids whose logit is below the k-th largest are masked
    top_p    of what is left, renormalised: the smallest set of largest probabilities that sums to
             at least top_p stays
    min_p    ids less than min_p times as probable as the best are masked

Each bound is a lower bound for the logit. So if several ids with equal logits are at the bound, all
of them stay. (But for the sums of `top_p`, exactly k ids are counted after `top_k`, even with equal
logits.) The best id is never below a bound. Of equal scores the lowest id wins.

**Noise.** Word `token_id % 4` of Philox4x32-10 with counter (token_id // 4, position, 0, 0) and key
(low, high 32 bits of the seed) is a number w. u = (w + 1/2) / 2^32 is uniform in (0, 1), and g =
-log(-log(u)) in fp64.

`reference_sample` does the same in plain Python, for comparison; `native.sampling` does it in C++,
for CPUs.

Sources: Philox, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; Gumbel-max,
Maddison et al., "A* sampling", NeurIPS 2014.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import torch

from engine.messages import Logprobs, Sampling
from engine.model.sampling.changes import TokenChoice, changed, reference_changed

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
MASK_32 = 0xFFFFFFFF

CPU_TILE = 2**14  # counters per tile: memory of one Philox round then fits a core's cache
GPU_TILE = 2**22
LOGPROBS_TILE = 2**22  # logits that are turned into log-probabilities at once


def sample(logits: torch.Tensor, choices: Sequence[TokenChoice]) -> torch.Tensor:
    """Returns a token for each row of `logits` [num_rows, vocab], as a tensor [num_rows].

    Raises IndexError if a choice names an id that is not in the vocabulary.
    """
    logits = changed(logits, choices)
    noisy = [row for row, choice in enumerate(choices) if choice.sampling.temperature > 0]
    if not noisy:
        return logits.argmax(dim=-1)
    if len(noisy) == len(choices):
        return _draw(logits, choices)
    index = torch.tensor(noisy, device=logits.device)
    drawn = _draw(logits[index], [choices[row] for row in noisy])
    return logits.argmax(dim=-1).index_copy_(0, index, drawn)


@torch.inference_mode()
def logprobs_of(
    logits: torch.Tensor,  # [num_rows, vocab]
    token_ids: Sequence[int],
    num_tops: Sequence[int],
) -> list[Logprobs]:
    """Returns the log-probability and rank of each row's token, and the `num_tops` likeliest
    tokens.

    These are log-probabilities of the model's own distribution: log_softmax in fp32 of the
    unchanged logits, before changes, temperature and bounds. Tokens with equal logits have the same
    rank; among the likeliest tokens, the lower id comes first. A row gets the same bits in any
    batch. The memory needed is for `LOGPROBS_TILE` logits, for any number of rows.
    """
    num_rows, vocab = logits.shape
    step = max(1, LOGPROBS_TILE // vocab)
    found: list[Logprobs] = []
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        found += _logprobs(logits[rows].float(), token_ids[rows], num_tops[rows])
    return found


def _logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_tops: Sequence[int]
) -> list[Logprobs]:
    index = torch.tensor(token_ids, device=logits.device)[:, None]
    logprobs = logits.log_softmax(dim=-1)
    ranks = 1 + (logits > logits.gather(1, index)).sum(dim=-1)
    chosen = logprobs.gather(1, index).flatten().tolist()
    most = min(max(num_tops), logits.shape[1])
    if most == 0:
        return [Logprobs(*values) for values in zip(chosen, ranks.tolist(), strict=True)]
    top_ids = _best_ids(logits, most)
    return [
        Logprobs(logprob, rank, tuple(ids[:num_top]), tuple(values[:num_top]))
        for logprob, rank, ids, values, num_top in zip(
            chosen,
            ranks.tolist(),
            top_ids.tolist(),
            logprobs.gather(1, top_ids).tolist(),
            num_tops,
            strict=True,
        )
    ]


def _best_ids(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Returns ids [num_rows, k] of the highest of `logits` [num_rows, vocab] fp32, best first.

    Of equal logits the lowest id comes first, which `topk` alone does not guarantee.
    """
    # One id more than k, to detect a tie at the end.
    values, ids = logits.topk(min(k + 1, logits.shape[1]))
    ids = ids[:, :k]
    tied = (values[:, 1:] == values[:, :-1]).any(dim=1).nonzero().flatten()
    if len(tied):
        ids[tied] = _best_ids_of_tied(logits[tied], k)
    return ids


def _best_ids_of_tied(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Returns the same as `_best_ids`, by sorting distinct integers: the rank of the float is in
    the high bits, the id in the low bits.
    """
    bits = (logits + 0.0).view(torch.int32).long()  # turns -0.0 into 0.0
    order = torch.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))
    ids = torch.arange(logits.shape[1], device=logits.device)
    return MASK_32 - ((order << 32) + (MASK_32 - ids)).topk(k).values.bitwise_and_(MASK_32)


def philox(counter: Sequence[torch.Tensor], key: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the four words of Philox4x32-10. Words are 32 bits in int64; shapes broadcast.

    A product of two words may overflow int64. It wraps, so its 64 bits are correct.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    rounds = torch.arange(PHILOX_ROUNDS, device=c0.device)
    weyl = [
        ((k[..., None] + rounds * w) & MASK_32).unbind(-1)
        for k, w in zip(key, PHILOX_WEYL, strict=True)
    ]
    for k0, k1 in zip(*weyl, strict=True):
        product0 = c0 * PHILOX_MULTIPLIERS[0]
        product1 = c2 * PHILOX_MULTIPLIERS[1]
        c0 = (product1 >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(MASK_32)
        c2 = (product0 >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(MASK_32)
        c1, c3 = product1, product0  # the masks above and below remove the high halves
    return [c0, c1 & MASK_32, c2, c3 & MASK_32]


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, ids: range) -> torch.Tensor:
    """Returns noise [num_rows, len(ids)] fp64, for rows with these seeds and positions [num_rows]
    int64.

    `ids` is a range of token ids that begins at a multiple of four.
    """
    device = seeds.device
    words = range(ids.start // 4, -(-ids.stop // 4))
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    counter = torch.arange(words.start, words.stop, device=device)[None]  # [1, num_counters]
    seed = seeds[:, None]
    drawn = philox(
        (counter, positions[:, None], zero, zero), (seed & MASK_32, (seed >> 32) & MASK_32)
    )
    noise = torch.stack(drawn, dim=-1).flatten(1)[:, : len(ids)].to(torch.float64)
    return noise.add_(0.5).mul_(2.0**-32).log_().neg_().log_().neg_()


def _draw(logits: torch.Tensor, choices: Sequence[TokenChoice]) -> torch.Tensor:
    """Returns the tokens of rows whose temperature is not zero."""
    device = logits.device
    samplings = [choice.sampling for choice in choices]
    best = logits.max(dim=-1, keepdim=True).values.double()
    temperature = _column([s.temperature for s in samplings], device)
    scores = (logits.double() - best).div_(temperature)  # [num_rows, vocab]; the best is 0
    bounds = _bounds(logits, best, temperature, samplings)
    if bounds is not None:
        scores.masked_fill_(scores < bounds, -torch.inf)
    seeds = torch.tensor([_signed_64(s.seed) for s in samplings], device=device)
    positions = torch.tensor([choice.position for choice in choices], device=device)
    _add_noise(scores, seeds, positions)
    return scores.argmax(dim=-1)


def _add_noise(scores: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> None:
    num_rows, vocab = scores.shape
    tile = GPU_TILE if scores.is_cuda else CPU_TILE
    step = 4 * max(1, tile // num_rows)
    for start in range(0, vocab, step):
        ids = range(start, min(start + step, vocab))
        scores[:, ids.start : ids.stop] += gumbel_noise(seeds, positions, ids)


def _bounds(
    logits: torch.Tensor,
    best: torch.Tensor,
    temperature: torch.Tensor,
    samplings: Sequence[Sampling],
) -> torch.Tensor | None:
    """Returns the lowest score [num_rows, 1] that all bounds allow; None if no row has a bound."""
    vocab = logits.shape[1]
    # Rows with top_k need no full sort. They form a group, of which only the best few scores are
    # read.
    few = [row for row, s in enumerate(samplings) if 0 < s.top_k < vocab]
    many = [row for row, s in enumerate(samplings) if s.top_p < 1 and not 0 < s.top_k < vocab]
    if not few and not many and not any(s.min_p > 0 for s in samplings):
        return None
    bounds = _column(
        [math.log(s.min_p) if s.min_p > 0 else -math.inf for s in samplings], best.device
    )
    for group in filter(None, (few, many)):
        rows = torch.tensor(group, device=logits.device)
        ks = [samplings[row].top_k if group is few else vocab for row in group]
        ps = [samplings[row].top_p for row in group]
        sorted_logits = logits[rows].topk(max(ks)).values.double()
        sorted_scores = (sorted_logits - best[rows]).div_(temperature[rows])
        kept = _num_kept(sorted_scores, ks, ps)
        lowest = sorted_scores.gather(1, kept - 1)
        bounds[rows] = torch.maximum(bounds[rows], lowest)
    return bounds


def _num_kept(scores: torch.Tensor, ks: list[int], ps: list[float]) -> torch.Tensor:
    """Returns the number of `scores` that top_k and top_p allow: [num_rows, 1].

    `scores` are [num_rows, max(ks)], best first.

    Sums run from the best score down, so the columns after a row's own k do not affect its sum.
    """
    k = torch.tensor(ks, device=scores.device)[:, None]
    mass = scores.exp().cumsum(dim=1)  # [num_rows, max(ks)]
    enough = mass.gather(1, k - 1) * _column(ps, scores.device)
    by_top_p = 1 + (mass < enough).sum(dim=1, keepdim=True)
    return torch.minimum(by_top_p, k)


def _column(values: list[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]


def _signed_64(seed: int) -> int:
    """Returns the low 64 bits of `seed` as int64."""
    seed &= 2**64 - 1
    return seed - 2**64 if seed >= 2**63 else seed


def reference_philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Computes `philox` for one counter, in the form that its authors published."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        high0, low0 = divmod(c0 * PHILOX_MULTIPLIERS[0], 2**32)
        high1, low1 = divmod(c2 * PHILOX_MULTIPLIERS[1], 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + PHILOX_WEYL[0]) % 2**32, (k1 + PHILOX_WEYL[1]) % 2**32
    return [c0, c1, c2, c3]


def reference_sample(logits: Sequence[float], choice: TokenChoice) -> int:
    """Defines `sample` for one row, in plain Python."""
    sampling = choice.sampling
    if not choice.is_plain:
        logits = reference_changed(logits, choice)
    if sampling.temperature == 0 or math.isinf(max(logits)):
        return logits.index(max(logits))
    scores = [(value - max(logits)) / sampling.temperature for value in logits]
    survivors = sorted(scores, reverse=True)[: sampling.top_k or None]
    mass = list(accumulate(math.exp(score) for score in survivors))
    lowest = survivors[bisect_left(mass, sampling.top_p * mass[-1])]
    if sampling.min_p > 0:
        lowest = max(lowest, math.log(sampling.min_p))
    key = (sampling.seed & MASK_32, (sampling.seed >> 32) & MASK_32)
    best = (-math.inf, 0)
    for token_id, score in enumerate(scores):
        if score >= lowest:
            word = reference_philox((token_id // 4, choice.position, 0, 0), key)[token_id % 4]
            noise = -math.log(-math.log((word + 0.5) * 2.0**-32))
            best = max(best, (score + noise, -token_id))
    return -best[1]
