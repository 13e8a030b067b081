"""The tokens with which a model is tried when it is loaded, and after each change of the model.

Every row is a short sequence of its own. Row 0 begins at position 0 and is cut into two chunks if
KV is paged. The other rows have the same tokens but begin at another position, their *origin*.
Origins are around every length that the config names, around powers of four, and at the end of the
context. Possible faults, and the rows that reveal them:

    absolute positions       the far rows: embeddings, and queries scaled by their position, have
                             the values of a long context, though a row attends to itself alone
    state besides K and V    the cut of row 0
    the length of a batch    the cut, too: its first chunk runs alone, the second beside far rows
    distances, as windows    no row: `hook` compares the arguments of a layer's attention with its
                             mask, and the mask with the tokens that PAGED hides

So a context of 131,072 tokens is tried with about sixty tokens, in as many passes as a short
context. A fault that begins after one row and ends before the next is not noticed.

**Company.** `keeps_bits` measures, when a model is loaded, if a sequence gets the same bits alone,
in any batch and in any chunking. The kernels, and the functions that `native.invariant` replaces,
guarantee this by construction. A model's own code may use other functions of torch. Only a trial
can find out how they behave.

This trial is one short sequence, computed several times: whole and alone, in chunks, and after and
before other rows. The number of other rows varies enough that the sequence's elements move between
vector loops and remainders, and its rows move within a matrix product.

**Use.** A trial also records which modules run in a pass, and which weights are read by other
modules. Most code calls a module, which then uses its own weights. Some code reads the weights of
another module (`F.linear(x, self.classifier.weight)`, experts that slice their child's matrices). A
module whose weights are read in this way cannot be replaced by a module without weights. It is also
not enough to widen its weights while it runs. Some parts of a model never run on text.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from transformers import PreTrainedConfig, PreTrainedModel

from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import SeqId
from engine.model.attention.base import build_batch
from engine.model.attention.hook import ForwardContext, forward
from engine.model.attention.kvcache import KVCache, allocate_buffer
from engine.worker.batch import Row
from engine.worker.blocks import BlockId

TOKENS = (5, 3, 8, 2, 9)  # tokens of every row
CUT = 3  # number of tokens before the cut of row 0, which is inside a block
BLOCK_SIZE = 2
BLOCKS_PER_ROW = 3
NUM_KEPT = 2  # last tokens of each row whose logits are compared; they depend on all tokens before
LENGTH_KEY = re.compile(r"position|length|window|chunk|seq|context")
MAX_NAMED = 24  # most lengths of the config that are tried
FIRST_POWER, STEP = 64, 4

# (rows, origin of each row, indices of tokens to keep) → logits [len(keep), vocab]
Compute = Callable[[Sequence[Row], Sequence[int], Sequence[int]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Probe:
    """The origins of the rows, the logits of the model's own code, and the tolerance."""

    origins: tuple[int, ...]
    expected: torch.Tensor  # [num_rows, NUM_KEPT, vocab] fp32
    tolerance: float  # largest error, relative to the spread of the logits
    kv_format: KVFormat  # a format that is exact for the dtype in which the model computes
    has_logits: bool = True  # false for ranks that compute earlier layers only

    def error(self, found: torch.Tensor) -> float:
        """Returns the error of `found` against the expected logits, in spreads of the logits.

        Zero for a rank without logits, which cannot compare anything.
        """
        return error(found, self.expected) if self.has_logits else 0.0


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the error: the largest difference in row 0, or the greatest root mean square of
    another row if that is larger. Returns NaN if a logit is no number.
    """
    difference = found.to(expected.device) - expected
    near, far = difference[0].abs().max(), difference[1:].square().mean((1, 2)).sqrt()
    return float(torch.cat([near[None], far]).max() / expected.std())


def origins(config: PreTrainedConfig, context_len: int) -> tuple[int, ...]:
    """Returns the positions at which rows begin: 0, positions just before each length to try, and
    the end of the context.
    """
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
    """Yields all numbers above 1 under keys that name a length, at any depth."""
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
    # A tensor of indices, because some models treat a plain number differently.
    kept = torch.arange(len(TOKENS), device=device)[-NUM_KEPT:]
    output = model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=kept)
    return output.logits[:, -NUM_KEPT:].float()


def paged_logits(compute: Compute, origins: Sequence[int]) -> torch.Tensor:
    """Computes the logits of the same tokens with `compute`, over the cache of `probe_cache`."""
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
    """Returns a function that computes logits with the model's own code over paged attention."""

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
    """Returns a context in which the model has a small cache with room for all rows."""
    layout = KVLayout(block_size=BLOCK_SIZE, kv_format=kv_format, sections=(section,))
    context.cache = KVCache(layout, allocate_buffer(layout, BLOCKS_PER_ROW * num_rows, device))
    try:
        yield context.cache
    finally:
        context.cache = context.batch = None


