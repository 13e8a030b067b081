"""Steps of decoding as one call: a decoder's passes and the tokens chosen from their logits."""

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch

from engine.batch import Row
from engine.clock import Clock
from engine.model.changes import Choice
from engine.model.native import library as native
from engine.model.native.decoder import Decoder, address_of
from engine.model.native.sampling import draw_of


class Chosen(NamedTuple):
    """What came of a verification."""

    token_ids: list[int]  # row by row: the choice in the place of each proposed token, and behind
    logits: torch.Tensor  # [choices, then scored tokens; vocab]
    forward_s: float
    prepare_s: float


def draft(
    decoder: Decoder, rows: Sequence[Row], choices: Sequence[Choice], counts: Sequence[int]
) -> list[list[int]]:
    """Computes `rows`; the first ones propose tokens, as many rows as there are `choices`.

    These say how each row's first token is chosen; `counts`, none greater than the one before, how
    many it proposes: what is returned. Raises IndexError where an id that a choice names is not in
    the vocabulary.
    """
    num_rows, longest = len(choices), counts[0]
    numbers, token_ids = array("i", counts), array("i", bytes(4 * num_rows * longest))
    kept: list[object] = []
    proposals = native.Proposals(
        counts=address_of(numbers),
        draws=_draws(choices, decoder.vocab_size, kept),
        token_ids=address_of(token_ids),
        num_rows=num_rows,
    )
    logits = torch.empty(num_rows, decoder.vocab_size)
    decoder.draft(decoder.pack(rows, ahead=counts), logits, proposals)
    starts = range(0, num_rows * longest, longest)
    return [
        token_ids[start : start + count].tolist()
        for start, count in zip(starts, counts, strict=True)
    ]


def verify(
    decoder: Decoder,
    rows: Sequence[Row],
    choices: Sequence[Choice | None],
    proposed: Sequence[Sequence[int]],
    clock: Clock,
) -> Chosen:
    """Computes each row and what is proposed behind it, and chooses in the place of all that.

    A row's choice says how the token behind its own is chosen; it has None if nothing is chosen,
    nor proposed. Raises IndexError where an id that a choice names is not in the vocabulary.
    """
    begin_s = clock.now_s()
    lens = [len(token_ids) for token_ids in proposed]
    pairs = zip(choices, lens, strict=True)
    counts = array("i", [0 if choice is None else 1 + length for choice, length in pairs])
    scored = array("i", [len(row.scored) for row in rows])
    behind = array("i", chain.from_iterable(proposed))
    num_choices = sum(counts)
    token_ids = array("q", bytes(8 * num_choices))
    logits = torch.empty(num_choices + sum(scored), decoder.vocab_size)
    kept: list[object] = []
    struct = native.Choices(
        counts=address_of(counts),
        scored=address_of(scored),
        draws=_draws([c for c in choices if c is not None], decoder.vocab_size, kept),
        proposed=address_of(behind),
        token_ids=address_of(token_ids),
    )
    packed = decoder.pack(rows, ahead=lens)
    prepared_s = clock.now_s()
    decoder.verify(packed, logits, struct)
    return Chosen(token_ids.tolist(), logits, struct.forward_s, prepared_s - begin_s)


def _draws(choices: Sequence[Choice], vocab_size: int, kept: list[object]) -> object:
    """The choices as the kernels see them; `kept` keeps alive what they have the addresses of."""
    return (native.Draw * len(choices))(*[draw_of(choice, vocab_size, kept) for choice in choices])
