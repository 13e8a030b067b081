"""A decoder that computes a forward pass, or a whole decode step, in one call into the kernels.

A step consists of the passes of a draft model, the pass over rows and their proposed tokens, and
the choice of tokens from the logits. `building` makes decoders from transformers models.

`NativeAttention` is paged attention in C++, for models that are not computed as a whole.
"""

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate, zip_longest
from typing import NamedTuple

import torch

from engine.clock import Clock
from engine.layout import KVLayout
from engine.model.attention.base import AttentionBatch, Scoring
from engine.model.attention.kvcache import KVCache
from engine.model.native import structs as native
from engine.model.native.linear import Team
from engine.model.native.sampling import draws_of
from engine.model.sampling.changes import TokenChoice
from engine.model.sampling.draft import DraftedRow
from engine.model.sampling.verify import Verified
from engine.native.build import FORMATS
from engine.native.library import Native
from engine.worker.batch import Row


class PackedRows(NamedTuple):
    """Rows in the form of the kernels, with the arrays to which the pointers in `struct` point."""

    struct: native.Ragged
    arrays: "tuple[array[int], ...]"


class PreparedCall(NamedTuple):
    """The prepared inputs of one forward pass."""

    packed: PackedRows
    keep: "array[int]"  # int64: indices of tokens whose logits are computed


class Decoder:
    """A model whose forward pass is one call. `PackedLinear` modules use the same matrices."""

    def __init__(self, team: Team, struct: native.Model, keep: list[object]) -> None:
        self._team = team
        self._struct = struct
        self._keep = keep
        self.handle: int | None = None
        self.vocab_size = struct.head.rows
        self._logits = torch.empty(0, self.vocab_size)

    def weights(self) -> Iterator[native.Weight]:
        """Returns every matrix of the decoder. Changes of a matrix take effect at the next
        `open`.
        """
        yield self._struct.head
        for layer in self._struct.layers[: self._struct.num_layers]:
            yield from layer.qkv[: layer.num_qkv]
            yield from (layer.output, layer.gate, layer.up, layer.down)

    def open(self, cache: KVCache) -> None:
        """Uses this cache from now on."""
        self.close()
        self._cache = cache_struct(cache, self._team.library)
        self._buffer = cache.buffer
        self.block_size = cache.layout.block_size
        self.handle = self._team.library.baton_decoder_open(
            self._team.handle, ctypes.byref(self._struct), ctypes.byref(self._cache)
        )

    def close(self) -> None:
        """Drops the cache."""
        if self.handle is not None:
            self._team.library.baton_decoder_close(self.handle)
            self.handle = self._buffer = None

    def prepare(
        self, rows: Sequence[Row], keep: Sequence[int], origins: Sequence[int] = ()
    ) -> PreparedCall:
        """Returns the inputs of `launch`, for these rows. `keep` are the tokens of the flat batch
        whose logits are wanted.

        Each row's entry in `origins` is added to the positions of the row's tokens.
        """
        packed = pack(rows, self.block_size)
        if origins:
            far = array("q", origins)
            packed.struct.origins = far.buffer_info()[0]
            packed = PackedRows(packed.struct, (*packed.arrays, far))
        return PreparedCall(packed, array("q", keep))

    def launch(self, prepared: PreparedCall) -> torch.Tensor:
        """Computes logits [num_keep, vocab] fp32 from prepared inputs."""
        num_keep = len(prepared.keep)
        logits = torch.empty(num_keep, self.vocab_size)
        wanted = native.NativeWanted(prepared.keep.buffer_info()[0], logits.data_ptr(), num_keep)
        self._team.library.baton_decoder_forward(
            self.handle, ctypes.byref(prepared.packed.struct), ctypes.byref(wanted)
        )
        return logits

    def logits(self, num_rows: int) -> torch.Tensor:
        """Returns memory [num_rows, vocab] for logits. All calls return the same memory."""
        if num_rows > len(self._logits):
            self._logits = torch.empty(2 * num_rows, self.vocab_size)
        return self._logits[:num_rows]

    def run(
        self,
        call: str,
        rows: PackedRows,
        logits: torch.Tensor,
        struct: ctypes.Structure,
        *more: object,
    ) -> None:
        """Runs `draft`, `verify` or `speculate`, which fill `logits` and `struct`.

        Raises IndexError if a draw names an id that is not in the vocabulary.
        """
        run = getattr(self._team.library, f"baton_decoder_{call}")
        pointers = ctypes.byref(rows.struct), logits.data_ptr(), ctypes.byref(struct)
        if not run(self.handle, *pointers, *more):
            raise IndexError(f"a choice names ids beyond a vocabulary of {self.vocab_size}")


