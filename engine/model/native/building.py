"""Finds the parts of a transformers model that the kernels compute in one call per forward pass.

This module does not use the names of models. `build` looks for the parts that decoders of Llama's
shape have. It measures properties where possible: the factors of a norm, the scale of an embedding,
the activation function, the scoring of each layer. It raises NotFused if a part is missing.
Afterwards the result is tried: its logits must equal the model's own (see `cpu`).
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.errors import BatonError
from engine.model.attention.base import Scoring
from engine.model.attention.hook import ForwardContext
from engine.model.native import structs as native
from engine.model.native.decoder import Decoder
from engine.model.native.linear import PackedLinear, PackedMatrix, Team, exact_in_bf16

ACTIVATIONS = (
    nn.functional.silu,
    lambda x: nn.functional.gelu(x, approximate="tanh"),
    nn.functional.gelu,
)
SAME = 1e-5  # measured constants with a smaller difference are considered equal


class NotFused(BatonError):
    """Raised for a model whose shape the kernels do not compute. The message names the missing
    part.
    """


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The attention call of one layer: the layer's index, and its scoring."""

    layer: int
    scoring: Scoring
    num_heads: int


def build(model: PreTrainedModel, context: ForwardContext, team: Team) -> Decoder:
    """Builds a decoder that computes the same as `model`. The linear layers of `model` must be
    packed. Raises NotFused.
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
        """Returns the address of a norm's factors. They are measured: for an input of ones, the
        norm's output is almost exactly its factors.
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
    """Records the arguments of each layer's attention by computing one token."""
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
    """Returns the inverse frequencies and the scale of the rotary embeddings. Some models have one
    pair for each type of layer.
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
    """Returns the known activation function that the feed-forward layer uses."""
    function = getattr(mlp, "act_fn", None) or mlp.activation_fn
    x = torch.linspace(-6, 6, 97)
    for index, known in enumerate(ACTIVATIONS):
        if torch.allclose(function(x), known(x), rtol=0, atol=SAME):
            return index
    raise NotFused(f"an activation that is not known: {function}")


def _epsilon(norm: nn.Module) -> float:
    epsilon = getattr(norm, "variance_epsilon", None)
    return float(norm.eps if epsilon is None else epsilon)