COMPANY_TOKENS = (5, 3, 8, 2, 9, 4, 7, 6, 1, 8, 3)
OTHERS = tuple(COMPANY_TOKENS[:n] for n in (1, 4, 7, 10, 3, 6, 9, 2))  # tokens of the other rows
# For each trial: chunks of the sequence, the number of other rows before each chunk, and the number
# of all other rows.
TRIALS = (((1, 4, 6), 0, 0), ((11,), 5, len(OTHERS)), ((6, 5), 2, 3))

# (rows, indices of tokens to keep) → logits [len(keep), vocab]
ComputeFlat = Callable[[Sequence[Row], Sequence[int]], torch.Tensor]


def num_blocks(block_size: int) -> int:
    """Returns the number of KV blocks that the trial of `keeps_bits` needs."""
    return sum(-(-len(tokens) // block_size) for tokens in (COMPANY_TOKENS, *OTHERS))


def keeps_bits(compute: ComputeFlat, block_size: int) -> bool:
    """True if all trials give the same bits as the sequence alone."""
    mine, *theirs = _tables(block_size)
    others = [
        Row(SeqId(f"other-{i}"), tokens, 0, table, None)
        for i, (tokens, table) in enumerate(zip(OTHERS, theirs, strict=True))
    ]
    alone = _logits(compute, mine, (len(COMPANY_TOKENS),), [], [])
    found = [  # every trial runs: the ranks of a worker compute them together
        _logits(compute, mine, chunks, others[:first], others[first:end])
        for chunks, first, end in TRIALS
    ]
    return all(torch.equal(alone, logits) for logits in found)


def _logits(
    compute: ComputeFlat,
    table: list[BlockId],
    chunks: Sequence[int],
    before: list[Row],
    after: list[Row],
) -> torch.Tensor:
    """Returns the logits of all tokens of the sequence."""
    first = sum(len(row.token_ids) for row in before)
    found = []
    for start, end in pairwise(accumulate(chunks, initial=0)):
        row = Row(SeqId("tried"), COMPANY_TOKENS[start:end], start, table, None)
        found.append(compute([*before, row, *after], range(first, first + end - start)))
    return torch.cat(found)


def _tables(block_size: int) -> list[list[BlockId]]:
    """Returns the block tables: the sequence's table first, then the tables of the other rows."""
    sizes = (-(-len(tokens) // block_size) for tokens in (COMPANY_TOKENS, *OTHERS))
    return [
        [BlockId(i) for i in range(first, end)]
        for first, end in pairwise(accumulate(sizes, initial=0))
    ]


@dataclass(slots=True)
class Watched:
    """The modules that ran in a pass, and the modules whose weights other modules read."""

    ran: set[nn.Module] = field(default_factory=set)
    read: set[nn.Module] = field(default_factory=set)  # modules whose weights others read


@contextmanager
def watching(model: nn.Module, on_read: Callable[[nn.Module], None]) -> Iterator[Watched]:
    """Returns a context that records which modules run and which weights are read. Calls `on_read`
    once for each module whose weights another module is about to read.
    """
    seen = Watched()
    running: list[nn.Module] = []
    members = set(model.modules())
    getattribute = nn.Module.__getattr__

    def noticed(module: nn.Module, name: str) -> object:
        value = getattribute(module, name)
        is_read = isinstance(value, nn.Parameter) and running and module not in running
        if is_read and module in members and module not in seen.read:
            seen.read.add(module)
            on_read(module)
        return value

    def before(module: nn.Module, _args: object) -> None:
        seen.ran.add(module)
        running.append(module)

    def after(_module: nn.Module, _args: object, _output: object) -> None:
        running.pop()

    handles = (
        register_module_forward_pre_hook(before),
        register_module_forward_hook(after, always_call=True),
    )
    nn.Module.__getattr__ = noticed
    try:
        yield seen
    finally:
        nn.Module.__getattr__ = getattribute
        for handle in handles:
            handle.remove()


def names_like(model: nn.Module, modules: set[nn.Module]) -> frozenset[str]:
    """Returns the names of `modules`, and all names that differ from them only in numbers.

    A pass of a few tokens reads the experts of these tokens only. In service, other experts are
    read in the same way.
    """
    named = dict(model.named_modules(remove_duplicate=False))
    alike = {_numberless(name) for name, module in named.items() if module in modules}
    return frozenset(name for name in named if _numberless(name) in alike)


def _numberless(name: str) -> str:
    return re.sub(r"\d+", "0", name)
