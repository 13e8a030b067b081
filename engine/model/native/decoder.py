"""Runs a transformers model with one call into the kernels per forward pass.

This module knows no model by name. `build` looks for the parts that decoders of Llama's shape have.
It measures what it can instead of reading it: what a norm multiplies by, how an embedding is
scaled, which function activates, how each layer scores. It gives up if a part is missing. Then the
result is tried: its logits must equal the model's own (see `cpu`).
"""

import ctypes
import logging
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.errors import BatonError
from engine.layout import KVLayout
from engine.model.attention.base import AttentionBatch, Scoring
from engine.model.attention.hook import ForwardContext
from engine.model.attention.kvcache import KVCache
from engine.model.native import structs as native
from engine.model.native.linear import PackedLinear, PackedMatrix, Team, exact_in_bf16
from engine.native.build import FORMATS
from engine.native.library import Native
from engine.worker.batch import Row

log = logging.getLogger(__name__)

ACTIVATIONS = (
    nn.functional.silu,
    lambda x: nn.functional.gelu(x, approximate="tanh"),
    nn.functional.gelu,
)
SAME = 1e-5  # measured constants with a smaller difference count as equal


class NotFused(BatonError):
    """A model whose shape the kernels do not compute; the message names the missing part."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One layer's attention: the layer's index, and its scoring."""

    layer: int
    scoring: Scoring
    num_heads: int


class PackedRows(NamedTuple):
    """Rows in the kernels' form, with the arrays that `struct` points into."""

    struct: native.Ragged
    arrays: "tuple[array[int], ...]"


class PreparedCall(NamedTuple):
    """The inputs of one forward pass."""

    packed: PackedRows
    keep: "array[int]"  # int64: indices of tokens whose logits are needed


