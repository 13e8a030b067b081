"""Decode steps as one call: a decoder's passes and the tokens chosen from their logits."""

from array import array
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch

from engine.clock import Clock
from engine.model.native import structs as native
from engine.model.native.decoder import Decoder, address_of
from engine.model.native.sampling import draws_of
from engine.model.sampling.changes import TokenChoice
from engine.worker.batch import Row


class Drafting(NamedTuple):
    """A draft model, and the rows of a verification for which it proposes tokens first.

    `seen` are the rows that the draft computes. The first ones propose; `rows` has their indices in
    the verification. `counts` has the number of tokens that each proposes, in descending order.
    """

    decoder: Decoder
    seen: Sequence[Row]
    rows: Sequence[int]
    counts: Sequence[int]


class Chosen(NamedTuple):
    """The result of a verification."""

    token_ids: list[int]  # row by row: one at the place of each proposed token, one behind the last
    logits: torch.Tensor  # [choices, then scored tokens; vocab], until the next call
    forward_s: float
    prepare_s: float
    drafted: Sequence[list[int]] = ()  # proposals of each drafted row
    draft_s: float = 0.0


def draft(
    decoder: Decoder, rows: Sequence[Row], choices: Sequence[TokenChoice], counts: Sequence[int]
) -> list[list[int]]:
    """Computes `rows`. The first `len(choices)` rows propose tokens.

    A choice says how a row's first token is chosen. `counts`, in descending order, has the number
    of tokens that each row proposes. The proposals are returned. Raises IndexError if a choice
    names an id that is not in the vocabulary.
    """
    num_rows, longest = len(choices), counts[0]
    numbers, proposed = array("i", counts), array("i", bytes(4 * num_rows * longest))
    kept: list[object] = []
    draws = draws_of(choices, decoder.vocab_size, kept)
    proposals = native.Proposals(address_of(numbers), draws, address_of(proposed), num_rows)
    decoder.draft(decoder.pack(rows, ahead=counts), decoder.logits(num_rows), proposals)
    token_ids = proposed.tolist()
    starts = range(0, num_rows * longest, longest)
    return [token_ids[start : start + count] for start, count in zip(starts, counts, strict=True)]


def verify(
    decoder: Decoder,
    rows: Sequence[Row],
    choices: Sequence[TokenChoice | None],
    proposed: Sequence[Sequence[int]],
    clock: Clock,
    drafting: Drafting | None = None,
) -> Chosen:
    """Computes each row and its proposed tokens, and chooses at each of their places.

    A row's choice says how the token behind its own tokens is chosen; None if the row chooses no
    token and has no proposals. With `drafting`, the draft model first replaces the entries of
    `proposed` for its rows. Raises IndexError if a choice names an id that is not in the
    vocabulary.
    """
    begin_s = clock.now_s()
    lens = [len(token_ids) for token_ids in proposed]
    pairs = zip(choices, lens, strict=True)
    counts = [0 if choice is None else 1 + length for choice, length in pairs]
    scored = [len(row.scored) for row in rows]
    num_rows, num_choices = len(counts), sum(counts)
    numbers = array("i", [*counts, *scored, *chain.from_iterable(proposed)])
    nth = [address_of(numbers) + n * num_rows * numbers.itemsize for n in range(3)]
    token_ids = array("q", bytes(8 * num_choices))
    logits = decoder.logits(num_choices + sum(scored))
    kept: list[object] = []
    draws = draws_of([c for c in choices if c is not None], decoder.vocab_size, kept)
    struct = native.Choices(nth[0], nth[1], draws, nth[2], address_of(token_ids))
    packed = decoder.pack(rows, ahead=lens)
    if drafting is None:
        prepared_s = clock.now_s()
        decoder.verify(packed, logits, struct)
        return Chosen(token_ids.tolist(), logits, struct.forward_s, prepared_s - begin_s)
    which = array("i", [*drafting.rows, *drafting.counts])
    num_drafting = len(drafting.rows)
    order = native.NativeDrafting(
        rows=address_of(which),
        counts=address_of(which) + num_drafting * which.itemsize,
        logits=drafting.decoder.logits(num_drafting).data_ptr(),
        num_rows=num_drafting,
    )
    seen = drafting.decoder.pack(drafting.seen, ahead=drafting.counts)
    prepared_s = clock.now_s()
    decoder.draft_and_verify(
        packed, logits, struct, draft=drafting.decoder, seen=seen, drafting=order
    )
    ends = list(accumulate(lens, initial=2 * num_rows))
    drafted = [numbers[ends[row] : ends[row + 1]].tolist() for row in drafting.rows]
    times = struct.forward_s, prepared_s - begin_s
    return Chosen(token_ids.tolist(), logits, *times, drafted, order.seconds)
