"""The tokens that try a model when it is loaded, and after each change made to it.

Every row is a short sequence of its own. Row 0 begins at position 0 and is cut into two chunks if
KV is paged. The others hold the same tokens from an *origin* on: around every length that the
config names, around powers of four, and at the end of the context. Possible faults, and the rows
that show them:

    absolute positions       the far rows: embeddings, and queries scaled by their position, are
                             as in a long context, though a row attends to itself alone
    state besides K and V    the cut of row 0
    the length of a batch    the cut, too: its first chunk runs alone, the second beside far rows
    distances, as windows    not here: what a layer tells its attention is compared with its mask,
                             and the mask with what ours hides (`hook`)

So a context of 131,072 tokens is tried with some sixty tokens, in as many passes as a short one. A
fault that begins between two rows and ends before the next is not noticed.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import SeqId
from engine.model.attention.base import build_batch
from engine.model.attention.hook import ForwardContext, forward
from engine.model.attention.kvcache import KVCache, allocate_buffer
from engine.worker.batch import Row
from engine.worker.blocks import BlockId

TOKENS = (5, 3, 8, 2, 9)  # the tokens of every row
CUT = 3  # where row 0 is cut: inside a block
BLOCK_SIZE = 2
BLOCKS_PER_ROW = 3
NUM_KEPT = 2  # logits of each row's last tokens, which depend on all before
LENGTH_KEY = re.compile(r"position|length|window|chunk|seq|context")
MAX_NAMED = 24  # most lengths of the config that are tried
FIRST_POWER, STEP = 64, 4

# (rows, the origin of each row, indices of tokens to keep) → logits [len(keep), vocab]
Compute = Callable[[Sequence[Row], Sequence[int], Sequence[int]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Probe:
    """The rows' origins, the logits of the model's own code, and the tolerance."""

    origins: tuple[int, ...]
    expected: torch.Tensor  # [num_rows, NUM_KEPT, vocab] fp32
    tolerance: float  # relative to the spread of the logits
    kv_format: KVFormat  # exact for the dtype that the model computes in
    has_logits: bool = True  # false for ranks that only compute earlier layers

    def error(self, found: torch.Tensor) -> float:
        """Returns how far `found` is from the expected logits, in spreads of the logits.

        Zero for a rank without logits, which cannot judge.
        """
        return error(found, self.expected) if self.has_logits else 0.0


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the larger of the largest difference in row 0 and the greatest root mean square of
    another row. NaN if a number is missing.
    """
    difference = found.to(expected.device) - expected
    near, far = difference[0].abs().max(), difference[1:].square().mean((1, 2)).sqrt()
    return float(torch.cat([near[None], far]).max() / expected.std())


def origins(config: PreTrainedConfig, context_len: int) -> tuple[int, ...]:
    """Returns where rows begin: at 0, so that they span each length worth a try, and at the end."""
    last = max(0, context_len - len(TOKENS))
    named = sorted({n for n in _named_lengths(config.to_dict()) if n < context_len})[-MAX_NAMED:]
    powers = []
    power = FIRST_POWER
    while power < context_len:
        powers.append(power)
        power *= STEP
    lengths = (*named, *powers)
    around = {min(last, max(0, n - len(TOKENS) // 2)) for n in lengths}
    return (0, *sorted((around | {last}) - {0}))


def _named_lengths(value: object, *, is_length: bool = False) -> Iterator[int]:
    """Returns all numbers above 1 under keys that name a length, at any depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _named_lengths(
                inner, is_length=is_length or bool(LENGTH_KEY.search(str(key)))
            )
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _named_lengths(inner, is_length=is_length)
    elif is_length and isinstance(value, (int, float)) and value > 1 and value == int(value):
        yield int(value)


def own_logits(model: PreTrainedModel, origins: Sequence[int]) -> torch.Tensor:
    """Computes logits [num_rows, NUM_KEPT, vocab] with the model's own code and attention."""
    device = model.device
    ids = torch.tensor([TOKENS] * len(origins), device=device)
    positions = torch.tensor(origins, device=device)[:, None] + torch.arange(
        len(TOKENS), device=device
    )
    # A tensor of indices, since models treat a plain number differently.
    kept = torch.arange(len(TOKENS), device=device)[-NUM_KEPT:]
    output = model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=kept)
    return output.logits[:, -NUM_KEPT:].float()


def paged_logits(compute: Compute, origins: Sequence[int]) -> torch.Tensor:
    """Computes the same logits with `compute`, over the cache of `probe_cache`."""
    compute([_row(0, 0, CUT)], [0], [CUT - 1])
    rows = [_row(0, CUT, len(TOKENS)), *(_row(i, 0, len(TOKENS)) for i in range(1, len(origins)))]
    ends = torch.tensor([len(row.token_ids) for row in rows]).cumsum(0).tolist()
    keep = [end - back for end in ends for back in range(NUM_KEPT, 0, -1)]
    return compute(rows, origins, keep).float().unflatten(0, (len(rows), NUM_KEPT))


def _row(nth: int, start: int, end: int) -> Row:
    first = BLOCKS_PER_ROW * nth
    table = [BlockId(first + i) for i in (2, 0, 1)]
    return Row(SeqId(f"probe-{nth}"), TOKENS[start:end], start, table, None)


def by_model(model: PreTrainedModel, context: ForwardContext) -> Compute:
    """Returns a function that computes with the model's own code over paged attention."""

    def compute(rows: Sequence[Row], origins: Sequence[int], keep: Sequence[int]) -> torch.Tensor:
        context.batch = build_batch(rows, context.cache)
        ids = [token for row in rows for token in row.token_ids]
        positions = [
            origin + position
            for row, origin in zip(rows, origins, strict=True)
            for position in range(row.start, row.end)
        ]
        return forward(model, ids, positions, keep)

    return compute


@contextmanager
def probe_cache(
    context: ForwardContext,
    section: KVSection,
    kv_format: KVFormat,
    *,
    num_rows: int,
    device: str = "cpu",
) -> Iterator[KVCache]:
    """Returns a context in which the model has a small cache with room for the rows."""
    layout = KVLayout(block_size=BLOCK_SIZE, kv_format=kv_format, sections=(section,))
    context.cache = KVCache(layout, allocate_buffer(layout, BLOCKS_PER_ROW * num_rows, device))
    try:
        yield context.cache
    finally:
        context.cache = context.batch = None