class Decoder:
    """A model whose forward pass is one call. Shares its matrices with `PackedLinear` modules."""

    def __init__(self, team: Team, struct: native.Model, keep: list[object]) -> None:
        self._team = team
        self._struct = struct
        self._keep = keep
        self._handle: int | None = None
        self.vocab_size = struct.head.rows
        self._logits = torch.empty(0, self.vocab_size)

    def weights(self) -> Iterator[native.Weight]:
        """Returns every matrix of the decoder. Changes to them take effect at the next `open`."""
        yield self._struct.head
        for layer in self._struct.layers[: self._struct.num_layers]:
            yield from layer.qkv[: layer.num_qkv]
            yield from (layer.output, layer.gate, layer.up, layer.down)

    def open(self, cache: KVCache) -> None:
        """Uses this cache from now on."""
        self.close()
        self._cache = cache_struct(cache, self._team.library)
        self._buffer = cache.buffer
        self._block_size = cache.layout.block_size
        self._handle = self._team.library.baton_decoder_open(
            self._team.handle, ctypes.byref(self._struct), ctypes.byref(self._cache)
        )

    def close(self) -> None:
        """Drops the cache."""
        if self._handle is not None:
            self._team.library.baton_decoder_close(self._handle)
            self._handle = self._buffer = None

    def prepare(
        self, rows: Sequence[Row], keep: Sequence[int], origins: Sequence[int] = ()
    ) -> PreparedCall:
        """Makes the inputs of `launch`: rows, and the tokens of the flat batch whose logits are
        wanted.

        Each row's entry in `origins` is added to the positions of its tokens.
        """
        packed = self.pack(rows)
        if origins:
            far = array("q", origins)
            packed.struct.origins = address_of(far)
            packed = PackedRows(packed.struct, (*packed.arrays, far))
        return PreparedCall(packed, array("q", keep))

    def launch(self, prepared: PreparedCall) -> torch.Tensor:
        """Computes logits [num_keep, vocab] fp32."""
        num_keep = len(prepared.keep)
        logits = torch.empty(num_keep, self.vocab_size)
        wanted = native.NativeWanted(address_of(prepared.keep), logits.data_ptr(), num_keep)
        self._team.library.baton_decoder_forward(
            self._handle, ctypes.byref(prepared.packed.struct), ctypes.byref(wanted)
        )
        return logits

    def logits(self, num_rows: int) -> torch.Tensor:
        """Returns memory [num_rows, vocab] for logits; every call gets the same memory."""
        if num_rows > len(self._logits):
            self._logits = torch.empty(2 * num_rows, self.vocab_size)
        return self._logits[:num_rows]

    def draft(self, rows: PackedRows, logits: torch.Tensor, proposals: native.Proposals) -> None:
        """Runs all passes of a draft model and fills `proposals`.

        `logits` [proposals.num_rows, vocab] is working memory. Raises IndexError if a draw names an
        id that is not in the vocabulary.
        """
        run = self._team.library.baton_decoder_draft
        self._run(run, rows, logits, proposals)

    def verify(self, rows: PackedRows, logits: torch.Tensor, choices: native.Choices) -> None:
        """Runs a pass over rows and the tokens proposed behind them; fills `logits` and `choices`.

        Raises IndexError if a draw names an id that is not in the vocabulary.
        """
        run = self._team.library.baton_decoder_verify
        self._run(run, rows, logits, choices)

    def draft_and_verify(
        self,
        rows: PackedRows,
        logits: torch.Tensor,
        choices: native.Choices,
        *,
        draft: "Decoder",
        seen: PackedRows,
        drafting: native.NativeDrafting,
    ) -> None:
        """Runs `draft`, which computes the rows `seen`, and then `verify`."""
        run = self._team.library.baton_decoder_speculate
        more = draft._handle, ctypes.byref(seen.struct), ctypes.byref(drafting)
        self._run(run, rows, logits, choices, *more)

    def _run(
        self,
        run: Callable,
        rows: PackedRows,
        logits: torch.Tensor,
        struct: ctypes.Structure,
        *more: object,
    ) -> None:
        pointers = ctypes.byref(rows.struct), logits.data_ptr(), ctypes.byref(struct)
        if not run(self._handle, *pointers, *more):
            raise IndexError(f"a choice names ids beyond a vocabulary of {self.vocab_size}")

    def pack(self, rows: Sequence[Row], ahead: Sequence[int] = ()) -> PackedRows:
        """Packs rows for `draft` and `verify`; for `ahead` see the function `pack`."""
        return pack(rows, self._block_size, ahead)


def pack(rows: Sequence[Row], block_size: int, ahead: Sequence[int] = ()) -> PackedRows:
    """Packs rows for the kernels. Entry i of `ahead` is the number of tokens that may follow row
    i.
    """
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
    first, num_rows = address_of(numbers), len(lens)
    nth = [first + n * num_rows * numbers.itemsize for n in range(4)]
    struct = native.Ragged(address_of(ids), nth[0], nth[1], nth[3], nth[2], num_rows)
    return PackedRows(struct, (ids, numbers))


def address_of(numbers: "array[int]") -> int:
    """Returns the address of an array's values, valid until a value is appended."""
    return numbers.buffer_info()[0]


def cache_struct(cache: KVCache, library: Native) -> native.Cache:
    """Returns the cache in the kernels' form. Raises BuildError or OSError if no kernels serve its
    format.
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
    """Returns the batch in the kernels' form; valid as long as `batch` lives."""
    return native.Batch(
        cu_seqlens_q=batch.cu_seqlens_q.data_ptr(),
        context_lens=batch.context_lens.data_ptr(),
        block_tables=batch.block_tables.data_ptr(),
        slot_mapping=batch.slot_mapping.data_ptr(),
        num_rows=len(batch.context_lens),
        num_tokens=len(batch.slot_mapping),
        max_blocks=batch.block_tables.shape[1],
    )


def build(model: PreTrainedModel, context: ForwardContext, team: Team) -> Decoder:
    """Builds the decoder that computes what `model` computes. Its linear layers must be packed.
    Raises NotFused.
    """
    try:
        return _Builder(model, context, team).build()
    except (AttributeError, TypeError, RuntimeError) as error:
        raise NotFused(str(error)) from error


