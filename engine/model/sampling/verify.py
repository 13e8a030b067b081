"""Verification: keeps the proposed tokens that the target would have chosen itself.

The target computes a row's own tokens and the proposed tokens in one pass. It chooses a token after
the last own token and after each proposed token, under the assumption that it chose all tokens
before. The assumption is true up to the first place where the target chooses another token. This
other token is the next token of the sequence, and choices after it are ignored. Each random draw
would also have happened without proposals, and no noise is used twice, so speculation cannot change
an answer. Common noise makes it likely that proposals are kept (Daliri et al., "Coupling without
communication and drafter-invariant speculative decoding", 2024).
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import msgspec
import torch

from engine.clock import Clock
from engine.messages import Logprobs
from engine.model.memory import one_torch_thread
from engine.model.sampling.changes import TokenChoice
from engine.model.sampling.choosing import logprobs_of
from engine.model.sampling.draft import DraftedRow, Forward, Masks
from engine.worker.batch import RowResult


class Verified(NamedTuple):
    """The target's choices, and the durations of its pass in seconds."""

    chosen: list[int]  # row by row: one token for each proposed token, then one after the last
    logits: torch.Tensor  # [wanted, vocab]
    forward_s: float
    prepare_s: float
    draft_s: float = 0.0  # time of a draft model's passes in the same call


def verify_by_parts(
    forward: Forward, proposals: Sequence[DraftedRow], masks: Masks, clock: Clock
) -> Verified:
    """Runs one pass while masks are computed, then chooses tokens from the logits, row by row."""
    begin_s = clock.now_s()
    prepared = forward.prepare([p.verified() for p in proposals], wanted(proposals))
    prepared_s = clock.now_s()
    wait = masks.start(proposals)
    logits = forward.launch(prepared)
    launched_s = clock.now_s()
    wait()
    asked = choices(proposals)
    chosen = forward.sample(logits[: len(asked)], asked).tolist() if asked else []
    return Verified(chosen, logits, launched_s - prepared_s, prepared_s - begin_s)


def wanted(proposals: Sequence[DraftedRow]) -> list[int]:
    """Returns the indices, in the flat batch of `verified` rows, of the tokens whose logits are
    needed.

    First come the tokens after which a token is chosen, then the tokens whose successors are
    scored.
    """
    chosen: list[int] = []
    scored: list[int] = []
    end = 0
    for proposal in proposals:
        row = proposal.row
        begin, last = end, end + len(row.token_ids) - 1
        end = last + 1 + len(proposal.token_ids)
        if row.sampling is not None:
            chosen += range(last, end)
        if row.scored:
            scored += range(begin, begin + len(row.scored))
    return chosen + scored


def choices(proposals: Sequence[DraftedRow]) -> list[TokenChoice]:
    """Returns one choice for each token after which a token is chosen, in the order of `wanted`."""
    return [
        proposal.choice(nth)
        for proposal in proposals
        if proposal.row.sampling is not None
        for nth in range(len(proposal.token_ids) + 1)
    ]


def results(
    proposals: Sequence[DraftedRow],
    chosen: Sequence[int],
    logits: torch.Tensor | None,  # [wanted, vocab]
) -> list[RowResult]:
    """Returns the result of each row. `chosen` are the tokens of the choices.

    Logits are only needed if a row requests log-probabilities.
    """
    results: list[RowResult] = []
    begin, wants_logits = 0, False
    for proposal in proposals:
        row, proposed = proposal.row, proposal.token_ids
        wants_logits = wants_logits or bool(row.scored)
        if row.sampling is None:
            results.append(RowResult((), len(proposed)))
            continue
        wants_logits = wants_logits or row.sampling.logprobs is not None
        end = begin + 1
        for token in proposed:  # tokens are kept up to the first that differs
            if chosen[end - 1] != token:
                break
            end += 1
        results.append(RowResult(tuple(chosen[begin:end]), len(proposed)))
        begin += len(proposed) + 1
    if logits is None or not wants_logits:
        return results
    logprobs = _logprobs(proposals, results, logits)
    scored = _scored(proposals, logits[len(chosen) :])
    return [
        msgspec.structs.replace(one, logprobs=logprobs.get(i, ()), scored=scored.get(i, ()))
        for i, one in enumerate(results)
    ]


def needs_logits(proposals: Sequence[DraftedRow]) -> bool:
    """True if a row requests log-probabilities, so that its result needs logits."""
    return any(
        row.scored or (row.sampling is not None and row.sampling.logprobs is not None)
        for row in (proposal.row for proposal in proposals)
    )


def _logprobs(
    proposals: Sequence[DraftedRow], results: Sequence[RowResult], logits: torch.Tensor
) -> dict[int, tuple[Logprobs, ...]]:
    """Returns the log-probabilities of the rows that request them, by row index."""
    asking: list[int] = []
    index: list[int] = []
    begin = 0
    for i, (proposal, result) in enumerate(zip(proposals, results, strict=True)):
        tokens = result.token_ids
        if not tokens:
            continue
        if proposal.row.sampling.logprobs is not None:
            asking.append(i)
            index += range(begin, begin + len(tokens))
        begin += len(proposal.token_ids) + 1
    if not asking:
        return {}
    nums = [proposals[i].row.sampling.logprobs for i in asking]
    return _shared_out(logits[index], asking, [results[i].token_ids for i in asking], nums)


def _scored(
    proposals: Sequence[DraftedRow], logits: torch.Tensor
) -> dict[int, tuple[Logprobs, ...]]:
    """Returns the log-probabilities of scored tokens, by row index. `logits` has a row for each
    token.
    """
    asking = [i for i, proposal in enumerate(proposals) if proposal.row.scored]
    if not asking:
        return {}
    rows = [proposals[i].row for i in asking]
    return _shared_out(logits, asking, [row.scored for row in rows], [row.num_top for row in rows])


def _shared_out(
    logits: torch.Tensor,
    asking: Sequence[int],
    token_ids: Sequence[Sequence[int]],
    num_tops: Sequence[int],
) -> dict[int, tuple[Logprobs, ...]]:
    """Calls `logprobs_of` once for all tokens of some rows, and divides the result by row.
    `num_tops` has one number per row.
    """
    tops = [num for num, ids in zip(num_tops, token_ids, strict=True) for _ in ids]
    tokens = [token for ids in token_ids for token in ids]
    with one_torch_thread() if logits.is_cpu else nullcontext():
        found = iter(logprobs_of(logits, tokens, tops))
    return {i: tuple(next(found) for _ in ids) for i, ids in zip(asking, token_ids, strict=True)}