def pack(rows: Sequence[Row], block_size: int, ahead: Sequence[int] = ()) -> PackedRows:
    """Packs rows in the form of the kernels. Up to `ahead[i]` tokens may follow row i."""
    token_ids: list[int] = []
    lens: list[int] = []
    ends: list[int] = []
    table_lens: list[int] = []
    blocks: list[int] = []
    for row, num_ahead in zip_longest(rows, ahead, fillvalue=0):
        token_ids += row.token_ids
        num_tokens = len(row.token_ids)
        end = row.start + num_tokens
        num_blocks = -(-(end + num_ahead) // block_size)
        assert len(row.block_table) >= num_blocks
        lens.append(num_tokens)
        ends.append(end)
        table_lens.append(num_blocks)
        blocks += row.block_table[:num_blocks]
    ids, numbers = array("q", token_ids), array("i", lens + ends + table_lens + blocks)
    (first, _), num_rows = numbers.buffer_info(), len(lens)
    size = num_rows * numbers.itemsize
    struct = native.Ragged(
        *(ids.buffer_info()[0], first, first + size, first + 3 * size, first + 2 * size, num_rows)
    )
    return PackedRows(struct, (ids, numbers))


def draft(
    decoder: Decoder, rows: Sequence[Row], choices: Sequence[TokenChoice], counts: Sequence[int]
) -> list[list[int]]:
    """Computes `rows` with a draft model. The first `len(choices)` rows propose tokens, which are
    returned.

    A choice says how a row's first token is chosen. `counts`, in descending order, is the number of
    tokens that each row proposes. Raises IndexError if a choice names an id that is not in the
    vocabulary.
    """
    num_rows, longest = len(choices), counts[0]
    numbers, proposed = array("i", counts), array("i", bytes(4 * num_rows * longest))
    kept: list[object] = []
    draws = draws_of(choices, decoder.vocab_size, kept)
    proposals = native.Proposals(
        numbers.buffer_info()[0], draws, proposed.buffer_info()[0], num_rows
    )
    decoder.run(
        "draft", pack(rows, decoder.block_size, counts), decoder.logits(num_rows), proposals
    )
    token_ids = proposed.tolist()
    starts = range(0, num_rows * longest, longest)
    return [token_ids[start : start + count] for start, count in zip(starts, counts, strict=True)]


class Drafting(NamedTuple):
    """A draft model, and the rows that it computes before the target verifies its proposals.

    The rows that propose most tokens come first.
    """

    decoder: Decoder
    seen: Sequence[DraftedRow]


def verify(
    decoder: Decoder,
    proposals: Sequence[DraftedRow],
    clock: Clock,
    drafting: Drafting | None = None,
) -> Verified:
    """Computes each row and its proposed tokens, and chooses a token after each of these tokens.

    With `drafting`, the draft model first proposes tokens for its rows. The logits are valid until
    the next call. Raises IndexError if a choice names an id that is not in the vocabulary.
    """
    begin_s = clock.now_s()
    rows, choices, proposed = [], [], []
    counts, scored, lens = [], [], []
    for proposal in proposals:
        row, token_ids = proposal.row, proposal.token_ids
        if drafting is not None and row.num_to_draft and row.draft_token_ids:
            token_ids = [0] * row.num_to_draft  # placeholders; the draft model writes here
        rows.append(row)
        proposed += token_ids
        lens.append(len(token_ids))
        scored.append(len(row.scored))
        counts.append(0 if row.sampling is None else 1 + len(token_ids))
        if row.sampling is not None:
            choices.append(proposal.choice(0))
    num_choices = sum(counts)
    numbers = array("i", counts + scored + proposed)
    (first, _), size = numbers.buffer_info(), len(rows) * numbers.itemsize
    chosen = array("q", bytes(8 * num_choices))
    logits = decoder.logits(num_choices + sum(scored))
    kept: list[object] = []
    draws = draws_of(choices, decoder.vocab_size, kept)
    struct = native.Choices(
        *(first, first + size, draws, first + 2 * size, chosen.buffer_info()[0])
    )
    packed = pack(rows, decoder.block_size, lens)
    draft_s = 0.0
    if drafting is None:
        prepared_s = clock.now_s()
        decoder.run("verify", packed, logits, struct)
    else:
        more = _pack_drafting(drafting, proposals)
        prepared_s = clock.now_s()
        decoder.run("speculate", packed, logits, struct, *more.pointers)
        draft_s = more.order.seconds
        ends = list(accumulate(lens, initial=2 * len(rows)))
        for row, proposal in enumerate(proposals):
            if proposal.row.num_to_draft and proposal.row.draft_token_ids:
                proposal.token_ids = numbers[ends[row] : ends[row + 1]].tolist()
    return Verified(chosen.tolist(), logits, struct.forward_s, prepared_s - begin_s, draft_s)


class _PackedDrafting(NamedTuple):
    """The draft model's part of a call, with the memory to which its pointers point."""

    pointers: tuple[object, ...]
    order: native.NativeDrafting
    kept: tuple[object, ...]


def _pack_drafting(drafting: Drafting, proposals: Sequence[DraftedRow]) -> _PackedDrafting:
    """Packs the rows of a draft model in the form of `speculate`."""
    place_of = {id(proposal): place for place, proposal in enumerate(proposals)}
    proposing = [one for one in drafting.seen if one.row.num_to_draft > 0]
    lens = [one.row.num_to_draft for one in proposing]
    num_rows, decoder = len(lens), drafting.decoder
    which = array("i", [*(place_of[id(one)] for one in proposing), *lens])
    first, _ = which.buffer_info()
    logits = decoder.logits(num_rows)
    order = native.NativeDrafting(
        rows=first,
        counts=first + num_rows * which.itemsize,
        logits=logits.data_ptr(),
        num_rows=num_rows,
    )
    seen = pack([one.seen() for one in drafting.seen], decoder.block_size, lens)
    pointers = decoder.handle, ctypes.byref(seen.struct), ctypes.byref(order)
    return _PackedDrafting(pointers, order, (which, seen, logits))


def cache_struct(cache: KVCache, library: Native) -> native.Cache:
    """Returns the cache in the form of the kernels. Raises BuildError or OSError if no kernels
    exist for its format.
    """
    layout: KVLayout = cache.layout
    section = cache.section_index
    return native.Cache(
        blocks=cache.buffer.data_ptr(),
        block_bytes=layout.block_bytes,
        section_offset=layout.section_offset_bytes(section),
        layer_bytes=layout.layer_bytes(section),
        head_bytes=layout.head_bytes(section),
        scales_offset=layout.scales_offset_bytes(section),
        token_bytes=layout.token_bytes(section),
        block_size=layout.block_size,
        format=FORMATS[layout.kv_format],
        num_kv_heads=cache.section.num_kv_heads,
        head_dim=cache.section.head_dim,
        attend=library.attention[layout.kv_format],
    )


def batch_struct(batch: AttentionBatch) -> native.Batch:
    """Returns the batch in the form of the kernels. It is valid as long as `batch` exists."""
    return native.Batch(
        cu_seqlens_q=batch.cu_seqlens_q.data_ptr(),
        context_lens=batch.context_lens.data_ptr(),
        block_tables=batch.block_tables.data_ptr(),
        slot_mapping=batch.slot_mapping.data_ptr(),
        num_rows=len(batch.context_lens),
        num_tokens=len(batch.slot_mapping),
        max_blocks=batch.block_tables.shape[1],
    )


class NativeAttention:
    """Stores K and V, then attends; callable as an `Attend` (see `engine.model.attention.base`)."""

    def __init__(self, team: Team) -> None:
        self._team = team

    def __call__(  # noqa: PLR0913 - the seam of all implementations
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        layer: int,
        batch: AttentionBatch,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Computes attention. Queries of other dtypes are first converted to fp32."""
        inputs = [x.to(torch.float32).contiguous() for x in (query, key, value)]
        out = torch.empty_like(inputs[0])
        score = native.NativeScoring(
            scaling=scoring.scaling, softcap=scoring.softcap or 0.0, window=scoring.window or 0
        )
        self._team.library.baton_attend(
            self._team.handle,
            ctypes.byref(cache_struct(cache, self._team.library)),
            ctypes.byref(batch_struct(batch)),
            layer,
            ctypes.byref(score),
            query.shape[1],
            *(x.data_ptr() for x in inputs),
            out.data_ptr(),
        )
        return out.to(query.dtype)