class _Builder:
    def __init__(self, model: PreTrainedModel, context: ForwardContext, team: Team) -> None:
        self._model = model
        self._context = context
        self._team = team
        self._keep: list[object] = []

    def build(self) -> Decoder:
        base = self._model.get_decoder()
        calls = _record(self._model, self._context)
        heads = {call.num_heads for call in calls}
        if [call.layer for call in calls] != list(range(len(base.layers))) or len(heads) > 1:
            raise NotFused("its layers do not each attend once, with the same heads")
        ropes: list[tuple[torch.Tensor, float]] = []
        layers = (native.Layer * len(base.layers))()
        for layer, module, call in zip(layers, base.layers, calls, strict=True):
            self._fill_layer(layer, module, call.scoring)
            layer.rope = _index_of(ropes, _rope(base.rotary_emb, module))
        first = base.layers[0]
        text = self._model.config.get_text_config(decoder=True)
        embedding, scale = self._embedding(base.embed_tokens)
        struct = native.Model(
            layers=layers,
            ropes=self._ropes(ropes),
            embedding=embedding.data_ptr(),
            final_norm=self._norm(base.norm),
            head=self._linear(self._model.get_output_embeddings()).struct,
            num_layers=len(layers),
            num_ropes=len(ropes),
            hidden=embedding.shape[1],
            num_heads=heads.pop(),
            feed_forward=layers[0].down.cols,
            embedding_kind=native.BF16 if embedding.dtype is torch.bfloat16 else native.FP32,
            activation=_activation(first.mlp),
            epsilon=_epsilon(first.input_layernorm),
            embedding_scale=scale,
            logit_softcap=getattr(text, "final_logit_softcapping", None) or 0.0,
        )
        self._keep += [layers, self._model]
        return Decoder(self._team, struct, self._keep)

    def _fill_layer(self, layer: native.Layer, module: nn.Module, scoring: Scoring) -> None:
        attention, mlp = module.self_attn, module.mlp
        merged = getattr(attention, "qkv_proj", None)
        parts = [merged] if merged else [attention.q_proj, attention.k_proj, attention.v_proj]
        for i, part in enumerate(parts):
            layer.qkv[i] = self._linear(part).struct
        layer.num_qkv = len(parts)
        if len({layer.qkv[i].kind for i in range(len(parts))}) > 1:
            raise NotFused("queries, keys and values have weights of different formats")
        layer.output = self._linear(attention.o_proj).struct
        layer.gate, layer.up = self._gate_and_up(mlp)
        layer.down = self._linear(mlp.down_proj).struct
        layer.input_norm = self._norm(module.input_layernorm)
        for name, field in (("q_norm", "query_norm"), ("k_norm", "key_norm")):
            norm = getattr(attention, name, None)
            if norm is not None:
                setattr(layer, field, self._norm(norm))
        before = getattr(module, "pre_feedforward_layernorm", None)
        if before is None:
            layer.feed_forward_norm = self._norm(module.post_attention_layernorm)
        else:
            layer.post_attention_norm = self._norm(module.post_attention_layernorm)
            layer.feed_forward_norm = self._norm(before)
            layer.post_feed_forward_norm = self._norm(module.post_feedforward_layernorm)
        layer.scoring = native.NativeScoring(
            scaling=scoring.scaling, softcap=scoring.softcap or 0.0, window=scoring.window or 0
        )

    def _gate_and_up(self, mlp: nn.Module) -> tuple[native.Weight, native.Weight]:
        merged = getattr(mlp, "gate_up_proj", None)
        if merged is None:
            gate, up = (self._linear(x).struct for x in (mlp.gate_proj, mlp.up_proj))
            if gate.kind != up.kind:
                raise NotFused("gate and up have weights of different formats")
            return gate, up
        matrix = self._linear(merged)
        half = matrix.struct.rows // 2
        if half % self._team.library.baton_panel() or matrix.bias is not None:
            raise NotFused("gate and up share a matrix and a panel")
        gate, up = (native.Weight.from_buffer_copy(matrix.struct) for _ in range(2))
        gate.rows = up.rows = half
        up.panels += matrix.panels.nbytes // 2
        up.scales += half * matrix.scales.element_size()
        up.offsets += half * matrix.offsets.element_size()
        return gate, up

    def _linear(self, module: nn.Module) -> PackedMatrix:
        if not isinstance(module, PackedLinear):
            raise NotFused(f"a {type(module).__name__} where a linear layer was expected")
        return module.matrix

    def _norm(self, module: nn.Module) -> int:
        """Returns the address of the norm's factors. They are measured: the norm maps ones to
        almost exactly its factors.
        """
        size = module.weight.shape[0]
        scale = (1.0 + _epsilon(module)) ** 0.5
        factors = (module(torch.ones(1, size))[0] * scale).float().contiguous()
        self._keep.append(factors)
        return factors.data_ptr()

    def _embedding(self, module: nn.Embedding) -> tuple[torch.Tensor, float]:
        table = module.weight.detach().float().contiguous()
        token = int(table.abs().amax(1).argmax())
        largest = int(table[token].abs().argmax())
        scale = float(module(torch.tensor([token]))[0, largest] / table[token, largest])
        if exact_in_bf16(table):
            table = table.bfloat16()
        self._keep.append(table)
        return table, scale

    def _ropes(self, ropes: Sequence[tuple[torch.Tensor, float]]) -> ctypes.Array[native.Rope]:
        structs = (native.Rope * len(ropes))()
        for struct, (frequencies, scale) in zip(structs, ropes, strict=True):
            struct.inverse_frequencies = frequencies.data_ptr()
            struct.rotary_dim = 2 * len(frequencies)
            struct.scale = scale
            self._keep.append(frequencies)
        self._keep.append(structs)
        return structs


def _record(model: PreTrainedModel, context: ForwardContext) -> list[LayerCall]:
    """Finds the arguments of each layer's attention by computing one token."""
    calls: list[LayerCall] = []

    def attend(query, _key, _value, _cache, layer, _batch, scoring):
        calls.append(LayerCall(layer, scoring, query.shape[1]))
        return torch.zeros_like(query)

    before = context.attend, context.cache
    context.attend, context.cache = attend, object()
    try:
        model(
            input_ids=torch.zeros(1, 1, dtype=torch.long),
            position_ids=torch.zeros(1, 1, dtype=torch.long),
            use_cache=False,
        )
    finally:
        context.attend, context.cache = before
    return calls


def _rope(rotary: nn.Module, layer: nn.Module) -> tuple[torch.Tensor, float]:
    """Returns the inverse frequencies and the scale; some models have them for each type of
    layer.
    """
    kind = getattr(layer.self_attn, "layer_type", None)
    prefix = f"{kind}_" if hasattr(rotary, f"{kind}_inv_freq") else ""
    frequencies = getattr(rotary, f"{prefix}inv_freq").float().contiguous()
    return frequencies, float(getattr(rotary, f"{prefix}attention_scaling"))


def _index_of(ropes: list[tuple[torch.Tensor, float]], rope: tuple[torch.Tensor, float]) -> int:
    for i, (frequencies, scale) in enumerate(ropes):
        if scale == rope[1] and torch.equal(frequencies, rope[0]):
            return i
    ropes.append(rope)
    return len(ropes) - 1


def _activation(mlp: nn.Module) -> int:
    """Finds the known activation function that the feed-forward layer uses."""
    function = getattr(mlp, "act_fn", None) or mlp.activation_fn
    x = torch.linspace(-6, 6, 97)
    for index, known in enumerate(ACTIVATIONS):
        if torch.allclose(function(x), known(x), rtol=0, atol=SAME):
            return index
    raise NotFused(f"an activation that is not known: {function}")


def _epsilon(norm: nn.Module) -> float:
    epsilon = getattr(norm, "variance_epsilon", None)
    return float(norm.eps if epsilon is None else epsilon)
